"""The one encoding of Millstream's private requests and their responses: MessagePack of typed messages.

A request is a `Request`, which declares its API key and the type of its response. A response starts with `error`,
Kafka's code (0 for success), and `message`, which explains it. New fields go to the end and have a default, so that
nodes of adjacent versions understand each other; any other change raises the version of the request.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast, get_args

import msgspec

from millstream.core.errors import InvalidRequest, ProtocolViolation
from millstream.protocol.wire.error_codes import error_from_code

if TYPE_CHECKING:
    from millstream.core.ids import NodeId
    from millstream.protocol.wire.client import Client

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(uuid_format="bytes")


def encode(message: Any) -> bytes:
    """Encode a message, or raise `InvalidRequest` for a number that is too large."""
    try:
        return _encoder.encode(message)
    except OverflowError:
        raise InvalidRequest("a number has more than 64 bits") from None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a request, without further fields."""

    error: int = 0
    message: str | None = None


class AnyResponse(Protocol):
    """Any response, including those that are encoded as arrays and do not extend `Response`."""

    @property
    def error(self) -> int: ...

    @property
    def message(self) -> str | None: ...


R = TypeVar("R", bound=AnyResponse)


class Request(msgspec.Struct, Generic[R], frozen=True):
    """A request whose response is an `R`."""

    KEY: ClassVar[int]


class EmptyRequest(msgspec.Struct, frozen=True):
    """A request without parameters, for a response that is read as a document."""


def decode(body: bytes | memoryview, kind: type[T]) -> T:
    """Decode a message from another process, or raise `ProtocolViolation`."""
    try:
        message: T = _decoder(cast("Any", kind)).decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"the {kind.__name__} cannot be decoded: {error}") from error
    return message


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode_response(body: bytes | memoryview, kind: type[R], *, about: str = "") -> R:
    """Decode a response; raise the error in it."""
    response = decode(body, kind)
    if response.error:
        raise error_from_code(response.error, response.message, about=about)
    return response


def response_type(request: Request[R]) -> type[R]:
    """Return the type of the response that a request declares."""
    return cast("type[R]", _declared_response(type(request)))


@cache
def _declared_response(request_type: type) -> Any:
    bases = next(vars(kind)["__orig_bases__"] for kind in request_type.__mro__ if "__orig_bases__" in vars(kind))
    return get_args(bases[0])[0]


async def request_private(
    client: Client, node: NodeId | None, request: Request[R], *, waits: bool = False, about: str = ""
) -> R:
    """Send a request to a node, or to any; return its response, or raise the error in it."""
    body = await client.private(node, request.KEY, encode(request), waits=waits)
    return decode_response(body, response_type(request), about=about)


NODE_STATUS_KEY = 32000
CLIENT_LIST_KEY = 32001


async def request_document(client: Client, node: NodeId | None, key: int) -> dict[str, Any]:
    """Ask a node, or any, for a document; raise the error in the response."""
    return decode_document(await client.private(node, key, encode(EmptyRequest())))


def decode_document(body: bytes | memoryview) -> dict[str, Any]:
    """Decode a response as a plain document, as HTTP and the commands print it; raise the error in it."""
    document = decode(body, dict[str, Any])
    if document["error"]:
        raise error_from_code(document["error"], document["message"])
    return document
