"""What the Python clients of the queue benchmark share: they are programs that publish to a topic, take the messages
with several workers and accept them. They say when they are ready, begin at a line on their input, and print what they
measured as JSON, like the Go clients in `queue_clients`.

Both publish with librdkafka, which costs no Python per message.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final, Self

import numpy as np
import numpy.typing as npt
from benchmarks.callbacks import COUNT, ERROR, Notes, notes
from benchmarks.librdkafka import Load, Producer, error_text
from benchmarks.percentiles import NS_PER_S, Schedule, percentile

_AT_ONCE: Final = 100
_LOOK_MS: Final = 100
_TICK_S: Final = 0.0002
_LOAD: Final = 10_000
_RESPONSE_MS_MAX: Final = 60_000


def arguments(description: str, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, which is that of the Go clients."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", required=True)
    parser.add_argument("--queue", required=True, help="a topic that is there and empty")
    parser.add_argument("--size", type=int, default=100, help="bytes of a message")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--publishers", type=int, default=1)
    parser.add_argument("--backlog", type=int, default=20_000, help="how many messages may wait")
    parser.add_argument("--batch", type=int, default=500, help="how many messages a worker takes at once")
    parser.add_argument("--window", type=int, default=0, help="not needed here")
    parser.add_argument("--seconds", type=float, default=1.0, help="for how long messages are published")
    parser.add_argument("--rate", type=int, default=0, help="messages a second; 0 for as many as possible")
    return parser.parse_args(given)


class Run:
    """What publishers and workers share; workers call `got` and `accept`."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.published = 0
        self.received = 0
        self.accepted = 0
        self.is_published = False
        self._lock = threading.Lock()
        self._arrived: list[tuple[int, npt.NDArray[np.int64]]] = []
        self._schedule = Schedule(0, given.rate, int(given.rate * given.seconds))

    @property
    def is_timed(self) -> bool:
        """Whether `got` wants to know the messages."""
        return bool(self.given.rate)

    @property
    def is_received(self) -> bool:
        """Whether workers have got everything there will be."""
        return self.is_published and self.received >= self.published

    @property
    def is_done(self) -> bool:
        """Whether everything is accepted."""
        return self.is_published and self.accepted >= self.published

    def got(self, count: int, numbers: Sequence[int] = ()) -> None:
        """A worker has got messages; at a fixed rate they have numbers."""
        if numbers:
            self._arrived.append((time.monotonic_ns(), np.array(numbers, np.int64)))
        with self._lock:
            self.received += count

    def accept(self, count: int) -> None:
        """Messages are accepted."""
        with self._lock:
            self.accepted += count

    def begin(self) -> None:
        """Say that everything is ready, and wait until it begins."""
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            raise SystemExit("no start signal arrived")
        self._cpu_s = _cpu_s()
        self._began_ns = time.monotonic_ns()
        self._schedule = Schedule(self._began_ns, self._schedule.rate_per_s, self._schedule.count)

    def end(self) -> None:
        """Print what was measured."""
        elapsed_s = (time.monotonic_ns() - self._began_ns) / NS_PER_S
        measured = {"messages": self.accepted, "seconds": elapsed_s, "cpu_s": _cpu_s() - self._cpu_s}
        if self.is_timed:
            late = self._latencies_ms()
            measured |= {"p50_ms": percentile(late, 50), "p99_ms": percentile(late, 99)}
        print(json.dumps(measured), flush=True)

    def _latencies_ms(self) -> npt.NDArray[np.float64]:
        done = np.zeros(self._schedule.count, np.int64)
        for at_ns, numbers in self._arrived:
            done[numbers - 1] = at_ns
        return self._schedule.latencies_ms(done)

    @property
    def schedule(self) -> Schedule:
        """When messages are due, at a fixed rate."""
        return self._schedule


class Publishers:
    """Publish in threads of their own, as fast as the backlog allows or when messages are due."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stack = ExitStack()
        given = run.given
        settings = {
            "bootstrap.servers": given.address,
            "log_level": "0",
            "acks": "all",
            "linger.ms": "0" if 0 < given.rate <= 1000 else "1" if given.rate else "5",
        }
        self._reports = [notes() for _ in range(given.publishers)]
        self._producers = [
            self._stack.enter_context(closing(Producer(given.queue, settings, reports))) for reports in self._reports
        ]
        timed = int(given.rate * given.seconds)
        self._load = Load(timed, given.size, numbered=True) if timed else Load(_LOAD, given.size)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Connect; the first response of each is not what is measured, and its message is not counted."""
        for producer in self._producers:
            producer.end_offset(0)
        return self

    def __exit__(self, *exception: object) -> None:
        """Let go of them."""
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def start(self) -> None:
        """Begin."""
        self._threads = [
            threading.Thread(target=self._publish, args=(number,), daemon=True)
            for number in range(len(self._producers))
        ]
        self._waiting = len(self._threads)
        for thread in self._threads:
            thread.start()

    def _publish(self, number: int) -> None:
        producer, reports = self._producers[number], self._reports[number]
        sent = self._at_rate(producer) if self._run.is_timed else self._at_most(producer)
        self._confirm(producer, reports, sent)
        with self._run._lock:
            self._waiting -= 1
            self._run.is_published = self._waiting == 0

    def _at_most(self, producer: Producer) -> int:
        run, sent = self._run, 0
        end = time.monotonic() + run.given.seconds
        while time.monotonic() < end:
            producer.poll(0)
            if run.published - run.received >= run.given.backlog:
                time.sleep(_TICK_S)
                continue
            with run._lock:
                run.published += _AT_ONCE
            producer.send(self._load, sent % self._load.count, _AT_ONCE)
            sent += _AT_ONCE
        return sent

    def _at_rate(self, producer: Producer) -> int:
        """One publisher sends all that is due."""
        if producer is not self._producers[0]:
            return 0
        schedule, sent = self._run.schedule, 0
        while sent < schedule.count:
            now = time.monotonic_ns()
            due = schedule.due_by(now)
            if due > sent:
                self._run.published = due
                producer.send(self._load, sent, due - sent)
                sent = due
            else:
                time.sleep(max((schedule.due_at(sent) - now) / NS_PER_S, _TICK_S))
        return sent

    def _confirm(self, producer: Producer, reports: Notes, sent: int) -> None:
        producer.flush(_RESPONSE_MS_MAX)
        if reports[ERROR] or reports[COUNT] != sent:
            print(f"{reports[COUNT]} of {sent} messages: {error_text(int(reports[ERROR]))}", file=sys.stderr)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
