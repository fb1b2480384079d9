"""Subscriptions as they are listed, and the places that people name to begin or go on at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.client.admin.position import Kind, parse_position
from millstream.core.errors import InvalidRequest
from millstream.core.subscription import BY_DURATION, PAUSED, START, shown


def summary_of(described: dict[str, Any]) -> dict[str, Any]:
    """A subscription in one line."""
    summed = ("backlog", "leased", "parked", "dead_lettered", "dropped")
    sums = {key: sum(queue[key] for queue in described["queues"]) for key in summed}
    return {
        "subscription": described["name"],
        "topics": described["topics"],
        **sums,
        "paused": described["settings"][PAUSED] == "true",
    }


def differences(described: dict[str, Any], topics: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """Where a subscription that exists differs from what is asked for, a phrase each."""
    known: dict[str, str] = described["settings"]
    found = [
        f"{name} is {known.get(name)!r}, not {value!r}"
        for name, value in sorted(shown(settings).items())
        # Where it began is no difference to one that has begun.
        if name != START and known.get(name) != value
    ]
    if set(topics) != set(described["topics"]):
        found.append(f"its topics are {', '.join(sorted(described['topics']))}, not {', '.join(sorted(topics))}")
    return found


def start_of(text: str) -> str:
    """Where a subscription begins, as its setting says it."""
    if text.startswith(BY_DURATION):
        return text
    place = place_of(text)
    if place.startswith("offset:"):
        raise InvalidRequest("a subscription begins at start, end or a time; seek to an offset afterwards")
    return place


def place_of(to: str) -> str:
    """Where a subscription goes on, as the request to seek says it."""
    position = parse_position(to)
    if position.kind is Kind.OFFSET:
        return f"offset:{position.value}"
    if position.kind is Kind.TIME:
        return f"at:{position.value}"
    return "earliest" if position.kind is Kind.START else "latest"
