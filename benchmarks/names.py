"""What the servers are called in every table, and the order in which they stand there."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT, MILLSTREAM, KAFKA = "limit", "millstream", "kafka"
BARE, DISCARD = "millstream-bare", "client-alone"
_FIRST = (LIMIT, MILLSTREAM, KAFKA, BARE)


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once: first those that are in every line, last the client alone, between them the other peers."""
    known = {name: place for place, name in enumerate(_FIRST)}
    return sorted(set(names), key=lambda name: (name == DISCARD, known.get(name, len(known)), name))
