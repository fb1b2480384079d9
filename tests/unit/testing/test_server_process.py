"""Test servers never leave a process behind, whatever happens to the test."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from millstream_testing import fork_server
from millstream_testing.child_process import is_alive
from millstream_testing.server import Server, ServerFailed
from millstream_testing.waiting import wait_until

RUN_S_MAX = 240.0
FAKE = """
import json, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def stop(*_):
    child.kill()
    child.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open("child", "w").write(str(child.pid))
print(json.dumps({"kafka": sys.argv[1], "http": os.environ.get("MILLSTREAM_HTTP", "none")}), flush=True)
time.sleep(600)
"""


class FakeServer(Server):
    """A stand-in that starts faster than the real server and also has a child."""

    program = FAKE

    def command(self) -> Sequence[str]:
        return [sys.executable, "-c", self.program, self.kafka]

    def child_pid(self) -> int:
        return int((self.data.parent / "child").read_text())


def test_a_clean_stop_returns_the_exit_code(tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "data").start()
    assert server.is_running()
    assert server.stop() == 0
    assert not server.is_running()
    wait_until(lambda: not is_alive(server.child_pid()))


def test_a_second_start_keeps_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_HTTP", "must not reach the server")
    with FakeServer(tmp_path / "data") as server:
        address, first = server.kafka, server.pid
        assert server.http == "none"
        server.restart()
        assert server.kafka == address
        assert server.pid != first
        with pytest.raises(RuntimeError, match="started already"):
            server.start()


def test_kill_ends_the_children_too(tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "data").start()
    pid, child = server.pid, server.child_pid()
    server.kill()
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not is_alive(child))
    server.kill()


def test_killing_only_the_main_process_leaves_its_children(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "data") as server:
        server.kill_main()
        assert not server.is_running()
        assert psutil.pid_exists(server.child_pid())
    wait_until(lambda: not is_alive(server.child_pid()))


def test_a_server_that_exits_at_once_shows_its_log(tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "data")
    server.program = "import sys; sys.exit('no disk')"
    with pytest.raises(ServerFailed, match="no disk"):
        server.start()
    assert not server.is_running()


def test_nothing_is_left_when_the_test_process_is_killed(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from test_server_process import FakeServer
        server = FakeServer(Path({str(tmp_path)!r}) / "data").start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(int(run.stdout)))
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_a_forgotten_server_is_reaped(tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "data").start()
    pid = server.pid
    del server
    wait_until(lambda: not is_alive(pid))


def test_servers_are_forked_after_one_was_killed_while_its_gateway_was_forked(tmp_path: Path) -> None:
    forks = fork_server._ForkServer()
    version = {"arguments": ["--version"], "cwd": str(tmp_path), "environment": dict(os.environ)}
    unread, reports = os.pipe()
    os.close(unread)
    with (tmp_path / "log").open("wb") as log:
        socket.send_fds(forks._connected(), [json.dumps(version).encode()], [reports, *[log.fileno()] * 3])
        os.close(reports)
        process = forks.fork(["--version"], log=log, cwd=tmp_path, environment=os.environ)
    assert process.wait(fork_server.FIRST_RESPONSE_S_MAX) == 0
    assert process.stdout is not None
    process.stdout.close()


def run_workers(folder: Path, **tests: str) -> str:
    """Run tests with the settings of these, in two processes; return the output."""
    for name, body in tests.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(body))
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-c", str(root / "pyproject.toml"), "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-p", "no:randomly", "-n", "2", "--dist", "loadfile", str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])},
        timeout=RUN_S_MAX,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    return run.stdout + run.stderr


def test_a_run_ends_when_a_worker_process_dies(tmp_path: Path) -> None:
    fine = """
        def test_first(): pass
        def test_second(): pass
    """
    deadly = """
        import os
        def test_first(): pass
        def test_deadly(): os._exit(3)
        def test_last(): pass
    """
    output = run_workers(tmp_path, deadly=deadly, fine=fine, other=fine)
    assert "crashed while running" in output


def test_a_test_that_its_timeout_does_not_end_is_reported_with_the_stacks_of_its_threads(tmp_path: Path) -> None:
    hooks = "pytest_exception_interact, pytest_timeout_cancel_timer, pytest_timeout_set_timer"
    (tmp_path / "conftest.py").write_text(
        f"from tests import conftest\nfrom tests.conftest import {hooks}\nconftest.HANG_S = conftest.TEARDOWN_S = 0.1\n"
    )
    hangs = """
        import pytest, time
        @pytest.mark.timeout(0.1)
        def test_hangs():
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
    """
    fails = """
        import pytest, threading
        @pytest.fixture
        def hanging():
            yield
            threading.Event().wait()
        def test_fails(hanging):
            assert False
    """
    output = run_workers(tmp_path, hangs=hangs, fails=fails)
    for name in ("hangs", "fails"):
        assert re.search(f"crashed while running '.*::test_{name}'", output), output
    assert "most recent call first" in output
