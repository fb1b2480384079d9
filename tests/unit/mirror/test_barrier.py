"""A barrier of a source is valid only if every transaction coordinator was held the whole time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.broker.mirror import barriers
from millstream.broker.mirror.service import MirrorService
from millstream.core.errors import RequestTimedOut
from millstream.core.ids import NodeId
from millstream.protocol.private.mirror_messages import (
    BarrierRequest,
    BarrierResponse,
    HoldCommitsRequest,
    HoldCommitsResponse,
)

OFFSETS = {"orders": {0: 7}}
ORDERS_ID = UUID(int=1)


class Coordinator:
    """Runs partition 0 of three."""

    partitions = 3

    def __init__(self) -> None:
        self.shards = [(0, 4)]

    def led(self) -> list[tuple[int, int]]:
        return self.shards

    @asynccontextmanager
    async def hold_decisions(self) -> AsyncIterator[None]:
        yield


Groups = dict[int, dict[str, dict[str, dict[int, int]]]]


def barrier(*responses: HoldCommitsResponse, moves: bool = False, groups: Groups | None = None) -> BarrierResponse:
    """Request a barrier on a node whose only peer gives these responses, from its beginning to its end."""
    coordinator, remaining = Coordinator(), list(responses)
    membership = SimpleNamespace(
        me=SimpleNamespace(node_id=NodeId(1)),
        node=lambda _: None,
        nodes=lambda: [SimpleNamespace(node_id=NodeId(1)), SimpleNamespace(node_id=NodeId(2))],
    )
    made: Any = MirrorService
    coordinator_of_groups = SimpleNamespace(partitions=3, transactional_groups=lambda *_: (groups, False))
    topics = {"orders": SimpleNamespace(topic_id=ORDERS_ID)}
    service: Any = made(topics, membership, None, None, coordinator, coordinator_of_groups, None, None, None, None)
    wants_groups = groups is not None
    asked: list[str] = []

    async def ask_node(_node: NodeId, request: HoldCommitsRequest) -> HoldCommitsResponse:
        asked.append(request.action)
        assert request.topics == ({"orders": ORDERS_ID} if request.action == "read groups" else {})
        return remaining.pop(0)

    async def high_watermarks(_topics: Any) -> dict[str, dict[int, int]]:
        # Offsets that are committed without transactions are not held back, and must not be ahead of the watermarks.
        assert asked[-1] == ("read groups" if wants_groups else "hold")
        if moves:
            coordinator.shards = []
        return OFFSETS

    service.ask_node, service.high_watermarks = ask_node, high_watermarks
    response: BarrierResponse = asyncio.run(
        service.barriers.take(
            BarrierRequest(topics=["orders"], topic_ids={"orders": ORDERS_ID}, with_groups=wants_groups)
        )
    )
    assert asked == ["hold", *(["read groups"] if wants_groups else []), "release"]
    return response


def held(
    *shards: tuple[int, int], is_held: bool = True, groups: Groups | None = None, groups_omitted: bool = False
) -> HoldCommitsResponse:
    return HoldCommitsResponse(held=is_held, shards=list(shards), groups=groups or {}, groups_omitted=groups_omitted)


def test_a_barrier_is_valid_if_every_coordinator_was_held() -> None:
    assert barrier(held((1, 2), (2, 2)), held((1, 2), (2, 2))) == BarrierResponse(offsets=OFFSETS)


async def test_a_request_without_topics_holds_back_nothing() -> None:
    unused: Any = None
    assert await barriers.Barriers(unused, unused, unused).take(BarrierRequest(topics=[])) == BarrierResponse()


async def test_a_node_takes_one_barrier_after_the_other() -> None:
    """Otherwise clients that ask all the time would leave no gap for decisions."""
    holds: list[int] = [0]

    @asynccontextmanager
    async def hold_decisions() -> AsyncIterator[None]:
        holds.append(holds[-1] + 1)
        yield
        holds.append(holds[-1] - 1)

    async def high_watermarks(_topics: Any) -> dict[str, dict[int, int]]:
        await asyncio.sleep(0)
        return OFFSETS

    coordinator: Any = SimpleNamespace(hold_decisions=hold_decisions, led=lambda: [(0, 4)], partitions=1)
    service: Any = SimpleNamespace(others=(), high_watermarks=high_watermarks)
    taken = barriers.Barriers(service, coordinator, service)
    request = BarrierRequest(topics=["orders"])
    assert await asyncio.gather(*(taken.take(request) for _ in range(3))) == [BarrierResponse(offsets=OFFSETS)] * 3
    assert max(holds) == 1


def test_offsets_of_groups_come_from_all_nodes_while_decisions_are_held_back() -> None:
    peer, read = held((1, 2), (2, 2)), held(groups={0: {"a": {"orders": {0: 5}, "other": {0: 1}}}, 2: {}})
    response = barrier(peer, read, peer, groups={1: {"b": {}, "c": {"orders": {0: 6}}}})
    assert response.groups == {"a": {"orders": {0: 5}}, "c": {"orders": {0: 6}}}


@pytest.mark.parametrize("by", ["sum", "node"])
def test_too_many_offsets_of_groups_are_left_out(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(barriers, "OFFSETS_MAX", 2)
    peer, theirs = held((1, 2), (2, 2)), {"a": {"orders": {0: 5, 1: 5}}}
    for count, groups_omitted in ((2, False), (3, True)):
        if by == "sum":
            read, ours = held(groups={0: theirs, 2: {}}), {f"b{at}": {"orders": {0: 1}} for at in range(count - 2)}
        else:
            read, ours = held(groups={0: {}, 2: {}}, groups_omitted=groups_omitted), {"b": {"orders": {0: 1}}}
        response = barrier(peer, read, peer, groups={1: ours})
        assert (response.offsets, response.groups_omitted, not response.groups) == (
            OFFSETS,
            groups_omitted,
            groups_omitted,
        )


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param({}, id="no coordinator is reported"),
        pytest.param({0: {"a": {}}}, id="one was between two nodes"),
        pytest.param({0: {"a": {}}, 1: {"b": {}}, 2: {}}, id="one came over from the other node"),
    ],
)
def test_there_is_no_barrier_without_the_groups_of_a_coordinator_that_moves(groups: Groups) -> None:
    peer = held((1, 2), (2, 2))
    with pytest.raises(RequestTimedOut, match="a coordinator of groups"):
        barrier(peer, held(groups=groups), peer, groups={1: {}})


@pytest.mark.parametrize(
    ("began", "ended", "moves"),
    [
        pytest.param(held((1, 2), (2, 2)), held((1, 2), (2, 2), is_held=False), False, id="not held long enough"),
        pytest.param(held((1, 2)), held((1, 2)), False, id="a coordinator was between two nodes"),
        pytest.param(held((1, 2), (2, 2)), held((1, 2), (2, 3)), False, id="one was elected again"),
        pytest.param(held((1, 2), (2, 2)), held((0, 5), (1, 2), (2, 2)), True, id="one came over from the other node"),
    ],
)
def test_a_barrier_is_void_otherwise(began: HoldCommitsResponse, ended: HoldCommitsResponse, moves: bool) -> None:
    with pytest.raises(RequestTimedOut):
        barrier(began, ended, moves=moves)


def test_a_node_returns_its_groups_while_it_holds_decisions_back() -> None:
    membership = SimpleNamespace(me=SimpleNamespace(node_id=NodeId(1)), node=lambda _: None)
    groups = SimpleNamespace(
        transactional_groups=lambda topics, _: ({2: {"a": {name: {0: 1} for name in topics}}}, True)
    )
    made: Any = MirrorService
    service: Any = made(None, membership, None, None, Coordinator(), groups, None, None, None, None)

    async def hold() -> list[HoldCommitsResponse]:
        begin, read, end = (
            HoldCommitsRequest(token="t", action="hold", hold_ms=60_000),
            HoldCommitsRequest(token="t", action="read groups", topics={"orders": None}),
            HoldCommitsRequest(token="t", action="release"),
        )
        return [await service.barriers.hold(barrier) for barrier in (begin, read, end, read)]

    read = HoldCommitsResponse(held=True, groups={2: {"a": {"orders": {0: 1}}}}, groups_omitted=True)
    late = HoldCommitsResponse(held=False, groups=read.groups, groups_omitted=True)
    assert asyncio.run(hold()) == [held((0, 4)), read, held((0, 4)), late]
