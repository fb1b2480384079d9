"""Common parts of the queue benchmark's Python clients, which publish to a topic, receive the messages with several
workers and accept them. They print when they are ready, start at a line on stdin, and print their results as JSON, like
the Go clients in `queue_clients`.

They publish with librdkafka, which runs no Python per message.
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
from benchmarks.callbacks import COUNT, ERROR, Counters, counters
from benchmarks.librdkafka import PreparedMessages, Producer, error_text
from benchmarks.percentiles import NS_PER_S, Schedule, percentile

_AT_ONCE: Final = 100
_POLL_MS: Final = 100
_TICK_S: Final = 0.0002
_LOAD: Final = 10_000
_RESPONSE_MS_MAX: Final = 60_000


def arguments(description: str, options: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, which is that of the Go clients."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", required=True)
    parser.add_argument("--queue", required=True, help="an existing empty topic")
    parser.add_argument("--size", type=int, default=100, help="message size in bytes")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--publishers", type=int, default=1)
    parser.add_argument("--backlog", type=int, default=20_000, help="the maximum backlog")
    parser.add_argument("--batch", type=int, default=500, help="the maximum number of messages per request of a worker")
    parser.add_argument("--window", type=int, default=0, help="unused by this client")
    parser.add_argument("--seconds", type=float, default=1.0, help="the duration of publishing")
    parser.add_argument("--rate", type=int, default=0, help="messages per second; 0 for as many as possible")
    return parser.parse_args(options)


class Run:
    """The shared state of publishers and workers; workers call `record_received` and `record_accepted`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.given = options
        self.published = 0
        self.received = 0
        self.accepted = 0
        self.is_published = False
        self._lock = threading.Lock()
        self._schedule = Schedule(0, options.rate, int(options.rate * options.seconds))
        # Objects that the measurement keeps would make Python's garbage collector pause the client for 50 ms.
        self._arrived_ns = np.zeros(self._schedule.count, np.int64)

    @property
    def is_timed(self) -> bool:
        """Whether `record_received` needs the numbers of messages."""
        return bool(self.given.rate)

    @property
    def is_received(self) -> bool:
        """Whether workers have received all messages."""
        return self.is_published and self.received >= self.published

    @property
    def is_done(self) -> bool:
        """Whether everything is accepted."""
        return self.is_published and self.accepted >= self.published

    def record_received(self, count: int, numbers: Sequence[int] = ()) -> None:
        """Record received messages; at a fixed rate they have numbers."""
        if numbers:
            now_ns = time.monotonic_ns()
            for number in numbers:
                self._arrived_ns[number - 1] = now_ns
        with self._lock:
            self.received += count

    def record_accepted(self, count: int) -> None:
        with self._lock:
            self.accepted += count

    def begin(self) -> None:
        """Print that the client is ready, and wait for the start signal."""
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            raise SystemExit("no start signal arrived")
        self._cpu_s = _cpu_s()
        self._began_ns = time.monotonic_ns()
        self._schedule = Schedule(self._began_ns, self._schedule.rate_per_s, self._schedule.count)

    def end(self) -> None:
        """Print the results."""
        elapsed_s = (time.monotonic_ns() - self._began_ns) / NS_PER_S
        measured = {"messages": self.accepted, "seconds": elapsed_s, "cpu_s": _cpu_s() - self._cpu_s}
        if self.is_timed:
            late = self._schedule.latencies_ms(self._arrived_ns)
            measured |= {"p50_ms": percentile(late, 50), "p99_ms": percentile(late, 99)}
        print(json.dumps(measured), flush=True)

    @property
    def schedule(self) -> Schedule:
        """The schedule of messages at a fixed rate."""
        return self._schedule


class Publishers:
    """Publish in threads, as fast as the backlog allows or when messages are due."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stack = ExitStack()
        options = run.given
        settings = {
            "bootstrap.servers": options.address,
            "log_level": "0",
            "acks": "all",
            "linger.ms": "0" if 0 < options.rate <= 1000 else "0.3" if options.rate else "5",
        }
        self._reports = [counters() for _ in range(options.publishers)]
        self._producers = [
            self._stack.enter_context(closing(Producer(options.queue, settings, reports))) for reports in self._reports
        ]
        timed = int(options.rate * options.seconds)
        self._load = (
            PreparedMessages(timed, options.size, numbered=True) if timed else PreparedMessages(_LOAD, options.size)
        )
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Connect, and publish a first message that is not measured."""
        for producer in self._producers:
            producer.end_offset(0)
        return self

    def __exit__(self, *exception: object) -> None:
        """Release the producers."""
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def start(self) -> None:
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
        """Send all messages that are due from one publisher."""
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

    def _confirm(self, producer: Producer, reports: Counters, sent: int) -> None:
        producer.flush(_RESPONSE_MS_MAX)
        if reports[ERROR] or reports[COUNT] != sent:
            print(f"{reports[COUNT]} of {sent} messages: {error_text(int(reports[ERROR]))}", file=sys.stderr)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
