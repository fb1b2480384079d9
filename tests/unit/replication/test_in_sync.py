"""The in-sync set: what may be acknowledged, and which changes the leader requests."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.broker.replication.in_sync import UNKNOWN_POSITION, InSync, InSyncChange
from millstream.core.ids import Epoch, NodeId, Offset
from millstream.core.partition_state import PartitionState, Versioned

A, B, C = NodeId(1), NodeId(2), NodeId(3)
LAG_S = 10.0
EXAMPLES = int(os.environ.get("REPLICATION_EXAMPLES", "60"))


def state(
    *in_sync: NodeId, replicas: tuple[NodeId, ...] = (A, B, C), eligible: tuple[NodeId, ...] = ()
) -> PartitionState:
    return PartitionState(replicas=replicas, leader=A, leader_epoch=Epoch(5), in_sync=in_sync, eligible=eligible)


def leading(first: PartitionState, *, min_in_sync: int = 2, epoch_start: int = 0) -> InSync:
    return InSync(A, Versioned(first, 1), epoch_start=Offset(epoch_start), min_in_sync=min_in_sync, now=0.0)


def fetched(in_sync: InSync, node: NodeId, offset: int, *, end: int = 100, now: float = 0.0) -> None:
    assert in_sync.fetched(node, Offset(offset), end=Offset(end), now=now, registration=7)


def requested_change(
    in_sync: InSync, *, end: int = 100, high_watermark: int = 0, now: float = 0.0
) -> InSyncChange | None:
    return in_sync.next_change(end=Offset(end), high_watermark=Offset(high_watermark), now=now, lag_s=LAG_S)


class TestHighWatermark:
    def test_it_is_the_minimum_of_all_in_sync_replicas(self) -> None:
        in_sync = leading(state(A, B))
        assert in_sync.acknowledged(Offset(50)) == UNKNOWN_POSITION
        fetched(in_sync, B, 30)
        assert in_sync.acknowledged(Offset(50)) == 30
        fetched(in_sync, C, 10)
        assert in_sync.acknowledged(Offset(20)) == 20

    def test_a_pending_change_requires_both_sets(self) -> None:
        in_sync = leading(state(A, B))
        fetched(in_sync, B, 100)
        fetched(in_sync, C, 100)
        change = requested_change(in_sync)
        assert change is not None
        assert change.state.in_sync == (A, B, C)
        in_sync.begin_change(change)
        fetched(in_sync, B, 120, end=130)
        fetched(in_sync, C, 110, end=130)
        assert in_sync.acknowledged(Offset(130)) == 110
        in_sync.refused(change)
        assert in_sync.acknowledged(Offset(130)) == 120

    def test_only_a_later_revision_or_a_definite_refusal_ends_a_change(self) -> None:
        in_sync = leading(state(A, B, C))
        fetched(in_sync, B, 100, now=20.0)
        change = requested_change(in_sync, now=20.0)
        assert change is not None
        in_sync.begin_change(change)
        in_sync.apply_state(Versioned(state(A, B, C), 1), now=20.0)
        assert requested_change(in_sync, now=20.0) is None
        in_sync.refused(change._replace(state=replace(change.state)))
        assert in_sync.acknowledged(Offset(100)) == UNKNOWN_POSITION
        in_sync.apply_state(Versioned(change.state, 2), now=20.0)
        assert in_sync.pending is None
        assert in_sync.acknowledged(Offset(100)) == 100

    def test_it_stands_still_below_the_minimum_and_while_others_are_eligible(self) -> None:
        in_sync = leading(state(A))
        assert in_sync.acknowledged(Offset(50)) == UNKNOWN_POSITION
        in_sync.change_min(1)
        assert in_sync.acknowledged(Offset(50)) == 50
        eligible = leading(state(A, eligible=(B,)), min_in_sync=1)
        assert eligible.acknowledged(Offset(50)) == UNKNOWN_POSITION
        change = requested_change(eligible)
        assert change is not None
        assert change.state == state(A)

    def test_the_required_number_never_exceeds_the_number_of_replicas(self) -> None:
        in_sync = leading(state(A, B, replicas=(A, B)), min_in_sync=3)
        assert in_sync.is_enough


class TestChanges:
    def test_a_follower_that_is_behind_for_too_long_leaves(self) -> None:
        in_sync = leading(state(A, B, C))
        fetched(in_sync, B, 100, now=9.0)
        fetched(in_sync, C, 50, now=9.0)
        assert requested_change(in_sync, now=10.0) is None
        change = requested_change(in_sync, now=10.1)
        assert change is not None
        assert change.state == state(A, B)

    def test_a_follower_that_keeps_up_with_a_busy_log_stays(self) -> None:
        in_sync = leading(state(A, B))
        for second in range(60):
            # Never at the end, but always at the end of one second ago.
            fetched(in_sync, B, 100 * second, end=100 * (second + 1), now=float(second))
            assert requested_change(in_sync, end=100 * (second + 1), now=float(second)) is None

    def test_followers_of_an_idle_log_get_time_after_an_append(self) -> None:
        in_sync = leading(state(A, B))
        fetched(in_sync, B, 100, now=1.0)
        in_sync.record_log_growth(end_before=Offset(100), now=5000.0)
        assert requested_change(in_sync, end=101, now=5009.0) is None
        assert requested_change(in_sync, end=101, now=5011.0) is not None

    def test_a_follower_that_leaves_too_few_behind_stays_eligible_until_enough_are_in_sync(self) -> None:
        in_sync = leading(state(A, B, C))
        change = requested_change(in_sync, now=11.0)
        assert change is not None
        assert change.state == state(A, eligible=(B, C))
        in_sync.begin_change(change)
        in_sync.apply_state(Versioned(change.state, 2), now=11.0)
        fetched(in_sync, C, 100, now=12.0)
        back = requested_change(in_sync, now=12.0)
        assert back is not None
        assert back.state == state(A, C)
        assert back.registrations == {C: 7}

    def test_a_joining_follower_has_reached_the_high_watermark_in_this_epoch(self) -> None:
        in_sync = leading(state(A, B), epoch_start=80)
        fetched(in_sync, B, 100)
        fetched(in_sync, C, 79)
        assert requested_change(in_sync, high_watermark=60) is None
        fetched(in_sync, C, 80)
        assert requested_change(in_sync, high_watermark=90) is None
        assert requested_change(in_sync, high_watermark=80) is not None
        refused = in_sync.next_change(
            end=Offset(100), high_watermark=Offset(80), now=0.0, lag_s=LAG_S, may_join=lambda node, _: node != C
        )
        assert refused is None

    def test_a_follower_that_lacks_acknowledged_records_leaves_at_once(self) -> None:
        in_sync = leading(state(A, B, C))
        fetched(in_sync, B, 100)
        fetched(in_sync, C, 100)
        fetched(in_sync, C, 40)
        assert in_sync.may_want_change(C, Offset(100))
        change = requested_change(in_sync, high_watermark=100)
        assert change is not None
        assert change.state == state(A, B)
        alone = leading(state(A, C))
        fetched(alone, C, 40)
        change = requested_change(alone, high_watermark=100)
        assert change is not None
        assert change.state == state(A)

    def test_a_follower_that_is_far_behind_does_not_join_only_to_leave_again(self) -> None:
        in_sync = leading(state(A, eligible=(B,)))
        fetched(in_sync, B, 60, end=100, now=50.0)
        assert requested_change(in_sync, high_watermark=60, now=50.0) is None
        fetched(in_sync, B, 100, end=120, now=51.0)
        change = requested_change(in_sync, end=120, high_watermark=60, now=51.0)
        assert change is not None
        assert change.state.in_sync == (A, B)

    def test_a_follower_that_is_always_one_record_behind_leaves(self) -> None:
        in_sync = leading(state(A, B, C))
        fetched(in_sync, B, 100, now=LAG_S + 1)
        fetched(in_sync, C, 99, now=LAG_S + 1)
        change = requested_change(in_sync, now=LAG_S + 1)
        assert change is not None
        assert change.state.in_sync == (A, B)

    def test_leadership_is_handed_over_to_a_follower_with_all_acknowledged_records(self) -> None:
        in_sync = leading(state(A, B, C))
        fetched(in_sync, B, 59)
        assert in_sync.handover_change(high_watermark=Offset(60)) is None
        fetched(in_sync, C, 60)
        change = in_sync.handover_change(high_watermark=Offset(60))
        assert change is not None
        assert change.state.leader == C

    def test_nodes_without_a_replica_are_not_counted(self) -> None:
        in_sync = leading(state(A, B))
        assert not in_sync.fetched(NodeId(9), Offset(5), end=Offset(5), now=0.0, registration=1)


class InSyncMachine(RuleBasedStateMachine):
    """One leader, its followers and a store that responds late, never or with no; after every step the rules hold.

    The leader of an epoch is modelled, and the store's sets of old, pending and lost requests: any of them may be the
    one from which the next leader is taken, so everybody in any of them must have what was acknowledged.
    """

    @initialize(
        min_in_sync=st.integers(1, 3), others=st.sampled_from([(B, C), (B,), ()]), acknowledged=st.integers(0, 3)
    )
    def begin(self, min_in_sync: int, others: tuple[NodeId, ...], acknowledged: int) -> None:
        self.history = [Versioned(state(A, *others), 1)]
        self.in_sync = leading(self.stored.state, epoch_start=acknowledged, min_in_sync=min_in_sync)
        self.min_in_sync = min_in_sync
        self.now = 0.0
        self.end = self.acknowledged_before = acknowledged
        """What the leader before has acknowledged, perhaps unknown to this one."""
        self.high_watermark = 0
        self.logs = {node: acknowledged if node in others else 0 for node in (B, C)}
        self.requests: list[InSyncChange] = []
        """Asked for, and perhaps still on their way to the store."""

    @property
    def stored(self) -> Versioned:
        return self.history[-1]

    def advance(self) -> None:
        allowed = self.in_sync.acknowledged(Offset(self.end))
        if allowed > self.high_watermark:
            self.high_watermark = allowed
            copies = 1 + sum(end >= allowed for end in self.logs.values())
            assert copies >= self.min_in_sync, "fewer have it than min.insync.replicas promises"

    @rule(count=st.integers(1, 2))
    def append(self, count: int) -> None:
        self.in_sync.record_log_growth(end_before=Offset(self.end), now=self.now)
        self.end += count
        self.advance()

    @rule(node=st.sampled_from([B, C]), count=st.sampled_from([1, 100]))
    def follow(self, node: NodeId, count: int) -> None:
        self.logs[node] = min(self.end, self.logs[node] + count)
        self.in_sync.fetched(node, Offset(self.logs[node]), end=Offset(self.end), now=self.now, registration=1)
        self.advance()

    @rule(seconds=st.sampled_from([LAG_S / 2, 2 * LAG_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        change = requested_change(self.in_sync, end=self.end, high_watermark=self.high_watermark, now=self.now)
        if change is not None:
            self.in_sync.begin_change(change)
            self.requests.append(change)
        elif self.in_sync.pending is not None:
            again = [request for request in self.requests if request.state is self.in_sync.pending]
            self.requests += again[:1]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), responded=st.booleans())
    def arrive(self, data: st.DataObject, responded: bool) -> None:
        """Deliver a request to the store, in any order; its response may be lost."""
        at = data.draw(st.integers(0, len(self.requests) - 1))
        change = self.requests.pop(at)
        if change.revision == self.stored.revision:
            self.history.append(Versioned(change.state, self.stored.revision + 1))
        if responded:
            self.in_sync.apply_state(self.stored, now=self.now)
        self.advance()

    @rule(late=st.integers(0, 2))
    def read_back(self, late: int) -> None:
        self.in_sync.apply_state(self.history[-1 - min(late, len(self.history) - 1)], now=self.now)
        self.advance()

    @rule(node=st.sampled_from([B, C]))
    def controller_removes(self, node: NodeId) -> None:
        """Remove a dead node from the set, as an election does."""
        before = self.stored.state
        in_sync = tuple(replica for replica in before.in_sync if replica != node)
        if in_sync == before.in_sync:
            return
        candidates = {*before.in_sync, *before.eligible} - set(in_sync) if len(in_sync) < self.min_in_sync else set()
        eligible = tuple(replica for replica in before.replicas if replica in candidates)
        self.history.append(Versioned(replace(before, in_sync=in_sync, eligible=eligible), self.stored.revision + 1))

    @rule(minimum=st.integers(1, 3))
    def set_minimum(self, minimum: int) -> None:
        self.min_in_sync = minimum
        self.in_sync.change_min(minimum)
        self.advance()

    @invariant()
    def eligible_replicas_have_acknowledged_records(self) -> None:
        if not hasattr(self, "history"):
            return
        may_lead = [
            self.stored.state,
            *(request.state for request in self.requests if request.revision == self.stored.revision),
        ]
        for candidate in may_lead:
            for node in {*candidate.in_sync, *candidate.eligible} - {A}:
                acknowledged = max(self.high_watermark, self.acknowledged_before)
                assert self.logs[node] >= acknowledged, f"{node} may lead by {candidate}, and lacks records"

    @invariant()
    def nothing_is_acknowledged_that_the_leader_lacks(self) -> None:
        if hasattr(self, "history"):
            assert self.high_watermark <= self.end


InSyncMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestInSyncRules = InSyncMachine.TestCase
