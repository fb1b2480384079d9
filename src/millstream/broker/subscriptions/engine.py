"""The queues that this node leads.

A queue is opened when its subscription is declared or first used, and closed when the partition moves to another node
or the subscription is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from uuid import UUID

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.dead_letters import DeadLetterAppender, DeadLetters
from millstream.broker.subscriptions.delivery import Delivery, age_ms
from millstream.broker.subscriptions.filter_cache import FilterCache, QueueFilter
from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.broker.subscriptions.log_scan import failover_marks, readable_end
from millstream.broker.subscriptions.outcomes import OutcomeBudget
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.snapshot import write_snapshot
from millstream.broker.subscriptions.state_store import QueueWrite, StateStore, StoredQueue
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import (
    CorruptState,
    MillstreamError,
    MirroredTopic,
    NotLeader,
    PartitionClosed,
    RequestTimedOut,
    UnknownSubscription,
    UnknownTopic,
)
from millstream.core.ids import Epoch, Offset, PartitionIndex, ProducerId
from millstream.core.metric import Kind, Metric, Sample
from millstream.core.subscription import EARLIEST, LETTERS_PREFIX, QueueKey, Subscription, SubscriptionSettings
from millstream.core.topic import Topic
from millstream.protocol.filter.filter import compile_filter

_logger = logging.getLogger(__name__)

NOTES_PER_LIFETIME: Final = 8
"""How often the use of a subscription is recorded within its expiry time."""
CHECK_S_MIN: Final = 0.05
CHECK_S_MAX: Final = 600.0

LastUsed = Callable[[UUID], int]
"""Returns when a subscription was last used on this node, in milliseconds since 1970; 0 if never."""


class Expiry:
    """Check and delete expired subscriptions.

    Any node may serve workers of a subscription. A node on which it was used records that in the catalog from time to
    time, so that neither another node nor a restart mistakes it for unused.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        clock: Clock,
        last_used: LastUsed,
        delete: Callable[[str], Awaitable[object]],
    ) -> None:
        self._subscriptions = subscriptions
        self._clock = clock
        self._last_used = last_used
        self._delete = delete
        self._changed = asyncio.Event()
        subscriptions.on_change(self._changed.set)

    async def run(self) -> None:
        """Check as often as the shortest expiry requires, forever; idle while nothing expires."""
        while True:
            self._changed.clear()
            expiring = [
                (subscription, lifetime_ms)
                for subscription in self._subscriptions.all()
                if (lifetime_ms := self._lifetime_ms(subscription)) >= 0
            ]
            for subscription, lifetime_ms in expiring:
                await self._expire_or_record_use(subscription, lifetime_ms)
            shortest_ms = min((lifetime_ms for _, lifetime_ms in expiring), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if shortest_ms is None else _pause_s(shortest_ms)):
                    await self._changed.wait()

    def _lifetime_ms(self, subscription: Subscription) -> int:
        return self._subscriptions.settings_of(subscription).expires_ms

    async def _expire_or_record_use(self, subscription: Subscription, lifetime_ms: int) -> None:
        now_ms = self._clock.now_ms()
        used_here_ms = self._last_used(subscription.subscription_id)
        used_ms = max(used_here_ms, subscription.used_ms, subscription.created_ms)
        try:
            if now_ms - used_ms > lifetime_ms:
                await self._subscriptions.load()
                now = self._subscriptions.existing(subscription.name)
                # Another node may have recorded a use.
                if max(now.used_ms, now.created_ms) < now_ms - lifetime_ms:
                    await self._delete(subscription.name)
                    _logger.info("an unused subscription expired", extra={"subscription": subscription.name})
            elif used_here_ms - max(subscription.used_ms, subscription.created_ms) > lifetime_ms / NOTES_PER_LIFETIME:
                await self._subscriptions.record_use(subscription.name, used_here_ms)
        except UnknownSubscription:
            # Another node has deleted it.
            return
        except MillstreamError as error:
            _logger.warning(
                "a subscription could not be checked for expiry; retrying",
                extra={"subscription": subscription.name, "error": str(error)},
            )


def _pause_s(lifetime_ms: int) -> float:
    return min(max(lifetime_ms / NOTES_PER_LIFETIME / 1000, CHECK_S_MIN), CHECK_S_MAX)


OPEN_WAIT_S: Final = 1.0
"""How long a worker waits for queues that are being opened while others are ready."""
SETTLE_WAIT_S: Final = 30.0
RETRY_S_MAX: Final = 30.0
REOPEN_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    topics: Topics
    subscriptions: Subscriptions
    store: StateStore
    clock: Clock
    random: Random
    appender: DeadLetterAppender
    next_producer_id: Callable[[], Awaitable[ProducerId]]
    filter_cache: FilterCache
    forget: Callable[[Callable[[QueueKey], bool]], Awaitable[object]]
    """Deletes the stored states of deleted queues."""


@dataclass(frozen=True, slots=True)
class _OpenQueue:
    delivery: Delivery
    letters: DeadLetters


class Engine:
    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._open: dict[QueueKey, _OpenQueue] = {}
        self._opening: dict[QueueKey, asyncio.Task[Delivery]] = {}
        self._watched_topics: set[str] = set()
        # Queues whose opening is being retried.
        self._retrying: set[tuple[QueueKey, Partition]] = set()
        self._opening_waiters: dict[UUID, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outcome_budget = OutcomeBudget()
        self._closed = False

    def start(self) -> None:
        """Open the queues of all subscriptions, and follow later declarations."""
        self._dependencies.subscriptions.on_change(self._declarations_changed)
        self._dependencies.topics.on_deletion(self._topic_deleted)
        self._declarations_changed()

    async def close(self) -> None:
        """Close all queues and end all waits; the next leaders write the remaining dead letters."""
        self._closed = True
        for task in [*self._opening.values(), *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._opening.values(), *self._tasks, return_exceptions=True)
        for opened in list(self._open.values()):
            opened.delivery.close(PartitionClosed("the broker is stopping"))
            await opened.letters.close()
        for subscription_id in list(self._opening_waiters):
            self._notify_opened(subscription_id)
        await self._dependencies.appender.close()
        await self._dependencies.filter_cache.stop()

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def tasks(self) -> int:
        """The number of running tasks, without those of the queues."""
        return len(self._tasks)

    @property
    def deliveries(self) -> Iterable[Delivery]:
        return [opened.delivery for opened in self._open.values()]

    def opened(self, key: QueueKey) -> Delivery | None:
        queue = self._open.get(key)
        return None if queue is None else queue.delivery

    async def delivery(self, subscription: Subscription, partition: Partition) -> Delivery:
        """Return the queue of a subscription on a partition that this node leads, restoring it if necessary."""
        ready = self._find_open(subscription, partition)
        if ready is not None:
            return ready
        key = QueueKey(subscription.subscription_id, partition.topic.topic_id, partition.index)
        opening = self._opening.get(key)
        return await (self._begin_opening(subscription, partition, key) if opening is None else asyncio.shield(opening))

    async def replace(self, subscription: Subscription, partition: Partition, start: Offset) -> Delivery:
        """Open a queue whose state cannot be read with a new one, which starts at an offset."""
        key = QueueKey(subscription.subscription_id, partition.topic.topic_id, partition.index)
        while (opening := self._opening.get(key)) is not None:
            await asyncio.wait([opening])
        return self._find_open(subscription, partition) or await self._begin_opening(
            subscription, partition, key, start
        )

    def _begin_opening(
        self, subscription: Subscription, partition: Partition, key: QueueKey, replaced_at: Offset | None = None
    ) -> asyncio.Future[Delivery]:
        work = self._open_queue(subscription, partition, key, replaced_at)
        opening = self._opening[key] = asyncio.get_running_loop().create_task(work)
        opening.add_done_callback(lambda done: self._opening_finished(key, done))
        return asyncio.shield(opening)

    def _find_open(self, subscription: Subscription, partition: Partition) -> Delivery | None:
        """Return the queue of a subscription on a partition if it is open; one of an earlier epoch is closed."""
        key = QueueKey(subscription.subscription_id, partition.topic.topic_id, partition.index)
        queue = self._open.get(key)
        if queue is None:
            return None
        if queue.delivery.leader_epoch == partition.leader_epoch and partition.is_leader:
            return queue.delivery
        queue.delivery.close(NotLeader(f"{partition.log.partition} has a new leader epoch"))
        return None

    def ready(self, subscription: Subscription, partitions: Sequence[Partition]) -> list[Delivery] | None:
        """Return the queues on some partitions if all of them are open."""
        ready = [queue for partition in partitions if (queue := self._find_open(subscription, partition)) is not None]
        return ready if len(ready) == len(partitions) else None

    async def deliveries_of(self, subscription: Subscription, partitions: Sequence[Partition]) -> list[Delivery]:
        """Open the queues on some partitions; those that fail are left out unless all fail."""
        ready = self.ready(subscription, partitions)
        if ready is not None:
            return ready
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.delivery(subscription, partition)) for partition in partitions]
        try:
            await asyncio.wait(tasks, timeout=OPEN_WAIT_S)
            if not any(task.done() and task.exception() is None for task in tasks):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The opening itself continues.
            for task in tasks:
                task.cancel()
            done = [task for task in tasks if task.done() and not task.cancelled()]
            opened = [task.result() for task in done if task.exception() is None]
        return opened or [task.result() for task in done]

    def next_opening(self, subscription: Subscription) -> asyncio.Future[None]:
        """Return a future that is done when another queue of a subscription opens here, or none will."""
        if self._closed:
            # Nothing would complete the future, and stopping the node would wait for it.
            raise PartitionClosed("the broker is stopping")
        waiter = self._opening_waiters.get(subscription.subscription_id)
        if waiter is None:
            waiter = self._opening_waiters[subscription.subscription_id] = asyncio.get_running_loop().create_future()
        return waiter

    def release_worker(self, subscription: Subscription, worker: str) -> None:
        for opened in list(self._open.values()):
            if opened.delivery.key.subscription_id == subscription.subscription_id:
                opened.delivery.release_worker(worker)

    def oldest_needed(
        self, topic_id: UUID, partition: PartitionIndex, subscribed: Iterable[Subscription]
    ) -> list[Offset]:
        """Return the oldest unfinished offset of each queue on a partition; 0 for a queue that is not open."""
        keys = {QueueKey(subscription.subscription_id, topic_id, partition) for subscription in subscribed}
        keys.update(key for key in self._open if key.topic_id == topic_id and key.partition == partition)
        opened = [self._open.get(key) for key in keys]
        return [Offset(0) if queue is None else queue.delivery.queue.oldest for queue in opened]

    def close_queues(self, subscription_id: UUID, topic_id: UUID) -> None:
        """Close the queues of a subscription on a topic; they are restored when next used."""
        self._close_all(
            lambda key: key.subscription_id == subscription_id and key.topic_id == topic_id,
            NotLeader("the queue is being reset"),
        )

    # Internals

    async def _open_queue(
        self, subscription: Subscription, partition: Partition, key: QueueKey, replaced_at: Offset | None
    ) -> Delivery:
        dependencies = self._dependencies
        if self._closed or not partition.is_leader:
            raise NotLeader(f"{partition.log.partition} is not led by this node")
        if partition.topic.mirror:
            raise _mirrored_error(partition)
        _check_delivers(subscription, partition)
        epoch = Epoch(partition.leader_epoch)
        stored = await dependencies.store.load(key, epoch)
        if replaced_at is not None:
            snapshot = _new_state(key, replaced_at, stored.sequence)
            stored = StoredQueue(snapshot, stored.sequence + 1)
            await dependencies.store.write(QueueWrite(key, epoch, stored.sequence, snapshot))
        if stored.snapshot is None and not subscription.topics:
            # It may start at the end of the partition, which a new leader does not know immediately.
            await _wait_settled(partition)
        try:
            queue = await self._restore_queue(subscription, key, epoch, stored.snapshot)
        except CorruptState as error:
            raise CorruptState(
                f"the state of {subscription.name!r} on {partition.log.partition} cannot be read: {error}; "
                f"replace it with `millstream subscription seek {subscription.name} --topic {partition.topic.name} "
                f"--partition {partition.index} --to OFFSET`"
            ) from error
        settings, now_ms = queue.settings, dependencies.clock.now_ms()
        initial = None
        if not queue.is_started:
            initial = await _initial_offset(self._still_declared(subscription), settings, partition, now_ms)
        declared = self._still_declared(subscription)
        if self._closed or not partition.is_leader or partition.leader_epoch != epoch:
            raise NotLeader(f"{partition.log.partition} is no longer led by this node")
        if partition.topic.mirror:
            raise _mirrored_error(partition)
        _check_delivers(declared, partition)
        if initial is not None:
            queue.begin(initial, now_ms=now_ms)
        elif queue.fold.window.end > partition.log.end_offset:
            _rewind(queue, partition, dependencies.clock.now_ms())
        queue_filter = self._filter_for(settings, partition)
        delivery = Delivery(
            key,
            queue,
            partition,
            dependencies.store,
            dependencies.clock,
            next_sequence=stored.sequence + 1,
            name=declared.name,
            queue_filter=queue_filter,
            opener=dependencies.filter_cache.open_batch,
        )
        letters = DeadLetters(
            delivery,
            dependencies.appender,
            dependencies.clock,
            subscription=declared.name,
            next_producer_id=dependencies.next_producer_id,
            random=dependencies.random,
        )
        delivery.on_closed = self._queue_closed
        delivery.outcomes.share(self._outcome_budget)
        self._open[key] = _OpenQueue(delivery, letters)
        delivery.queue_changed()
        await delivery.durable()
        self._notify_opened(key.subscription_id)
        return delivery

    async def _restore_queue(
        self, subscription: Subscription, key: QueueKey, epoch: Epoch, snapshot: bytes | None
    ) -> Queue:
        """Restore the stored queue with the current settings."""
        while True:
            settings = self._dependencies.subscriptions.settings_of(self._still_declared(subscription))
            if snapshot is None:
                return Queue(key, settings, leader_epoch=epoch)
            # Restoring a large window takes a while.
            queue = await asyncio.to_thread(Queue, key, settings, leader_epoch=epoch, snapshot=snapshot)
            if self._dependencies.subscriptions.settings_of(self._still_declared(subscription)) == settings:
                return queue

    def _still_declared(self, subscription: Subscription) -> Subscription:
        declared = self._dependencies.subscriptions.by_id(subscription.subscription_id)
        if declared is None:
            raise UnknownSubscription(f"subscription {subscription.name!r} was deleted")
        return declared

    def _opening_finished(self, key: QueueKey, opening: asyncio.Task[Delivery]) -> None:
        self._opening.pop(key, None)
        if not opening.cancelled():
            # The caller may have gone, and the exception must be retrieved.
            opening.exception()

    def _notify_opened(self, subscription_id: UUID) -> None:
        waiter = self._opening_waiters.pop(subscription_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _queue_closed(self, delivery: Delivery) -> None:
        queue = self._open.get(delivery.key)
        if queue is not None and queue.delivery is delivery:
            del self._open[delivery.key]
            self._spawn(queue.letters.close())
            self._spawn(self._reopen(delivery))

    def _declarations_changed(self) -> None:
        dependencies = self._dependencies
        for subscription_id in [
            waiter for waiter in self._opening_waiters if dependencies.subscriptions.by_id(waiter) is None
        ]:
            self._notify_opened(subscription_id)
        for opened in list(self._open.values()):
            declared = dependencies.subscriptions.by_id(opened.delivery.key.subscription_id)
            if declared is None:
                opened.delivery.close(UnknownSubscription("the subscription was deleted"))
                continue
            if declared.topics and opened.delivery.topic not in declared.topics:
                opened.delivery.close(UnknownSubscription("the subscription no longer has this topic"))
                continue
            settings = dependencies.subscriptions.settings_of(declared)
            if settings != opened.delivery.settings:
                self._apply_settings(opened.delivery, settings)
        for subscription in dependencies.subscriptions.all():
            for topic in subscription.topics:
                self._watch_leadership(topic)
        self._open_all()
        self._spawn(self._delete_states(lambda key: dependencies.subscriptions.is_deleted(key.subscription_id)))

    def _apply_settings(self, delivery: Delivery, settings: SubscriptionSettings) -> None:
        if settings.ordered != delivery.settings.ordered:
            # An ordered queue keeps other state about its messages, so it is restored.
            delivery.close(NotLeader("the queue restarts because its ordering was changed"))
            return
        try:
            delivery.change(settings, self._filter_for(settings, delivery.partition))
        except MillstreamError as error:
            # A newer node may have declared a filter that this version cannot read.
            delivery.close(error)

    def _filter_for(self, settings: SubscriptionSettings, partition: Partition) -> QueueFilter | None:
        if not settings.filter:
            return None
        return QueueFilter(self._dependencies.filter_cache, partition.log.partition, compile_filter(settings.filter))

    def _topic_deleted(self, topic: Topic) -> None:
        error = PartitionClosed(f"topic {topic.name!r} was deleted")
        self._close_all(lambda key: key.topic_id == topic.topic_id, error)
        self._spawn(self._delete_states(lambda key: key.topic_id == topic.topic_id))

    def _watch_leadership(self, topic: str) -> None:
        if topic not in self._watched_topics:
            self._watched_topics.add(topic)
            self._dependencies.topics.on_leadership_change(topic, lambda _index, led: self._partition_led(topic, led))

    def _partition_led(self, topic: str, led: Partition | None) -> None:
        """Open the queues of a partition that this node leads from now on; those of a copy are its source's."""
        if led is None or self._closed:
            return
        if led.topic.mirror:
            reason = _mirrored_error(led)
            self._close_all(lambda key: key.topic_id == led.topic.topic_id and key.partition == led.index, reason)
            return
        for subscription in self._dependencies.subscriptions.all():
            if topic in subscription.topics:
                self._open_partition(subscription, led)

    def _open_all(self) -> None:
        for subscription in self._dependencies.subscriptions.all():
            for topic in subscription.topics:
                self._open_topic(subscription, topic)

    def _open_topic(self, subscription: Subscription, name: str) -> None:
        """Open the queues of a topic, so that they hold messages published from now on."""
        topic = self._dependencies.topics.get(name)
        if topic is None or self._closed:
            return
        for partition in self._dependencies.topics.partitions_of(topic):
            self._open_partition(subscription, partition)

    def _open_partition(self, subscription: Subscription, partition: Partition) -> None:
        key = QueueKey(subscription.subscription_id, partition.topic.topic_id, PartitionIndex(partition.index))
        if partition.topic.mirror:
            return
        if partition.is_leader and key not in self._open and (key, partition) not in self._retrying:
            self._retrying.add((key, partition))
            self._spawn(self._open_with_retry(subscription, partition, key))

    async def _reopen(self, delivery: Delivery) -> None:
        """Reopen a queue that was closed but may still be led here, since it may have letters to write or leases to
        end.
        """
        await asyncio.sleep(REOPEN_S)
        declared = self._dependencies.subscriptions.by_id(delivery.key.subscription_id)
        if declared is not None and delivery.topic in declared.topics:
            self._open_topic(declared, delivery.topic)

    async def _open_with_retry(self, subscription: Subscription, partition: Partition, key: QueueKey) -> None:
        """Open a queue, retrying until it succeeds."""
        backoff = Backoff(self._dependencies.random, max_s=RETRY_S_MAX)
        try:
            while partition.is_leader and self._dependencies.subscriptions.by_id(key.subscription_id) is not None:
                try:
                    await self.delivery(subscription, partition)
                except MillstreamError as error:
                    details = {"queue": subscription.name, "error": str(error)}
                    _logger.debug("a queue could not be opened; retrying", extra=details)
                    await backoff.pause()
                else:
                    return
        finally:
            self._retrying.discard((key, partition))

    async def _delete_states(self, is_gone: Callable[[QueueKey], bool]) -> None:
        try:
            await self._dependencies.forget(is_gone)
        except MillstreamError as error:
            _logger.debug("the states of deleted queues could not be removed yet", extra={"error": str(error)})

    def _close_all(self, is_gone: Callable[[QueueKey], bool], reason: MillstreamError) -> None:
        for key, opened in list(self._open.items()):
            if is_gone(key):
                opened.delivery.close(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_finished)

    def _task_finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a background task of the subscriptions failed", exc_info=error)


def _new_state(key: QueueKey, start: Offset, sequence: int) -> bytes:
    fold = Fold(key)
    fold.apply(Delta(DeltaKind.START, start, start, 0, 0, "", 0))
    # Frames of the state that it replaces have lower sequences, so that the ledger does not confuse them.
    fold.sequence = sequence + 1
    return write_snapshot(fold)


def _mirrored_error(partition: Partition) -> MirroredTopic:
    mirror = partition.topic.mirror
    return MirroredTopic(
        f"topic {partition.topic.name!r} is a copy of mirror {mirror!r}; its messages are delivered at the source, and "
        f"here after `millstream mirror failover {mirror}`"
    )


def _check_delivers(subscription: Subscription, partition: Partition) -> None:
    """Raise `UnknownTopic` for a topic that the subscription does not deliver; a share group delivers any."""
    if subscription.topics and partition.topic.name not in subscription.topics:
        raise UnknownTopic(f"subscription {subscription.name!r} does not deliver topic {partition.topic.name!r}")


async def _wait_settled(partition: Partition) -> None:
    try:
        async with asyncio.timeout(SETTLE_WAIT_S):
            await partition.settled()
    except TimeoutError:
        raise RequestTimedOut(f"{partition.log.partition} has records that are not acknowledged yet") from None


def _rewind(queue: Queue, partition: Partition, now_ms: int) -> None:
    """Move a queue back because its log lost messages that it had seen, so that their replacements are delivered."""
    place = min(queue.oldest, partition.log.end_offset)
    _logger.warning(
        "a queue moves back because its partition lost messages",
        extra={"partition": str(partition.log.partition), "from": queue.fold.window.end, "to": place},
    )
    queue.seek(place, now_ms=now_ms)


async def _initial_offset(
    subscription: Subscription, settings: SubscriptionSettings, partition: Partition, now_ms: int
) -> Offset:
    """Return the first offset of a queue that was never opened."""
    if subscription.topics:
        start = subscription.start_on(partition.topic.name, partition.topic.topic_id, partition.index)
        # A partition that was added after the subscription is delivered from its beginning.
        return partition.log_start if start is None else Offset(max(start, partition.log_start))
    return await start_offset(settings, partition, now_ms)


async def start_offset(settings: SubscriptionSettings, partition: Partition, now_ms: int) -> Offset:
    """Resolve the declared start to an offset."""
    end = readable_end(partition, settings.isolation)
    time_ms = settings.start_time_ms(now_ms)
    if time_ms is None:
        return partition.log_start if settings.start == EARLIEST else end
    result = await partition.log.find_time(time_ms, up_to=end)
    return end if result is None else Offset(max(result[0], partition.log_start))


Count = Callable[[Delivery], float]

_COUNTED: Final[tuple[tuple[str, Kind, str, Count], ...]] = (
    ("backlog", "gauge", "Unfinished messages (approximate).", lambda delivery: delivery.backlog),
    ("available", "gauge", "Messages waiting for a worker (approximate).", lambda delivery: delivery.available),
    ("leased", "gauge", "Messages held by workers.", lambda delivery: delivery.queue.counts.leased),
    (
        "parked",
        "gauge",
        "Messages waiting for a time, or behind an earlier message of their key.",
        lambda delivery: delivery.queue.counts.parked + delivery.queue.counts.blocked,
    ),
    (
        "rejecting",
        "gauge",
        "Messages on their way to the dead letter topic.",
        lambda delivery: delivery.queue.counts.rejecting,
    ),
    (
        "refused_letters",
        "gauge",
        "Messages that the dead letter topic refuses, as they are too large for it or cannot be read.",
        lambda delivery: len(delivery.refused_letters),
    ),
    ("workers_waiting", "gauge", "Workers waiting for a message.", lambda delivery: delivery.waiting),
    ("accepted_total", "counter", "Messages accepted.", lambda delivery: delivery.queue.counter(DeltaKind.ACCEPTED)),
    ("retried_total", "counter", "Deliveries after the first.", lambda delivery: delivery.queue.redelivered),
    ("expired_total", "counter", "Leases that expired.", lambda delivery: delivery.queue.counter(DeltaKind.EXPIRED)),
    (
        "dead_lettered_total",
        "counter",
        "Messages moved to the dead letter topic.",
        lambda delivery: delivery.queue.counter(DeltaKind.DEAD_LETTERED),
    ),
    (
        "dropped_total",
        "counter",
        "Messages dropped.",
        lambda delivery: delivery.queue.counter(DeltaKind.DROPPED),
    ),
    (
        "damaged_total",
        "counter",
        "Messages skipped because they are lost or unreadable.",
        lambda delivery: delivery.damaged,
    ),
    (
        "filtered_total",
        "counter",
        "Messages excluded by the filter.",
        lambda delivery: delivery.queue.counter(DeltaKind.FILTERED),
    ),
)

NameOf = Callable[[UUID], str | None]


def delivery_metrics(deliveries: Iterable[Delivery], name_of: NameOf, clock: Clock) -> Iterator[Metric]:
    """Yield every metric of every subscription with open queues."""
    by_name: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        name = name_of(delivery.key.subscription_id)
        # Dead letters wait for operators rather than workers, and have separate metrics.
        if name is not None and not name.startswith(LETTERS_PREFIX):
            by_name.setdefault(name, []).append(delivery)
    for suffix, kind, help_text, count in _COUNTED:
        samples = [Sample(sum(map(count, group)), (("subscription", name),)) for name, group in by_name.items()]
        yield Metric(f"millstream_subscription_{suffix}", kind, help_text, samples)
    now_ms = clock.now_ms()
    ages = [
        Sample(max((queue.oldest_age_ms(now_ms) for queue in group), default=0) / 1000, (("subscription", name),))
        for name, group in by_name.items()
    ]
    yield Metric("millstream_subscription_oldest_age_seconds", "gauge", "Age of the oldest unfinished message.", ages)
    latencies = [
        Sample(
            queue.latency.distribution(), (("subscription", name), ("topic", queue.topic), ("partition", queue.index))
        )
        for name, group in by_name.items()
        for queue in group
    ]
    yield Metric(
        "millstream_subscription_delivery_seconds",
        "histogram",
        "Time from a batch's timestamp to the first delivery of its messages.",
        latencies,
    )


def letter_metrics(partitions: Iterable[tuple[Partition, Delivery | None]], clock: Clock) -> Iterator[Metric]:
    """Yield the open letters of dead letter topics; all letters are open until their topic has a queue."""
    now_ms = clock.now_ms()
    opened: dict[str, int] = {}
    ages: dict[str, int] = {}
    for partition, delivery in partitions:
        topic = partition.topic.name
        if delivery is None:
            first, end = partition.log_start, partition.high_watermark
            letters = end - first - failover_marks(partition, first, end)
        else:
            letters = delivery.backlog
        oldest = partition.log_start if delivery is None else delivery.queue.oldest
        opened[topic] = opened.get(topic, 0) + letters
        ages[topic] = max(ages.get(topic, 0), age_ms(partition, oldest, now_ms))
    yield Metric(
        "millstream_dead_letters_open",
        "gauge",
        "Dead letters that were neither redriven nor purged.",
        [Sample(count, (("topic", topic),)) for topic, count in opened.items()],
    )
    yield Metric(
        "millstream_dead_letters_oldest_age_seconds",
        "gauge",
        "Age of the oldest open dead letter.",
        [Sample(age / 1000, (("topic", topic),)) for topic, age in ages.items()],
    )
