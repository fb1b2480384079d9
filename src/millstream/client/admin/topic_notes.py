"""What the owner of a topic should know when it is made, changed or deleted, a sentence each."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from millstream.client.admin.topic_pipelines import readings_of
from millstream.client.admin.topics import default_replication, replication_of
from millstream.core.errors import MillstreamError
from millstream.core.subscription import OWN_PREFIX
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata

_DELETING: Final = frozenset({"cleanup.policy", "retention.ms", "retention.bytes", "retention.until.landed"})
"""Settings by which messages may be deleted that somebody still waits for."""


async def notes_on_new(client: Client, topic: TopicMetadata) -> list[str]:
    """What is to be known of a topic that was made with as many copies as the node gives it."""
    # It is only for a note, so a broker that does not tell is no failure.
    with suppress(MillstreamError):
        usual = await default_replication(client, min((await client.metadata(())).nodes))
        copies = replication_of(topic)
        if usual is not None and copies < usual:
            has = "copy instead" if copies == 1 else "copies instead"
            why = "since no more nodes are alive; copies are not added when others come"
            return [f"It has {copies} {has} of {usual}, {why}."]
    return []


async def notes_on_change(
    client: Client, topic: TopicMetadata, changed: Iterable[str], partitions: int | None
) -> list[str]:
    """What is to be known when settings of a topic are changed, or it is given more partitions."""
    notes = []
    if partitions is not None and partitions > len(topic.partitions):
        notes.append("New messages of a key may go to another partition than its old ones.")
    if not _DELETING.isdisjoint(changed):
        waiting = [one for one in await readings_of(client, topic) if one.backlog is None or one.backlog.left]
        notes += [one.sentence(topic.name) for one in waiting]
    return notes


async def notes_on_deletion(client: Client, topic: TopicMetadata) -> list[str]:
    """Who reads a topic that is about to be deleted, and what they have not taken of it."""
    pipelines = [one.sentence(topic.name) for one in await readings_of(client, topic)]
    return [*pipelines, *await _subscriptions(client, topic)]


async def _subscriptions(client: Client, topic: TopicMetadata) -> list[str]:
    # Another kind of broker answers nothing that could be read.
    with suppress(MillstreamError, ValueError):
        told = await SubscriptionClient(client).describe()
        shown = [one for one in told if not one["name"].startswith(OWN_PREFIX)]
        return [_sentence(one, topic) for one in shown if topic.name in one["topics"]]
    return []


def _sentence(told: dict[str, Any], topic: TopicMetadata) -> str:
    said = f"Subscription {told['name']} reads {topic.name}"
    queues = {queue["partition"]: queue for queue in told["queues"] if queue["topic"] == topic.name}
    left, dropped, dead = (sum(one[key] for one in queues.values()) for key in ("backlog", "dropped", "dead_lettered"))
    if len(queues) < len(topic.partitions):
        # Queues that nobody has looked at since their leader began to lead are not counted.
        return f"{said}; how much of it is delivered is not known now."
    counted = ((left, "not delivered yet"), (dropped, "dropped"), (dead, "dead-lettered"))
    notes = [f"{'1 message is' if n == 1 else f'{n:,} messages are'} {how}" for n, how in counted if n]
    if notes:
        return f"{said}, of which {' and '.join(notes)}."
    return f"{said}; every message is delivered."
