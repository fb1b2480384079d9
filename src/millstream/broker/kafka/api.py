"""The base of all APIs of the Kafka front end.

An API serves a range of versions but is written once, against the newest of them: `upgrade` turns a request of
any version into that one, `handle` responds to it, `downgrade` turns the response back. `respond` does all three.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar, get_args, overload
from urllib.parse import quote
from uuid import UUID

import msgspec
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32, i32Timedelta

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.net.connection import EventualResponse
from millstream.broker.net.partial_frame import PipelinedRequests
from millstream.broker.net.presence import Presence
from millstream.broker.net.response import Buffers, Promise, start
from millstream.broker.security.changes import Changes, record_changes
from millstream.core.acl import CLUSTER_NAME, OPERATIONS, Operation, ResourceType
from millstream.core.credential import Owner
from millstream.core.errors import (
    InvalidAssignment,
    MillstreamError,
    ProtocolViolation,
    RequestTimedOut,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.quota import ANONYMOUS
from millstream.core.topic import Topic
from millstream.protocol.messages.codec import (
    RequestHeader,
    build_message,
    load_request_class,
    load_response_class,
    response_head,
)
from millstream.protocol.messages.shape import reshape
from millstream.protocol.private.message import Response, decode, encode
from millstream.protocol.private.subscription_messages import ReceiveRequest, SettleRequest
from millstream.protocol.wire.error_codes import CODES

if TYPE_CHECKING:
    from millstream.broker.security.gate import Session
    from millstream.broker.security.rights import Rights

_logger = logging.getLogger(__name__)

M = TypeVar("M")


class Versioned(NamedTuple, Generic[M]):
    version: int
    message: M


NO_THROTTLE: Final = i32Timedelta.parse(timedelta(0))


NOT_REQUESTED: Final = i32(-(2**31))


def _all_operations(kind: ResourceType) -> i32:
    return i32(sum(1 << operation for operation in OPERATIONS[kind]))


TOPIC_OPERATIONS: Final = _all_operations(ResourceType.TOPIC)
CLUSTER_OPERATIONS: Final = _all_operations(ResourceType.CLUSTER)
GROUP_OPERATIONS: Final = _all_operations(ResourceType.GROUP)

SECURITY_DISABLED: Final = (
    "this node does not authenticate clients: every client may do everything, and there are no access rules; "
    "`millstream serve --auth required` enables them (docs/security.md)"
)

RequestT = TypeVar("RequestT")

ResponseT = TypeVar("ResponseT")


def _cannot_mute(seconds: float) -> None:
    """Do nothing: a client without a connection cannot be held back."""


Need = tuple[Operation, ResourceType, str]


def check_needs(needs: Iterable[Need], rights: Rights) -> None:
    """Raise the error of the first permission that a client lacks."""
    for operation, kind, name in needs:
        rights.require(operation, kind, name)


@dataclass(slots=True, kw_only=True)
class RefusedBatch:
    """A batch of an idempotent producer that was refused and will be sent again."""

    epoch: int
    sequence: int
    code: ErrorCode
    reason: str
    behind: int = 0
    """How many batches that were sent behind it have been refused."""


@dataclass(slots=True, kw_only=True)
class ClientInfo:
    """The client of a connection, filled in as requests arrive."""

    connection_id: int
    host: str
    reached_at: str = "127.0.0.1"
    """The address of this machine that it connected to."""
    address: str = ""
    client_id: str = ""
    listener: str = ""
    rights: Rights | None = None
    """Its rights; None if clients are not authorized."""
    session: Session | None = None
    """How it has authenticated, if that is required."""
    software_name: str = "unknown"
    software_version: str = "unknown"
    mute: Callable[[float], None] = _cannot_mute
    """Stops reading requests from the client for some seconds."""
    count_as_follower: Callable[[], None] = lambda: None
    """Charges the connection to the account of replication."""
    presence: Presence = field(default_factory=Presence)
    """Whether the client is still connected."""
    pipelined: PipelinedRequests = field(default_factory=PipelinedRequests)
    """The bytes that arrived behind the request that is being served."""
    refused_batches: dict[tuple[str | UUID, int, int], RefusedBatch] = field(default_factory=dict)
    produce_requests: int = 0
    produced_bytes: int = 0
    fetch_requests: int = 0
    fetched_bytes: int = 0

    @property
    def user(self) -> str:
        """The name of its principal, which quotas use."""
        return ANONYMOUS if self.rights is None else self.rights.principal.removeprefix("User:")


W = TypeVar("W", ReceiveRequest, SettleRequest)


def with_owned_worker(request: W, client: ClientInfo) -> W:
    """Prefix the worker of a request with its principal."""
    worker = owned_name(request.worker, client)
    return request if worker == request.worker else msgspec.structs.replace(request, worker=worker)


def owned_name(worker: str, client: ClientInfo) -> str:
    """Prefix a worker's name with its principal, so that other principals cannot settle its leases."""
    rights = client.rights
    if rights is None or rights.node_id is not None:
        return worker
    # The quoted principal has no spaces, so it ends at the first one.
    return f"{quote(rights.principal, safe=':=,@')} {worker}"


def owner_of(client: ClientInfo) -> Owner | None:
    """Return the client as the owner of its declarations; None if it is not authenticated, or acts for others."""
    return None if client.rights is None else client.rights.owner


def cluster_operations(client: ClientInfo) -> i32:
    """Return the operations that a client may perform on the cluster, if it may describe it."""
    rights = client.rights
    if rights is None:
        return CLUSTER_OPERATIONS
    return i32(rights.operations(ResourceType.CLUSTER) if rights.cluster(Operation.DESCRIBE) else 0)


class Api(Generic[RequestT, ResponseT]):
    """An API: its key, the versions it serves and how it responds.

    Without `ABC`, whose `isinstance` takes ten times as long: every request is checked.
    """

    key: ClassVar[int]
    versions: ClassVar[tuple[int, int]]
    """The oldest and the newest version served."""
    changes: ClassVar[Changes | None]
    """The changes of declarations by a request, for the audit log; None if it changes nothing."""
    waits_for_others: ClassVar[bool] = False
    """Whether the response waits for other clients, so that it is abandoned when this client leaves."""

    starts_at_once: ClassVar[bool] = False
    """Whether a request is worked on as it arrives, not a turn of the loop later; up to its first wait it has no task,
    so nothing there may need one, as timeouts do."""

    def respond_to_frame(
        self, frame: memoryview, header: RequestHeader, client: ClientInfo
    ) -> Buffers | Promise | None:
        """Respond to an ordinary request without decoding it into messages; return None for any other."""
        return None

    @abstractmethod
    async def handle(self, request: RequestT, client: ClientInfo) -> ResponseT:
        """Respond to a request of the newest version."""

    def upgrade(self, version: int, request: Any) -> RequestT:
        upgraded: RequestT = reshape(request, load_request_class(self.key, self.versions[1]))
        return upgraded

    def downgrade(self, version: int, response: ResponseT) -> Any:
        return reshape(response, load_response_class(self.key, version))

    def failure(self, error: MillstreamError, request: RequestT) -> ResponseT:
        """Respond to a request that failed as a whole; overridden by APIs whose response has no field for that."""
        if not _reports_errors(load_response_class(self.key, self.versions[1])):
            raise error
        return self.refusal(error_code(error), error_message(error))

    def refusal(self, code: ErrorCode, message: str | None = None) -> ResponseT:
        """Return a response with an error for the whole request, and Kafka's defaults otherwise."""
        kind = load_response_class(self.key, self.versions[1])
        reported = {"error_code": code, "error_message": message}
        known = {field.name: reported[field.name] for field in fields(kind) if field.name in reported}
        response: ResponseT = build_message(kind, known)
        return response

    async def respond(self, version: int, request: Any, client: ClientInfo) -> Any:
        upgraded = self.upgrade(version, request)
        try:
            if client.rights is None:
                response = await self.handle(upgraded, client)
            else:
                # Not loaded earlier: it brings the messages of all APIs.
                from millstream.broker.security.guards import guard_of

                work = guard_of(self.key)(self, upgraded, client, client.rights)
                cls = type(self)
                response = await record_changes(cls.__name__, cls.changes, upgraded, client.rights, work)
        except ProtocolViolation:
            # It ends the connection.
            raise
        except MillstreamError as error:
            log_fenced(error_code(error), str(error), client)
            response = self.failure(error, upgraded)
            if _reports_errors(type(response)) and not _reports_errors(load_response_class(self.key, version)):
                # An older version has no field for it, and would report a success.
                raise
        return self.downgrade(version, response)


def _reports_errors(kind: type) -> bool:
    """Whether a response has a field for an error of the whole request."""
    return any(field.name == "error_code" for field in fields(kind))


class VersionedApi(Api[Versioned[M], ResponseT], Generic[M, ResponseT]):
    """An API whose behaviour depends on the version of the request."""

    def upgrade(self, version: int, request: Any) -> Versioned[M]:
        newest: Any = super().upgrade(version, request)
        return Versioned(version, newest)


class PrivateApi(ABC, Generic[RequestT, ResponseT]):
    """One of Millstream's private requests; `protocol/private/message.py` defines the encoding."""

    key: int
    versions = (0, 0)
    request_type: ClassVar[type[Any]]
    response_type: ClassVar[type]
    """The types are the arguments of a subclass. A response can be built from an error alone."""
    changes: ClassVar[Changes | None]
    """The changes of declarations by a request, for the audit log; None if it changes nothing."""
    cluster_operation: ClassVar[Operation] = Operation.CLUSTER_ACTION
    """The operation on the cluster that a client needs, unless `needs` is overridden; by default one of nodes only."""
    waits_for_others: ClassVar[bool] = False
    """Whether the response waits for other clients, so that it is abandoned when the client leaves."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        arguments = get_args(cls.__dict__["__orig_bases__"][0]) if "__orig_bases__" in cls.__dict__ else ()
        if arguments and all(isinstance(argument, type) for argument in arguments):
            cls.request_type, cls.response_type = arguments
            cls.key = cls.request_type.KEY

    @abstractmethod
    async def handle(self, request: RequestT) -> ResponseT:
        """Carry out a request."""

    async def needs(self, request: RequestT) -> Sequence[Need]:
        """Return the permissions that a client needs for this request."""
        return [(self.cluster_operation, ResourceType.CLUSTER, CLUSTER_NAME)]

    def first_needs(self, request: RequestT) -> Sequence[Need]:
        """Return the needs that are checked before any lookup, so that errors do not reveal what exists."""
        return ()

    def starts_at_once(self, request: RequestT) -> bool:
        """Whether a request is worked on as it arrives, as `Api` explains."""
        return False

    def redact(self, response: ResponseT, rights: Rights) -> ResponseT:
        """Remove from a response what the client may not see."""
        return response

    async def handle_from(self, client: ClientInfo, request: RequestT) -> ResponseT:
        """Carry out the request of a client; overridden where quotas count."""
        return await self.handle(request)

    def respond_at_once(self, request: RequestT, header: RequestHeader, client: ClientInfo) -> Buffers | Promise | None:
        """Respond, or promise a response, without a coroutine; return None if a coroutine is needed."""
        return None

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        """Respond once the request is carried out."""
        try:
            request: RequestT = decode(bytes(frame[header.body_at :]), self.request_type)
            at_once = self.respond_at_once(request, header, client)
        except MillstreamError as error:
            return self.refuse(error, header, client)
        if at_once is not None:
            return at_once
        return start(self.respond_later(request, header, client), is_abandoned_with_client=self.waits_for_others)

    def refuse(self, error: BaseException, header: RequestHeader, client: ClientInfo) -> Buffers:
        log_fenced(error_code(error), str(error), client)
        return encode_private(header, self.response_type(error=int(error_code(error)), message=error_message(error)))

    async def respond_later(self, request: RequestT, header: RequestHeader, client: ClientInfo) -> Buffers:
        response: Any
        try:
            if not self.starts_at_once(request):
                await asyncio.sleep(0)
            if client.rights is None:
                response = await self.handle_from(client, request)
            else:
                check_needs(self.first_needs(request), client.rights)
                check_needs(await self.needs(request), client.rights)
                work = self.handle_from(client, request)
                cls = type(self)
                response = await record_changes(cls.__name__, cls.changes, request, client.rights, work)
                response = self.redact(response, client.rights)
        except MillstreamError as error:
            return self.refuse(error, header, client)
        return encode_private(header, response)


def encode_private(header: RequestHeader, response: Any) -> Buffers:
    content = encode(response)
    return [response_head(header.api_key, header.version, header.correlation_id, len(content)), content]


def refuse_unless_described(header: RequestHeader, client: ClientInfo) -> Buffers | None:
    """Return the response to a private request about the node, from a client that may not describe the cluster."""
    if client.rights is None or client.rights.check(Operation.DESCRIBE, ResourceType.CLUSTER):
        return None
    refused = f"{client.rights.principal} may not describe the cluster"
    return encode_private(header, Response(error=int(ErrorCode.cluster_authorization_failed), message=refused))


# -- error codes and messages of responses; `protocol/wire/error_codes.py` has the table. Whatever is outside the tree
# is a defect of the broker, and clients get UNKNOWN_SERVER_ERROR.

_MESSAGE_LENGTH_MAX: Final = 2000
"""A message may quote the client's data; at this length it fits into every version's response."""


async def error_of(work: Awaitable[object]) -> MillstreamError | None:
    """Await work, and return the `MillstreamError` that it raises, if any."""
    try:
        await work
    except MillstreamError as error:
        return error
    return None


def error_code(error: BaseException | None) -> ErrorCode:
    if error is None:
        return ErrorCode.none
    for ancestor in type(error).__mro__:
        if ancestor in CODES:
            return ErrorCode(CODES[ancestor])
    return ErrorCode.unknown_server_error


@overload
def error_message(error: None) -> None: ...


@overload
def error_message(error: BaseException) -> str: ...


def error_message(error: BaseException | None) -> str | None:
    """Return the message for clients; errors outside the tree are not exposed, since they may name internals."""
    if error is None:
        return None
    if isinstance(error, MillstreamError):
        return str(error)[:_MESSAGE_LENGTH_MAX]
    return "the broker failed to carry out the request; see its log"


_FENCED: Final = frozenset({ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch})


def fenced_code(code: ErrorCode, version: int, *, first: int) -> ErrorCode:
    """Return PRODUCER_FENCED from version `first` on, INVALID_PRODUCER_EPOCH before; other codes unchanged."""
    if code is ErrorCode.producer_fenced and version < first:
        return ErrorCode.invalid_producer_epoch
    return code


def log_fenced(code: ErrorCode, reason: str, client: ClientInfo, *, transactional_id: str | None = None) -> None:
    """Log a refusal that ends a producer; the reason holds its ids and epochs. Other codes are not logged."""
    if code in _FENCED:
        named = {"client": client.address, "client_id": client.client_id, "reason": reason}
        if transactional_id is not None:
            named["transactional_id"] = transactional_id
        _logger.info("a producer is fenced", extra=named)


# -- topics and placements that requests name, within the time that a request allows

_DEADLINE_S_MIN: Final = 1.0
_DEADLINE_S_MAX: Final = 120.0


class RequestDeadline:
    """The deadline of a request; some clients send a timeout of 0 and expect the default."""

    def __init__(self, timeout: timedelta) -> None:
        self._time = asyncio.get_running_loop().time
        self._deadline = self._time() + min(max(timeout.total_seconds(), _DEADLINE_S_MIN), _DEADLINE_S_MAX)

    def remaining_s(self, what: str) -> float:
        """Return the time remaining for a change; raise `RequestTimedOut` if it is too late to begin."""
        remaining = self._deadline - self._time()
        if remaining <= 0:
            raise RequestTimedOut(f"{what}: not begun within the time that the request allows; send it again")
        return remaining


def check_replicas(replicas: Sequence[int], membership: Membership) -> None:
    """Raise `InvalidAssignment` unless the list names nodes of the cluster, each once."""
    if not replicas:
        raise InvalidAssignment("the assignment has an empty list of nodes")
    if len(set(replicas)) < len(replicas):
        raise InvalidAssignment(f"the assignment names a node twice: {list(replicas)}")
    known = sorted(node.node_id for node in membership.nodes())
    for replica in replicas:
        if replica not in known:
            raise InvalidAssignment(f"the assignment names node {replica}; the nodes of this cluster are {known}")


def check_assignments(assignments: Sequence[Sequence[int]], membership: Membership) -> int:
    """Check the lists of all partitions and return the replication factor that they agree on."""
    for replicas in assignments:
        check_replicas(replicas, membership)
    factors = {len(replicas) for replicas in assignments}
    if len(factors) > 1:
        raise InvalidAssignment(f"the assignment gives partitions different numbers of replicas: {sorted(factors)}")
    return factors.pop()


def topic_named(topics: Topics, name: str) -> Topic:
    topic = topics.get(name)
    if topic is None:
        raise UnknownTopic(f"topic {name!r} does not exist")
    return topic


def partition_exists(topics: Topics, name: str, index: int) -> bool:
    topic = topics.get(name)
    return topic is not None and 0 <= index < topic.partitions


def topic_with_id(topics: Topics, topic_id: UUID) -> Topic:
    topic = topics.by_id(topic_id)
    if topic is None:
        raise UnknownTopicId(f"no topic has the id {topic_id}")
    return topic
