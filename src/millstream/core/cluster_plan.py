"""Plans: which partitions move where, and what that costs. Pure functions from the load of a cluster to moves.

A plan never leaves a partition with fewer replicas or in fewer racks than before, unless it reports so: a partition
that cannot move is listed with the reason. No replica moves to a machine that has one of the same partition. Moves that
only change the preferred leader cost no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final
from uuid import UUID

from millstream.core.errors import InvalidRequest, NotFound
from millstream.core.ids import NodeId, PartitionIndex

DRAIN: Final = "drain"
REMOVE: Final = "remove"
BALANCE: Final = "balance"
REPLICATE: Final = "replicate"

THROTTLE_BYTES: Final = 32 * 1024 * 1024
"""How many bytes per second a node fetches for moves, unless the user says otherwise."""

FULL: Final = 0.9
"""A disk that a plan fills beyond this share is reported as a risk."""

_STEPS_MAX: Final = 2000
_CANDIDATES_MAX: Final = 64
"""Replicas that are tried in one step of balancing, so that ten thousand partitions are planned in seconds."""

_EVEN: Final = 0.05
"""A replica stays if the node that it would leave had, without it, at most this share of an average load more than the
node that it would go to: less is not worth the bytes."""

_UNEVEN: Final = 2 * _EVEN
"""The threshold for the first replica to move: a cluster that was just balanced stays as it is while loads vary."""

_SIZE_MIN: Final = 64 * 1024 * 1024
_RATE_MIN: Final = 1024 * 1024
"""An average load counts as at least this many bytes, and bytes per second: differences of less than a twentieth of it
are no reason to move. Rates, which are measured over one second, vary by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """The properties of a node that matter for a plan."""

    node_id: NodeId
    rack: str | None = None
    machine: NodeId | None = None
    """The first of the nodes that share its machine; None if it has its own machine."""
    is_live: bool = True
    is_drained: bool = False
    """New leaders and replicas are kept away from it."""
    disk_bytes: int = 0
    """The size of its disk; 0 if it is not known."""
    disk_free_bytes: int = 0

    @property
    def failure_domain(self) -> NodeId:
        """The failure domain of this node; two replicas of a partition are never in the same one."""
        return self.node_id if self.machine is None else self.machine

    @property
    def place(self) -> str | tuple[NodeId]:
        """The rack, otherwise the machine: replicas of a partition are spread over as many as there are."""
        return self.rack or (self.failure_domain,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLoad:
    """A partition, its replicas, its size and its write rate."""

    topic: str
    topic_id: UUID
    index: PartitionIndex
    replicas: tuple[NodeId, ...]
    in_sync: tuple[NodeId, ...]
    size_bytes: int = 0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.topic}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """Everything that a plan is computed from."""

    nodes: Mapping[NodeId, NodeLoad]
    partitions: Sequence[PartitionLoad]

    def require(self, node: NodeId) -> NodeLoad:
        """Return a node of the cluster, or raise `NotFound`."""
        load = self.nodes.get(node)
        if load is None:
            known = ", ".join(map(str, sorted(self.nodes)))
            raise NotFound(f"the cluster has no node {node}; its nodes are {known}")
        return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A partition and its new replicas, the preferred leader first."""

    topic: str
    topic_id: UUID
    index: PartitionIndex
    before: tuple[NodeId, ...]
    target: tuple[NodeId, ...]
    size_bytes: int

    @property
    def receivers(self) -> tuple[NodeId, ...]:
        return tuple(node for node in self.target if node not in self.before)

    @property
    def moved_bytes(self) -> int:
        """How much is sent over the network."""
        return self.size_bytes * len(self.receivers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The moves of a plan, and information for the operator who reviews it."""

    kind: str
    subject: str
    """The node or the topics that it is about."""
    moves: tuple[Move, ...]
    staying: tuple[str, ...] = ()
    """Partitions that cannot move, each with the reason."""
    risks: tuple[str, ...] = ()

    @property
    def moved_bytes(self) -> int:
        """How much all moves send over the network."""
        return sum(move.moved_bytes for move in self.moves)

    def seconds(self, throttle_bytes: int) -> float:
        """Return how long the busiest receiver needs, if each may fetch this many bytes per second."""
        received: Counter[NodeId] = Counter()
        for move in self.moves:
            for node in move.receivers:
                received[node] += move.size_bytes
        return max(received.values(), default=0) / max(1, throttle_bytes)


@dataclass(slots=True)
class _Weights:
    """The load of each node while a plan is computed."""

    size: Counter[NodeId] = field(default_factory=Counter)
    rate: dict[NodeId, float] = field(default_factory=dict)
    replicas: Counter[NodeId] = field(default_factory=Counter)
    leaders: Counter[NodeId] = field(default_factory=Counter)

    @classmethod
    def of(cls, load: ClusterLoad) -> _Weights:
        weights = cls(rate=dict.fromkeys(load.nodes, 0.0))
        for partition in load.partitions:
            weights.leaders[partition.replicas[0]] += 1
            for node in partition.replicas:
                weights.add(node, partition, 1)
        return weights

    def add(self, node: NodeId, partition: PartitionLoad, sign: int) -> None:
        self.size[node] += sign * partition.size_bytes
        self.rate[node] = self.rate.get(node, 0.0) + sign * partition.bytes_per_s
        self.replicas[node] += sign

    def replace(self, partition: PartitionLoad, before: tuple[NodeId, ...], target: tuple[NodeId, ...]) -> None:
        """Count a partition as moved."""
        for node in set(before) - set(target):
            self.add(node, partition, -1)
        for node in set(target) - set(before):
            self.add(node, partition, 1)
        self.leaders[before[0]] -= 1
        self.leaders[target[0]] += 1


def plan_drain(load: ClusterLoad, node: NodeId) -> Plan:
    """Move every replica of a node that another node can take."""
    return _vacate(load, node, DRAIN)


def plan_remove(load: ClusterLoad, node: NodeId) -> Plan:
    """Move every replica of a node elsewhere, so that it can be removed; raise if one cannot move."""
    plan = _vacate(load, node, REMOVE)
    if plan.staying:
        more = f" (and {_counted(len(plan.staying) - 1, 'more partition')})" if len(plan.staying) > 1 else ""
        raise InvalidRequest(
            f"node {node} cannot be removed: {plan.staying[0]}{more}; add a node first, or lower the number of "
            "replicas with: millstream topic replicate PATTERN --to N"
        )
    return plan


def _vacate(load: ClusterLoad, node: NodeId, kind: str) -> Plan:
    load.require(node)
    weights = _Weights.of(load)
    takers = _receivers(load, without=node)
    moves, staying = [], []
    for partition in sorted(load.partitions, key=lambda partition: -partition.size_bytes):
        if node not in partition.replicas:
            continue
        rest = [replica for replica in partition.replicas if replica != node]
        taker = _best_receiver(takers, rest, load, weights)
        if taker is None:
            machines = len({load.nodes[taker].failure_domain for taker in takers})
            staying.append(f"{partition} cannot move: {_too_few(len(partition.replicas), machines)}")
            continue
        target = tuple(taker if replica == node else replica for replica in partition.replicas)
        if partition.replicas[0] == node:
            target = _with_least_loaded_leader(target, load, weights)
        weights.replace(partition, partition.replicas, target)
        moves.append(_build_move(partition, target))
    risks = [*_risks(load, moves), *_risks_of_staying(load, node, staying)]
    return Plan(kind=kind, subject=str(node), moves=tuple(moves), staying=tuple(staying), risks=tuple(risks))


def _too_few(replicas: int, machines: int) -> str:
    need = "replicas need as many machines" if replicas > 1 else "replica needs a machine"
    return f"{replicas} {need}, and {machines} can take one"


def plan_replicate(load: ClusterLoad, topics: Collection[str], to: int) -> Plan:
    """Plan this number of replicas for each partition of some topics; new ones go to the least loaded nodes."""
    if to < 1:
        raise InvalidRequest("a topic has at least one replica")
    weights = _Weights.of(load)
    takers = _receivers(load)
    machines = len({load.nodes[node].failure_domain for node in takers})
    if to > machines:
        raise InvalidRequest(_too_few(to, machines))
    moves = []
    for partition in load.partitions:
        if partition.topic not in topics or len(partition.replicas) == to:
            continue
        target = list(partition.replicas)
        while len(target) > to:
            target.remove(_replica_to_remove(target, partition, load, weights))
        while len(target) < to:
            taker = _best_receiver(takers, target, load, weights)
            if taker is None:
                break
            target.append(taker)
        weights.replace(partition, partition.replicas, tuple(target))
        moves.append(_build_move(partition, tuple(target)))
    risks = _risks(load, moves)
    crowded = [move for move in moves if len({_rack_or_machine(load, node) for node in move.target}) < len(move.target)]
    if crowded:
        risks.append(
            f"replicas of {_counted(len(crowded), 'partition')} share a rack: there are fewer racks than replicas"
        )
    if to == 1 and moves:
        risks.append("one replica has no copy: what its disk loses is lost")
    return Plan(kind=REPLICATE, subject=f"{', '.join(sorted(topics))} to {to}", moves=tuple(moves), risks=tuple(risks))


def _replica_to_remove(
    target: Sequence[NodeId], partition: PartitionLoad, load: ClusterLoad, weights: _Weights
) -> NodeId:
    """Return the replica to give up: one that is dead or not in sync, else the one on the fullest node."""
    used = Counter(_rack_or_machine(load, node) for node in target)

    def cost(node: NodeId) -> tuple[bool, bool, bool, int, NodeId]:
        known = load.nodes.get(node)
        return (
            known is None or not known.is_live,
            node not in partition.in_sync,
            used[_rack_or_machine(load, node)] > 1,
            weights.size[node],
            node,
        )

    # The preferred leader stays if any other can go.
    return max(target[1:] or target, key=cost)


def plan_balance(load: ClusterLoad) -> Plan:
    """Even out bytes, write rates, replicas and leaders; no partition ends up in fewer racks than before."""
    weights = _Weights.of(load)
    takers = _receivers(load)
    targets = {id(partition): partition.replicas for partition in load.partitions}
    if len(takers) > 1:
        _separate_racks(load, takers, weights, targets)
        _spread_replicas(load, takers, weights, targets)
        _spread_leaders(load, takers, weights, targets)
    moves = [
        _build_move(partition, targets[id(partition)])
        for partition in load.partitions
        if targets[id(partition)] != partition.replicas
    ]
    return Plan(kind=BALANCE, subject="", moves=tuple(moves), risks=tuple(_risks(load, moves)))


_Targets = dict[int, tuple[NodeId, ...]]
"""The replicas of each partition, by the identity of its load."""


def _separate_racks(load: ClusterLoad, takers: Sequence[NodeId], weights: _Weights, targets: _Targets) -> None:
    """Move replicas that share a machine, and those that share a rack although another rack has none."""
    for partition in load.partitions:
        replicas = targets[id(partition)]
        for node in reversed(replicas):
            rest = [replica for replica in replicas if replica != node]
            taker = _best_receiver(takers, rest, load, weights)
            if taker is None:
                continue
            used = {_rack_or_machine(load, replica) for replica in rest}
            is_rack_shared = _rack_or_machine(load, node) in used and _rack_or_machine(load, taker) not in used
            if is_rack_shared or _machine(load, node) in {_machine(load, replica) for replica in rest}:
                target = tuple(taker if replica == node else replica for replica in replicas)
                weights.replace(partition, replicas, target)
                targets[id(partition)] = target
                break


def _spread_replicas(load: ClusterLoad, takers: Sequence[NodeId], weights: _Weights, targets: _Targets) -> None:
    """Move replicas, one by one, from the most loaded node that has one to give to where it evens out the load most."""
    hosted: dict[NodeId, dict[int, PartitionLoad]] = {node: {} for node in takers}
    # In this order, a sample has partitions of all sizes.
    for partition in sorted(
        load.partitions,
        key=lambda partition: (partition.size_bytes, partition.bytes_per_s, partition.topic, partition.index),
    ):
        for node in targets[id(partition)]:
            if node in hosted:
                hosted[node][id(partition)] = partition
    total_size = max(sum(weights.size[node] for node in takers), len(takers) * _SIZE_MIN)
    total_rate = max(sum(weights.rate[node] for node in takers), len(takers) * _RATE_MIN)
    total_count = sum(weights.replicas[node] for node in takers) or 1
    # The number of replicas matters least: it decides only between loads that are otherwise even.
    scales = ((1.0, total_size), (1.0, total_rate), (0.05, total_count))

    def shares(node: NodeId, size: float = 0, rate: float = 0.0, count: int = 0) -> float:
        loads = (weights.size[node] + size, weights.rate[node] + rate, weights.replicas[node] + count)
        return sum(scale * (amount / total) ** 2 for (scale, total), amount in zip(scales, loads, strict=True))

    gain_min = 2 * _UNEVEN / len(takers)
    sources, has_moved = set(takers), False
    for _ in range(_STEPS_MAX):
        if not sources:
            if not has_moved:
                return
            # Nodes that had nothing to give may have something now.
            sources, has_moved = set(takers), False
        now = {node: shares(node) for node in takers}
        source = max(sources, key=lambda node: (now[node], node))
        best: tuple[float, PartitionLoad, NodeId] | None = None
        for partition in islice(hosted[source].values(), None, None, len(hosted[source]) // _CANDIDATES_MAX + 1):
            size, rate = partition.size_bytes, partition.bytes_per_s
            replicas = targets[id(partition)]
            rest = [replica for replica in replicas if replica != source]
            racks = len({_rack_or_machine(load, replica) for replica in replicas})
            machines = {_machine(load, replica) for replica in rest}
            saved = now[source] - shares(source, -size, -rate, -1)
            weight = sum(scale * amount / total for (scale, total), amount in zip(scales, (size, rate, 1), strict=True))
            for node in takers:
                gain = saved - (shares(node, size, rate, 1) - now[node])
                if gain <= gain_min * weight or (best is not None and gain <= best[0]):
                    continue
                if node in replicas or _machine(load, node) in machines:
                    continue
                if len({_rack_or_machine(load, replica) for replica in (*rest, node)}) >= racks:
                    best = gain, partition, node
        if best is None:
            sources.remove(source)
            continue
        _, partition, node = best
        before = targets[id(partition)]
        target = tuple(node if replica == source else replica for replica in before)
        weights.replace(partition, before, target)
        targets[id(partition)] = target
        hosted[node][id(partition)] = hosted[source].pop(id(partition))
        gain_min, has_moved = 2 * _EVEN / len(takers), True


def _spread_leaders(load: ClusterLoad, takers: Sequence[NodeId], weights: _Weights, targets: _Targets) -> None:
    """Change the preferred leader while another replica's node leads at least two partitions fewer."""
    has_changed = True
    while has_changed:
        has_changed = False
        for partition in load.partitions:
            replicas = targets[id(partition)]
            others = [node for node in replicas[1:] if node in takers]
            if not others:
                continue
            least = min(others, key=lambda node: (weights.leaders[node], node))
            if replicas[0] not in takers or weights.leaders[replicas[0]] - weights.leaders[least] >= 2:
                target = (least, *(node for node in replicas if node != least))
                weights.replace(partition, replicas, target)
                targets[id(partition)] = target
                has_changed = True


def _receivers(load: ClusterLoad, *, without: NodeId | None = None) -> list[NodeId]:
    return sorted(
        node.node_id for node in load.nodes.values() if node.is_live and not node.is_drained and node.node_id != without
    )


def _best_receiver(
    takers: Iterable[NodeId], rest: Collection[NodeId], load: ClusterLoad, weights: _Weights
) -> NodeId | None:
    """Return the node for one more replica: in a rack without one if there is such a rack, then the least loaded."""
    used = Counter(_rack_or_machine(load, node) for node in rest)
    machines = {_machine(load, node) for node in rest}
    return min(
        (node for node in takers if _machine(load, node) not in machines),
        key=lambda node: (used[_rack_or_machine(load, node)], weights.size[node], weights.replicas[node], node),
        default=None,
    )


def _rack_or_machine(load: ClusterLoad, node: NodeId) -> str | tuple[NodeId]:
    known = load.nodes.get(node)
    return (node,) if known is None else known.place


def _machine(load: ClusterLoad, node: NodeId) -> NodeId:
    known = load.nodes.get(node)
    return node if known is None else known.failure_domain


def _with_least_loaded_leader(target: tuple[NodeId, ...], load: ClusterLoad, weights: _Weights) -> tuple[NodeId, ...]:
    candidates = [node for node in target if node in load.nodes and not load.nodes[node].is_drained]
    leader = min(candidates or target, key=lambda node: (weights.leaders[node], target.index(node)))
    return (leader, *(node for node in target if node != leader))


def _build_move(partition: PartitionLoad, target: tuple[NodeId, ...]) -> Move:
    return Move(
        topic=partition.topic,
        topic_id=partition.topic_id,
        index=partition.index,
        before=partition.replicas,
        target=target,
        size_bytes=partition.size_bytes,
    )


def _risks(load: ClusterLoad, moves: Sequence[Move]) -> list[str]:
    risks = []
    moving = {(move.topic_id, move.index) for move in moves if move.receivers}
    exposed = [
        partition
        for partition in load.partitions
        if (partition.topic_id, partition.index) in moving and len(partition.in_sync) < 2
    ]
    if exposed:
        risks.append(
            f"{_counted(len(exposed), 'partition')} {'have' if len(exposed) > 1 else 'has'} a single replica in sync "
            f"until the move is done: {_describe_partitions(exposed)}"
        )
    away = sorted(node.node_id for node in load.nodes.values() if not node.is_live)
    if away:
        risks.append(f"not running: {'nodes' if len(away) > 1 else 'node'} {', '.join(map(str, away))}")
    received: Counter[NodeId] = Counter()
    for move in moves:
        for node_id in move.receivers:
            received[node_id] += move.size_bytes
    for node_id, size in sorted(received.items()):
        node = load.nodes[node_id]
        used = node.disk_bytes - node.disk_free_bytes + size
        if node.disk_bytes and used > FULL * node.disk_bytes:
            risks.append(f"the disk of node {node_id} would be {round(100 * used / node.disk_bytes)} % full")
    return risks


def _risks_of_staying(load: ClusterLoad, node: NodeId, staying: Sequence[str]) -> list[str]:
    if not staying:
        return []
    return [f"{_counted(len(staying), 'partition')} will lack a replica while node {node} is down"]


_NAMED_MAX: Final = 5


def _describe_partitions(partitions: Sequence[PartitionLoad]) -> str:
    more = f" and {len(partitions) - _NAMED_MAX} more" if len(partitions) > _NAMED_MAX else ""
    return ", ".join(map(str, partitions[:_NAMED_MAX])) + more


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
