"""Numbers that belong to no single part: the process itself, and how far its consumer groups are behind."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from typing import Protocol

from millstream import __version__
from millstream.core.metric import Metric, Sample, counter, gauge

_OWN_PROCESS = "/proc/self"


class ProcessMetrics:
    """Memory, processor time and open files, under the names that Prometheus dashboards know."""

    def __init__(self, *, started_ms: int) -> None:
        self._started_ms = started_ms

    def metrics(self) -> Iterable[Metric]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        yield Metric("millstream_build_info", "gauge", "The version.", (Sample(1, (("version", __version__),)),))
        yield gauge("process_start_time_seconds", "When the process started (Unix time).", self._started_ms / 1000)
        yield counter("process_cpu_seconds_total", "Processor time used.", cpu_s)
        yield gauge("process_resident_memory_bytes", "Memory in use.", _resident_bytes())
        yield gauge("process_open_fds", "Open file descriptors.", _open_files())


def _resident_bytes() -> int:
    with open(f"{_OWN_PROCESS}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _open_files() -> int:
    return len(os.listdir(f"{_OWN_PROCESS}/fd"))


class CommittedOffsets(Protocol):
    """The source of committed offsets."""

    def committed(self) -> Iterable[tuple[str, str, int, int]]:
        """Every group, topic, partition and committed offset."""


class Ends(Protocol):
    """The source of partition ends."""

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """The next offset that consumers will read; None when there is no such partition."""


class GroupMetrics:
    """How far every group is behind."""

    def __init__(self, groups: CommittedOffsets, ends: Ends) -> None:
        self._groups = groups
        self._ends = ends

    def metrics(self) -> Iterable[Metric]:
        """Committed offsets and lag, by group, topic and partition."""
        yield Metric("millstream_group_committed_offset", "gauge", "The offset committed.", self._samples(lag=False))
        yield Metric(
            "millstream_group_lag",
            "gauge",
            "Records between the committed offset and the end.",
            self._samples(lag=True),
        )

    def _samples(self, *, lag: bool) -> Iterator[Sample]:
        for group, topic, partition, offset in self._groups.committed():
            labels = (("group", group), ("topic", topic), ("partition", str(partition)))
            if not lag:
                yield Sample(offset, labels)
                continue
            end = self._ends.high_watermark(topic, partition)
            if end is not None:
                yield Sample(max(0, end - offset), labels)
