"""Consumers of the new group protocol that a test steps manually, and a shard of groups for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from millstream.broker.coordination.state_machine import Deferred, StateRecord
from millstream.broker.groups.consumer.classic_member import encode_assignment, parse_assignment
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import NOTHING, Assignment, assignment_of
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.requests import (
    ConsumerGroupDescription,
    ConsumerHeartbeat,
    HeartbeatResult,
    JoinResponse,
    SyncResponse,
)
from millstream.broker.groups.shard import GroupShard
from millstream.core.errors import MemberIdRequired
from millstream.protocol.messages.primitives import Writer
from millstream_testing.group_harness import GROUP, GroupHarness
from millstream_testing.state_log import MemoryTopics

SESSION_MS = 45_000
REBALANCE_MS = 60_000


class SimulatedConsumer:
    """A client of the protocol: it adopts its assignment and reports what it owns."""

    def __init__(
        self, member_id: str, *topics: str, expression: str | None = None, instance_id: str | None = None, **more: Any
    ) -> None:
        self.member_id = member_id
        self.topics: frozenset[str] | None = frozenset(topics) if topics or expression is None else None
        self.expression = expression
        self.instance_id = instance_id
        self.more = more
        self.epoch = 0
        self.owned: Assignment = NOTHING
        self.assigned: Assignment = NOTHING
        self.lost_response = False

    def request(self, *, full: bool = False, group_id: str = GROUP) -> ConsumerHeartbeat:
        """Return the next heartbeat: everything when it joins or its state is uncertain, otherwise what changed."""
        if full or self.epoch <= 0 or self.lost_response:
            values: dict[str, Any] = {
                "topics": self.topics,
                "expression": self.expression,
                "rebalance_timeout_ms": REBALANCE_MS,
                "owned": self.owned,
                **self.more,
            }
        else:
            values = {"owned": self.owned}
        if self.epoch == 0:
            values["owned"] = NOTHING
        return ConsumerHeartbeat(
            group_id=group_id,
            member_id=self.member_id,
            epoch=self.epoch,
            instance_id=self.instance_id,
            client_id="client",
            client_host="/127.0.0.1",
            **values,
        )

    def leave_request(self, epoch: int = -1, *, group_id: str = GROUP) -> ConsumerHeartbeat:
        return ConsumerHeartbeat(group_id=group_id, member_id=self.member_id, epoch=epoch, instance_id=self.instance_id)

    def handle_response(self, response: HeartbeatResult) -> None:
        """Apply a response; revoked partitions are given up only by `apply_assignment`."""
        self.epoch = response.epoch
        self.lost_response = False
        if response.assignment is not None:
            self.assigned = response.assignment
        if all(partitions <= self.assigned.get(topic, frozenset()) for topic, partitions in self.owned.items()):
            # There is nothing to revoke first.
            self.owned = self.assigned

    def apply_assignment(self) -> None:
        """Give up revoked partitions, and take the assigned ones."""
        self.owned = self.assigned

    def fence(self) -> None:
        """Discard everything and start over."""
        self.epoch = 0
        self.owned = self.assigned = NOTHING


class ConsumerHarness(GroupHarness):
    """A shard of groups, its log and its clock, with topics that are created, grow and are deleted."""

    def __init__(self, **limits: Any) -> None:
        self.cluster = MemoryTopics()
        self._ends: list[int] = []
        super().__init__(**{"consumer_session_ms": SESSION_MS, **limits})

    def append(self, records: Iterable[StateRecord]) -> None:
        """Append the records of one operation to the log, atomically."""
        super().append(records)
        if len(self.log) > (self._ends[-1] if self._ends else 0):
            self._ends.append(len(self.log))

    def reload_without_last(self, batches: int) -> None:
        """Reload the state from the log without the records of the last operations."""
        kept = self._ends[: len(self._ends) - batches]
        self.reload(lost=len(self.log) - (kept[-1] if kept else 0))
        self._ends = kept

    def add_topic(self, name: str, partitions: int) -> UUID:
        topic = self.cluster.add(name, partitions=partitions)
        self.topics[name] = topic.topic_id
        return topic.topic_id

    def remove_topic(self, name: str) -> None:
        self.cluster.remove(name)
        del self.topics[name]

    def id_of(self, name: str) -> UUID:
        """Return the id of a topic, which must exist."""
        return self.topics[name]

    def partitions(self, **by_name: set[int]) -> Assignment:
        return assignment_of((self.id_of(name), numbers) for name, numbers in by_name.items())

    def consumers(self, group_id: str = GROUP) -> ConsumerGroup:
        """Return a consumer group, which must exist."""
        group = self.shard.consumers.get(group_id)
        if group is None:
            raise LookupError(group_id)
        return group

    def send(self, request: ConsumerHeartbeat) -> Deferred[HeartbeatResult]:
        return self.run(lambda shard: shard.consumers.heartbeat(request))

    def send_heartbeat(self, consumer: SimulatedConsumer, *, full: bool = False) -> HeartbeatResult:
        """Send one heartbeat of a consumer and apply the response."""
        response = self.send(consumer.request(full=full)).result()
        consumer.handle_response(response)
        return response

    def settle(self, *consumers: SimulatedConsumer, rounds: int = 10) -> None:
        """Step all consumers until nothing changes any more."""
        for _ in range(rounds):
            for consumer in consumers:
                self.send_heartbeat(consumer)
                consumer.apply_assignment()

    def leave(self, *leavers: Any, group_id: str = GROUP) -> Any:
        """Make members leave: simulated consumers by their own protocol, others by the classic one."""
        if leavers and isinstance(leavers[0], SimulatedConsumer):
            return [self.send(consumer.leave_request()).result() for consumer in leavers]
        return super().leave(*leavers, group_id=group_id)

    def describe_consumers(self, group_id: str = GROUP) -> ConsumerGroupDescription:
        return self.run(lambda shard: shard.consumers.describe(group_id)).result()

    def _new_shard(self) -> GroupShard:
        return GroupShard(
            self.timers,
            limits=self.limits,
            clock=self.clock,
            topic_id_of=self.topics.get,
            new_suffix=lambda: str(next(self._suffixes)),
            topics=ConsumerTopics.of(self.cluster),
        )


def classic_protocols(
    *topics: str, owned: Iterable[tuple[str, Iterable[int]]] = (), names: Iterable[str] = ("range",), version: int = 1
) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a classic consumer of these topics."""
    writer = Writer(flexible=False)
    writer.int16(version)
    writer.array_length(len(topics))
    for topic in topics:
        writer.string(topic)
    writer.blob(None)
    if version >= 1:
        listed = [(topic, sorted(numbers)) for topic, numbers in owned]
        writer.array_length(len(listed))
        for topic, numbers in listed:
            writer.string(topic)
            writer.int32_array(numbers)
    return tuple((name, bytes(writer.buffer)) for name in names)


class ClassicConsumer:
    """A member of the classic protocol that a test steps manually; it revokes everything before it rejoins."""

    def __init__(self, harness: ConsumerHarness, *topics: str, instance_id: str | None = None) -> None:
        self._harness = harness
        self.topics = topics
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.owned: dict[str, set[int]] = {}

    def join(self, *, cooperative: bool = False) -> Deferred[JoinResponse]:
        """Join with the assigned member id; the response may come later."""
        kept = self.owned.items() if cooperative else ()
        if not cooperative:
            self.owned = {}
        protocols = classic_protocols(*self.topics, owned=kept)
        response = self._harness.join(self.member_id, instance_id=self.instance_id, protocols=protocols)
        if isinstance(response.error, MemberIdRequired):
            self.member_id = response.error.member_id
            response = self._harness.join(self.member_id, protocols=protocols)
        response.listen(self._joined)
        return response

    def sync(self, **assignments: Mapping[str, Iterable[int]]) -> Deferred[SyncResponse]:
        """Request the assignment; a leader sends those of all members."""
        encoded = {
            member_id: encode_assignment([(topic, list(numbers)) for topic, numbers in share.items()], version=1)
            for member_id, share in assignments.items()
        }
        response = self._harness.sync(
            self.member_id, generation=self.generation, assignments=encoded, instance_id=self.instance_id
        )
        response.listen(self._synced)
        return response

    def send_heartbeat(self) -> Deferred[None]:
        return self._harness.heartbeat(self.member_id, generation=self.generation, instance_id=self.instance_id)

    def rejoin_if_needed(self) -> None:
        """Act as a client: join and sync when asked to."""
        if self.send_heartbeat().error is not None:
            self.join(cooperative=True)
            self.sync()

    def _joined(self, response: Deferred[JoinResponse]) -> None:
        if response.error is None:
            self.member_id, self.generation = response.result().member_id, response.result().generation

    def _synced(self, response: Deferred[SyncResponse]) -> None:
        if response.error is None:
            partitions, _ = parse_assignment(response.result().assignment)
            self.owned = {topic: set(numbers) for topic, numbers in partitions}


class ConsumerProtocolClient:
    """A consumer of the new protocol, with at most one heartbeat in flight."""

    def __init__(self, number: int, choice: dict[str, Any], *, rebalance_timeout_ms: int) -> None:
        self.instance_id = "static" if number == 0 else None
        self.choice = choice
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self.requests = 0
        self.in_flight = False
        self.begin("")

    def begin(self, member_id: str) -> None:
        self.consumer = SimulatedConsumer(
            member_id, instance_id=self.instance_id, rebalance_timeout_ms=self._rebalance_timeout_ms
        )
        self.received: dict[str, Any] = {}
        self.joined = False
        self.requests += 1
        self.in_flight = False


class ClassicProtocolClient:
    """A consumer of the classic protocol that revokes everything before it joins."""

    def __init__(self) -> None:
        self.member_id = ""
        self.generation = -1
        self.owned: Assignment = NOTHING
        self.joined: JoinResponse | None = None
        self.requests = 0
