"""Subscriptions as one row each, and their start and seek positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.client.admin.position import Kind, parse_position
from millstream.core.errors import InvalidRequest
from millstream.core.subscription import BY_DURATION, PAUSED, START, shown


def summary_of(described: dict[str, Any]) -> dict[str, Any]:
    """Return a subscription as one row."""
    summed = ("backlog", "leased", "parked", "dead_lettered", "dropped")
    sums = {key: sum(queue[key] for queue in described["queues"]) for key in summed}
    return {
        "subscription": described["name"],
        "topics": described["topics"],
        **sums,
        "paused": described["settings"][PAUSED] == "true",
    }


def differences(described: dict[str, Any], topics: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """Return how an existing subscription differs from what is requested, a phrase each."""
    known: dict[str, str] = described["settings"]
    found = [
        f"{name} is {known.get(name)!r}, not {value!r}"
        for name, value in sorted(shown(settings).items())
        # Its original start is no difference for a subscription that has started.
        if name != START and known.get(name) != value
    ]
    if set(topics) != set(described["topics"]):
        found.append(f"its topics are {', '.join(sorted(described['topics']))}, not {', '.join(sorted(topics))}")
    return found


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
