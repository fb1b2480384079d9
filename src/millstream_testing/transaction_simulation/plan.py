"""The parameters of a simulation of transactions, which its seed determines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from uuid import UUID

from millstream.broker.transactions.transaction import EPOCH_MAX
from millstream.core.ids import PartitionIndex
from millstream.core.topic import CONSUMER_OFFSETS, FLUSH_ALWAYS, FLUSH_OS, TRANSACTION_STATE, Topic, TopicPartition
from millstream_testing.simulation.plan import CRASH, KINDS_MAX, KINDS_MIN, NODES, Plan

DUPLICATES = "duplicates"
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
    "disk",
    "settings",
    DUPLICATES,
)
"""The kinds of faults. Clocks are not stepped: a clock that goes back would keep transactions open."""

DUPLICATE_CHANCE = 0.1
FEW_EPOCHS = 6
"""The maximum epoch in some simulations, small so that producer ids are replaced often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionPlan(Plan):
    """The shape of one run."""

    producers: tuple[int, ...]
    """The protocol version of the producers of each transactional id."""
    queries: int
    """The number of queries that commit batches."""
    timeout_ms: int
    """Of every transaction."""
    epoch_max: int
    duplicate_chance: float

    @classmethod
    def draw(cls, seed: int, faults: Sequence[str] = ()) -> TransactionPlan:
        """Draw everything from the seed, except the kinds of faults if they are named."""
        rng = Random(f"{seed} transaction plan")
        drawn = rng.sample(KINDS, rng.randint(KINDS_MIN, KINDS_MAX))
        kinds = tuple(faults or drawn)
        flush = rng.choice((FLUSH_OS, FLUSH_OS, FLUSH_ALWAYS))
        return cls(
            seed=seed,
            nodes=NODES,
            topics=(
                _topic(rng, "data", rng.choice((2, 3)), flush),
                _topic(rng, TRANSACTION_STATE, rng.choice((1, 2)), flush),
                _topic(rng, CONSUMER_OFFSETS, 1, flush),
            ),
            producer_acks=(),
            produce_pause_s=rng.choice((0.3, 1.0, 2.0)),
            fetch_pause_s=0.5,
            faults=tuple(kind for kind in kinds if kind != DUPLICATES) or ("kill",),
            producers=tuple(rng.choice((1, 2, 2)) for _ in range(rng.choice((1, 2, 3)))),
            queries=rng.choice((0, 1, 1)),
            timeout_ms=rng.choice((2_000, 6_000, 20_000)),
            epoch_max=rng.choice((EPOCH_MAX, EPOCH_MAX, FEW_EPOCHS)),
            duplicate_chance=DUPLICATE_CHANCE if DUPLICATES in kinds else 0.0,
        )

    @property
    def data(self) -> list[TopicPartition]:
        topic = self.topics[0]
        return [TopicPartition(topic.name, PartitionIndex(index)) for index in range(topic.partitions)]


def _topic(rng: Random, name: str, partitions: int, flush: str) -> Topic:
    return Topic(
        name=name,
        topic_id=UUID(int=rng.getrandbits(128)),
        partitions=partitions,
        replication=NODES,
        overrides={
            "flush": flush,
            "message.timestamp.after.max.ms": str(10**12),
            "min.insync.replicas": "2",
            "cleanup.policy": "delete" if name == "data" else "compact",
        },
        created_ms=0,
    )
