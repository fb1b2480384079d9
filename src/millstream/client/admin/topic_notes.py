"""Notes for the owner of a topic when it is created, changed or deleted, a sentence each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from millstream.client.admin.backlog import Backlog, Backlogs, Reader, reader_of
from millstream.client.admin.mirrors import MirrorClient
from millstream.client.admin.pipelines import PipelineClient, pipeline_of
from millstream.client.admin.topic_schema import topic_schemas
from millstream.client.admin.topics import default_replication, find_topic
from millstream.core.errors import MillstreamError, TopicNotAuthorized
from millstream.core.pipeline import PipelineKind
from millstream.core.subscription import DEAD_LETTER_TOPIC, OWN_PREFIX
from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALIDATE, SCHEMA_VALUE, VALIDATE_OFF
from millstream.protocol.private.subscriptions import SubscriptionClient, open_letters
from millstream.protocol.wire.admin_requests import topic_configs
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.group_offsets import committed_by_group, list_groups


class ReadingPipeline(NamedTuple):
    """A pipeline that reads a topic, and its backlog; None if unknown."""

    reader: Reader
    backlog: Backlog | None

    def sentence(self, topic: str) -> str:
        """Return the warning for someone who is about to delete the topic."""
        lands = self.reader.kind is PipelineKind.LAND
        verb, done = ("lands", "landed") if lands else ("reads", "read")
        subject = f"Pipeline {self.reader.name} {verb} {topic}"
        if self.backlog is None:
            return f"{subject}; the number of messages that are not {done} yet is unknown."
        left = self.backlog.left
        if left:
            messages = "1 message is" if left == 1 else f"{left:,} messages are"
            return f"{subject}, of which {messages} not {done} yet."
        which = "message since it began" if self.reader.from_latest else "message"
        return f"{subject}; every {which} is {done}."


async def pipelines_reading(client: Client, topic: TopicMetadata) -> list[ReadingPipeline]:
    """Return the pipelines that read a topic, by name; empty if unknown."""
    # Brokers other than Millstream return nothing readable.
    with suppress(MillstreamError, ValueError):
        pipelines = PipelineClient(client)
        described_pipelines = await pipelines.describe()
        # Rules are returned only for pipelines that are named.
        routes = [described["name"] for described in described_pipelines if described["kind"] == PipelineKind.ROUTE]
        routes_by_name = (
            {described["name"]: described for described in await pipelines.describe(routes)} if routes else {}
        )
        declared = [
            reader_of(pipeline_of(routes_by_name.get(described["name"], described)))
            for described in described_pipelines
        ]
        readers = [setting for setting in declared if setting is not None and setting.takes(topic)]
        backlogs: Mapping[str, Backlog] = {}
        with suppress(MillstreamError):
            backlogs = await Backlogs(client).in_topic(readers, topic)
        return [ReadingPipeline(reader, backlogs.get(reader.name)) for reader in readers]
    return []


_DELETING: Final = frozenset({"cleanup.policy", "retention.ms", "retention.bytes", "retention.until.landed"})
"""Settings that may delete messages which are still needed."""


async def creation_notes(client: Client, topic: TopicMetadata) -> list[str]:
    """Note if the topic has fewer replicas than the node's default."""
    # This is only a note, so a broker that does not respond is not an error.
    with suppress(MillstreamError):
        usual = await default_replication(client, min((await client.metadata(())).nodes))
        copies = topic.replication
        if usual is not None and copies < usual:
            has = "copy instead" if copies == 1 else "copies instead"
            reason = "because only that many nodes are running; replicas are not added when others join"
            return [f"It has {copies} {has} of {usual}, {reason}."]
    return []


async def schema_notes(client: Client, topic: str, changed: Mapping[str, str | None]) -> list[str]:
    """Note the subjects of a topic's changed schema rule that have no schema yet."""
    if not changed.keys() & {SCHEMA_KEY, SCHEMA_VALUE, SCHEMA_VALIDATE}:
        return []
    # Brokers other than Millstream have no registry.
    with suppress(MillstreamError):
        settings = changed
        # Those who may create a topic may not see the settings that it has besides.
        with suppress(TopicNotAuthorized):
            settings = {name: config.value for name, config in (await topic_configs(client, topic)).items()}
        rule = await topic_schemas(client, settings)
        if rule is None or rule["validate"] == VALIDATE_OFF:
            return []
        missing = [rule[name]["subject"] for name in ("key", "value") if name in rule and not rule[name]["versions"]]
        return [
            f"Subject {subject} has no schema yet: {topic} refuses messages until one is registered."
            for subject in missing
        ]
    return []


async def change_notes(
    client: Client, topic: TopicMetadata, changed: Iterable[str], partitions: int | None
) -> list[str]:
    notes = []
    if partitions is not None and partitions > len(topic.partitions):
        notes.append("New messages of a key may go to a different partition than earlier ones.")
    if not _DELETING.isdisjoint(changed):
        waiting = [
            pipeline
            for pipeline in await pipelines_reading(client, topic)
            if pipeline.backlog is None or pipeline.backlog.left
        ]
        notes += [pipeline.sentence(topic.name) for pipeline in waiting]
    return notes


async def deletion_notes(client: Client, topic: TopicMetadata) -> list[str]:
    """Return the readers of a topic that is about to be deleted, and the number of messages they have not read."""
    pipelines = [pipeline.sentence(topic.name) for pipeline in await pipelines_reading(client, topic)]
    return [*pipelines, *await _subscriptions(client, topic)]


async def topic_readers(client: Client, topic: str) -> list[dict[str, str]] | None:
    """Return the subscriptions, pipelines and consumer groups that read a topic; None if unknown."""
    with suppress(MillstreamError, ValueError):
        topic_metadata = await find_topic(client, topic)
        subscribed = [
            subscription["name"]
            for subscription in await SubscriptionClient(client).describe()
            if topic in subscription["topics"]
        ]
        pipelines = [pipeline.reader.name for pipeline in await pipelines_reading(client, topic_metadata)]
        names = [name for name, _, _ in await list_groups(client)]
        committed = await committed_by_group(client, names) if names else {}
        groups = [
            name
            for name, offsets in committed.items()
            if not isinstance(offsets, MillstreamError) and any(place.topic == topic for place in offsets)
        ]
        listed = {"subscription": subscribed, "pipeline": pipelines, "group": groups}
        return [{"kind": kind, "name": name} for kind, names in listed.items() for name in sorted(names)]
    return None


async def topic_writers(client: Client, topic: str) -> list[dict[str, str]] | None:
    """Return the pipelines that write to a topic, and the subscriptions that send dead letters there; None if unknown.

    Other clients write without being declared.
    """
    with suppress(MillstreamError, ValueError):
        client_of = PipelineClient(client)
        names = [described["name"] for described in await client_of.describe()]
        declared = [pipeline_of(described) for described in await client_of.describe(names)] if names else []
        pipelines = [
            setting.name for setting in declared if any(topic in targets for targets in setting.flows().values())
        ]
        subscriptions = [
            subscription["name"]
            for subscription in await SubscriptionClient(client).describe()
            if subscription["settings"].get(DEAD_LETTER_TOPIC) == topic
        ]
        listed = {"pipeline": pipelines, "dead letters of": subscriptions}
        return [{"kind": kind, "name": name} for kind, names in listed.items() for name in sorted(names)]
    return None


async def topic_original(client: Client, topic: str) -> dict[str, str] | None:
    """Return the mirror and the original of a copy; None if the topic is not a copy, or that is unknown."""
    with suppress(MillstreamError, ValueError):
        return await MirrorClient(client).original_of(topic)
    return None


async def _subscriptions(client: Client, topic: TopicMetadata) -> list[str]:
    # Brokers other than Millstream return nothing readable.
    with suppress(MillstreamError, ValueError):
        described = await SubscriptionClient(client).describe()
        shown = [subscription for subscription in described if not subscription["name"].startswith(OWN_PREFIX)]
        readers = [subscription for subscription in shown if topic.name in subscription["topics"]]
        return [_sentence(subscription, topic, await _open_letters(client, subscription)) for subscription in readers]
    return []


async def _open_letters(client: Client, described: dict[str, Any]) -> float:
    """Return how many letters of a subscription are open at most."""
    # The queues count all messages that were ever dead-lettered, those that have been redriven or purged included.
    with suppress(MillstreamError):
        return await open_letters(client, described["settings"][DEAD_LETTER_TOPIC])
    return math.inf


def _sentence(described: dict[str, Any], topic: TopicMetadata, letters_max: float) -> str:
    subject = f"Subscription {described['name']} reads {topic.name}"
    queues = {queue["partition"]: queue for queue in described["queues"] if queue["topic"] == topic.name}
    left, dropped, dead = (
        sum(queue[key] for queue in queues.values()) for key in ("backlog", "dropped", "dead_lettered")
    )
    if len(queues) < len(topic.partitions):
        # Queues that were not used since their leader was elected are not counted.
        return f"{subject}; the number of messages that are not delivered yet is unknown."
    counted = ((left, "not delivered yet"), (dropped, "dropped"), (min(dead, letters_max), "dead-lettered"))
    notes = [f"{'1 message is' if n == 1 else f'{n:,} messages are'} {how}" for n, how in counted if n]
    if notes:
        return f"{subject}, of which {' and '.join(notes)}."
    return f"{subject}; every message is delivered."
