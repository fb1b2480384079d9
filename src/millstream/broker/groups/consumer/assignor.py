"""How partitions are shared out among the members of a group: what an assignor is given and gives back.

An assignor is a plain function. It is told who wants which topics and what each was given last time, and says what
each shall have; every partition of a topic that somebody wants goes to exactly one of those who want it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from millstream.broker.groups.consumer.assignment import Assignment, nothing, size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one member wants, and what it was given last time."""

    member_id: str
    instance_id: str | None = None
    topics: frozenset[UUID]
    had: Assignment = field(default_factory=nothing)


Partitions = Mapping[UUID, int]

"""How many partitions each topic has; at least the topics that are wished for are in it."""


Assignor = Callable[[Sequence[Wish], Partitions], dict[str, Assignment]]

"""Shares out; the answer has an entry for every member."""


def wanted_by(wishes: Sequence[Wish]) -> dict[UUID, list[Wish]]:
    """Who wants each topic, in the order of the members."""
    found: dict[UUID, list[Wish]] = {}
    for wish in wishes:
        for topic_id in wish.topics:
            found.setdefault(topic_id, []).append(wish)
    return found


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


PASSES_MAX = 16

"""How often members with different topics are levelled at most; two passes are nearly always enough."""


Hand = dict[UUID, set[int]]

"""What a member holds while partitions are shared out."""


Free = dict[UUID, list[int]]

"""What nobody holds, by topic."""


class _Hands:
    """What every member holds while partitions are shared out."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._kept: dict[str, Assignment] = {}
        self._opened: dict[str, Hand] = {}

    def keep(self, member_id: str, kept: Assignment) -> None:
        """Begin with what a member had and still wants."""
        self._kept[member_id] = kept
        self.sizes[member_id] = size_of(kept)

    def open(self, member_id: str) -> Hand:
        """The hand of a member that gives or gets."""
        hand = self._opened.get(member_id)
        if hand is None:
            kept = self._kept[member_id].items()
            hand = self._opened[member_id] = {topic_id: set(numbers) for topic_id, numbers in kept}
        return hand

    def take(self, member_id: str, topic_id: UUID, number: int) -> None:
        """Give a partition to a member."""
        self.open(member_id).setdefault(topic_id, set()).add(number)
        self.sizes[member_id] += 1

    def result(self, member_id: str) -> Assignment:
        """What a member holds in the end; the very assignment that it had if nothing has changed."""
        hand = self._opened.get(member_id)
        if hand is None:
            return self._kept[member_id]
        return {topic_id: frozenset(numbers) for topic_id, numbers in hand.items() if numbers}


def assign_uniformly(wishes: Sequence[Wish], partitions: Partitions) -> dict[str, Assignment]:
    """Share out evenly."""
    if not wishes:
        return {}
    hands, free = _keep(wishes, partitions)
    if all(wish.topics == wishes[0].topics for wish in wishes):
        _level_all(hands, free, sum(partitions[topic_id] for topic_id in wishes[0].topics))
    else:
        _level_by_topic(hands, free, wishes, partitions)
    return {wish.member_id: hands.result(wish.member_id) for wish in wishes}


def _keep(wishes: Sequence[Wish], partitions: Partitions) -> tuple[_Hands, Free]:
    """What members had and still want, and what nobody has."""
    taken: dict[UUID, set[int]] = {}
    for topics in {wish.topics for wish in wishes}:
        taken.update((topic_id, set()) for topic_id in topics)
    hands = _Hands()
    for wish in wishes:
        kept: dict[UUID, frozenset[int]] = {}
        for topic_id, had in wish.had.items():
            others = taken.get(topic_id)
            if others is None or topic_id not in wish.topics:
                continue
            mine = had if others.isdisjoint(had) else had - others
            if mine and max(mine) >= partitions[topic_id]:
                mine = frozenset(number for number in mine if number < partitions[topic_id])
            if mine:
                kept[topic_id] = mine
                others |= mine
        hands.keep(wish.member_id, wish.had if kept == wish.had else kept)
    free = {
        topic_id: sorted(set(range(partitions[topic_id])) - numbers)
        for topic_id, numbers in sorted(taken.items())
        if len(numbers) < partitions[topic_id]
    }
    return hands, free


# Everybody wants the same topics


def _level_all(hands: _Hands, free: Free, total: int) -> None:
    sizes = hands.sizes
    share, extra = divmod(total, len(sizes))
    # One partition more goes to those who have most, so that the fewest have to move.
    by_size = sorted(sizes, key=lambda member_id: -sizes[member_id])
    quotas = {member_id: share + (number < extra) for number, member_id in enumerate(by_size)}
    for member_id in by_size:
        if sizes[member_id] > quotas[member_id]:
            for topic_id, number in _give_up(hands.open(member_id), sizes[member_id] - quotas[member_id]):
                free.setdefault(topic_id, []).append(number)
            sizes[member_id] = quotas[member_id]
    _deal(hands, free, {member_id: quotas[member_id] - size for member_id, size in sizes.items()})


def _give_up(hand: Hand, count: int) -> Iterator[tuple[UUID, int]]:
    """Take so many partitions out of a hand, always of the topic that it has most of."""
    topics = [(-len(numbers), topic_id) for topic_id, numbers in hand.items()]
    heapq.heapify(topics)
    for _ in range(count):
        negative_size, topic_id = topics[0]
        number = max(hand[topic_id])
        hand[topic_id].remove(number)
        heapq.heapreplace(topics, (negative_size + 1, topic_id))
        yield topic_id, number


def _deal(hands: _Hands, free: Free, missing: dict[str, int]) -> None:
    waiting = deque(member_id for member_id, count in missing.items() if count > 0)
    for topic_id, numbers in free.items():
        for number in sorted(numbers):
            member_id = waiting.popleft()
            hands.take(member_id, topic_id, number)
            missing[member_id] -= 1
            if missing[member_id]:
                waiting.append(member_id)


# Members want different topics


def _level_by_topic(hands: _Hands, free: Free, wishes: Sequence[Wish], partitions: Partitions) -> None:
    wanting = {topic_id: [wish.member_id for wish in found] for topic_id, found in wanted_by(wishes).items()}
    # Topics with few members for their partitions come first: the others can still even out what these cause.
    order = sorted(wanting, key=lambda topic_id: (-partitions[topic_id] / len(wanting[topic_id]), topic_id))
    for topic_id in order:
        if topic_id in free:
            _hand_out(topic_id, free[topic_id], wanting[topic_id], hands)
    for _ in range(PASSES_MAX):
        moved = [_level(topic_id, wanting[topic_id], hands) for topic_id in order if len(wanting[topic_id]) > 1]
        if not any(moved):
            return


def _hand_out(topic_id: UUID, numbers: Iterable[int], wanting: list[str], hands: _Hands) -> None:
    """Give partitions of one topic to whoever has least."""
    least = [(hands.sizes[member_id], member_id) for member_id in wanting]
    heapq.heapify(least)
    for number in numbers:
        size, member_id = least[0]
        hands.take(member_id, topic_id, number)
        heapq.heapreplace(least, (size + 1, member_id))


def _level(topic_id: UUID, wanting: list[str], hands: _Hands) -> int:
    """Move partitions of one topic from who has most to who has least, while they differ by more than one."""
    sizes = hands.sizes
    found = [sizes[member_id] for member_id in wanting]
    if max(found) - min(found) < 2:
        return 0
    least = [(size, member_id) for size, member_id in zip(found, wanting, strict=True)]
    most = [(-sizes[member_id], member_id) for member_id in wanting if hands.open(member_id).get(topic_id)]
    heapq.heapify(least)
    heapq.heapify(most)
    moved = 0
    while most:
        low_size, low = _current(least, sizes, sign=1)
        high_size, high = _current(most, sizes, sign=-1)
        if -high_size - low_size < 2:
            break
        numbers = hands.open(high)[topic_id]
        number = max(numbers)
        numbers.remove(number)
        sizes[high] -= 1
        hands.take(low, topic_id, number)
        moved += 1
        if not numbers:
            heapq.heappop(most)
    return moved


def _current(heap: list[tuple[int, str]], sizes: dict[str, int], *, sign: int) -> tuple[int, str]:
    """The first entry of a heap whose sizes may have changed since they were put in."""
    while (now := sign * sizes[heap[0][1]]) != heap[0][0]:
        heapq.heapreplace(heap, (now, heap[0][1]))
    return heap[0]
