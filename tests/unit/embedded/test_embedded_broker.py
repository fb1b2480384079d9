from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from millstream.core.errors import DataFolderInUse, InvalidSetting
from millstream.embedded import EmbeddedBroker
from millstream.protocol.wire.client import Client

SMALL = {"default-flush": "os", "offsets-partitions": 1, "journal-bytes": 1024 * 1024}


async def test_it_serves_inside_a_running_loop_and_stops(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    broker = EmbeddedBroker(tmp_path / "data", settings=SMALL)
    await broker.start()
    async with Client.connect(broker.kafka_address) as client:
        assert (await client.metadata([])).nodes
    assert broker.http_address == ""
    await broker.stop()
    await broker.stop()
    for thread in set(threading.enumerate()) - others:
        if thread.name == "millstream broker":
            thread.join()
    assert (tmp_path / "data" / "clean-stop").exists()


async def test_the_process_state_is_restored_after_a_stop(tmp_path: Path) -> None:
    def state() -> object:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        root = logging.getLogger()
        return handlers, gc.get_threshold(), list(root.handlers), root.level, os.environ.copy()

    before, policy, children = state(), asyncio.get_event_loop_policy(), psutil.Process().children()
    frozen = gc.get_freeze_count()
    broker = EmbeddedBroker(tmp_path / "data", settings=SMALL)
    await broker.start()
    assert psutil.Process().children() == children
    await broker.stop()
    assert state() == before
    assert gc.get_freeze_count() <= frozen
    assert asyncio.get_event_loop_policy() is policy


async def test_a_second_broker_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "data", settings=SMALL)
    await broker.start()
    with pytest.raises(DataFolderInUse, match="this process holds"):
        await EmbeddedBroker(tmp_path / "data", settings=SMALL).start()
    serve = [sys.executable, "-m", "millstream.cli.main", "serve", "--data", str(tmp_path / "data")]
    free = ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    ended = await asyncio.to_thread(
        subprocess.run, [*serve, *free], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode != 0
    assert f"process {os.getpid()} (" in ended.stderr
    await broker.stop()


async def test_a_cancelled_start_leaves_nothing_behind(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "data", settings=SMALL)
    starting = asyncio.ensure_future(broker.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    again = EmbeddedBroker(tmp_path / "data", settings=SMALL)
    await again.start()
    await again.stop()


def test_settings_are_validated_and_come_only_from_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_NODE_ID", "no number")
    EmbeddedBroker(tmp_path)
    with pytest.raises(InvalidSetting, match="a separate parameter"):
        EmbeddedBroker(tmp_path, settings={"kafka": "127.0.0.1:9092"})
    with pytest.raises(InvalidSetting, match=r"no setting 'default-fluch'.*default-flush"):
        EmbeddedBroker(tmp_path, settings={"default-fluch": "os"})


def test_a_broker_that_is_never_stopped_still_stops_cleanly_at_exit(tmp_path: Path) -> None:
    program = (
        "from millstream.embedded import EmbeddedBroker\n"
        f"broker = EmbeddedBroker({str(tmp_path / 'data')!r}, settings={SMALL!r})\n"
        "broker.start_and_wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "data" / "clean-stop").exists()
