"""Evaluate filters once per batch, however many subscriptions of a partition have one.

The queues of a partition scan the same messages at different times and in different ranges. The first one has all
filters of the partition evaluated for whole batches while the others wait; the results are cached for them within a
memory limit.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.broker.subscriptions.filter_worker import FilterWorker
from millstream.broker.subscriptions.log_scan import ScannedRange
from millstream.core.errors import BatchRejected
from millstream.core.ids import Offset
from millstream.core.topic import TopicPartition
from millstream.protocol.filter.filter import Filter, Messages
from millstream.protocol.records.batch import Buffer, iterate_whole_headers

CACHED_BYTES_MAX: Final = 16 * 1024 * 1024

Bits = npt.NDArray[np.bool_]
Unreadable = tuple[tuple[int, int, str], ...]
"""Batches, each as its first and last offset and the reason."""


class Matches(NamedTuple):
    """The result of a filter for a range of offsets."""

    bits: Bits
    """Whether each offset matches."""
    unreadable: Unreadable
    """The batches that cannot be decoded, or kill the process that does it."""


class _Run(NamedTuple):
    """The matches of every filter for consecutive offsets."""

    start: int
    end: int
    rows: dict[Filter, Bits]
    unreadable: Unreadable

    @property
    def size_bytes(self) -> int:
        return sum(bits.nbytes for bits in self.rows.values())


@dataclass(slots=True)
class _Partition:
    """The filters of one partition and their cached results, ascending and without overlap."""

    filters: Counter[Filter] = field(default_factory=Counter)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Queues that need the same results wait for the one that has them evaluated."""
    runs: list[_Run] = field(default_factory=list)

    def run_at(self, offset: int) -> _Run | None:
        at = bisect_right(self.runs, offset, key=_run_start) - 1
        return self.runs[at] if at >= 0 and offset < self.runs[at].end else None


class FilterCache:
    """The filters of a node by partition, with their cached results."""

    def __init__(self, worker: FilterWorker) -> None:
        self._worker = worker
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._cached: OrderedDict[tuple[TopicPartition, int], _Run] = OrderedDict()
        """Every run, the most recently used last."""
        self._cached_bytes = 0

    async def open_batch(self, scanned: ScannedRange) -> ScannedRange:
        """Scan the heavy batch of a range in the filter process."""
        opened = await self._worker.scan_batch(scanned.records, scanned.batch_first, with_keys=scanned.keys is not None)
        return scanned.with_batch_scan(opened)

    async def stop(self) -> None:
        await self._worker.stop()

    def add_filter(self, partition: TopicPartition, filter_: Filter) -> None:
        self._partitions.setdefault(partition, _Partition()).filters[filter_] += 1

    def remove_filter(self, partition: TopicPartition, filter_: Filter) -> None:
        known = self._partitions.get(partition)
        if known is None:
            return
        known.filters[filter_] -= 1
        if known.filters[filter_] <= 0:
            del known.filters[filter_]
        if not known.filters:
            # The next queue may find other messages: the topic may be recreated, or the log may be another leader's.
            for run in list(known.runs):
                self._evict(partition, run)
            del self._partitions[partition]

    async def matches(
        self, partition: TopicPartition, filter_: Filter, records: Buffer, first: Offset, next_offset: Offset
    ) -> Matches:
        """Return whether each offset of a range matches, and which cannot be decoded."""
        known = self._partitions.get(partition) or _Partition()
        async with known.turn:
            runs = self._cached_runs(partition, known, filter_, first, next_offset)
            if runs is None:
                runs = await self._evaluate_missing(partition, known, filter_, records, first, next_offset)
        bits = np.zeros(next_offset - first, np.bool_)
        for run in runs:
            start, end = max(first, run.start), min(next_offset, run.end)
            bits[start - first : end - first] = run.rows[filter_][start - run.start : end - run.start]
        unreadable = (
            unreadable
            for run in runs
            for unreadable in run.unreadable
            if unreadable[1] >= first and unreadable[0] < next_offset
        )
        return Matches(bits, tuple((max(a, first), min(b, next_offset - 1), reason) for a, b, reason in unreadable))

    def _cached_runs(
        self, partition: TopicPartition, known: _Partition, filter_: Filter, first: int, next_offset: int
    ) -> list[_Run] | None:
        """Return the runs that cover a range; None if some are missing."""
        runs: list[_Run] = []
        at = first
        while at < next_offset:
            run = known.run_at(at)
            if run is None or filter_ not in run.rows:
                return None
            self._cached.move_to_end((partition, run.start))
            runs.append(run)
            at = run.end
        return runs

    async def _evaluate_missing(
        self,
        partition: TopicPartition,
        known: _Partition,
        filter_: Filter,
        records: Buffer,
        first: Offset,
        next_offset: Offset,
    ) -> list[_Run]:
        """Evaluate every filter for the batches of a range that are not cached."""
        runs: list[_Run] = []
        start, position, end_position = int(first), -1, -1
        for header in iterate_whole_headers(records):
            if header.next_offset <= first or header.base_offset >= next_offset:
                continue
            run = known.run_at(header.base_offset)
            if run is not None and filter_ in run.rows and header.next_offset <= run.end:
                if position >= 0:
                    piece = memoryview(records)[position:end_position]
                    runs.append(await self._evaluate_range(partition, known, filter_, piece, start, header.base_offset))
                    position = -1
                if not runs or runs[-1] is not run:
                    runs.append(run)
                start = max(start, run.end)
                continue
            if position < 0:
                # There are no messages between a run and the next batch.
                position, start = header.position, min(start, header.base_offset)
            end_position = header.end_position
            last = header.next_offset
        if position >= 0:
            end = max(last, next_offset)
            piece = memoryview(records)[position:end_position]
            runs.append(await self._evaluate_range(partition, known, filter_, piece, start, end))
        return runs

    async def _evaluate_range(
        self, partition: TopicPartition, known: _Partition, filter_: Filter, records: Buffer, start: int, end: int
    ) -> _Run:
        rows = {known_filter: np.zeros(end - start, np.bool_) for known_filter in (*known.filters, filter_)}
        first, next_offset = Offset(start), Offset(end)
        unreadable: Unreadable = ()
        try:
            await self._evaluate(partition, records, first, next_offset, rows)
        except BatchRejected:
            unreadable = await self._evaluate_one_by_one(partition, records, first, next_offset, rows)
        run = _Run(start, end, rows, unreadable)
        if self._partitions.get(partition) is known:
            self._cache(partition, known, run)
        return run

    async def _evaluate(
        self,
        partition: TopicPartition,
        records: Buffer,
        first: Offset,
        next_offset: Offset,
        by_filter: dict[Filter, Bits],
    ) -> None:
        messages = Messages(
            topic=partition.topic,
            partition=partition.partition,
            batches=records,
            start_offset=first,
            end_offset=next_offset,
        )
        evaluation = await self._worker.evaluate(messages, list(by_filter))
        for dense, bits in zip(by_filter.values(), evaluation.matches, strict=True):
            dense[evaluation.offsets - first] = bits

    async def _evaluate_one_by_one(
        self,
        partition: TopicPartition,
        records: Buffer,
        first: Offset,
        next_offset: Offset,
        by_filter: dict[Filter, Bits],
    ) -> Unreadable:
        """Evaluate batch by batch, since one cannot be decoded; return those."""
        view = memoryview(records)
        unreadable: list[tuple[int, int, str]] = []
        for header in iterate_whole_headers(records):
            begin, end = max(first, header.base_offset), min(next_offset, header.next_offset)
            if begin >= end:
                continue
            try:
                batch_bytes = view[header.position : header.end_position]
                await self._evaluate(partition, batch_bytes, first, next_offset, by_filter)
            except BatchRejected as error:
                unreadable.append((begin, end - 1, str(error)))
        return tuple(unreadable)

    def _cache(self, partition: TopicPartition, known: _Partition, run: _Run) -> None:
        for old in [old for old in known.runs if old.start < run.end and old.end > run.start]:
            self._evict(partition, old)
        insort(known.runs, run, key=_run_start)
        self._cached[partition, run.start] = run
        self._cached_bytes += run.size_bytes
        while self._cached_bytes > CACHED_BYTES_MAX:
            self._evict(*next((place[0], kept) for place, kept in self._cached.items()))

    def _evict(self, partition: TopicPartition, run: _Run) -> None:
        runs = self._partitions[partition].runs
        del runs[bisect_left(runs, run.start, key=_run_start)]
        self._cached_bytes -= self._cached.pop((partition, run.start)).size_bytes


def _run_start(run: _Run) -> int:
    return run.start


class QueueFilter:
    def __init__(self, cache: FilterCache, partition: TopicPartition, filter_: Filter) -> None:
        self._filters = cache
        self._partition = partition
        self.filter = filter_
        cache.add_filter(partition, filter_)

    def close(self) -> None:
        self._filters.remove_filter(self._partition, self.filter)

    async def matches(self, records: Buffer, first: Offset, next_offset: Offset) -> Matches:
        """Return whether each offset of a range matches, and which cannot be decoded."""
        return await self._filters.matches(self._partition, self.filter, records, first, next_offset)
