"""Reads one segment file to its end without changing it: which batches are whole, and what is wrong where."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from millstream.model.errors import BatchRejected
from millstream.records.batch import HEADER_BYTES, MAGIC, BatchHeader, check_crc, read_header

_MAGIC_AT = 16
_MAGIC_BYTE = bytes([MAGIC])


@dataclass(slots=True)
class ScannedSegment:
    """What a segment holds. A bad stretch is `(first byte, byte after it, first offset lost, first offset behind)`."""

    path: Path
    base_offset: int
    size_bytes: int = 0
    batches: int = 0
    records: int = 0
    next_offset: int = 0
    bad: tuple[tuple[int, int, int, int], ...] = ()
    torn_bytes: int = 0
    """Bytes behind the last whole batch, with nothing valid after them: what a crash leaves."""


def scan_segment(path: Path, base_offset: int) -> ScannedSegment:
    """Check framing, order and CRC of every batch."""
    scanned = ScannedSegment(path, base_offset, size_bytes=path.stat().st_size, next_offset=base_offset)
    if not scanned.size_bytes:
        return scanned
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            _scan(view, mapped, scanned)
    finally:
        os.close(descriptor)
    return scanned


def _scan(view: memoryview, mapped: mmap.mmap, scanned: ScannedSegment) -> None:
    position = 0
    while position < len(view):
        header = _batch_at(view, position, scanned.next_offset)
        if header is None:
            found = _next_batch(view, mapped, position + 1, scanned.next_offset)
            if found is None:
                scanned.torn_bytes = len(view) - position
                return
            scanned.bad += ((position, found.position, scanned.next_offset, found.base_offset),)
            position = found.position
            continue
        scanned.batches += 1
        scanned.records += header.record_count
        scanned.next_offset = header.next_offset
        position = header.end_position


def _batch_at(view: memoryview, position: int, least_offset: int) -> BatchHeader | None:
    try:
        header = read_header(view, position)
        if header.base_offset < least_offset:
            return None
        check_crc(view, header)
    except BatchRejected:
        return None
    if header.base_offset > least_offset and _goes_back(view, header):
        return None
    return header


def _goes_back(view: memoryview, header: BatchHeader) -> bool:
    """Whether the next batch tells that this one's offset is wrong; the CRC covers everything but the offset."""
    try:
        behind = read_header(view, header.end_position)
        check_crc(view, behind)
    except BatchRejected:
        return False
    return behind.base_offset < header.next_offset


def _next_batch(view: memoryview, mapped: mmap.mmap, position: int, least_offset: int) -> BatchHeader | None:
    """The first whole batch at or after a position, found by the one byte of its header that is always the same."""
    last = len(view) - HEADER_BYTES
    at = mapped.find(_MAGIC_BYTE, position + _MAGIC_AT)
    while at >= 0 and at - _MAGIC_AT <= last:
        header = _batch_at(view, at - _MAGIC_AT, least_offset)
        if header is not None:
            return header
        at = mapped.find(_MAGIC_BYTE, at + 1)
    return None
