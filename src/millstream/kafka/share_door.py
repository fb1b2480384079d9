"""What ShareFetch and ShareAcknowledge have in common: sessions, the queues behind partitions, and acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.kafka.share_session import CLOSES, OPENS, PARTITIONS_MAX, SharePartition, ShareSession, ShareSessions
from millstream.kafka.subscription_service import SubscriptionService
from millstream.model.errors import InvalidRequest, MillstreamError, UnknownTopicId
from millstream.model.ids import Offset
from millstream.model.subscription import Subscription
from millstream.replication.partition import Partition
from millstream.subscriptions.lease import Settle, Verb

if TYPE_CHECKING:
    from millstream.subscriptions.delivery import Delivery

GAP: Final = 0
RENEW: Final = 4
_VERBS: Final = {GAP: Verb.ACCEPT, 1: Verb.ACCEPT, 2: Verb.RELEASE, 3: Verb.REJECT, RENEW: Verb.EXTEND}
"""A gap is an offset without a message: nothing is left to be done about it."""

RANGES_MAX: Final = 100_000
OFFSETS_MAX: Final = 1_000_000


class AcknowledgementBatch(Protocol):
    """Acknowledgements as both requests carry them."""

    @property
    def first_offset(self) -> int:
        """Of the range."""

    @property
    def last_offset(self) -> int:
        """Of the range."""

    @property
    def acknowledge_types(self) -> Sequence[int]:
        """One for all offsets, or one for each."""


Acknowledgements = dict[SharePartition, Sequence[AcknowledgementBatch]]
"""What a request acknowledges."""


class ShareDoor:
    """Where share consumers come in; one for a node."""

    def __init__(self, service: SubscriptionService) -> None:
        self.service = service
        self._sessions = ShareSessions()

    def __len__(self) -> int:
        return len(self._sessions)

    def worker(self, member_id: str) -> str:
        """The name under which a member holds leases."""
        return f"share/{member_id}"

    async def subscription(self, group_id: str | None) -> Subscription:
        """The subscription of a share group; another node may have declared it just now."""
        declared = self.service.declared
        found = declared.get(group_id or "")
        if found is None:
            await declared.load()
            found = declared.existing(group_id or "")
        return found

    def session(
        self,
        group_id: str,
        member_id: str,
        epoch: int,
        *,
        wanted: Iterable[SharePartition],
        forgotten: Iterable[SharePartition],
        acknowledges: bool,
    ) -> ShareSession | ErrorCode:
        """The session of a request, with what it changes; the last request of a session still has it."""
        member = (group_id, member_id)
        if epoch == OPENS:
            if acknowledges:
                return ErrorCode.invalid_request
            session = self._sessions.open(member)
        elif epoch == CLOSES:
            closed = self._sessions.close(member)
            return ErrorCode.share_session_not_found if closed is None else closed
        else:
            resumed = self._sessions.resume(member, epoch)
            if isinstance(resumed, ErrorCode):
                return resumed
            session = resumed
        for partition in forgotten:
            session.partitions.pop(partition, None)
        session.partitions.update(dict.fromkeys(wanted))
        if len(session.partitions) > PARTITIONS_MAX:
            self._sessions.close(member)
            return ErrorCode.share_session_limit_reached
        return session

    def partition(self, topic_id: UUID, index: int) -> Partition:
        """A partition that this node leads."""
        topic = self.service.topics.by_id(topic_id)
        if topic is None or topic.is_internal:
            raise UnknownTopicId(f"no topic that can be shared has the id {topic_id}")
        partition = self.service.topics.partition_by_id(topic_id, index)
        partition.check_leader_epoch(-1)
        return partition

    async def delivery(self, subscription: Subscription, place: SharePartition) -> Delivery:
        """The queue of a share group on a partition."""
        engine = await self.service.engine()
        return await engine.delivery(subscription, self.partition(*place))

    async def acknowledge(
        self, subscription: Subscription, member_id: str, asked: Acknowledgements
    ) -> dict[SharePartition, MillstreamError | None]:
        """Settle what a member acknowledges, each partition on its own."""
        results = await asyncio.gather(
            *(self._acknowledge(subscription, member_id, place, batches) for place, batches in asked.items())
        )
        return dict(zip(asked, results, strict=True))

    async def _acknowledge(
        self,
        subscription: Subscription,
        member_id: str,
        place: SharePartition,
        batches: Sequence[AcknowledgementBatch],
    ) -> MillstreamError | None:
        try:
            verbs = list(verbs_of(batches))
            delivery = await self.delivery(subscription, place)
            results = await delivery.settle(self.worker(member_id), verbs)
        except MillstreamError as error:
            return error
        return next((error for error in results if error is not None), None)

    async def release(self, subscription: Subscription, member_id: str, places: Iterable[SharePartition]) -> None:
        """A member ends its session: others get what it holds."""
        for place in places:
            try:
                delivery = await self.delivery(subscription, place)
            except MillstreamError:
                # Whoever leads the queue now lets the leases run out.
                continue
            delivery.worker_gone(self.worker(member_id))


def verbs_of(batches: Sequence[AcknowledgementBatch]) -> Iterator[Settle]:
    """The acknowledgements of one partition as the queue takes them; raises `InvalidRequest` for what cannot be."""
    before = -1
    offsets = 0
    for batch in batches:
        first, last, types = batch.first_offset, batch.last_offset, batch.acknowledge_types
        size = last - first + 1
        offsets += max(size, 0)
        if first < 0 or size < 1 or first <= before:
            raise InvalidRequest(f"acknowledgements of {first} to {last} are out of order")
        if offsets > OFFSETS_MAX:
            raise InvalidRequest(f"more than {OFFSETS_MAX} messages are acknowledged at once")
        if len(types) not in (1, size):
            raise InvalidRequest(f"{len(types)} acknowledgements are given for {size} messages")
        if any(kind not in _VERBS for kind in types):
            raise InvalidRequest(f"an acknowledgement is one of {sorted(_VERBS)}")
        before = last
        if len(types) == 1:
            yield Settle(Offset(first), Offset(last), _VERBS[types[0]])
            continue
        at = first
        for verb, run in groupby(_VERBS[kind] for kind in types):
            length = sum(1 for _ in run)
            yield Settle(Offset(at), Offset(at + length - 1), verb)
            at += length
