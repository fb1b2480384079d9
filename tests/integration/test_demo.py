"""`millstream demo` succeeds, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest
from confluent_kafka.admin import AdminClient


class RunningDemo:
    """The command as a process; `folder` holds its temporary files."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millstream.cli.main", "demo"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": str(folder)} | environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self.process:
            self.process.kill()

    def read_until(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if words in line:
                return line
        raise AssertionError(f"{words!r} did not come: {self.text}")

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.text += self.process.stdout.read()
        return self.process.wait(60)


@pytest.fixture
def demo_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    started = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    # Processes exit by themselves once they notice that their parent has ended.
    _, alive = psutil.wait_procs(started, timeout=60)
    for process in alive:
        process.kill()
    assert alive == []


@pytest.mark.timeout(900)
def test_the_whole_demo_succeeds_and_can_be_kept(demo_folder: Path) -> None:
    with RunningDemo(demo_folder, DEMO_KEEP="1") as demo:
        demo.read_until("keeps running")
        address = re.search(r"127\.0\.0\.1:\d+", demo.read_until("Kafka clients:"))
        assert address is not None
        admin = AdminClient({"bootstrap.servers": address.group(), "log_level": 0})
        assert "orders" in admin.list_topics(timeout=60).topics
        demo.read_until("Ctrl-C")
        assert demo.end(signal.SIGINT) == 0, demo.text
    assert "one for each message of the log" in demo.text
    assert "All checks passed" in demo.text


def test_nothing_is_left_after_an_interrupt(demo_folder: Path) -> None:
    with RunningDemo(demo_folder) as demo:
        demo.read_until("A topic with")
        assert demo.end(signal.SIGTERM) == 130
    assert "interrupted" in demo.text
    assert "Traceback" not in demo.text
