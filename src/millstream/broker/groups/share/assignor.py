"""Sharing partitions among the members of a share group: every partition has somebody, everybody has a partition.

Several members may have the same partition. With fewer members than partitions each partition has one member; with
more, members go round the partitions. Who comes or goes changes as little as possible for the others, since each
topic's partitions are dealt out in the order of the members' ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

Assignment = Mapping[UUID, frozenset[int]]
"""Partitions by topic."""


def assign_partitions(wanted: Mapping[str, frozenset[UUID]], partitions: Mapping[UUID, int]) -> dict[str, Assignment]:
    """What each member gets of the topics that it wants."""
    shares: dict[str, dict[UUID, frozenset[int]]] = {member: {} for member in wanted}
    # Each topic begins with another member, so that topics of one partition do not all go to the first.
    turn = 0
    for topic in sorted(partitions):
        members = sorted(member for member, topics in wanted.items() if topic in topics)
        if not members:
            continue
        for member, share in _deal(members, partitions[topic], turn).items():
            shares[member][topic] = share
        turn += partitions[topic]
    return dict(shares.items())


def _deal(members: list[str], partitions: int, turn: int) -> dict[str, frozenset[int]]:
    number = len(members)
    dealt: dict[str, set[int]] = {}
    for step in range(max(number, partitions)):
        dealt.setdefault(members[(step + turn) % number], set()).add(step % partitions)
    return {member: frozenset(share) for member, share in dealt.items()}
