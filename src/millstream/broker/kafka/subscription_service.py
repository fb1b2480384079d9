"""The subscriptions of a node: declarations, queues, and the store of their states.

The queues use columnar libraries, which take time and memory to load. A node without subscriptions never loads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import SystemRandom
from typing import TYPE_CHECKING, Final
from uuid import UUID

from millstream.broker.cluster.declarations import ProducerIds
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import Peers, WirePeers, ask_peer
from millstream.broker.kafka.api import Need
from millstream.broker.net.budget import Budget
from millstream.broker.push_board import PushBoard
from millstream.broker.security.rights import SubscribedTopic, owner_refusal
from millstream.broker.security.state import SecurityState
from millstream.broker.subscriptions.engine import Expiry
from millstream.broker.subscriptions.routed_store import RoutedStateStore
from millstream.broker.subscriptions.state_shard import StateCoordinator
from millstream.broker.subscriptions.state_store import QueueImage, QueueWrite
from millstream.core.acl import Operation, ResourceType
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.credential import Owner
from millstream.core.errors import (
    GroupNotEmpty,
    MillstreamError,
    PartitionClosed,
    PolicyViolation,
    SubscriptionExists,
    UnknownSubscription,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.metric import Metric, counter, gauge
from millstream.core.subscription import (
    ATTEMPTS,
    DEAD_LETTER_TOPIC,
    EARLIEST,
    LETTERS_PREFIX,
    NO_DEAD_LETTERS,
    READ_COMMITTED,
    START,
    QueueKey,
    Subscription,
    SubscriptionSettings,
    start_key,
)
from millstream.core.tasks import Supervise, cancel_and_wait
from millstream.core.topic import TopicPartition
from millstream.protocol.private.message import R, Request
from millstream.protocol.private.subscription_messages import ListSubscriptionsRequest
from millstream.protocol.wire.client import Client

if TYPE_CHECKING:
    from millstream.broker.replication.partition import Partition
    from millstream.broker.subscriptions.delivery import Delivery
    from millstream.broker.subscriptions.engine import Engine
    from millstream.protocol.filter.filter import Filter


KNOWN_S: Final = 1.0
"""How long the topics of a share group are cached."""

KNOWN_MAX: Final = 1000


class ShareTopics:
    """The topics of share groups, which declare none. Each node knows some of them."""

    def __init__(
        self, topics: Topics, states: StateCoordinator, membership: Membership, clock: Clock, peers: Peers
    ) -> None:
        self.members: Callable[[str], frozenset[str]] = lambda _group: frozenset()
        """The topics of a group's members, if this node coordinates it."""
        self._topics = topics
        self._states = states
        self._membership = membership
        self._clock = clock
        self._peers = peers
        self._cached_topics: dict[UUID, tuple[float, tuple[str, ...]]] = {}

    def stored_queues(self) -> dict[UUID, list[tuple[str, int]]]:
        """Return, by subscription, the queues that have begun and whose states this node stores."""
        stored: dict[UUID, list[tuple[str, int]]] = {}
        for key in self._states.written():
            topic = self._topics.by_id(key.topic_id)
            if topic is not None:
                stored.setdefault(key.subscription_id, []).append((topic.name, key.partition))
        return stored

    async def of(self, subscription: Subscription) -> tuple[str, ...]:
        """Return the topics of a subscription, as all nodes together know them."""
        if subscription.topics:
            return subscription.topics
        now_s = self._clock.monotonic()
        known = self._cached_topics.get(subscription.subscription_id)
        if known is not None and now_s < known[0]:
            return known[1]
        topic_names = self.members(subscription.name) | {
            topic for topic, _ in self.stored_queues().get(subscription.subscription_id, ())
        }
        request = ListSubscriptionsRequest([subscription.name])
        for node in self._membership.nodes():
            if node.node_id != self._membership.me.node_id:
                # The topics of an unavailable node are found again when it returns.
                with suppress(MillstreamError):
                    response = await ask_peer(self._peers, node.node_id, request)
                    topic_names |= {topic for described in response.subscriptions for topic in described["topics"]}
        topics = tuple(sorted(topic_names))
        if topics:
            if len(self._cached_topics) >= KNOWN_MAX:
                self._cached_topics.clear()
            self._cached_topics[subscription.subscription_id] = (now_s + KNOWN_S, topics)
        return topics


_END_MS = -1
"""Stands for the end of the readable log instead of a time."""


class SubscriptionService:
    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        subscriptions: Subscriptions,
        producer_ids: ProducerIds,
        budget: Budget,
        *,
        config: Config,
        clock: Clock,
        supervise: Supervise,
        security: SecurityState | None = None,
    ) -> None:
        me = self.node_id = membership.me.node_id
        self.topics = topics
        self.declared = subscriptions
        self.budget = budget
        self.push = PushBoard()
        self.states = StateCoordinator(topics, config, clock, _build_image)
        self._membership = membership
        self._producer_ids = producer_ids
        self.clock = clock
        self._random = SystemRandom()
        self._peers = WirePeers(membership.node, me=me)
        self.share_topics = ShareTopics(topics, self.states, membership, clock, self._peers)
        self._store = RoutedStateStore(self.states, self._peers, self._random, me=me)
        self._engine: Engine | None = None
        self._loading: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._supervise = supervise
        self._security = security
        self._expiry = Expiry(subscriptions, clock, self._last_used_ms, self.delete)
        self._expiry_task: asyncio.Task[None] | None = None
        self._closed = False

    def metrics(self) -> Iterable[Metric]:
        yield from self.push.metrics()
        opened = 0 if self._engine is None else self._engine.open_count
        yield gauge("millstream_queues_stored", "Queues whose state this node stores.", self.states.queues)
        yield gauge("millstream_queues_open", "Queues that this node leads and has open.", opened)
        text = "Records of the ledger that were deleted before they had landed."
        yield counter("millstream_ledger_overflowed", text, self.states.retention.overflows)
        if self._engine is not None:
            from millstream.broker.subscriptions.engine import delivery_metrics, letter_metrics

            yield from delivery_metrics(self._engine.deliveries, self._name_of, self.clock)
            yield from letter_metrics(self._open_letters(), self.clock)

    async def start(self) -> None:
        """Start loading states from the log, and the queues of declared subscriptions."""
        self.declared.use_filters(_compile_filter)
        self.declared.use_topics(lambda name: self.topics.get(name) is not None)
        self.declared.on_change(self._on_change)
        self.topics.use_delivery_floor(self._delivery_floor)
        await self.states.start()
        self._on_change()
        self._expiry_task = self._supervise("unused subscriptions", self._expiry.run())

    async def close(self) -> None:
        """End all waits, and wait until everything written is durable."""
        self._closed = True
        if self._expiry_task is not None:
            await cancel_and_wait(self._expiry_task)
        if self._loading is not None:
            await asyncio.wait([self._loading])
        if self._engine is not None:
            await self._engine.close()
        if self._client is not None:
            await self._client.close()
        await self._store.close()
        await self.states.close()
        await self._peers.close()

    async def engine(self) -> Engine:
        """Return the queues, loaded when they are first needed."""
        if self._loading is None and not self._closed:
            self._loading = self._supervise("loading of subscriptions", self._load_engine())
        if self._engine is None and self._loading is not None:
            await asyncio.shield(self._loading)
        if self._engine is None:
            raise PartitionClosed("the broker is stopping")
        return self._engine

    async def delivery(self, subscription: Subscription, partition: Partition) -> Delivery:
        """Return the queue of a subscription on a partition that this node leads, opened if necessary."""
        return await (await self.engine()).delivery(subscription, partition)

    async def starts(self, topics: Iterable[str], settings: SubscriptionSettings) -> dict[str, tuple[int, ...]]:
        """Return where new queues on these topics start; topics that do not exist yet are read from their start."""
        existing = self.topics.existing(topics)
        if settings.start == EARLIEST:
            return {start_key(topic.name, topic.topic_id): (0,) * topic.partitions for topic in existing}
        time_ms = settings.start_time_ms(self.clock.now_ms())
        wanted_ms = _END_MS if time_ms is None else time_ms
        client = self._wire_client()
        isolation = int(settings.isolation == READ_COMMITTED)
        starts: dict[str, tuple[int, ...]] = {}
        for topic in existing:
            name, partitions = topic.name, topic.partitions
            ends = await client.list_offsets(name, dict.fromkeys(range(partitions), _END_MS), isolation=isolation)
            listed = ends
            if wanted_ms != _END_MS:
                times = dict.fromkeys(range(partitions), wanted_ms)
                listed = await client.list_offsets(name, times, isolation=isolation)
            starts[start_key(name, topic.topic_id)] = tuple(
                listed[index].offset if listed[index].offset >= 0 else ends[index].offset for index in range(partitions)
            )
        return starts

    async def check_no_open_letters(self, topic: str) -> None:
        """Raise `PolicyViolation` for a dead letter topic with open letters, which would be deleted with it."""
        if topic not in self.letter_topics():
            return
        from millstream.protocol.private.subscriptions import open_letters, open_letters_error

        letters = await open_letters(self._wire_client(), topic)
        if letters:
            # Without the names of subscriptions, which the client may not know.
            raise PolicyViolation(open_letters_error(topic, letters, ()))

    async def check_no_letters(self, name: str) -> None:
        """Raise `GroupNotEmpty` for a subscription with open letters, which could not be redriven without it."""
        settings = self.declared.settings_of(await self.declared.find(name))
        topic = settings.dead_letter_topic
        if not settings.has_dead_letters or self.topics.get(topic) is None:
            return
        from millstream.protocol.private.subscriptions import open_letters

        letters = await open_letters(self._wire_client(), topic)
        if letters:
            noun, them = ("letter", "it") if letters == 1 else ("letters", "them")
            raise GroupNotEmpty(
                f"subscription {name!r} has {letters:,} open dead {noun}; redrive or purge {them} first, or leave "
                f"{them} behind with --force"
            )

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription; one with open letters only by force, and they stay open."""
        if force:
            await self.track_letters_of(name)
        else:
            await self.check_no_letters(name)
        await self.declared.delete(name)

    async def alter(
        self,
        name: str,
        changes: Mapping[str, str | None],
        *,
        topics: Sequence[str] | None = None,
        validate_only: bool = False,
        owner: Owner | None = None,
    ) -> None:
        """Change a subscription; letters in a topic that it no longer names stay open."""
        subscription = await self.declared.find(name)
        further = [topic for topic in topics or () if topic not in subscription.topics]
        starts = await self.starts(further, subscription.settings) if further else None
        alter = partial(self.declared.alter, name, changes, topics=topics, starts=starts, owner=owner)
        if DEAD_LETTER_TOPIC in changes or validate_only:
            before, after = self.declared.settings_of(subscription), (await alter(validate_only=True)).settings
            if validate_only:
                return
            if after.dead_letter_topic != before.dead_letter_topic:
                await self.track_letters_of(name)
        await alter()

    async def track_letters_of(self, name: str) -> None:
        """Declare the queue of a subscription's open letters, which is then independent of the subscription."""
        settings = self.declared.settings_of(await self.declared.find(name))
        if settings.has_dead_letters:
            await self.track_letters({settings.dead_letter_topic})

    async def track_letters(self, names: Collection[str]) -> None:
        """Declare the queues of open letters of those topics that exist."""
        # As the catalog has them: another node may have created the topic just now.
        for topic in [declared for declared in await self.topics.declared() if declared.name in names] if names else ():
            starts = {start_key(topic.name, topic.topic_id): (0,) * topic.partitions}
            with suppress(SubscriptionExists):
                await self.declared.create(
                    LETTERS_PREFIX + topic.name,
                    [topic.name],
                    {START: EARLIEST, ATTEMPTS: "0"},
                    starts=starts,
                    is_limited=False,
                )

    async def topic_deleted(self, topic: str) -> None:
        """Forget which letters of a dead letter topic were open."""
        with suppress(UnknownSubscription):
            await self.declared.delete(LETTERS_PREFIX + topic)

    def letter_topics(self) -> set[str]:
        """Return every topic that is declared as a dead letter topic, or was and has a queue of open letters."""
        declared = self.declared.all()
        settings = [self.declared.settings_of(subscription) for subscription in declared]
        tracked = {
            subscription.name.removeprefix(LETTERS_PREFIX)
            for subscription in declared
            if subscription.name.startswith(LETTERS_PREFIX)
        }
        return tracked | {setting.dead_letter_topic for setting in settings if setting.has_dead_letters}

    def letter_origins(self) -> dict[str, set[str]]:
        """Return the dead letter topics of subscriptions, each with the topics whose messages it may hold."""
        origins: dict[str, set[str]] = {}
        for subscription in self.declared.all():
            settings = self.declared.settings_of(subscription)
            if subscription.topics and settings.has_dead_letters:
                origins.setdefault(settings.dead_letter_topic, set()).update(subscription.topics)
        return origins

    def _open_letters(self) -> Iterator[tuple[Partition, Delivery | None]]:
        """Yield the partitions of dead letter topics that this node leads, each with the queue of its open letters."""
        for name in sorted(self.letter_topics()):
            topic = self.topics.get(name)
            letter_subscription = self.declared.get(LETTERS_PREFIX + name)
            for partition in () if topic is None else self.topics.partitions_of(topic):
                if not partition.is_leader:
                    continue
                opened = None
                if letter_subscription is not None and self._engine is not None:
                    key = QueueKey(
                        letter_subscription.subscription_id, partition.topic.topic_id, PartitionIndex(partition.index)
                    )
                    opened = self._engine.opened(key)
                yield partition, opened

    async def readable_ends(self, places: Collection[TopicPartition], isolation: str) -> dict[TopicPartition, int]:
        """Return the offsets up to which queues may read partitions; those without a leader are missing."""
        from millstream.broker.subscriptions.log_scan import readable_end

        ends: dict[TopicPartition, int] = {}
        for place in places:
            with suppress(MillstreamError):
                ends[place] = readable_end(self.topics.partition(place.topic, place.partition), isolation)
        if elsewhere := [place for place in places if place not in ends]:
            listed = await self._wire_client().list_offsets_of(
                dict.fromkeys(elsewhere, _END_MS), isolation=int(isolation == READ_COMMITTED)
            )
            ends |= {
                place: listed_offset.offset
                for place, listed_offset in listed.items()
                if not isinstance(listed_offset, MillstreamError)
            }
        return ends

    def _wire_client(self) -> Client:
        if self._client is None:
            self._client = Client.connect(self._membership.addresses(), client_id="subscriptions")
        return self._client

    def is_loaded(self, name: str) -> bool:
        """Whether a subscription, its topics and the queues are known here, so that nothing has to be looked up."""
        declared = self.declared.get(name)
        return self._engine is not None and declared is not None and bool(declared.topics)

    async def write_state(self, key: QueueKey, leader_epoch: Epoch, snapshot: bytes) -> None:
        """Replace the stored state of a queue that is not open anywhere: that of a copy."""
        stored = await self._store.load(key, leader_epoch)
        await self._store.write(QueueWrite(key, leader_epoch, stored.sequence + 1, snapshot))

    @property
    def loaded(self) -> Engine | None:
        return self._engine

    def release_worker(self, worker: str) -> None:
        if self._engine is None or self._closed:
            return
        for delivery in self._engine.deliveries:
            # In a queue that is led elsewhere or restarting, the lease expires.
            with suppress(MillstreamError):
                delivery.release_worker(worker)

    async def ask_node(self, node: NodeId, request: Request[R]) -> R:
        return await ask_peer(self._peers, node, request)

    def _on_change(self) -> None:
        if self._engine is None and self._loading is None and self.declared.all() and not self._closed:
            self._loading = self._supervise("loading of subscriptions", self._load_engine())

    async def _load_engine(self) -> None:
        await asyncio.to_thread(
            _import_engine, any(subscription.settings.filter for subscription in self.declared.all())
        )
        from millstream.broker.subscriptions.dead_letters import DeadLetterAppender
        from millstream.broker.subscriptions.engine import Dependencies, Engine
        from millstream.broker.subscriptions.filter_cache import FilterCache
        from millstream.broker.subscriptions.filter_worker import FilterWorker

        engine = Engine(
            Dependencies(
                topics=self.topics,
                subscriptions=self.declared,
                store=self._store,
                clock=self.clock,
                random=self._random,
                appender=DeadLetterAppender(self.topics, self._membership, refusal=self._letter_refusal),
                next_producer_id=self._producer_ids.next,
                filter_cache=FilterCache(FilterWorker()),
                forget=self.states.forget,
            )
        )
        engine.start()
        self._engine = engine

    def _letter_refusal(self, subscription_id: UUID, topic: str) -> str:
        """Return why a share group may not write letters: its topics were not known when its owner named theirs."""
        declared = self.declared.by_id(subscription_id)
        if self._security is None or declared is None or declared.topics or not declared.owner.principal:
            return ""
        return owner_refusal(self._security, declared.owner, [(Operation.READ, ResourceType.TOPIC, topic)])

    def _delivery_floor(self, place: TopicPartition) -> int | None:
        """Return the first offset that subscriptions need; the log start while that is unknown."""
        topic = self.topics.get(place.topic)
        if topic is None:
            return None
        try:
            partition = self.topics.partition(place.topic, place.partition)
        except MillstreamError:
            # The partition is being added or removed; nothing may be deleted by age until that is done.
            return 0
        subscribed = [subscription for subscription in self.declared.all() if place.topic in subscription.topics]
        if not partition.is_leader or (subscribed and self._engine is None):
            # Only the leader knows; followers keep what it keeps.
            return partition.log_start
        if place.topic in self.letter_topics() and self.declared.get(LETTERS_PREFIX + place.topic) is None:
            # No queue has read its letters yet, so all of them are open.
            return partition.log_start
        needed = [] if self._engine is None else self._engine.oldest_needed(topic.topic_id, place.partition, subscribed)
        return min(needed, default=None)

    def _last_used_ms(self, subscription_id: UUID) -> int:
        deliveries = () if self._engine is None else self._engine.deliveries
        ours = [delivery for delivery in deliveries if delivery.key.subscription_id == subscription_id]
        if any(queue.waiting for queue in ours):
            return self.clock.now_ms()
        return max((queue.last_used_ms for queue in ours), default=0)

    def _name_of(self, subscription_id: UUID) -> str | None:
        declared = self.declared.by_id(subscription_id)
        return None if declared is None else declared.name

    async def topics_of(self, name: str) -> Sequence[SubscribedTopic]:
        return [SubscribedTopic(topic) for topic in await self.share_topics.of(await self.declared.find(name))]


def _import_engine(with_filters: bool) -> None:
    import millstream.broker.subscriptions.engine

    if with_filters:
        import millstream.protocol.filter.translation  # noqa: F401


def _compile_filter(text: str) -> Filter:
    from millstream.protocol.filter.filter import compile_filter

    return compile_filter(text)


def _build_image(key: QueueKey, snapshot: bytes | None) -> QueueImage:
    from millstream.broker.subscriptions.snapshot import FoldImage

    image = FoldImage(key)
    if snapshot is not None:
        image.replay(snapshot)
    return image


def letter_needs(name: str, settings: Mapping[str, str | None]) -> Iterable[Need]:
    """Require WRITE on the dead letter topic that settings name; READ on the group, whose messages it may get."""
    topic = settings.get(DEAD_LETTER_TOPIC)
    if topic and topic != NO_DEAD_LETTERS:
        yield Operation.READ, ResourceType.GROUP, name
        yield Operation.WRITE, ResourceType.TOPIC, topic
