"""The plan of a batch: offset ranges laid end to end and cut into tasks of equal size.

A large partition is shared by several tasks, and a hundred small topics need no more tasks than one large topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from millstream.pipelines.jobs.land.sources import Source
from millstream.pipelines.source.ranges import Range

FILE_BYTES: Final = 128 * 1024 * 1024
"""The most that a task takes: it becomes one file per topic."""

TASK_BYTES_MIN: Final = 8 * 1024 * 1024
"""Less than this is not divided, since every task costs its start."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The table's position in one partition, and where the batch takes it."""

    start: int | None
    """The table's next offset; None if it has none of this partition yet."""
    first: int
    """The first offset to read: after `start` if retention deleted some, or if nothing was landed before."""
    end: int

    @property
    def lost(self) -> int:
        """Return how many offsets were deleted before they were landed."""
        return 0 if self.start is None else self.first - self.start

    def __len__(self) -> int:
        return max(0, self.end - self.first)


def plans(source: Source, landed: Mapping[int, int], *, from_latest: bool) -> dict[int, PartitionPlan]:
    """Plan a topic's partitions, given the next offsets of its table."""
    found = {}
    for number, end in source.end.items():
        start = landed.get(number)
        # Partitions added later start at their first message, whatever is configured for the topic.
        first = end if start is None and from_latest and not landed else source.first[number]
        begin = max(first, start if start is not None else 0)
        found[number] = PartitionPlan(start, begin, max(begin, end))
    return found


def topic_ranges(topic: str, wanted: Mapping[int, PartitionPlan]) -> list[Range]:
    return [Range(topic, number, plan.first, plan.end) for number, plan in sorted(wanted.items()) if len(plan)]


def tasks(wanted: Sequence[Range], message_bytes: Mapping[str, float], *, parallelism: int) -> list[list[Range]]:
    """Divide ranges into as many tasks as run in parallel, or more if they would be too large."""
    sizes = [len(one) * message_bytes[one.topic] for one in wanted]
    total = sum(sizes)
    if not total:
        return []
    count = ceil(total / min(FILE_BYTES, max(TASK_BYTES_MIN, total / parallelism)))
    shared: list[list[Range]] = [[]]
    room = total / count
    for one, size in zip(wanted, sizes, strict=True):
        rest = one
        # The last task takes the rest.
        while size > room and len(shared) < count:
            taken = int(len(rest) * room / size)
            if taken:
                shared[-1].append(Range(rest.topic, rest.partition, rest.start, rest.start + taken))
                size -= size * taken / len(rest)
                rest = Range(rest.topic, rest.partition, rest.start + taken, rest.end)
            shared.append([])
            room = total / count
        if len(rest):
            shared[-1].append(rest)
            room -= size
    return [task for task in shared if task]
