"""What the folder of a log holds, as opening or recovering it found it."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.log.epochs import EpochHistory
from millstream.log.producers import Producers
from millstream.log.segment import Segment


@dataclass(slots=True, kw_only=True)
class Contents:
    """The parts of a log that is about to be opened."""

    directory: str
    segments: list[Segment]
    start_offset: int
    end_offset: int
    epochs: EpochHistory
    producers: Producers
