"""Admitting a node: its leaderships go to others, and it stays eligible for the partitions that it still holds."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.cluster import keys
from millstream.broker.cluster.controller import admit
from millstream.broker.cluster.election import Term
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.keys import NodeRegistration
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.store import Put
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, encode_value
from millstream_testing.clock import ManualClock

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)
KEY = keys.partition_key((UUID(int=1), PartitionIndex(0)))
LED_BY_ONE = PartitionState(replicas=(ONE, TWO, THREE), leader=ONE, leader_epoch=Epoch(4), in_sync=(ONE, TWO))


async def state_after(*, unclean: bool, min_in_sync: int) -> PartitionState:
    clock = ManualClock()
    store = EmbeddedStore(EmbeddedService(clock), clock)
    registered = NodeRegistration(
        node=Node(node_id=ONE, host="one", port=1), http="", incarnation="again", version="", unclean=unclean
    )
    changes = [
        Put(keys.CONTROLLER, "2"),
        Put(keys.node_key(ONE), encode_value(registered)),
        Put(KEY, encode_value(LED_BY_ONE)),
    ]
    revision = await store.change(changes)
    assert revision is not None
    registered = NodeRegistration.from_json(encode_value(registered), revision)
    await admit([registered], Term(store, revision), [TWO], lambda _topic_id: min_in_sync)
    entries = (await store.read("")).entries
    assert entries[keys.admitted_key(ONE)].value == "again"
    return PartitionState.from_json(entries[KEY].value)


@pytest.mark.parametrize(
    ("unclean", "min_in_sync", "eligible"), [(False, 2, (ONE,)), (False, 1, ()), (True, 2, ()), (True, 1, ())]
)
async def test_in_sync_replicas_stay_eligible_when_too_few_are_left(
    unclean: bool, min_in_sync: int, eligible: tuple[NodeId, ...]
) -> None:
    state = await state_after(unclean=unclean, min_in_sync=min_in_sync)
    assert (state.leader != ONE, state.leader_epoch > 4, state.in_sync) == (True, True, (TWO,))
    assert state.eligible == eligible


async def test_nodes_that_join_together_keep_no_former_leadership() -> None:
    clock = ManualClock()
    store = EmbeddedStore(EmbeddedService(clock), clock)
    registered = {
        node: NodeRegistration(
            node=Node(node_id=node, host="host", port=1),
            http="",
            incarnation=f"{node}",
            version="",
            unclean=node == ONE,
        )
        for node in (ONE, TWO)
    }
    nodes = [Put(keys.node_key(node), encode_value(registration)) for node, registration in registered.items()]
    revision = await store.change([Put(keys.CONTROLLER, "3"), Put(KEY, encode_value(LED_BY_ONE)), *nodes])
    assert revision is not None
    joining = [
        NodeRegistration.from_json(encode_value(registration), revision) for node, registration in registered.items()
    ]
    # One of them registers again before it is admitted.
    await store.change([Put(keys.node_key(TWO), encode_value(registered[TWO]))])
    await admit(joining, Term(store, revision), [THREE], lambda _topic_id: 1)
    entries = (await store.read("")).entries
    assert {node: keys.admitted_key(node) in entries for node in (ONE, TWO)} == {ONE: True, TWO: False}
    state = PartitionState.from_json(entries[KEY].value)
    # Node 1 is not trusted, and node 2 is the only complete replica.
    assert (state.has_leader, state.leader_epoch > 4, state.in_sync) == (False, True, (TWO,))
