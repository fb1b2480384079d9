"""How fast messages go in and come out, with librdkafka as the client, and what that costs the server."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from benchmarks.librdkafka import Consumer, Producer
from benchmarks.processes import Cpu, cpu_of
from benchmarks.subjects import PARTITIONS

from millstream.testing.server import Server, ServerFailed

TOPIC, IDEMPOTENT_TOPIC = "throughput", "throughput-idempotent"
MESSAGE_BYTES = 1024
_AT_ONCE = 1000
_ANSWER_S_MAX = 60.0
_LOOK_MS = 500


@dataclass(frozen=True, slots=True)
class Flow:
    """One measurement in one direction; CPU is seconds per GB of messages."""

    mb_per_s: float
    cpu: Cpu
    client_cpu_s: float


def produce(server: Server, messages: int, *, idempotent: bool = False) -> Flow:
    """Send messages to all partitions with `acks=all` and wait for every answer."""
    settings = {
        "bootstrap.servers": server.kafka,
        "log_level": "0",
        "acks": "all",
        "linger.ms": "5",
        "enable.idempotence": str(idempotent).lower(),
        "queue.buffering.max.messages": "200000",
        "topic.metadata.refresh.interval.ms": "-1",
    }
    topic = IDEMPOTENT_TOPIC if idempotent else TOPIC
    producer = Producer(topic, settings, os.urandom(MESSAGE_BYTES), at_once=_AT_ONCE)
    try:
        # The first message of each partition finds the topic and its leader, which is not what is measured.
        for partition in range(PARTITIONS):
            producer.send(partition, 1)
        _flush(server, producer)
        before, client_before, began = cpu_of(server.pid), time.process_time(), time.perf_counter()
        for number in range(messages // _AT_ONCE):
            producer.send(number % PARTITIONS, _AT_ONCE)
        _flush(server, producer)
        return _flow(server, messages, began, before, client_before)
    finally:
        producer.close()


def _flush(server: Server, producer: Producer) -> None:
    deadline = time.monotonic() + _ANSWER_S_MAX
    while not producer.flush(_LOOK_MS):
        if not server.is_running() or time.monotonic() > deadline:
            raise ServerFailed(f"the server does not answer; its log ends with:\n{server.log_tail()}")


def consume(server: Server, messages: int) -> Flow:
    """Read back what `produce` wrote, from the start of every partition."""
    settings = {
        "bootstrap.servers": server.kafka,
        "log_level": "0",
        "group.id": TOPIC,
        "fetch.queue.backoff.ms": "0",
        # A fetch of a partition that is read to its end must not hold up the others for long.
        "fetch.wait.max.ms": "10",
        "queued.min.messages": "1000000",
        "topic.metadata.refresh.interval.ms": "-1",
    }
    consumer = Consumer(TOPIC, settings, range(PARTITIONS))
    try:
        wanted = messages + PARTITIONS
        deadline = time.monotonic() + _ANSWER_S_MAX
        # The clock starts with the first messages: connecting and finding the start is not what is measured.
        first = _first(consumer, deadline)
        before, client_before, began = cpu_of(server.pid), time.process_time(), time.perf_counter()
        got = first
        while got < wanted:
            got += consumer.poll(100)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{got} of {wanted} messages came within {_ANSWER_S_MAX:g} s")
        return _flow(server, got - first, began, before, client_before)
    finally:
        consumer.close()


def _first(consumer: Consumer, deadline: float) -> int:
    while time.monotonic() < deadline:
        got = consumer.poll(100)
        if got:
            return got
    raise TimeoutError(f"no message came within {_ANSWER_S_MAX:g} s")


def _flow(server: Server, messages: int, began: float, before: Cpu, client_before: float) -> Flow:
    elapsed = time.perf_counter() - began
    cpu = cpu_of(server.pid).since(before)
    client = time.process_time() - client_before
    size = messages * MESSAGE_BYTES
    return Flow(size / elapsed / 1e6, cpu.per_gb(size), client / size * 1e9)
