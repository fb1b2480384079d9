"""Producing in transactions and consuming committed messages with librdkafka, one measurement at a time."""

from __future__ import annotations

import time
import uuid
from contextlib import closing

from benchmarks import reader
from benchmarks.cases import IDEMPOTENT, OS, Case
from benchmarks.librdkafka import PreparedMessages, Producer, TransactionalProducer
from benchmarks.processes import Meter
from benchmarks.reader import COMMITTED
from benchmarks.subject import Numbers, Target
from benchmarks.throughput import flow, settings_of

CASE = Case(flush=OS, acks=IDEMPOTENT, partitions=4)
MESSAGES_MIXED = 400_000
OF_ONE_TRANSACTION = 1000
ABORTED_EACH = 4
"""One in this many transactions is aborted."""

_AT_ONCE = 500
_RESPONSE_MS_MAX = 60_000


def produce(target: Target, seconds: float, commit_s: float | None) -> Numbers:
    """Send as fast as the server accepts, in transactions of this duration or without, and wait for all of them."""
    load = PreparedMessages(_AT_ONCE, CASE.size_bytes)
    with closing(_producer(target, transactional=commit_s is not None)) as producer:
        for partition in range(CASE.partitions):
            producer.send(load, 0, 1, partition)
        _end(producer)
        with Meter(target.pid) as meter:
            began = time.perf_counter()
            sent = _send(producer, load, began + seconds, commit_s)
            elapsed = time.perf_counter() - began
    return flow(CASE, sent, elapsed, meter)


def _producer(target: Target, *, transactional: bool) -> Producer:
    settings = settings_of(target, CASE)
    if not transactional:
        return Producer(target.topic, settings)
    made = TransactionalProducer(target.topic, settings | {"transactional.id": f"bench-{uuid.uuid4().hex}"})
    made.initialize()
    made.begin()
    return made


def _end(producer: Producer, *, goes_on: bool = True) -> None:
    """Wait until everything has a response and the transaction, if any, has ended."""
    if not isinstance(producer, TransactionalProducer):
        producer.flush(_RESPONSE_MS_MAX)
        return
    producer.end(commit=True)
    if goes_on:
        producer.begin()


def _send(producer: Producer, load: PreparedMessages, deadline: float, commit_s: float | None) -> int:
    sent = 0
    commit_at = deadline if commit_s is None else time.perf_counter() + commit_s
    while (now := time.perf_counter()) < deadline:
        if commit_s is not None and now >= commit_at:
            _end(producer)
            commit_at = time.perf_counter() + commit_s
        producer.send(load, 0, _AT_ONCE)
        sent += _AT_ONCE
    _end(producer, goes_on=False)
    return sent


def fill(target: Target) -> int:
    """Write many small transactions, some of them aborted; return the number of committed messages."""
    load = PreparedMessages(OF_ONE_TRANSACTION, CASE.size_bytes)
    producer = _producer(target, transactional=True)
    committed = 0
    with closing(producer):
        if not isinstance(producer, TransactionalProducer):
            raise TypeError("only a transactional producer writes transactions")
        count = MESSAGES_MIXED // OF_ONE_TRANSACTION
        for number in range(1, count + 1):
            producer.send(load, 0, OF_ONE_TRANSACTION)
            # The last one is committed, so that a consumer of committed messages reads to the end.
            commit = number % ABORTED_EACH != 0 or number == count
            producer.end(commit=commit)
            committed += OF_ONE_TRANSACTION if commit else 0
            if number < count:
                producer.begin()
    return committed


def consume(target: Target, isolation: str, committed: int) -> Numbers:
    """Read everything. The rates count all stored messages, whichever of them the consumer gets."""
    message_count = committed if isolation == COMMITTED else MESSAGES_MIXED
    share = MESSAGES_MIXED / message_count
    numbers = reader.consume(target, CASE, message_count, isolation)
    rates = {name: value * share for name, value in numbers.items() if name.endswith("/s")}
    return numbers | rates | {name: value / share for name, value in numbers.items() if "CPU" in name}
