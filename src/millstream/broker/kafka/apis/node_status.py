"""NodeStatus (key 32000), version 0: returns a node's health and metrics.

The HTTP gateway and `millstream doctor` use it. The response holds:

    {"node_id": 1, "cluster_id": "…", "version": "0.1.0", "state": "starting" | "ready" | "stopping",
     "reasons": ["…"], "warnings": ["…"], "started_ms": …, "now_ms": …,
     "kafka": "host:port", "http": "http://host:port", "data": "/folder", "machine": [1, 1001],
     "damage": [{"topic": …, "partition": …, "start": …, "end": …, "repair": false}, …],
     "behind": [{"topic": …, "partition": …, "replica": …, "records": …}, …],
     "metrics": [{"name": …, "kind": …, "help": …, "samples": [[value, {label: text}], …], "is_truncated": false}, …]}

`machine` lists the nodes of its machine, if it runs several broker processes.

`reasons` lists why the node should get no traffic; it is empty exactly when the node is ready and unharmed. `warnings`
lists problems of a node that takes traffic, for example an unavailable coordination store. `damage` names the ranges of
offsets that the disk lost, each from `start` up to but without `end`, at most `DAMAGE_MAX` of them; `repair` says
whether a range is being fetched from other replicas. `behind` names replicas on other nodes that lack records of what
this node leads, at most `BEHIND_MAX` of them. The value of a histogram's sample is `{"bounds": […], "cumulative": […],
"observations": …, "total": …}`. A metric has at most `SAMPLES_MAX` samples, so that a node with very many partitions
responds as quickly as any; `is_truncated` says whether there are more.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from millstream import __version__
from millstream.broker.kafka.api import ClientInfo, encode_private, refuse_unless_described
from millstream.broker.net.connection import EventualResponse
from millstream.broker.replication.partition import ReplicaLag
from millstream.core.clock import Clock
from millstream.core.heap import resident_bytes
from millstream.core.metric import Distribution, Metric, MetricSource, Sample, counter, gauge
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import RequestHeader


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
        yield gauge("process_resident_memory_bytes", "Memory in use.", resident_bytes())
        yield gauge("process_open_fds", "Open file descriptors.", len(os.listdir("/proc/self/fd")))


class CommittedOffsets(Protocol):
    def committed(self) -> Iterable[tuple[str, str, int, int]]:
        """Return every group, topic, partition and committed offset."""


class PartitionEnds(Protocol):
    """The source of partition ends."""

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """Return the next offset that consumers will read; None when there is no such partition."""


class GroupMetrics:
    """The lag of every group."""

    def __init__(self, groups: CommittedOffsets, ends: PartitionEnds) -> None:
        self._groups = groups
        self._ends = ends

    def metrics(self) -> Iterable[Metric]:
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


SAMPLES_MAX = 2000
"""Samples of one metric at most: about 2 ms of the loop's time for the largest."""

DAMAGE_MAX = 1000
"""Damaged ranges that are named; the metrics count all."""

BEHIND_MAX = 1000

Damaged = Iterable[tuple[TopicPartition, Iterable[tuple[int, int, bool]]]]
"""Partitions with their damaged ranges, and whether each is being repaired from other replicas."""

STARTING, READY, STOPPING = "starting", "ready", "stopping"


@dataclass(slots=True, kw_only=True)
class NodeState:
    """The identity and state of a node; only the composition root changes it."""

    node_id: int
    cluster_id: str
    started_ms: int
    kafka: str
    http: str
    """The URL of HTTP, with `http://` or `https://`; empty without a gateway."""
    data: str
    machine: tuple[int, ...] = ()
    """Every node of its machine, if it has several."""
    state: str = STARTING


class NodeStatus:
    """Returns the health and metrics of the node."""

    key = 32000
    versions = (0, 0)

    def __init__(
        self,
        node: NodeState,
        sources: Sequence[MetricSource],
        clock: Clock,
        *,
        unready_reasons: Callable[[], Iterable[str]] = tuple,
        damage: Callable[[], Damaged] = tuple,
        behind: Callable[[], Iterable[ReplicaLag]] = tuple,
        warnings: Callable[[], Iterable[str]] = tuple,
        samples_max: int = SAMPLES_MAX,
    ) -> None:
        self._node = node
        self._sources = sources
        self._clock = clock
        self._unready_reasons = unready_reasons
        self._damage = damage
        self._behind = behind
        self._warnings = warnings
        self._samples_max = samples_max

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        return refuse_unless_described(header, client) or encode_private(
            header, {"error": 0, "message": None, **self.snapshot()}
        )

    @property
    def state(self) -> str:
        return self._node.state

    @property
    def started_ms(self) -> int:
        return self._node.started_ms

    def health(self) -> dict[str, Any]:
        """Return the part of the document that health checks need."""
        return {
            "node_id": self._node.node_id,
            "version": __version__,
            "reasons": self._reasons(),
            "warnings": list(self._warnings()),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the document that the response carries."""
        node = self._node
        return {
            **self.health(),
            "cluster_id": node.cluster_id,
            "state": node.state,
            "started_ms": node.started_ms,
            "now_ms": self._clock.now_ms(),
            "kafka": node.kafka,
            "http": node.http,
            "data": node.data,
            "machine": list(node.machine),
            "damage": list(islice(self._damaged_ranges(), DAMAGE_MAX)),
            "behind": [_describe_lag(partition) for partition in islice(self._behind(), BEHIND_MAX)],
            "metrics": [self._describe_metric(metric) for source in self._sources for metric in source.metrics()],
        }

    def _reasons(self) -> list[str]:
        reasons = [] if self._node.state == READY else [f"the node is {self._node.state}"]
        return [*reasons, *self._unready_reasons()]

    def _damaged_ranges(self) -> Iterator[dict[str, Any]]:
        for partition, ranges in self._damage():
            for start, end, repair in ranges:
                place = {"topic": partition.topic, "partition": partition.partition}
                yield {**place, "start": start, "end": end, "repair": repair}

    def _describe_metric(self, metric: Metric) -> dict[str, Any]:
        samples = iter(metric.samples)
        taken = [(_value(sample.value), dict(sample.labels)) for sample in islice(samples, self._samples_max)]
        is_truncated = next(samples, None) is not None
        return {
            "name": metric.name,
            "kind": metric.kind,
            "help": metric.help,
            "samples": taken,
            "is_truncated": is_truncated,
        }


def _describe_lag(replica_lag: ReplicaLag) -> dict[str, Any]:
    where = replica_lag.partition
    return {
        "topic": where.topic,
        "partition": where.partition,
        "replica": replica_lag.replica,
        "records": replica_lag.records,
    }


def _value(value: float | Distribution) -> Any:
    return value._asdict() if isinstance(value, Distribution) else value
