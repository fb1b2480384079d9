"""The result of opening or recovering the folder of a log, and the producer state rebuilt from its batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.broker.log.damage import Damage
from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.producers import Producers
from millstream.broker.log.scan import BadRange, Scan, SectorWindow, Window
from millstream.broker.log.segment import Segment
from millstream.core.errors import StorageFailure
from millstream.core.ids import OffsetRange
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, BatchHeader

if TYPE_CHECKING:
    from millstream.broker.log.log import Log


_ON_LOOP_BYTES = 256 * 1024


def replay_batch(producers: Producers, header: BatchHeader, window: Window, now_ms: int) -> None:
    """Replay a batch of a file; more than the header is read only for a marker."""
    if header.producer_id < 0:
        return
    append_time_ms = header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else -1
    if header.is_control:
        batch = window.at(header.position, header.size_bytes)
        producers.take(header._replace(position=0), batch, header.base_offset, now_ms, append_time_ms)
    else:
        producers.take(header, b"", header.base_offset, now_ms, append_time_ms)


class ProducerReplay:
    """Rebuilds the producers' state by reading the whole log; rarely needed.

    Captured on the loop, done in a thread, and caught up with on the loop. `replaced` is a segment that will take the
    place of the one with the same base offset.
    """

    def __init__(self, log: Log, replaced: Segment | None = None) -> None:
        self.error: OSError | None = None
        self._log = log
        self._replaced = replaced
        self._files = log.open_files.files
        self._now_ms = log.clock.now_ms()
        self._producers = Producers(expiry_ms=log.producers.expiry_ms)
        # The segment that was read last, up to where, and the offset that continues there.
        self._base_offset = self._position = self._expected = -1
        self._unread: list[tuple[Segment, int, int]] = []
        self._capture()

    def _capture(self) -> None:
        segments = {segment.base_offset: segment for segment in self._log.segments}
        if self._replaced is not None:
            segments[self._replaced.base_offset] = self._replaced
        self._unread = [
            (segment, segment.size, segment.next_offset)
            for base_offset, segment in sorted(segments.items())
            if base_offset > self._base_offset or (base_offset == self._base_offset and segment.size > self._position)
        ]

    @property
    def _unread_bytes(self) -> int:
        read = sum(self._position for segment, _, _ in self._unread if segment.base_offset == self._base_offset)
        return sum(size for _, size, _ in self._unread) - read

    def execute(self) -> None:
        """Read; called in a thread."""
        try:
            for segment, size, next_offset in self._unread:
                self._read(segment, size, next_offset)
        except OSError as error:
            self.error = error

    def _read(self, segment: Segment, size: int, next_offset: int) -> None:
        is_begun = segment.base_offset == self._base_offset
        position, expected = (self._position, self._expected) if is_begun else (0, segment.base_offset)
        descriptor = self._files.open(segment.path)
        try:
            window = SectorWindow(self._files, descriptor, min(size, self._files.size(descriptor)))
            for found in Scan(window, position, expected, limit=next_offset):
                if not isinstance(found, BadRange):
                    replay_batch(self._producers, found, window, self._now_ms)
        finally:
            self._files.close(descriptor)
        self._base_offset, self._position, self._expected = segment.base_offset, size, next_offset

    def has_caught_up(self) -> bool:
        """Whether everything was read, or cannot be; the few bytes appended meanwhile are read here, on the loop."""
        if self.error is None:
            self._capture()
            if self._unread_bytes > _ON_LOOP_BYTES:
                return False
            self.execute()
        return True

    def take(self) -> Producers:
        """Return the state, once it has caught up; transactions that are about to begin continue."""
        if self.error is not None:
            raise StorageFailure(f"{self._log.partition} could not be read: {self.error.strerror or self.error}")
        self._producers.transactions.guards.update(self._log.producers.transactions.guards)
        return self._producers


def read_producers(log: Log) -> Producers:
    """Rebuild the producers' state before this returns."""
    replay = ProducerReplay(log)
    replay.execute()
    while not replay.has_caught_up():
        replay.execute()
    return replay.take()


@dataclass(slots=True, kw_only=True)
class LogContents:
    directory: str
    segments: list[Segment]
    start_offset: int
    end_offset: int
    epochs: EpochHistory
    producers: Producers
    damage: Damage = field(default_factory=Damage)
    journal_mark: tuple[int, int] = (0, 0)
    cleaned_offset: int = 0
    """The offset below which everything is compacted."""
    superseded_by: int = 0
    """Compaction may have removed records because of later ones below this offset."""
    known: bool = False
    """Whether there was a checkpoint, which means that the folder itself is durable."""
    changed: bool = False
    """Whether the last checkpoint is older than the files."""


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """The outcome of opening a log after an unclean stop."""

    directory: str
    topic: str = ""
    partition: int = -1
    scanned_bytes: int = 0
    scanned_batches: int = 0
    replayed_bytes: int = 0
    cut_bytes: int = 0
    cut_from_offset: int = -1
    lost: list[OffsetRange] = field(default_factory=list)

    @property
    def is_notable(self) -> bool:
        """Whether anything was truncated, lost, or restored from the journal."""
        return bool(self.cut_bytes or self.lost or self.replayed_bytes)

    def __str__(self) -> str:
        parts = [f"scanned {self.scanned_batches} batches ({self.scanned_bytes} bytes)"]
        if self.replayed_bytes:
            parts.append(f"restored {self.replayed_bytes} bytes from the journal")
        if self.cut_bytes:
            parts.append(f"truncated a torn tail of {self.cut_bytes} bytes at offset {self.cut_from_offset}")
        parts += [f"offsets {lost.start} to {lost.end - 1} are damaged" for lost in self.lost]
        return f"{self.topic}-{self.partition}: {'; '.join(parts)}"
