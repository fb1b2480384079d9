"""The registry as an ASGI application: finds the route, checks content types, answers as Confluent's server does.

Every error is `{"error_code": …, "message": …}`; the first three digits of the code are the HTTP status. A path may
begin with `/contexts/CONTEXT`, which is then the context of every subject and id in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import msgspec

from millstream.client.admin.schemas import SchemaClient
from millstream.core.errors import CatalogUnavailable, MillstreamError, SchemaRegistryError, StorageFailure
from millstream.core.schema import RegistryCode
from millstream.gateway.api.dispatch import QUERY_FIELDS_MAX, PathTree, Scope, Send
from millstream.gateway.api.problem import Refused, retry_after, status_of
from millstream.gateway.api.route import JSON, Lane
from millstream.gateway.api.services import Services
from millstream.gateway.callers import Callers
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.registry.routes import ROUTES, PlainText, RegistryRequest, RegistryRoute
from millstream.gateway.request_memory import ClientDisconnected, Receive, RequestMemory

_logger = logging.getLogger(__name__)

PREFIX: Final = "/registry"
CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_ACCEPTED: Final = (CONTENT_TYPE, "application/vnd.schemaregistry+json", JSON, "application/octet-stream")
_CONTEXTS: Final = b"/contexts/"


class RegistryApp:
    """Serves the registry's routes below a prefix."""

    def __init__(
        self, services: Services, site: OriginCheck, callers: Callers | None = None, *, prefix: str = PREFIX
    ) -> None:
        self._services = services
        self._site = site
        self._callers = callers
        """Authenticates callers; None where everyone may do everything."""
        self._prefix = prefix.encode()
        self._tree: PathTree[RegistryRoute] = PathTree()
        for route in ROUTES:
            self._tree.add(route, route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            answer = await self._authenticated(scope, receive)
        except ClientDisconnected:
            return
        except SchemaRegistryError as error:
            await self._send_error(send, error.code, str(error))
        except Refused as error:
            await self._send_error(send, error.status, _phrase(error), error.headers)
        except (CatalogUnavailable, StorageFailure) as error:
            await self._send_error(send, RegistryCode.STORE_FAILED, str(error))
        except MillstreamError as error:
            await self._send_error(send, status_of(error), str(error), retry_after(error))
        except Exception:
            _logger.exception("a request failed", extra={"path": scope["path"]})
            await self._send_error(send, HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed; see its log")
        else:
            kind = _content_type(dict(scope["headers"]).get(b"accept", b""))
            content = answer.text.encode() if isinstance(answer, PlainText) else msgspec.json.encode(answer)
            await self._send(send, HTTPStatus.OK, content, kind)

    async def _authenticated(self, scope: Scope, receive: Receive) -> Any:
        """Serve with the rights of the caller."""
        if self._callers is None:
            return await self._serve(self._services, scope, receive)
        client = scope.get("client")
        async with self._callers.acting_for(scope["headers"], "" if client is None else str(client[0])) as caller:
            return await self._serve(caller.services, scope, receive)

    async def _serve(self, services: Services, scope: Scope, receive: Receive) -> Any:
        context, path = _split_context(scope["raw_path"].partition(b"?")[0].removeprefix(self._prefix))
        route, names = self._tree.find(scope["method"], path)
        services.check_started()
        headers = dict(scope["headers"])
        self._site.check(headers)
        if _content_type(headers.get(b"accept", b"")) is None:
            raise Refused(HTTPStatus.NOT_ACCEPTABLE, "HTTP 406 Not Acceptable")
        pressure = services.pressure
        pressure.enter(Lane.ADMIN)
        memory = RequestMemory(pressure, Lane.ADMIN)
        try:
            body = b""
            if scope["method"] in ("POST", "PUT"):
                _check_body_type(headers)
                body = await memory.read(headers, receive)
            request = RegistryRequest(names, _query(scope["query_string"]), body, context)
            return await route.handle(SchemaClient(services.client), request)
        finally:
            memory.release()
            pressure.leave(Lane.ADMIN)

    async def _send_error(self, send: Send, code: int, message: str, more: Mapping[str, str] | None = None) -> None:
        status = code if code < 1000 else code // 100
        content = msgspec.json.encode({"error_code": int(code), "message": message})
        await self._send(send, status, content, CONTENT_TYPE, more)

    async def _send(
        self, send: Send, status: int, content: bytes, kind: str | None, more: Mapping[str, str] | None = None
    ) -> None:
        self._services.pressure.count(status)
        headers = [
            (b"content-type", (kind or CONTENT_TYPE).encode()),
            (b"content-length", b"%d" % len(content)),
            *((name.encode(), value.encode()) for name, value in (more or {}).items()),
        ]
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _split_context(path: bytes) -> tuple[str, bytes]:
    """Separate the context that a path begins with."""
    path = path.rstrip(b"/") or b"/"
    if not path.startswith(_CONTEXTS):
        return "", path
    named, slash, rest = path.removeprefix(_CONTEXTS).partition(b"/")
    name = unquote(named.decode("ascii", "replace")).strip(":")
    context = name if name.startswith(".") else f".{name}"
    return ("" if context == "." else context), slash + rest if slash else b"/"


def _query(text: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(text.decode("ascii"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the query string cannot be parsed: {error}") from None


def _content_type(accept: bytes) -> str | None:
    """The content type of an answer; None if the client takes none that there is."""
    wanted = [one.partition(";")[0].strip().lower() for one in accept.decode("latin-1").split(",") if one.strip()]
    if not wanted:
        return CONTENT_TYPE
    for one in wanted:
        if one in ("*/*", "application/*", CONTENT_TYPE, "application/vnd.schemaregistry+json"):
            return CONTENT_TYPE if one != "application/vnd.schemaregistry+json" else one
    return JSON if JSON in wanted else None


def _check_body_type(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if (kind and kind not in _ACCEPTED) or b"content-encoding" in headers:
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "HTTP 415 Unsupported Media Type")


def _phrase(error: Refused) -> str:
    """What Confluent's server says of requests that reach none of its resources."""
    if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return f"HTTP {int(error.status)} {error.status.phrase}"
    return error.detail
