"""`make bench-commits`: latency of OffsetCommit and OffsetFetch relative to Produce, on a busy broker.

    python -m benchmarks.commits [--seconds S]

Producers write small batches to many partitions as fast as they are acknowledged, each on its own connection, so that
iterations of the broker's loop are long. Meanwhile groups alternately commit and fetch an offset. All of them wait for
the same group commit (`flush=always`), so the times of one run are comparable; the broker measures them.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.server import Server

TOPIC: Final = "load"
PARTITIONS: Final = 32
PRODUCERS: Final = 24
COMMITTERS: Final = 8
MESSAGES_IN_FLIGHT: Final = 200
RATIOS_MAX: Final = {"OffsetCommit": 1.25, "OffsetFetch": 0.5}
"""A commit is acknowledged together with the records of producers. A group without a pending commit gets its offsets
immediately."""
_SAMPLE: Final = re.compile(r'millstream_request_seconds_(sum|count)\{api="(\w+)"\} (\S+)')


def main() -> int:
    """Measure and print; return 1 if a commit takes too long compared with a produce request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds: float = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
        times = measure(server, seconds)
    produce_ms = times["Produce"]
    print(f"Produce {produce_ms:.1f} ms")
    for api, ratio_max in RATIOS_MAX.items():
        print(f"{api} {times[api]:.1f} ms, {times[api] / produce_ms:.2f} of Produce (at most {ratio_max:g})")
    return int(any(times[api] > ratio_max * produce_ms for api, ratio_max in RATIOS_MAX.items()))


def measure(server: Server, seconds: float) -> dict[str, float]:
    """Run the load; return the mean time of each API in milliseconds."""
    admin = AdminClient({"bootstrap.servers": server.kafka})
    (created,) = admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values()
    created.result(60)
    stopping = threading.Event()
    producers: list[Callable[[], None]] = [lambda: _produce(server, stopping)] * PRODUCERS
    committers = [_committer(server, f"group-{number}", stopping) for number in range(COMMITTERS)]
    threads = [threading.Thread(target=work) for work in (*producers, *committers)]
    for thread in threads:
        thread.start()
    try:
        # The first commits create the offsets topic, and connections are opened meanwhile.
        time.sleep(seconds / 4)
        before = _counted(server)
        time.sleep(seconds)
        after = _counted(server)
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    return {api: 1000 * (total - before[api][0]) / (count - before[api][1]) for api, (total, count) in after.items()}


def _produce(server: Server, stopping: threading.Event) -> None:
    producer = Producer(
        {
            "bootstrap.servers": server.kafka,
            "linger.ms": 0,
            "queue.buffering.max.messages": MESSAGES_IN_FLIGHT,
            "sticky.partitioning.linger.ms": 0,
        }
    )
    while not stopping.is_set():
        try:
            producer.produce(TOPIC, bytes(100))
        except BufferError:
            producer.poll(0.01)
    producer.flush(60)


def _committer(server: Server, group: str, stopping: threading.Event) -> Callable[[], None]:
    def work() -> None:
        consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": group, "enable.auto.commit": False})
        offset = 0
        while not stopping.is_set():
            offset += 1
            consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)
            consumer.committed([TopicPartition(TOPIC, 0)], timeout=60)
        consumer.close()

    return work


def _counted(server: Server) -> dict[str, tuple[float, float]]:
    """Return the total time and the number of responses of each API."""
    with urllib.request.urlopen(f"http://{server.http}/metrics") as response:
        samples = _SAMPLE.findall(response.read().decode())
    costs: dict[str, dict[str, float]] = {}
    for kind, api, value in samples:
        costs.setdefault(api, {})[kind] = float(value)
    return {api: (costs[api]["sum"], costs[api]["count"]) for api in ("Produce", *RATIOS_MAX)}


if __name__ == "__main__":
    raise SystemExit(main())
