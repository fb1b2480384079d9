"""The names of the servers in all tables, and their order."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT, MILLSTREAM, KAFKA = "limit", "millstream", "kafka"
BARE, DISCARD = "millstream-bare", "client-alone"
_FIRST = (LIMIT, MILLSTREAM, KAFKA, BARE)


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once: first the servers of every line, then other peers, last the client alone."""
    known = {name: place for place, name in enumerate(_FIRST)}
    return sorted(set(names), key=lambda name: (name == DISCARD, known.get(name, len(known)), name))
