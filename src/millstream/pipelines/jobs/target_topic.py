"""Topics that pipelines write to: made when they are missing, and ordinary topics from then on."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from millstream.core.errors import TopicExists
from millstream.pipelines.source.link import Link
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

AT_ONCE_MAX: Final = 100
BY_BROKER: Final = -1
"""Leaves a number to the broker."""

_TIMEOUT: Final = timedelta(seconds=60)


def make_topics(link: Link, names: Iterable[str], partitions: int = BY_BROKER) -> None:
    """Make the topics that are missing; whoever wants other settings for one makes it before, or alters it."""
    wanted = sorted(names)
    there = link.call(link.client.metadata(wanted)).topics
    missing = [name for name in wanted if name not in there]
    for start in range(0, len(missing), AT_ONCE_MAX):
        link.call(_create(link.client, missing[start : start + AT_ONCE_MAX], partitions))


async def _create(client: Client, names: list[str], partitions: int) -> None:
    from kio.schema.create_topics.v7 import request

    messages: Any = request
    topics = tuple(
        messages.CreatableTopic(
            name=name, num_partitions=partitions, replication_factor=BY_BROKER, assignments=(), configs=()
        )
        for name in names
    )
    answer = await client.send(None, messages.CreateTopicsRequest(topics=topics, timeout=_TIMEOUT))
    for made in answer.topics:
        if made.error_code:
            error = error_from_code(made.error_code, made.error_message, about=f"create topic {made.name!r}")
            # Somebody else may have made it at the same time.
            if not isinstance(error, TopicExists):
                raise error
