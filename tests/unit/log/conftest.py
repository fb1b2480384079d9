"""A store on an in-memory disk, which a test can open repeatedly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream.broker.log.store import LogStore
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

OpenStore = Callable[[], LogStore]


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles(open_files_max=64)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_store(files: MemoryFiles, clock: ManualClock) -> OpenStore:
    def open_one() -> LogStore:
        return memory_store(files, clock, journal_bytes=100_000, producer_expiry_ms=3_600_000)

    return open_one


@pytest.fixture
def store(open_store: OpenStore) -> LogStore:
    return open_store()
