"""The cost of the queue state machine: time per message by size of ranges and of the backlog, and memory per message.

    python benchmarks/queue_machine.py

A message is scanned, leased and accepted, and its deltas are encoded; nothing is stored or sent. The times are medians
of CPU time over several runs. The last column is the ratio to the smallest backlog.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from uuid import UUID

import numpy as np

from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.snapshot import read_snapshot, write_snapshot
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.subscription import QueueKey, SubscriptionSettings, Verb

KEY = QueueKey(UUID(int=1), UUID(int=2), PartitionIndex(0))
RUNS = 5
NOW_MS = 1_700_000_000_000
RANGES = (1, 100, 1000)
BACKLOGS = (1_000, 10_000, 100_000, 1_000_000)


def new_queue(*, ordered: bool = False) -> Queue:
    settings = SubscriptionSettings(
        ordered=ordered, in_flight_max=1_000_000, leases_max=1_000_000, dead_letter_topic="dead"
    )
    queue = Queue(KEY, settings, leader_epoch=1, window_max=2_000_000)
    queue.begin(0, now_ms=NOW_MS)
    return queue


def cycle(queue: Queue, size: int, count: int, now_ms: int, *, encode: bool) -> None:
    """Scan, lease and accept messages, one range at a time, each a millisecond later."""
    for turn in range(count // size):
        now_ms += turn & 1
        first = queue.next_scan_offset
        queue.add_scanned(first, first + size, now_ms=now_ms)
        for lease in queue.acquire("share/worker", now_ms=now_ms, max_records=size):
            queue.settle("share/worker", [Settlement(lease.first, lease.last, Verb.ACCEPT)], now_ms=now_ms)
        if encode:
            queue.drain()


def cpu_us(work: Callable[[], None], messages: int) -> float:
    start = time.process_time()
    work()
    return (time.process_time() - start) / messages * 1e6


def median_us(make: Callable[[], Callable[[], None]], messages: int) -> float:
    return statistics.median(cpu_us(make(), messages) for _ in range(RUNS))


def fill(queue: Queue, backlog: int) -> None:
    """Fill the window with messages of which every tenth is leased, including the first, so that it does not shrink."""
    queue.add_scanned(queue.next_scan_offset, queue.next_scan_offset + backlog, now_ms=NOW_MS)
    start = queue.oldest
    leases = queue.acquire("share/slow", now_ms=NOW_MS, max_records=backlog)
    verbs = [
        Settlement(Offset(first), Offset(first + 8), Verb.RELEASE) for first in range(start + 1, start + backlog, 10)
    ]
    queue.settle("share/slow", verbs, now_ms=NOW_MS)
    queue.drain()
    assert leases
    assert queue.counts.leased == backlog // 10


def by_range() -> None:
    print("look + acquire + accept, µs a message; and with the deltas of each range encoded as its own frame")
    for size in RANGES:
        count = max(size * 20, 20_000)
        bare = median_us(lambda: _cycles(size, count, encode=False), count)  # noqa: B023
        encoded = median_us(lambda: _cycles(size, count, encode=True), count)  # noqa: B023
        print(f"  ranges of {size:>5}: {bare:8.3f} {encoded:8.3f}")
    print("encoded, ordered by key (all keys differ)")
    for size in RANGES:
        count = max(size * 10, 10_000)
        print(f"  ranges of {size:>5}: {median_us(lambda: _ordered_cycles(size, count), count):8.3f}")  # noqa: B023


def _cycles(size: int, count: int, *, encode: bool) -> Callable[[], None]:
    queue = new_queue()
    return lambda: cycle(queue, size, count, NOW_MS, encode=encode)


def _ordered_cycles(size: int, count: int) -> Callable[[], None]:
    queue = new_queue(ordered=True)
    keys = np.arange(1, count + 1, dtype=np.int64)

    def work() -> None:
        for first in range(0, count, size):
            queue.add_scanned(first, first + size, now_ms=NOW_MS, keys=keys[first : first + size])
            leases = queue.acquire("share/worker", now_ms=NOW_MS, max_records=size)
            queue.settle(
                "share/worker", [Settlement(lease.first, lease.last, Verb.ACCEPT) for lease in leases], now_ms=NOW_MS
            )
            queue.drain()

    return work


def _taking(backlog: int, size: int, count: int) -> Callable[[], None]:
    """Lease from the backlog and accept or release alternately; the slow worker's leases do not expire meanwhile."""
    queue = new_queue()
    fill(queue, backlog)

    def work() -> None:
        done = 0
        while done < count:
            leases = queue.acquire("share/worker", now_ms=NOW_MS, max_records=size)
            queue.settle(
                "share/worker",
                [Settlement(lease.first, lease.last, Verb.ACCEPT) for lease in leases[::2]]
                + [Settlement(lease.first, lease.last, Verb.RELEASE) for lease in leases[1::2]],
                now_ms=NOW_MS,
            )
            done += sum(lease.last - lease.first + 1 for lease in leases)
            queue.drain()

    return work


def by_backlog() -> None:
    print("acquire + (accept or release) from a backlog in pieces of 9, every tenth leased to another, µs a message")
    first = 0.0
    for backlog in BACKLOGS:
        us = median_us(lambda: _taking(backlog, 45, min(backlog, 5_000) // 2), min(backlog, 5_000) // 2)  # noqa: B023
        first = first or us
        print(f"  backlog {backlog:>9,}: {us:8.3f}   x{us / first:.2f}")


def memory() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    queue = new_queue()
    fill(queue, 1_000_000)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"1,000,000 messages in the window, 10 % leased: {used / 1e6:.1f} MB, {used / 1e6:.1f} bytes a message")
    start = time.process_time()
    snapshot = write_snapshot(queue.fold)
    written = time.process_time()
    read_snapshot(snapshot)
    read = time.process_time()
    print(
        f"its snapshot: {len(snapshot) / 1e6:.2f} MB, written in {(written - start) * 1e3:.0f} ms, "
        f"read in {(read - written) * 1e3:.0f} ms"
    )


def main() -> None:
    by_range()
    by_backlog()
    memory()


if __name__ == "__main__":
    main()
