"""`make bench-cores`: throughput with 1, 2 and more broker processes, and what each GB and each request costs.

    python -m benchmarks.cores [--seconds S] [--rounds N] [--cores 1,2] [--alone]
    python -m benchmarks.cores --partitions 10000 [--cores 1,4]

Machines with different numbers of processes run side by side, one is loaded at a time, and the rounds are interleaved,
so that ratios of one run are comparable even on a shared machine. The load is librdkafka's: four producers on 16
partitions, with messages of 1 KiB (CPU per GB) and of 100 bytes (CPU per message). On six or more cores the clients are
pinned to the last two, and the servers to the rest. With fewer, both share the cores, and throughput says
little about more processes: the relevant numbers are the ratios of CPU, which must not grow. Apache Kafka is loaded
in the same rounds on the same cores, unless it is not available or `--alone` is given.

With `--partitions`, it measures machines with that many partitions instead: their creation, the cost of the processes
at rest, a clean stop and the start after it. On a shared machine, CPU seconds are more meaningful than seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
from benchmarks.cases import OS, Case
from benchmarks.machine import facts
from benchmarks.peers import kafka
from benchmarks.processes import Cpu, cpu_of, resident_of_tree, tree_of
from benchmarks.subject import Numbers, PeerUnavailable, Target
from benchmarks.throughput import produce
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.cli.local_process import is_free
from millstream_testing.server import Server

PARTITIONS: Final = 16
PINNED_MIN: Final = 6
"""The number of cores from which clients and servers are pinned to separate cores."""
CASES: Final = {
    "1 KiB messages": Case(flush=OS, partitions=PARTITIONS, producers=4),
    "100 B messages": Case(flush=OS, partitions=PARTITIONS, producers=4, size_bytes=100),
}
SHOWN: Final = ("MB/s", "messages/s", "CPU s/GB", "CPU s/M messages")
_PORTS: Final = range(20_000, 30_000)
_ADMIN_S: Final = 60.0
TOPICS: Final = 10
_MANY_S: Final = 300.0
_SETTLE_S: Final = 5.0
_REST_S: Final = 20.0


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="", help="numbers of processes (default: 1, 2 and, with six cores, 4)")
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    parser.add_argument(
        "--partitions", type=int, default=0, help="measure machines with this many partitions instead of throughput"
    )
    arguments = parser.parse_args()
    if arguments.partitions:
        return _measure_partitions(arguments.partitions, arguments.cores or "1,4")
    count = os.cpu_count() or 1
    is_pinned = count >= PINNED_MIN
    sizes = [int(size) for size in arguments.cores.split(",")] if arguments.cores else [1, 2] + [4] * is_pinned
    print(facts())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers: dict[str, Server] = {}
        for size in sizes:
            port = next(_free_ports(size))
            servers[_counted(size)] = stack.enter_context(_server(Path(folder), size, port))
        if not arguments.alone:
            try:
                servers["Apache Kafka"] = stack.enter_context(kafka.kafka(Path(folder) / "kafka", OS))
            except PeerUnavailable as error:
                print(f"without Apache Kafka: {error}")
        if is_pinned:
            psutil.Process().cpu_affinity([count - 2, count - 1])
            for server in servers.values():
                for pid in tree_of(server.pid):
                    psutil.Process(pid).cpu_affinity(list(range(count - 2)))
        for name, case in CASES.items():
            topics = {label: _topic(server, f"{case.size_bytes}-bytes") for label, server in servers.items()}
            numbers: dict[str, list[Numbers]] = {label: [] for label in servers}
            for _ in range(arguments.rounds):
                for label, topic in topics.items():
                    numbers[label].append(_measured(topic, case, arguments.seconds))
            _print(name, numbers)
    return 0


def _counted(size: int) -> str:
    return f"{size} {'process' if size == 1 else 'processes'}"


def _measure_partitions(count: int, cores: str) -> int:
    print(facts())
    for size in map(int, cores.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            server = _server(Path(folder), size, next(_free_ports(size)))
            print(f"{_counted(size)}, empty: ", end="")
            with server:
                print(f"ready after {server.start_s:.1f} s, {_resident_mb(server):.0f} MB", flush=True)
                _create_many(server, count)
                _print_rest(server)
                began = time.monotonic()
                server.stop()
                print(f"  clean stop {time.monotonic() - began:.1f} s", flush=True)
                server.start()
                _await_leaders(server, count)
                used = ", ".join(f"{name} {cpu.user_s + cpu.system_s:.1f}" for name, cpu in _cpu_by_process(server))
                print(f"  start: ready after {server.start_s:.1f} s; CPU s by process: {used}", flush=True)
                _print_rest(server)
    return 0


def _create_many(server: Server, count: int) -> None:
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    topics = [NewTopic(f"many-{number}", count // TOPICS) for number in range(TOPICS)]
    began = time.monotonic()
    for created in admin.create_topics(topics, operation_timeout=_MANY_S, request_timeout=_MANY_S).values():
        created.result(_MANY_S)
    _await_leaders(server, count)
    print(f"  {count:,} partitions created in {time.monotonic() - began:.1f} s", flush=True)


def _await_leaders(server: Server, count: int) -> None:
    deadline = time.monotonic() + _MANY_S
    while time.monotonic() < deadline:
        metadata = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0}).list_topics(timeout=_ADMIN_S)
        topics = [topic for name, topic in metadata.topics.items() if name.startswith("many-")]
        if (
            sum(partition.leader >= 0 for topic in topics for partition in topic.partitions.values())
            >= count // TOPICS * TOPICS
        ):
            return
        time.sleep(0.2)
    raise TimeoutError(f"not all of {count} partitions were led within {_MANY_S:g} s")


def _print_rest(server: Server) -> None:
    time.sleep(_SETTLE_S)
    before = dict(_cpu_by_process(server))
    time.sleep(_REST_S)
    used = [(name, cpu.since(before[name])) for name, cpu in _cpu_by_process(server)]
    percent = ", ".join(f"{name} {100 * (cpu.user_s + cpu.system_s) / _REST_S:.1f}" for name, cpu in used)
    print(f"  at rest: {_resident_mb(server):.0f} MB; CPU % by process: {percent}", flush=True)


def _cpu_by_process(server: Server) -> list[tuple[str, Cpu]]:
    """Return the CPU of the main process and of each child process, including its descendants."""
    main = psutil.Process(server.pid)
    children = [(f"child {number}", cpu_of(child.pid)) for number, child in enumerate(main.children(), 1)]
    own = cpu_of(server.pid)
    for _, cpu in children:
        own = own.since(cpu)
    return [("main", own), *children]


def _resident_mb(server: Server) -> float:
    return resident_of_tree(server.pid) / 1e6


def _free_ports(size: int) -> Iterator[int]:
    for base in _PORTS[::size]:
        if all(is_free("127.0.0.1", base + number) for number in range(size)):
            yield base


def _server(folder: Path, cores: int, port: int) -> Server:
    server = Server(folder / f"cores-{cores}", settings={"cores": cores})
    server.kafka = f"127.0.0.1:{port}"
    return server


def _topic(server: Server, name: str) -> Target:
    admin = AdminClient({"bootstrap.servers": server.kafka})
    flush = {} if isinstance(server, kafka.KafkaServer) else {"flush": OS}
    topic = NewTopic(name, PARTITIONS, config={**flush, "retention.bytes": str(64 * 1024 * 1024)})
    admin.create_topics([topic])[name].result(_ADMIN_S)
    return Target(server=server, topic=name, partitions=PARTITIONS)


def _measured(target: Target, case: Case, seconds: float) -> Numbers:
    _, numbers = produce(target, case, seconds)
    numbers["CPU s/GB"] = numbers["user CPU s/GB"] + numbers["system CPU s/GB"]
    numbers["CPU s/M messages"] = numbers["user CPU s/M messages"] + numbers["system CPU s/M messages"]
    return numbers


def _print(name: str, numbers: dict[str, list[Numbers]]) -> None:
    base = next(iter(numbers.values()))
    print(f"\n{name}: medians of {len(base)} interleaved rounds; in parentheses, medians of the ratios of each round")
    for label, rounds in numbers.items():
        parts = []
        for number in SHOWN:
            middle = statistics.median(rates[number] for rates in rounds)
            ratio = statistics.median(rates[number] / other[number] for rates, other in zip(rounds, base, strict=True))
            parts.append(f"{number} {middle:,.2f} ({ratio:.2f})")
        print(f"{label}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
