"""Start a foreign server, print the address once it accepts connections, and stop it when asked to.

    python -m benchmarks.peers.launch --address 127.0.0.1:PORT -- COMMAND ...

`PeerServer` runs this as its process; the server is its child, in the same process group, so that neither can outlive
the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from millstream_testing.server import Server, ServerFailed

READY_S_MAX = 50.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class PeerServer(Server):
    """A third-party server as a process, with the interface of a `Server`."""

    def __init__(self, data: Path, port: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(data)
        self.kafka = f"127.0.0.1:{port}"
        self._command = command
        self._environment = environment

    def command(self) -> Sequence[str]:
        """This module, which starts the server."""
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        launch = [sys.executable, "-m", "benchmarks.peers.launch", "--address", self.kafka, "--"]
        return [*launch, "env", *variables, *self._command]

    @property
    def pid(self) -> int:
        """The process id of the server itself, for its CPU seconds and memory."""
        child: int = psutil.Process(self._running().pid).children()[0].pid
        return child

    def __exit__(self, *exception: object) -> None:
        """Wait for the server to exit, so that its parent can reap it; kill it if it does not."""
        with suppress(ServerFailed):
            if self.is_running():
                self.stop()
        super().__exit__(*exception)

    def _folder(self) -> Path:
        return Path(__file__).resolve().parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.launch")
    parser.add_argument("--address", required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    server = subprocess.Popen(options.command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.terminate())
    _wait_until_listening(options.address, server)
    print(json.dumps({"kafka": options.address}), flush=True)
    return server.wait()


def _wait_until_listening(address: str, server: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    server.kill()
    raise SystemExit(f"the server did not listen on {address} within {READY_S_MAX:g} s (exit code {server.wait()})")


if __name__ == "__main__":
    sys.exit(main())
