"""Subscriptions as one row each, and their start and seek positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from millstream.client.admin.position import Kind, Position, parse_position
from millstream.client.admin.topics import offsets_at
from millstream.core.errors import InvalidRequest
from millstream.core.subscription import BY_DURATION, PAUSED, START, without_secrets
from millstream.protocol.wire.client import Client


def summary_of(described: dict[str, Any]) -> dict[str, Any]:
    summed = ("backlog", "leased", "parked", "dead_lettered", "dropped")
    sums = {key: sum(queue[key] for queue in described["queues"]) for key in summed}
    return {
        "subscription": described["name"],
        "topics": described["topics"],
        "has_hidden_topics": described["has_hidden_topics"],
        **sums,
        "paused": described["settings"][PAUSED] == "true",
    }


def push_problems(described: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the subscriptions whose endpoint does not accept messages from some nodes, each with a sentence."""
    problems = []
    for subscription in described:
        failing = [row for row in subscription.get("push", ()) if row["state"] in _PUSH_FAILING]
        if failing:
            states = ", ".join(f"{row['state']} (node {row['node']})" for row in failing)
            text = f"Push of subscription {subscription['name']} is {states}"
            reason = next((row["last_error"] for row in failing if row["last_error"]), "")
            problems.append((subscription["name"], f"{text}: {reason[:200]}." if reason else f"{text}."))
    return problems


_PUSH_FAILING: Final = ("failing", "down", "parked")


def topics_text(described: Mapping[str, Any]) -> str:
    """Return the topics of a subscription or of its row, and whether it has others."""
    hidden = ["(topics that you may not describe)"] if described["has_hidden_topics"] else []
    return ", ".join([*described["topics"], *hidden])


def differences(
    described: dict[str, Any], topics: Sequence[str], settings: Mapping[str, str], *, spelled: Mapping[str, str]
) -> list[str]:
    """Return the differences of an existing subscription from the requested one, a phrase each.

    `spelled` has the caller's names of settings, such as flags, for which times are in seconds.
    """
    known: dict[str, str] = described["settings"]

    def phrase(name: str, value: str) -> str:
        if name not in spelled:
            return f"{name} is {known.get(name)!r}, not {value!r}"
        before, after = (
            f"{int(text) / 1000:g} s" if name.endswith(".ms") and text.isdigit() else repr(text)
            for text in (known.get(name, ""), value)
        )
        return f"{spelled[name]} is {before}, not {after}"

    phrases = [
        phrase(name, value)
        for name, value in sorted(without_secrets(settings).items())
        # Its original start is no difference for a subscription that has started.
        if name != START and known.get(name) != value
    ]
    if set(topics) != set(described["topics"]) or described["has_hidden_topics"]:
        known_topics = {**described, "topics": sorted(described["topics"])}
        phrases.append(f"its topics are {topics_text(known_topics)}, not {', '.join(sorted(topics))}")
    return phrases


def start_of(text: str) -> str:
    """Convert a start position to the setting's syntax."""
    if text.startswith(BY_DURATION):
        return text
    place = place_of(text)
    if place.startswith("offset:"):
        raise InvalidRequest("a subscription starts at start, end or a time; seek to an offset afterwards")
    return place


def place_of(to: str) -> str:
    """Convert a position to the seek request's syntax."""
    position = parse_position(to)
    if position.kind is Kind.OFFSET:
        return f"offset:{position.value}"
    if position.kind is Kind.TIME:
        return f"at:{position.value}"
    return "earliest" if position.kind is Kind.START else "latest"


class SeekPlan(NamedTuple):
    topic: str
    partition: int
    before: int
    """The oldest message that is not finished."""
    after: int
    again: int
    """Offsets that are delivered again."""
    skipped: int
    """Offsets that are not delivered any more."""


async def plan_seek(client: Client, described: dict[str, Any], position: Position) -> list[SeekPlan]:
    """Return the new position of each queue after a seek, and the messages that it redelivers or skips."""
    oldest = {(queue["topic"], queue["partition"]): queue["oldest"] for queue in described["queues"]}
    plans: list[SeekPlan] = []
    for topic in described["topics"]:
        known = (await client.metadata([topic])).topics.get(topic)
        if known is None:
            continue
        for partition, after in sorted((await offsets_at(client, topic, list(known.partitions), position)).items()):
            before = oldest.get((topic, partition), after)
            plans.append(SeekPlan(topic, partition, before, after, max(0, before - after), max(0, after - before)))
    return plans
