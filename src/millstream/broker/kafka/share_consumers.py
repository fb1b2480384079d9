"""Common parts of the share group APIs: sessions, the queues of partitions, acknowledgements, offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.kafka.api import ClientInfo, PrivateApi, error_code
from millstream.broker.kafka.apis.subscription_apis import (
    AT_OFFSET,
    SubscriptionForget,
    SubscriptionList,
    SubscriptionSeek,
)
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.net.presence import Presence
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.lease import Settlement
from millstream.core.crowding import is_crowding
from millstream.core.errors import InvalidRequest, MillstreamError, NotLeader, UnknownTopicId
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.core.subscription import QueueKey, Subscription, Verb
from millstream.core.topic import Topic
from millstream.protocol.private.message import R, Request
from millstream.protocol.private.subscription_messages import (
    ForgetSubscriptionRequest,
    ListSubscriptionsRequest,
    SeekSubscriptionRequest,
)

UNKNOWN: Final = -1


class QueueOffset(NamedTuple):
    """The position of a group on one partition."""

    start: int
    backlog: int


class ShareOffsets:
    """The offsets of share groups in the whole cluster."""

    def __init__(self, service: SubscriptionService, membership: Membership) -> None:
        self._service = service
        self._membership = membership
        self._list = SubscriptionList(service)
        self._seek = SubscriptionSeek(service)
        self._forget = SubscriptionForget(service)

    async def of_group(self, name: str) -> dict[tuple[str, int], QueueOffset]:
        """Return every partition on which a group has begun."""
        if self._service.declared.get(name) is None:
            return {}
        offsets, stored = await self._list_queues(name, set())
        closed = stored - offsets.keys()
        if closed:
            # These queues were not opened since their leader was elected.
            offsets, _ = await self._list_queues(name, closed)
        return offsets

    async def _list_queues(
        self, name: str, to_open: set[tuple[str, int]]
    ) -> tuple[dict[tuple[str, int], QueueOffset], set[tuple[str, int]]]:
        """Ask all nodes for the open queues of a group, and for those whose states they store."""
        offsets: dict[tuple[str, int], QueueOffset] = {}
        stored: set[tuple[str, int]] = set()
        request = ListSubscriptionsRequest([name], sorted(to_open))
        for node in self._membership.nodes():
            response = await self._ask(node.node_id, self._list, request)
            for subscription in response.subscriptions:
                stored |= {(topic, partition) for topic, partition in subscription["stored_queues"]}
                for queue in subscription["queues"]:
                    offsets[queue["topic"], queue["partition"]] = QueueOffset(queue["oldest"], queue["backlog"])
        return offsets, stored

    async def declare(self, name: str) -> None:
        await self._service.declared.ensure(name)

    async def move(self, name: str, topic: Topic, partition: int, offset: int) -> None:
        state = self._service.topics.state_of(topic, partition)
        if state is None or not state.has_leader:
            raise NotLeader(f"{topic.name}-{partition} has no leader")
        request = SeekSubscriptionRequest(name, f"{AT_OFFSET}{offset}", topic.name, partition)
        await self._ask(state.leader, self._seek, request)

    async def forget(self, name: str, topic: Topic) -> None:
        """Discard a group's state on a topic, so that it starts as if for the first time."""
        # First all queues stop writing, then their states are deleted.
        for only_close in (True, False):
            request = ForgetSubscriptionRequest(name, topic.name, only_close)
            for node in self._membership.nodes():
                await self._ask(node.node_id, self._forget, request)

    async def _ask(self, node: NodeId, api: PrivateApi[Any, R], request: Request[R]) -> R:
        is_me = node == self._membership.me.node_id
        return await (api.handle(request) if is_me else self._service.ask_node(node, request))


OPENS: Final = 0
CLOSES: Final = -1
SESSIONS_MAX: Final = 20_000
PARTITIONS_MAX: Final = 10_000
ALL_PARTITIONS_MAX: Final = 500_000
"""The maximum number of partitions in all sessions, including partitions that do not exist."""
_EPOCH_MAX: Final = 2**31 - 1

SharePartition = tuple[UUID, int]
SessionKey = tuple[str, ...]
"""Group, member, and the API tokens of the client: others of their owner may have further topics in their sessions."""


@dataclass(slots=True, eq=False)
class ShareSession:
    """The partitions of one member, and the number of its requests."""

    member: SessionKey
    presence: Presence
    principal: str
    epoch: int = 1
    partitions: dict[SharePartition, None] = field(default_factory=dict)


class ShareSessions:
    """All sessions; `lost` is called for those whose connection was closed."""

    def __init__(self, lost: Callable[[ShareSession], None]) -> None:
        self._on_lost = lost
        self._by_member: dict[SessionKey, ShareSession] = {}
        self._partitions = 0
        self._sessions_held: Counter[str] = Counter()
        self._partitions_held: Counter[str] = Counter()
        """The number of partitions by principal; empty without authentication."""

    def __len__(self) -> int:
        return len(self._by_member)

    def open(self, member: SessionKey, presence: Presence, principal: str = "") -> ShareSession | ErrorCode:
        """Return a new session, in place of one that the member had."""
        self.close(member)
        count = len(self._by_member)
        if count >= SESSIONS_MAX or is_crowding(self._sessions_held[principal], count, SESSIONS_MAX):
            return ErrorCode.share_session_limit_reached
        session = self._by_member[member] = ShareSession(member, presence, principal)
        if principal:
            self._sessions_held[principal] += 1
        presence.on_close(session, lambda: self._on_disconnect(session))
        return session

    def resume(self, member: SessionKey, epoch: int) -> ShareSession | ErrorCode:
        """Return the session that a request continues, counting the request."""
        session = self._by_member.get(member)
        if session is None:
            return ErrorCode.share_session_not_found
        if epoch != session.epoch:
            return ErrorCode.invalid_share_session_epoch
        session.epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        return session

    def get(self, member: SessionKey, epoch: int) -> ShareSession | None:
        """Return the session that a request would continue, without counting the request."""
        session = self._by_member.get(member)
        return session if session is not None and session.epoch == epoch else None

    def change(
        self, session: ShareSession, added: Iterable[SharePartition], forgotten: Iterable[SharePartition]
    ) -> bool:
        """Change the partitions of a session; return whether it has too many of them, or all sessions together."""
        before = len(session.partitions)
        for partition in forgotten:
            session.partitions.pop(partition, None)
        session.partitions.update(dict.fromkeys(added))
        size = len(session.partitions)
        self._count(session, size - before)
        held, total = self._partitions_held[session.principal], self._partitions
        is_full = total > ALL_PARTITIONS_MAX or is_crowding(held, total, ALL_PARTITIONS_MAX)
        return size > PARTITIONS_MAX or (size > before and is_full)

    def _count(self, session: ShareSession, partitions: int) -> None:
        self._partitions += partitions
        if session.principal:
            self._partitions_held[session.principal] += partitions

    def close(self, member: SessionKey) -> ShareSession | None:
        session = self._by_member.pop(member, None)
        if session is not None:
            self._count(session, -len(session.partitions))
            if session.principal:
                self._sessions_held[session.principal] -= 1
                if not self._sessions_held[session.principal]:
                    del self._sessions_held[session.principal], self._partitions_held[session.principal]
            session.presence.forget(session)
        return session

    def _on_disconnect(self, session: ShareSession) -> None:
        if self.close(session.member) is session:
            self._on_lost(session)


if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery
    from millstream.broker.subscriptions.state_store import PendingWrite

GAP: Final = 0
RENEW: Final = 4
_VERBS: Final = {GAP: Verb.ACCEPT, 1: Verb.ACCEPT, 2: Verb.RELEASE, 3: Verb.REJECT, RENEW: Verb.EXTEND}
"""A gap is an offset without a message: there is nothing to settle."""
_KINDS: Final = frozenset(_VERBS)
_WITHOUT_RENEW: Final = _KINDS - {RENEW}

OFFSETS_MAX: Final = 1_000_000
MEMBER_ID_LENGTH_MAX: Final = 36
_MOVED: Final = (ErrorCode.not_leader_or_follower, ErrorCode.fenced_leader_epoch)


class AcknowledgementBatch(Protocol):
    """Acknowledgements as both requests carry them."""

    @property
    def first_offset(self) -> int:
        """The first offset of the range."""

    @property
    def last_offset(self) -> int:
        """The last offset of the range, inclusive."""

    @property
    def acknowledge_types(self) -> Sequence[int]:
        """The acknowledge types: one for all offsets, or one for each."""


Acknowledgements = dict[SharePartition, Sequence[AcknowledgementBatch]]

Settled = dict[SharePartition, "PendingWrite | MillstreamError | None"]
"""The queues in which it was settled, or why not."""


def outcome_of(settled: PendingWrite | MillstreamError | None) -> MillstreamError | None:
    """Return why acknowledgements were refused, or could not be stored; call this when their write is done."""
    return settled if settled is None or isinstance(settled, MillstreamError) else settled.error


class Leader(NamedTuple):
    node_id: int
    epoch: int


NO_LEADER: Final = Leader(-1, -1)


class ShareConsumers:
    """The entry point of share consumers; one per node."""

    def __init__(self, service: SubscriptionService, membership: Membership) -> None:
        self.service = service
        self._membership = membership
        self._sessions = ShareSessions(self.release)

    def __len__(self) -> int:
        return len(self._sessions)

    def worker(self, member_id: str) -> str:
        """Return the name under which a member holds leases."""
        return f"share/{member_id}"

    def session(
        self,
        member: SessionKey,
        epoch: int,
        presence: Presence,
        *,
        principal: str = "",
        partitions: Iterable[SharePartition] = (),
        forgotten: Iterable[SharePartition] = (),
    ) -> ShareSession | ErrorCode:
        """Return the session of a request with its changes applied; the last request of a session still gets it."""
        if epoch == CLOSES:
            closed = self._sessions.close(member)
            return ErrorCode.share_session_not_found if closed is None else closed
        opened = (
            self._sessions.open(member, presence, principal) if epoch == OPENS else self._sessions.resume(member, epoch)
        )
        if isinstance(opened, ErrorCode):
            return opened
        if self._sessions.change(opened, partitions, forgotten):
            self._sessions.close(member)
            return ErrorCode.share_session_limit_reached
        return opened

    def ready(
        self, subscription: Subscription, member: SessionKey, epoch: int, partitions: Iterable[SharePartition]
    ) -> dict[SharePartition, Delivery] | None:
        """Return the queues of a session that a request continues, if all are open; the request is not counted."""
        engine, session = self.service.loaded, self._sessions.get(member, epoch)
        if engine is None or session is None or epoch in (OPENS, CLOSES):
            return None
        places = {**session.partitions, **dict.fromkeys(partitions)}
        try:
            deliveries = engine.ready(subscription, [self.partition(*place) for place in places])
        except MillstreamError:
            return None
        return None if deliveries is None else dict(zip(places, deliveries, strict=True))

    def partition(self, topic_id: UUID, index: int) -> Partition:
        topic = self.service.topics.by_id(topic_id)
        if topic is None or topic.is_internal:
            raise UnknownTopicId(f"no topic that can be shared has the id {topic_id}")
        partition = self.service.topics.partition_by_id(topic_id, index)
        partition.check_leader_epoch(-1)
        return partition

    async def delivery(self, subscription: Subscription, place: SharePartition) -> Delivery:
        return await self.service.delivery(subscription, self.partition(*place))

    async def acknowledge(
        self, subscription: Subscription, member_id: str, acknowledgements: Acknowledgements, *, renews: bool
    ) -> dict[SharePartition, MillstreamError | None]:
        """Settle a member's acknowledgements, all or none per partition; return when they are durable."""
        return await self.confirm(await self.settle(subscription, member_id, acknowledgements, renews=renews))

    async def settle(
        self, subscription: Subscription, member_id: str, acknowledgements: Acknowledgements, *, renews: bool
    ) -> Settled:
        """Settle without waiting; `confirm` waits until the request may get a response."""
        return {
            place: await self._settle(subscription, member_id, place, batches, renews)
            for place, batches in acknowledgements.items()
        }

    async def confirm(self, settled: Settled) -> dict[SharePartition, MillstreamError | None]:
        """Wait until settlements are durable; return the error of each partition."""
        for outcome in settled.values():
            if outcome is not None and not isinstance(outcome, MillstreamError):
                with suppress(MillstreamError):
                    await outcome
        return {place: outcome_of(outcome) for place, outcome in settled.items()}

    async def _settle(
        self,
        subscription: Subscription,
        member_id: str,
        place: SharePartition,
        batches: Sequence[AcknowledgementBatch],
        renews: bool,
    ) -> PendingWrite | MillstreamError | None:
        try:
            delivery = await self.delivery(subscription, place)
        except MillstreamError as error:
            return error
        return self.settle_in(delivery, member_id, batches, renews=renews)

    def settle_in(
        self, delivery: Delivery, member_id: str, batches: Sequence[AcknowledgementBatch], *, renews: bool = False
    ) -> PendingWrite | MillstreamError | None:
        """Settle acknowledgements in one queue, all or none; return the write that stores them, or the error."""
        try:
            verbs, gaps = settlements_of(batches, renews=renews)
            delivery.settle_all(self.worker(member_id), verbs, gaps)
            return delivery.pending_write()
        except MillstreamError as error:
            return error

    def release(self, session: ShareSession) -> None:
        """Release the leases of a member whose session has ended."""
        group_id, member_id = session.member[:2]
        engine, subscription = self.service.loaded, self.service.declared.get(group_id)
        if engine is None or subscription is None:
            return
        for topic_id, index in session.partitions:
            # Leases of a queue that another node leads expire there.
            delivery = engine.opened(QueueKey(subscription.subscription_id, topic_id, PartitionIndex(index)))
            if delivery is not None:
                # A closed queue must not prevent the release in others.
                with suppress(MillstreamError):
                    delivery.release_worker(self.worker(member_id))

    def leader(self, place: SharePartition, error: Exception | None) -> Leader:
        """Return the current leader of a partition that is not led here."""
        topics = self.service.topics
        topic = topics.by_id(place[0]) if error is not None and error_code(error) in _MOVED else None
        state = None if topic is None else topics.state_of(topic, place[1])
        return Leader(state.leader, state.leader_epoch) if state is not None and state.has_leader else NO_LEADER

    def leaders(
        self, errors: Mapping[SharePartition, Exception | None], client: ClientInfo
    ) -> list[tuple[Node, str, int]]:
        """Return the current leaders, each with its address for this client."""
        leaders = {self.leader(place, error).node_id for place, error in errors.items() if error is not None}
        if not leaders:
            return []
        nodes = self._membership.nodes_of(client.listener, client.reached_at)
        return [node for node in nodes if node[0].node_id in leaders]


def session_key(group_id: str, member_id: str, client: ClientInfo) -> SessionKey:
    return group_id, member_id, *(() if client.rights is None else client.rights.identity[1:])


def check_member_id(member_id: str | None) -> str:
    """Return the id of a member as Kafka has them, or `InvalidRequest`."""
    if not member_id or len(member_id) > MEMBER_ID_LENGTH_MAX:
        raise InvalidRequest(f"a member id has 1 to {MEMBER_ID_LENGTH_MAX} characters")
    return member_id


def settlements_of(
    batches: Sequence[AcknowledgementBatch], *, renews: bool = False
) -> tuple[list[Settlement], list[Settlement]]:
    """Return the acknowledgements of one partition as the queue takes them, and the gaps; or `InvalidRequest`."""
    verbs: list[Settlement] = []
    gaps: list[Settlement] = []
    before = -1
    offsets = 0
    for batch in batches:
        _check_batch(batch, before, renews=renews)
        before = batch.last_offset
        offsets += before - batch.first_offset + 1
        if offsets > OFFSETS_MAX:
            raise InvalidRequest(f"more than {OFFSETS_MAX} messages are acknowledged at once")
        at = batch.first_offset
        for kind, size in _runs(batch):
            (gaps if kind == GAP else verbs).append(Settlement(Offset(at), Offset(at + size - 1), _VERBS[kind]))
            at += size
    return verbs, gaps


def _check_batch(batch: AcknowledgementBatch, before: int, *, renews: bool) -> None:
    first, last, types = batch.first_offset, batch.last_offset, batch.acknowledge_types
    size = last - first + 1
    if first < 0 or size < 1 or first <= before:
        raise InvalidRequest(f"acknowledgements of {first} to {last} are out of order")
    if len(types) not in (1, size):
        raise InvalidRequest(f"{len(types)} acknowledgements are given for {size} messages")
    known = _KINDS if renews else _WITHOUT_RENEW
    if not known.issuperset(types):
        raise InvalidRequest(f"an acknowledgement type must be one of {sorted(known)}")


def _runs(batch: AcknowledgementBatch) -> list[tuple[int, int]]:
    """Yield runs of equal acknowledgement types, each with its length."""
    types = batch.acknowledge_types
    if len(types) == 1:
        return [(types[0], batch.last_offset - batch.first_offset + 1)]
    return [(kind, sum(1 for _ in run)) for kind, run in groupby(types)]
