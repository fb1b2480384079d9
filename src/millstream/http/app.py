"""What the gateway serves: health, readiness and metrics of the node it belongs to, and the API.

GET /         what is served here
     /v1/…    the API, whose routes are in `table.py`
GET /openapi.json  what the API takes and gives
GET /healthz  200 while the gateway runs and its broker answers; for restarting a node that hangs. 503 with the reason
              while the broker starts and does not answer yet
GET /readyz   200 while the broker takes traffic, with warnings, else 503 with the reasons; for load balancers
GET /metrics  every number of the node as Prometheus text
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream import __version__
from millstream.http.api import Api
from millstream.http.exposition import render
from millstream.http.openapi import openapi_document
from millstream.http.parts import Parts
from millstream.http.problem import Refused, failed, problem, refused, stopped
from millstream.http.route import JSON, PREFIX
from millstream.http.site import Site
from millstream.http.table import ROUTES
from millstream.model.errors import MillstreamError

Ask = Callable[[], Awaitable[dict[str, Any]]]
"""Asks the broker how it is; see `kafka/apis/node_status.py` for the answer."""

_NO_STORE = {"cache-control": "no-store"}


Starting = Callable[[], str | None]
"""Why the broker does not answer yet; None when it does."""


class BrokerStarts(MillstreamError):
    """The broker is not there to be asked yet."""


def build_app(
    ask: Ask, starting: Starting = lambda: None, parts: Parts | None = None, site: Site | None = None
) -> ASGIApp:
    """Build the gateway's application over one way to ask the broker, and the parts that the API works with."""
    named = site or Site()

    async def ask_started() -> dict[str, Any]:
        reason = starting()
        if reason is not None:
            raise BrokerStarts(reason)
        return await ask()

    doors = _Doors(ask_started, list if parts is None else parts.pressure.metrics)
    pages = Starlette(
        routes=[
            Route("/", doors.index),
            Route("/healthz", doors.healthz),
            Route("/readyz", doors.readyz),
            Route("/metrics", doors.metrics),
            Route("/openapi.json", doors.openapi),
        ],
        exception_handlers={HTTPException: refused, MillstreamError: _unanswered, Exception: failed},
    )

    async def own_pages(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = pages
        try:
            named.check_name(dict(scope["headers"]))
        except Refused as error:
            answer = problem(Request(scope), error.status, error.detail)
        try:
            await answer(scope, receive, send)
        except asyncio.CancelledError:
            if parts is None or not parts.stopping.done():
                raise
            await problem(Request(scope), HTTPStatus.SERVICE_UNAVAILABLE, stopped().detail)(scope, receive, send)

    if parts is None:
        return own_pages
    api = Api(ROUTES, parts, named)
    beginning = PREFIX + "/"

    def front(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Before any other routing, since most requests are for the API, and it answers for all that is below.
        return (api if scope["path"].startswith(beginning) else own_pages)(scope, receive, send)

    return front


class _Doors:
    """One method per route."""

    def __init__(self, ask: Ask, own: Callable[[], list[dict[str, Any]]]) -> None:
        self._ask = ask
        self._own = own
        self._openapi: bytes | None = None

    async def index(self, request: Request) -> Response:
        links = {"health": "/healthz", "readiness": "/readyz", "metrics": "/metrics", "api": "/openapi.json"}
        return JSONResponse({"name": "millstream", "version": __version__, "links": links})

    async def openapi(self, request: Request) -> Response:
        if self._openapi is None:
            self._openapi = msgspec.json.encode(openapi_document(ROUTES))
        return Response(self._openapi, media_type=JSON)

    async def healthz(self, request: Request) -> Response:
        status = await self._ask()
        return JSONResponse(
            {"status": "ok", "node": status["node_id"], "version": status["version"]}, headers=_NO_STORE
        )

    async def readyz(self, request: Request) -> Response:
        status = await self._ask()
        if status["reasons"]:
            return problem(
                request,
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the broker is not ready: {'; '.join(status['reasons'])}",
                reasons=status["reasons"],
            )
        ready = {"status": "ready", "node": status["node_id"], "warnings": status.get("warnings", [])}
        return JSONResponse(ready, headers=_NO_STORE)

    async def metrics(self, request: Request) -> Response:
        status = await self._ask()
        text, content_type = render([*status["metrics"], *self._own()], request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, **_NO_STORE})


def _unanswered(request: Request, error: Exception) -> JSONResponse:
    starts = isinstance(error, BrokerStarts)
    reason = f"the broker starts: {error}" if starts else f"the broker does not answer: {error}"
    return problem(request, HTTPStatus.SERVICE_UNAVAILABLE, reason, reasons=[reason])
