"""The follower's side of a replica: its log, and how it is made to agree with the leader's."""

from __future__ import annotations

import asyncio
import logging

from millstream.broker.log.damage import LostRange
from millstream.broker.log.log import Log
from millstream.broker.log.range_repair import RangeRepair, fit_batches
from millstream.broker.log.store import LogStore
from millstream.broker.log.truncation import Truncation
from millstream.broker.replication.acknowledgement import AcknowledgementFuture, AcknowledgementQueue
from millstream.core.errors import FencedLeaderEpoch, MillstreamError, NotLeader, PartitionClosed
from millstream.core.ids import NO_EPOCH, Epoch, EpochEnd, NodeId, Offset, PartitionIndex
from millstream.core.partition_state import FIRST_EPOCH, PartitionState
from millstream.core.topic import FLUSH_ALWAYS, Topic
from millstream.protocol.records.batch import Buffer

_logger = logging.getLogger(__name__)


def diverging_end(log: Log, offset: Offset, last_epoch: int) -> EpochEnd | None:
    """Return the point at which a follower's history diverges, given the end and last epoch of its log, or None.

    It is the last epoch of the leader's log that is not later than the follower's, and where it ends.
    """
    latest = log.latest_epoch
    if last_epoch < 0 or latest == NO_EPOCH:
        # One of the two is empty, so only the end of the leader's log can be compared.
        return None if offset <= log.end_offset else EpochEnd(Epoch(last_epoch), log.end_offset)
    if last_epoch > latest:
        return EpochEnd(latest, log.end_offset)
    epoch, end_offset = log.end_of_epoch(last_epoch)
    if epoch < last_epoch or end_offset < offset:
        return EpochEnd(epoch, end_offset)
    return None


def truncation_point(log: Log, diverging: EpochEnd) -> Offset:
    """Return the offset to which a follower truncates its log; it may have to ask again afterwards."""
    known, known_end = log.end_of_epoch(diverging.epoch)
    if known == NO_EPOCH:
        return min(diverging.end_offset, log.end_offset)
    if known < diverging.epoch:
        return min(known_end, log.end_offset)
    return min(diverging.end_offset, known_end, log.end_offset)


_NO_REVISION = -1


class Replica:
    """The log of a partition on this node, and its agreed state."""

    __slots__ = (
        "_closed",
        "_me",
        "_revision",
        "_store",
        "_waiting",
        "_waiting_locally",
        "bytes_in",
        "high_watermark",
        "index",
        "is_leader",
        "leader_epoch",
        "log",
        "state",
        "topic",
    )

    def __init__(self, topic: Topic, index: PartitionIndex, log: Log, store: LogStore, *, alone: bool) -> None:
        self.topic = topic
        self.index = index
        self.log = log
        # The epoch is stored in the log, so it never decreases, regardless of the store.
        self.leader_epoch = Epoch(max(FIRST_EPOCH, log.latest_epoch))
        self.is_leader = alone
        self.state: PartitionState | None = None
        self.high_watermark = log.end_offset if alone else log.start_offset
        self.bytes_in = 0
        self._revision = _NO_REVISION
        self._me: NodeId | None = None
        self._store = store
        self._waiting = AcknowledgementQueue()
        """Listeners that wait for the high watermark."""
        self._waiting_locally = AcknowledgementQueue()
        """Listeners that wait for this node only: `acks=1`, and a follower that has to sync before its next fetch."""
        self._closed = False

    @property
    def promised_offset(self) -> Offset:
        """The offset up to which this node has the log, as durably as the topic's `flush` requires."""
        log = self.log
        return log.synced_offset if log.settings.flush == FLUSH_ALWAYS else log.end_offset

    @property
    def log_start(self) -> Offset:
        """The first offset that can still be read."""
        return self.log.start_offset

    @property
    def size_bytes(self) -> int:
        return self.log.size_bytes

    @property
    def revision(self) -> int:
        """The revision of `state` in the coordination store; -1 before anything is known."""
        return self._revision

    @property
    def follows(self) -> NodeId | None:
        """The node to fetch from; None for a leader, and while there is no leader."""
        state = self.state
        if self.is_leader or self._closed or state is None or not state.has_leader or state.leader == self._me:
            return None
        return state.leader if self._me in state.replicas else None

    def _not_leader(self) -> NotLeader | PartitionClosed:
        if self._closed:
            return PartitionClosed(f"partition {self.log.partition} was closed")
        leader = (
            f"node {self.state.leader} does" if self.state is not None and self.state.has_leader else "no node does"
        )
        return NotLeader(f"this node does not lead {self.log.partition}; {leader}, in epoch {self.leader_epoch}")

    def _fail_waiting(self, error: MillstreamError) -> None:
        self._waiting.fail(error)
        self._waiting_locally.fail(error)

    # -- the follower's side --------------------------------------------------------------------------------

    def append_fetched(
        self, records: Buffer, *, leader_epoch: Epoch, high_watermark: Offset, log_start: Offset
    ) -> asyncio.Future[None] | None:
        """Append records of the leader of an epoch; the future is done when the next fetch may report them."""
        self._check_following(leader_epoch)
        log = self.log
        if records:
            # Compaction of the leader reads no further than its high watermark.
            log.append_replica(records, leader_epoch=leader_epoch, compacted_until=high_watermark)
            self.bytes_in += len(records)
        self.apply_high_watermark(high_watermark)
        if log.start_offset < log_start <= log.end_offset:
            log.delete_before(log_start)
            self.high_watermark = max(self.high_watermark, log.start_offset)
        return self.stored()

    def apply_high_watermark(self, high_watermark: Offset) -> None:
        """Apply the leader's high watermark, up to the first damage of this replica."""
        known = max(min(high_watermark, self.intact_until), self.log.start_offset)
        if known > self.high_watermark:
            self.high_watermark = Offset(known)

    def stored(self) -> asyncio.Future[None] | None:
        """Return None if all of the log is as durable as the topic requires, otherwise a future for that."""
        if self.promised_offset >= self.log.end_offset:
            return None
        acknowledgement = AcknowledgementFuture()
        self._waiting_locally.add(self.log.end_offset, acknowledgement)
        self._store.sync_soon(self.log)
        return acknowledgement.future

    def truncate(self, diverging: EpochEnd, *, leader_epoch: Epoch) -> asyncio.Future[None] | None:
        """Truncate what the leader of an epoch does not have; the next fetch shows whether the rest agrees.

        The log is shorter at once, and refuses writes until the future, if any, reports that this is durable.
        """
        self._check_following(leader_epoch)
        point = truncation_point(self.log, diverging)
        level = logging.ERROR if point < self.high_watermark else logging.INFO
        _logger.log(
            level,
            "the end of a log differs from its leader's and is truncated",
            extra={
                "partition": str(self.log.partition),
                "from": point,
                "to": self.log.end_offset,
                "epoch": leader_epoch,
            },
        )
        state = self.state
        is_counted = state is not None and self._me in (*state.in_sync, *state.eligible)
        # A mirrored topic may also be truncated below the high watermark, which is unknown after a restart.
        is_known = not self.topic.mirror or self.high_watermark > self.log.start_offset
        if is_counted and is_known and point >= self.high_watermark:
            # It agrees with its leader up to the high watermark at least, and compaction here has read no further, so
            # its leader has nothing below that it lacks. Without its log it could be elected before its next fetch
            # takes it out.
            return self._execute_truncation(self.log.begin_truncation(point))
        return self._truncate_to_fetch(point)

    def _truncate_to_fetch(self, point: Offset) -> asyncio.Future[None] | None:
        """Truncate what another log does not have, in order to fetch the rest from it.

        Compaction may have removed the last value of a key below that point because of a later one beyond it. Then
        nothing is kept.
        """
        log = self.log
        if point < log.start_offset or point < log.superseded_by:
            return self._execute_truncation(log.begin_restart(min(point, log.start_offset)))
        return self._execute_truncation(log.begin_truncation(point))

    def _execute_truncation(self, cut: Truncation | None) -> asyncio.Future[None] | None:
        self._fail_truncated()
        return None if cut is None else self._store.truncate_soon(cut)

    @property
    def intact_until(self) -> Offset:
        """The offset up to which this replica is complete: the end of its log, or the first offset that its disk lost.

        Ranges that no other replica has either do not count: no replica could ever have more.
        """
        log = self.log
        lost = log.damage.repairable if log.damage else ()
        return Offset(max(lost[0].start, log.start_offset)) if lost else log.end_offset

    async def restore_range(self, lost: LostRange, batches: Buffer) -> None:
        """Repair a lost range with batches of another replica; raise `MismatchedBatch` if they do not fit."""
        fitted, next_offset = fit_batches(self.log, lost, batches)
        await self._store.repair_range(RangeRepair(self.log, lost, fitted, next_offset))

    def truncate_diverged(self, lost: LostRange) -> asyncio.Future[None] | None:
        """Truncate at a lost range where the leader has later epochs: it has none of the records that follow here.

        The future is that of `truncate`.
        """
        before = self.log.epochs.epoch_at(lost.start - 1)
        return self.truncate(EpochEnd(before, Offset(lost.start)), leader_epoch=self.leader_epoch)

    def abandon_range(self, lost: LostRange) -> None:
        """Report to readers that a range is lost permanently: no other replica has it either."""
        self.log.damage.beyond_repair.add(lost.offsets)
        self.log.damage.on_change()

    def truncate_damage(self, watermark: Offset) -> asyncio.Future[None] | None:
        """Truncate a log that lost unacknowledged records, to fetch them again; not while the leader counts on the
        rest.

        The leader, whose high watermark is given, learns of it by `intact_until`, and then stops counting on the rest.
        Acknowledged records are repaired in place instead, from any replica, and never truncated: what follows them may
        be the last copy. The future is that of `truncate`.
        """
        state, log = self.state, self.log
        first = self.intact_until
        if first >= log.end_offset or self.follows is None or state is None:
            return None
        if self._me in (*state.in_sync, *state.eligible) or first < watermark:
            return None
        _logger.warning(
            "a log is truncated at its damage, and fetched again from there",
            extra={"partition": str(log.partition), "first": first, "end": log.end_offset},
        )
        return self._execute_truncation(log.begin_truncation(first))

    def restart_at(self, offset: Offset, *, leader_epoch: Epoch) -> asyncio.Future[None] | None:
        """Restart at the leader's log start, because the leader no longer has the next records.

        The future is that of `truncate`.
        """
        self._check_following(leader_epoch)
        _logger.warning(
            "a log ends before its leader's begins, and restarts there",
            extra={"partition": str(self.log.partition), "end": self.log.end_offset, "start": offset},
        )
        return self._execute_truncation(self.log.begin_restart(offset))

    def _check_following(self, leader_epoch: Epoch) -> None:
        if self._closed:
            raise self._not_leader()
        if self.is_leader or self.leader_epoch != leader_epoch:
            raise FencedLeaderEpoch(f"{self.log.partition} is at leader epoch {self.leader_epoch}, not {leader_epoch}")

    def _fail_truncated(self) -> None:
        self.high_watermark = min(max(self.high_watermark, self.log.start_offset), self.log.end_offset)
        self._fail_waiting(NotLeader(f"the end of {self.log.partition} was truncated"))
