"""A barrier of a source counts only if every coordinator of transactions was held back all the time."""

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
from millstream.protocol.private.mirror_messages import HoldResponse

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


def barrier(*responses: HoldResponse, moves: bool = False) -> dict[str, dict[int, int]]:
    """Ask for a barrier on a node, when the only other one responds like this: when it begins, and when it ends."""
    coordinator, left = Coordinator(), list(responses)
    membership = SimpleNamespace(
        me=SimpleNamespace(node_id=NodeId(1)),
        node=lambda _: None,
        nodes=lambda: [SimpleNamespace(node_id=NodeId(1)), SimpleNamespace(node_id=NodeId(2))],
    )
    made: Any = MirrorService
    service: Any = made(None, membership, None, None, coordinator, None, None, None, None)

    async def ask_node(*_: Any) -> HoldResponse:
        return left.pop(0)

    async def high_watermarks(_topics: Any) -> dict[str, dict[int, int]]:
        if moves:
            coordinator.shards = []
        return OFFSETS

    service.ask_node, service.high_watermarks = ask_node, high_watermarks
    found: dict[str, dict[int, int]] = asyncio.run(service.barrier(["orders"]))
    return found


def held(*shards: tuple[int, int], is_held: bool = True) -> HoldResponse:
    return HoldResponse(held=is_held, shards=list(shards))


def test_a_barrier_counts_when_every_coordinator_was_held() -> None:
    assert barrier(held((1, 2), (2, 2)), held((1, 2), (2, 2))) == OFFSETS


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
