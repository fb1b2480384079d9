"""Logs on a disk in memory, and their contents as consumers read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.clock import Clock
from millstream.core.errors import DamagedRange
from millstream.protocol.records.batch import iterate_headers
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles


def memory_store(files: MemoryFiles | None = None, clock: Clock | None = None, **settings: Any) -> LogStore:
    """Open the logs of a disk, by default of an empty one, with a clock that stands still."""
    given = {"journal_bytes": 10_000, "producer_expiry_ms": 10**12, **settings}
    return LogStore.open(Path("/data"), files=files or MemoryFiles(), clock=clock or ManualClock(), **given)


@asynccontextmanager
async def running(store: LogStore) -> AsyncIterator[LogStore]:
    """Run a store, and close it in the end."""
    task = asyncio.create_task(store.run())
    await asyncio.sleep(0)
    try:
        yield store
    finally:
        await store.close()
        await task


def read_log(log: Log, *, max_bytes: int = 400) -> tuple[bytes, list[tuple[int, int]]]:
    """Read a log in pieces of `max_bytes`; return the batches that it serves, and the ranges it reports as lost."""
    served, lost = bytearray(), []
    offset = int(log.start_offset)
    while offset < log.end_offset:
        try:
            data = bytes(log.read(offset, max_bytes=max_bytes, up_to=log.end_offset))
        except DamagedRange as damaged:
            lost.append((damaged.start, damaged.end))
            offset = damaged.end
            continue
        assert data
        served += data
        offset = [header.next_offset for header in iterate_headers(data)][-1]
    assert offset == log.end_offset, f"{log} made offsets up: {lost}"
    return bytes(served), lost
