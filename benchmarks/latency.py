"""Latency at a fixed rate: from the scheduled time of a message to its acknowledgement, and to its arrival at a
consumer. `percentiles` explains why latency is measured from the scheduled time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import numpy.typing as npt
from benchmarks.callbacks import COUNT, ERROR, TIMES, Counters, counters
from benchmarks.cases import Case
from benchmarks.librdkafka import ClientFailed, Consumer, PreparedMessages, Producer, error_text
from benchmarks.percentiles import NS_PER_S, Schedule, percentile
from benchmarks.processes import Meter
from benchmarks.subject import Numbers, Target
from benchmarks.throughput import settings_of

ACKNOWLEDGED, END_TO_END = "acknowledged", "end to end"
PERCENTS = (50, 99, 99.9)
WARM_MESSAGES = 2000
# Messages that are due within this time are sent together: waking up for each of 50,000 messages per second would use
# the CPU that the server needs.
_TICK_NS = 200_000
_LEAD_NS = 200_000_000
_REST_S_MAX = 20.0
_POLL_MS = 100


def linger_ms(rate_per_s: int) -> float:
    """Return the client's linger time: none where messages are sent one by one."""
    return 0 if rate_per_s <= 1000 else 1


def measure(target: Target, case: Case, seconds: float) -> dict[str, Numbers]:
    """Send at the rate of the case for some seconds; return the percentiles of both latencies."""
    count = int(case.rate_per_s * seconds)
    acknowledged, received = counters(count), counters(count)
    settings = settings_of(target, case, linger_ms(case.rate_per_s))
    reading = {**target.client_settings, "group.id": target.topic}
    with (
        closing(Producer(target.topic, settings, acknowledged)) as producer,
        closing(Consumer(target.topic, reading, range(case.partitions), received, timed=True)) as consumer,
        _Loop(lambda: producer.poll(_POLL_MS)),
        _Loop(lambda: consumer.poll(_POLL_MS)),
    ):
        load = PreparedMessages(count, case.size_bytes, numbered=True)
        warmed = _warm(target, case, producer, received)
        schedule = Schedule(time.monotonic_ns() + _LEAD_NS, case.rate_per_s, count)
        with Meter(target.pid) as meter:
            sent_s = _send(producer, load, schedule)
            _wait(target, acknowledged, warmed + count)
            _wait(target, received, warmed + count)
    millions = count / 1e6
    shared = {
        "sent/s": count / sent_s,
        "user CPU s/M messages": meter.cpu.user_s / millions,
        "system CPU s/M messages": meter.cpu.system_s / millions,
    }
    return {
        ACKNOWLEDGED: percentiles_of(schedule.latencies_ms(acknowledged[TIMES:])) | shared,
        END_TO_END: percentiles_of(schedule.latencies_ms(received[TIMES:])) | shared,
    }


def percentiles_of(latencies_ms: npt.NDArray[np.float64]) -> Numbers:
    """Return the percentiles of the table, and the maximum."""
    numbers = {f"p{percent:g} ms": percentile(latencies_ms, percent) for percent in PERCENTS}
    return numbers | {"max ms": float(latencies_ms.max())}


def _warm(target: Target, case: Case, producer: Producer, received: Counters) -> int:
    """Send messages that are not measured, so that both clients know every partition."""
    load = PreparedMessages(1, case.size_bytes)
    rounds = max(WARM_MESSAGES // case.partitions, 1)
    for _ in range(rounds):
        for partition in range(case.partitions):
            producer.send(load, 0, 1, partition)
    _wait(target, received, rounds * case.partitions)
    return rounds * case.partitions


def _send(producer: Producer, load: PreparedMessages, schedule: Schedule) -> float:
    """Send each message when it is due, and return how long that took."""
    sent = 0
    while sent < schedule.count:
        now = time.monotonic_ns()
        due = schedule.due_by(now)
        if due > sent:
            producer.send(load, sent, due - sent)
            sent = due
        else:
            time.sleep(max(schedule.due_at(sent) - now, _TICK_NS) / NS_PER_S)
    return (time.monotonic_ns() - schedule.start_ns) / NS_PER_S


def _wait(target: Target, counters: Counters, count: int) -> None:
    """Wait for this many messages; those that are missing after the timeout have infinite latency."""
    deadline = time.monotonic() + _REST_S_MAX
    while counters[COUNT] < count and time.monotonic() < deadline:
        if counters[ERROR]:
            raise ClientFailed(error_text(int(counters[ERROR])))
        target.check()
        time.sleep(0.01)


class _Loop:
    """Repeats a function in a thread until the context is left."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._step()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
