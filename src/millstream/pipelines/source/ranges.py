"""Offset ranges of partitions, each read by one task, how a query is divided into them, and committed positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, floor

from pyspark.sql.datasource import InputPartition

from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.pipelines.source.access import Access, may_read
from millstream.pipelines.source.options import Offsets, ReadOptions, sample_size
from millstream.protocol.wire import group_offsets
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import GroupMember


@dataclass(frozen=True)
class Table:
    url: str
    format: str
    topic_id: str


@dataclass(frozen=True)
class Range(InputPartition):
    """An offset range of one partition; the end is exclusive."""

    topic: str
    partition: int
    start: int
    end: int
    table: Table | None = None
    """The table it is read from, if not the log."""
    access: Access | None = field(default=None, compare=False, repr=False)
    """The credentials of its task; None if anonymous."""

    def __len__(self) -> int:
        return self.end - self.start


def ranges_between(start: Offsets, end: Offsets) -> list[Range]:
    """Return the ranges between two sets of offsets, per partition."""
    return [
        Range(topic, number, start[topic][number], last)
        for topic, lasts in sorted(end.items())
        for number, last in sorted(lasts.items())
        if last > start[topic][number]
    ]


def admit_tasks(ranges: Sequence[Range], options: ReadOptions) -> list[Range]:
    """Give the tasks of a query their credentials; in a dry run, limit each range to its last messages."""
    size = sample_size()
    if size is not None:
        ranges = [
            replace(offset_range, start=max(offset_range.start, offset_range.end - size)) for offset_range in ranges
        ]
    if not options.access.is_known or options.ranges:
        return list(ranges)
    access = options.access.for_tasks(options.brokers, may_read({offset_range.topic for offset_range in ranges}))
    return [replace(offset_range, access=access) for offset_range in ranges]


def split(ranges: Sequence[Range], *, min_partitions: int | None, records_max: int | None) -> list[Range]:
    """Divide large ranges, so that no task has too many records and there are enough tasks.

    As in Spark, `min_partitions` is met approximately, by dividing each range in proportion to its size.
    """
    pieces = [
        piece
        for offset_range in ranges
        for piece in _split(offset_range, 1 if records_max is None else ceil(len(offset_range) / records_max))
    ]
    if min_partitions is None or len(pieces) >= min_partitions:
        return pieces
    total = sum(len(piece) for piece in pieces)
    # Small ranges stay whole; the others share the remaining tasks.
    whole = [piece for piece in pieces if len(piece) * min_partitions < total]
    large_total = total - sum(map(len, whole))
    ranges_min = max(1, min_partitions - len(whole))
    kept = set(map(id, whole))
    return [
        part
        for piece in pieces
        for part in _split(piece, 1 if id(piece) in kept else max(1, round(len(piece) / large_total * ranges_min)))
    ]


def _split(offset_range: Range, parts: int) -> Iterator[Range]:
    parts = min(parts, max(1, len(offset_range)))
    bounds = [offset_range.start + len(offset_range) * part // parts for part in range(parts + 1)]
    for first, last in pairwise(bounds):
        yield replace(offset_range, start=first, end=last)


def admitted(start: Offsets, end: Offsets, offsets_max: int) -> dict[str, dict[int, int]]:
    """Return the end offsets of a batch of at most `offsets_max`, with a share for every partition."""
    sizes = {
        (topic, number): max(0, last - start[topic][number])
        for topic, lasts in end.items()
        for number, last in lasts.items()
    }
    total = sum(sizes.values())
    if total <= offsets_max:
        return {topic: dict(lasts) for topic, lasts in end.items()}
    allowed: dict[str, dict[int, int]] = {}
    for (topic, number), size in sizes.items():
        share = offsets_max * size / total
        # A partition with few messages must not wait forever for a share of at least one.
        step = ceil(share) if share < 1 else floor(share)
        allowed.setdefault(topic, {})[number] = start[topic][number] + min(size, step)
    return allowed


async def stable_offsets(client: Client, group: str) -> dict[str, dict[int, int]]:
    """Return a group's committed offsets, waiting for transactions that are about to change them."""
    offsets: dict[str, dict[int, int]] = {}
    for where, offset in (await group_offsets.stable_offsets(client, group)).items():
        offsets.setdefault(where.topic, {})[where.partition] = offset
    return offsets


async def commit_offsets(client: Client, group: str, offsets: Offsets, member: GroupMember) -> None:
    """Commit the offsets of work that is already durable, so that the group shows it."""
    commits = {
        TopicPartition(topic, PartitionIndex(number)): offset
        for topic, numbers in offsets.items()
        for number, offset in numbers.items()
    }
    await group_offsets.commit_offsets(client, group, commits, member=member)
