"""Subscriptions that are changed or deleted at the source leave the open letters of this cluster open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.mirror.declared_copies import ABSENT_TIMES
from millstream.broker.mirror.follower import Follower
from millstream.core.errors import NotLeader, RequestTimedOut
from millstream.core.ids import PartitionIndex
from millstream.core.mirror import MirrorSettings
from millstream.core.subscription import DEAD_LETTER_TOPIC, LETTERS_PREFIX, READ_COMMITTED, Subscription
from millstream.core.topic import TopicPartition
from millstream.protocol.private.mirror_messages import OfferedSubscription, OfferResponse, QueueSnapshot

BILLING, DEAD, OTHER = "billing", "billing-dead", "billing-errors"


def subscription(name: str = BILLING, number: int = 1, *, dead: str = DEAD) -> Subscription:
    overrides = {DEAD_LETTER_TOPIC: dead}
    return Subscription(
        name=name, subscription_id=UUID(int=number), topics=("orders",), overrides=overrides, created_ms=0
    )


def offered(name: str = BILLING, number: int = 1, *, dead: str = DEAD) -> OfferedSubscription:
    settings = {DEAD_LETTER_TOPIC: dead}
    return OfferedSubscription(
        name=name, subscription_id=UUID(int=number), topics=["orders"], settings=settings, starts={}, created_ms=0
    )


class Here:
    """The subscriptions of the target, which record what is done with them."""

    def __init__(self, *declared: Subscription) -> None:
        self.done: list[tuple[Any, ...]] = []
        by_name = {one.name: one for one in declared}
        self.declared = SimpleNamespace(
            get=by_name.get,
            all=lambda: list(by_name.values()),
            create=self._record("create"),
            alter=self._record("alter"),
            delete=self._record("delete"),
        )
        self.delete = self._record("delete with letters")
        self.track_letters_of = self._record("track")
        run = SimpleNamespace(
            service=SimpleNamespace(subscriptions=self, copied_topics=lambda _: []),
            settings=None,
            mirror=SimpleNamespace(name="paris"),
            notes={},
            queues=0,
        )
        make: Any = Follower
        self.follower: Follower = make(run, None)
        self.notes: dict[str, str] = run.notes

    def _record(self, what: str) -> AsyncMock:
        return AsyncMock(side_effect=lambda name, *_, **__: self.done.append((what, name)))


async def test_letters_are_tracked_before_their_topic_is_forgotten() -> None:
    here = Here(subscription())
    await here.follower._sync_subscription(offered(dead=OTHER))
    assert here.done == [("track", BILLING), ("alter", BILLING)]


async def test_a_deletion_keeps_the_letters() -> None:
    here = Here(subscription())
    await here.follower._delete_subscriptions({UUID(int=1)})
    for _ in range(ABSENT_TIMES):
        await here.follower._delete_subscriptions(set())
    assert here.done == [("delete with letters", BILLING)]


@pytest.mark.parametrize("excluded", ["", DEAD])
def test_dead_letters_are_mirrored_with_the_subscriptions_that_write_them(excluded: str) -> None:
    here = Here()
    here.follower._settings = MirrorSettings(topics="orders", exclude=excluded)
    origins = {DEAD: ["orders"], f"{DEAD}-dead": [DEAD], OTHER: ["payments"]}
    assert here.follower._wanted_letters(origins) == {DEAD, f"{DEAD}-dead"} - {excluded}
    assert list(here.notes) == ([f"letters {DEAD}"] if excluded else [])


@pytest.mark.parametrize("name", [BILLING, LETTERS_PREFIX + DEAD])
async def test_only_a_dead_letter_queue_is_replaced_by_that_of_the_source(name: str) -> None:
    here = Here(subscription(name, 1))
    await here.follower._sync_subscription(offered(name, 2))
    if name == BILLING:
        assert here.done == []
        assert "another subscription" in here.notes[f"subscription {name}"]
    else:
        assert here.done == [("delete", name), ("create", name)]


class Offers:
    """A source that offers the states of three queues, and what the target has of its dead letters."""

    def __init__(self, here: Here) -> None:
        self.letters = TopicPartition(DEAD, PartitionIndex(0))
        self.has_arrived = True
        self.sequence = 0
        self.applied: list[tuple[int, int]] = []
        """The number of each subscription whose queue was stored, and the write that its state was of."""
        follower: Any = here.follower
        follower._settings = MirrorSettings(topics="orders")
        follower._source = self
        follower._await_reached = self._await_reached
        follower._apply_queues = self._apply
        follower._service.topics = SimpleNamespace(get=lambda _: None)
        follower._service.copied_topics = lambda _: [SimpleNamespace(topic_id=UUID(int=9), name="orders")]
        follower._service.clock = SimpleNamespace(monotonic=lambda: 0.0)

    async def metadata(self, _topics: Any) -> Any:
        return SimpleNamespace(nodes=[1], topics={DEAD: SimpleNamespace(partitions=[0])})

    async def ends(self, partitions: Any) -> dict[TopicPartition, int]:
        assert list(partitions) == [self.letters]
        return {self.letters: 5}

    async def ask(self, *_: Any, **__: Any) -> OfferResponse:
        self.sequence += 1
        plain = offered("plain", 3)
        plain.settings.clear()
        return OfferResponse(
            subscriptions=[offered(), offered(LETTERS_PREFIX + DEAD, 2, dead=""), plain],
            queues=[
                QueueSnapshot(UUID(int=number).bytes, UUID(int=9).bytes, 0, self.sequence, b"") for number in (1, 2, 3)
            ],
        )

    async def _await_reached(self, offsets: Any, _deadline: float, *, is_readable: bool) -> TopicPartition | None:
        assert (offsets, is_readable) == ({DEAD: {0: 5}}, True)
        return None if self.has_arrived else self.letters

    async def _apply(self, queues: Any, _topics: Any) -> None:
        self.applied += [(UUID(bytes=one.subscription_id).int, one.sequence) for one in queues]


async def test_the_state_of_a_queue_is_stored_after_its_dead_letters_have_arrived() -> None:
    here = Here()
    offers = Offers(here)
    offers.has_arrived = False
    with pytest.raises(RequestTimedOut, match="dead letters"):
        await here.follower._sync_subscriptions()
    assert offers.applied == [(3, 1)]
    offers.has_arrived = True
    await here.follower._sync_subscriptions()
    assert offers.applied == [(3, 1), (3, 2), (1, 2)]


async def test_letters_are_closed_after_the_queue_has_their_revived_messages() -> None:
    here = Here()
    offers = Offers(here)
    for _ in range(2):
        await here.follower._sync_subscriptions()
    # The letters' state of the first round is stored after the queue's state of the second.
    assert offers.applied == [(3, 1), (1, 1), (3, 2), (1, 2), (2, 1)]
    offers.applied.clear()
    here.follower._settings = MirrorSettings(topics="orders", groups=False)
    offers.is_millstream = True  # type: ignore[attr-defined]
    await here.follower.sync_all({"orders"})
    assert [number for number, _ in offers.applied] == [3, 1, 2, 3, 1, 2]


async def test_the_end_of_a_copy_is_requested_from_other_nodes() -> None:
    here, there, nowhere = (TopicPartition("orders", PartitionIndex(index)) for index in range(3))
    asked: list[Any] = []

    def partition(_topic: str, index: int) -> Any:
        if index != here.partition:
            raise NotLeader("this node does not host it")
        return SimpleNamespace(last_stable_offset=7, high_watermark=9)

    async def list_offsets_of(places: dict[TopicPartition, int], *, isolation: int) -> dict[TopicPartition, Any]:
        asked.append((set(places), isolation))
        return {there: SimpleNamespace(offset=5), nowhere: NotLeader("it has no leader")}

    service: Any = SimpleNamespace(
        topics=SimpleNamespace(partition=partition),
        _wire_client=lambda: SimpleNamespace(list_offsets_of=list_offsets_of),
    )
    ends = await SubscriptionService.readable_ends(service, [here, there, nowhere], READ_COMMITTED)
    assert ends == {here: 7, there: 5}
    assert asked == [({there, nowhere}, 1)]
