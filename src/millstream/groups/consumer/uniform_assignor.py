"""The assignor `uniform`: every member gets as many partitions as every other, as far as its topics allow.

Balance comes first: where all want the same topics, no two members differ by more than one partition. Then members
keep what they had. Then the partitions of each topic are spread: they are dealt out one by one, and who has to give
up some gives up of the topic that it has most of.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from uuid import UUID

from millstream.groups.consumer.assignment import Assignment
from millstream.groups.consumer.assignor import Partitions, Wish, wanted_by

PASSES_MAX = 16
"""How often members with different topics are levelled at most; two passes are nearly always enough."""

Hand = dict[UUID, set[int]]
"""What a member holds while partitions are shared out."""


def assign_uniformly(wishes: Sequence[Wish], partitions: Partitions) -> dict[str, Assignment]:
    """Share out evenly."""
    if not wishes:
        return {}
    hands, free = _keep(wishes, partitions)
    same = all(wish.topics == wishes[0].topics for wish in wishes)
    if same:
        _level_all(hands, free, sum(partitions[topic_id] for topic_id in wishes[0].topics))
    else:
        _level_by_topic(hands, free, wishes, partitions)
    return {wish.member_id: _result(wish, hands[wish.member_id]) for wish in wishes}


def _keep(wishes: Sequence[Wish], partitions: Partitions) -> tuple[dict[str, Hand], dict[UUID, list[int]]]:
    """What members had and still want, and what nobody has, both by topic."""
    taken: dict[UUID, set[int]] = {topic_id: set() for wish in wishes for topic_id in wish.topics}
    hands: dict[str, Hand] = {}
    for wish in wishes:
        hand = hands[wish.member_id] = {}
        for topic_id, had in wish.had.items():
            if topic_id not in wish.topics:
                continue
            limit = partitions[topic_id]
            kept = {number for number in had if number < limit} - taken[topic_id]
            if kept:
                hand[topic_id] = kept
                taken[topic_id] |= kept
    free = {
        topic_id: sorted(set(range(partitions[topic_id])) - numbers)
        for topic_id, numbers in sorted(taken.items())
        if len(numbers) < partitions[topic_id]
    }
    return hands, free


def _result(wish: Wish, hand: Hand) -> Assignment:
    """The hand as an assignment; the very one that the member had if nothing has changed."""
    result = {topic_id: frozenset(numbers) for topic_id, numbers in hand.items() if numbers}
    return wish.had if result == wish.had else result


def _size(hand: Hand) -> int:
    return sum(map(len, hand.values()))


# Everybody wants the same topics


def _level_all(hands: dict[str, Hand], free: dict[UUID, list[int]], total: int) -> None:
    share, extra = divmod(total, len(hands))
    # One partition more goes to those who have most, so that the fewest have to move.
    by_size = sorted(hands, key=lambda member_id: -_size(hands[member_id]))
    quotas = {member_id: share + (number < extra) for number, member_id in enumerate(by_size)}
    for member_id in by_size:
        for topic_id, number in _give_up(hands[member_id], _size(hands[member_id]) - quotas[member_id]):
            free.setdefault(topic_id, []).append(number)
    _deal(hands, free, {member_id: quotas[member_id] - _size(hands[member_id]) for member_id in hands})


def _give_up(hand: Hand, count: int) -> Iterator[tuple[UUID, int]]:
    """Take so many partitions out of a hand, always of the topic that it has most of."""
    if count <= 0:
        return
    topics = [(-len(numbers), topic_id) for topic_id, numbers in hand.items()]
    heapq.heapify(topics)
    for _ in range(count):
        negative_size, topic_id = topics[0]
        number = max(hand[topic_id])
        hand[topic_id].remove(number)
        heapq.heapreplace(topics, (negative_size + 1, topic_id))
        yield topic_id, number


def _deal(hands: dict[str, Hand], free: dict[UUID, list[int]], missing: dict[str, int]) -> None:
    waiting = deque(member_id for member_id, count in missing.items() if count > 0)
    for topic_id, number in _one_by_one(free):
        member_id = waiting.popleft()
        hands[member_id].setdefault(topic_id, set()).add(number)
        missing[member_id] -= 1
        if missing[member_id]:
            waiting.append(member_id)


def _one_by_one(free: dict[UUID, list[int]]) -> Iterable[tuple[UUID, int]]:
    return ((topic_id, number) for topic_id, numbers in free.items() for number in sorted(numbers))


# Members want different topics


def _level_by_topic(
    hands: dict[str, Hand], free: dict[UUID, list[int]], wishes: Sequence[Wish], partitions: Partitions
) -> None:
    loads = {member_id: _size(hand) for member_id, hand in hands.items()}
    wanting = {topic_id: [wish.member_id for wish in found] for topic_id, found in wanted_by(wishes).items()}
    # Topics with few members for their partitions come first: the others can still even out what these cause.
    order = sorted(wanting, key=lambda topic_id: (-partitions[topic_id] / len(wanting[topic_id]), topic_id))
    for topic_id in order:
        _hand_out(topic_id, free.get(topic_id, []), wanting[topic_id], hands, loads)
    for _ in range(PASSES_MAX):
        moved = [_level(topic_id, wanting[topic_id], hands, loads) for topic_id in order if len(wanting[topic_id]) > 1]
        if not any(moved):
            return


def _hand_out(
    topic_id: UUID, numbers: Iterable[int], wanting: list[str], hands: dict[str, Hand], loads: dict[str, int]
) -> None:
    """Give partitions of one topic to whoever has least."""
    least = [(loads[member_id], member_id) for member_id in wanting]
    heapq.heapify(least)
    for number in numbers:
        load, member_id = least[0]
        hands[member_id].setdefault(topic_id, set()).add(number)
        loads[member_id] = load + 1
        heapq.heapreplace(least, (load + 1, member_id))


def _level(topic_id: UUID, wanting: list[str], hands: dict[str, Hand], loads: dict[str, int]) -> int:
    """Move partitions of one topic from who has most to who has least, while they differ by more than one."""
    least = [(loads[member_id], member_id) for member_id in wanting]
    most = [(-loads[member_id], member_id) for member_id in wanting if hands[member_id].get(topic_id)]
    heapq.heapify(least)
    heapq.heapify(most)
    moved = 0
    while most:
        low_load, low = _current(least, loads, sign=1)
        high_load, high = _current(most, loads, sign=-1)
        if -high_load - low_load < 2:
            break
        numbers = hands[high][topic_id]
        number = max(numbers)
        numbers.remove(number)
        hands[low].setdefault(topic_id, set()).add(number)
        loads[high] -= 1
        loads[low] += 1
        moved += 1
        if not numbers:
            heapq.heappop(most)
    return moved


def _current(heap: list[tuple[int, str]], loads: dict[str, int], *, sign: int) -> tuple[int, str]:
    """The first entry of a heap whose loads may have changed since they were put in."""
    while (now := sign * loads[heap[0][1]]) != heap[0][0]:
        heapq.heapreplace(heap, (now, heap[0][1]))
    return heap[0]
