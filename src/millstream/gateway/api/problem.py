"""HTTP errors: RFC 9457 problem documents, and the status of each error class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from millstream.core import errors

CONTENT_TYPE: Final = "application/problem+json"
RETRY_S: Final = 1
"""The `Retry-After` of transient errors."""

_STATUSES: Final[tuple[tuple[type[errors.MillstreamError], HTTPStatus], ...]] = (
    (errors.InvalidRequest, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.AuthenticationFailed, HTTPStatus.UNAUTHORIZED),
    (errors.NotAuthorized, HTTPStatus.FORBIDDEN),
    (errors.NotFound, HTTPStatus.NOT_FOUND),
    (errors.Conflict, HTTPStatus.CONFLICT),
    (errors.GroupRejected, HTTPStatus.CONFLICT),
    (errors.ProducerRejected, HTTPStatus.CONFLICT),
    (errors.TransactionRejected, HTTPStatus.CONFLICT),
    (errors.ElectionRefused, HTTPStatus.CONFLICT),
    (errors.BatchTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (errors.BatchRejected, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.OffsetOutOfRange, HTTPStatus.NOT_FOUND),
    (errors.LogUnavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.NotLeader, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.NotEnoughReplicas, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.CoordinatorUnavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.StoreUnavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.CatalogUnavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.FilterUnavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.BrokerUnreachable, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.QuotaExceeded, HTTPStatus.TOO_MANY_REQUESTS),
    (errors.NotStoredInTime, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.RequestTimedOut, HTTPStatus.GATEWAY_TIMEOUT),
    (errors.RequestRefused, HTTPStatus.BAD_GATEWAY),
    (errors.ProtocolViolation, HTTPStatus.BAD_GATEWAY),
)


class Refused(Exception):
    """The gateway refuses a request; `more` holds members that only this type of problem has."""

    def __init__(
        self, status: HTTPStatus, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.more = more


def invalid(detail: str) -> Refused:
    """Refuse a request that is well-formed but invalid."""
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, detail)


def stopped() -> Refused:
    """Refuse a request because the gateway is stopping and the response did not arrive in time."""
    return Refused(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the node is stopping and the outcome is unknown; check it, or send the request to another node",
        headers={"retry-after": str(RETRY_S)},
    )


def status_of(error: errors.MillstreamError) -> HTTPStatus:
    if isinstance(error, errors.SchemaRegistryError):
        # The codes of the registry begin with a status.
        return HTTPStatus(int(str(error.code)[:3]))
    statuses = (status for kind, status in _STATUSES if isinstance(error, kind))
    return next(statuses, HTTPStatus.INTERNAL_SERVER_ERROR)


def refusal_of(error: errors.MillstreamError) -> Refused:
    return Refused(status_of(error), str(error), headers=retry_after(error))


def retry_after(error: errors.MillstreamError) -> dict[str, str]:
    if isinstance(error, errors.QuotaExceeded):
        return {"retry-after": str(math.ceil(error.wait_s))}
    return {"retry-after": str(RETRY_S)} if status_of(error) is HTTPStatus.SERVICE_UNAVAILABLE else {}


def problem_document(path: str, status: int, detail: str, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": path,
        **more,
    }


class JSONLine(JSONResponse):
    def render(self, content: Any) -> bytes:
        return super().render(content) + b"\n"


def problem(request: Request, status: int, detail: str, **more: Any) -> JSONResponse:
    return JSONLine(problem_document(request.url.path, status, detail, more), status, media_type=CONTENT_TYPE)


def refused(request: Request, error: Exception) -> JSONResponse:
    """Respond to an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    details = {
        HTTPStatus.NOT_FOUND: f"there is no page {request.url.path}; GET / lists all pages",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not supported at {request.url.path}",
    }
    response = problem(request, status, details.get(HTTPStatus(status), str(error)))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def failed(request: Request, error: Exception) -> JSONResponse:
    """Respond after an internal error; the log has the traceback."""
    return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed; see its log for the reason")
