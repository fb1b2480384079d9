"""Filters at work: a stretch of the log is decoded once, however many subscriptions have a filter on it.

Queues of one partition look at the same messages, some earlier and some later. Whoever comes first has all filters of
the partition evaluated, and what came out is kept for the others, as long as there is room for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.model.errors import BatchRejected
from millstream.model.ids import Offset
from millstream.model.topic import TopicPartition
from millstream.records.batch import Buffer, iterate_whole_headers
from millstream.subscriptions.filter.evaluation import Messages
from millstream.subscriptions.filter.filter import Filter
from millstream.subscriptions.filter.worker import FilterWorker
from millstream.subscriptions.look_ahead import Stretch

KEPT_BYTES_MAX: Final = 16 * 1024 * 1024

Bits = npt.NDArray[np.bool_]


class _Kept(NamedTuple):
    next_offset: Offset
    by_filter: dict[Filter, Bits]

    @property
    def size_bytes(self) -> int:
        return sum(bits.nbytes for bits in self.by_filter.values())


class Sieve:
    """The filters of a node, by the partitions that they look at."""

    def __init__(self, worker: FilterWorker) -> None:
        self._worker = worker
        self._filters: dict[TopicPartition, Counter[Filter]] = {}
        self._kept: OrderedDict[tuple[TopicPartition, Offset], _Kept] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """How much of what was found is kept."""
        return self._kept_bytes

    async def open_batch(self, seen: Stretch) -> Stretch:
        """Open the heavy batch of a stretch, beside the loop."""
        opened = await self._worker.open_batch(seen.records, seen.batch_first, with_keys=seen.keys is not None)
        return seen.with_batch(opened)

    async def stop(self) -> None:
        """End the process that evaluates filters."""
        await self._worker.stop()

    def join(self, partition: TopicPartition, wanted: Filter) -> None:
        """A queue with a filter begins."""
        self._filters.setdefault(partition, Counter())[wanted] += 1

    def leave(self, partition: TopicPartition, wanted: Filter) -> None:
        """A queue with a filter ends, or has another one now."""
        counts = self._filters.get(partition)
        if counts is None:
            return
        counts[wanted] -= 1
        if counts[wanted] <= 0:
            del counts[wanted]
        if not counts:
            del self._filters[partition]
            # The next queue may find other messages there: a topic that was made anew, another leader's log.
            for place in [place for place in self._kept if place[0] == partition]:
                self._kept_bytes -= self._kept.pop(place).size_bytes

    async def matches(
        self, partition: TopicPartition, wanted: Filter, records: Buffer, first: Offset, next_offset: Offset
    ) -> Bits:
        """For every offset of a stretch, whether its message matches; what cannot be opened does."""
        kept = self._kept.get((partition, first))
        if kept is not None and kept.next_offset == next_offset and wanted in kept.by_filter:
            self._kept.move_to_end((partition, first))
            return kept.by_filter[wanted]
        filters = list(self._filters.get(partition, {wanted: 1}))
        if wanted not in filters:
            filters.append(wanted)
        by_filter = {one: np.zeros(next_offset - first, np.bool_) for one in filters}
        try:
            await self._evaluate(partition, records, first, next_offset, by_filter)
        except BatchRejected:
            await self._evaluate_one_by_one(partition, records, first, next_offset, by_filter)
        self._keep((partition, first), _Kept(next_offset, by_filter))
        return by_filter[wanted]

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
    ) -> None:
        """Some batch cannot be opened. Workers see it as it is, and can reject it; the others are filtered."""
        view = memoryview(records)
        for header in iterate_whole_headers(records):
            begin, end = max(first, header.base_offset), min(next_offset, header.next_offset)
            if begin >= end:
                continue
            try:
                one = view[header.position : header.end_position]
                await self._evaluate(partition, one, first, next_offset, by_filter)
            except BatchRejected:
                for dense in by_filter.values():
                    dense[begin - first : end - first] = True

    def _keep(self, place: tuple[TopicPartition, Offset], kept: _Kept) -> None:
        old = self._kept.pop(place, None)
        self._kept_bytes += kept.size_bytes - (0 if old is None else old.size_bytes)
        self._kept[place] = kept
        while self._kept_bytes > KEPT_BYTES_MAX and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.size_bytes


class QueueSieve:
    """The filter of one queue."""

    def __init__(self, sieve: Sieve, partition: TopicPartition, wanted: Filter) -> None:
        self._sieve = sieve
        self._partition = partition
        self.filter = wanted
        sieve.join(partition, wanted)

    def close(self) -> None:
        """The queue has gone, or has another filter."""
        self._sieve.leave(self._partition, self.filter)

    async def matches(self, records: Buffer, first: Offset, next_offset: Offset) -> Bits:
        """For every offset of a stretch, whether its message matches."""
        return await self._sieve.matches(self._partition, self.filter, records, first, next_offset)
