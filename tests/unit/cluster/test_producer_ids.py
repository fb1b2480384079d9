"""Producer ids come from blocks that are taken ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations, ProducerIds
from millstream.core.errors import CatalogUnavailable
from millstream_testing.waiting import until

T = TypeVar("T")


class Blocks(Declarations):
    """A catalog that can go away."""

    def __init__(self) -> None:
        self.taken = 0
        self.is_away = False

    async def run(self, ask: Callable[[Catalog], T]) -> T:
        if self.is_away:
            raise CatalogUnavailable("it is away")
        self.taken += 1
        return (self.taken - 1) * 1000  # type: ignore[return-value]


async def test_ids_are_unique_across_blocks() -> None:
    ids = ProducerIds(Blocks())
    taken = await asyncio.gather(*(ids.next() for _ in range(2500)))
    assert sorted(taken) == list(range(2500))


async def test_producers_begin_while_the_catalog_is_away() -> None:
    blocks = Blocks()
    ids = ProducerIds(blocks)
    running = asyncio.create_task(ids.run())
    try:
        await until(lambda: blocks.taken == 1)
        blocks.is_away = True
        assert [await ids.next() for _ in range(1000)] == list(range(1000))
        with pytest.raises(CatalogUnavailable):
            await ids.next()
        blocks.is_away = False
        await until(lambda: blocks.taken == 2)
        blocks.is_away = True
        assert await ids.next() == 1000
    finally:
        running.cancel()


async def test_half_a_block_is_kept() -> None:
    blocks = Blocks()
    ids = ProducerIds(blocks)
    running = asyncio.create_task(ids.run())
    try:
        await until(lambda: blocks.taken == 1)
        for _ in range(499):
            await ids.next()
        await asyncio.sleep(0)
        assert blocks.taken == 1
        await ids.next()
        await until(lambda: blocks.taken == 2)
    finally:
        running.cancel()
