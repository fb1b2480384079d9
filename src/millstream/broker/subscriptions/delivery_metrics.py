"""Metrics of subscriptions by name, summed over the queues that this node leads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final
from uuid import UUID

from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.delivery import Delivery, age_ms
from millstream.broker.subscriptions.lease import DeltaKind
from millstream.core.clock import Clock
from millstream.core.metric import Kind, Metric, Sample
from millstream.core.subscription import LETTERS_PREFIX

Count = Callable[[Delivery], float]

_COUNTED: Final[tuple[tuple[str, Kind, str, Count], ...]] = (
    ("backlog", "gauge", "Unfinished messages (approximate).", lambda one: one.backlog),
    ("available", "gauge", "Messages waiting for a worker (approximate).", lambda one: one.available),
    ("leased", "gauge", "Messages held by workers.", lambda one: one.queue.counts.leased),
    (
        "parked",
        "gauge",
        "Messages waiting for a time, or behind an earlier message of their key.",
        lambda one: one.queue.counts.parked + one.queue.counts.blocked,
    ),
    ("rejecting", "gauge", "Messages on their way to the dead letter topic.", lambda one: one.queue.counts.rejecting),
    (
        "refused_letters",
        "gauge",
        "Messages that the dead letter topic refuses, as they are too large for it or cannot be read.",
        lambda one: len(one.refused_letters),
    ),
    ("workers_waiting", "gauge", "Workers waiting for a message.", lambda one: one.waiting),
    ("accepted_total", "counter", "Messages accepted.", lambda one: one.queue.counter(DeltaKind.ACCEPTED)),
    ("retried_total", "counter", "Deliveries after the first.", lambda one: one.queue.redelivered),
    ("expired_total", "counter", "Leases that expired.", lambda one: one.queue.counter(DeltaKind.EXPIRED)),
    (
        "dead_lettered_total",
        "counter",
        "Messages moved to the dead letter topic.",
        lambda one: one.queue.counter(DeltaKind.DEAD_LETTERED),
    ),
    (
        "dropped_total",
        "counter",
        "Messages dropped.",
        lambda one: one.queue.counter(DeltaKind.DROPPED),
    ),
    ("damaged_total", "counter", "Messages skipped because they are lost or unreadable.", lambda one: one.damaged),
    (
        "filtered_total",
        "counter",
        "Messages excluded by the filter.",
        lambda one: one.queue.counter(DeltaKind.FILTERED),
    ),
)

NameOf = Callable[[UUID], str | None]


def delivery_metrics(deliveries: Iterable[Delivery], name_of: NameOf, clock: Clock) -> Iterator[Metric]:
    """Yield every metric of every subscription with open queues."""
    by_name: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        name = name_of(delivery.key.subscription_id)
        # Dead letters wait for people rather than workers, and have separate metrics.
        if name is not None and not name.startswith(LETTERS_PREFIX):
            by_name.setdefault(name, []).append(delivery)
    for suffix, kind, help_text, count in _COUNTED:
        samples = [Sample(sum(map(count, group)), (("subscription", name),)) for name, group in by_name.items()]
        yield Metric(f"millstream_subscription_{suffix}", kind, help_text, samples)
    now_ms = clock.now_ms()
    ages = [
        Sample(max((one.oldest_age_ms(now_ms) for one in group), default=0) / 1000, (("subscription", name),))
        for name, group in by_name.items()
    ]
    yield Metric("millstream_subscription_oldest_age_seconds", "gauge", "Age of the oldest unfinished message.", ages)
    latencies = [
        Sample(one.latency.distribution(), (("subscription", name), ("topic", one.topic), ("partition", one.index)))
        for name, group in by_name.items()
        for one in group
    ]
    yield Metric(
        "millstream_subscription_delivery_seconds",
        "histogram",
        "Time from a batch's timestamp to the first delivery of its messages.",
        latencies,
    )


def letter_metrics(partitions: Iterable[tuple[Partition, Delivery | None]], clock: Clock) -> Iterator[Metric]:
    """Yield the open letters of dead letter topics; all letters are open until their topic has a queue."""
    now_ms = clock.now_ms()
    opened: dict[str, int] = {}
    ages: dict[str, int] = {}
    for partition, delivery in partitions:
        topic = partition.topic.name
        letters = partition.high_watermark - partition.log_start if delivery is None else delivery.backlog
        oldest = partition.log_start if delivery is None else delivery.queue.oldest
        opened[topic] = opened.get(topic, 0) + letters
        ages[topic] = max(ages.get(topic, 0), age_ms(partition, oldest, now_ms))
    yield Metric(
        "millstream_dead_letters_open",
        "gauge",
        "Dead letters that were neither redriven nor purged.",
        [Sample(count, (("topic", topic),)) for topic, count in opened.items()],
    )
    yield Metric(
        "millstream_dead_letters_oldest_age_seconds",
        "gauge",
        "Age of the oldest open dead letter.",
        [Sample(age / 1000, (("topic", topic),)) for topic, age in ages.items()],
    )
