"""Reading a state back from its log, a bounded chunk at a time, so that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from millstream.broker.coordination.state import StateMachine, StateRecord
from millstream.core.errors import CorruptBatch, DamagedRange, MillstreamError, OffsetOutOfRange
from millstream.core.ids import Offset
from millstream.protocol.records.batch import Buffer, iterate_headers
from millstream.protocol.records.record import decode_batch

_logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024
RECORDS_BETWEEN_YIELDS = 500


class ReadableLog(Protocol):
    """What loading needs of a partition."""

    @property
    def high_watermark(self) -> Offset:
        """The end of what is acknowledged."""

    @property
    def log_start(self) -> Offset:
        """The first offset that can still be read."""

    def read(self, offset: Offset, *, max_bytes: int) -> Buffer:
        """Whole batches up to the high watermark."""


async def read_back(name: str, log: ReadableLog, state: StateMachine) -> tuple[Offset, int]:
    """Replay the whole log into `state`; return its end and the number of records."""
    offset = log.log_start
    replayed = 0
    while offset < log.high_watermark:
        try:
            chunk = log.read(offset, max_bytes=CHUNK_BYTES)
        except DamagedRange as damage:
            _logger.error("state was lost to damage on disk", extra={"shard": name, "error": str(damage)})
            offset = Offset(max(damage.next_offset, offset + 1))
            continue
        except OffsetOutOfRange as moved:
            if moved.start <= offset:
                raise
            offset = Offset(moved.start)
            continue
        if not chunk:
            break
        offset, count = await _replay_chunk(name, chunk, offset, state)
        replayed += count
        await asyncio.sleep(0)
    return offset, replayed


async def _replay_chunk(name: str, chunk: Buffer, offset: Offset, state: StateMachine) -> tuple[Offset, int]:
    replayed = 0
    for header in iterate_headers(chunk):
        if not header.is_control:
            try:
                for record in decode_batch(chunk, header):
                    if record.offset < offset:
                        continue
                    _replay(name, state, record.offset, StateRecord(record.key or b"", record.value, record.headers))
                    replayed += 1
                    if replayed % RECORDS_BETWEEN_YIELDS == 0:
                        await asyncio.sleep(0)
            except CorruptBatch as error:
                _logger.error("a batch of state cannot be read", extra={"shard": name, "error": str(error)})
        offset = header.next_offset
    return offset, replayed


def _replay(name: str, state: StateMachine, offset: Offset, record: StateRecord) -> None:
    try:
        state.replay(record)
    except MillstreamError as error:
        # One unreadable record must not take the whole shard away; the others are still good.
        _logger.warning("a record of state is skipped", extra={"shard": name, "offset": offset, "error": str(error)})
    except Exception:
        _logger.exception("a record of state is skipped: a defect", extra={"shard": name, "offset": offset})
