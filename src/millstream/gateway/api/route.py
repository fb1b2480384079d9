"""Routes of the API: the types that validate requests also generate the OpenAPI document."""

from __future__ import annotations

import re
from asyncio import Future
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from millstream.gateway.api.problem import invalid

if TYPE_CHECKING:
    from millstream.gateway.api.services import Services
    from millstream.gateway.pressure import RequestMemory


_KINDS: Final = ("string", "number", "boolean")

GivenSettings = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"additionalProperties": {"type": list(_KINDS)}}),
]
ChangedSettings = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"additionalProperties": {"type": [*_KINDS, "null"]}}),
]


def texts_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Convert settings to text; raise `Refused` that names the one that does not fit."""
    return {name: _text(name, value, "a string, a number, true or false") for name, value in settings.items()}


def changes_of(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Convert changes of settings; null resets one to its default."""
    kinds = "a string, a number, true, false or null"
    return {name: None if value is None else _text(name, value, kinds) for name, value in settings.items()}


def _text(name: str, value: Any, kinds: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float):
        return str(value)
    kind = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "null"
    raise invalid(f"the setting {name!r} must be {kinds}, not {kind}")


_NAME: Final = re.compile(r"{(\w+)}")

Q = TypeVar("Q")
B = TypeVar("B")

PREFIX: Final = "/v1"
JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream"

TopicName = Annotated[str, Meta(min_length=1, max_length=249, pattern="^[a-zA-Z0-9._-]+$")]
PartitionNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OffsetNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_AnyName = Annotated[str, Meta(min_length=1, max_length=249)]
_NAMES: Final[dict[str, Any]] = {"topic": TopicName, "partition": PartitionNumber, "offset": OffsetNumber}
"""The types of names in paths; all others are text."""


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters, or no body."""


_NO_FIELDS: Final[Any] = NoFields


class Lane(IntEnum):
    """Requests that share a limit, so that one kind cannot crowd out the others."""

    PUBLISH = 0
    WAIT = 1
    """Requests that wait for messages, each with a connection to the broker."""
    ADMIN = 2


@dataclass(slots=True)
class Request(Generic[Q, B]):
    path: Mapping[str, Any]
    query: Q
    body: B
    headers: Mapping[bytes, bytes]
    memory: RequestMemory
    address: str = ""
    """The address of the client."""
    disconnected: Future[None] | None = None
    """Done when the client has disconnected; only for requests that wait."""
    undelivered: Callable[[], Awaitable[None]] | None = None
    """Set by a route that waits: awaited if the client does not receive the response."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response with a status other than the route's usual one."""

    status: HTTPStatus
    content: Any


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """A response without end: pieces of an event stream."""

    pieces: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class Route(Generic[Q, B]):
    method: str
    path: str
    """As in OpenAPI, with names in braces; relative to `/v1`."""
    summary: str
    handle: Callable[[Services, Request[Q, B]], Awaitable[Any]]
    response: type | None
    """The type of the response; None if it has no body."""
    _: KW_ONLY
    tag: str = ""
    """Its section of the OpenAPI document; empty for the first part of the path."""
    other_response: type | None = None
    """The type of the response to bodies in another form."""
    query: type[Q] = _NO_FIELDS
    body: type[B] = _NO_FIELDS
    """`bytes` passes the body on unparsed; `forms` lists what it may be."""
    forms: Mapping[str, type] = field(default_factory=dict)
    """Content types other than JSON, with the types they hold."""
    headers: type | None = None
    """The request headers for the OpenAPI document; handlers read them by the same type."""
    status: HTTPStatus = HTTPStatus.OK
    """The status of a response that has a body."""
    more: Mapping[HTTPStatus, str] = field(default_factory=dict)
    """Further statuses of the same response, with their meaning."""
    lane: Lane = Lane.ADMIN
    streams: bool = False
    leases: bool = False
    """Whether a GET leases messages: pages of other sites must not cause it, even if they cannot read the response."""

    @property
    def usual_status(self) -> HTTPStatus:
        return HTTPStatus.NO_CONTENT if self.response is None and not self.streams else self.status

    @property
    def section(self) -> str:
        return self.tag or self.path.split("/")[1].replace("-", " ")

    @property
    def responses(self) -> tuple[type, ...]:
        return tuple(response for response in (self.response, self.other_response) if response is not None)

    @property
    def names(self) -> dict[str, Any]:
        return {name: _NAMES.get(name, _AnyName) for name in _NAME.findall(self.path)}
