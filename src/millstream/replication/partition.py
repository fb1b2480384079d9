"""One partition as its leader sees it: appends, the high watermark, and everyone who waits for it to move.

This is the one place where the reply to a producer waits. With a single replica the high watermark is
what the topic's `flush` setting promises: synced offsets under `always`, written ones otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from millstream.log.log import AppendedRange, Log
from millstream.log.store import LogStore
from millstream.model.errors import (
    FencedLeaderEpoch,
    MillstreamError,
    NotEnoughReplicas,
    PartitionClosed,
    StorageFailure,
    UnknownLeaderEpoch,
)
from millstream.model.ids import Epoch, Offset, PartitionIndex
from millstream.model.topic import FLUSH_ALWAYS, Topic, TopicSettings
from millstream.records.batch import Buffer

ACKS_ALL = -1
FIRST_EPOCH = Epoch(0)


class AdvanceListener(Protocol):
    """Somebody who waits for new records, such as a long poll."""

    def advanced(self, partition: Partition) -> None:
        """Called on the loop each time the high watermark has moved or the partition has closed."""


class AcknowledgementListener(Protocol):
    """Somebody who waits for one append to be acknowledged."""

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Called on the loop once: the append is acknowledged, or the error says why it never will be."""


class _Told:
    """Hands an acknowledgement to a future."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def acknowledged(self, error: MillstreamError | None) -> None:
        # Whoever waited may have gone away, which cancels the future.
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Partition:
    """The leader's side of one partition."""

    __slots__ = (
        "_closed",
        "_listeners",
        "_store",
        "_waiting",
        "bytes_in",
        "bytes_out",
        "high_watermark",
        "index",
        "leader_epoch",
        "log",
        "records_in",
        "topic",
    )

    def __init__(self, topic: Topic, index: PartitionIndex, log: Log, store: LogStore) -> None:
        self.topic = topic
        self.index = index
        self.log = log
        # The epoch lives on in the log, so it never goes back, whatever the catalog says.
        self.leader_epoch = Epoch(max(FIRST_EPOCH, log.latest_epoch))
        self._store = store
        self._waiting: deque[tuple[Offset, AcknowledgementListener]] = deque()
        self._listeners: set[AdvanceListener] = set()
        self._closed = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        # After a start, everything that recovery kept is on disk, so all of it may be read.
        self.high_watermark = log.end_offset
        log.on_synced = self._advance
        log.on_sync_failed = self._fail_waiting

    @property
    def log_start(self) -> Offset:
        """The first offset that can still be read."""
        return self.log.start_offset

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self.log.size_bytes

    @property
    def last_stable_offset(self) -> Offset:
        """Up to where `read_committed` consumers may read; there are no open transactions yet."""
        return self.high_watermark

    def write(self, batches: bytearray | memoryview, *, acks: int, internal: bool = False) -> AppendedRange:
        """Append without waiting; `acknowledged` tells when a reply may be sent."""
        if self._closed:
            raise PartitionClosed(f"partition {self.log.partition} was closed")
        settings = self.log.settings
        if acks == ACKS_ALL and settings.min_insync_replicas > 1:
            raise NotEnoughReplicas(
                f"{self.log.partition} has one replica, but min.insync.replicas asks for {settings.min_insync_replicas}"
            )
        appended = self.log.append(batches, leader_epoch=self.leader_epoch, internal=internal)
        if not appended.duplicate:
            self.bytes_in += len(batches)
            self.records_in += appended.next_offset - appended.base_offset
        if settings.flush == FLUSH_ALWAYS:
            # Also for a duplicate: the first copy may still be waiting for its sync.
            if self.log.synced_offset < self.log.end_offset:
                self._store.sync_soon(self.log)
        else:
            self._advance()
        return appended

    def acknowledged(self, appended: AppendedRange) -> asyncio.Future[None] | None:
        """None when the range is acknowledged already, else a future that tells when it is, or why it never will be."""
        if self.is_acknowledged(appended):
            return None
        told = _Told()
        self.tell(appended, told)
        return told.future

    def is_acknowledged(self, appended: AppendedRange) -> bool:
        """Whether a reply about an append may be sent."""
        return appended.next_offset <= self.high_watermark

    def tell(self, appended: AppendedRange, listener: AcknowledgementListener) -> None:
        """Tell `listener` when an append that is not acknowledged yet is, in the moment when the watermark moves."""
        self._waiting.append((appended.next_offset, listener))

    async def append(
        self, batches: bytearray | memoryview, *, acks: int = ACKS_ALL, internal: bool = False
    ) -> AppendedRange:
        """Append and wait until it is acknowledged as `acks` and the topic's `flush` say."""
        appended = self.write(batches, acks=acks, internal=internal)
        acknowledged = self.acknowledged(appended)
        if acknowledged is not None:
            await acknowledged
        return appended

    def read(self, offset: Offset, *, max_bytes: int) -> Buffer:
        """Whole batches from the one that holds `offset` up to the high watermark."""
        records = self.log.read(offset, max_bytes=max_bytes, up_to=self.high_watermark)
        self.bytes_out += len(records)
        return records

    def check_leader_epoch(self, epoch: int) -> None:
        """Raise when the caller knows another leader than this one; -1 means that it does not say."""
        if epoch in (-1, self.leader_epoch):
            return
        if epoch < self.leader_epoch:
            raise FencedLeaderEpoch(f"{self.log.partition} is at leader epoch {self.leader_epoch}, not {epoch}")
        raise UnknownLeaderEpoch(f"{self.log.partition} is only at leader epoch {self.leader_epoch}, not {epoch}")

    def listen(self, listener: AdvanceListener) -> None:
        """Tell `listener` about every advance until `forget`."""
        self._listeners.add(listener)

    def forget(self, listener: AdvanceListener) -> None:
        """Stop telling `listener`."""
        self._listeners.discard(listener)

    def change_settings(self, topic: Topic, settings: TopicSettings) -> None:
        """Take over changed settings; a stricter `flush` never takes back what was already visible."""
        self.topic = topic
        self.log.change_settings(settings)
        self._advance()
        if self.log.synced_offset < self.log.end_offset and settings.flush == FLUSH_ALWAYS:
            self._store.sync_soon(self.log)

    def close(self, reason: MillstreamError | None = None) -> None:
        """Refuse further writes and fail whoever waits: the partition was deleted, or the broker stops."""
        self._closed = True
        self._fail_waiting(reason or PartitionClosed(f"partition {self.log.partition} was closed"))
        for listener in tuple(self._listeners):
            listener.advanced(self)

    def _advance(self) -> None:
        log = self.log
        readable = log.synced_offset if log.settings.flush == FLUSH_ALWAYS else log.end_offset
        if readable <= self.high_watermark:
            return
        self.high_watermark = readable
        waiting = self._waiting
        while waiting and waiting[0][0] <= readable:
            waiting.popleft()[1].acknowledged(None)
        for listener in tuple(self._listeners):
            listener.advanced(self)

    def _fail_waiting(self, error: StorageFailure | MillstreamError) -> None:
        while self._waiting:
            self._waiting.popleft()[1].acknowledged(error)
