"""The path of a mirrored record: fetched from the source up to its high watermark, appended as it is.

A mirror is a consumer to its source, not a follower: it is in no in-sync set, and a slow target does not slow the
source. The node that leads a copy fetches it. Partitions with the same leader on the source share a few lines, each of
which has one fetch in flight while it appends what the one before has brought. So a link with a long round trip stays
busy, and memory stays bounded: for each leader of the source, twice `LEADER_BYTES`. Socket buffers are left to the
kernel, which grows them with the round trip; a fixed size would turn that off.

Records are fetched by the topic's id. Nothing is copied from a topic that was deleted on the source and created again
under the same name: its records do not continue those of the copy, even if their offsets fit.

A copy never exposes a torn transaction. Where it holds a commit marker that is not known to have arrived on all
mirrored partitions of its transaction, clients read up to there (`Partition.expose`); `Follower` advances that offset.

A copy also never exposes a compacted partition where the last value of a key is missing. If a fetch brings records with
gaps, compaction at the source may have removed values because of later ones that have not arrived. They are below the
high watermark that the source had then; until the copy reaches it, clients read up to where the gap begins.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from millstream.broker.cluster.topics import Topics
from millstream.broker.mirror.source import Fetched, Source, is_original, recreated_error
from millstream.broker.replication.partition import Partition
from millstream.broker.replication.replica import truncation_point
from millstream.core.backoff import Backoff, delay_after
from millstream.core.clock import Clock
from millstream.core.errors import (
    BatchRejected,
    BrokerUnreachable,
    CopyDiverged,
    MillstreamError,
    NotLeader,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.ids import Epoch, NodeId, Offset
from millstream.core.mirror import TopicOffsets
from millstream.core.tasks import cancel_and_wait, gather_or_cancel, wait_up_to
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import BatchHeader, iterate_whole_headers
from millstream.protocol.records.control import read_marker
from millstream.protocol.wire.error_codes import TRANSIENT
from millstream.protocol.wire.fetch import FetchedPartition, FetchLimits

_logger = logging.getLogger(__name__)

LINES: Final = 4
"""How many fetches run concurrently for each leader of the source."""
COMPARED_AT_ONCE: Final = 32
"""How many partitions are compared with their originals concurrently: each takes a round trip or more."""
LEADER_BYTES: Final = 32 * 1024 * 1024
"""How much is fetched from each leader of the source at once, by all its lines together."""
LINE_BYTES: Final = 16 * 1024 * 1024
"""How much one line fetches at once, at most: the source reads it in one step."""
FETCH_WAIT_MS: Final = 500
RATE_S: Final = 10.0
"""Over how long the current rate is measured."""
RATE_STEP_S: Final = 0.5
SILENT_MS: Final = 3000
"""A source that has not responded for longer than this may have more than is known here."""
GONE_S: Final = 10.0
"""After how long a topic that the source does not know was deleted there; a node that has just started knows none."""
HELD_FIRST_S: Final = 0.1
HELD_MAX_S: Final = 10.0
MARKERS_MAX: Final = 1_000_000
"""The maximum number of commit markers of one partition that wait to be verified; beyond it, copying waits."""
TORN_MAX: Final = 10_000
"""The records at the end of a copy that are fetched again if some of them were lost."""
_SCAN_BYTES: Final = 1024 * 1024

CopyKey = tuple[UUID, int]
"""A topic's id here, and a partition."""


@dataclass(slots=True, eq=False)
class Copy:
    """A mirrored partition that this node leads."""

    partition: Partition
    source: TopicPartition
    verified: int = 0
    """Every transaction that is committed below has arrived as a whole."""
    commits: array[int] = field(default_factory=lambda: array("q"))
    """The commit markers from there on."""
    gap: int | None = None
    """The offset from which values of keys may be missing, as recorded in the catalog."""
    gap_end: int = -1
    """The offset at which the copy is complete again; -1 until the source has reported it."""
    source_end: int = -1
    """The source's high watermark, as of the last fetch; -1 before the first."""
    compared_epoch: int = -2
    """The leader epoch here for which the history was compared with the source's."""
    caught_up_ms: int = 0
    """When the exposed offset last was the source's high watermark; at first, when copying began."""
    heard_ms: int = 0
    """When the source last responded."""
    error: str = ""
    unknown_since: float | None = None
    """The time since which the source does not know the topic; None if it does."""
    is_gone: bool = False
    """Whether the original was deleted: the copy stays as it is, and neither fails nor lags."""
    failures: int = 0
    held_until: float = 0.0
    repair_at: float = 0.0
    """When lost offsets are fetched from the source again."""
    bytes_copied: int = 0

    @property
    def key(self) -> CopyKey:
        return self.partition.topic.topic_id, self.partition.index

    @property
    def original_id(self) -> UUID | None:
        """The id of the topic on the source; None if the source has no ids."""
        return self.partition.topic.original_id

    @property
    def is_compared(self) -> bool:
        """Whether the log here has nothing that the source does not have; if not, it may be truncated."""
        return self.compared_epoch == self.partition.leader_epoch

    @property
    def line(self) -> int:
        """The line that fetches it; the partitions of a topic are spread evenly."""
        return (self.partition.topic.topic_id.int + self.partition.index) % LINES

    @property
    def end(self) -> Offset:
        return self.partition.log.end_offset

    @property
    def exposed(self) -> Offset | None:
        """The offset up to which clients may read; None for everything that is acknowledged."""
        limits = [*self.commits[:1], *([] if self.gap is None else [self.gap])]
        return Offset(min(limits)) if limits else None

    @property
    def _behind(self) -> int:
        """How many offsets clients could not read here of those that the source had when it last responded."""
        return max(0, self.source_end - self.partition.high_watermark)

    def lag(self, now_ms: int) -> int | None:
        """Return the least number of the source's offsets that clients cannot read here; None if that is unknown.

        A source that does not respond may have more than it had when the copy had everything.
        """
        if self.is_gone:
            return 0
        is_silent = bool(self.error) or now_ms - self.heard_ms > SILENT_MS
        return None if self.source_end < 0 or (not self._behind and is_silent) else self._behind

    def lag_ms(self, now_ms: int) -> int | None:
        """Return the time for which the copy has been behind or the source silent; None before its first response."""
        if self.is_gone:
            return 0
        if self.source_end < 0:
            return None
        if self._behind:
            return max(0, now_ms - self.caught_up_ms)
        silent_ms = now_ms - self.heard_ms
        return silent_ms if silent_ms > SILENT_MS else 0

    def verify(self, offset: int) -> None:
        """Record that transactions committed below an offset have arrived as a whole."""
        if offset > self.verified:
            self.verified = offset
            del self.commits[: bisect_left(self.commits, offset)]
            if self.is_compared:
                # Otherwise the commits above are not known yet.
                self.partition.expose(self.exposed)


class Copier:
    """Copies the partitions of one mirror that this node leads."""

    def __init__(
        self,
        topics: Topics,
        source: Source,
        clock: Clock,
        *,
        rate: int,
        gates: bool,
        cut_of: Callable[[Partition], int | None],
        note_gaps: Callable[[Mapping[TopicPartition, int | None]], Awaitable[TopicOffsets]],
        on_commit: Callable[[], None],
    ) -> None:
        self._topics = topics
        self._source = source
        self._clock = clock
        self._rate = rate
        self._gates = gates
        """Whether the source can say which transactions have ended everywhere."""
        self._cut_of = cut_of
        """Returns where the source's own records begin if it has copied from this cluster before; otherwise None."""
        self._note_gaps = note_gaps
        """Records durably from where on copies may lack values of keys, or that they lack none; returns all gaps."""
        self._on_commit = on_commit
        """Called when clients begin to wait at a commit."""
        self.copies: dict[CopyKey, Copy] = {}
        self._lines: dict[tuple[NodeId, int], asyncio.Task[None]] = {}
        self._members: dict[tuple[NodeId, int], dict[CopyKey, Copy]] = {}
        self._changed = asyncio.Event()
        self._assigned = asyncio.Event()
        """Set after each assignment, and replaced by the next."""
        self._gap_closed = asyncio.Event()
        """Set when a copy lacks no values any more, and replaced."""
        self._next_slot_s = 0.0
        self.bytes_copied = 0
        self._copied_at: deque[tuple[float, int]] = deque()
        """Moments of the last seconds, and how many bytes had been copied before."""

    @property
    def bytes_per_s(self) -> float:
        now, marks = self._clock.monotonic(), self._copied_at
        since, before = next(((at, size) for at, size in marks if at > now - RATE_S), (now, self.bytes_copied))
        return (self.bytes_copied - before) / max(now - since, RATE_STEP_S)

    def _count_bytes(self, size: int) -> None:
        now, marks = self._clock.monotonic(), self._copied_at
        if size and (not marks or now >= marks[-1][0] + RATE_STEP_S):
            marks.append((now, self.bytes_copied))
            if marks[0][0] <= now - RATE_S:
                marks.popleft()
        self.bytes_copied += size

    def follow(self, copies: Iterable[Copy]) -> None:
        """Copy these partitions from now on, and no others; known ones keep their state, but not a gap.

        An earlier leader may have recorded one of which this node has not heard before.
        """
        followed: dict[CopyKey, Copy] = {}
        for copy in copies:
            known = self.copies.get(copy.key, copy)
            followed[copy.key] = copy if known.partition is not copy.partition else known
            if followed[copy.key].gap != copy.gap:
                known.gap = copy.gap
                known.partition.expose(known.exposed)
        self.copies = followed
        self._changed.set()

    def verify(self, offsets: TopicOffsets) -> None:
        """Record up to where transactions have arrived as a whole."""
        for copy in self.copies.values():
            if len(copy.commits) >= MARKERS_MAX:
                # Copying had to wait for this.
                self._changed.set()
            copy.verify(offset_in(offsets, copy.partition))

    def compared_copy(self, partition: Partition) -> Copy | None:
        """Return the copy of a partition if it was compared with the source, so that its offsets are the source's."""
        copy = self.copies.get((partition.topic.topic_id, partition.index))
        return copy if copy is not None and copy.is_compared else None

    async def await_comparison(self, partitions: Iterable[Partition]) -> None:
        """Wait until partitions were compared with the source, except those that this node leads no longer."""
        for partition in partitions:
            while partition.is_leader and self.compared_copy(partition) is None:
                await self._assigned.wait()

    async def without_gaps(self) -> None:
        """Wait until no copy lacks values of keys."""
        while any(copy.gap is not None for copy in self.copies.values()):
            await self._gap_closed.wait()

    def drop(self, key: CopyKey) -> Copy | None:
        """Stop copying a partition: nothing is appended to it once this returns."""
        return self.copies.pop(key, None)

    async def run(self) -> None:
        try:
            while True:
                self._changed.clear()
                since = self._clock.monotonic()
                await self._assign()
                await wait_up_to(self._suspended_s(since), self._changed)
        finally:
            await cancel_and_wait(*self._lines.values())
            self._lines.clear()

    def _suspended_s(self, since: float) -> float | None:
        """Return the time until the next retry of a partition suspended after `since`; None if there is none.

        Assigning the others takes time, in which the suspension may have ended.
        """
        now = self._clock.monotonic()
        return min((copy.held_until - now for copy in self.copies.values() if copy.held_until > since), default=None)

    async def _assign(self) -> None:
        """Assign each partition to a line of its source leader."""
        for line in [line for line, task in self._lines.items() if task.done()]:
            task = self._lines.pop(line)
            if not task.cancelled() and (failed := task.exception()) is not None:
                _logger.error("fetching for a mirror failed with an internal error", exc_info=failed)
                for copy in self._members.get(line, {}).values():
                    self._suspend(copy, MillstreamError(f"internal error: {failed!r}"))
        now = self._clock.monotonic()
        due = [copy for copy in self.copies.values() if copy.held_until <= now]
        turn = asyncio.Semaphore(COMPARED_AT_ONCE)
        leaders = await gather_or_cancel(self._leader_of(copy, turn) for copy in due)
        members: dict[tuple[NodeId, int], dict[CopyKey, Copy]] = {}
        for copy, leader in zip(due, leaders, strict=True):
            if leader is not None:
                members.setdefault((leader, copy.line), {})[copy.key] = copy
        self._members = members
        done, self._assigned = self._assigned, asyncio.Event()
        done.set()
        for line in members.keys() - self._lines.keys():
            task = self._lines[line] = asyncio.get_running_loop().create_task(self._run_line(line))
            # It ends when it has no partitions; some may have been assigned to it again meanwhile.
            task.add_done_callback(lambda _: self._changed.set())

    async def _leader_of(self, copy: Copy, turn: asyncio.Semaphore) -> NodeId | None:
        """Return which node of the source leads a partition whose history is checked; None if it has to wait."""
        async with turn:
            try:
                leader = await self._source.client.leader_of(copy.source.topic, copy.source.partition)
                await self._check_history(copy)
            except MillstreamError as error:
                self._suspend(copy, await self._explain_error(copy, error))
                return None
        return leader

    async def _explain_error(self, copy: Copy, error: MillstreamError) -> MillstreamError:
        """Return an error, or its reason: the original was deleted and created again, or exists and is not gone."""
        if copy.original_id is not None and isinstance(error, (UnknownTopic, UnknownTopicId, CopyDiverged)):
            name = copy.source.topic
            with suppress(MillstreamError):
                now = (await self._source.metadata([name])).topics.get(name)
                if now is not None and not is_original(copy.partition.topic, now):
                    return recreated_error(name)
                if now is not None and not isinstance(error, CopyDiverged):
                    return NotLeader(f"{copy.source} exists, but its leader does not know it: {error}")
        return error

    def _suspend(self, copy: Copy, error: MillstreamError) -> None:
        """Suspend a partition for a while."""
        now = self._clock.monotonic()
        was_gone = copy.is_gone
        if isinstance(error, UnknownTopic | UnknownTopicId):
            copy.unknown_since = now if copy.unknown_since is None else copy.unknown_since
            copy.is_gone = copy.is_gone or now - copy.unknown_since >= GONE_S
        else:
            copy.unknown_since, copy.is_gone = None, False
        level = logging.DEBUG if copy.error == str(error) or was_gone else logging.WARNING
        _logger.log(
            level,
            "a partition could not be mirrored; retrying",
            extra={"partition": str(copy.partition.log.partition), "error": str(error)},
        )
        copy.error = "" if copy.is_gone else str(error)
        copy.held_until = now + delay_after(copy.failures, first_s=HELD_FIRST_S, max_s=HELD_MAX_S)
        copy.failures += 1
        self._changed.set()

    # -- histories ------------------------------------------------------------------------------------------

    async def _check_history(self, copy: Copy) -> None:
        """Compare the copy's last epoch with the source's history, once for each epoch of the leader here.

        An end that the source does not have is truncated if it holds only the mark of a cut that was cancelled. In an
        old source that follows (`mirror reverse`), so is everything down to the common point, unless that is beyond the
        cut of the other side: the records there were copied.
        """
        partition, log = copy.partition, copy.partition.log
        if copy.is_compared:
            return
        cut = self._cut_of(partition)
        while log.end_offset > log.start_offset:
            epoch_end = await self._source.end_of_epoch(copy.source, log.latest_epoch)
            if epoch_end.epoch == log.latest_epoch and epoch_end.end_offset >= log.end_offset:
                break
            await self._check_id(copy)
            if epoch_end.epoch >= 0:
                point = truncation_point(log, epoch_end)
                is_agreed = cut is not None and point <= cut
            else:
                # The source has no epoch as late as this one; the next round compares the one before.
                point, is_agreed = max(log.end_of_epoch(log.latest_epoch - 1)[1], log.start_offset), False
            if point >= log.end_offset or not (is_agreed or _is_without_records(partition, point)):
                raise CopyDiverged(
                    f"{log.partition} ends at offset {log.end_offset} in epoch {log.latest_epoch}, and the source's "
                    f"{copy.source} has epoch {epoch_end.epoch} only up to {epoch_end.end_offset}: it was truncated or "
                    "recreated. Delete the copy to fetch it again, or fail over to keep it"
                )
            await partition.cut_mirrored(point, refetches=True)
        await self._drop_lost_tail(copy)
        await self._restore_lost(copy)
        copy.commits = commits_from(partition, copy.verified) if self._gates else array("q")
        partition.expose(copy.exposed)
        if copy.commits:
            self._on_commit()
        copy.compared_epoch = partition.leader_epoch

    async def _drop_lost_tail(self, copy: Copy) -> None:
        """Truncate the copy where a power failure lost records of its tail, if the source still has them.

        This concerns only the last records, which were not synced and therefore neither verified nor compacted.
        """
        log = copy.partition.log
        first = max(log.superseded_by, copy.verified, log.end_offset - TORN_MAX)
        for lost in log.damage:
            is_torn = lost.unread and lost.start >= first and lost not in log.damage.repairable
            if is_torn and await self._has_offset(copy, Offset(lost.start)):
                await copy.partition.cut_mirrored(Offset(lost.start), refetches=True)
                return

    async def _restore_lost(self, copy: Copy) -> None:
        """Fetch offsets again that the disk lost and no replica has: the same bytes.

        Compacted logs are excluded: compaction here may have removed the tombstones of values that the source still
        has, and compaction there values whose later ones have not arrived.
        """
        log, now = copy.partition.log, self._clock.monotonic()
        if not log.damage or copy.original_id is None or log.settings.compacts or now < copy.repair_at:
            return
        copy.repair_at = now + HELD_MAX_S
        repairable = log.damage.repairable
        for lost in [
            lost_range
            for lost_range in log.damage
            if lost_range not in repairable and lost_range.start >= log.superseded_by
        ]:
            size = min(lost.end_position - lost.start_position or LINE_BYTES, LINE_BYTES)
            try:
                fetched = await self._fetch_at(copy, Offset(lost.start), size)
                records = memoryview(b"") if fetched is None else fetched.records
                ends = [header.end_position for header in iterate_whole_headers(records)]
                if ends:
                    await copy.partition.restore_range(lost, records[: ends[-1]])
                    # A larger range is restored in parts, and any may hold commits.
                    copy.repair_at, copy.compared_epoch = 0.0, -2
                    self._changed.set()
            except (MillstreamError, OSError) as error:
                extra = {"partition": str(log.partition), "offset": lost.start, "error": str(error)}
                _logger.warning("lost offsets cannot be fetched from the source now", extra=extra)

    async def _check_id(self, copy: Copy) -> None:
        """Raise an error if the original has another id now.

        A history is asked for by name. If its leader knows the id afterwards, the history is that of the original.
        """
        if copy.original_id is None:
            return
        await self._has_offset(copy, copy.end)

    async def _has_offset(self, copy: Copy, offset: Offset) -> bool:
        """Whether the original has an offset or ends there; raise an error if its leader does not know its id."""
        return await self._fetch_at(copy, offset, max_bytes=1) is not None

    async def _fetch_at(self, copy: Copy, offset: Offset, max_bytes: int) -> FetchedPartition | None:
        """Fetch from the original at an offset; None if it does not have it, and does not end there."""
        leader = await self._source.client.leader_of(copy.source.topic, copy.source.partition)
        limits, topic_ids = FetchLimits(max_bytes=max_bytes, max_wait_ms=0), {copy.source.topic: copy.original_id}
        fetched = await self._source.fetch(leader, {copy.source: offset}, limits, topic_ids)
        response = fetched.get(copy.source, UnknownTopicId(f"the leader of {copy.source} does not know its id"))
        if isinstance(response, OffsetOutOfRange):
            return None
        if isinstance(response, MillstreamError):
            raise response
        return response

    # -- one line -------------------------------------------------------------------------------------------

    async def _run_line(self, line: tuple[NodeId, int]) -> None:
        backoff = Backoff(max_s=5.0)
        ahead: asyncio.Task[Fetched] | None = None
        requested: dict[CopyKey, Offset] = {}
        try:
            while members := self._members.get(line):
                offsets = {key: copy.end for key, copy in members.items() if self._may_fetch(copy)}
                if not offsets:
                    await self._assigned.wait()
                    continue
                try:
                    if ahead is None:
                        requested, ahead = offsets, self._fetch(line[0], members, offsets)
                    # A fetch that fails must not be awaited again.
                    arriving, ahead, taken = ahead, None, requested
                    responses = await arriving
                    await self._throttle(responses)
                    if any(
                        isinstance(response, FetchedPartition) and len(response.records)
                        for response in responses.values()
                    ):
                        nexts = self._next_positions(members, responses)
                        if nexts:
                            requested, ahead = nexts, self._fetch(line[0], members, nexts)
                    await self._apply_responses(members, taken, responses)
                    backoff.reset()
                except (BrokerUnreachable, RequestTimedOut, NotLeader) as error:
                    for copy in members.values():
                        copy.error = str(error)
                    self._source.client.forget_leaders()
                    self._changed.set()
                    await backoff.pause()
                except MillstreamError as error:
                    for copy in members.values():
                        self._suspend(copy, error)
                    await backoff.pause()
        finally:
            if ahead is not None:
                await cancel_and_wait(ahead)

    def _may_fetch(self, copy: Copy) -> bool:
        return (
            copy.partition.is_leader
            and self.copies.get(copy.key) is copy
            and copy.held_until <= self._clock.monotonic()
            and len(copy.commits) < MARKERS_MAX
        )

    def _fetch(
        self, leader: NodeId, members: dict[CopyKey, Copy], requested: dict[CopyKey, Offset]
    ) -> asyncio.Task[Fetched]:
        positions = {members[key].source: offset for key, offset in requested.items()}
        # A few lines get more each, so that they are not idle for most of a long round trip.
        size = min(LINE_BYTES, LEADER_BYTES // max(1, sum(member == leader for member, _ in self._members)))
        # At most a second's worth at once, so that a limited mirror does not fetch in bursts.
        limits = FetchLimits(min(size, self._rate or size), FETCH_WAIT_MS)
        topic_ids = {members[key].source.topic: members[key].original_id for key in requested}
        return asyncio.get_running_loop().create_task(self._source.fetch(leader, positions, limits, topic_ids))

    def _next_positions(self, members: dict[CopyKey, Copy], responses: Fetched) -> dict[CopyKey, Offset]:
        """Return the next offset of each partition after these responses are appended."""
        positions: dict[CopyKey, Offset] = {}
        for key, copy in members.items():
            response = responses.get(copy.source)
            if not self._may_fetch(copy) or isinstance(response, MillstreamError):
                continue
            position = copy.end
            if response is not None:
                for header in iterate_whole_headers(response.records):
                    position = Offset(max(position, header.next_offset))
            positions[key] = position
        return positions

    async def _throttle(self, responses: Fetched) -> None:
        """Wait as the rate demands."""
        size = sum(len(response.records) for response in responses.values() if isinstance(response, FetchedPartition))
        self._count_bytes(size)
        if not self._rate or not size:
            return
        now = self._clock.monotonic()
        self._next_slot_s = max(self._next_slot_s, now) + size / self._rate
        await asyncio.sleep(self._next_slot_s - now)

    async def _apply_responses(
        self,
        members: dict[CopyKey, Copy],
        requested: dict[CopyKey, Offset],
        responses: Fetched,
    ) -> None:
        syncing: list[tuple[Copy, asyncio.Future[None]]] = []
        await self._open_gaps(members, requested, responses)
        for copy in members.values():
            response = responses.get(copy.source)
            # A copy that was truncated meanwhile must not continue behind a gap.
            if response is None or not self._may_fetch(copy) or requested.get(copy.key) != copy.end:
                continue
            try:
                stored = await self._apply_response(copy, response)
            except TRANSIENT as error:
                self._source.client.forget_leaders()
                self._changed.set()
                self._suspend(copy, error)
            except MillstreamError as error:
                copy.compared_epoch = -2
                self._suspend(copy, await self._explain_error(copy, error))
            else:
                copy.failures, copy.error, copy.unknown_since, copy.is_gone = 0, "", None, False
                await self._restore_lost(copy)
                if stored is not None:
                    syncing.append((copy, stored))
            await asyncio.sleep(0)
        for copy, stored in syncing:
            try:
                await stored
            except MillstreamError as error:
                self._suspend(copy, error)
        await self._close_gaps(members, responses)

    async def _apply_response(
        self, copy: Copy, response: FetchedPartition | MillstreamError
    ) -> asyncio.Future[None] | None:
        partition, log = copy.partition, copy.partition.log
        if isinstance(response, OffsetOutOfRange):
            if response.start > log.end_offset:
                # The source's retention was faster, or the copy is new.
                await partition.restart_mirrored(Offset(response.start))
                return None
            raise CopyDiverged(
                f"{log.partition} ends at offset {log.end_offset}, and the source's {copy.source} at {response.end}: "
                "it was truncated or recreated. Delete the copy to fetch it again, or fail over to keep it"
            )
        if isinstance(response, MillstreamError):
            raise response
        copy.source_end, copy.heard_ms = response.high_watermark, self._clock.now_ms()
        headers = [header for header in iterate_whole_headers(response.records) if header.next_offset > log.end_offset]
        stored = await self._append(copy, response, headers) if headers else None
        start = min(response.log_start, partition.high_watermark)
        if log.start_offset < start <= log.end_offset:
            partition.delete_before(Offset(start))
        if partition.high_watermark >= copy.source_end:
            copy.caught_up_ms = self._clock.now_ms()
        return stored

    async def _append(
        self, copy: Copy, response: FetchedPartition, headers: list[BatchHeader]
    ) -> asyncio.Future[None] | None:
        partition = copy.partition
        epoch, end = max(header.leader_epoch for header in headers), copy.end
        if epoch > partition.leader_epoch:
            is_compared = copy.is_compared
            await self._topics.raise_epoch(partition.topic, partition.index, Epoch(epoch))
            if is_compared:
                copy.compared_epoch = partition.leader_epoch
        if self.copies.get(copy.key) is not copy or copy.end != end:
            return None
        records = response.records[headers[0].position : headers[-1].end_position]
        if self._gates:
            for header in headers:
                if header.is_control and _is_commit(response.records, header):
                    copy.commits.append(header.base_offset)
            if copy.commits:
                self._on_commit()
        copy.bytes_copied += len(records)
        return partition.append_mirrored(records, exposed=copy.exposed, compacted_until=response.high_watermark)

    # -- gaps of compacted partitions -----------------------------------------------------------------------

    async def _open_gaps(
        self,
        members: dict[CopyKey, Copy],
        requested: dict[CopyKey, Offset],
        responses: Fetched,
    ) -> None:
        """Before records with gaps are appended, record the offset from which values of keys may be missing."""
        gaps: dict[TopicPartition, int | None] = {}
        copies = []
        for key, copy in members.items():
            response, end = responses.get(copy.source), copy.end
            if not copy.partition.log.settings.compacts or not isinstance(response, FetchedPartition):
                continue
            if requested.get(key) != end or not _has_gaps(response.records, end):
                continue
            copy.gap_end = max(copy.gap_end, response.high_watermark)
            if copy.gap is None or copy.gap > end:
                gaps[copy.partition.log.partition] = end
                copies.append(copy)
        if not gaps:
            return
        try:
            stored = await self._note_gaps(gaps)
        except MillstreamError as error:
            for copy in copies:
                self._suspend(copy, error)
            return
        for copy in copies:
            # An earlier leader may have recorded one that begins before.
            copy.gap = offset_in(stored, copy.partition)

    async def _close_gaps(self, members: dict[CopyKey, Copy], responses: Fetched) -> None:
        """Expose the copies again that have reached the end of their gap."""
        closed = []
        for copy in members.values():
            response = responses.get(copy.source)
            if copy.gap is None or not isinstance(response, FetchedPartition) or not self._may_fetch(copy):
                continue
            if copy.gap_end < 0:
                # An earlier leader has recorded it.
                copy.gap_end = response.high_watermark
            if copy.partition.replicated_offset >= copy.gap_end:
                closed.append(copy)
        if not closed:
            return
        try:
            await self._note_gaps(dict.fromkeys((copy.partition.log.partition for copy in closed), None))
        except MillstreamError as error:
            for copy in closed:
                self._suspend(copy, error)
            return
        for copy in closed:
            copy.gap, copy.gap_end = None, -1
            if self.copies.get(copy.key) is copy:
                copy.partition.expose(copy.exposed)
        done, self._gap_closed = self._gap_closed, asyncio.Event()
        done.set()


def _has_gaps(records: memoryview, offset: int) -> bool:
    """Whether the batches that follow an offset have fewer records than offsets, because of compaction."""
    for header in iterate_whole_headers(records):
        if header.next_offset > offset:
            if header.base_offset > offset or header.record_count <= header.last_offset_delta:
                return True
            offset = header.next_offset
    return False


def _is_commit(records: memoryview, header: BatchHeader) -> bool:
    try:
        marker = read_marker(records, header)
    except BatchRejected:
        return False
    return marker is not None and marker.commit


def _is_without_records(partition: Partition, offset: Offset) -> bool:
    """Whether a log holds neither records nor commits from an offset on; a cut leaves an empty batch and aborts."""
    log = partition.log
    while offset < log.end_offset:
        records = memoryview(log.read(offset, max_bytes=_SCAN_BYTES, up_to=log.end_offset))
        if not records:
            return False
        for header in iterate_whole_headers(records):
            if _is_commit(records, header) if header.is_control else header.record_count:
                return False
            offset = Offset(max(offset, header.next_offset))
    return True


def offset_in(offsets: TopicOffsets, partition: Partition) -> Offset:
    """Return the offset of a partition among those of many; 0 if there is none."""
    return Offset(offsets.get(partition.topic.name, {}).get(partition.index, 0))


def commits_from(partition: Partition, offset: int) -> array[int]:
    """Find the commit markers of a log from an offset on that were not seen while they arrived."""
    log, commits = partition.log, array("q")
    offset = max(offset, log.start_offset)
    if all(producer.marker_offset < offset for producer in log.producers):
        return commits
    while offset < log.end_offset and len(commits) < MARKERS_MAX:
        records = memoryview(log.read(offset, max_bytes=_SCAN_BYTES, up_to=log.end_offset))
        for header in iterate_whole_headers(records):
            if header.is_control and header.base_offset >= offset and _is_commit(records, header):
                commits.append(header.base_offset)
            offset = max(offset, header.next_offset)
        if not records:
            break
    return commits


def awaits_gaps(partition: Partition) -> bool:
    """Whether an earlier leader of a compacted copy may have recorded a gap since this node has read the catalog."""
    return partition.is_leader and partition.awaits_exposure and partition.log.settings.compacts


class ReadableWait:
    """Waits until clients can read copies up to some offsets, or this node leads them no longer."""

    def __init__(self, offsets: Mapping[Partition, Offset]) -> None:
        self._requested = offsets
        self._changed = asyncio.Event()

    def advanced(self, partition: Partition) -> None:
        self._changed.set()

    async def wait(self) -> None:
        for partition in self._requested:
            partition.listen(self)
        try:
            while any(
                partition.is_leader and partition.high_watermark < offset
                for partition, offset in self._requested.items()
            ):
                self._changed.clear()
                await self._changed.wait()
        finally:
            for partition in self._requested:
                partition.forget(self)
