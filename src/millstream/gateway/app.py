"""The gateway's routes: health, readiness and metrics of its node, and the API.

GET /         the list of these routes
     /registry/…  Confluent Schema Registry's API, also at the root of its own port
     /console/…  the web console, with the rights of the signed-in user
     /v1/…    the API, whose routes are in `api/routes/`, with the rights of the caller
GET /openapi.json  the description of the API
GET /healthz  200 while the node works, however busy it is; for restarting a node that is stuck. 503 with the reason
              while the broker starts, and when its event loop has not responded for `STUCK_S`
GET /readyz   200 while the broker takes traffic, with warnings, else 503 with the reasons; for load balancers
GET /metrics  every number of the node as Prometheus text, for callers that may describe the cluster

Where clients authenticate, everything else stays open: it exposes only the state of the process and documentation.
Health checks of unauthenticated callers report the status without reasons, since reasons name topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream import __version__
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.gateway.api.dispatch import Api, host_of
from millstream.gateway.api.openapi import DOCS_HEADERS, docs_page, openapi_document
from millstream.gateway.api.problem import JSONLine, Refused, failed, problem, refusal_of, refused, stopped
from millstream.gateway.api.route import JSON, PREFIX
from millstream.gateway.api.route import Route as ApiRoute
from millstream.gateway.api.routes import (
    cluster,
    dead_letters,
    groups,
    listening,
    messages,
    mirrors,
    pipelines,
    publishing,
    pulling,
    subscriptions,
    topics,
    transactions,
)
from millstream.gateway.api.services import Services
from millstream.gateway.callers import Callers
from millstream.gateway.console.visit import PREFIX as CONSOLE_PREFIX
from millstream.gateway.metrics import render_metrics
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.pressure import Pressure
from millstream.gateway.registry.app import PREFIX as REGISTRY_PREFIX
from millstream.gateway.registry.app import RegistryApp
from millstream.protocol.wire.node_status import STUCK_S, UNREADY_S, BrokerStarting, Health

ROUTES: Final[tuple[ApiRoute[Any, Any], ...]] = (
    *publishing.ROUTES,
    *pulling.ROUTES,
    *listening.ROUTES,
    *messages.ROUTES,
    *topics.ROUTES,
    *subscriptions.ROUTES,
    *groups.ROUTES,
    *dead_letters.ROUTES,
    *pipelines.ROUTES,
    *mirrors.ROUTES,
    *transactions.ROUTES,
    *cluster.ROUTES,
)
"""Every route of the API."""

FetchStatus = Callable[[], Awaitable[dict[str, Any]]]
"""Requests the broker's metrics; `broker/kafka/apis/node_status.py` defines the response."""

CheckHealth = Callable[[], Awaitable[Health]]
"""Requests the broker's health, with a short timeout."""

_NO_STORE = {"cache-control": "no-store"}


def build_app(
    fetch_status: FetchStatus,
    health: CheckHealth,
    services: Services | None = None,
    site: OriginCheck | None = None,
    callers: Callers | None = None,
    registry_port: int | None = None,
    console: ASGIApp | None = None,
) -> ASGIApp:
    """Build the gateway's ASGI application; without `callers`, everyone may do everything."""
    origin_check = site or OriginCheck()
    handlers = _Pages(fetch_status, health, services.pressure if services is not None else Pressure(), callers)
    pages = Starlette(
        routes=[
            Route("/", handlers.index),
            Route("/healthz", handlers.healthz),
            Route("/readyz", handlers.readyz),
            Route("/metrics", handlers.metrics),
            Route("/openapi.json", handlers.openapi),
            Route("/docs", handlers.docs),
        ],
        exception_handlers={
            HTTPException: refused,
            Refused: _refused,
            MillstreamError: _broker_unavailable,
            Exception: failed,
        },
    )
    # The redirect to an address without its last slash would lead to the host that the request names.
    pages.router.redirect_slashes = False

    async def own_pages(scope: Scope, receive: Receive, send: Send) -> None:
        respond: ASGIApp = pages
        try:
            origin_check.check_name(dict(scope["headers"]))
        except Refused as error:
            respond = problem(Request(scope), error.status, error.detail)
        try:
            await respond(scope, receive, send)
        except asyncio.CancelledError:
            if services is None or not services.stopping.done():
                raise
            await problem(Request(scope), HTTPStatus.SERVICE_UNAVAILABLE, stopped().detail)(scope, receive, send)

    if services is None:
        return own_pages
    api = Api(ROUTES, services, origin_check, callers)
    registry = RegistryApp(services, origin_check, callers)
    own_registry = RegistryApp(services, origin_check, callers, prefix="")
    beginning, console_path, registry_path = f"{PREFIX}/".encode(), CONSOLE_PREFIX.encode(), REGISTRY_PREFIX.encode()

    def serve_any(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Tested before any other routing, since most requests are for the API, which responds to everything below its
        # prefix. With the path as it was sent: decoded, `/v1%2fx/topics` would pass for `/v1/topics`, but not at a
        # proxy.
        path: bytes = scope["raw_path"].partition(b"?")[0]
        if registry_port is not None and scope["server"][1] == registry_port:
            return own_registry(scope, receive, send)
        if path.startswith(beginning):
            return api(scope, receive, send)
        if console is not None and (path.startswith(console_path + b"/") or path == console_path):
            return console(scope, receive, send)
        is_registry = path.startswith(registry_path + b"/") or path == registry_path
        return (registry if is_registry else own_pages)(scope, receive, send)

    return serve_any


class _Pages:
    """The pages outside the API, one method each."""

    def __init__(
        self, fetch_status: FetchStatus, health: CheckHealth, pressure: Pressure, callers: Callers | None
    ) -> None:
        self._fetch_status = fetch_status
        self._health = health
        self._pressure = pressure
        self._callers = callers
        self._openapi: bytes | None = None
        self._docs: bytes | None = None

    async def index(self, request: Request) -> Response:
        links = {
            "health": "/healthz",
            "readiness": "/readyz",
            "metrics": "/metrics",
            "api": "/openapi.json",
            "docs": "/docs",
            "registry": REGISTRY_PREFIX,
            "console": CONSOLE_PREFIX,
        }
        return JSONLine({"name": "millstream", "version": __version__, "links": links})

    async def openapi(self, request: Request) -> Response:
        if self._openapi is None:
            self._openapi = msgspec.json.encode(openapi_document(ROUTES)) + b"\n"
        return Response(self._openapi, media_type=JSON)

    async def docs(self, request: Request) -> Response:
        if self._docs is None:
            self._docs = docs_page(openapi_document(ROUTES))
        return Response(self._docs, media_type="text/html", headers=DOCS_HEADERS)

    async def healthz(self, request: Request) -> Response:
        health = await self._health()
        status = health.status
        if health.silent_s >= STUCK_S or not status:
            return self._unavailable(request, [_silent(health)])
        healthy = {"status": "ok", **_nodes(status), "version": status["version"]}
        return JSONLine({**healthy, "warnings": self._warnings(health)}, headers=_NO_STORE)

    async def readyz(self, request: Request) -> Response:
        health = await self._health()
        reasons = list(health.status.get("reasons", []))
        if health.silent_s >= UNREADY_S or not health.status:
            reasons.append(_silent(health))
        if reasons:
            return self._unavailable(request, reasons)
        ready = {"status": "ready", **_nodes(health.status), "warnings": self._warnings(health)}
        return JSONLine(ready, headers=_NO_STORE)

    async def metrics(self, request: Request) -> Response:
        await self._health()
        if self._callers is None:
            status = await self._fetch_status()
        else:
            async with self._callers.acting_for(request.scope["headers"], host_of(request.scope)) as caller:
                status = await caller.services.status.fetch()
        numbers = [*status["metrics"], *self._pressure.metrics()]
        text, content_type = render_metrics(numbers, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, **_NO_STORE})

    def _warnings(self, health: Health) -> list[str]:
        busy = [_silent(health)] if health.silent_s > 0 else []
        if self._callers is not None:
            return busy
        return [*health.status["warnings"], *busy, *self._pressure.warnings()]

    def _unavailable(self, request: Request, reasons: list[str]) -> JSONResponse:
        if self._callers is not None:
            reasons = ["`millstream doctor` and the log of the node say why"]
        detail = f"the broker is not ready: {'; '.join(reasons)}"
        return problem(request, HTTPStatus.SERVICE_UNAVAILABLE, detail, reasons=reasons)


def _nodes(status: dict[str, Any]) -> dict[str, Any]:
    """Name the nodes that a status is about: a machine may have several."""
    return {"node": status["node_id"], "nodes": status.get("nodes", [status["node_id"]])}


def _silent(health: Health) -> str:
    return f"the broker's event loop has not responded for {health.silent_s:.1f} s"


def _refused(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, Refused):
        return failed(request, error)
    response = problem(request, error.status, error.detail, **error.more)
    response.headers.update(error.headers)
    return response


def _broker_unavailable(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, NotAuthorized):
        return _refused(request, refusal_of(error))
    starts = isinstance(error, BrokerStarting)
    reason = f"the broker is starting: {error}" if starts else f"the broker does not respond: {error}"
    return problem(request, HTTPStatus.SERVICE_UNAVAILABLE, reason, reasons=[reason])
