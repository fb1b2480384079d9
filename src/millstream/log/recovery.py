"""Opening the folder of a log: what is there, what is torn, what is damaged."""

from __future__ import annotations

from millstream.log.contents import Contents
from millstream.log.epochs import EpochHistory
from millstream.log.files import Files
from millstream.log.producers import Producers
from millstream.log.segment import Segment, base_offset_of
from millstream.model.errors import BatchRejected
from millstream.records.batch import check_crc, read_header

_CHUNK = 8 * 1024 * 1024


def recover(files: Files, directory: str, *, now_ms: int, producer_expiry_ms: int, interval_bytes: int) -> Contents:
    """Scan every segment and cut what is torn."""
    contents = Contents(
        directory=directory,
        segments=[],
        start_offset=0,
        end_offset=0,
        epochs=EpochHistory(),
        producers=Producers(expiry_ms=producer_expiry_ms),
    )
    bases = sorted(base for base in map(base_offset_of, files.names(directory)) if base is not None)
    for base in bases:
        segment = Segment(directory, base)
        contents.segments.append(segment)
        _scan(files, segment, contents, now_ms, interval_bytes)
        contents.end_offset = segment.next_offset
    if contents.segments:
        contents.start_offset = contents.segments[0].base_offset
        for segment in contents.segments[:-1]:
            segment.sealed = True
    return contents


def _scan(files: Files, segment: Segment, contents: Contents, now_ms: int, interval_bytes: int) -> None:
    descriptor = files.open(segment.path)
    try:
        data = files.read_at(descriptor, files.size(descriptor), 0)
        position = 0
        while position < len(data):
            try:
                header = read_header(data, position)
                check_crc(data, header)
            except BatchRejected:
                files.truncate(descriptor, position)
                break
            index = segment.index
            if index is not None and position - index.last_position >= interval_bytes:
                index.add(header.base_offset - segment.base_offset, position, segment.max_timestamp_ms)
            segment.max_timestamp_ms = max(segment.max_timestamp_ms, header.max_timestamp_ms)
            contents.epochs.begin(header.leader_epoch, header.base_offset)
            if header.producer_id >= 0:
                contents.producers.record(header, header.base_offset, now_ms)
            position = header.end_position
            segment.next_offset = header.next_offset
        segment.size = segment.synced_bytes = position
        segment.first_append_ms = now_ms
    finally:
        files.close(descriptor)
