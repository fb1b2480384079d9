"""The highest rate of producing with librdkafka, and its cost for the server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

from benchmarks.cases import IDEMPOTENT, Case
from benchmarks.librdkafka import ClientFailed, PreparedMessages, Producer
from benchmarks.processes import Meter
from benchmarks.subject import Numbers, Target

KEYS = 10_000
_AT_ONCE = 500
_RESPONSE_S_MAX = 60.0
_POLL_MS = 500
_FILL_S, _FILL_S_MAX = 0.5, 3.0
# Small queues, so that a slow server has little left to do when the time is up.
_QUEUE_KB, _QUEUE_MESSAGES = 65_536, 100_000
_SHARE_KB, _SHARE_MESSAGES = 16_384, 20_000


def flow(case: Case, messages: int, elapsed_s: float, meter: Meter) -> Numbers:
    """Return the results of one measurement in one direction."""
    gb, millions = messages * case.size_bytes / 1e9, messages / 1e6
    return {
        "MB/s": gb * 1000 / elapsed_s,
        "messages/s": messages / elapsed_s,
        "user CPU s/GB": meter.cpu.user_s / gb,
        "system CPU s/GB": meter.cpu.system_s / gb,
        "user CPU s/M messages": meter.cpu.user_s / millions,
        "system CPU s/M messages": meter.cpu.system_s / millions,
        "client CPU s/GB": meter.client_cpu_s / gb,
        "memory MB": meter.memory.peak_bytes / 1e6,
        "children's memory MB": meter.memory.children_bytes / 1e6,
    }


def produce(target: Target, case: Case, seconds: float) -> tuple[int, Numbers]:
    """Send as fast as the server accepts, wait for every response; return the number of messages and the results."""
    with ExitStack() as stack:
        producers = [
            stack.enter_context(closing(Producer(target.topic, settings_of(target, case))))
            for _ in range(case.producers)
        ]
        load = PreparedMessages(KEYS, case.size_bytes, keys=KEYS if case.keyed else 0)
        # The first message of each partition looks up the leader, which is not measured.
        for producer in producers:
            for partition in range(case.partitions):
                producer.send(load, 0, 1, partition)
        for producer in producers:
            _flush(target, producer)
        pool = stack.enter_context(ThreadPoolExecutor(case.producers))
        ready = threading.Barrier(case.producers + 1)
        with Meter(target.pid) as meter:
            sent = [pool.submit(_send, target, producer, load, ready, seconds) for producer in producers]
            ready.wait()
            began = time.perf_counter()
            messages = sum(future.result() for future in sent)
            elapsed = time.perf_counter() - began
        stored = sum(producers[0].end_offset(partition) for partition in range(case.partitions))
    if stored < messages + case.partitions * case.producers:
        raise ClientFailed(f"of {messages} messages, the server has {stored}")
    return stored, flow(case, messages, elapsed, meter)


def settings_of(target: Target, case: Case, linger_ms: float = 5) -> dict[str, str]:
    """Return the producers' settings; all else is librdkafka's default."""
    alone = case.producers == 1
    return {
        **target.client_settings,
        "acks": "all" if case.acks == IDEMPOTENT else case.acks,
        "enable.idempotence": str(case.acks == IDEMPOTENT).lower(),
        "linger.ms": str(linger_ms),
        "queue.buffering.max.kbytes": str(_QUEUE_KB if alone else _SHARE_KB),
        "queue.buffering.max.messages": str(_QUEUE_MESSAGES if alone else _SHARE_MESSAGES),
        "topic.metadata.refresh.interval.ms": "-1",
    }


def _send(target: Target, producer: Producer, load: PreparedMessages, ready: threading.Barrier, seconds: float) -> int:
    """Send with one producer until the time is up, then wait for the responses."""
    ready.wait()
    deadline = time.perf_counter() + seconds
    sent = 0
    while not sent or time.perf_counter() < deadline:
        producer.send(load, sent % load.count, _AT_ONCE)
        sent += _AT_ONCE
    _flush(target, producer)
    return sent


def _flush(target: Target, producer: Producer) -> None:
    deadline = time.monotonic() + _RESPONSE_S_MAX
    while not producer.flush(_POLL_MS):
        target.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every message got a response within {_RESPONSE_S_MAX:g} s")


def fill(target: Target, case: Case, stored: int, target_count: int) -> int:
    """Produce until there are this many messages, or it takes too long; return how many there are."""
    deadline = time.monotonic() + _FILL_S_MAX
    while stored < target_count and time.monotonic() < deadline:
        stored, _ = produce(target, case, _FILL_S)
    return min(stored, target_count)
