"""`make bench-filters`: what filters cost in CPU time per message, compared with a hand-written loop.

The last rows are whole subscriptions: queues of one partition, each with a different filter, that scan all messages at
their own pace. They include the CPU time of the broker's process and of the child that evaluates filters.

python -m benchmarks.filters [--messages N] [--rounds N] [--queued N] [--json]

The limit of a step is a hand-written loop, measured in the same run and alternately with the step: parsing the JSON and
nothing else, or one list comprehension over values in memory, which handles neither NULL nor other types.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
from collections.abc import Callable
from itertools import cycle, islice
from statistics import median
from typing import Any

import msgspec
from benchmarks.machine import facts

from millstream.broker.subscriptions.filter_cache import FilterCache, QueueFilter
from millstream.broker.subscriptions.filter_worker import FilterWorker
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.filter.batch import ColumnBatch
from millstream.protocol.filter.code import Source
from millstream.protocol.filter.filter import Filter, compile_filter, used_by
from millstream.protocol.filter.node import Column, Header, Kind, Payload, Uses
from millstream.protocol.records.columns import Columns
from millstream.protocol.records.decoder import decode_columns
from millstream.protocol.records.record import NewRecord, encode_batch

MESSAGES, ROUNDS = 8000, 15
QUEUES, QUEUED, QUEUE_BATCH = (1, 9, 30), 100_000, 1000
TOTAL, TIER, SKU = Payload(("total",)), Payload(("customer", "tier")), Payload(("items", 0, "sku"))
REGION, KEY = Header("region"), Column("key", Kind.TEXT)

Limit = tuple[tuple[Source, ...], Callable[..., list[bool]]]

FILTERS: dict[str, Limit | None] = {
    "topic = 'orders'": None,
    "headers['region'] = 'eu'": ((REGION,), lambda column: [v == "eu" for v in column]),
    "payload.total > 1000": ((TOTAL,), lambda column: [v > 1000 for v in column]),
    "payload.total > 1000 AND headers['region'] = 'eu'": (
        (TOTAL, REGION),
        lambda first, second: [v > 1000 and w == "eu" for v, w in zip(first, second, strict=True)],
    ),
    "payload.customer.tier IN ('gold', 'silver') AND payload.total BETWEEN 100 AND 2000": (
        (TIER, TOTAL),
        lambda first, second: [
            v in {"gold", "silver"} and 100 <= w <= 2000 for v, w in zip(first, second, strict=True)
        ],
    ),
    "payload.items[0].sku LIKE 'A-1%'": ((SKU,), lambda column: [v.startswith("A-1") for v in column]),
    "payload.items[0].sku LIKE '%9_1%'": None,
    "lower(payload.customer.tier) = 'gold' OR length(key) > 11": (
        (TIER, KEY),
        lambda first, second: [v.lower() == "gold" or len(w) > 11 for v, w in zip(first, second, strict=True)],
    ),
    "payload.total * 1.19 > 1500": ((TOTAL,), lambda column: [v * 1.19 > 1500 for v in column]),
}


def orders(count: int, base_offset: int = 0) -> bytes:
    records = []
    for at in range(base_offset, base_offset + count):
        order = {
            "order_id": at,
            "total": at % 3000,
            "currency": "EUR",
            "customer": {"id": at % 500, "tier": "gold" if at % 7 else "free"},
            "items": [{"sku": f"A-{at}", "quantity": 2}],
        }
        headers = (("region", b"eu" if at % 2 else b"us"), ("trace", b"%016x" % at))
        records.append(NewRecord(b"customer-%d" % (at % 500), json.dumps(order).encode(), headers, 1767312000000 + at))
    return bytes(encode_batch(records, base_offset=base_offset))


def cpu_us(work: Callable[[], Any], messages: int) -> float:
    """Return the CPU time of one call, per message."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1000 / messages


def measure_in_turn(works: list[Callable[[], Any]], messages: int, rounds: int) -> list[float]:
    """Return the median of each function, measured in turn."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, times in zip(works, taken, strict=True):
            times.append(cpu_us(work, messages))
    return [median(times) for times in taken]


class Bench:
    """Measures step by step, and records the time of each step and of its limit."""

    def __init__(self, messages: int, rounds: int) -> None:
        self.rows: list[tuple[str, float, float | None]] = []
        self._messages, self._rounds = messages, rounds
        self._raw = orders(messages)
        self._columns = list(decode_columns(self._raw))
        self._filters = [compile_filter(text) for text in FILTERS]
        self._uses = used_by(self._filters)

    def run(self) -> None:
        """Measure everything."""
        self._measure("decode the batch: keys, values, headers", lambda: list(decode_columns(self._raw)))
        self._measure("read one header of each", lambda: self._read(REGION))
        decode = msgspec.json.Decoder().decode
        payloads = [[value or b"" for value in column.values.to_list()] for column in self._columns if column.values]
        self._measure(
            f"parse payloads and take out {len(self._uses.paths)} fields",
            lambda: self._read(TOTAL),
            lambda: [[decode(value) for value in values] for values in payloads],
        )
        for compiled, limit in zip(self._filters, FILTERS.values(), strict=True):
            self._measure_filter(compiled, limit)
        compiling = cpu_us(
            lambda: [compile_filter(bench_filter.text) for bench_filter in self._filters], len(self._filters)
        )
        self.rows.append(("compile a filter (per filter)", compiling, None))

    def _batch(self, columns: Columns, uses: Uses) -> ColumnBatch:
        return ColumnBatch(columns, topic="orders", partition=0, uses=uses)

    def _read(self, source: Source) -> None:
        for columns in self._columns:
            self._batch(columns, self._uses).column(source)

    def _measure(self, name: str, work: Callable[[], Any], limit: Callable[[], Any] | None = None) -> None:
        work()
        times = measure_in_turn([work, limit or (lambda: None)], self._messages, self._rounds)
        self.rows.append((name, times[0], times[1] if limit else None))

    def _measure_filter(self, compiled: Filter, limit: Limit | None) -> None:
        batches = [self._batch(columns, self._uses) for columns in self._columns]
        for batch in batches:
            compiled.matches(batch)
        bare = None
        if limit is not None:
            sources, run = limit
            columns = [[batch.column(source) for source in sources] for batch in batches]
            bare = lambda: [run(*column) for column in columns]  # noqa: E731
            if [match for matches in bare() for match in matches] != [
                bool(m) for b in batches for m in compiled.matches(b)
            ]:
                raise SystemExit(f"the limit of {compiled.text} finds different messages")
        self._measure(compiled.text, lambda: [compiled.matches(batch) for batch in batches], bare)


def measure_queues(number: int, messages: int) -> float:
    """Return the CPU time per message of queues with different filters, including the child's but not its startup."""
    batches = [orders(QUEUE_BATCH, base_offset=start) for start in range(0, messages + QUEUE_BATCH, QUEUE_BATCH)]
    taken = []
    for some in (batches[:1], batches):
        began = _cpu_s()
        asyncio.run(_scan(some, number))
        taken.append(_cpu_s() - began)
    return (taken[1] - taken[0]) / (len(batches) - 1) / QUEUE_BATCH * 1e6


async def _scan(batches: list[bytes], number: int) -> None:
    sieve, place = FilterCache(FilterWorker()), TopicPartition("orders", PartitionIndex(0))
    texts = [text.replace("1000", str(1000 + at)) for at, text in enumerate(islice(cycle(FILTERS), number))]
    texts = [f"({text}) AND payload.order_id >= {at}" for at, text in enumerate(texts)]

    async def look(queue: QueueFilter, step: int) -> None:
        at, end = 0, len(batches) * QUEUE_BATCH
        while at < end:
            following = min(at + step, end)
            records = b"".join(batches[at // QUEUE_BATCH : -(-following // QUEUE_BATCH)])
            await queue.matches(records, Offset(at), Offset(following))
            at = following

    queues = [QueueFilter(sieve, place, compile_filter(text)) for text in texts]
    # Each has room for a different number of messages.
    await asyncio.gather(*(look(queue, 2 * QUEUE_BATCH + 37 * at) for at, queue in enumerate(queues)))
    await sieve.stop()


def _cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.filters", description="What filters cost.")
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--queued", type=int, default=QUEUED, help="messages that subscriptions look through")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="the numbers as JSON")
    arguments = parser.parse_args()
    gc.freeze()
    bench = Bench(arguments.messages, arguments.rounds)
    bench.run()
    for number in QUEUES:
        name = f"{number} subscription(s), each with a different filter, all together"
        bench.rows.append((name, measure_queues(number, arguments.queued), None))
    if arguments.json:
        named = [{"step": step, "us": took, "limit_us": limit} for step, took, limit in bench.rows]
        print(json.dumps({"machine": facts(), "steps": named}))
        return
    print(", ".join(f"{name}: {fact}" for name, fact in facts().items()))
    print(f"\n| {'step':82} | µs per message | limit | ratio |\n|{'-' * 84}|---|---|---|")
    for step, took, limit in bench.rows:
        beside = f"{limit:5.3f} | {took / limit:4.1f}" if limit else "      |     "
        print(f"| {step:82} | {took:14.3f} | {beside} |")


if __name__ == "__main__":
    main()
