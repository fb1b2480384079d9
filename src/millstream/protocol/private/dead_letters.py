"""Open dead letters of a topic, counted before it is deleted."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.core.errors import CoordinatorUnavailable, UnknownGroup
from millstream.core.subscription import LETTERS_PREFIX
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client


async def open_letters(client: Client, topic: str) -> int:
    """Count the open letters of a topic; 0 if it does not exist.

    Raises `CoordinatorUnavailable` while a partition has no leader, which alone knows its letters.
    """
    found = (await client.metadata([topic])).topics.get(topic)
    partitions = set() if found is None else set(found.partitions)
    try:
        (described,) = await SubscriptionClient(client).describe(
            [LETTERS_PREFIX + topic], [(topic, index) for index in partitions]
        )
    except UnknownGroup:
        return await stored_letters(client, topic)
    unreached = sorted(partitions - {queue["partition"] for queue in described["queues"]})
    if unreached:
        raise CoordinatorUnavailable(
            f"the open dead letters of topic {topic!r} cannot be counted: no leader answers for partitions "
            f"{', '.join(map(str, unreached))} now; try again when they have a leader"
        )
    return sum(queue["backlog"] for queue in described["queues"])


async def stored_letters(client: Client, topic: str) -> int:
    """Count all letters of a topic; valid while none has been redriven or purged."""
    found = (await client.metadata([topic])).topics.get(topic)
    if found is None:
        return 0
    partitions = list(found.partitions)
    first = await client.list_offsets(topic, dict.fromkeys(partitions, -2))
    end = await client.list_offsets(topic, dict.fromkeys(partitions, -1))
    return sum(end[index].offset - first[index].offset for index in partitions)


def open_letters_error(topic: str, letters: int, subscriptions: Sequence[str]) -> str:
    """Say why a dead letter topic is not deleted."""
    owners = f" of {', '.join(subscriptions)}" if subscriptions else ""
    noun, pronoun = ("letter", "it") if letters == 1 else ("letters", "them")
    return (
        f"topic {topic!r} holds {letters:,} open dead {noun}{owners}; redrive or purge {pronoun} first, or "
        f"delete {pronoun} too with millstream topic delete {topic} --force"
    )
