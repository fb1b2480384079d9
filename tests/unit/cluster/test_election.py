"""Elections: only a replica that holds every acknowledged record may lead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster.election import (
    elect,
    elect_preferred,
    exclude_untrusted,
    move_from_leaving,
    required_in_sync,
)
from millstream.core.ids import Epoch, NodeId
from millstream.core.partition_state import NO_LEADER, PartitionState

NODES = [NodeId(number) for number in range(1, 6)]


def state(
    replicas: list[int], leader: int, in_sync: list[int], eligible: list[int] | None = None, epoch: int = 3
) -> PartitionState:
    return PartitionState(
        replicas=tuple(map(NodeId, replicas)),
        leader=NodeId(leader),
        leader_epoch=Epoch(epoch),
        in_sync=tuple(map(NodeId, in_sync)),
        eligible=tuple(map(NodeId, eligible or [])),
    )


@st.composite
def states(draw: st.DrawFn) -> PartitionState:
    replicas = draw(st.lists(st.sampled_from(NODES), min_size=1, unique=True))
    in_sync = draw(st.lists(st.sampled_from(replicas), min_size=1, unique=True))
    rest = [node for node in replicas if node not in in_sync]
    eligible = draw(st.lists(st.sampled_from(rest), unique=True)) if rest else []
    leader = draw(st.sampled_from([*in_sync, NO_LEADER]))
    in_order = [node for node in replicas if node in in_sync]
    return state([*replicas], leader, [*in_order], [node for node in replicas if node in eligible])


alive_sets = st.sets(st.sampled_from(NODES))
minimums = st.integers(1, 4)


def check(after: PartitionState, before: PartitionState) -> None:
    assert after.in_sync
    assert set(after.in_sync) <= set(after.replicas)
    assert set(after.eligible) <= set(after.replicas)
    assert not set(after.in_sync) & set(after.eligible)
    assert after.leader in (*after.in_sync, NO_LEADER)
    assert after.replicas == before.replicas
    assert after.leader_epoch >= before.leader_epoch
    if after.leader != before.leader:
        assert after.leader_epoch > before.leader_epoch


@given(states(), alive_sets, minimums, st.booleans())
def test_an_election_keeps_the_rules_and_is_stable(
    before: PartitionState, alive: set[NodeId], minimum: int, unclean: bool
) -> None:
    after = elect(before, alive, min_in_sync=minimum, unclean=unclean)
    if after is not None:
        check(after, before)
        if not unclean:
            # No replica becomes trusted that was not before.
            assert {*after.in_sync, *after.eligible} <= {*before.in_sync, *before.eligible}
    current = after or before
    assert current.leader in alive or current.leader == NO_LEADER
    assert elect(current, alive, min_in_sync=minimum, unclean=unclean) is None
    if current.leader == NO_LEADER:
        assert not set(alive) & {*current.in_sync, *current.eligible}
        assert not unclean or not set(alive) & set(current.replicas)


@given(states(), alive_sets, minimums)
def test_only_replicas_that_left_below_the_minimum_are_eligible(
    before: PartitionState, alive: set[NodeId], minimum: int
) -> None:
    after = elect(before, alive, min_in_sync=minimum)
    if after is not None and after.eligible:
        # With enough replicas in sync the high watermark advances without them.
        assert len(after.in_sync) < required_in_sync(after, minimum) or after.eligible == before.eligible


@given(states(), st.sampled_from(NODES))
def test_an_untrusted_node_stays_in_sync_only_where_there_is_no_other(before: PartitionState, node: NodeId) -> None:
    after = exclude_untrusted(before, node)
    current = after or before
    check(current, before)
    assert exclude_untrusted(current, node) is None
    assert current.leader != node or current == before
    if node in current.in_sync:
        assert current.in_sync == (node,) == before.in_sync
        assert not set(before.eligible) - {node}
    assert node not in current.eligible


@given(states(), alive_sets, alive_sets)
def test_preferred_and_remaining_replicas_lead_only_when_in_sync(
    before: PartitionState, alive: set[NodeId], leaving: set[NodeId]
) -> None:
    preferred = elect_preferred(before, alive)
    if preferred is not None:
        check(preferred, before)
        assert preferred.leader == before.preferred
        assert preferred.leader in alive
        assert elect_preferred(preferred, alive) is None
    relieved = move_from_leaving(before, alive, leaving)
    if relieved is not None:
        check(relieved, before)
        assert relieved.leader in alive - leaving
        assert move_from_leaving(relieved, alive, leaving) is None


def test_the_first_live_replica_in_sync_leads() -> None:
    after = elect(state([2, 3, 1], 2, [1, 2, 3]), {NodeId(1), NodeId(3)}, min_in_sync=2)
    assert after == state([2, 3, 1], 3, [3, 1], epoch=4)


def test_below_the_minimum_replicas_that_left_stay_eligible() -> None:
    after = elect(state([1, 2, 3], 1, [1, 2]), {NodeId(2)}, min_in_sync=2)
    assert after == state([1, 2, 3], 2, [2], [1], epoch=4)
    again = elect(after, {NodeId(1)}, min_in_sync=2)
    assert again == state([1, 2, 3], 1, [1], [2], epoch=5)


def test_without_live_replicas_there_is_no_leader_and_the_in_sync_set_stays() -> None:
    after = elect(state([1, 2, 3], 1, [1, 2]), {NodeId(3)})
    assert after == state([1, 2, 3], -1, [1, 2], epoch=4)
    assert elect(after, {NodeId(3)}) is None
    unclean = elect(after, {NodeId(3)}, unclean=True)
    assert unclean == state([1, 2, 3], 3, [3], epoch=5)


def test_a_dead_follower_leaves_the_in_sync_set_in_the_same_epoch() -> None:
    after = elect(state([1, 2, 3], 1, [1, 2, 3]), {NodeId(1), NodeId(2)}, min_in_sync=2)
    assert after == state([1, 2, 3], 1, [1, 2])
