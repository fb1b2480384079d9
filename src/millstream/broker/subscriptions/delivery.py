"""Run one queue: scan its log ahead, deliver messages to workers, and make every change durable.

Waiting workers are woken when the log grows, a message returns, or a time is reached. Decisions are made on the loop
without an `await`. When a response waits for the store depends on the delivery mode of the subscription:

    at-most-once    a message is done, durably, before it is delivered
    at-least-once   a lease is written with the next write, or soon; an acceptance is durable before it is acknowledged
    exactly-once    both are durable before they are acknowledged
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.filter_cache import QueueFilter
from millstream.broker.subscriptions.frame import LEDGER_OFF, LEDGER_ON, LEDGER_OPENED, LEDGER_PERIODIC, LedgerNames
from millstream.broker.subscriptions.lease import DeltaKind, HeldRange, Lease, Origin, Revival, Settlement
from millstream.broker.subscriptions.log_scan import (
    SCANNED_BYTES_MAX,
    ScannedRange,
    batches_covering,
    failover_marks,
    join_adjacent,
    keys_in_batch,
    read_batches,
    readable_end,
    scan_heavy_batch,
    scan_log,
)
from millstream.broker.subscriptions.outcomes import FRAMES_BYTES_MAX, LEDGER_FRAMES_BYTES_MAX, OutcomeHistory
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.state_store import PendingWrite, QueueWrite, StateStore
from millstream.core.clock import Clock
from millstream.core.errors import (
    CoordinatorUnavailable,
    DamagedRange,
    FencedLeaderEpoch,
    InvalidRequest,
    MillstreamError,
    NotCoordinator,
    NotLeader,
    OffsetOutOfRange,
    RepairPending,
)
from millstream.core.ids import Epoch, Offset
from millstream.core.metric import LATENCY_BOUNDS_S, Histogram
from millstream.core.subscription import AT_LEAST_ONCE, QueueKey, SubscriptionSettings, Verb
from millstream.protocol.records.batch import BatchHeader, Buffer, iterate_whole_headers

if TYPE_CHECKING:
    from millstream.broker.subscriptions.receiving import Wait

_logger = logging.getLogger(__name__)


SCAN_BYTES: Final = 1024 * 1024

SCAN_OFFSETS: Final = 50_000

SCAN_OFFSETS_ORDERED: Final = 2_000
"""In an ordered queue every message is decoded for its key, which costs the loop a few milliseconds."""

READ_BYTES_MIN: Final = 64 * 1024

SCANS_PER_TURN: Final = 8
"""The number of ranges that are scanned in one turn of the loop while none of them holds a message to deliver."""

WAITING_MAX: Final = 10_000

ORIGINS_KEPT: Final = 64
"""Workers without leases whose client is remembered."""

FILTER_RETRY_S: Final = 1.0

STORE_FULL_RETRY_S: Final = 0.5

LEASE_WRITE_DELAY_S: Final = 0.02
"""How long a lease that may be lost in a crash waits to be written together with something else. Many messages are
accepted by then, which saves one of two writes.
"""

WRITE_INTERVAL_S: Final = 0.003
"""The minimum interval between the writes of a queue whose workers wait for messages. Acknowledgements that arrive in
between are written together, which saves most of their cost; an acknowledgement after a pause is written at once.
"""

CLOCK_SKEW_MS: Final = 600_000
"""How far the clocks of publishers may be ahead of the clock of the node."""

DROP_WARNING_S: Final = 60.0
"""The minimum interval between log lines about dropped messages."""

ALARM_S_MAX: Final = 3600.0
"""Alarms are set no further ahead, since the wall clock may be corrected in between."""

WINDOW_FRAMES: Final = 2000
"""How many frames of a queue with a ledger lie between two windows."""

_RESTARTS: Final = (
    "it restarts from its stored state: nothing confirmed is lost, and messages held by workers may be delivered again"
)

_DAMAGE_WORKER: Final = "millstream/damage"

_INT64_MAX: Final = 2**63 - 1


class ReceivedMessages(NamedTuple):
    """Leases granted to a worker, and the batches that hold their messages."""

    leases: list[Lease]
    batches: list[memoryview]


NOTHING: Final = ReceivedMessages([], [])


class Demand(NamedTuple):
    worker: str
    max_records: int
    max_bytes: int
    whole_batches: bool = False
    """Whether a batch that is delivered in part is delivered as a whole, beyond `max_records`."""
    at_least_one: bool = True
    """Whether the first batch is delivered even if it exceeds `max_bytes`, so that a worker always makes progress."""
    origin: Origin = Origin()


def age_ms(partition: Partition, offset: Offset, now_ms: int) -> int:
    """Return the age of the first message from an offset on, by its batch's timestamp; 0 without a message."""
    oldest = max(offset, partition.log_start)
    if oldest >= partition.last_stable_offset:
        return 0
    try:
        records = partition.read(oldest, max_bytes=1)
    except MillstreamError:
        return 0
    header = next(iterate_whole_headers(records), None)
    return 0 if header is None else max(0, now_ms - header.max_timestamp_ms)


class Delivery:
    """The queue of one subscription on one partition that this node leads."""

    def __init__(
        self,
        key: QueueKey,
        queue: Queue,
        partition: Partition,
        store: StateStore,
        clock: Clock,
        *,
        next_sequence: int,
        name: str = "",
        queue_filter: QueueFilter | None = None,
        opener: Callable[[ScannedRange], Awaitable[ScannedRange]] | None = None,
    ) -> None:
        self.key = key
        self.name = name
        self.queue = queue
        self.partition = partition
        self.leader_epoch = Epoch(partition.leader_epoch)
        self.last_used_ms = 0
        """When a worker last used the queue; 0 if none has since it was opened."""
        self.turn = 0
        """When the queue was last the first of several to be asked, counted over all requests."""
        self.latency = Histogram(LATENCY_BOUNDS_S)
        """The time from a batch's timestamp to the first delivery of its messages."""
        self.damaged = 0
        """Offsets skipped since the queue was opened because they are damaged or unreadable."""
        self.refused_letters: set[Offset] = set()
        """Messages that the dead letter topic refuses for their content."""
        self.letter_refusal = ""
        """The reason why it refused the last of them, and what to do."""
        self.on_rejecting: Callable[[], None] = lambda: None
        """Called when messages are on their way to the dead letter topic."""
        self.on_closed: Callable[[Delivery], None] = lambda _delivery: None
        self._store = store
        self._clock = clock
        self._next_sequence = next_sequence
        self._filter = queue_filter
        self._opener = opener
        self._scanning: asyncio.Task[bool] | None = None
        # The last scanned range, while it is being leased, so that it is read only once.
        self._scanned: ScannedRange | None = None
        # By worker: those with leases, and some that had some.
        self._origins: dict[str, Origin] = {}
        # In the order of arrival.
        self._waiting: dict[Wait, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._leases_timer: asyncio.TimerHandle | None = None
        self._alarm_at_ms = 0
        self._dropped = queue.counter(DeltaKind.DROPPED)
        self._drops_timer: asyncio.TimerHandle | None = None
        self._is_wake_scheduled = False
        self._is_serving = False
        # Whether more is left to scan than one turn of the loop allows, and whether the store was full.
        self._has_more_to_scan = False
        self._is_store_full = False
        # The size of a message, estimated from the last read.
        self._message_bytes = 1024
        self._last_write: PendingWrite | None = None
        # Waiters of requests that arrived during the last write, or soon after; their changes are written together.
        self._next_write: PendingWrite | None = None
        self._shared_until = 0.0
        self._write_timer: asyncio.TimerHandle | None = None
        self.outcomes = OutcomeHistory()
        self._marked_sequence = 0
        self._closed: MillstreamError | None = None
        self._record_filter_version()
        self._apply_ledger()
        partition.listen(self)

    @property
    def settings(self) -> SubscriptionSettings:
        return self.queue.settings

    @property
    def is_closed(self) -> bool:
        """Whether the queue is led elsewhere or was deleted."""
        return self._closed is not None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def backlog(self) -> int:
        """The approximate number of unfinished messages."""
        return self.queue.fold.unfinished + self.unscanned

    @property
    def available(self) -> int:
        """The approximate number of messages that wait for a worker."""
        return self.queue.available_count + self.unscanned

    @property
    def unscanned(self) -> int:
        """The number of messages that were not scanned yet; it is approximate, since some may be filtered out."""
        first, end = self.queue.fold.window.end, readable_end(self.partition, self.settings.isolation)
        return max(0, end - first - failover_marks(self.partition, first, end))

    @property
    def topic(self) -> str:
        return self.partition.topic.name

    @property
    def index(self) -> str:
        """The partition number, as a metric label."""
        return str(self.partition.index)

    def oldest_age_ms(self, now_ms: int) -> int:
        """Return the age of the oldest unfinished message, by its batch's timestamp; 0 without one."""
        return 0 if self._closed is not None else age_ms(self.partition, self.queue.oldest, now_ms)

    # Workers

    def try_receive(self, demand: Demand) -> ReceivedMessages:
        """Lease the messages that are available now; `leases_durable` waits until the worker may get a response."""
        self._check_open()
        self.last_used_ms = self._clock.now_ms()
        if not self._may_deliver or self._is_drained(self.last_used_ms):
            return NOTHING
        self._prepare(demand.max_records)
        received = self._lease(demand, demand.max_records)
        self._scanned = None
        self.queue_changed()
        return received

    def park(self, waiter: Wait) -> None:
        """Let a worker wait for messages, unless too many wait already."""
        self._check_open()
        if len(self._waiting) < WAITING_MAX:
            self._waiting[waiter] = None
            if self._has_more_to_scan or self._is_store_full or self._has_available:
                self.wake_waiting()
            self._set_alarm()

    def forget(self, waiter: Wait) -> None:
        """Stop a worker's wait."""
        self._waiting.pop(waiter, None)

    async def leases_durable(self) -> None:
        """Wait until leases that were just granted may be delivered."""
        if self.settings.delivery != AT_LEAST_ONCE:
            await self.durable()

    async def settle(self, worker: str, verbs: Sequence[Settlement]) -> list[MillstreamError | None]:
        """Settle leases of a worker; return when that is durable."""
        results = self.settle_now(worker, verbs)
        await self.durable()
        return results

    def settle_now(self, worker: str, verbs: Sequence[Settlement]) -> list[MillstreamError | None]:
        """Settle leases without waiting; `durable` waits until the worker may get a response."""
        self._check_open()
        self.last_used_ms = self._clock.now_ms()
        results: list[MillstreamError | None] = [*self.queue.settle(worker, verbs, now_ms=self.last_used_ms)]
        self.queue_changed()
        return results

    def settle_all(self, worker: str, settlements: Sequence[Settlement], gaps: Sequence[Settlement] = ()) -> None:
        """Settle all ranges, or raise and change nothing; no range is named twice.

        Gaps are offsets in which the worker found no message: whether it holds them does not matter. `durable` waits
        until the worker may get a response.
        """
        end = self.partition.high_watermark
        if any(settlement.last >= end for settlement in (*settlements, *gaps)):
            raise InvalidRequest(f"{self.partition.log.partition} ends at {end}; no later message was delivered")
        if len(settlements) > 1:
            # Expired leases end first, so that a lease that is found to be held stays held.
            self.settle_now(worker, ())
            for settlement in settlements:
                if not self.queue.holds(worker, settlement):
                    raise settlement.not_held_by(worker)
        results = self.settle_now(worker, [*settlements, *gaps])
        refused = next((error for error in results[: len(settlements)] if error is not None), None)
        if refused is not None:
            raise refused

    def held_ranges(self) -> list[HeldRange]:
        """Return which worker holds which messages until when, the oldest first."""
        workers = self.queue.fold.workers.texts
        return [
            HeldRange(
                Offset(run.first),
                Offset(run.last),
                run.attempt,
                run.due_ms,
                worker := workers[run.holder],
                self.origin_of(worker),
            )
            for run in self.queue.fold.leased_runs()
        ]

    def origin_of(self, worker: str) -> Origin:
        """Return the client of a worker, as far as remembered."""
        return self._origins.get(worker, Origin())

    def record_origin(self, worker: str, origin: Origin, *, replaces: bool = True) -> None:
        """Remember the client of a worker that holds messages, and of a few others."""
        if not replaces and worker in self._origins:
            return
        self._origins[worker] = origin
        held = self.queue.fold.workers
        if len(self._origins) > 2 * len(held) + ORIGINS_KEPT:
            self._origins = {worker: known for worker, known in self._origins.items() if held.references(worker)}

    def release_worker(self, worker: str) -> None:
        if self._closed is None:
            self.queue.release_worker(worker, now_ms=self._clock.now_ms())
            self.queue_changed()

    async def durable(self, *, is_all: bool = False) -> None:
        """Wait until all changes so far are durable; without `is_all`, except those that a scan would find again."""
        written = self._write(is_all=is_all)
        if written is not None:
            await written

    async def stored_frames(self, offset: int) -> Sequence[bytes]:
        """Return the stored frames about a message, the oldest first; raise if they cannot be searched."""
        now_ms = self._clock.now_ms()
        # Its events are no older than the message, if the clock of its publisher is right.
        since_ms = now_ms - age_ms(self.partition, Offset(offset), now_ms) - CLOCK_SKEW_MS
        return await self._store.frames(self.key, offset, since_ms if offset >= self.partition.log_start else 0)

    def pending_write(self) -> PendingWrite | None:
        """Return the write with which all changes so far become durable; None if they are."""
        return self._write()

    def hasten_write(self) -> None:
        """Write pending changes without waiting for others: a response with messages waits for them."""
        self._shared_until = 0.0
        if self._write_timer is not None and self._closed is None:
            self._write_due()

    def seek(self, offset: Offset) -> None:
        """Continue at another offset; outstanding leases become void."""
        self._check_open()
        self.queue.seek(offset, now_ms=self._clock.now_ms())
        self.queue_changed()
        self.wake_waiting()

    async def revive(
        self, letters: Mapping[Offset, bytes], closed: Mapping[Offset, bytes], *, epoch: int
    ) -> list[Offset]:
        """Make dead letters available again; return the messages that the log no longer has.

        They were written in a leader epoch; those at their offsets may be other ones since a failover of a mirror.
        `closed` holds letters by which messages were revived before, and which will not be used again.
        """
        keys: dict[int, int] = {}
        next_offset = 0
        for offset in sorted(letters):
            if offset >= next_offset:
                found_keys, next_offset = await keys_in_batch(self.partition, offset)
                keys.update(found_keys)
        self._check_open()
        now_ms, log_start = self._clock.now_ms(), self.partition.log_start
        self.queue.drop_before(log_start, now_ms=now_ms)
        # A batch may begin before the start of the log.
        epoch_at = self.partition.log.epochs.epoch_at
        present = [
            Revival(offset, keys[offset], letter)
            for offset, letter in letters.items()
            if offset in keys and offset >= log_start and epoch_at(offset) == epoch
        ]
        self.queue.close_letters([Revival(offset, 0, letter) for offset, letter in closed.items()], now_ms=now_ms)
        self.queue.revive(present, now_ms=now_ms)
        self.queue_changed()
        await self.durable()
        return sorted(letters.keys() - {revival.offset for revival in present})

    def change(self, settings: SubscriptionSettings, queue_filter: QueueFilter | None) -> None:
        """Apply changed settings; messages that were scanned already keep their state."""
        if self.settings.ledger and not settings.ledger:
            # The last event, so that later ones are not expected.
            self.mark_window(LEDGER_OFF)
            self.queue_changed()
        if settings.delivery != self.settings.delivery:
            # It determines when a worker may get a response, so waiting workers must ask again.
            self._reject_waiting(CoordinatorUnavailable("the delivery mode of the subscription has changed"))
        self.queue.settings = settings
        if self._filter is not None:
            self._filter.close()
        self._filter = queue_filter
        self._record_filter_version()
        self._apply_ledger()
        self.wake_waiting()

    # Notifications

    def advanced(self, partition: Partition) -> None:
        """React to an advance of the log or a change of leadership."""
        try:
            if not partition.is_leader or partition.leader_epoch != self.leader_epoch:
                self.close(NotLeader(f"{partition.log.partition} is led by another node"))
            elif self._waiting:
                self.wake_waiting()
        except Exception:
            # The caller appends to the partition and must not be affected.
            _logger.exception("a queue could not follow its partition", extra={"queue": str(self.key)})

    def close(self, reason: MillstreamError) -> None:
        """Close the queue, which is led elsewhere or was deleted, and end all waits."""
        if self._closed is not None:
            return
        self._write_leases()
        if self._next_write is not None or self._write_timer is not None:
            self._write_pending()
        self._closed = reason
        self.partition.forget(self)
        if self._alarm is not None:
            self._alarm.cancel()
        if self._drops_timer is not None:
            self._drops_timer.cancel()
        if self._scanning is not None:
            self._scanning.cancel()
        if self._filter is not None:
            self._filter.close()
        self.outcomes.close()
        self._reject_waiting(reason)
        self.on_closed(self)

    def _reject_waiting(self, reason: MillstreamError) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter.reject(reason)

    @property
    def _has_available(self) -> bool:
        return self.queue.next_available is not None

    @property
    def _may_deliver(self) -> bool:
        if self.queue.settings.paused:
            return False
        self._is_store_full = not self._store.has_room(self.key)
        return not self._is_store_full

    def _is_drained(self, now_ms: int) -> bool:
        """Whether nothing can be leased before the log grows, a time is reached or a message returns.

        A worker that has caught up asks again after each message, so this is looked up without preparing the queue.
        """
        queue, partition = self.queue, self.partition
        return (
            not queue.available_count
            and queue.next_scan_offset >= readable_end(partition, queue.settings.isolation)
            and queue.is_ready
            and partition.log_start <= queue.oldest
            and queue.skip_tick(now_ms)
        )

    def _record_filter_version(self) -> None:
        """Record which filter decides from now on."""
        self.queue.filter_version = 0 if self._filter is None else int(self._filter.filter.version, 16) & _INT64_MAX

    def _apply_ledger(self) -> None:
        """Record events for the ledger from now on, or no longer."""
        is_on = self.settings.ledger
        self.outcomes.bytes_max = LEDGER_FRAMES_BYTES_MAX if is_on else FRAMES_BYTES_MAX
        was_on = self.queue.ledger is not None
        self.queue.ledger = LedgerNames(self.name, self.topic) if is_on else None
        if is_on and not was_on and self.queue.is_started:
            # The previous leader may have been notified already.
            self.mark_window(LEDGER_OPENED if self.queue.fold.has_ledger else LEDGER_ON)

    def mark_window(self, reason: str) -> None:
        """Record for the ledger which messages are unfinished now."""
        if self.queue.ledger is not None:
            self.queue.mark_window(reason, now_ms=self._clock.now_ms())
            self._marked_sequence = self.queue.fold.sequence

    def _mark_window_if_due(self) -> None:
        """Bound what an audit has to go through to find where an event is missing."""
        if self.queue.fold.sequence - self._marked_sequence >= WINDOW_FRAMES:
            self.mark_window(LEDGER_PERIODIC)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if not self.partition.is_leader or self.partition.leader_epoch != self.leader_epoch:
            self.close(NotLeader(f"{self.partition.log.partition} is led by another node"))
            self._check_open()

    def _lease(self, demand: Demand, max_records: int) -> ReceivedMessages:
        queue = self.queue
        # The scan may have taken a while. A message that became due in between may precede everything read below.
        queue.tick(now_ms := self._clock.now_ms())
        batches_read = self._read_oldest(demand, max_records)
        if batches_read is None:
            return NOTHING
        oldest, records, headers, ends = batches_read
        if not headers:
            return NOTHING
        until = headers[-1].next_offset
        self._message_bytes = (headers[-1].end_position - headers[0].position) // (until - oldest) + 1
        leases = queue.acquire(
            demand.worker,
            now_ms=now_ms,
            max_records=max_records,
            until=until,
            batch_ends=ends if demand.whole_batches else None,
        )
        if leases:
            self.record_origin(demand.worker, demand.origin)
        batches = batches_covering(headers, [(lease.first, lease.last) for lease in leases])
        if leases and leases[-1].attempt == 1:
            for batch in batches:
                self.latency.observe(max(0, now_ms - batch.max_timestamp_ms) / 1000)
        pieces = join_adjacent(records, batches)
        if 2 * sum(map(len, pieces)) < len(records):
            # The response must not keep a much larger buffer in memory.
            pieces = [memoryview(bytes(piece)) for piece in pieces]
        return ReceivedMessages(leases, pieces)

    def _read_oldest(
        self, demand: Demand, max_records: int
    ) -> tuple[Offset, Buffer, Sequence[BatchHeader], Sequence[int]] | None:
        """Read the log from the oldest available message, skipping offsets that the disk has lost.

        Returned are its offset, records from there on, the headers of their batches, and the offsets after batches.
        """
        while (oldest := self.queue.next_available) is not None:
            scanned, limit = self._scanned, self._read_limit(demand.max_bytes, max_records)
            if scanned is not None and scanned.first <= oldest < scanned.next_offset:
                headers = scanned.headers_from(oldest, limit, at_least_one=demand.at_least_one)
                return oldest, scanned.records, headers, scanned.ends
            try:
                records, _ = read_batches(
                    self.partition,
                    oldest,
                    self.settings.isolation,
                    max_bytes=limit,
                    at_least_one=demand.at_least_one,
                )
            except OffsetOutOfRange:
                # The log was truncated; what replaces it is scanned when the queue is opened again.
                return None
            except RepairPending:
                # Waiting workers are woken when the range is repaired, or when no replica has it.
                return None
            except DamagedRange as damage:
                if not self._reject_damaged(oldest, damage):
                    return None
            else:
                headers = [header for header in iterate_whole_headers(records) if header.next_offset > oldest]
                return oldest, records, headers, [header.next_offset for header in headers]
        return None

    def _read_limit(self, max_bytes: int, max_records: int) -> int:
        """Return how many bytes to read for a demand: clients allow far more than their messages take."""
        return min(max_bytes, max(READ_BYTES_MIN, 2 * max_records * self._message_bytes))

    def _prepare(self, demand: int) -> None:
        """Bring the queue up to date with the log and the clock, and scan ahead for some messages."""
        now_ms = self._clock.now_ms()
        self.queue.drop_before(self.partition.log_start, now_ms=now_ms)
        self.queue.tick(now_ms)
        self._scan_ahead(demand)

    def _reject_damaged(self, oldest: Offset, damage: DamagedRange) -> bool:
        """Remove messages that the disk has lost from the queue; return whether there were any."""
        now_ms = self._clock.now_ms()
        count = damage.end - oldest
        leases = self.queue.acquire(_DAMAGE_WORKER, now_ms=now_ms, max_records=count, until=damage.end)
        lost = [Settlement(lease.first, lease.last, Verb.REJECT, None, str(damage)) for lease in leases]
        self.queue.settle(_DAMAGE_WORKER, lost, now_ms=now_ms)
        self._report_damage(sum(lease.last - lease.first + 1 for lease in leases), damage)
        return bool(leases)

    def _report_damage(self, count: int, damage: DamagedRange) -> None:
        """Count and log messages that are not delivered because the disk has lost them."""
        if count:
            self.damaged += count
            place = {"topic": self.topic, "partition": self.partition.index, "offsets": count}
            place["subscription_id"] = self.key.subscription_id
            _logger.error("messages are skipped: %s", damage, extra=place)

    def _scan_ahead(self, demand: int) -> None:
        """Scan on until enough messages are available, or the log ends."""
        self._has_more_to_scan = False
        if self._filter is not None or self._scanning is not None:
            self._scan_in_background(demand)
            return
        scanned_bytes = 0
        for _ in range(SCANS_PER_TURN):
            scanned = self._scan_next(demand)
            if scanned is None:
                return
            if scanned.is_heavy:
                self._scan_in_background(demand)
                return
            self._apply_scan(scanned, None)
            self._scanned = scanned
            scanned_bytes += scanned.scanned_bytes
            if scanned_bytes > SCANNED_BYTES_MAX:
                break
        self._has_more_to_scan = True

    def _scan_in_background(self, demand: int) -> None:
        """Scan with the filter, or through a heavy batch, in a task; waiting workers are woken afterwards."""
        if self._scanning is None and self._needs_more(demand):
            self._scanning = asyncio.get_running_loop().create_task(
                self._scan_in_turns(demand), name=f"filter {self.key}"
            )
            self._scanning.add_done_callback(self._scan_finished)

    async def scan_settled(self, *, patience_s: float) -> None:
        """Wait, for a bounded time, until the current scan is done."""
        if self._scanning is not None:
            await asyncio.wait([self._scanning], timeout=patience_s)

    async def _scan_in_turns(self, demand: int) -> bool:
        """Scan until no more is needed; return whether a range follows that needs no task."""
        while self._closed is None:
            queue_filter = self._filter
            scanned = self._scan_next(demand)
            if scanned is None or (queue_filter is None and not scanned.is_heavy):
                return scanned is not None
            if scanned.is_heavy:
                scanned = await self._opener(scanned) if self._opener is not None else scan_heavy_batch(scanned)
            matches = None
            if queue_filter is not None:
                matched = await queue_filter.matches(scanned.records, scanned.first, scanned.next_offset)
                matches, scanned = matched.bits, scanned.without(matched.unreadable)
            if self._closed is None and self.queue.next_scan_offset == scanned.first and self._filter is queue_filter:
                self._apply_scan(scanned, matches)
                self.wake_waiting()
        return False

    def _scan_finished(self, looking: asyncio.Task[bool]) -> None:
        self._scanning = None
        error = None if looking.cancelled() else looking.exception()
        if self._closed is not None or looking.cancelled():
            return
        if error is not None:
            _logger.warning("a filter failed; retrying", extra={"queue": str(self.key), "error": str(error)})
            asyncio.get_running_loop().call_later(FILTER_RETRY_S, self.wake_waiting)
            return
        if looking.result():
            # A wake-up from within the task would have come too early: it would have found the scan still running.
            self.wake_waiting()
        try:
            self.queue_changed()
        except Exception as failure:
            self._restart_after_defect(failure)

    def _needs_more(self, demand: int) -> bool:
        queue = self.queue
        next_offset, end = queue.next_scan_offset, readable_end(self.partition, queue.settings.isolation)
        if next_offset >= end or self.partition.log_start >= end:
            return False
        # Some available messages may turn out to wait behind their key, and some keys may not be known yet.
        return not (queue.available_count >= demand and queue.next_available is not None) and queue.room > 0

    def _scan_next(self, demand: int) -> ScannedRange | None:
        """Scan the next range of the log; None if no more is needed or present."""
        partition, settings = self.partition, self.settings
        if not self._needs_more(demand):
            return None
        offsets_max = min(SCAN_OFFSETS_ORDERED if settings.ordered else SCAN_OFFSETS, self.queue.room)
        return scan_log(
            partition,
            Offset(max(self.queue.next_scan_offset, partition.log_start)),
            settings.isolation,
            max_bytes=min(SCAN_BYTES, READ_BYTES_MIN + 2 * offsets_max * self._message_bytes),
            offsets_max=offsets_max,
            with_keys=settings.ordered,
            with_times=settings.ledger,
        )

    def _apply_scan(self, scanned: ScannedRange, matches: npt.NDArray[np.bool_] | None) -> None:
        for first, last, reason in scanned.unreadable:
            place = {"queue": f"{self.topic}-{self.index}", "first": first, "last": last, "reason": reason}
            _logger.warning("unreadable messages are skipped", extra=place)
            self.damaged += last - first + 1
        self.queue.add_scanned(
            scanned.first,
            scanned.next_offset,
            now_ms=self._clock.now_ms(),
            absent=scanned.absent,
            matches=matches,
            keys=scanned.keys,
            delayed=scanned.delayed,
            published=scanned.published,
        )
        if scanned.damage is not None:
            self._report_damage(scanned.next_offset - scanned.first, scanned.damage)

    def queue_changed(self) -> None:
        """Do what follows every change: write it, set timers, wake workers."""
        if self.queue.ledger is not None:
            self._mark_window_if_due()
        self._write()
        if self.queue.has_leases and self._leases_timer is None:
            self._leases_timer = asyncio.get_running_loop().call_later(LEASE_WRITE_DELAY_S, self._write_leases)
        self.outcomes.check_finished(self.queue.fold)
        if self.queue.counter(DeltaKind.DROPPED) > self._dropped and self._drops_timer is None:
            self._warn_dropped()
        if self.queue.rejecting_count:
            self.on_rejecting()
        if self._waiting and not self._is_serving and self._has_available:
            self.wake_waiting()
        self._set_alarm()

    def _warn_dropped(self) -> None:
        """Log what was dropped since the last line, at once and then once a minute while there is more."""
        dropped = self.queue.counter(DeltaKind.DROPPED)
        count, self._dropped = dropped - self._dropped, dropped
        self._drops_timer = None
        if count and self._closed is None:
            _logger.warning(
                "%d messages were dropped: they exhausted their attempts or were rejected, and the subscription keeps "
                "no dead letters",
                count,
                extra={"subscription": self.name, "queue": f"{self.topic}-{self.index}", "dropped_total": dropped},
            )
            self._drops_timer = asyncio.get_running_loop().call_later(DROP_WARNING_S, self._warn_dropped)

    def _write(self, *, is_all: bool = False) -> PendingWrite | None:
        """Write pending changes that must be stored; return None when everything is durable."""
        if self._closed is not None:
            raise self._closed
        last = self._last_write
        is_idle = last is None or last.is_done
        if is_all or self.queue.is_urgent:
            if self.queue.has_many_pending or (is_idle and (is_all or not self._waits_for_others())):
                return self._write_pending()
            if self._next_write is None:
                self._next_write = PendingWrite()
            return self._next_write
        return None if last is None or (is_idle and last.error is None) else last

    def _waits_for_others(self) -> bool:
        """Whether changes may wait to be written with others; if so, a timer writes them.

        While workers wait, the next message goes to one of them, so no delivery depends on these changes.
        """
        if self._write_timer is not None:
            return True
        left_s = self._shared_until - self._clock.monotonic()
        if left_s <= 0 or not self._waiting or self.settings.delivery != AT_LEAST_ONCE:
            return False
        self._write_timer = asyncio.get_running_loop().call_later(left_s, self._write_due)
        return True

    def _write_due(self) -> None:
        waiting = self._next_write
        try:
            self._write_pending()
        except Exception as error:
            self._restart_after_defect(error)
            if waiting is not None:
                waiting.finish(self._closed)

    def _write_pending(self) -> PendingWrite | None:
        """Write all pending changes; return None when everything is durable."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._shared_until = self._clock.monotonic() + WRITE_INTERVAL_S
        waiting, self._next_write = self._next_write, None
        frame = self.queue.drain()
        if frame is not None:
            self.outcomes.add_frame(frame)
            written = self._store.write(QueueWrite(self.key, self.leader_epoch, self._next_sequence, frame))
            self._next_sequence += 1
            self._last_write = written
            written.listen(self._on_written)
        last = self._last_write
        if waiting is not None:
            if last is None:
                waiting.finish()
            else:
                last.listen(waiting.finish)
        return None if last is None or (last.is_done and last.error is None) else last

    def _write_leases(self) -> None:
        """Write leases that were not written together with anything else."""
        if self._leases_timer is not None:
            self._leases_timer.cancel()
            self._leases_timer = None
        if self._closed is None and self.queue.has_leases:
            self._write(is_all=True)

    def _on_written(self, error: MillstreamError | None) -> None:
        if error is not None:
            # Memory no longer matches the store: the queue is read back when it is next needed.
            if self._closed is None and not isinstance(error, (FencedLeaderEpoch, NotCoordinator)):
                self._log_restart(logging.WARNING, "the last changes of a queue could not be stored", str(error))
            self.close(NotLeader(f"the state of the queue could not be written: {error}"))
            return
        is_idle = self._last_write is not None and self._last_write.is_done
        if self._next_write is not None and is_idle and not self._waits_for_others():
            self._write_pending()
        if self._is_store_full:
            self.wake_waiting()

    def wake_waiting(self) -> None:
        if self._waiting and not self._is_wake_scheduled and self._closed is None:
            self._is_wake_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_waiting)

    def _serve_waiting(self) -> None:
        """Deliver available messages to the waiting workers, in turn and in equal parts."""
        self._is_wake_scheduled = False
        if self._closed is not None:
            return
        self._is_serving = True
        try:
            self._serve_all()
        except MillstreamError as error:
            self.close(error)
        except Exception as error:
            self._restart_after_defect(error)
        finally:
            self._is_serving = False
        if self._has_more_to_scan:
            self.wake_waiting()
        self._set_alarm()

    def _serve_all(self) -> None:
        self._check_open()
        if not self._may_deliver:
            # Any change of this also wakes the waiting workers.
            self._has_more_to_scan = False
            if self._is_store_full and (self._last_write is None or self._last_write.is_done):
                # Other queues fill the store, and do not notify this one when they have made room.
                asyncio.get_running_loop().call_later(STORE_FULL_RETRY_S, self.wake_waiting)
            return
        self.last_used_ms = self._clock.now_ms()
        self._prepare(self._total_demand())
        for waiter in list(self._waiting):
            if self._closed is not None or not self._serve(waiter) or self._is_drained(self.last_used_ms):
                break
        self._scanned = None
        if self._closed is None:
            self.queue_changed()

    def _total_demand(self) -> int:
        demand = 0
        for waiter in self._waiting:
            demand += waiter.demand.max_records
            if demand >= SCAN_OFFSETS:
                return SCAN_OFFSETS
        return demand

    def _serve(self, waiter: Wait) -> bool:
        """Serve one worker; return whether to continue with the next."""
        if waiter.is_done:
            self._waiting.pop(waiter, None)
            return True
        share = -(-max(1, self.queue.available_count) // len(self._waiting))
        demand = waiter.current_demand()
        if demand is None:
            return False
        if not self._has_available:
            # Earlier workers took more than they asked for, or hold the keys of the scanned messages.
            self._prepare(demand.max_records)
        received = self._lease(demand, min(demand.max_records, share))
        if received.leases:
            self._waiting.pop(waiter, None)
            waiter.deliver(self, received)
            return True
        # This worker may be at its limit while others are not.
        return self._has_available

    def _restart_after_defect(self, error: Exception) -> None:
        """Close the queue after an unexpected error; it is restored from its stored state."""
        self._log_restart(logging.ERROR, "a queue stopped because of a bug", str(error), error)
        self.close(CoordinatorUnavailable(f"the queue failed: {error}"))

    def _log_restart(self, level: int, what: str, why: str, defect: Exception | None = None) -> None:
        place = {"queue": f"{self.topic}-{self.index}", "subscription_id": self.key.subscription_id, "error": why}
        _logger.log(level, "%s; %s", what, _RESTARTS, extra=place, exc_info=defect)

    def _set_alarm(self) -> None:
        due_ms = self.queue.next_due_ms
        if self._closed is not None or due_ms is None or (self._alarm is not None and self._alarm_at_ms <= due_ms):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at_ms = due_ms
        delay_s = min(max(0, due_ms - self._clock.now_ms()) / 1000, ALARM_S_MAX)
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self._alarm_fired)

    def _alarm_fired(self) -> None:
        self._alarm = None
        if self._closed is not None:
            return
        try:
            self.queue.tick(self._clock.now_ms())
            self.queue_changed()
        except Exception as error:
            self._restart_after_defect(error)
