"""Random histories of one group on the real runtime: joins, syncs, leaves, timeouts, commits, failed disks, crashes.
The log is in memory, and the test decides when an append is acknowledged and what survives a crash.
"""

from __future__ import annotations

import logging
from typing import TypeVar
from uuid import uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from millstream.broker.coordination.state_machine import Deferred, Timers
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.group import Group, GroupState
from millstream.broker.groups.requests import (
    CommitRequest,
    CommitResult,
    GroupLimits,
    JoinRequest,
    JoinResponse,
    LeavingMember,
    MemberRef,
    PartitionCommit,
    SyncRequest,
    SyncResponse,
)
from millstream.broker.groups.shard import GroupShard
from millstream.core.errors import (
    BatchTooLarge,
    MemberIdRequired,
    MillstreamError,
    StorageFailure,
)
from millstream_testing.shard_history import ShardHistory
from millstream_testing.state_log import MemoryTopics

T = TypeVar("T")

GROUP = "group"
TOPIC_ID = uuid4()
LIMITS = GroupLimits(
    session_min_ms=1,
    session_max_ms=1_000_000,
    initial_delay_ms=300,
    members_max=4,
    offsets_retention_ms=10**12,
    new_member_ms=30_000,
    sweep_ms=10**12,
)

clients = st.integers(0, 5)
instances = st.sampled_from([None, None, "a", "b"])


class Client:
    """The state of one consumer, from the responses it got."""

    def __init__(self) -> None:
        self.member_id = ""
        self.instance_id: str | None = None
        self.generation = -1


class GroupHistory(ShardHistory):
    """Consumers that act at random, on a broker that fails now and then."""

    rewrite_records_min = 12
    clock_steps = 20

    def __init__(self) -> None:
        super().__init__()
        self.clients = [Client() for _ in range(6)]
        self.crashes = 0
        self.last_seen = ((0, 0), 0)
        self.durable_generation = 0
        self.leaders: dict[tuple[tuple[int, int], int], str] = {}
        self.last_submitted = 0
        self.last_acknowledged = -1

    @initialize()
    def start(self) -> None:
        self.shard = self._open()

    def teardown(self) -> None:
        try:
            self._all_requests_have_responses()
            self.nothing_failed_on_the_side()
        finally:
            self._run(self.shard.close())
            self.loop.close()
            logging.disable(logging.NOTSET)

    # Actions of clients

    @rule(who=clients, instance_id=instances, version=st.sampled_from([3, 8, 9]), sticky=st.booleans())
    def join_as_new(self, who: int, instance_id: str | None, version: int, sticky: bool) -> None:
        client = self.clients[who]
        client.member_id, client.instance_id = "", instance_id
        self._join(client, version=version, sticky=sticky)

    @rule(who=clients, sticky=st.booleans())
    def join_again(self, who: int, sticky: bool) -> None:
        self._join(self.clients[who], version=9, sticky=sticky)

    @rule(who=clients)
    def sync(self, who: int) -> None:
        client = self.clients[who]
        group = self._group()
        assignments = {} if group is None else {member: f"{group.generation}".encode() for member in group.members}
        request = SyncRequest(member=self._ref(client), assignments=assignments)
        generation = client.generation

        def synced(response: SyncResponse) -> None:
            # Responses are sent only when durable, so no crash may undo this generation.
            self.durable_generation = max(self.durable_generation, generation)
            assert response.assignment in (b"", f"{generation}".encode())

        self._ask(lambda shard: shard.sync(request), synced)

    @rule(who=clients)
    def heartbeat(self, who: int) -> None:
        reference = self._ref(self.clients[who])
        self._ask(lambda shard: shard.heartbeat(reference))

    @rule(who=clients)
    def leave(self, who: int) -> None:
        client = self.clients[who]
        self._ask(lambda shard: shard.leave(GROUP, [LeavingMember(client.member_id, client.instance_id)]))

    @rule(who=clients, outsider=st.booleans())
    def commit(self, who: int, outsider: bool) -> None:
        self.last_submitted += 1
        offset = self.last_submitted
        member = MemberRef(group_id=GROUP, member_id="") if outsider else self._ref(self.clients[who])
        request = CommitRequest(member=member, topics={"orders": (PartitionCommit(partition=0, offset=offset),)})

        def committed(response: CommitResult) -> None:
            assert response == {"orders": {0: None}}
            self.last_acknowledged = max(self.last_acknowledged, offset)

        self._ask(lambda shard: shard.commit(request), committed, pure=True)

    @rule(several=st.sets(clients, min_size=1, max_size=3), acknowledged=st.booleans())
    def settle_down(self, several: set[int], acknowledged: bool) -> None:
        """Let some consumers follow the protocol, so that groups become stable often."""
        for who in sorted(several):
            self._join(self.clients[who], version=9, sticky=who % 2 == 1)
            if acknowledged:
                self.acknowledge(None)
            self._join(self.clients[who], version=9, sticky=who % 2 == 1)
        for milliseconds in (300, 300, 300, 4000):
            self._pass_ms(milliseconds)
            for who in sorted(several):
                self.sync(who)
            if acknowledged:
                self.acknowledge(None)
        for who in sorted(several):
            self.commit(who, False)

    # Events

    @rule(milliseconds=st.sampled_from([1, 200, 300, 1000, 5000, 10_000, 40_000]))
    def time_passes(self, milliseconds: int) -> None:
        self._pass_ms(milliseconds)

    @rule(error=st.sampled_from([StorageFailure("the disk is full"), BatchTooLarge("too large")]))
    def appends_are_refused_for_a_moment(self, error: MillstreamError) -> None:
        self.partition.refusal = error
        self._pass_ms(300)
        self.partition.refusal = None
        if self.shard.state is None:
            self.partition.acknowledge()
            self._reloaded()

    @rule(kept=st.integers(0, 3))
    def crash(self, kept: int) -> None:
        self.crashes += 1
        for request in self.open_requests:
            request.cancel()
        self._settle()
        self.open_requests.clear()
        old, self.partition = self.shard, self.partition.after_crash(kept=kept)
        self.shard = self._open()
        self._run(self._abandon(old))
        self._check_what_survived()

    # Invariants

    @invariant()
    def there_is_one_leader(self) -> None:
        group = self._group()
        if group is not None and group.members:
            assert group.leader_id in group.members

    @invariant()
    def generations_never_decrease(self) -> None:
        group = self._group()
        if group is not None:
            assert group.generation >= self.durable_generation
            incarnation, generation = self.last_seen
            assert incarnation != self._incarnation() or group.generation >= generation
            self.last_seen = (self._incarnation(), group.generation)

    @invariant()
    def the_group_state_is_consistent(self) -> None:
        group = self._group()
        if group is None:
            return
        members = group.members
        assert group.awaiting_join == sum(member.awaits_join for member in members.values())
        assert group.static_members == {m.instance_id: m.member_id for m in members.values() if m.instance_id}
        assert group.pending_sync <= set(members)
        assert not group.pending_members & set(members)
        assert group.members_bytes == sum(member.size_bytes for member in members.values())
        assert len(members) <= 2 * LIMITS.members_max
        if group.state is not GroupState.PREPARING:
            assert group.awaiting_join == 0
            assert all(group.protocol_name in dict(member.protocols) for member in members.values())
        if group.state is not GroupState.COMPLETING:
            assert not any(member.sync_response for member in members.values())
        if group.state is GroupState.EMPTY:
            assert not members

    @invariant()
    @precondition(lambda self: hasattr(self, "shard"))
    def every_waiter_has_a_timer(self) -> None:
        """Every parked request has a timer, so that none can be forgotten."""
        group = self._group()
        timers = self.shard._timers
        if group is not None and group.state is GroupState.PREPARING:
            assert ("join", GROUP) in timers
        if group is not None and group.state is GroupState.COMPLETING:
            assert ("sync", GROUP) in timers

    # Helpers

    def _incarnation(self) -> tuple[int, int]:
        """Identify this copy of the state; joins that were not written start over in the next."""
        return (self.crashes, self.shard._incarnation)

    def _group(self) -> Group | None:
        state = self.shard.state if hasattr(self, "shard") else None
        return None if state is None else state.groups.get(GROUP)

    def _new_state(self, timers: Timers) -> GroupShard:
        topics = ConsumerTopics.of(MemoryTopics())
        return GroupShard(timers, limits=LIMITS, clock=self.clock, topic_id_of=lambda _: TOPIC_ID, topics=topics)

    def _join(self, client: Client, *, version: int, sticky: bool) -> None:
        protocols = (("sticky", b"s"), ("range", b"r")) if sticky else (("range", b"r"),)
        request = JoinRequest(
            group_id=GROUP,
            member_id=client.member_id,
            instance_id=client.instance_id,
            client_id="client",
            client_host="/127.0.0.1",
            session_timeout_ms=5000,
            rebalance_timeout_ms=8000,
            protocol_type="consumer",
            protocols=protocols,
            supports_member_id_required=version >= 4,
            supports_skip_assignment=version >= 9,
        )
        incarnation = self._incarnation()

        def joined(response: JoinResponse) -> None:
            client.member_id, client.generation = response.member_id, response.generation
            if response.leader_id == response.member_id and not response.skip_assignment:
                assert response.member_id in {member.member_id for member in response.members}
                leader = self.leaders.setdefault((incarnation, response.generation), response.member_id)
                assert leader == response.member_id

        def refused(error: MillstreamError) -> None:
            if isinstance(error, MemberIdRequired):
                client.member_id = error.member_id

        self._ask(lambda shard: shard.join(request), joined, refused)

    def _ref(self, client: Client) -> MemberRef:
        return MemberRef(
            group_id=GROUP,
            member_id=client.member_id,
            instance_id=client.instance_id,
            generation=client.generation,
        )

    def _check_what_survived(self) -> None:
        state = self.shard.state
        assert state is not None
        fetched = state.fetch(GROUP, {"orders": [0]})[1]
        assert not isinstance(fetched, Deferred)
        offset = fetched["orders"][0].offset
        assert self.last_acknowledged <= offset <= self.last_submitted

    def _all_requests_have_responses(self) -> None:
        if not hasattr(self, "shard"):
            return
        for _ in range(60):
            self.partition.acknowledge()
            self._settle()
            if not self.open_requests:
                break
            self._pass_ms(2000)
        assert not self.open_requests, self._group()


GroupHistory.TestCase.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestGroupHistory = GroupHistory.TestCase
