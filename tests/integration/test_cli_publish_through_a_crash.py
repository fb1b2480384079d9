from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from millstream_testing.child_process import child_process
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

StartServer = Callable[..., Server]
LINES = 30_000


def test_a_publish_through_a_crash_of_the_broker_stores_every_line_once(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server()
    millstream = CommandLine(server.kafka)
    millstream("topic", "create", "crashed")
    lines = [f"{number}-{'x' * 100}" for number in range(LINES)]
    (tmp_path / "input").write_text("\n".join(lines))
    command = ["publish", "crashed", "--file", str(tmp_path / "input"), "--timeout", "60", "--brokers", server.kafka]
    with child_process([sys.executable, "-m", "millstream.cli.main", *command], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        server.restart(clean=False)
        ids = [first, *run.stdout]
        assert run.wait() == 0
    assert [int(name.rpartition(b"/")[2]) for name in ids] == list(range(LINES))
    assert millstream("tail", "crashed", "--from", "start", "--raw").lines == lines
