"""The safety invariants, checked after every step of a simulation. They see the whole state and trust no node.

- A batch below the high watermark of any replica is committed: all replicas that reach so far have the same bytes.
- A new leader has everything that is committed.
- A replica that the store counts as in sync or eligible has everything that is committed; a machine that crashed is
  exempt until the controller has admitted it again.
- An epoch has one leader, and epochs never go back.
- What was acknowledged with `acks=all` is committed at the acknowledged offset; the batches of an idempotent producer
  are committed in order, without duplicates or gaps. What a consumer read is committed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.store import Entry
from millstream.broker.replication.partition import Partition
from millstream.core.errors import MillstreamError
from millstream.core.ids import NO_PRODUCER_ID, NodeId
from millstream.core.partition_state import PartitionState
from millstream.protocol.records.batch import BatchHeader, Buffer, iterate_headers

_SENT_FROM = 16
"""The bytes from here on are those of the producer; offset and epoch come from the leader."""


class Violation(Exception):
    """A rule that must always hold was broken."""


class Committed:
    """The batches of one partition from its first offset to the highest high watermark that any replica had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.end = 0
        self._bases: list[int] = []
        self._batches: list[bytes] = []
        self._next_sequences: dict[int, tuple[int, int]] = {}
        """By producer: its epoch, and the sequence that comes next in it."""

    def __len__(self) -> int:
        return len(self._batches)

    def since(self, number: int) -> list[bytes]:
        """Return the batches after the first `count`."""
        return self._batches[number:]

    def check(self, records: Buffer, whose: str, *, may_extend: bool) -> int:
        """Compare stored batches with the committed ones; batches after the end become committed if that is allowed.

        Returns the offset after the last batch.
        """
        end = 0
        for header in iterate_headers(records):
            batch = bytes(records[header.position : header.end_position])
            if header.base_offset >= self.end and may_extend:
                self._extend(batch, header.base_offset, header.next_offset, whose)
                self._check_sequence(header)
            elif self._at(header.base_offset) != batch:
                raise Violation(
                    f"{self.name}: {whose} has at offset {header.base_offset} {_short(batch)}, but committed was "
                    f"{_short(self._at(header.base_offset))}"
                )
            end = header.next_offset
        return end

    def check_acknowledged(self, sent: bytes, base_offset: int, next_offset: int, whose: str) -> None:
        if next_offset > self.end or self._at(base_offset)[_SENT_FROM:] != sent[_SENT_FROM:]:
            raise Violation(
                f"{self.name}: {whose} got offset {base_offset} for its batch, but committed is up to {self.end} "
                f"and there {_short(self._at(base_offset))}"
            )

    def _extend(self, batch: bytes, base_offset: int, next_offset: int, whose: str) -> None:
        if base_offset != self.end:
            raise Violation(f"{self.name}: {whose} goes from offset {self.end} to {base_offset}")
        self._bases.append(base_offset)
        self._batches.append(batch)
        self.end = next_offset

    def _check_sequence(self, header: BatchHeader) -> None:
        producer = header.producer_id
        if producer == NO_PRODUCER_ID:
            return
        epoch, expected = self._next_sequences.get(producer, (0, 0))
        if header.producer_epoch < epoch:
            raise Violation(
                f"{self.name}: producer {producer} has epoch {header.producer_epoch} committed after epoch {epoch}"
            )
        if header.producer_epoch > epoch:
            expected = 0
        sequence = header.base_sequence
        if not header.is_control:
            if sequence != expected:
                kind = "duplicated or out of order" if sequence < expected else "lost"
                raise Violation(
                    f"{self.name}: producer {producer} has sequence {sequence} committed instead of {expected} ({kind})"
                )
            expected += header.record_count
        self._next_sequences[producer] = (header.producer_epoch, expected)

    def _at(self, offset: int) -> bytes:
        at = bisect_right(self._bases, offset) - 1
        return self._batches[at] if at >= 0 and offset == self._bases[at] else b""


def _short(batch: bytes) -> str:
    if not batch:
        return "nothing"
    header = next(iter(iterate_headers(batch)))
    return (
        f"a batch of producer {header.producer_id}, sequence {header.base_sequence}, epoch {header.leader_epoch}, "
        f"{len(batch)} bytes"
    )


_READ_BYTES = 1024 * 1024


class ObservedNode(Protocol):
    """The properties of a node that the rules check."""

    node_id: NodeId
    suspect: bool
    """Whether its machine crashed, and it has not been admitted again."""
    is_running: bool

    def replicas(self) -> Mapping[PartitionKey, Partition]:
        """Return its partitions, or the last ones while it is down. The mapping is replaced when they change."""


@dataclass(slots=True)
class _Seen:
    """The last known state of one replica."""

    partition: Partition
    high_watermark: int = -1
    epoch: int = -1
    is_leader: bool = False
    verified: int = 0
    """Below this offset, its committed data was verified."""
    generation: int = -1
    is_down: bool = False
    """Whether the node was killed: nothing can be read, but what it had written still exists."""


class Rules:
    """The rules for every partition."""

    def __init__(self, record: Callable[[str, str], None]) -> None:
        self.committed: dict[PartitionKey, Committed] = {}
        self.states: dict[PartitionKey, PartitionState] = {}
        self._record = record
        self._nodes: dict[NodeId, ObservedNode] = {}
        self._seen: dict[tuple[NodeId, PartitionKey], _Seen] = {}
        self._listed: dict[NodeId, tuple[Mapping[PartitionKey, Partition], list[tuple[PartitionKey, _Seen]]]] = {}
        self._leaders: dict[tuple[PartitionKey, int], NodeId] = {}
        self._revisions: dict[str, int] = {}

    def watch(self, node: ObservedNode) -> None:
        """Start checking a node."""
        self._nodes[node.node_id] = node

    # -- nodes ------------------------------------------------------------------------------------------------

    def check_after_step(self, node: ObservedNode) -> None:
        """Check what changed on a node in a step."""
        for key, seen in self._watched(node):
            partition = seen.partition
            if (
                partition.high_watermark != seen.high_watermark
                or partition.leader_epoch != seen.epoch
                or partition.is_leader != seen.is_leader
                or partition.log.generation != seen.generation
            ):
                self._check_replica(node, key, seen)

    def _watched(self, node: ObservedNode) -> list[tuple[PartitionKey, _Seen]]:
        """Return what was seen of a node's replicas, recomputed only when they change."""
        replicas = node.replicas()
        known = self._listed.get(node.node_id)
        if known is None or known[0] is not replicas:
            for key, partition in replicas.items():
                seen = self._seen.get((node.node_id, key))
                if seen is None or seen.partition is not partition:
                    self._seen[node.node_id, key] = _Seen(partition)
            known = replicas, [(key, self._seen[node.node_id, key]) for key in replicas]
            self._listed[node.node_id] = known
        return known[1]

    def _check_replica(self, node: ObservedNode, key: PartitionKey, seen: _Seen) -> None:
        partition, committed = seen.partition, self.of(key)
        whose = f"node {node.node_id}"
        if partition.log.generation != seen.generation:
            seen.generation, seen.verified = partition.log.generation, 0
        if partition.high_watermark > partition.log.end_offset:
            raise Violation(f"{committed.name}: {whose} has its high watermark beyond the end of its log")
        began = partition.is_leader and (not seen.is_leader or partition.leader_epoch != seen.epoch)
        if partition.leader_epoch < seen.epoch:
            raise Violation(f"{committed.name}: {whose} went back to epoch {partition.leader_epoch} from {seen.epoch}")
        seen.epoch, seen.is_leader = partition.leader_epoch, partition.is_leader
        if began:
            self._record(whose, f"leads {committed.name} in epoch {partition.leader_epoch} from {_span(partition)}")
            self._check_epoch_start(node, key, seen)
        if partition.high_watermark > seen.high_watermark:
            before = committed.end
            self._verify(seen, committed, partition.high_watermark, whose)
            if committed.end > before:
                self._record(whose, f"commits {committed.name} up to {committed.end}")
                self._check_members(key)
        seen.high_watermark = partition.high_watermark

    def _check_epoch_start(self, node: ObservedNode, key: PartitionKey, seen: _Seen) -> None:
        epoch = seen.partition.leader_epoch
        committed = self.of(key)
        leader = self._leaders.setdefault((key, epoch), node.node_id)
        if leader != node.node_id:
            raise Violation(f"{committed.name}: nodes {leader} and {node.node_id} both lead in epoch {epoch}")
        if node.suspect:
            raise Violation(f"{committed.name}: node {node.node_id} leads before it was admitted after a crash")
        # A node that learns of its election late may lack newer committed data; it cannot commit anything.
        if epoch == self.states[key].leader_epoch:
            self._require(seen, committed, f"node {node.node_id}, leader of epoch {epoch},")

    def _require(self, seen: _Seen, committed: Committed, whose: str) -> None:
        """Raise unless a replica has everything that is committed, as durable as the topic requires."""
        promised = seen.partition.promised_offset
        if promised < committed.end:
            raise Violation(
                f"{committed.name}: {whose} has offsets up to {promised} only, but committed is up to {committed.end}"
            )
        self._verify(seen, committed, committed.end, whose)

    def _verify(self, seen: _Seen, committed: Committed, up_to: int, whose: str) -> None:
        log = seen.partition.log
        if log.closed or seen.is_down:
            return
        while seen.verified < up_to:
            try:
                records = log.read(seen.verified, max_bytes=_READ_BYTES, up_to=up_to)
            except MillstreamError as error:
                raise Violation(f"{committed.name}: {whose} cannot be read: {error}") from error
            if not records:
                raise Violation(f"{committed.name}: {whose} cannot read offset {seen.verified} of {up_to}")
            seen.verified = committed.check(records, whose, may_extend=up_to == seen.partition.high_watermark)

    def stopping(self, node: ObservedNode) -> None:
        """Record the state of a node before it is killed, since nothing can be read afterwards."""
        for key in node.replicas():
            seen, state = self._seen.get((node.node_id, key)), self.states.get(key)
            if seen is None:
                continue
            if state is not None and not node.suspect and node.node_id in (*state.in_sync, *state.eligible):
                self._require(seen, self.of(key), f"node {node.node_id}, which is about to stop,")
            seen.is_down = True

    # -- the store --------------------------------------------------------------------------------------------

    def store_changed(self, entries: Iterable[Entry]) -> None:
        """Check the states of partitions that have changed in the store."""
        for entry in entries:
            if not entry.key.startswith(keys.PARTITIONS) or self._revisions.get(entry.key) == entry.revision:
                continue
            self._revisions[entry.key] = entry.revision
            key = keys.parse_partition(entry.key.removeprefix(keys.PARTITIONS))
            self._state_changed(key, PartitionState.from_json(entry.value))

    def _state_changed(self, key: PartitionKey, state: PartitionState) -> None:
        name, before = self.of(key).name, self.states.get(key)
        self.states[key] = state
        self._record("store", f"{name}: {_describe(state)}")
        if before is not None:
            if state.leader_epoch < before.leader_epoch:
                raise Violation(f"{name}: the epoch went back from {before.leader_epoch} to {state.leader_epoch}")
            if state.leader_epoch == before.leader_epoch and state.leader != before.leader:
                raise Violation(
                    f"{name}: epoch {state.leader_epoch} has two leaders, {before.leader} and {state.leader}"
                )
        if state.has_leader and state.leader not in state.in_sync:
            raise Violation(f"{name}: the leader {state.leader} is not in sync: {state.in_sync}")
        if not state.in_sync or not {*state.in_sync, *state.eligible} <= set(state.replicas):
            raise Violation(f"{name}: {_describe(state)} cannot be")
        self._check_members(key)

    def _check_members(self, key: PartitionKey) -> None:
        """Check that every electable replica has everything that is committed."""
        state, committed = self.states.get(key), self.of(key)
        if state is None:
            return
        for kind, members in (("in sync", state.in_sync), ("eligible", state.eligible)):
            for member in members:
                node = self._nodes[member]
                seen = self._seen.get((member, key))
                if node.suspect or (seen is None and not committed.end):
                    continue
                if seen is None:
                    raise Violation(f"{committed.name}: node {member} is {kind} and has no replica")
                self._require(seen, committed, f"node {member}, which is {kind},")

    def has_everything(self, node: ObservedNode, key: PartitionKey) -> bool:
        """Whether a node may be elected and has everything that is committed."""
        state, seen = self.states[key], self._seen.get((node.node_id, key))
        is_member = node.node_id in state.in_sync or node.node_id in state.eligible
        return is_member and seen is not None and seen.partition.log.end_offset >= self.of(key).end

    # -- clients ----------------------------------------------------------------------------------------------

    def acknowledged(self, key: PartitionKey, sent: bytes, base_offset: int, next_offset: int, whose: str) -> None:
        """Check an acknowledged batch."""
        self.of(key).check_acknowledged(sent, base_offset, next_offset, whose)

    def consumed(self, key: PartitionKey, records: bytes, whose: str) -> int:
        """Check batches that a consumer received; return where it reads next."""
        return self.of(key).check(records, whose, may_extend=False)

    # -- in the end -------------------------------------------------------------------------------------------

    def replica_differences(self, nodes: Iterable[ObservedNode]) -> str | None:
        """Return what differs between the replicas after all faults; None if all are in sync and equal."""
        for key, state in self.states.items():
            committed = self.of(key)
            if not state.has_leader or set(state.in_sync) != set(state.replicas):
                return f"{committed.name}: {_describe(state)}"
            for node in nodes:
                if node.node_id not in state.replicas:
                    continue
                partition = node.replicas().get(key)
                if partition is None or not node.is_running:
                    return f"{committed.name}: node {node.node_id} is not there"
                if partition.is_leader != (state.leader == node.node_id):
                    return f"{committed.name}: node {node.node_id} does not know who leads"
                if not partition.high_watermark == partition.log.end_offset == committed.end:
                    return f"{committed.name}: node {node.node_id} has {_span(partition)}, committed is {committed.end}"
        return None

    def of(self, key: PartitionKey) -> Committed:
        """Return what is committed of a partition."""
        committed = self.committed.get(key)
        if committed is None:
            committed = self.committed[key] = Committed(f"{str(key[0])[:4]}-{key[1]}")
        return committed


def _span(partition: Partition) -> str:
    return f"{partition.log.start_offset}..{partition.high_watermark}..{partition.log.end_offset}"


def _describe(state: PartitionState) -> str:
    members = f"in sync {list(state.in_sync)} eligible {list(state.eligible)}"
    return f"leader {state.leader} epoch {state.leader_epoch} {members}"
