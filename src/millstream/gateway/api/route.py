"""What the API serves, one route each: the types that check what comes in are those that the OpenAPI page tells of."""

from __future__ import annotations

import re
from asyncio import Future
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from millstream.gateway.api.services import Services
    from millstream.gateway.request_memory import RequestMemory

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
"""What stands in a path under these names; everything else is a text."""


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters, or no body."""


class Lane(IntEnum):
    """Requests that are counted together, so that those of one kind leave room for the others."""

    PUBLISH = 0
    WAIT = 1
    """Those that wait for messages, with a connection to the broker each."""
    ADMIN = 2


@dataclass(slots=True)
class Request(Generic[Q, B]):
    """One request, checked."""

    path: Mapping[str, Any]
    query: Q
    body: B
    headers: Mapping[bytes, bytes]
    memory: RequestMemory
    gone: Future[None] | None = None
    """Done when the client has hung up; only for those that wait."""
    undelivered: Callable[[], Awaitable[None]] | None = None
    """Set by a route that waits: awaited if the client does not get the answer."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer with another status than the route's usual one."""

    status: HTTPStatus
    content: Any


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """An answer that goes on: pieces of an event stream."""

    pieces: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[Q, B]):
    """One method of one path."""

    method: str
    path: str
    """As in OpenAPI, with names in braces; below `/v1`."""
    summary: str
    tag: str
    handle: Callable[[Services, Request[Q, B]], Awaitable[Any]]
    answer: type | None
    """What comes back; None for nothing."""
    other_answer: type | None = None
    """What comes back for bodies of another form."""
    query: type[Q]
    body: type[B]
    """`bytes` takes the body as it is; `forms` tells what it may be."""
    forms: Mapping[str, type] = field(default_factory=dict)
    """Other content types than JSON, and what they hold."""
    headers: type | None = None
    """The headers it understands, for the OpenAPI page; what reads them is made from the same type."""
    status: HTTPStatus = HTTPStatus.OK
    more: Mapping[HTTPStatus, str] = field(default_factory=dict)
    """Other statuses of the same answer, and what they mean."""
    lane: Lane = Lane.ADMIN
    streams: bool = False

    @property
    def answers(self) -> tuple[type, ...]:
        """What may come back."""
        return tuple(one for one in (self.answer, self.other_answer) if one is not None)

    @property
    def names(self) -> dict[str, Any]:
        """The names in the path, and the type of what stands for each."""
        return {name: _NAMES.get(name, _AnyName) for name in _NAME.findall(self.path)}
