"""The request walks in docs/architecture.md match the files that requests pass through on a real broker."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import millstream
from millstream.broker.log.files import DiskFiles
from millstream.broker.node import Broker
from millstream.core.config import Config

SOURCE = Path(millstream.__file__).parent
PAGE = SOURCE.parent.parent / "docs" / "architecture.md"
FILES_MAX = 8
SCHEDULING = "broker/net/turns.py"
"""Calls a connection that had to wait for its turn, as it does on a busy machine."""


def documented(heading: str) -> list[str]:
    section = PAGE.read_text(encoding="utf-8").split(f"### {heading}", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def files_on_the_stack() -> Iterator[str]:
    """The source files of the callers in call order, each once."""
    frame: FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            found.append(str(path.relative_to(SOURCE)))
        frame = frame.f_back
    return iter(dict.fromkeys(reversed(found)))


class Walks:
    """The paths on which requests of one API reached the disk."""

    def __init__(self, api: str) -> None:
        self._api = f"broker/kafka/apis/{api}.py"
        self.seen: set[tuple[str, ...]] = set()

    def spy(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            files = tuple(name for name in files_on_the_stack() if name != SCHEDULING)
            if self._api in files:
                self.seen.add(files)
            return real(*arguments)

        return staticmethod(wrapped)


@pytest.fixture
def produced(monkeypatch: pytest.MonkeyPatch) -> Walks:
    walks = Walks("produce")
    monkeypatch.setattr(DiskFiles, "write_at", walks.spy(DiskFiles.write_at))
    return walks


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Walks:
    walks = Walks("fetch")
    monkeypatch.setattr(DiskFiles, "read_at", walks.spy(DiskFiles.read_at))
    return walks


def produce_and_consume(address: str) -> None:
    producer = Producer({"bootstrap.servers": address})
    for _ in range(3):
        producer.produce("orders", b"x" * 2_000)
        producer.flush()
    consumer = Consumer({"bootstrap.servers": address, "group.id": "walk", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("orders", 0, 0)])
    assert len(consumer.consume(3, timeout=60)) == 3
    consumer.close()


async def test_the_documented_walks_are_the_real_ones(tmp_path: Path, produced: Walks, fetched: Walks) -> None:
    broker = Broker(Config(data=str(tmp_path), kafka="127.0.0.1:0", http="127.0.0.1:0"))
    await broker.start()
    try:
        await asyncio.to_thread(produce_and_consume, broker.kafka_address)
    finally:
        await broker.stop()
    for heading, walks in (("Produce:", produced), ("Fetch:", fetched)):
        page = documented(heading)
        assert len(page) <= FILES_MAX
        assert tuple(page) in walks.seen, sorted(walks.seen)


def lease_one_message(address: str) -> None:
    with millstream.connect_sync(address) as client:
        client.publish("orders", b"x")
        with client.subscription("orders", name="billing", start="earliest") as messages:
            next(messages).ack()


async def test_a_lease_runs_through_the_documented_files(tmp_path: Path) -> None:
    run: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            run.add(frame.f_code.co_filename)

    broker = Broker(Config(data=str(tmp_path), kafka="127.0.0.1:0", http="127.0.0.1:0"))
    await broker.start()
    try:
        sys.setprofile(note)
        await asyncio.to_thread(lease_one_message, broker.kafka_address)
    finally:
        sys.setprofile(None)
        await broker.stop()
    page = documented("A lease")
    assert page
    assert [name for name in page if str(SOURCE / name) not in run] == []


def test_a_landing_batch_loads_the_documented_files() -> None:
    """In a separate process, since other tests of this one may have loaded them."""
    code = (
        "import sys, millstream.pipelines.runtime.driver, millstream.pipelines.jobs.land.job\n"
        "print(*(getattr(module, '__file__', '') for module in list(sys.modules.values())), sep='\\n')"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
    page = documented("A landing batch")
    assert page
    assert [name for name in page if str(SOURCE / name) not in loaded] == []
