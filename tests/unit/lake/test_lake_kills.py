"""Processes that land the same messages into one table, killed repeatedly at random moments."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import open_table
from millstream_testing.lake_lander import NUMBERS, is_bad
from millstream_testing.lake_rows import TOPIC, delta_rows, files_rows, next_offset, once
from millstream_testing.object_store import ObjectStore

LANDERS = 3


def _started(url: str, format: str, end: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "millstream_testing.lake_lander", url, format, str(end)]
    return subprocess.Popen(command, env={**os.environ, **environment})


def _landed_through_kills(url: str, format: str, end: int, environment: Mapping[str, str], kills: int) -> int:
    """Land everything while killing processes; return the number of kills."""
    landers = [_started(url, format, end, environment) for _ in range(LANDERS)]
    killed = 0
    try:
        while any(lander.poll() is None for lander in landers):
            time.sleep(random.uniform(0.05, 0.7))
            at = random.randrange(LANDERS)
            if killed < kills and landers[at].poll() is None:
                landers[at].kill()
                landers[at].wait()
                killed += 1
                landers[at] = _started(url, format, end, environment)
    finally:
        for lander in landers:
            lander.kill()
            lander.wait()
    return killed


def _check(storage: Storage, format: str, end: int) -> None:
    assert next_offset(open_table(storage.url, format=format)) == end
    count = delta_rows if format == "delta" else files_rows
    assert count(storage) == once(0, [offset for offset in range(end) if not is_bad(offset)])
    assert count(storage.suffixed("__quarantine")) == once(0, filter(is_bad, range(end)))
    for batch in open_table(storage.url, format=format).scan(TOPIC, 0, 0, end):
        for row in batch.to_pylist():
            assert all(row[name] - row["offset"] in (0, 0.5) for name in NUMBERS)


@pytest.mark.trial
@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_on_a_disk(tmp_path: Path, format: str) -> None:
    storage = Storage.at(str(tmp_path / "orders"))
    assert _landed_through_kills(storage.url, format, 4000, {}, kills=20) > 0
    _check(storage, format, 4000)


@pytest.mark.trial
@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_in_an_object_store(s3_store: ObjectStore, s3: str, format: str) -> None:
    storage = Storage.at(f"{s3}/{uuid.uuid4().hex}/orders")
    assert _landed_through_kills(storage.url, format, 500, s3_store.environment, kills=8) > 0
    _check(storage, format, 500)
