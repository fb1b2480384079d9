"""Reads one segment file to its end without changing it: which batches are whole, and what is wrong where."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from millstream.broker.log.files import DiskFiles
from millstream.broker.log.scan import Bad, Scan, Window


@dataclass(slots=True)
class ScannedSegment:
    """What a segment holds."""

    path: Path
    size_bytes: int
    next_offset: int
    batches: int = 0
    records: int = 0
    bad: list[Bad] = field(default_factory=list)
    torn_bytes: int = 0
    """Bytes behind the last whole batch, with nothing valid after them: what a crash leaves."""


def scan_segment(path: Path, base_offset: int, limit: int, advance: Callable[[int], None]) -> ScannedSegment:
    """Check framing, order and CRC of every batch below `limit`, where the next segment takes over.

    `advance` is told about bytes that were read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        scanned = ScannedSegment(path, os.fstat(descriptor).st_size, base_offset)
        _scan(Scan(Window(DiskFiles(), descriptor, scanned.size_bytes), 0, base_offset, limit=limit), scanned, advance)
    finally:
        os.close(descriptor)
    return scanned


def _scan(scan: Scan, scanned: ScannedSegment, advance: Callable[[int], None]) -> None:
    done = 0
    for found in scan:
        if not isinstance(found, Bad):
            scanned.batches += 1
            scanned.records += found.record_count
            scanned.next_offset = found.next_offset
        elif found.next_offset >= 0:
            scanned.bad.append(found)
        else:
            scanned.torn_bytes = found.end - found.start
        advance(scan.position - done)
        done = scan.position
    advance(scanned.size_bytes - done)
