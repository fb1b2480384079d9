"""Runs real clients against a real broker and says of each behaviour whether it is as in Kafka: `make conformance`.

Each client gets its own broker and prints a line per check: `ok`, `FAILED` with the reason, or `not served` when
the broker's response to ApiVersions lacks an API that the check needs. A client whose tools or packages are not there
is skipped, and that is said. The exit code is 1 when a check failed, else 0.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.peers.kafka import kafka
from benchmarks.subject import PeerUnavailable
from conformance import secured
from conformance.client import BuildFailed, Client, Program, Unavailable
from conformance.go_client import GoClient
from conformance.java_client import JavaClient, JavaFrameworks
from conformance.served import ask_served, describe_served

from millstream_testing.server import Server, ServerFailed

CLIENTS: tuple[Client, ...] = (
    JavaClient("4.4.0"),
    JavaClient("2.8.2", old=True),
    JavaClient("2.1.1", old=True),
    JavaFrameworks("4.3.1"),
    GoClient(),
)
SUBJECTS = ("millstream", "kafka")
RUN_S_MAX = 1200.0
# A group waits for more members before its first assignment; the checks have all of theirs at once.
SETTINGS = {"group-initial-delay-ms": 100}
_VERDICTS = ("ok", "FAILED", "not served")
# What differs between log lines of the same event: the time and the peer.
_VARYING = re.compile(r"^[\d-]+ [\d:.]+ |peer=\S+")
_TROUBLE = re.compile(r"^(error|critical) |^[\w.]+(Error|Exception|Violation)\b")


@dataclass(slots=True)
class Tally:
    """How many checks ended how."""

    ok: int = 0
    failed: int = 0
    not_served: int = 0
    skipped: int = 0

    def count(self, line: str) -> str:
        """Record a line of a client's report, and return it."""
        verdict = next((verdict for verdict in _VERDICTS if line.startswith(f"  {verdict} ")), None)
        if verdict is not None:
            name = verdict.lower().replace(" ", "_")
            setattr(self, name, getattr(self, name) + 1)
        return line

    def report(self, verdict: str, what: str) -> None:
        """Print a verdict of the driver itself, and record it."""
        self.skipped += verdict == "skipped"
        self.count(_say(f"  {verdict:<11} {what}"))

    def fail(self, what: str) -> None:
        """Report a failure that the driver itself saw."""
        self.report("FAILED", what)


def _say(line: str) -> str:
    print(line, flush=True)
    return line


def broker(subject: str, data: Path) -> Server:
    """The broker under test: Millstream, or Apache Kafka itself, which validates the checks."""
    return kafka(data, "os", partitions=1) if subject == "kafka" else Server(data, settings=SETTINGS)


def try_client(client: Client, tally: Tally, *, subject: str, only: str) -> None:
    """Build a client's program and run it against its own broker."""
    _say(client.name)
    try:
        program = client.build()
    except Unavailable as reason:
        tally.skipped += 1
        _say(f"  skipped     {reason}")
        return
    except BuildFailed as reason:
        tally.fail(f"the program does not build -- {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="millstream-conformance-") as folder:
        try:
            server = broker(subject, Path(folder) / "data")
            with server:
                registry = "" if subject == "kafka" else f"http://{server.http}/registry"
                run_program(program, client, server, tally, only=only, registry=registry)
                stop(server, tally)
        except PeerUnavailable as reason:
            tally.skipped += 1
            _say(f"  skipped     {reason}")
        except (ServerFailed, OSError) as reason:
            tally.fail(f"the broker -- {reason}")


def run_program(
    program: Program, client: Client, server: Server, tally: Tally, *, only: str, registry: str = ""
) -> None:
    """Run the checks, print their lines, and restart or kill the broker when they request it."""
    served, failed_before = describe_served(ask_served(server.kafka)), tally.failed
    command = [*program.command, *client.arguments(server.kafka, served, only, registry)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", process_group=0
    )
    overdue = threading.Timer(RUN_S_MAX, process.kill)
    overdue.start()
    try:
        for line in _lines(process.stdout):
            if line.startswith("@"):
                _obey(line[1:], server)
                _respond(process.stdin)
            else:
                tally.count(_say(line))
        code = process.wait()
    finally:
        overdue.cancel()
        _end(process)
    # A check that failed makes the program end with 1; anything else that does is a defect of the program.
    if code not in ((0, 1) if tally.failed > failed_before else (0,)):
        tally.fail(f"the client's program exited with code {code}; its log is {program.log}")


def _lines(output: IO[str] | None) -> Iterator[str]:
    if output is not None:
        yield from (line.rstrip("\n") for line in output)


def _obey(wish: str, server: Server) -> None:
    if wish not in ("restart", "kill"):
        raise ServerFailed(f"a check asked for {wish!r}, which is not known")
    server.restart(clean=wish == "restart")


def _respond(responses: IO[str] | None) -> None:
    if responses is not None:
        responses.write("done\n")
        responses.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """Stop all processes, however the run ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def stop(server: Server, tally: Tally) -> None:
    """Stop the broker; it must end well and have nothing to complain about."""
    code = server.stop()
    if code != 0:
        tally.fail(f"the broker stopped with exit code {code}; its log ends with:\n{server.log_tail()}")
    plain = (_VARYING.sub("", line) for line in server.log.read_text(errors="replace").splitlines())
    for line, times in Counter(filter(_TROUBLE.search, plain)).items():
        tally.fail(f"the broker's log says {times} times: {line.strip()[:300]}")


def chosen(names: Sequence[str]) -> list[Client]:
    """The clients whose names contain one of these words; all of them without words."""
    return [client for client in CLIENTS if not names or any(name in client.name for name in names)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clients", nargs="*", help="parts of clients' names, such as 4.4.0, go or secured; all without")
    parser.add_argument("--against", choices=SUBJECTS, default=SUBJECTS[0], help="the broker to try")
    parser.add_argument("--only", default="", help="run only the checks whose names contain this")
    arguments = parser.parse_args()
    tally = Tally()
    for client in chosen(arguments.clients):
        try_client(client, tally, subject=arguments.against, only=arguments.only)
    is_chosen = not arguments.clients or any(name in secured.NAME for name in arguments.clients)
    if is_chosen and not arguments.only and arguments.against == SUBJECTS[0]:
        secured.try_secured(tally.report, lambda line: tally.count(_say(line)))
    _say(f"{tally.ok} passed, {tally.failed} failed, {tally.not_served} not served, {tally.skipped} clients skipped")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
