"""The highest rate of consuming with librdkafka, and its cost for the server.

The library allocates memory for each message in one thread and frees it in another. The threads contend, and memory
that is used for the first time costs more than receiving, so that at 100 B this would dominate the result. So the
consumer runs in its own process that keeps its memory, in one heap for all threads, and messages are consumed only
after all of them have arrived and the clock has stopped.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import cache

from benchmarks.callbacks import COUNT, counters
from benchmarks.cases import Case
from benchmarks.librdkafka import ClientFailed, Consumer
from benchmarks.processes import Meter
from benchmarks.subject import Numbers, Target
from benchmarks.throughput import flow

COMMITTED, UNCOMMITTED = "read_committed", "read_uncommitted"
"""Which messages a consumer gets; the first is librdkafka's default."""

KEPT_BYTES = 768 * 1024 * 1024
_BLOCK_BYTES = 16 * 1024 * 1024
_ARENA_MAX = -8
_RESPONSE_S_MAX = 60.0
_POLL_S = 0.001
_POLL_MS = 500


@cache
def _process() -> ProcessPoolExecutor:
    """Return the process of the consumer, one for the whole run."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_use_one_heap)


def _use_one_heap() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def touch_memory() -> None:
    """Touch the memory that the process will need, before the measurements."""
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


def consume(target: Target, case: Case, messages_min: int, isolation: str = COMMITTED) -> Numbers:
    """Read everything from the start of every partition, which is still in the page cache."""
    try:
        reading = (target.client_settings, target.topic, target.pid, case, messages_min, isolation)
        return _process().submit(_consume, *reading).result()
    except TimeoutError:
        target.check()
        raise


def _consume(
    connection: dict[str, str], topic: str, pid: int, case: Case, messages_min: int, isolation: str
) -> Numbers:
    settings = {
        **connection,
        "group.id": topic,
        "isolation.level": isolation,
        "fetch.queue.backoff.ms": "0",
        # A fetch at the end of one partition must not delay the others for long.
        "fetch.wait.max.ms": "10",
        "queued.min.messages": "10000000",
        "queued.max.messages.kbytes": "2097151",
        "topic.metadata.refresh.interval.ms": "-1",
    }
    seen = counters()
    with closing(Consumer(topic, settings, range(case.partitions), seen)) as consumer:
        deadline = time.monotonic() + _RESPONSE_S_MAX
        # The clock starts with the first messages: connecting and looking up offsets is not measured.
        _wait(consumer, 1, deadline)
        with Meter(pid) as meter:
            first, began = consumer.waiting(), time.perf_counter()
            arrived = _wait(consumer, messages_min, deadline)
            elapsed = time.perf_counter() - began
        while seen[COUNT] < messages_min and time.monotonic() < deadline:
            consumer.poll(_POLL_MS)
    if seen[COUNT] < messages_min:
        raise ClientFailed(f"of {messages_min} messages, {seen[COUNT]} came back")
    return flow(case, arrived - first, elapsed, meter)


def _wait(consumer: Consumer, messages_min: int, deadline: float) -> int:
    """Wait until the library has this many messages, and return how many it has."""
    while (arrived := consumer.waiting()) < messages_min:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{arrived} of {messages_min} messages came within {_RESPONSE_S_MAX:g} s")
        time.sleep(_POLL_S)
    return arrived
