"""`make bench-http`: publishing over HTTP, compared with the same HTTP server and an echo application.

python -m benchmarks.http [--requests N] [--rounds N] [--json]

The echo reads the body and responds with a document of the same size as a receipt, on the same uvicorn, protocol and
loop; publishing responds when the message is durable. Both are measured in turn, on the same machine as the client. The
lines with `flush=os` do not wait for the disk, so they show the limit of the gateway, the others that of the disk. CPU
is that of the gateway's process, and separately that of the broker.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import psutil
import uvloop
from benchmarks.http_load import post, run_load
from benchmarks.machine import facts

from millstream_testing.server import Server

REQUESTS, ROUNDS = 20_000, 5
BODY = json.dumps({"order_id": 1, "total": 1500, "customer": "c-7", "note": "x" * 40}).encode()
BATCH = 100
PATH = "/v1/topics/bench/messages"
UNSYNCED_PATH = "/v1/topics/unsynced/messages"
MESSAGES = "application/vnd.millstream.messages+json"


class Case(NamedTuple):
    """Requests of one kind."""

    name: str
    is_echo: bool
    request: bytes
    messages: int
    connections: int
    share: float
    """Of the number of requests."""


class Measured(NamedTuple):
    """The results of one round, per second and in CPU seconds per million messages."""

    requests_per_s: float
    messages_per_s: float
    gateway_s: float
    broker_s: float
    p50_ms: float
    p99_ms: float


def cases() -> list[Case]:
    """Return the cases: one message and many, by one client and by many."""
    headers = {"content-type": "application/json", "message-key": "c-7"}
    plain, unsynced = post(PATH, BODY, headers), post(UNSYNCED_PATH, BODY, headers)
    text = {"messages": [{"json": json.loads(BODY), "key": f"c-{at}"} for at in range(BATCH)]}
    batch, unsynced_batch = (
        post(path, json.dumps(text).encode(), {"content-type": MESSAGES}) for path in (PATH, UNSYNCED_PATH)
    )
    return [
        Case("echo, 64 connections", True, plain, 1, 64, 1),
        Case("publish, 64 connections", False, plain, 1, 64, 1),
        Case("  flush=os", False, unsynced, 1, 64, 1),
        Case("echo, 1 connection", True, plain, 1, 1, 0.1),
        Case("publish, 1 connection", False, plain, 1, 1, 0.1),
        Case("  flush=os ", False, unsynced, 1, 1, 0.1),
        Case(f"echo of {BATCH}, 16 connections", True, batch, BATCH, 16, 0.05),
        Case(f"publish of {BATCH}, 16 connections", False, batch, BATCH, 16, 0.05),
        Case("  flush=os  ", False, unsynced_batch, BATCH, 16, 0.05),
    ]


def gateway_of(server: Server) -> int:
    """Return the process id of a server's gateway."""
    for child in psutil.Process(server.pid).children():
        if "millstream.gateway.process" in " ".join(child.cmdline()):
            return int(child.pid)
    raise RuntimeError("the server has no gateway")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Echo:
    """The echo server, in its own process."""

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", "benchmarks.http_echo", str(listening.fileno())]
        self.process = subprocess.Popen(command, pass_fds=(listening.fileno(),), stdin=subprocess.PIPE)
        listening.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


async def measure(case: Case, address: str, gateway: int, broker: int | None, requests: int) -> Measured:
    number = max(case.connections, int(requests * case.share))
    before = cpu_s(gateway), 0.0 if broker is None else cpu_s(broker)
    took_s, latencies = await run_load(address, case.request, connections=case.connections, requests=number)
    after = cpu_s(gateway), 0.0 if broker is None else cpu_s(broker)
    done = len(latencies)
    millions = done * case.messages / 1e6
    latencies.sort()
    return Measured(
        done / took_s,
        done * case.messages / took_s,
        (after[0] - before[0]) / millions,
        (after[1] - before[1]) / millions,
        latencies[done // 2] * 1000,
        latencies[int(done * 0.99)] * 1000,
    )


async def run(server: Server, echo: Echo, requests: int, rounds: int) -> dict[str, list[Measured]]:
    """Measure all cases in turn."""
    results: dict[str, list[Measured]] = {case.name: [] for case in cases()}
    gateway = gateway_of(server)
    for turn in range(rounds + 1):
        for case in cases():
            number = requests if turn else requests // 10
            if case.is_echo:
                result = await measure(case, echo.address, echo.process.pid, None, number)
            else:
                result = await measure(case, server.http, gateway, server.pid, number)
            if turn:
                # The first turn warms up.
                results[case.name].append(result)
    return results


def middle(rounds: list[Measured]) -> Measured:
    """Return the median of each number."""
    return Measured(*(median(column) for column in zip(*rounds, strict=True)))


def report(results: dict[str, list[Measured]]) -> dict[str, Any]:
    """Return medians, and the rate of publishing relative to the echo."""
    result: dict[str, Any] = {}
    before: Measured | None = None
    for case in cases():
        numbers = middle(results[case.name])
        line = {name: round(value, 3) for name, value in numbers._asdict().items()}
        if case.is_echo:
            before = numbers
        elif before is not None:
            line["of_echo"] = round(numbers.requests_per_s / before.requests_per_s, 3)
            # CPU time has a resolution of 10 ms, which is too coarse for few requests.
            if before.gateway_s:
                line["gateway_cpu_of_echo"] = round(numbers.gateway_s / before.gateway_s, 2)
        result[case.name] = line
    return result


def show(result: dict[str, Any], write: Callable[[str], Any]) -> None:
    """Print the results as a table."""
    header = f"{'requests/s':>12}{'messages/s':>12}{'gateway':>10}{'broker':>9}{'p50 ms':>9}{'p99 ms':>9}{'of echo':>9}"
    write(f"{'':34}{header}")
    for name, line in result.items():
        share = f"{line['of_echo']:.2f}" if "of_echo" in line else ""
        write(
            f"{name:34}{line['requests_per_s']:12,.0f}{line['messages_per_s']:12,.0f}{line['gateway_s']:10.1f}"
            f"{line['broker_s']:9.1f}{line['p50_ms']:9.2f}{line['p99_ms']:9.2f}{share:>9}"
        )
    write("gateway and broker: CPU seconds per million messages")


def main() -> None:
    """Run and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
        echo = Echo()
        try:
            topic = {"name": "unsynced", "settings": {"flush": "os"}}
            httpx.post(f"http://{server.http}/v1/topics", json=topic, timeout=60).raise_for_status()
            httpx.post(f"http://{echo.address}/", content=BODY, timeout=60).raise_for_status()
            result = report(uvloop.run(run(server, echo, options.requests, options.rounds)))
        finally:
            echo.stop()
    if options.json:
        sys.stdout.write(json.dumps({"machine": facts(), "cases": result}) + "\n")
    else:
        show(result, lambda line: sys.stdout.write(line + "\n"))


if __name__ == "__main__":
    main()
