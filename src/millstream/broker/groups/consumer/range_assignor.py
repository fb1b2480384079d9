"""The assignor `range`: of each topic, every member gets one run of neighbouring partitions.

Members stand in the order of their instance ids, then their member ids, so that partition N of topics with the same
number of partitions goes to the same member, and the streams of such topics can be joined. What a member had before
does not count: only static members keep their place when others come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millstream.broker.groups.consumer.assignment import Assignment
from millstream.broker.groups.consumer.assignor import Partitions, Wish, wanted_by


def assign_ranges(wishes: Sequence[Wish], partitions: Partitions) -> dict[str, Assignment]:
    """Share out each topic by itself."""
    given: dict[str, dict[UUID, frozenset[int]]] = {wish.member_id: {} for wish in wishes}
    for topic_id, wanting in wanted_by(sorted(wishes, key=_place)).items():
        share, extra = divmod(partitions[topic_id], len(wanting))
        begin = 0
        for number, wish in enumerate(wanting):
            end = begin + share + (number < extra)
            if end > begin:
                given[wish.member_id][topic_id] = frozenset(range(begin, end))
            begin = end
    return dict(given)


def _place(wish: Wish) -> tuple[bool, str, str]:
    return wish.instance_id is None, wish.instance_id or "", wish.member_id
