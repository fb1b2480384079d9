"""Subscriptions that are changed or deleted at the source leave the open letters of this cluster open."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import msgspec
import pytest

from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.mirror import queue_states
from millstream.broker.mirror.declared_copies import ABSENT_TIMES
from millstream.broker.mirror.follower import Follower
from millstream.core import push
from millstream.core.errors import NotLeader, RequestTimedOut
from millstream.core.ids import PartitionIndex
from millstream.core.mirror import MirrorSettings
from millstream.core.subscription import (
    DEAD_LETTER_TOPIC,
    LETTERS_PREFIX,
    PAUSED,
    READ_COMMITTED,
    QueueKey,
    Subscription,
)
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


class TargetSubscriptions:
    """The subscriptions of the target, which record what is done with them."""

    def __init__(self, *declared: Subscription, originals: Collection[str] = ()) -> None:
        self.done: list[tuple[Any, ...]] = []
        by_name = {subscription.name: subscription for subscription in declared}
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
            service=SimpleNamespace(
                subscriptions=self,
                copied_topics=lambda _: [],
                topics=SimpleNamespace(
                    get=lambda name: SimpleNamespace(mirror="", origins=()) if name in originals else None
                ),
            ),
            settings=None,
            mirror=SimpleNamespace(name="paris"),
            notes={},
            queues=0,
        )
        make: Any = Follower
        self.follower: Follower = make(run, None)
        self.queues = self.follower._queues
        self.notes: dict[str, str] = run.notes

    def _record(self, what: str) -> AsyncMock:
        return AsyncMock(side_effect=lambda name, *_, **__: self.done.append((what, name)))

    def topics_of(self, what: str) -> Any:
        [call] = getattr(self.declared, what).call_args_list
        return call.kwargs.get("topics") or call.args[1]


async def test_letters_are_tracked_before_their_topic_is_forgotten() -> None:
    here = TargetSubscriptions(subscription())
    await here.queues._sync_subscription(offered(dead=OTHER))
    assert here.done == [("track", BILLING), ("alter", BILLING)]


async def test_a_source_has_no_say_over_topics_that_are_not_copies() -> None:
    """It could have them pushed to an endpoint of its choice."""
    spying = msgspec.structs.replace(offered(), topics=["orders", "payroll"], starts={"orders": [1], "payroll": [0]})
    here = TargetSubscriptions(originals=["payroll"])
    await here.queues._sync_subscription(spying)
    assert here.topics_of("create") == ["orders"]
    assert here.declared.create.call_args.kwargs["starts"] == {"orders": (1,)}
    assert "without payroll" in here.notes[f"subscription {BILLING}"]
    known = TargetSubscriptions(subscription(), originals=["payroll"])
    await known.queues._sync_subscription(spying)
    assert known.done == []
    only = TargetSubscriptions(originals=["payroll"])
    await only.queues._sync_subscription(msgspec.structs.replace(spying, topics=["payroll"]))
    assert only.done == []


async def test_a_subscription_with_topics_of_this_cluster_is_not_changed_as_at_the_source() -> None:
    here = TargetSubscriptions(subscription(), originals=["orders"])
    await here.queues._sync_subscription(msgspec.structs.replace(offered(dead=OTHER), topics=["orders", "copied"]))
    assert here.done == []
    assert "topics of this cluster: orders" in here.notes[f"subscription {BILLING}"]
    await here.queues._delete_subscriptions({UUID(int=1)})
    for _ in range(ABSENT_TIMES):
        await here.queues._delete_subscriptions(set())
    assert here.done == []


async def test_other_changes_are_mirrored_if_secrets_would_be_sent_to_another_endpoint() -> None:
    here = TargetSubscriptions(
        Subscription(
            name=BILLING,
            subscription_id=UUID(int=1),
            topics=("orders",),
            overrides={push.URL: "https://a.example/hook", push.HEADERS: '{"Authorization": "secret"}'},
            created_ms=0,
        )
    )
    settings = {push.URL: "https://b.example/hook", PAUSED: "true"}
    await here.queues._sync_subscription(msgspec.structs.replace(offered(), settings=settings))
    assert here.declared.alter.call_args.args[1] == {PAUSED: "true"}
    assert "keeps its millstream.push.url" in str(here.notes[f"subscription {BILLING}, push"])


async def test_a_deletion_keeps_the_letters() -> None:
    here = TargetSubscriptions(subscription())
    await here.queues._delete_subscriptions({UUID(int=1)})
    for _ in range(ABSENT_TIMES):
        await here.queues._delete_subscriptions(set())
    assert here.done == [("delete with letters", BILLING)]


@pytest.mark.parametrize("excluded", ["", DEAD])
def test_dead_letters_are_mirrored_with_the_subscriptions_that_write_them(excluded: str) -> None:
    here = TargetSubscriptions()
    here.follower._settings = MirrorSettings(topics="orders", exclude=excluded)
    origins = {DEAD: ["orders"], f"{DEAD}-dead": [DEAD], OTHER: ["payments"]}
    assert here.follower._mirrored_letter_topics(origins) == {DEAD, f"{DEAD}-dead"} - {excluded}
    assert list(here.notes) == ([f"letters {DEAD}"] if excluded else [])


@pytest.mark.parametrize("name", [BILLING, LETTERS_PREFIX + DEAD])
async def test_only_a_dead_letter_queue_is_replaced_by_that_of_the_source(name: str) -> None:
    here = TargetSubscriptions(subscription(name, 1))
    await here.queues._sync_subscription(offered(name, 2))
    if name == BILLING:
        assert here.done == []
        assert f"`millstream subscription delete {name} --force` here" in here.notes[f"subscription {name}"]
    else:
        assert here.done == [("delete", name), ("create", name)]


class Offers:
    """A source that offers the states of three queues in each round, and the copy of its dead letter topic."""

    def __init__(self, here: TargetSubscriptions) -> None:
        self.letters = TopicPartition(DEAD, PartitionIndex(0))
        self.end, self.reached = 0, 0
        """Where the dead letter topic ends at the source, and its copy."""
        self.sequence = 0
        self.is_original = True
        self.leaderless: set[int] = set()
        """The numbers of subscriptions whose queues cannot be stored."""
        self.stored: list[tuple[int, int]] = []
        """The number of each subscription whose queue was stored, and the write that its state was of."""
        self.queues: Any = here.queues
        self.queues._settings = MirrorSettings(topics="orders")
        self.queues._source = self
        self.queues._reached = self._reached
        self.queues._store = self._store
        service = self.queues._service
        service.topics = SimpleNamespace(
            get=lambda name: (
                SimpleNamespace(mirror="paris", origins=(), original_id=UUID(int=1)) if name == DEAD else None
            )
        )
        service.copied_topics = lambda _: [
            SimpleNamespace(topic_id=UUID(int=8), name=DEAD),
            SimpleNamespace(topic_id=UUID(int=9), name="orders"),
        ]
        service.clock = SimpleNamespace(monotonic=lambda: float(self.sequence))

    async def metadata(self, _topics: Any) -> Any:
        topic_id = UUID(int=1 if self.is_original else 2)
        return SimpleNamespace(nodes=[1], topics={DEAD: SimpleNamespace(topic_id=topic_id, partitions=[0])})

    async def ends(self, partitions: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self.end)

    async def ask(self, *_: Any, **__: Any) -> OfferResponse:
        self.sequence += 1
        plain = offered("plain", 3)
        plain.settings.clear()
        return OfferResponse(
            subscriptions=[offered(), offered(LETTERS_PREFIX + DEAD, 2, dead=""), plain],
            queues=[
                QueueSnapshot(QueueKey(UUID(int=number), UUID(int=topic), PartitionIndex(0)), self.sequence, b"state")
                for number, topic in ((1, 9), (2, 8), (3, 9))
            ],
        )

    async def _reached(self, _offsets: Any, *, is_readable: bool) -> dict[str, dict[int, int]]:
        assert is_readable
        return {DEAD: {0: self.reached}}

    async def _store(self, queues: Any, _topics: Any) -> list[QueueKey]:
        stored = [queue for queue in queues if queue.key.subscription_id.int not in self.leaderless]
        self.stored += [(stored_record.key.subscription_id.int, stored_record.sequence) for stored_record in stored]
        return [stored_record.key for stored_record in stored]

    async def round(self) -> list[tuple[int, int]]:
        """Run one round; return what it stored."""
        self.stored.clear()
        await self.queues.sync_subscriptions()
        return list(self.stored)


@pytest.fixture
def offers() -> Offers:
    return Offers(TargetSubscriptions(subscription(), subscription(LETTERS_PREFIX + DEAD, 2), subscription("plain", 3)))


async def test_the_state_of_a_queue_is_stored_after_its_dead_letters_have_arrived(offers: Offers) -> None:
    offers.end = 5
    assert await offers.round() == [(3, 1)]
    # More letters are written meanwhile; the first state does not wait for those.
    offers.end, offers.reached = 9, 5
    assert await offers.round() == [(3, 2), (1, 1)]
    assert await offers.round() == [(3, 3)]
    offers.reached = 9
    assert (1, 3) in await offers.round()


async def test_letters_are_closed_after_the_queue_has_their_revived_messages(offers: Offers) -> None:
    assert await offers.round() == [(3, 1), (1, 1)]
    assert await offers.round() == [(3, 2), (1, 2), (2, 1)]
    offers.leaderless.add(1)
    for _ in range(2):
        # The revived message may not be here yet.
        assert [number for number, _ in await offers.round()] == [3]
    offers.leaderless.clear()
    assert await offers.round() == [(3, 5), (1, 3)]
    assert await offers.round() == [(3, 6), (1, 6), (2, 3)]


async def test_a_recreated_dead_letter_topic_holds_up_only_its_own_queues(offers: Offers) -> None:
    offers.is_original = False
    for number in (1, 2, 3):
        assert await offers.round() == [(3, number)]
    assert not offers.queues._waiting


async def test_a_dead_letter_topic_that_is_not_copied_is_not_waited_for(offers: Offers) -> None:
    offers.end = 5
    offers.queues._service.topics = SimpleNamespace(get=lambda _: None)
    offers.queues._run.notes[f"topic {DEAD}"] = "it is not copied"
    assert await offers.round() == [(1, 1), (3, 1)]


async def test_a_planned_failover_stores_all_that_the_source_has(
    offers: Offers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_states, "SETTLED_PAUSE_S", 0)
    await offers.queues.sync_all({"orders", DEAD})
    assert offers.stored == [(3, 1), (1, 1), (3, 2), (1, 2), (2, 1)]
    offers.end = 5
    with pytest.raises(RequestTimedOut, match="orders"):
        await offers.queues.sync_all({"orders"})
    await offers.queues.sync_all({"payments"})


async def test_states_that_wait_are_bounded_and_forgotten_with_their_subscription(
    offers: Offers, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers.end = 5
    monkeypatch.setattr(queue_states, "WAITING_BYTES_MAX", 6)
    await offers.round()
    assert len(offers.queues._waiting) + len(offers.queues._letter_states) == 1
    assert offers.queues._unread or offers.queues._waiting
    monkeypatch.setattr(offers, "ask", AsyncMock(return_value=OfferResponse()))
    await offers.round()
    assert not offers.queues._waiting
    assert not offers.queues._letter_states


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
