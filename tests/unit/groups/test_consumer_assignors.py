"""Assignors: every partition goes to exactly one member that subscribes to it, evenly, and with few moves."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.groups.consumer.assignor import MemberSubscription, assign_ranges, assign_uniformly
from millstream.broker.groups.consumer.member import Assignment, partitions_in, size_of

TOPICS = [UUID(int=number) for number in range(1, 7)]
Given = dict[str, Assignment]

sizes = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 12), min_size=1)


@st.composite
def subscriptions_of_members(draw: st.DrawFn, partitions: dict[UUID, int], *, same: bool) -> list[MemberSubscription]:
    topics = sorted(partitions)
    common_topics = frozenset(draw(st.sets(st.sampled_from(topics), min_size=1)))
    made = []
    for number in range(draw(st.integers(1, 9))):
        own = common_topics if same else frozenset(draw(st.sets(st.sampled_from(topics))))
        made.append(MemberSubscription(member_id=f"member-{number}", topics=own))
    return made


@st.composite
def situations(draw: st.DrawFn, *, same: bool = False) -> tuple[list[MemberSubscription], dict[UUID, int]]:
    partitions = draw(sizes)
    return draw(subscriptions_of_members(partitions, same=same)), partitions


def check_everything_is_given_once(
    subscriptions_of_members: list[MemberSubscription], partitions: dict[UUID, int], given: Given
) -> None:
    assert given.keys() == {wish.member_id for wish in subscriptions_of_members}
    subscribed = {topic_id for wish in subscriptions_of_members for topic_id in wish.topics}
    expected = {(topic_id, number) for topic_id in subscribed for number in range(partitions[topic_id])}
    handed_out = [place for assignment in given.values() for place in partitions_in(assignment)]
    assert len(handed_out) == len(set(handed_out))
    assert set(handed_out) == expected
    for wish in subscriptions_of_members:
        assert given[wish.member_id].keys() <= wish.topics
        assert all(given[wish.member_id].values())


def moves(before: Given, after: Given) -> int:
    old = {place: member_id for member_id, assignment in before.items() for place in partitions_in(assignment)}
    new = {place: member_id for member_id, assignment in after.items() for place in partitions_in(assignment)}
    return sum(1 for place, member_id in new.items() if place in old and old[place] != member_id)


def again(subscriptions_of_members: list[MemberSubscription], given: Given) -> list[MemberSubscription]:
    return [dataclasses.replace(wish, previous=given.get(wish.member_id, {})) for wish in subscriptions_of_members]


@given(situations())
def test_uniform_assigns_every_partition_to_one_subscriber(
    situation: tuple[list[MemberSubscription], dict[UUID, int]],
) -> None:
    members, partitions = situation
    check_everything_is_given_once(members, partitions, assign_uniformly(members, partitions))


@given(situations())
def test_range_assigns_every_partition_to_one_subscriber(
    situation: tuple[list[MemberSubscription], dict[UUID, int]],
) -> None:
    members, partitions = situation
    check_everything_is_given_once(members, partitions, assign_ranges(members, partitions))


@given(situations(same=True))
def test_uniform_is_even_for_equal_subscriptions(situation: tuple[list[MemberSubscription], dict[UUID, int]]) -> None:
    members, partitions = situation
    counts = [size_of(assignment) for assignment in assign_uniformly(members, partitions).values()]
    assert max(counts) - min(counts) <= 1


@given(situations())
def test_uniform_leaves_no_move_that_would_improve_the_balance(
    situation: tuple[list[MemberSubscription], dict[UUID, int]],
) -> None:
    members, partitions = situation
    given_now = assign_uniformly(members, partitions)
    loads = {member_id: size_of(assignment) for member_id, assignment in given_now.items()}
    for wish in members:
        for topic_id in wish.topics:
            for member_id, assignment in given_now.items():
                if topic_id in assignment:
                    assert loads[member_id] - loads[wish.member_id] <= 1


@given(situations(), st.randoms(use_true_random=False))
def test_a_correct_assignment_is_unchanged(
    situation: tuple[list[MemberSubscription], dict[UUID, int]], random: object
) -> None:
    members, partitions = situation
    for assign in (assign_uniformly, assign_ranges):
        before = assign(members, partitions)
        shuffled = again(members, before)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        assert assign(shuffled, partitions) == before


@given(situations(same=True))
def test_a_new_member_gets_its_share_and_nothing_else_moves(
    situation: tuple[list[MemberSubscription], dict[UUID, int]],
) -> None:
    members, partitions = situation
    before = assign_uniformly(members, partitions)
    newcomer = MemberSubscription(member_id="newcomer", topics=members[0].topics)
    after = assign_uniformly([*again(members, before), newcomer], partitions)
    check_everything_is_given_once([*members, newcomer], partitions, after)
    assert moves(before, after) == size_of(after["newcomer"])


@given(situations(same=True), st.integers(0, 100))
def test_when_a_member_leaves_the_others_keep_their_partitions(
    situation: tuple[list[MemberSubscription], dict[UUID, int]], which: int
) -> None:
    members, partitions = situation
    before = assign_uniformly(members, partitions)
    gone = members[which % len(members)]
    remaining = [wish for wish in members if wish is not gone]
    after = assign_uniformly(again(remaining, before), partitions)
    assert moves({key: value for key, value in before.items() if key != gone.member_id}, after) == 0
    if remaining:
        check_everything_is_given_once(remaining, partitions, after)


@given(situations(same=True), st.integers(1, 5))
def test_new_partitions_move_no_old_ones_without_need(
    situation: tuple[list[MemberSubscription], dict[UUID, int]], added: int
) -> None:
    members, partitions = situation
    before = assign_uniformly(members, partitions)
    grown = {topic_id: number + added for topic_id, number in partitions.items()}
    after = assign_uniformly(again(members, before), grown)
    check_everything_is_given_once(members, grown, after)
    assert moves(before, after) == 0


@settings(max_examples=50)
@given(st.lists(situations(), min_size=2, max_size=5))
def test_uniform_holds_over_any_history(history: list[tuple[list[MemberSubscription], dict[UUID, int]]]) -> None:
    """Members, topics and sizes change all at once, and members may have owned partitions of deleted topics."""
    given_now: Given = {}
    for members, partitions in history:
        given_now = assign_uniformly(again(members, given_now), partitions)
        check_everything_is_given_once(members, partitions, given_now)


def test_an_overlapping_assignment_is_corrected() -> None:
    topic = TOPICS[0]
    both = [
        MemberSubscription(member_id=name, topics=frozenset({topic}), previous={topic: frozenset({0, 1, 9})})
        for name in "ab"
    ]
    check_everything_is_given_once(both, {topic: 4}, assign_uniformly(both, {topic: 4}))


def test_uniform_spreads_each_topic() -> None:
    everything = frozenset(TOPICS[:3])
    members = [MemberSubscription(member_id=f"m{number}", topics=everything) for number in range(3)]
    partitions = dict.fromkeys(everything, 3)
    for assignment in assign_uniformly(members, partitions).values():
        assert {topic_id: len(numbers) for topic_id, numbers in assignment.items()} == dict.fromkeys(everything, 1)
    alone = assign_uniformly(members[:1], partitions)
    joined = assign_uniformly(again(members, alone), partitions)
    assert {len(numbers) for assignment in joined.values() for numbers in assignment.values()} == {1}


def test_no_member_and_no_partition() -> None:
    unwanted = [MemberSubscription(member_id="idle", topics=frozenset())]
    for assign in (assign_uniformly, assign_ranges):
        assert assign([], {}) == {}
        assert assign(unwanted, {}) == {"idle": {}}


def test_ranges_are_contiguous_and_aligned_across_topics() -> None:
    first, second = TOPICS[:2]
    both = frozenset({first, second})
    members = [
        MemberSubscription(member_id="z", topics=both),
        MemberSubscription(member_id="a", topics=both),
        MemberSubscription(member_id="y", instance_id="two", topics=both),
        MemberSubscription(member_id="x", instance_id="one", topics=both),
    ]
    given_now = assign_ranges(members, {first: 6, second: 6})
    # Static members come first, by instance id; then the others, by member id.
    assert given_now["x"] == dict.fromkeys(both, frozenset({0, 1}))
    assert given_now["y"] == dict.fromkeys(both, frozenset({2, 3}))
    assert given_now["a"] == dict.fromkeys(both, frozenset({4}))
    assert given_now["z"] == dict.fromkeys(both, frozenset({5}))


@given(situations())
def test_ranges_have_no_gaps(situation: tuple[list[MemberSubscription], dict[UUID, int]]) -> None:
    members, partitions = situation
    for assignment in assign_ranges(members, partitions).values():
        for numbers in assignment.values():
            assert all(after - before == 1 for before, after in pairwise(sorted(numbers)))


def test_more_members_than_partitions() -> None:
    members = [MemberSubscription(member_id=f"m{number}", topics=frozenset({TOPICS[0]})) for number in range(5)]
    for assign in (assign_uniformly, assign_ranges):
        given_now = assign(members, {TOPICS[0]: 2})
        assert sorted(map(size_of, given_now.values())) == [0, 0, 0, 1, 1]
