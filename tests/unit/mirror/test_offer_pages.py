"""The states of queues are sent in pages, none of which is omitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.broker.mirror import failover, service
from millstream.broker.mirror.queue_states import MirroredQueues
from millstream.broker.mirror.service import MirrorService
from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.broker.subscriptions.snapshot import read_snapshot, write_snapshot
from millstream.broker.subscriptions.state_shard import LoadedState
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState
from millstream.core.subscription import QueueKey
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.mirror_messages import OfferRequest, OfferResponse

NAME = "paris"
ME = NodeId(1)
QUEUES = 5
SCANNED, CUT = 10, 4
ORDERS = Topic(
    name="orders", topic_id=UUID(int=1), partitions=1, replication=1, overrides={}, created_ms=0, mirror=NAME
)
KEYS = [QueueKey(UUID(int=10 + number), ORDERS.topic_id, PartitionIndex(0)) for number in range(QUEUES)]


def snapshot_of(key: QueueKey) -> bytes:
    fold = Fold(key)
    fold.apply(Delta(DeltaKind.START, 0, 0, 0, 0, "", 1))
    fold.apply(Delta(DeltaKind.SCANNED, 0, SCANNED - 1, 0, 0, "", 1))
    return write_snapshot(fold)


class Queues:
    """The states of the queues of a node, all of which have messages beyond the cut; also its subscriptions."""

    def __init__(self) -> None:
        self.snapshots = {key: snapshot_of(key) for key in KEYS}
        self.sequences = dict.fromkeys(KEYS, 7)
        self.states = self
        self.declared = self

    def all(self) -> list[Any]:
        return []

    def changed(self, is_selected: Callable[[QueueKey, int], bool]) -> Iterator[tuple[QueueKey, LoadedState]]:
        for key, sequence in list(self.sequences.items()):
            if is_selected(key, sequence):
                yield key, LoadedState(lambda key=key: self.snapshots[key], sequence, is_large=False)  # type: ignore[misc]

    async def write_state(self, key: QueueKey, _epoch: Epoch, snapshot: bytes) -> None:
        self.snapshots[key] = snapshot
        self.sequences[key] += 1

    @property
    def ends(self) -> set[int]:
        return {read_snapshot(snapshot).window.end for snapshot in self.snapshots.values()}


class Topics:
    """One topic, which is a copy."""

    def all(self) -> list[Topic]:
        return [ORDERS]

    def get(self, _name: str) -> Topic:
        return ORDERS

    def state_of(self, _topic: Topic, _index: int) -> PartitionState:
        return PartitionState(replicas=(ME,), leader=ME, leader_epoch=Epoch(3), in_sync=(ME,))


def node_of(queues: Queues) -> Any:
    membership = SimpleNamespace(me=SimpleNamespace(node_id=ME), node=lambda _: None, nodes=list, controller_id=ME)
    made: Any = MirrorService
    return made(Topics(), membership, None, queues, None, None, None, None, None, None)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "OFFER_BYTES_MAX", 0)


async def test_an_old_source_cuts_the_queues_of_every_page() -> None:
    queues = Queues()
    await failover._cut_queues(node_of(queues), {ORDERS.name: {0: CUT}}, [ORDERS])
    assert queues.ends == {CUT}


async def test_a_page_whose_queues_are_all_cut_is_not_the_last() -> None:
    theirs, ours = Queues(), Queues()
    source, here = node_of(theirs), node_of(ours)

    async def ask(_node: NodeId, request: OfferRequest, *, waits: bool) -> OfferResponse:
        # Meanwhile, every queue at the source is in use.
        theirs.sequences = {key: sequence + 1 for key, sequence in theirs.sequences.items()}
        offer: OfferResponse = await source.offer(request)
        return offer

    async def exposed_offsets(places: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, CUT)

    here.exposed_offsets = exposed_offsets
    run: Any = SimpleNamespace(service=here, settings=None, mirror=SimpleNamespace(name=NAME))
    make: Any = MirroredQueues
    await make(run, SimpleNamespace(ask=ask), None)._read_node(NodeId(9), {ORDERS.topic_id: ORDERS})
    assert ours.ends == {CUT}
