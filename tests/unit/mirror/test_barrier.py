"""A barrier of a source is valid only if every transaction coordinator was held the whole time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.broker.mirror.service import MirrorService
from millstream.core.errors import RequestTimedOut
from millstream.core.ids import NodeId
from millstream.protocol.private.mirror_messages import BarrierRequest, BarrierResponse, HoldRequest, HoldResponse

OFFSETS = {"orders": {0: 7}}


class Coordinator:
    """Runs partition 0 of three."""

    partitions = 3

    def __init__(self) -> None:
        self.shards = [(0, 4)]

    def led(self) -> list[tuple[int, int]]:
        return self.shards

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        yield


def barrier(
    *responses: HoldResponse, moves: bool = False, groups: dict[int, list[str]] | None = None
) -> BarrierResponse:
    """Request a barrier on a node whose only peer gives these responses when it begins and when it ends."""
    coordinator, left = Coordinator(), list(responses)
    membership = SimpleNamespace(
        me=SimpleNamespace(node_id=NodeId(1)),
        node=lambda _: None,
        nodes=lambda: [SimpleNamespace(node_id=NodeId(1)), SimpleNamespace(node_id=NodeId(2))],
    )
    made: Any = MirrorService
    coordinator_of_groups = SimpleNamespace(partitions=3, transactional_groups=lambda: groups)
    service: Any = made(None, membership, None, None, coordinator, coordinator_of_groups, None, None, None, None)
    wants_groups = groups is not None

    async def ask_node(_node: NodeId, _key: int, request: HoldRequest, _response: Any) -> HoldResponse:
        assert request.with_groups == (wants_groups and not request.hold_ms)
        return left.pop(0)

    async def high_watermarks(_topics: Any) -> dict[str, dict[int, int]]:
        if moves:
            coordinator.shards = []
        return OFFSETS

    service.ask_node, service.high_watermarks = ask_node, high_watermarks
    found: BarrierResponse = asyncio.run(
        service.barriers.take(BarrierRequest(topics=["orders"], with_groups=wants_groups))
    )
    return found


def held(*shards: tuple[int, int], is_held: bool = True, groups: dict[int, list[str]] | None = None) -> HoldResponse:
    return HoldResponse(held=is_held, shards=list(shards), transactional_groups=groups or {})


def test_a_barrier_is_valid_if_every_coordinator_was_held() -> None:
    assert barrier(held((1, 2), (2, 2)), held((1, 2), (2, 2))) == BarrierResponse(offsets=OFFSETS)


def test_groups_come_from_all_nodes() -> None:
    ended = held((1, 2), (2, 2), groups={0: ["a"], 2: []})
    found = barrier(held((1, 2), (2, 2)), ended, groups={1: ["b", "c"]})
    assert sorted(found.transactional_groups or ()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param({}, id="no coordinator is reported"),
        pytest.param({0: ["a"]}, id="one was between two nodes"),
        pytest.param({0: ["a"], 1: ["b"], 2: []}, id="one came over from the other node"),
    ],
)
def test_groups_of_a_coordinator_that_moves_are_not_taken_for_none(groups: dict[int, list[str]]) -> None:
    found = barrier(held((1, 2), (2, 2)), held((1, 2), (2, 2), groups=groups), groups={1: []})
    assert found.transactional_groups is None


@pytest.mark.parametrize(
    ("began", "ended", "moves"),
    [
        pytest.param(held((1, 2), (2, 2)), held((1, 2), (2, 2), is_held=False), False, id="not held long enough"),
        pytest.param(held((1, 2)), held((1, 2)), False, id="a coordinator was between two nodes"),
        pytest.param(held((1, 2), (2, 2)), held((1, 2), (2, 3)), False, id="one was elected again"),
        pytest.param(held((1, 2), (2, 2)), held((0, 5), (1, 2), (2, 2)), True, id="one came over from the other node"),
    ],
)
def test_a_barrier_is_void_otherwise(began: HoldResponse, ended: HoldResponse, moves: bool) -> None:
    with pytest.raises(RequestTimedOut):
        barrier(began, ended, moves=moves)


def test_a_node_returns_its_groups_when_it_releases() -> None:
    membership = SimpleNamespace(me=SimpleNamespace(node_id=NodeId(1)), node=lambda _: None)
    groups = SimpleNamespace(transactional_groups=lambda: {2: ["a"]})
    made: Any = MirrorService
    service: Any = made(None, membership, None, None, Coordinator(), groups, None, None, None, None)

    async def hold() -> list[HoldResponse]:
        asked = [HoldRequest(token="t", hold_ms=60_000), HoldRequest(token="t", with_groups=True)]
        return [await service.barriers.hold(one) for one in asked]

    assert asyncio.run(hold()) == [held((0, 4)), held((0, 4), groups={2: ["a"]})]
