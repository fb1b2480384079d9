"""Learning producers and transactions from the batches of segment files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.log.producers import Producers
from millstream.broker.log.scan import Bad, Window
from millstream.core.errors import StorageFailure
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, BatchHeader

if TYPE_CHECKING:
    from millstream.broker.log.log import Log


def replay_batch(producers: Producers, header: BatchHeader, window: Window, now_ms: int) -> None:
    """Remember a batch of a file; only of a marker more than the header is read."""
    if header.producer_id < 0:
        return
    append_time_ms = header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else -1
    if header.is_control:
        batch = window.at(header.position, header.size_bytes)
        producers.take(header._replace(position=0), batch, header.base_offset, now_ms, append_time_ms)
    else:
        producers.take(header, b"", header.base_offset, now_ms, append_time_ms)


def producers_up_to(log: Log, end: int) -> Producers:
    """Rebuild the producers' state up to an offset by reading the whole log; rarely needed."""
    producers = Producers(expiry_ms=log.producers.expiry_ms)
    now_ms = log.clock.now_ms()
    try:
        for segment in log.segments:
            scan = log.reader.scan(segment, 0, segment.base_offset)
            for found in scan:
                if isinstance(found, Bad):
                    continue
                if found.base_offset >= end:
                    return producers
                replay_batch(producers, found, scan.window, now_ms)
    except OSError as error:
        raise StorageFailure(f"{log.partition} could not be read: {error.strerror or error}") from error
    return producers
