"""How fast messages come out at most, with librdkafka as the client, and what that costs the server.

The library allocates something for each message, in one thread, and frees it in another. Both wait for each other, now
more and now less, and memory that is used for the first time costs more than receiving. At 100 B it would be this that
is measured. So the reading is done in its own process that keeps its memory, in one heap for all threads, and
messages are taken from the library only after all of them have come and the clock has stopped.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import cache

from benchmarks.callbacks import COUNT, notes
from benchmarks.cases import Case
from benchmarks.librdkafka import ClientFailed, Consumer
from benchmarks.processes import Meter
from benchmarks.target import Numbers, Target
from benchmarks.throughput import flow

COMMITTED, UNCOMMITTED = "read_committed", "read_uncommitted"
"""Which messages a consumer gets; the first is librdkafka's default."""

KEPT_BYTES = 768 * 1024 * 1024
_BLOCK_BYTES = 16 * 1024 * 1024
_ARENA_MAX = -8
_RESPONSE_S_MAX = 60.0
_GLANCE_S = 0.001
_LOOK_MS = 500


@cache
def _process() -> ProcessPoolExecutor:
    """One process for the whole run; it ends with this one."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_use_one_heap)


def _use_one_heap() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def touch_memory() -> None:
    """Have the process use the memory once that it will need, before anything is measured."""
    _process().submit(_touch, KEPT_BYTES).result()


def _touch(size_bytes: int) -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(_BLOCK_BYTES) for _ in range(size_bytes // _BLOCK_BYTES)]
    for block in blocks:
        ctypes.memset(block, 1, _BLOCK_BYTES)
    for block in blocks:
        library.free(block)


def consume(target: Target, case: Case, wanted: int, isolation: str = COMMITTED) -> Numbers:
    """Read from the start of every partition what was produced; it is still in the page cache."""
    try:
        asked = (target.client_settings, target.topic, target.pid, case, wanted, isolation)
        return _process().submit(_consume, *asked).result()
    except TimeoutError:
        target.check()
        raise


def _consume(connection: dict[str, str], topic: str, pid: int, case: Case, wanted: int, isolation: str) -> Numbers:
    settings = {
        **connection,
        "group.id": topic,
        "isolation.level": isolation,
        "fetch.queue.backoff.ms": "0",
        # A fetch of a partition that is read to its end must not hold up the others for long.
        "fetch.wait.max.ms": "10",
        "queued.min.messages": "10000000",
        "queued.max.messages.kbytes": "2097151",
        "topic.metadata.refresh.interval.ms": "-1",
    }
    seen = notes()
    with closing(Consumer(topic, settings, range(case.partitions), seen)) as consumer:
        deadline = time.monotonic() + _RESPONSE_S_MAX
        # The clock starts with the first messages: connecting and finding the start is not what is measured.
        _wait(consumer, 1, deadline)
        with Meter(pid) as meter:
            first, began = consumer.waiting(), time.perf_counter()
            came = _wait(consumer, wanted, deadline)
            elapsed = time.perf_counter() - began
        while seen[COUNT] < wanted and time.monotonic() < deadline:
            consumer.poll(_LOOK_MS)
    if seen[COUNT] < wanted:
        raise ClientFailed(f"of {wanted} messages, {seen[COUNT]} came back")
    return flow(case, came - first, elapsed, meter)


def _wait(consumer: Consumer, wanted: int, deadline: float) -> int:
    """Wait until the library has so many messages, and return how many it has."""
    while (came := consumer.waiting()) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{came} of {wanted} messages came within {_RESPONSE_S_MAX:g} s")
        time.sleep(_GLANCE_S)
    return came
