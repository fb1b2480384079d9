"""The faults of a cluster, one class for each kind: how each begins, and how it ends.

A fault is drawn from a seed: which nodes it affects and how long it lasts. `is_repaired_last` marks faults whose repair
restarts nodes, which requires that everything else works.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from millstream_testing.cluster_network import ETCD
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster

CLOCK_STEP_MS_MAX = 6 * 3600 * 1000
"""Shorter than a partition remembers an idempotent producer, and far shorter than retention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultContext:
    """The cluster that a fault affects, and the source of randomness."""

    cluster: TrialCluster
    random: Random
    lease_s: float

    def random_node(self) -> int:
        return self.random.choice(sorted(self.cluster.nodes))

    def short_s(self) -> float:
        """Return at most about a lease, so that usually no failover is needed."""
        return self.lease_s * self.random.uniform(0.1, 1.0)

    def long_s(self) -> float:
        """Return more than a lease, so that the cluster continues without the node."""
        return self.lease_s * self.random.uniform(1.2, 2.5)

    def short_or_long_s(self) -> float:
        """Return either kind of duration."""
        return self.random.choice([self.short_s, self.long_s])()


class Fault(ABC):
    """A fault."""

    is_repaired_last = False
    duration_s: float
    nodes: frozenset[int] = frozenset()
    """The nodes whose process it stops; two concurrent faults must not stop the same one."""

    def __init__(self, context: FaultContext) -> None:
        self._cluster = context.cluster
        self._draw(context)

    @abstractmethod
    def _draw(self, context: FaultContext) -> None:
        """Choose the affected nodes and the duration."""

    @abstractmethod
    def begin(self) -> None:
        """Begin the fault."""

    @abstractmethod
    def end(self) -> None:
        """Repair what the fault broke."""

    @abstractmethod
    def __str__(self) -> str:
        """Describe the fault, for the report."""


class Kill(Fault):
    """A node is killed and started again."""

    is_repaired_last = True

    def _draw(self, context: FaultContext) -> None:
        self._node = context.random_node()
        self.nodes = frozenset({self._node})
        self.duration_s = context.random.choice([0.0, context.short_s(), context.long_s()])

    def begin(self) -> None:
        self._cluster.nodes[self._node].kill()

    def end(self) -> None:
        """Start it again on its data."""
        self._cluster.start([self._node])

    def __str__(self) -> str:
        return f"node {self._node} killed, away for {self.duration_s:.1f} s"


class GracefulStop(Kill):
    """A node is stopped cleanly, as for maintenance, and started again."""

    def begin(self) -> None:
        code = self._cluster.nodes[self._node].stop()
        if code:
            raise TrialFailed(f"node {self._node} stopped with exit code {code}")

    def __str__(self) -> str:
        return f"node {self._node} stopped, away for {self.duration_s:.1f} s"


class LoseDisk(Kill):
    """A node is killed and returns with an empty disk: only its id is left."""

    def end(self) -> None:
        """Start it with an empty disk."""
        shutil.rmtree(self._cluster.nodes[self._node].data)
        super().end()

    def __str__(self) -> str:
        return f"node {self._node} killed, away for {self.duration_s:.1f} s, back without its data"


class KillAll(Fault):
    """All nodes are killed at once and started again."""

    is_repaired_last = True

    def _draw(self, context: FaultContext) -> None:
        self.nodes = frozenset(context.cluster.nodes)
        self.duration_s = context.random.choice([0.0, context.long_s()])

    def begin(self) -> None:
        for node in self._cluster.nodes.values():
            node.kill()

    def end(self) -> None:
        """Start them together."""
        self._cluster.start()

    def __str__(self) -> str:
        return f"all nodes killed, away for {self.duration_s:.1f} s"


class Pause(Fault):
    """A node is paused for longer than its lease, and does not notice."""

    def _draw(self, context: FaultContext) -> None:
        self._node = context.random_node()
        self.nodes = frozenset({self._node})
        self.duration_s = context.long_s()

    def begin(self) -> None:
        self._cluster.nodes[self._node].pause()

    def end(self) -> None:
        self._cluster.nodes[self._node].resume()

    def __str__(self) -> str:
        return f"node {self._node} paused for {self.duration_s:.1f} s"


class Cut(Fault):
    """The link between two nodes is cut."""

    _one_way = False

    def _draw(self, context: FaultContext) -> None:
        self._links = self._choose(context)
        self.duration_s = context.short_or_long_s()

    def _choose(self, context: FaultContext) -> list[tuple[int, int]]:
        one, other = context.random.sample(sorted(context.cluster.nodes), 2)
        return [(one, other)]

    def begin(self) -> None:
        """Drop what is sent."""
        for one, other in self._links:
            self._cluster.network.cut(one, other, one_way=self._one_way)

    def end(self) -> None:
        for one, other in self._links:
            self._cluster.network.heal(one, other)

    def __str__(self) -> str:
        mark = ">|" if self._one_way else "|"
        named = ", ".join(f"{_name(one)} {mark} {_name(other)}" for one, other in self._links)
        return f"cut for {self.duration_s:.1f} s: {named}"


class CutFromEtcd(Cut):
    """A node reaches the others, but not the coordination store."""

    def _choose(self, context: FaultContext) -> list[tuple[int, int]]:
        return [(context.random_node(), ETCD)]


class CutFromNodes(Cut):
    """A node reaches the coordination store, but no other node."""

    def _choose(self, context: FaultContext) -> list[tuple[int, int]]:
        isolated = context.random_node()
        return [(isolated, other) for other in sorted(context.cluster.nodes) if other != isolated]


class CutFromAll(CutFromNodes):
    """A node reaches only its clients: it still believes that it leads."""

    def _choose(self, context: FaultContext) -> list[tuple[int, int]]:
        links = super()._choose(context)
        return [*links, (links[0][0], ETCD)]


class CutOneWay(CutFromAll):
    """A node's packets are lost in one direction, while the other works."""

    _one_way = True

    def _choose(self, context: FaultContext) -> list[tuple[int, int]]:
        links = super()._choose(context)
        return links if context.random.random() < _HALF else [(other, one) for one, other in links]


class FullDisk(Fault):
    """The disk of a node is full."""

    def _draw(self, context: FaultContext) -> None:
        self._node = context.random.choice(sorted(context.cluster.disks))
        self.duration_s = context.short_or_long_s()

    def begin(self) -> None:
        """Fill the disk."""
        self._cluster.disks[self._node].fill()

    def end(self) -> None:
        """Free the disk."""
        self._cluster.disks[self._node].free()

    def __str__(self) -> str:
        return f"disk of node {self._node} full for {self.duration_s:.1f} s"


class ClockStep(Fault):
    """The wall clock of a node jumps, and is corrected later."""

    def _draw(self, context: FaultContext) -> None:
        self._node = context.random_node()
        self._step_ms = context.random.choice([-1, 1]) * int(10 ** context.random.uniform(2, 7.3))
        self._step_ms = max(-CLOCK_STEP_MS_MAX, min(CLOCK_STEP_MS_MAX, self._step_ms))
        self.duration_s = context.short_or_long_s()

    def begin(self) -> None:
        self._cluster.nodes[self._node].step_clock(self._step_ms)

    def end(self) -> None:
        self._cluster.nodes[self._node].step_clock(0)

    def __str__(self) -> str:
        return f"clock of node {self._node} off by {self._step_ms / 1000:+.1f} s for {self.duration_s:.1f} s"


class PauseEtcd(Fault):
    """The coordination store is paused."""

    def _draw(self, context: FaultContext) -> None:
        self.duration_s = context.short_or_long_s()

    def begin(self) -> None:
        self._cluster.pause_etcd(paused=True)

    def end(self) -> None:
        self._cluster.pause_etcd(paused=False)

    def __str__(self) -> str:
        return f"etcd paused for {self.duration_s:.1f} s"


class StopCatalog(Fault):
    """PostgreSQL is stopped and started again."""

    def _draw(self, context: FaultContext) -> None:
        self.duration_s = context.short_or_long_s()

    def begin(self) -> None:
        """Stop it; its clients are disconnected."""
        self._cluster.postgres.stop()

    def end(self) -> None:
        """Start it on the same port."""
        self._cluster.postgres.start()

    def __str__(self) -> str:
        return f"PostgreSQL stopped for {self.duration_s:.1f} s"


KINDS: Mapping[str, tuple[type[Fault], int]] = {
    "kill": (Kill, 6),
    "pause": (Pause, 4),
    "cut": (Cut, 3),
    "cut-from-etcd": (CutFromEtcd, 3),
    "cut-from-nodes": (CutFromNodes, 3),
    "cut-from-all": (CutFromAll, 4),
    "cut-one-way": (CutOneWay, 3),
    "disk": (FullDisk, 2),
    "clock": (ClockStep, 2),
    "lose-disk": (LoseDisk, 2),
    "kill-all": (KillAll, 1),
    "stop": (GracefulStop, 3),
    "etcd": (PauseEtcd, 2),
    "catalog": (StopCatalog, 1),
}
"""Every kind, with its weight."""

_PAIR_SHARE = 0.2
_HALF = 0.5
_COMBINABLE = ("kill", "pause", "clock", "etcd", "catalog")
"""Kinds that may be combined with another fault, since they do not interfere with its repair."""


def draw(context: FaultContext, kinds: Mapping[str, int], *, pairs: bool) -> Iterator[list[tuple[str, Fault]]]:
    """Draw faults forever: mostly one at a time, sometimes two at once."""
    while True:
        first = _draw_fault(context, kinds)
        faults = [first]
        second = {kind: weight for kind, weight in kinds.items() if kind in _COMBINABLE and kind != first[0]}
        if pairs and second and context.random.random() < _PAIR_SHARE:
            other = _draw_fault(context, second)
            if not other[1].nodes & first[1].nodes:
                faults.append(other)
        yield faults


def _draw_fault(context: FaultContext, kinds: Mapping[str, int]) -> tuple[str, Fault]:
    kind = context.random.choices(list(kinds), list(kinds.values()))[0]
    make: Callable[[FaultContext], Fault] = KINDS[kind][0]
    return kind, make(context)


def _name(place: int) -> str:
    return "etcd" if place == ETCD else f"node {place}"
