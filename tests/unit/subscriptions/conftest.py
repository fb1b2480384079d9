"""A queue with its partition, for tests of delivery."""

from __future__ import annotations

import pytest

from millstream_testing.queue_bench import Workbench


@pytest.fixture
async def bench() -> Workbench:
    return Workbench()
