"""Random histories of one consumer group on the real runtime.

Consumers of both protocols join, leave, die and stall; responses are lost; topics are created, grown and deleted; disks
fail and the broker crashes. The log is in memory, and the test decides when an append is acknowledged and what survives
a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import combinations, count
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from millstream.broker.coordination.shard import read_back
from millstream.broker.coordination.state_machine import Deferred, Timers
from millstream.broker.groups.consumer.classic_member import encode_assignment, parse_assignment, partitions_by_id
from millstream.broker.groups.consumer.group import ConsumerGroup, ConsumerGroupState
from millstream.broker.groups.consumer.member import (
    AWAY_EPOCH,
    LEFT_EPOCH,
    NOTHING,
    Assignment,
    overlaps,
    partitions_in,
    size_of,
    union,
)
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.group import Group
from millstream.broker.groups.requests import (
    CommitRequest,
    GroupLimits,
    HeartbeatResult,
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
    FencedMemberEpoch,
    GroupRejected,
    MemberIdRequired,
    MillstreamError,
    StorageFailure,
    UnknownGroup,
    UnknownMember,
    UnreleasedInstance,
)
from millstream_testing.consumer_harness import ClassicProtocolClient, ConsumerProtocolClient, classic_protocols
from millstream_testing.group_harness import GROUP
from millstream_testing.shard_history import EXPECTED, ShardHistory
from millstream_testing.state_log import MemoryTopics

T = TypeVar("T")

SESSION_MS = 10_000
REBALANCE_MS = 15_000
LIMITS = GroupLimits(
    session_min_ms=1,
    session_max_ms=1_000_000,
    initial_delay_ms=300,
    members_max=20,
    offsets_retention_ms=10**12,
    sweep_ms=10**12,
    consumer_session_ms=SESSION_MS,
)
NAMES = ("apples", "pears", "plums")
CHOICES: list[dict[str, Any]] = [
    {"topics": frozenset({"apples"})},
    {"topics": frozenset({"apples", "pears"})},
    {"topics": frozenset(NAMES)},
    {"topics": frozenset(), "expression": "p.*"},
    {"topics": frozenset({"apples"}), "expression": "pl.*"},
    {"topics": frozenset(NAMES), "assignor": "range"},
]

consumer_clients = st.integers(0, 3)
classic_clients = st.integers(0, 1)


class ConsumerGroupHistory(ShardHistory):
    """Consumers that act at random, on a broker that fails now and then."""

    expected = (*EXPECTED, BatchTooLarge)
    rewrite_records_min = 40
    clock_steps = 5

    def __init__(self) -> None:
        super().__init__()
        self.topics = MemoryTopics()
        self.ids = count(1)
        self.consumer_clients = [
            ConsumerProtocolClient(number, CHOICES[2], rebalance_timeout_ms=REBALANCE_MS) for number in range(4)
        ]
        self.classic_clients = [ClassicProtocolClient() for _ in range(2)]
        self.durable_epoch = 0
        self.beginnings = 0
        self.last_submitted = 0
        self.last_acknowledged = -1

    @initialize(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3))
    def start(self, sizes: list[int]) -> None:
        for name, partitions in zip(NAMES, sizes, strict=False):
            self.topics.add(name, partitions=partitions)
        self.shard = self._open()

    def teardown(self) -> None:
        try:
            if hasattr(self, "shard"):
                self._converge()
                self.nothing_failed_on_the_side()
        finally:
            if hasattr(self, "shard"):
                self._run(self.shard.close())
            self.loop.close()
            logging.disable(logging.NOTSET)

    # Actions of consumers of the newer protocol

    @rule(who=consumer_clients, gives_up=st.booleans(), response_is_lost=st.booleans())
    def send_heartbeat(self, who: int, gives_up: bool, response_is_lost: bool) -> None:
        client = self.consumer_clients[who]
        if client.in_flight:
            # It got no response in time, and sends its full state again.
            client.consumer.lost_response = True
        if gives_up:
            client.consumer.apply_assignment()
        self._beat(client, lost=response_is_lost)

    @rule(who=consumer_clients, choice=st.sampled_from(CHOICES))
    def want(self, who: int, choice: dict[str, Any]) -> None:
        self.consumer_clients[who].choice = choice
        self._beat(self.consumer_clients[who])

    @rule(who=consumer_clients, for_a_while=st.booleans())
    def leave(self, who: int, for_a_while: bool) -> None:
        client = self.consumer_clients[who]
        if client.consumer.epoch > 0:
            epoch = AWAY_EPOCH if for_a_while and client.instance_id else LEFT_EPOCH
            request = client.consumer.leave_request(epoch)
            self._ask(lambda shard: shard.consumers.heartbeat(request), pure=True)
        client.begin("")

    @rule(who=consumer_clients)
    def die(self, who: int) -> None:
        self.consumer_clients[who].begin("")

    @rule(who=consumer_clients, stale=st.booleans())
    def commit(self, who: int, stale: bool) -> None:
        consumer = self.consumer_clients[who].consumer
        self.last_submitted += 1
        offset = self.last_submitted
        member = MemberRef(
            group_id=GROUP, member_id=consumer.member_id, generation=consumer.epoch - stale if consumer.epoch else -1
        )
        request = CommitRequest(member=member, topics={"apples": (PartitionCommit(partition=0, offset=offset),)})

        def committed(_: object) -> None:
            self.last_acknowledged = max(self.last_acknowledged, offset)

        self._ask(lambda shard: shard.commit(request), committed, pure=True)

    # Actions of consumers of the classic protocol

    @rule(who=classic_clients)
    def join(self, who: int) -> None:
        client = self.classic_clients[who]
        client.owned, client.joined = NOTHING, None
        client.requests += 1
        requests = client.requests
        request = JoinRequest(
            group_id=GROUP,
            member_id=client.member_id,
            client_id="classic",
            client_host="/127.0.0.1",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            protocol_type="consumer",
            protocols=classic_protocols(*NAMES[:2]),
        )

        def joined(response: JoinResponse) -> None:
            if client.requests == requests:
                client.joined, client.generation = response, response.generation

        def refused(error: MillstreamError) -> None:
            if isinstance(error, MemberIdRequired):
                client.member_id = error.member_id
            elif isinstance(error, UnknownMember):
                client.member_id = ""

        self._ask(lambda shard: shard.join(request), joined, refused)

    @rule(who=classic_clients)
    def sync(self, who: int) -> None:
        client = self.classic_clients[who]
        if client.joined is None:
            return
        requests = client.requests
        request = SyncRequest(member=self._ref(client), assignments=dict(self._shares(client.joined)))

        def synced(response: SyncResponse) -> None:
            if client.requests == requests:
                client.owned = partitions_by_id(parse_assignment(response.assignment)[0], self.topics)

        self._ask(lambda shard: shard.sync(request), synced, self._left(client))

    @rule(who=classic_clients)
    def classic_beat(self, who: int) -> None:
        client = self.classic_clients[who]
        reference = self._ref(client)
        self._ask(lambda shard: shard.heartbeat(reference), on_error=self._left(client), pure=True)

    @rule(who=classic_clients)
    def classic_leave(self, who: int) -> None:
        client = self.classic_clients[who]
        leaver = LeavingMember(client.member_id)
        client.requests += 1
        client.owned, client.joined, client.member_id = NOTHING, None, ""
        self._ask(lambda shard: shard.leave(GROUP, [leaver]))

    # Events

    @rule(name=st.sampled_from(NAMES), partitions=st.integers(1, 6))
    def topics_change(self, name: str, partitions: int) -> None:
        topic = self.topics.get(name)
        if topic is None:
            self.topics.add(name, partitions=partitions)
        elif topic.partitions < partitions:
            self.topics.grow(name, partitions)
        else:
            self.topics.remove(name)

    @rule(milliseconds=st.sampled_from([1, 1000, 5000, 9000, 20_000]))
    def time_passes(self, milliseconds: int) -> None:
        self._pass_ms(milliseconds)

    @rule(error=st.sampled_from([StorageFailure("the disk is full"), BatchTooLarge("too large")]), who=consumer_clients)
    def appends_are_refused_for_a_moment(self, error: MillstreamError, who: int) -> None:
        self.partition.refusal = error
        self._beat(self.consumer_clients[who])
        self._pass_ms(1000)
        self.partition.refusal = None
        if self.shard.state is None:
            self.partition.acknowledge()
            self._reloaded()

    @rule(kept=st.integers(0, 4))
    def crash(self, kept: int) -> None:
        old, self.partition = self.shard, self.partition.after_crash(kept=kept)
        # The version of the topics starts over with the process.
        self.topics.version = len(self.topics.all())
        self.shard = self._open()
        self._run(self._abandon(old))
        for client in self.consumer_clients:
            client.requests += 1
            client.consumer.lost_response = client.consumer.lost_response or client.in_flight
            client.in_flight = False
        self._check_what_survived()

    @rule(several=st.sets(consumer_clients, min_size=1), crash_between=st.booleans())
    def settle_down(self, several: set[int], crash_between: bool) -> None:
        """Let some consumers follow the protocol, so that groups become stable often."""
        for number in range(4):
            for who in sorted(several):
                self.send_heartbeat(who, True, False)
            self.acknowledge(None)
            if crash_between and number == 1:
                self.crash(4)

    # Invariants

    @invariant()
    def a_partition_has_one_owner_in_the_group_state(self) -> None:
        group = self._group()
        if group is None:
            return
        held = [union(m.position.assigned, m.position.pending) for m in group.members.values()]
        for assignment, other in combinations(held, 2):
            assert not overlaps(assignment, other)
        for member in group.members.values():
            for topic_id, number in partitions_in(union(member.position.assigned, member.position.pending)):
                assert not group.is_owned(topic_id, number, by_other_than=member.member_id)
        targets = [target for member_id, target in group.targets.items() if member_id in group.members]
        for assignment, other in combinations(targets, 2):
            assert not overlaps(assignment, other)

    @invariant()
    def a_partition_has_one_owner_among_members(self) -> None:
        """A removed member that does not know it yet is not counted: it learns of it before it may continue."""
        held = list(self._held_by_members())
        for (_, assignment), (_, other) in combinations(held, 2):
            assert not overlaps(assignment, other), held

    @invariant()
    def epochs_are_in_order(self) -> None:
        group = self._group()
        if group is None and self._is_loaded():
            # An empty group recreated in the other protocol starts over at epoch 0.
            self.durable_epoch = 0
            self.beginnings += 1
        if group is not None:
            assert group.epoch >= self.durable_epoch
            assert group.target_epoch <= group.epoch
            assert all(member.epoch <= group.epoch for member in group.members.values())

    @invariant()
    def the_group_state_is_consistent(self) -> None:
        group = self._group()
        if group is None:
            return
        members = group.members.values()
        assert group.static_members == {m.instance_id: m.member_id for m in members if m.instance_id}
        assert group.classic_members == sum(m.speaks_classic for m in members)
        assert group.members_bytes == sum(m.subscription.size_bytes for m in members)
        assert sum(group.choices.values()) == len(members)
        assert set(group.resolved) <= set(group.expressions())
        assert group.targets.keys() <= group.members.keys()

    @invariant()
    def a_group_is_of_one_kind(self) -> None:
        state = self.shard.state if hasattr(self, "shard") else None
        assert state is None or state.groups.get(GROUP) is None or state.consumers.get(GROUP) is None

    # Helpers

    def _beat(self, client: ConsumerProtocolClient, *, lost: bool = False) -> None:
        consumer = client.consumer
        if not consumer.member_id:
            consumer.member_id = f"m{next(self.ids)}"
        full = consumer.epoch <= 0 or consumer.lost_response or client.received != client.choice
        consumer.topics, consumer.expression = client.choice["topics"], client.choice.get("expression", "")
        if "assignor" in client.choice:
            consumer.more["assignor"] = client.choice["assignor"]
        request = consumer.request(full=full)
        client.received = client.choice
        client.requests += 1
        client.in_flight = True
        requests, beginnings = client.requests, self.beginnings

        def heard(response: HeartbeatResult) -> None:
            if self.beginnings == beginnings:
                self.durable_epoch = max(self.durable_epoch, response.epoch)
            if client.requests != requests:
                return
            client.in_flight = lost
            if lost:
                consumer.lost_response = True
                return
            assert consumer.epoch <= 0 or response.epoch >= consumer.epoch
            client.joined = True
            consumer.handle_response(response)

        def refused(error: MillstreamError) -> None:
            if client.requests != requests:
                return
            client.in_flight = False
            if isinstance(error, FencedMemberEpoch | UnknownMember | UnknownGroup):
                consumer.fence()
            elif isinstance(error, GroupRejected) and not isinstance(error, UnreleasedInstance):
                client.begin("")
            else:
                consumer.lost_response = True

        def not_there() -> None:
            client.in_flight = False
            consumer.lost_response = True

        self._ask(lambda shard: shard.consumers.heartbeat(request), heard, refused, not_there, pure=True)

    def _held_by_members(self) -> Iterator[tuple[str, Assignment]]:
        state = self.shard.state if hasattr(self, "shard") else None
        if state is None:
            return
        group: Group | ConsumerGroup | None = state.groups.get(GROUP) or state.consumers.get(GROUP)
        members = {} if group is None else group.members
        for newer_client in self.consumer_clients:
            consumer = newer_client.consumer
            if consumer.member_id in members and consumer.epoch > 0:
                yield consumer.member_id, consumer.owned
        for older_client in self.classic_clients:
            if older_client.member_id in members:
                yield older_client.member_id, older_client.owned

    def _left(self, client: ClassicProtocolClient) -> Callable[[MillstreamError], None]:
        """A classic consumer gives up all partitions when it learns that it is not in this generation."""
        requests = client.requests

        def refused(error: MillstreamError) -> None:
            if client.requests == requests and isinstance(error, UnknownMember | GroupRejected):
                client.owned, client.joined = NOTHING, None
                if isinstance(error, UnknownMember):
                    client.member_id = ""

        return refused

    def _shares(self, joined: JoinResponse) -> Iterator[tuple[str, bytes]]:
        """The leader's assignment for a classic group: each partition to one member."""
        if joined.leader_id != joined.member_id:
            return
        members = sorted(member.member_id for member in joined.members)
        shares: dict[str, dict[str, list[int]]] = {member_id: {} for member_id in members}
        for name in NAMES[:2]:
            topic = self.topics.get(name)
            for number in range(0 if topic is None else topic.partitions):
                shares[members[number % len(members)]].setdefault(name, []).append(number)
        for member_id, share in shares.items():
            yield member_id, encode_assignment(share.items(), version=1)

    def _ref(self, client: ClassicProtocolClient) -> MemberRef:
        return MemberRef(group_id=GROUP, member_id=client.member_id, generation=client.generation)

    def _is_loaded(self) -> bool:
        return hasattr(self, "shard") and self.shard.state is not None

    def _group(self) -> ConsumerGroup | None:
        state = self.shard.state if hasattr(self, "shard") else None
        return None if state is None else state.consumers.get(GROUP)

    def _new_state(self, timers: Timers) -> GroupShard:
        return GroupShard(
            timers,
            limits=LIMITS,
            clock=self.clock,
            topic_id_of=lambda name: None if (topic := self.topics.get(name)) is None else topic.topic_id,
            topics=ConsumerTopics.of(self.topics),
        )

    def _check_what_survived(self) -> None:
        state = self.shard.state
        assert state is not None
        if self.topics.get("apples") is None or self.last_acknowledged < 0:
            return
        fetched = state.fetch(GROUP, {"apples": [0]})[1]
        assert not isinstance(fetched, Deferred)
        # The topic may have been deleted and recreated since, without its committed offsets.
        offset = fetched["apples"][0].offset
        assert offset == -1 or self.last_acknowledged <= offset <= self.last_submitted

    def _converge(self) -> None:
        """Without further faults, the live members share all partitions evenly and the assignment becomes stable."""
        self.partition.refusal = None
        self.partition.acknowledge()
        self._reloaded()
        for client in self.classic_clients:
            client.requests += 1
            client.owned, client.joined, client.member_id = NOTHING, None, ""
        for other in self.consumer_clients:
            other.choice = CHOICES[2]
        for _ in range(12):
            for _ in range(2):
                for who in range(4):
                    self.send_heartbeat(who, True, False)
                self.partition.acknowledge()
                self._settle()
            self._pass_ms(4000)
        group = self._group()
        assert group is not None
        assert group.state is ConsumerGroupState.STABLE
        owned = [client.consumer.owned for client in self.consumer_clients]
        everything = {(topic.topic_id, number) for topic in self.topics.all() for number in range(topic.partitions)}
        assert {place for share in owned for place in partitions_in(share)} == everything
        assert sum(map(size_of, owned)) == len(everything)
        if not group.assignors or set(group.assignors) == {"uniform"}:
            assert max(map(size_of, owned)) - min(map(size_of, owned)) <= 1
        self._the_state_is_the_fold_of_the_log()

    def _the_state_is_the_fold_of_the_log(self) -> None:
        state = self.shard.state
        assert state is not None
        again = self._new_state(Timers(self.clock))
        self._run(read_back("again", self.partition, again))
        assert again.consumers.describe(GROUP) == state.consumers.describe(GROUP)
        assert sorted(map(repr, again.durable_keys())) == sorted(map(repr, state.durable_keys()))


TestConsumerGroupHistory = ConsumerGroupHistory.TestCase
TestConsumerGroupHistory.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
