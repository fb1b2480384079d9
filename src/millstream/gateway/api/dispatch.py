"""The API under `/v1` as an ASGI application: finds the route, validates the request, responds in JSON.

Every request passes through here, so this is plain ASGI and creates no object that is not needed. Routes declare what
is validated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Generic, NamedTuple, TypeVar, get_args
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from millstream.core.errors import AuthenticationFailed, BrokerUnreachable, MillstreamError
from millstream.core.json_problem import plain_problem
from millstream.core.tasks import cancel_and_wait
from millstream.gateway.api.event_stream import event, send_events
from millstream.gateway.api.problem import (
    CONTENT_TYPE,
    RETRY_S,
    Refused,
    invalid,
    problem_document,
    refusal_of,
    stopped,
)
from millstream.gateway.api.route import JSON, PREFIX, Lane, NoFields, Request, Response, Route, StreamResponse
from millstream.gateway.api.services import Services
from millstream.gateway.callers import Callers
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.pressure import ClientDisconnected, Receive, RequestMemory

_logger = logging.getLogger(__name__)

S = TypeVar("S")


class PathTree(Generic[S]):
    """Handlers by path: literal segments first, then named ones."""

    def __init__(self) -> None:
        self._root: _Node[S] = _Node()

    def add(self, method: str, path: str, served: S) -> None:
        node = self._root
        for segment in path.removeprefix("/").split("/"):
            node = node.below(segment)
        node.routes[method] = served

    def find(self, method: str, raw_path: bytes) -> tuple[S, dict[str, str]]:
        """Return the handler of a method and path with the names in the path; raise `Refused` if there is none."""
        node = self._root
        names: dict[str, str] = {}
        for segment in raw_path.split(b"/")[1:]:
            known = node.literal.get(segment)
            if known is None:
                known = node.named
                if known is None or not segment:
                    raise _not_found(raw_path)
                names[node.name] = _text(segment)
            node = known
        route = node.routes.get(method)
        if route is None:
            if not node.routes:
                raise _not_found(raw_path)
            raise Refused(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{method} is not supported at {_path_text(raw_path)}",
                headers={"allow": ", ".join(sorted(node.routes))},
            )
        return route, names


class _Node(Generic[S]):
    __slots__ = ("literal", "name", "named", "routes")

    def __init__(self) -> None:
        self.literal: dict[bytes, _Node[S]] = {}
        self.named: _Node[S] | None = None
        self.name = ""
        self.routes: dict[str, S] = {}

    def below(self, segment: str) -> _Node[S]:
        if not segment.startswith("{"):
            return self.literal.setdefault(segment.encode(), _Node())
        if self.named is None:
            self.named = _Node()
            self.name = segment[1:-1]
        return self.named


def _text(segment: bytes) -> str:
    try:
        return (unquote_to_bytes(segment) if b"%" in segment else segment).decode()
    except UnicodeDecodeError:
        raise invalid("the path is not valid UTF-8") from None


def _not_found(raw_path: bytes) -> Refused:
    return Refused(
        HTTPStatus.NOT_FOUND, f"there is no route {_path_text(raw_path)}; GET /openapi.json lists all routes"
    )


def _path_text(raw_path: bytes) -> str:
    return PREFIX + raw_path.decode("ascii", "backslashreplace")


QUERY_FIELDS_MAX: Final = 100

PIECE_BYTES: Final = 64 * 1024

Scope = MutableMapping[str, Any]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_encode_plain = msgspec.json.Encoder().encode


def _encode(response: Any) -> bytes:
    """Encode a response with a line end, so that a shell's prompt starts on a new line."""
    return _encode_plain(response) + b"\n"


class _Exchange(NamedTuple):
    scope: Scope
    headers: dict[bytes, bytes]
    receive: Receive
    send: Send


class Api:
    def __init__(
        self,
        routes: Iterable[Route[Any, Any]],
        services: Services,
        site: OriginCheck,
        callers: Callers | None = None,
    ) -> None:
        self._tree: PathTree[_Reader] = PathTree()
        for route in routes:
            self._tree.add(route.method, route.path, _Reader(route))
        self._services = services
        self._site = site
        self._callers = callers
        """Authenticates callers; None where everyone may do everything."""
        self._pressure = services.pressure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request; every failure becomes a problem document."""
        try:
            await self._serve(scope, receive, send)
        except ClientDisconnected:
            return
        except Refused as error:
            await self._send_problem(scope, send, error)
        except MillstreamError as error:
            refused = refusal_of(error)
            if self._callers is not None and isinstance(error, (AuthenticationFailed, BrokerUnreachable)):
                refused = await self._reauthenticate(self._callers, scope, refused)
            if refused.status is HTTPStatus.INTERNAL_SERVER_ERROR:
                _logger.exception("a request failed", extra={"path": scope["path"]})
            await self._send_problem(scope, send, refused)
        except asyncio.CancelledError:
            if not self._services.stopping.done():
                raise
            await self._send_problem(scope, send, stopped())
        except Exception:
            _logger.exception("a request failed", extra={"path": scope["path"]})
            detail = "the gateway failed; see its log for the reason"
            await self._send_problem(scope, send, Refused(HTTPStatus.INTERNAL_SERVER_ERROR, detail))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader, path = self._tree.find(scope["method"], scope["raw_path"][len(PREFIX) :])
        self._services.check_started()
        exchange = _Exchange(scope, dict(scope["headers"]), receive, send)
        self._site.check(exchange.headers)
        if reader.route.leases:
            self._site.check_cause(exchange.headers)
        if self._callers is None:
            await self._serve_with(self._services, reader, path, exchange)
            return
        async with self._callers.acting_for(scope["headers"], host_of(scope)) as caller:
            await self._serve_with(caller.services, reader, path, exchange)

    async def _reauthenticate(self, callers: Callers, scope: Scope, refused: Refused) -> Refused:
        """Authenticate the caller of a failed request again: its session may have ended, as by a password change."""
        try:
            await callers.verify_again(scope["headers"], host_of(scope))
        except Refused as error:
            return error
        except MillstreamError as error:
            return refusal_of(error)
        if refused.status is not HTTPStatus.UNAUTHORIZED:
            return refused
        _logger.warning(
            "a node does not accept the assertion of a caller", extra={"path": scope["path"], "error": refused.detail}
        )
        return Refused(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "a node does not accept this caller yet; try again later",
            headers={"retry-after": str(RETRY_S)},
        )

    async def _serve_with(self, services: Services, reader: _Reader, path: dict[str, str], exchange: _Exchange) -> None:
        scope, headers, receive, send = exchange
        route = reader.route
        with RequestMemory(self._pressure, route.lane, services.principal) as memory:
            # As the broker shows it.
            address = ":".join(map(str, scope.get("client") or ()))
            request = Request(reader.path(path), reader.query(scope["query_string"]), None, headers, memory, address)
            if route.body is not NoFields:
                if b"content-encoding" in headers:
                    raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed request bodies are not supported")
                request.body = reader.body(headers, await memory.read(headers, receive))
            if route.lane is Lane.WAIT:
                await self._wait(services, route, request, exchange)
            else:
                await self._send_response(send, route, await route.handle(services, request))

    async def _wait(
        self,
        services: Services,
        route: Route[Any, Any],
        request: Request[Any, Any],
        exchange: _Exchange,
    ) -> None:
        """Serve a route that may wait; cancel it when the client disconnects."""
        scope, _, receive, send = exchange
        disconnected = asyncio.ensure_future(wait_for_disconnect(receive))
        request.disconnected = disconnected
        is_delivered = False
        try:
            response = await route.handle(services, request)
            if isinstance(response, StreamResponse):
                self._pressure.count(HTTPStatus.OK)
                await self._stream(response, disconnected, scope, send)
                return
            # A connection that was lost in this turn of the loop is reported in the next.
            await asyncio.sleep(0)
            if not disconnected.done():
                await self._send_response(send, route, response)
                is_delivered = not disconnected.done()
        finally:
            if request.undelivered is not None and not is_delivered:
                await request.undelivered()
            await cancel_and_wait(disconnected)

    async def _stream(
        self, response: StreamResponse, disconnected: asyncio.Future[None], scope: Scope, send: Send
    ) -> None:
        """Send events while the client is connected and authorized."""
        stopping = self._services.stopping
        if self._callers is None:
            await send_events(send, response.pieces, disconnected, stopping)
            return
        lapsed = asyncio.ensure_future(self._last_event(self._callers, scope))
        try:
            await send_events(send, response.pieces, disconnected, stopping, lapsed)
        finally:
            await cancel_and_wait(lapsed)

    async def _last_event(self, callers: Callers, scope: Scope) -> bytes:
        """Wait until the caller of a stream is not authenticated any more; return the event that says so."""
        refused = await callers.until_lapsed(callers.read(scope["headers"], host_of(scope)))
        return event("error", _encode_plain(problem_document(scope["path"], refused.status, refused.detail, {})))

    async def _send_response(self, send: Send, route: Route[Any, Any], response: Any) -> None:
        status = route.usual_status
        if isinstance(response, Response):
            status, response = response.status, response.content
        self._pressure.count(status)
        content = b"" if response is None else _encode(response)
        await send_response(send, status, _JSON_HEADER if content else _NO_HEADER, content)

    async def _send_problem(self, scope: Scope, send: Send, error: Refused) -> None:
        self._pressure.count(error.status)
        document = problem_document(scope["path"], error.status, error.detail, error.more)
        more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        try:
            await send_response(send, error.status, (b"content-type", CONTENT_TYPE.encode()), _encode(document), more)
        except RuntimeError:
            # The response has started already; a stream that breaks off shows the client that it failed.
            _logger.warning("a response was cut off", extra={"path": scope["path"], "reason": error.detail})


class _Reader:
    """Validates the path, query and body of one route's requests."""

    def __init__(self, route: Route[Any, Any]) -> None:
        self.route = route
        self._query_type = route.query
        self._numbers = {name: kind for name, kind in route.names.items() if get_args(kind)[0] is int}
        self._lists = frozenset(
            field.encode_name
            for field in msgspec.structs.fields(route.query)
            if isinstance(msgspec.inspect.type_info(field.type), msgspec.inspect.ListType)
        )
        self._no_query: Any = None
        self._body = None if route.body is bytes or route.body is NoFields else msgspec.json.Decoder(route.body)

    def path(self, names: dict[str, Any]) -> dict[str, Any]:
        for name, kind in self._numbers.items():
            try:
                names[name] = msgspec.convert(names[name], kind, strict=False)
            except msgspec.ValidationError as error:
                raise invalid(f"{name} in the path is invalid: {plain_problem(error, is_text=True)}") from None
        return names

    def query(self, text: bytes) -> Any:
        if not text:
            if self._no_query is None:
                self._no_query = self._convert({})
            return self._no_query
        parameters: dict[str, Any] = {}
        for name, value in parse_pairs(text, "the query string"):
            if name in self._lists:
                parameters.setdefault(name, []).append(value)
            elif name in parameters:
                raise invalid(f"parameter {name!r} is given twice")
            else:
                parameters[name] = value
        return self._convert(parameters)

    def body(self, headers: Mapping[bytes, bytes], data: bytes) -> Any:
        """Decode the body to the route's type."""
        if self._body is None:
            return data
        content_type = headers.get(b"content-type")
        if content_type is not None and content_type.partition(b";")[0].strip().lower() != JSON.encode():
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the content type must be {JSON}", accepts=[JSON])
        return read_json(self._body, data or b"{}")

    def _convert(self, values: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(values, self._query_type, strict=False)
        except msgspec.ValidationError as error:
            problem = plain_problem(error, is_text=True, fields=_fields_of(self._query_type))
            raise invalid(f"the query is invalid: {problem}") from None


def read_json(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """Decode JSON to a type; raise `Refused` with the reason if it does not fit."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise invalid(f"the body is invalid: {plain_problem(error, fields=_fields_of(decoder.type))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None


def parse_pairs(text: bytes, what: str) -> list[tuple[str, str]]:
    """Parse a query string or a form; raise `Refused` if that fails."""
    try:
        return parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"{what} cannot be parsed: {error}") from None


def _fields_of(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [field.encode_name for field in msgspec.structs.fields(kind)]
    return []


def host_of(scope: Scope) -> str:
    """Return the caller's address, as access rules name it."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_JSON_HEADER: Final = (b"content-type", JSON.encode())

_NO_HEADER: Final = (b"cache-control", b"no-store")


async def send_response(
    send: Send, status: int, header: tuple[bytes, bytes], content: bytes, more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    headers = [header, (b"content-length", b"%d" % len(content)), *more]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    if len(content) > PIECE_BYTES:
        await send({"type": "http.response.body", "body": content, "more_body": True})
        # The end is sent once the client has read most of the content, so that its memory is accounted for until then.
        content = b""
    await send({"type": "http.response.body", "body": content})
