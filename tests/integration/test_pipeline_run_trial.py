"""A manual pipeline run with a real Spark stops cleanly on request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

WAIT_S = 300.0


@pytest.mark.trial
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["starting Spark …", "running"])
def test_a_stopped_command_leaves_nothing_behind(server: Server, topic: str, tmp_path: Path, stage: str) -> None:
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", topic).code == 0
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "millstream.cli.main",
        "pipeline",
        "run",
        "land",
        topic,
        "--lake",
        tmp_path / "lake",
    ]
    running = subprocess.Popen(
        [*map(str, command), "--brokers", server.kafka],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stderr is not None
        assert any(line == f"land-{topic}: {stage}\n" for line in running.stderr)
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=WAIT_S)
    finally:
        running.kill()
        running.wait()
    assert (running.returncode, "stopped by SIGTERM" in errors) == (143, True)
    assert list(scratch.iterdir()) == []
