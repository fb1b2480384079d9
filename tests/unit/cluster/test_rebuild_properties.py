"""Whatever happened before etcd was lost, replicas that start in sync hold every acknowledged record."""

from __future__ import annotations

from random import Random

from millstream.broker.cluster.rebuild import ReplicaSummary, state_of
from millstream.core.ids import NodeId

NODES = (1, 2, 3)

Log = list[tuple[int, int]]
"""Records as (epoch, number)."""

SEEDS = 2000
STEPS = 30
KINDS = ("append",) * 4 + ("fetch",) * 3 + ("acknowledge",) * 2 + ("shrink", "grow", "elect")


class Partition:
    """A model of a replicated partition: logs, leader, in-sync set, acknowledged records."""

    def __init__(self) -> None:
        self.logs: dict[int, Log] = {node: [] for node in NODES}
        self.leader, self.epoch, self.epoch_start = 1, 0, 0
        self.in_sync = set(NODES)
        self.acknowledged: Log = []
        self._written = 0

    def step(self, what: str, node: int) -> None:
        getattr(self, f"_{what}")(node)

    def _append(self, _node: int) -> None:
        self._written += 1
        self.logs[self.leader].append((self.epoch, self._written))

    def _fetch(self, node: int) -> None:
        """Truncate what the leader does not have, and fetch one record."""
        if node != self.leader:
            common = self._common(node)
            self.logs[node] = self.logs[self.leader][: common + 1]

    def _acknowledge(self, _node: int) -> None:
        had_by_all = min(self._common(node) for node in self.in_sync)
        if had_by_all > len(self.acknowledged):
            self.acknowledged = self.logs[self.leader][:had_by_all]

    def _shrink(self, node: int) -> None:
        if node != self.leader:
            self.in_sync.discard(node)

    def _grow(self, node: int) -> None:
        has = self._common(node)
        if has == len(self.logs[node]) and has >= max(self.epoch_start, len(self.acknowledged)):
            self.in_sync.add(node)

    def _elect(self, node: int) -> None:
        if node in self.in_sync:
            self.leader, self.epoch = node, self.epoch + 1
            self.epoch_start = len(self.logs[node])

    def _common(self, node: int) -> int:
        """The number of records of the leader's log that a node has."""
        pairs = enumerate(zip(self.logs[node], self.logs[self.leader], strict=False))
        return next(
            (at for at, (replica, other) in pairs if replica != other), min(map(len, (self.logs[node], self._led())))
        )

    def _led(self) -> Log:
        return self.logs[self.leader]


def drawn(seed: int) -> tuple[Partition, Random]:
    random, partition = Random(seed), Partition()
    for _ in range(STEPS):
        partition.step(random.choice(KINDS), random.choice(NODES))
    return partition, random


def found_of(partition: Partition, nodes: set[int]) -> dict[NodeId, ReplicaSummary]:
    logs = {node: log for node, log in partition.logs.items() if node in nodes}
    return {
        NodeId(node): ReplicaSummary(
            topic_id="t", partition=0, end=len(log), epoch=log[-1][0] if log else -1, damaged=False
        )
        for node, log in logs.items()
    }


def has_all(partition: Partition, node: int) -> bool:
    return partition.logs[node][: len(partition.acknowledged)] == partition.acknowledged


def test_replicas_that_start_in_sync_hold_every_acknowledged_record() -> None:
    for seed in range(SEEDS):
        partition, random = drawn(seed)
        # Nodes may be missing, as long as one in-sync replica is present.
        some = {random.choice(NODES), random.choice(sorted(partition.in_sync))}
        for nodes in (set(NODES), some):
            state = state_of(found_of(partition, nodes), 0, len(NODES))
            assert state.in_sync, seed
            assert state.leader_epoch > partition.epoch, seed
            assert all(has_all(partition, node) for node in state.in_sync), seed


def test_the_histories_would_expose_a_wrong_rule() -> None:
    """Neither the longest log nor the latest epoch alone is sufficient."""
    longest_is_wrong = shorter_is_wrong = 0
    for seed in range(SEEDS):
        partition, _ = drawn(seed)
        logs = found_of(partition, set(NODES))
        longest = max(log.end for log in logs.values())
        latest = max(log.epoch for log in logs.values())
        longest_is_wrong += any(log.end == longest and not has_all(partition, node) for node, log in logs.items())
        shorter_is_wrong += any(log.epoch == latest and not has_all(partition, node) for node, log in logs.items())
    assert longest_is_wrong
    assert shorter_is_wrong
