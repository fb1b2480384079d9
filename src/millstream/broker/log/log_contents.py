"""What opening or recovering the folder of a log found."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.broker.log.damage import Damage
from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.producers import Producers
from millstream.broker.log.segment import Segment
from millstream.core.ids import OffsetRange


@dataclass(slots=True, kw_only=True)
class LogContents:
    """The parts of a log that is about to be opened."""

    directory: str
    segments: list[Segment]
    start_offset: int
    end_offset: int
    epochs: EpochHistory
    producers: Producers
    damage: Damage = field(default_factory=Damage)
    journal_mark: tuple[int, int] = (0, 0)
    cleaned_offset: int = 0
    """Everything below is compacted."""
    known: bool = False
    """Whether there was a checkpoint, which means that the folder itself is durable."""
    changed: bool = False
    """Whether the last checkpoint is older than the files."""


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """What opening a log after an unclean stop did."""

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
