"""The parameters of a simulation, which its seed determines: the size of the cluster, its topics and its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from uuid import UUID

from millstream.core.config import Config
from millstream.core.ids import NodeId
from millstream.core.topic import FLUSH_ALWAYS, FLUSH_OS, Topic

NODES = 3
CRASH = "crash"
KINDS = (
    "kill",
    CRASH,
    "pause",
    "restart",
    "cut",
    "cut one way",
    "isolate",
    "cut from store",
    "store away",
    "loss",
    "lateness",
    "clock",
    "disk",
    "settings",
)
"""The kinds of faults; a run has only some of them, since some faults mask the bugs that others expose."""

KINDS_MIN, KINDS_MAX = 2, 6
LEASE_MS = 3_000
LEADER_BALANCE_MS = 4_000
LEAVE_MS = 5_000
REPLICA_LAG_MS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The shape of one run."""

    seed: int
    nodes: int
    topics: tuple[Topic, ...]
    producer_acks: tuple[int, ...]
    """One producer for each of them on every partition."""
    produce_pause_s: float
    fetch_pause_s: float
    faults: tuple[str, ...]
    """The kinds of faults that happen."""

    @classmethod
    def draw(cls, seed: int, faults: Sequence[str] = ()) -> Plan:
        """Draw everything from the seed, except the kinds of faults if they are named."""
        rng = Random(f"{seed} plan")
        drawn = rng.sample(KINDS, rng.randint(KINDS_MIN, KINDS_MAX))
        faults = tuple(faults or drawn)
        return cls(
            seed=seed,
            nodes=NODES,
            topics=tuple(_draw_topic(rng, number, faults) for number in range(rng.choice((1, 1, 2)))),
            producer_acks=rng.choice(((-1,), (-1, -1), (-1, 1))),
            produce_pause_s=rng.choice((0.1, 0.4, 1.0)),
            fetch_pause_s=0.5,
            faults=faults,
        )

    def config(self, node_id: NodeId) -> Config:
        return Config(
            node_id=node_id,
            etcd="simulated",
            lease_ms=LEASE_MS,
            leader_balance_ms=LEADER_BALANCE_MS,
            leave_ms=LEAVE_MS,
            replica_lag_ms=REPLICA_LAG_MS,
        )

    def rng(self, purpose: str) -> Random:
        """Return a separate random generator for each component, so that they do not influence each other."""
        return Random(f"{self.seed} {purpose}")


def _draw_topic(rng: Random, number: int, faults: Sequence[str]) -> Topic:
    minimum = rng.choice((2, 2, 2, 1))
    return Topic(
        name=f"topic-{number}",
        topic_id=UUID(int=rng.getrandbits(128)),
        partitions=rng.choice((1, 1, 2)),
        replication=NODES,
        overrides={
            "flush": rng.choice((FLUSH_OS, FLUSH_OS, FLUSH_ALWAYS)),
            "message.timestamp.after.max.ms": str(10**12),
            # A crash may lose the memory of one node, so records that only that node has are not guaranteed.
            "min.insync.replicas": str(max(2, minimum) if CRASH in faults else minimum),
        },
        created_ms=0,
    )
