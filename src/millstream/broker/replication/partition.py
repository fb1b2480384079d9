"""One partition of this node and its role: appends, the high watermark, and the requests that wait for it.

This is the only place where the response to a producer waits. This node's own guarantee follows from the topic's
`flush` setting: synced offsets under `always`, written ones otherwise. With a single replica that is the high
watermark; with followers it is the least that all in-sync replicas have (`in_sync`). `acks=1` waits for this node's own
guarantee, `acks=all` for the high watermark.

Nothing here waits for the network or asks the coordination store: `apply` takes the states of the store,
`read_for_follower` serves a follower's fetch, `append_fetched` takes the response to one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from millstream.broker.log.log import READ_ALL, AppendedRange, AppendedRun, ByteRanges, Log
from millstream.broker.log.segment_slice import SegmentSlice
from millstream.broker.log.store import LogStore
from millstream.broker.log.transactions import Guard, OpenTransaction
from millstream.broker.replication.acknowledgement import (
    AcknowledgementFuture,
    AcknowledgementListener,
    AcknowledgementQueue,
)
from millstream.broker.replication.in_sync import NOT_REGISTERED, InSync, InSyncChange, MayJoin, any_replica
from millstream.broker.replication.replica import Replica, diverging_end
from millstream.broker.replication.shared_reads import SharedReads
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import (
    DamagedRange,
    FencedLeaderEpoch,
    InspectionPending,
    MillstreamError,
    MirroredTopic,
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PartitionClosed,
    RepairPending,
    StorageFailure,
    UnknownLeaderEpoch,
)
from millstream.core.ids import Epoch, EpochEnd, NodeId, Offset, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import FLUSH_ALWAYS, Topic, TopicPartition, TopicSettings
from millstream.protocol.records.batch import Buffer
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.rewrite import empty_batch


class AdvanceListener(Protocol):
    """Waits for new records, as a long poll does."""

    def advanced(self, partition: Partition) -> None:
        """Record that the high watermark or the leader has changed, or that the partition was closed."""


class AppendListener(Protocol):
    """A follower's session, which waits for any append."""

    def appended(self, partition: Partition) -> None:
        """Record that the leader's log has grown."""


class InSyncManager(Protocol):
    """Maintains the in-sync sets of the partitions that this node leads."""

    def behind(self, partition: Partition) -> None:
        """Handle an in-sync replica that lacks part of the log; called once until all have caught up."""

    def wants_change(self, partition: Partition) -> None:
        """Handle a partition that may need a change of its in-sync set."""


ACKS_ALL = -1

ACKS_LEADER = 1

_NO_EPOCH_IS_STALE = Epoch(-1)


class FollowerRead(NamedTuple):
    """The response to a follower's fetch: records, or where its history diverges."""

    records: Buffer
    diverging: EpochEnd | None
    high_watermark: Offset
    log_start: Offset


class CommittedRead(NamedTuple):
    """Batches of decided transactions, and the aborted ones among these: producer id and first offset."""

    records: Buffer
    aborted: list[tuple[int, int]]


class Partition(Replica):
    """A replica of a partition, in any role; what it does as a follower is in `Replica`.

    `alone` is a partition without other replicas: it leads from the start, and everything that recovery kept is on
    disk, so all of it may be read. Any other has no role until `apply` gives it one, and knows of no acknowledged
    record.
    """

    __slots__ = (
        "_append_listeners",
        "_arriving",
        "_clock",
        "_in_sync",
        "_is_behind",
        "_listeners",
        "_stale_epoch",
        "_wants_handover",
        "awaits_exposure",
        "bytes_out",
        "exposed",
        "in_sync_manager",
        "records_in",
    )

    def __init__(
        self,
        topic: Topic,
        index: PartitionIndex,
        log: Log,
        store: LogStore,
        *,
        alone: bool = True,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(topic, index, log, store, alone=alone)
        self.in_sync_manager: InSyncManager | None = None
        self._stale_epoch = _NO_EPOCH_IS_STALE
        self._in_sync: InSync | None = None
        """The followers, while there are some and this node leads them."""
        self._is_behind = False
        self._wants_handover = False
        """Whether another replica should lead, because this one cannot repair what its disk lost."""
        self._clock = clock or SystemClock()
        # Dictionaries keep an order, so that a simulated run can be repeated.
        self._listeners: dict[AdvanceListener, None] = {}
        self._append_listeners: dict[AppendListener, None] = {}
        self.exposed: Offset | None = None
        """The offset up to which clients may read a mirrored partition; None for all acknowledged records."""
        self.awaits_exposure = False
        """Whether this leader of a mirrored partition does not know its exposed offset yet."""
        self._arriving: AcknowledgementQueue | None = None
        """Listeners that wait for mirrored records that clients may not read yet."""
        self.bytes_out = 0
        self.records_in = 0
        log.damage.on_change = self.damage_changed
        log.listen(
            on_synced=self._advance,
            on_sync_failed=self._fail_waiting,
            acknowledged_offset=None if alone else lambda: self.high_watermark,
        )

    def write(
        self,
        batches: bytearray | memoryview,
        *,
        acks: int,
        internal: bool = False,
        guard: Guard | None = None,
        is_checked: bool = False,
    ) -> AppendedRange:
        """Append without waiting; `acknowledged` returns when a response may be sent.

        A transaction begins only under the guard of `start_transaction`. Records are checked unless `is_checked`.
        """
        if not self.is_leader:
            raise self._not_leader()
        if self.topic.mirror:
            raise self._mirrored_error()
        return self._write(batches, acks=acks, internal=internal, guard=guard, is_checked=is_checked)

    @property
    def may_write_first(self) -> bool:
        """Whether `write_first` may append something."""
        return self.is_leader and not self.topic.mirror and self.log.may_append_first

    def write_first(self, data: memoryview, ranges: ByteRanges, *, acks: int) -> AppendedRun | None:
        """Append as many of the first batches as need no decision, in one write; the others are for `write`."""
        self._check_in_sync(acks)
        run = self.log.append_first(data, ranges, leader_epoch=self.leader_epoch)
        if run is not None:
            self._appended(run.appended.base_offset, run.appended.next_offset, run.size_bytes)
        return run

    def _write(
        self,
        batches: bytearray | memoryview,
        *,
        acks: int,
        internal: bool = False,
        guard: Guard | None = None,
        is_checked: bool = False,
    ) -> AppendedRange:
        self._check_in_sync(acks)
        try:
            appended = self.log.append(
                batches, leader_epoch=self.leader_epoch, internal=internal, guard=guard, is_checked=is_checked
            )
        except OutOfOrderSequence as error:
            if self.log.failure is None:
                raise
            raise self._earlier_write_failed() from error
        if appended.duplicate:
            # Its first copy may still wait for its sync.
            self._sync_or_advance()
        else:
            self._appended(appended.base_offset, appended.next_offset, len(batches))
        return appended

    def _check_in_sync(self, acks: int) -> None:
        in_sync = self._in_sync
        if in_sync is not None and acks == ACKS_ALL and not in_sync.is_enough:
            raise self._not_enough(in_sync)

    def _appended(self, base_offset: Offset, next_offset: Offset, size: int) -> None:
        """Account for an append, and begin what acknowledges it."""
        self.bytes_in += size
        self.records_in += next_offset - base_offset
        if self._in_sync is not None:
            self._notify_followers(self._in_sync, base_offset)
        self._sync_or_advance()

    def _sync_or_advance(self) -> None:
        log = self.log
        if log.settings.flush != FLUSH_ALWAYS:
            self._advance()
        elif log.synced_offset < log.end_offset:
            self._store.sync_soon(log)

    def _earlier_write_failed(self) -> StorageFailure:
        """Return the error for a gap that the disk itself may have caused, so that the client retries.

        A client that sees a gap begins a new epoch. Requests to other partitions that have no response by then are
        sent again under the new epoch, where they can no longer be recognized as duplicates.
        """
        return StorageFailure(f"{self.log.partition}: the disk refused an earlier write: {self.log.failure}")

    def acknowledged(self, appended: AppendedRange, acks: int = ACKS_ALL) -> asyncio.Future[None] | None:
        """Return None if the range is acknowledged already, otherwise a future for its acknowledgement."""
        if self.is_acknowledged(appended, acks):
            return None
        acknowledgement = AcknowledgementFuture()
        self.notify_acknowledged(appended, acknowledgement, acks)
        return acknowledgement.future

    def is_acknowledged(self, appended: AppendedRange, acks: int = ACKS_ALL) -> bool:
        """Whether a response about an append may be sent."""
        if appended.next_offset <= self.high_watermark:
            return True
        return acks != ACKS_ALL and self._in_sync is not None and appended.next_offset <= self.promised_offset

    def notify_acknowledged(
        self, appended: AppendedRange, listener: AcknowledgementListener, acks: int = ACKS_ALL
    ) -> None:
        """Call `listener` when an append is acknowledged, in the moment when the watermark advances."""
        waiting = self._waiting if acks == ACKS_ALL or self._in_sync is None else self._waiting_locally
        waiting.add(appended.next_offset, listener)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._waiting_locally)

    def discard_finished(self) -> None:
        """Remove the listeners that no longer wait."""
        self._waiting.discard_finished()
        self._waiting_locally.discard_finished()

    async def append(
        self, batches: bytearray | memoryview, *, acks: int = ACKS_ALL, internal: bool = False
    ) -> AppendedRange:
        """Append and wait until it is acknowledged as `acks` and the topic's `flush` say."""
        appended = self.write(batches, acks=acks, internal=internal)
        acknowledged = self.acknowledged(appended, acks)
        if acknowledged is not None:
            await acknowledged
        return appended

    def read(self, offset: Offset, *, max_bytes: int, at_least_one: bool = True) -> Buffer:
        """Read whole batches from the one that holds `offset` up to the high watermark."""
        records_slice = self.read_slice(offset, max_bytes=max_bytes, eager_bytes=READ_ALL, at_least_one=at_least_one)
        return b"" if records_slice is None else records_slice.data

    def read_slice(
        self, offset: Offset, *, max_bytes: int, eager_bytes: int, at_least_one: bool = True
    ) -> SegmentSlice | None:
        """Find the same in its segment; more than `eager_bytes` are left to be read while they are sent."""
        if not self.is_leader:
            raise self._not_leader()
        records_slice = self.log.read_slice(
            offset, max_bytes=max_bytes, up_to=self.high_watermark, eager_bytes=eager_bytes, at_least_one=at_least_one
        )
        if records_slice is not None:
            self.bytes_out += records_slice.size
        return records_slice

    # -- transactions ---------------------------------------------------------------------------------------

    @property
    def last_stable_offset(self) -> Offset:
        """The end for `read_committed` consumers: the outcome of all transactions below is acknowledged."""
        transactions = self.log.producers.transactions
        if not transactions.has_unsettled:
            return self.high_watermark
        return Offset(max(transactions.stable_offset(self.high_watermark), self.log.start_offset))

    def read_committed(self, offset: Offset, *, max_bytes: int, at_least_one: bool = True) -> CommittedRead:
        """Read whole batches up to the last stable offset, and which of their transactions were aborted."""
        records_slice, aborted = self.read_committed_slice(
            offset, max_bytes=max_bytes, eager_bytes=READ_ALL, at_least_one=at_least_one
        )
        return CommittedRead(b"" if records_slice is None else records_slice.data, aborted)

    def read_committed_slice(
        self, offset: Offset, *, max_bytes: int, eager_bytes: int, at_least_one: bool = True
    ) -> tuple[SegmentSlice | None, list[tuple[int, int]]]:
        """Find the same in its segment; more than `eager_bytes` are left to be read while they are sent."""
        if not self.is_leader:
            raise self._not_leader()
        records_slice = self.log.read_slice(
            offset,
            max_bytes=max_bytes,
            up_to=self.last_stable_offset,
            eager_bytes=eager_bytes,
            at_least_one=at_least_one,
        )
        if records_slice is None:
            return None, []
        self.bytes_out += records_slice.size
        return records_slice, self.aborted_in(offset, Offset(records_slice.next_offset))

    def aborted_in(self, first: Offset, next_offset: Offset) -> list[tuple[int, int]]:
        """Return the aborted transactions with records between two offsets, as producer id and first offset."""
        aborted = self.log.producers.transactions.aborted
        return [transaction[:2] for transaction in aborted.overlapping(first, next_offset)] if aborted else []

    def has_open_transaction(self, producer_id: int, epoch: int) -> bool:
        return self.log.producers.has_open(producer_id, epoch)

    def open_transactions(self) -> list[OpenTransaction]:
        return self.log.producers.open_transactions()

    def start_transaction(self, producer_id: int, epoch: int, sequence: int, *, bumps_epoch: bool) -> Guard | None:
        """Return a guard under which to ask the coordinator and then to write; None if the transaction is open.

        A marker that is written in between voids it. Raise `FencedProducer` for an epoch that is over.
        """
        if not self.is_leader:
            raise self._not_leader()
        if self.topic.mirror:
            raise self._mirrored_error()
        now_ms = self.log.clock.now_ms()
        return self.log.producers.start_guard(producer_id, epoch, sequence, now_ms, bumps_epoch=bumps_epoch)

    def write_marker(self, marker: Marker) -> AppendedRange:
        """End a transaction here without waiting; `acknowledged` returns when that is final. May be repeated.

        Raise `FencedProducer` or `TransactionCoordinatorFenced` for an outdated marker, `UnknownLeaderEpoch` for one of
        a coordinator that is not known yet.
        """
        if not self.is_leader:
            raise self._not_leader()
        log = self.log
        if self.topic.mirror and not self.topic.is_draining:
            # The cluster that now writes the topic has ended all transactions that it copied, and has no others.
            return AppendedRange(log.end_offset, Offset(0), -1, log.start_offset, True)
        admitted = log.producers.check_marker(marker)
        if admitted is not None:
            return self._write(encode_marker(admitted, log.clock.now_ms()), acks=ACKS_ALL, internal=True)
        # It is stored already. A guard from before it must not let a transaction begin now.
        log.producers.transactions.guards.pop(marker.producer_id, None)
        return AppendedRange(log.end_offset, log.end_offset, -1, log.start_offset, True)

    # -- mirroring ------------------------------------------------------------------------------------------

    def append_mirrored(
        self, batches: Buffer, *, exposed: Offset | None, compacted_until: int = 0
    ) -> asyncio.Future[None] | None:
        """Append batches as the source of a mirror has them: offsets, epochs and producers included.

        `exposed` is the offset up to which clients may read from now on. Records may be missing because of later ones
        below `compacted_until`. The future is done when this node has them as durably as the topic requires. An epoch
        above this partition's has to be raised first (`Topics.raise_epoch`), so that followers and consumers never see
        a batch from a later epoch than its leader's.
        """
        if not self.is_leader:
            raise self._not_leader()
        log, in_sync = self.log, self._in_sync
        before = log.end_offset
        log.append_replica(batches, leader_epoch=self.leader_epoch, compacted_until=compacted_until)
        self.bytes_in += len(batches)
        self.records_in += log.end_offset - before
        self.exposed, self.awaits_exposure = exposed, False
        if in_sync is not None and log.end_offset > before:
            self._notify_followers(in_sync, before)
        self._sync_or_advance()
        return self.stored()

    @property
    def replicated_offset(self) -> Offset:
        """The offset up to which all in-sync replicas have the log, whether clients may read it or not."""
        own = self.promised_offset
        return own if self._in_sync is None else Offset(max(self._in_sync.acknowledged(own), self.high_watermark))

    def arrived(self, offset: Offset) -> asyncio.Future[None] | None:
        """Return None if every replica that counts has a mirrored log up to an offset, otherwise a future for that."""
        if self.replicated_offset >= offset:
            return None
        if self._arriving is None:
            self._arriving = AcknowledgementQueue()
        acknowledgement = AcknowledgementFuture()
        self._arriving.add(offset, acknowledgement)
        return acknowledgement.future

    def expose(self, offset: Offset | None) -> None:
        """Expose a mirrored partition to clients up to an offset, or all of it; the offset may also move back."""
        self.exposed, self.awaits_exposure = offset, False
        if offset is not None and offset < self.high_watermark:
            self.high_watermark = max(offset, self.log.start_offset)
        self._advance()

    async def cut_mirrored(self, offset: Offset, *, refetches: bool) -> None:
        """Truncate a mirrored partition, durably; records below the offset may be dropped only with `refetches`."""
        self.exposed, self.awaits_exposure = None, False
        if refetches or offset < self.log_start:
            done = self._truncate_to_fetch(offset)
        else:
            done = self._execute_truncation(self.log.begin_truncation(offset))
        self._notify_listeners()
        if done is not None:
            await done

    async def restart_mirrored(self, offset: Offset) -> None:
        """Drop everything and restart at the source's log start: the source no longer has the next records."""
        done = self._execute_truncation(self.log.begin_restart(offset))
        if done is not None:
            await done

    async def begin_own_history(self) -> None:
        """Write an empty batch in this leader's epoch, so that the log shows from where on it differs from the source.

        The epoch alone would be forgotten by a node that restarts before the first write.
        """
        end = self.log.end_offset
        self.log.append_replica(empty_batch(end, end + 1, self.leader_epoch), leader_epoch=self.leader_epoch)
        if self._in_sync is not None:
            self._notify_followers(self._in_sync, end)
        self._sync_or_advance()
        waiting = self.acknowledged(AppendedRange(end, self.log.end_offset, -1, self.log.start_offset, False))
        if waiting is not None:
            await waiting

    def aborted_across(self, offset: Offset) -> list[int]:
        """Return the first offsets of aborted transactions that were open at an offset."""
        aborted = self.log.producers.transactions.aborted.overlapping(offset, offset + 1)
        return [transaction.first_offset for transaction in aborted if transaction.first_offset < offset]

    async def abort_open(self) -> None:
        """Abort every transaction that is open here, since no coordinator will end it."""
        last: AppendedRange | None = None
        for transaction in self.open_transactions():
            marker = Marker(
                producer_id=ProducerId(transaction.producer_id),
                producer_epoch=ProducerEpoch(transaction.producer_epoch),
                commit=False,
                coordinator_epoch=max(transaction.coordinator_epoch, 0),
            )
            last = self._write(encode_marker(marker, self.log.clock.now_ms()), acks=ACKS_ALL, internal=True)
        waiting = None if last is None else self.acknowledged(last)
        if waiting is not None:
            await waiting

    def _mirrored_error(self) -> MirroredTopic:
        return MirroredTopic(
            f"topic {self.topic.name!r} is written by mirror {self.topic.mirror!r} only; write to its source, or make "
            f"it writable here with `millstream mirror failover {self.topic.mirror}`"
        )

    # -- other requests -------------------------------------------------------------------------------------

    def check_leader_epoch(self, epoch: int) -> None:
        """Raise if the caller knows another leader epoch than this one; -1 means that it does not check."""
        if epoch in (-1, self.leader_epoch):
            if not self.is_leader:
                raise self._not_leader()
            return
        if epoch < self.leader_epoch:
            raise FencedLeaderEpoch(f"{self.log.partition} is at leader epoch {self.leader_epoch}, not {epoch}")
        raise UnknownLeaderEpoch(f"{self.log.partition} is only at leader epoch {self.leader_epoch}, not {epoch}")

    def delete_before(self, offset: Offset) -> None:
        """Advance the log start to an offset, here and then on the followers."""
        self.log.delete_before(offset)
        self._notify_listeners()

    def listen(self, listener: AdvanceListener) -> None:
        self._listeners[listener] = None

    def forget(self, listener: AdvanceListener) -> None:
        self._listeners.pop(listener, None)

    def change_settings(self, topic: Topic, settings: TopicSettings) -> None:
        """Apply changed settings; a stricter `flush` never hides what was already visible."""
        self.topic = topic
        if not topic.mirror:
            self.exposed, self.awaits_exposure = None, False
        self.log.change_settings(settings)
        if self._in_sync is not None:
            self._in_sync.change_min(settings.min_insync_replicas)
            self._request_change()
        self._advance()
        if self.log.synced_offset < self.log.end_offset and settings.flush == FLUSH_ALWAYS:
            self._store.sync_soon(self.log)

    def close(self, reason: MillstreamError | None = None) -> None:
        """Refuse further writes and fail waiting requests: the partition was deleted, or the broker stops."""
        self._closed = True
        self.is_leader = False
        self._in_sync = None
        self._fail_arriving()
        self._fail_waiting(reason or PartitionClosed(f"partition {self.log.partition} was closed"))
        self._notify_listeners()

    # -- roles ----------------------------------------------------------------------------------------------

    def apply(self, versioned: Versioned, *, me: NodeId, inherited: bool = False) -> None:
        """Apply a state of the coordination store: lead, follow, or neither. Older revisions are ignored.

        `inherited` is a state from before this process registered. If it names this node as the leader, that was an
        earlier process, whose last records may be lost; this one leads only in a later epoch, for which it has to be
        elected. Otherwise one epoch could have two indistinguishable histories.
        """
        if versioned.revision <= self._revision or self._closed:
            return
        state = versioned.state
        before = (self.is_leader, self.leader_epoch)
        self.state, self._revision, self._me = state, versioned.revision, me
        alone = state.replicas == (me,)
        # Set before the first read, so that readers wait for lost ranges instead of skipping them.
        self.log.damage.has_replicas = not alone
        if inherited and state.leader == me and not alone:
            self._stale_epoch = state.leader_epoch
        if state.leader == me and state.leader_epoch > self._stale_epoch:
            self._become_leader(versioned, me, alone=alone)
        else:
            self._stop_leading(state)
        if before != (self.is_leader, self.leader_epoch):
            self._notify_listeners()

    def _become_leader(self, versioned: Versioned, me: NodeId, *, alone: bool) -> None:
        state, log, now = versioned.state, self.log, self._clock.monotonic()
        same_epoch = self.is_leader and self.leader_epoch == state.leader_epoch
        was_leader, self.is_leader = self.is_leader, True
        self.leader_epoch = Epoch(max(state.leader_epoch, log.latest_epoch)) if alone else state.leader_epoch
        self.high_watermark = min(max(self.high_watermark, log.start_offset), log.end_offset)
        if not was_leader and self.topic.mirror and not self.topic.is_draining:
            # The end of the log may hold transactions whose other parts have not arrived.
            self.exposed, self.awaits_exposure = self.high_watermark, True
        if alone:
            self._in_sync = None
        elif self._in_sync is not None and same_epoch:
            self._in_sync.apply_state(versioned, now=now)
        else:
            minimum = log.settings.min_insync_replicas
            self._in_sync = InSync(me, versioned, epoch_start=log.end_offset, min_in_sync=minimum, now=now)
            self._is_behind = False
        if self._in_sync is not None:
            self._mark_behind(self._in_sync)
            self._request_change()
        self._advance()

    def _stop_leading(self, state: PartitionState) -> None:
        was_leader, self.is_leader = self.is_leader, False
        self._wants_handover = False
        self.leader_epoch = state.leader_epoch
        self._in_sync = None
        self._is_behind = False
        self.high_watermark = min(max(self.high_watermark, self.log.start_offset), self.log.end_offset)
        if was_leader:
            self._fail_arriving()
            self._fail_waiting(self._not_leader())

    def _fail_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.fail(self._not_leader())
            self._arriving = None

    @property
    def is_settled(self) -> bool:
        """Whether this leader knows everything that earlier leaders have acknowledged."""
        if self._in_sync is None or self.awaits_exposure:
            return not self.awaits_exposure
        known = self._in_sync.epoch_start if self.exposed is None else min(self.exposed, self._in_sync.epoch_start)
        return self.high_watermark >= known

    async def settled(self) -> None:
        """Wait until everything that the log holds now is acknowledged; raise `NotLeader` if that may never happen.

        A new leader's log may hold records that were never acknowledged. Code that builds state from the log has to
        wait until they are known to stay.
        """
        if not self.is_leader:
            raise self._not_leader()
        end = self.log.end_offset
        if end > self.high_watermark:
            acknowledgement = AcknowledgementFuture()
            self._waiting.add(end, acknowledgement)
            await acknowledgement.future

    # -- the leader's side of replication -------------------------------------------------------------------

    def read_for_follower(
        self,
        node: NodeId,
        *,
        offset: Offset,
        last_epoch: int,
        leader_epoch: int,
        max_bytes: int,
        at_least_one: bool = True,
        registration: int = NOT_REGISTERED,
        reads: SharedReads | None = None,
    ) -> FollowerRead:
        """Read from an offset up to the end of the log, for a replica of this partition.

        A fetch at an offset implies that the replica has everything before it, as durably as the topic requires; its
        position is recorded once both logs are known to agree up to there.
        """
        in_sync, log = self._in_sync, self.log
        if not self.is_leader or in_sync is None or in_sync.follower(node) is None:
            raise NotLeader(f"{log.partition}: node {node} does not follow this node")
        if leader_epoch < self.leader_epoch:
            raise FencedLeaderEpoch(f"{log.partition} is at leader epoch {self.leader_epoch}, not {leader_epoch}")
        self.check_leader_epoch(leader_epoch)
        if offset < log.start_offset:
            raise self._out_of_range_error(offset)
        diverging = diverging_end(log, offset, last_epoch)
        if diverging is not None:
            return FollowerRead(b"", diverging, self.high_watermark, log.start_offset)
        self._record_position(in_sync, node, offset, registration)
        records: Buffer = b""
        if max_bytes > 0 and offset < log.end_offset:
            records = self._read_shared(in_sync, offset, max_bytes, reads, at_least_one=at_least_one)
        return FollowerRead(records, None, self.high_watermark, log.start_offset)

    def read_for_repair(
        self, node: NodeId, *, offset: Offset, leader_epoch: int, max_bytes: int, at_least_one: bool = True
    ) -> FollowerRead:
        """Read from an offset, for a replica whose disk lost it.

        Any replica serves this up to the high watermark it knows, because all replicas are identical below it. The
        leader of the given epoch serves everything it has, as to any follower.
        """
        log, state = self.log, self.state
        if state is None or self._closed or node not in state.replicas:
            raise NotLeader(f"{log.partition}: node {node} has no replica of it")
        leads = self.is_leader and leader_epoch == self.leader_epoch
        up_to = log.end_offset if leads else self.high_watermark
        records: Buffer = b""
        if offset < up_to:
            try:
                records = log.read(offset, max_bytes=max_bytes, up_to=up_to, at_least_one=at_least_one)
            except InspectionPending:
                # It is not known yet whether it was lost here too.
                raise
            except RepairPending as error:
                # It was lost here too; the replica that asks must not wait for this one.
                raise DamagedRange(str(error), start=offset, end=offset + 1) from error
        return FollowerRead(records, None, self.high_watermark, log.start_offset)

    def damage_changed(self) -> None:
        """Wake requests that wait for records: a range was lost, repaired or abandoned."""
        if not self.log.damage.repairable:
            self._wants_handover = False
        self._notify_listeners()

    def _read_shared(
        self, in_sync: InSync, offset: Offset, max_bytes: int, reads: SharedReads | None, *, at_least_one: bool
    ) -> Buffer:
        """Read up to the end of the log, or reuse the read of another follower."""
        log = self.log
        if reads is None or in_sync.follower_count == 1:
            return log.read(offset, max_bytes=max_bytes, up_to=log.end_offset, at_least_one=at_least_one)
        shared = reads.take(log, self.leader_epoch, offset, max_bytes)
        if shared is not None:
            return shared
        records = log.read(offset, max_bytes=max_bytes, up_to=log.end_offset, at_least_one=at_least_one)
        if records:
            reads.keep(log, self.leader_epoch, offset, records)
        return records

    def _out_of_range_error(self, offset: Offset) -> OffsetOutOfRange:
        log = self.log
        return OffsetOutOfRange(
            f"{log.partition} holds offsets {log.start_offset} to {log.end_offset}, not {offset}",
            start=log.start_offset,
            end=log.end_offset,
        )

    def _record_position(self, in_sync: InSync, node: NodeId, offset: Offset, registration: int) -> None:
        end = self.log.end_offset
        in_sync.fetched(node, offset, end=end, now=self._clock.monotonic(), registration=registration)
        if self._is_behind and offset >= end and in_sync.is_caught_up(end):
            self._is_behind = False
        self._advance()
        if in_sync.may_want_change(node, self.high_watermark):
            self._request_change()

    def listen_to_appends(self, listener: AppendListener) -> None:
        self._append_listeners[listener] = None

    def forget_appends(self, listener: AppendListener) -> None:
        self._append_listeners.pop(listener, None)

    def _notify_followers(self, in_sync: InSync, end_before: Offset) -> None:
        if not self._is_behind:
            in_sync.record_log_growth(end_before=end_before, now=self._clock.monotonic())
            self._mark_behind(in_sync)
        for listener in tuple(self._append_listeners):
            listener.appended(self)

    # -- the in-sync set ------------------------------------------------------------------------------------

    @property
    def is_under_min_in_sync(self) -> bool:
        """Whether this node leads, and fewer replicas are in sync than `min.insync.replicas` requires."""
        return self._in_sync is not None and not self._in_sync.is_enough

    @property
    def has_lagging(self) -> bool:
        """Whether an in-sync replica lacks part of the log."""
        return self._in_sync is not None and self._is_behind

    @property
    def in_sync(self) -> InSync | None:
        """The followers, while there are some and this node leads them."""
        return self._in_sync

    def in_sync_change(self, *, lag_s: float, may_join: MayJoin = any_replica) -> InSyncChange | None:
        """Return the change of the in-sync set to request, if any; call `begin_in_sync_change` when requesting it."""
        if self._in_sync is None:
            return None
        if self._wants_handover:
            change = self._in_sync.handover_change(high_watermark=self.high_watermark, may_join=may_join)
            if change is not None:
                return change
        return self._in_sync.next_change(
            end=self.log.end_offset,
            high_watermark=self.high_watermark,
            now=self._clock.monotonic(),
            lag_s=lag_s,
            may_join=may_join,
        )

    def hand_over(self) -> None:
        """Hand the leadership over to another in-sync replica, as soon as there is one."""
        if self._in_sync is not None and not self._wants_handover:
            self._wants_handover = True
            self._request_change()

    def begin_in_sync_change(self, change: InSyncChange) -> bool:
        """Count both sets from now on until the change ends; return False if it is out of date."""
        in_sync = self._in_sync
        if in_sync is None or in_sync.pending is not None or change.revision != self._revision:
            return False
        in_sync.begin_change(change)
        self._mark_behind(in_sync)
        return True

    def is_pending(self, change: InSyncChange) -> bool:
        """Whether the outcome of a change is still unknown."""
        return self._in_sync is not None and self._in_sync.pending is change.state

    def change_ended(self, versioned: Versioned) -> None:
        """Apply the current state of the store; a later revision ends a change.

        After a lost response the same revision as before proves nothing: the change may still be on its way.
        """
        if self._me is not None:
            self.apply(versioned, me=self._me)

    def change_refused(self, change: InSyncChange) -> None:
        if self._in_sync is not None:
            self._in_sync.refused(change)
            self._advance()

    def _mark_behind(self, in_sync: InSync) -> None:
        if not self._is_behind and not in_sync.is_caught_up(self.log.end_offset):
            self._is_behind = True
            if self.in_sync_manager is not None:
                self.in_sync_manager.behind(self)

    def _request_change(self) -> None:
        if self.in_sync_manager is not None:
            self.in_sync_manager.wants_change(self)

    def _not_enough(self, in_sync: InSync) -> NotEnoughReplicas:
        return NotEnoughReplicas(
            f"{self.log.partition} has {len(in_sync.state.in_sync)} replicas in sync, "
            f"min.insync.replicas requires {in_sync.min_in_sync}"
        )

    # -- the high watermark ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        log = self.log
        readable = log.synced_offset if log.settings.flush == FLUSH_ALWAYS else log.end_offset
        if self._waiting_locally:
            self._waiting_locally.acknowledge(readable)
        if not self.is_leader:
            return
        if self._in_sync is not None:
            readable = self._in_sync.acknowledged(readable)
        if self._arriving:
            self._arriving.acknowledge(readable)
        if self.exposed is not None and readable > self.exposed:
            readable = self.exposed
        if readable <= self.high_watermark:
            return
        self.high_watermark = readable
        if self._waiting:
            self._waiting.acknowledge(readable)
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in tuple(self._listeners):
            listener.advanced(self)


class ReplicaLag(NamedTuple):
    """A replica and how many records of the leader's log it lacks, according to its last fetch."""

    partition: TopicPartition
    replica: NodeId
    records: int


def lagging_replicas(hosted: Iterable[Partition]) -> Iterator[ReplicaLag]:
    """Yield every replica that lacks part of a partition that this node leads."""
    for partition in hosted:
        if partition.in_sync is None:
            continue
        end, start = partition.log.end_offset, partition.log.start_offset
        for follower in partition.in_sync.followers:
            # One that has not fetched yet may lack everything.
            lacking = end - max(follower.offset, start)
            if lacking > 0:
                yield ReplicaLag(TopicPartition(partition.topic.name, partition.index), follower.node, lacking)
