"""The metrics of topics: what is stored, the traffic, and the state of replication."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from millstream.broker.log.retention import held_bytes
from millstream.core.metric import Metric, Sample, gauge

if TYPE_CHECKING:
    from millstream.broker.cluster.topics import Topics


def topic_metrics(topics: Topics, now_ms: int) -> Iterable[Metric]:
    """Return the stored bytes and the traffic, by topic and by partition."""
    yield gauge("millstream_topics", "Topics.", len(topics.all()))
    yield gauge("millstream_partitions", "Partitions that this node hosts.", sum(1 for _ in topics.hosted()))
    totals = (
        ("millstream_topic_records_in_total", "Records appended.", "records_in"),
        ("millstream_topic_bytes_in_total", "Bytes appended.", "bytes_in"),
        ("millstream_topic_bytes_out_total", "Bytes read.", "bytes_out"),
    )
    for name, text, attribute in totals:
        yield Metric(name, "counter", text, _by_topic(topics, attribute))
    yield Metric("millstream_log_start_offset", "gauge", "First offset kept.", _by_partition(topics, "log_start"))
    yield Metric(
        "millstream_high_watermark",
        "gauge",
        "The high watermark: the end of the acknowledged records.",
        _by_partition(topics, "high_watermark"),
    )
    yield Metric("millstream_log_bytes", "gauge", "Bytes on disk.", _by_partition(topics, "size_bytes"))
    text = "Bytes past their retention that are kept because they are not delivered or not landed yet."
    yield Metric("millstream_log_held_bytes", "gauge", text, _held_samples(topics, now_ms))
    led = list(topics.led())
    states = [partition.state for partition in led if partition.state is not None]
    under_replicated = sum(len(state.in_sync) < len(state.replicas) for state in states)
    yield gauge("millstream_partitions_led", "Partitions that this node leads.", len(led))
    yield gauge(
        "millstream_partitions_under_replicated",
        "Partitions that this node leads with a replica out of sync.",
        under_replicated,
    )
    yield gauge(
        "millstream_partitions_under_min_in_sync",
        "Partitions that this node leads and that refuse acks=all.",
        topics.under_min_in_sync(),
    )
    yield gauge(
        "millstream_partitions_without_leader", "Partitions of the cluster without a leader.", topics.without_leader()
    )


def _by_topic(topics: Topics, attribute: str) -> Iterable[Sample]:
    for topic in topics.all():
        partitions = topics.partitions_of(topic)
        yield Sample(sum(getattr(partition, attribute) for partition in partitions), (("topic", topic.name),))


def _by_partition(topics: Topics, attribute: str) -> Iterable[Sample]:
    for partition in topics.hosted():
        yield Sample(
            getattr(partition, attribute), (("topic", partition.topic.name), ("partition", str(partition.index)))
        )


def _held_samples(topics: Topics, now_ms: int) -> Iterable[Sample]:
    for partition in topics.hosted():
        held = held_bytes(partition.log, now_ms)
        if held:
            yield Sample(held, (("topic", partition.topic.name), ("partition", str(partition.index))))
