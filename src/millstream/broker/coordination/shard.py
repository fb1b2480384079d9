"""One shard: a state machine, the partition that makes it durable, and the responses that wait for that.

An operation runs to its end without an `await`, its records are appended as one batch and replayed into the state, and
its response waits until the log has acknowledged everything that the operation could have seen. So a response never
reports something that a crash can undo, whether the operation wrote it or only read it.

A state machine may keep superseded records for readers of the log (`Retention`). Loading then starts at the last
rewrite all the same: the last record of every batch carries its offset in a header.

When an append fails, memory would be ahead of the log: the state is discarded, waiting clients get an error after which
they look for the coordinator again, and the shard is read back from the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

from millstream.broker.coordination.state_machine import (
    Confirmation,
    Deferred,
    Operation,
    StateMachine,
    StateRecord,
    Timer,
    Timers,
)
from millstream.broker.log.log import AppendedRange
from millstream.broker.replication.acknowledgement import AcknowledgementFuture, AcknowledgementListener
from millstream.core.clock import Clock
from millstream.core.errors import (
    CoordinatorLoading,
    CoordinatorUnavailable,
    CorruptBatch,
    DamagedRange,
    LogUnavailable,
    MillstreamError,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    PartitionClosed,
)
from millstream.core.ids import Epoch, Offset
from millstream.core.tasks import cancel_and_wait
from millstream.protocol.records.batch import Buffer, iterate_headers
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch

_logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024

RECORDS_BETWEEN_YIELDS = 500


class ReadableLog(Protocol):
    """The part of a partition that loading needs."""

    @property
    def high_watermark(self) -> Offset:
        """Return the offset up to which records are acknowledged."""

    @property
    def log_start(self) -> Offset:
        """Return the first offset that can still be read."""

    def read(self, offset: Offset, *, max_bytes: int) -> Buffer:
        """Read whole batches up to the high watermark."""


_LOAD_START: Final = "load-start"
"""The header with the offset of the last complete rewrite, as 8 bytes."""


def find_load_start(log: ReadableLog) -> Offset:
    """Return the offset at which loading starts: the last rewrite, or the log start if that is unknown."""
    if log.high_watermark <= log.log_start:
        return log.log_start
    try:
        chunk = log.read(Offset(log.high_watermark - 1), max_bytes=1)
        headers = [header for header in iterate_headers(chunk) if not header.is_control]
        records = [record for header in headers[-1:] for record in decode_batch(chunk, header)]
    except MillstreamError:
        # Reading everything is slower, and leads to the same state.
        return log.log_start
    position = dict(records[-1].headers).get(_LOAD_START) if records else None
    return log.log_start if position is None else Offset(max(log.log_start, int.from_bytes(position, "big")))


class Replayable(Protocol):
    """A state into which records can be replayed."""

    def replay(self, record: StateRecord) -> None:
        """Apply one record."""


def find_time(log: ReadableLog, time_ms: int) -> Offset:
    """Return an offset before which all records were written before a time; the start of the log if that is unknown."""
    low, high = log.log_start, log.high_watermark
    while low < high:
        middle = Offset((low + high) // 2)
        try:
            header = next(iterate_headers(log.read(middle, max_bytes=1)), None)
        except MillstreamError:
            return log.log_start
        if header is None or header.max_timestamp_ms >= time_ms:
            high = middle
        else:
            low = max(header.next_offset, Offset(middle + 1))
    return min(low, log.high_watermark)


async def read_back(
    name: str,
    log: ReadableLog,
    state: Replayable,
    start: Offset | None = None,
    *,
    between_yields: int = RECORDS_BETWEEN_YIELDS,
) -> tuple[Offset, int]:
    """Replay the log into `state`, all of it or from an offset on; return its end and the number of records."""
    offset = log.log_start if start is None else start
    replayed = 0
    while offset < log.high_watermark:
        try:
            chunk = log.read(offset, max_bytes=CHUNK_BYTES)
        except DamagedRange as damage:
            _logger.error("state was lost to damage on disk", extra={"shard": name, "error": str(damage)})
            offset = Offset(max(damage.end, offset + 1))
            continue
        except OffsetOutOfRange as moved:
            if moved.start <= offset:
                raise
            offset = Offset(moved.start)
            continue
        if not chunk:
            break
        offset, count = await _replay_chunk(name, chunk, offset, state, between_yields)
        replayed += count
        await asyncio.sleep(0)
    return offset, replayed


async def _replay_chunk(
    name: str, chunk: Buffer, offset: Offset, state: Replayable, between_yields: int
) -> tuple[Offset, int]:
    replayed = 0
    for header in iterate_headers(chunk):
        if not header.is_control:
            try:
                for record in decode_batch(chunk, header):
                    if record.offset < offset:
                        continue
                    _replay(name, state, record.offset, StateRecord(record.key or b"", record.value, record.headers))
                    replayed += 1
                    if replayed % between_yields == 0:
                        await asyncio.sleep(0)
            except CorruptBatch as error:
                _logger.error("a batch of state cannot be read", extra={"shard": name, "error": str(error)})
        offset = header.next_offset
    return offset, replayed


def _replay(name: str, state: Replayable, offset: Offset, record: StateRecord) -> None:
    try:
        state.replay(record)
    except MillstreamError as error:
        # One unreadable record must not disable the whole shard.
        _logger.warning("a record of state is skipped", extra={"shard": name, "offset": offset, "error": str(error)})
    except Exception:
        _logger.exception("a record of state is skipped because of a bug", extra={"shard": name, "offset": offset})


RECORDS_MIN = 20_000

SUPERSEDED_RATIO = 3
"""A log is rewritten when it has this many records per live key."""

BATCH_RECORDS = 200


class Retention(Protocol):
    """Decides which part of a rewritten log is kept for its readers."""

    def keep_from(self, state: Any, partition: Any, rewritten: Offset) -> tuple[Offset, Sequence[StateRecord]]:
        """Return the offset from which the log is kept, at most `rewritten`, and records about the deleted part."""


class Rewrite:
    """Counts the records of a shard's log, and rewrites the state when most of them are superseded."""

    def __init__(self, shard: Shard[Any], *, records_min: int = RECORDS_MIN) -> None:
        self._shard = shard
        self._records_min = records_min
        self._records = 0
        self._due_at = records_min
        self.task: asyncio.Task[None] | None = None

    def begin(self, records: int) -> None:
        """Start counting for a log that was just read back."""
        self._records = records
        self._due_at = self._records_min

    def count(self, records: int) -> None:
        """Count an append; start rewriting in the background if it is worthwhile."""
        self._records += records
        if self._records >= self._due_at and self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._run(), name=f"rewrite {self._shard.name}")
            self.task.add_done_callback(self._on_done)

    async def _run(self) -> None:
        shard = self._shard
        state = shard.state
        if state is None:
            return
        keys = state.durable_keys()
        self._due_at = max(self._records_min, len(keys) * SUPERSEDED_RATIO)
        if self._records < self._due_at:
            return
        first = shard.written
        self._records = 0
        if await self._append_all(keys, state):
            keep_from, records = shard.retained_from(first)
            await self._append(records)
            if shard.state is not state:
                return
            shard.drop_superseded(first, keep_from)
            _logger.info("state rewritten", extra={"shard": shard.name, "keys": len(keys), "from_offset": first})

    async def _append_all(self, keys: list[Hashable], state: StateMachine) -> bool:
        shard = self._shard
        remaining = iter(keys)
        while names := list(islice(remaining, BATCH_RECORDS)):
            if shard.state is not state:
                return False
            records = [durable for name in names if (durable := state.durable_record(name)) is not None]
            await self._append([record for record in records if isinstance(record, StateRecord)])
            for late in [record for record in records if not isinstance(record, StateRecord)]:
                await late.make()
                if shard.state is not state:
                    return False
                await self._append(late.records())
        return shard.state is state

    async def _append(self, records: Sequence[StateRecord]) -> None:
        if records:
            self._records += len(records)
            await self._shard.acknowledged_up_to(self._shard.append(records))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.task = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._due_at = self._records + self._records_min
        _logger.warning(
            "the state could not be rewritten; the log stays as it is",
            exc_info=None if isinstance(error, MillstreamError) else error,
            extra={"shard": self._shard.name, "error": str(error)},
        )


ACKS_ALL = -1

TIMERS_PER_TURN_MAX = 500

RETRY_FIRST_S = 0.1

RETRY_MAX_S = 30.0

LOAD_WAIT_S = 0.5
"""How long an operation waits for the state to be loaded. Clients that must retry wait about as long, and most states
are read in a few milliseconds."""

CLOSE_S = 5.0
"""How long closing waits for the last appends to be acknowledged."""

S = TypeVar("S", bound=StateMachine)

T = TypeVar("T")

Release = Callable[[Deferred[T]], None]
"""Called with the response of an operation, once."""


class TrimmableLog(Protocol):
    """A log whose beginning can be dropped."""

    def delete_before(self, offset: Offset) -> object:
        """Drop everything below `offset`, durably."""


class StateLog(ReadableLog, Protocol):
    """The part of a partition that a shard needs."""

    @property
    def leader_epoch(self) -> Epoch:
        """Return the epoch in which this node leads."""

    @property
    def log(self) -> TrimmableLog:
        """Return the log of the partition."""

    def write(self, batches: bytearray | memoryview, *, acks: int, internal: bool = False) -> AppendedRange:
        """Append without waiting."""

    def is_acknowledged(self, appended: AppendedRange) -> bool:
        """Return whether an append is already acknowledged."""

    def notify_acknowledged(self, appended: AppendedRange, listener: AcknowledgementListener) -> None:
        """Call `listener` once an append is acknowledged, or cannot be any more."""

    async def settled(self) -> None:
        """Wait until everything that the log holds now is acknowledged."""


class _PendingAppend(AcknowledgementFuture):
    """A pending append. The shard is notified directly, without another turn of a busy loop."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[MillstreamError | None], None]) -> None:
        super().__init__()
        self._callback = callback

    def acknowledged(self, error: MillstreamError | None) -> None:
        super().acknowledged(error)
        self._callback(error)


class Shard(Generic[S]):
    """The state of one partition and all its operations, on one event loop."""

    def __init__(
        self,
        name: str,
        partition: StateLog,
        make_state: Callable[[Timers], S],
        *,
        clock: Clock,
        load_slot: asyncio.Semaphore,
        retry_first_s: float = RETRY_FIRST_S,
        confirmation: Confirmation | None = None,
        retention: Retention | None = None,
        rewrite_records_min: int = RECORDS_MIN,
    ) -> None:
        self.name = name
        self.partition = partition
        self.epoch = partition.leader_epoch
        """The epoch in which this node leads; the partition may already know a later one, in which another node leads.
        """
        self._make_state = make_state
        self._clock = clock
        self._load_slot = load_slot
        self._retry_first_s = retry_first_s
        self._confirmation = confirmation
        self._retention = retention
        # Where the last rewrite starts, if the log begins earlier.
        self._load_start: Offset | None = None
        self._timers = Timers(clock)
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._state: S | None = None
        self._closed = False
        self._failures = 0
        self._is_refusing = False
        # Distinguishes operations after a failure from those before it.
        self._incarnation = 0
        self._written = Offset(0)
        self._acknowledged = Offset(0)
        self._unacknowledged: set[asyncio.Future[None]] = set()
        self._waiting: deque[tuple[Offset, Release[Any], Deferred[Any]]] = deque()
        self._completed: list[tuple[Release[Any], Deferred[Any]]] = []
        self._loading: asyncio.Task[None] | None = None
        self._rewrite = Rewrite(self, records_min=rewrite_records_min)

    @property
    def state(self) -> S | None:
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether the shard is closed, on request or because another node leads its partition."""
        return self._closed

    @property
    def written(self) -> Offset:
        return self._written

    def open(self) -> None:
        self._load_soon(0.0)

    async def wait_loaded(self) -> None:
        """Wait until loading has ended, successfully or not."""
        while self._loading is not None and not self._closed:
            await asyncio.wait([self._loading])

    async def close(self) -> None:
        """Refuse parked requests, wait for pending appends, and accept no more operations."""
        if self._closed:
            return
        self._closed = True
        self._cancel_timers()
        await cancel_and_wait(*(task for task in (self._loading, self._rewrite.task) if task is not None))
        if self._state is not None:
            self._state.unload()
            self._release_responses(self._written)
        if self._unacknowledged:
            await asyncio.wait(self._unacknowledged, timeout=CLOSE_S)
        self._discard_state(NotCoordinator(f"{self.name} was closed"))

    async def run(self, operation: Operation[S, T], *, pure: bool = False) -> T:
        """Run an operation now; return its response when it may be sent.

        `pure` says that the operation only produced records and did not change the state, so that a refused append
        needs no reload. While the state is being read back, the operation waits a moment for it.
        """
        if self._state is None and self._loading is not None and not self._closed:
            await asyncio.wait([self._loading], timeout=LOAD_WAIT_S)
        return await self.submit(operation, pure=pure)

    def submit(self, operation: Operation[S, T], *, pure: bool = False) -> asyncio.Future[T]:
        """Run an operation before returning; the future completes when its response may be sent."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.call(operation, partial(complete, future), pure=pure)
        return future

    def call(self, operation: Operation[S, T], release: Release[T], *, pure: bool = False) -> None:
        """Run an operation before returning; `release` is called with its response as soon as that may be sent.

        That may be before this returns. `release` must neither raise nor call the shard.
        """
        state = self._loaded_state()
        try:
            records, response = operation(state)
        except MillstreamError as error:
            self._completed.append((release, Deferred.refused(error)))
            confirmation = self._confirmation
            needs_confirmation = confirmation is not None and isinstance(error, confirmation.refusals)
            self._append_and_replay(
                [confirmation.record] if confirmation is not None and needs_confirmation else (), pure=True
            )
            return
        except Exception:
            _logger.exception("an operation failed; the state is read back", extra={"shard": self.name})
            self._reload("an operation failed inside the broker")
            raise CoordinatorUnavailable(f"{self.name}: the operation failed inside the broker") from None
        later = response if isinstance(response, Deferred) else _resolved_response(response)
        later.listen(lambda completed: self._completed.append((release, completed)))
        self._append_and_replay(records, pure=pure)

    def fire_timers(self) -> None:
        """Run the timers that are due. The loop calls this; a test with its own clock may too."""
        self._alarm = None
        for timer in self._timers.take_due(TIMERS_PER_TURN_MAX):
            if self._state is None:
                return
            self._run_timer(timer)
        self._set_alarm()

    def append(self, records: Sequence[StateRecord]) -> Offset:
        """Append records as one batch, and wait for their acknowledgement in the background; return the offset after
        them.
        """
        now_ms = self._clock.now_ms()
        new = [NewRecord(record.key, record.value, record.headers, now_ms) for record in records]
        if self._load_start is not None and new:
            new[-1] = new[-1]._replace(headers=(*new[-1].headers, (_LOAD_START, self._load_start.to_bytes(8, "big"))))
        batch = encode_batch(new)
        appended = self.partition.write(batch, acks=ACKS_ALL, internal=True)
        self._written = appended.next_offset
        self._is_refusing = False
        if self.partition.is_acknowledged(appended):
            self._acknowledged = appended.next_offset
            self._failures = 0
        else:
            incarnation = self._incarnation
            waiting = _PendingAppend(lambda error: self._on_acknowledged(appended.next_offset, incarnation, error))
            self._unacknowledged.add(waiting.future)
            waiting.future.add_done_callback(self._unacknowledged.discard)
            self.partition.notify_acknowledged(appended, waiting)
        return appended.next_offset

    async def acknowledged_up_to(self, offset: Offset) -> None:
        if offset > self._acknowledged:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((offset, partial(complete, future), _resolved_response(None)))
            await future

    def retained_from(self, rewritten: Offset) -> tuple[Offset, Sequence[StateRecord]]:
        """Return the offset from which the log is kept after a rewrite, and records about the deleted part."""
        if self._retention is None or self._state is None:
            return rewritten, ()
        return self._retention.keep_from(self._state, self.partition, rewritten)

    def drop_superseded(self, rewritten: Offset, keep_from: Offset) -> None:
        """Drop the beginning of the log after a rewrite, and start loading at the rewrite."""
        self._load_start = rewritten if keep_from < rewritten else None
        if keep_from > self.partition.log_start:
            self.partition.log.delete_before(keep_from)

    def _loaded_state(self) -> S:
        if self._closed:
            raise NotCoordinator(f"{self.name} was closed")
        if self._state is None:
            raise CoordinatorLoading(f"{self.name} is being read back from the log")
        return self._state

    def _run_timer(self, timer: Timer) -> None:
        try:
            records = timer.action()
        except Exception:
            _logger.exception("a timer failed; the state is read back", extra={"shard": self.name})
            self._reload("a timer failed inside the broker")
            return
        self._append_and_replay(records, pure=timer.pure)

    def _append_and_replay(self, records: Sequence[StateRecord], *, pure: bool) -> None:
        state = self._state
        if records and state is not None:
            try:
                self.append(records)
            except MillstreamError as error:
                self._append_refused(error, pure=pure)
                return
            try:
                for record in records:
                    state.replay(record)
            except Exception:
                _logger.exception("a record could not be replayed; the state is read back", extra={"shard": self.name})
                self._reload("a record could not be replayed")
                return
            self._rewrite.count(len(records))
        self._release_responses(self._written)
        self._set_alarm()

    def _append_refused(self, error: MillstreamError, *, pure: bool) -> None:
        if not self._is_refusing:
            # Clients retry at once, so only the first refusal in a row is logged.
            self._is_refusing = True
            _logger.error("appends are refused", extra={"shard": self.name, "error": str(error)})
        if not pure:
            self._reload(str(error))
            return
        self._refuse_responses(_client_error(self.name, error))

    def _release_responses(self, needed: Offset) -> None:
        """Release the responses of an operation, now or when the log has acknowledged its records."""
        completed, self._completed = self._completed, []
        for release, later in completed:
            if needed <= self._acknowledged:
                release(later)
            else:
                self._waiting.append((needed, release, later))

    def _refuse_responses(self, error: MillstreamError) -> None:
        completed, self._completed = self._completed, []
        for release, _ in completed:
            release(Deferred.refused(error))

    def _on_acknowledged(self, next_offset: Offset, incarnation: int, error: MillstreamError | None) -> None:
        if incarnation != self._incarnation:
            return
        if error is not None:
            # Another node leads now, as after any failover; clients find it.
            level = logging.INFO if isinstance(error, NotLeader) else logging.ERROR
            _logger.log(level, "an append was not acknowledged", extra={"shard": self.name, "error": str(error)})
            self._reload(str(error))
            return
        self._failures = 0
        self._acknowledged = max(self._acknowledged, next_offset)
        while self._waiting and self._waiting[0][0] <= self._acknowledged:
            _, release, later = self._waiting.popleft()
            release(later)

    def _reload(self, reason: str) -> None:
        """Discard the state, refuse all waiting requests with NOT_COORDINATOR, and read the log again."""
        self._discard_state(NotCoordinator(f"{self.name} is reloading: {reason}"))
        if not self._closed:
            delay_s = min(RETRY_MAX_S, self._retry_first_s * 2**self._failures)
            self._failures = min(self._failures + 1, 16)
            self._load_soon(delay_s)

    def _discard_state(self, error: MillstreamError) -> None:
        state, self._state = self._state, None
        self._incarnation += 1
        self._cancel_timers()
        if state is not None:
            state.unload()
        waiting, self._waiting = self._waiting, deque()
        for _, release, _ in waiting:
            release(Deferred.refused(error))
        self._refuse_responses(error)

    def _load_soon(self, delay_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._load(delay_s), name=f"load {self.name}")
        self._loading = task
        task.add_done_callback(self._on_loaded)

    def _on_loaded(self, task: asyncio.Task[None]) -> None:
        if self._loading is task:
            self._loading = None
        if task.cancelled() or self._closed:
            return
        error = task.exception()
        if isinstance(error, PartitionClosed | NotLeader):
            # The new leader runs its own shard; if it is this node again, it gets a new one.
            self._closed = True
        elif error is not None:
            _logger.error("the state could not be read back; retrying", exc_info=error, extra={"shard": self.name})
            self._reload(str(error))

    async def _load(self, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        if self._unacknowledged:
            # Records appended before the failure may still be kept, and must then be read.
            await asyncio.wait(self._unacknowledged)
        # A new leader's log holds what the previous leader may have acknowledged.
        await self.partition.settled()
        self.epoch = self.partition.leader_epoch
        async with self._load_slot:
            state = self._make_state(self._timers)
            start = find_load_start(self.partition) if self._retention is not None else self.partition.log_start
            self._load_start = start if start > self.partition.log_start else None
            end, replayed = await read_back(self.name, self.partition, state, start)
        self._written = self._acknowledged = end
        self._rewrite.begin(replayed)
        state.loaded()
        self._state = state
        self._set_alarm()

    def _cancel_timers(self) -> None:
        self._timers.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self) -> None:
        deadline = self._timers.next_deadline
        if deadline is None or self._closed:
            return
        if self._alarm is not None:
            if self._alarm_at <= deadline:
                return
            self._alarm.cancel()
        self._alarm_at = deadline
        delay_s = max(0.0, deadline - self._clock.monotonic())
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self.fire_timers)


def _resolved_response(value: T) -> Deferred[T]:
    later: Deferred[T] = Deferred()
    later.resolve(value)
    return later


def _client_error(name: str, error: MillstreamError) -> MillstreamError:
    if isinstance(error, LogUnavailable | NotEnoughReplicas | NotLeader):
        # A client cannot fix the log; it finds the coordinator again, and retries.
        return NotCoordinator(f"{name}: {error}")
    return error


def complete(future: asyncio.Future[Any], later: Deferred[Any]) -> None:
    # The future is cancelled if the caller has gone.
    if future.done():
        return
    if later.error is not None:
        future.set_exception(later.error)
    else:
        future.set_result(later.result())
