"""Numbers for idempotent producers: unique forever, so each block is taken durably before it is used."""

from __future__ import annotations

import asyncio

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations
from millstream.core.ids import ProducerId

_BLOCK = 1000


class ProducerIds:
    """Hands out producer ids from blocks taken from the catalog."""

    def __init__(self, declarations: Declarations) -> None:
        self._declarations = declarations
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()

    async def next(self) -> ProducerId:
        """Return a producer id that was never used before."""
        async with self._lock:
            if self._next == self._end:
                first = await self._declarations.call(Catalog.take_producer_ids, _BLOCK)
                self._next, self._end = first, first + _BLOCK
            taken = self._next
            self._next += 1
            return ProducerId(taken)
