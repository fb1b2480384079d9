"""Errors over HTTP: problem documents as RFC 9457 describes them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

CONTENT_TYPE = "application/problem+json"


def problem(request: Request, status: int, detail: str, **more: Any) -> JSONResponse:
    """Answer with a problem document; `more` holds members that only this kind of problem has."""
    document = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": request.url.path,
        **more,
    }
    return JSONResponse(document, status, media_type=CONTENT_TYPE)


def refused(request: Request, error: Exception) -> JSONResponse:
    """Answer what routing refuses: a path or a method that is not there."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    details = {
        HTTPStatus.NOT_FOUND: f"nothing is served at {request.url.path}; GET / lists what is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not understood at {request.url.path}",
    }
    response = problem(request, status, details.get(HTTPStatus(status), str(error)))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def failed(request: Request, error: Exception) -> JSONResponse:
    """Answer when the gateway itself went wrong; the log has the traceback."""
    return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed to answer; its log says why")
