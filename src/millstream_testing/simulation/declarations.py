"""The catalog of a simulation: in memory, behind the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations
from millstream.core.errors import CatalogUnavailable
from millstream.core.topic import Topic
from millstream_testing.simulation.network import LinkDown, Network

T = TypeVar("T")

CATALOG: Final = "catalog"
TIMEOUT_S = 3.0


class SimulatedDeclarations(Declarations):
    """The catalog that all nodes share."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._catalog = Catalog("sqlite://")
        self._catalog.prepare()

    def declare(self, topic: Topic) -> None:
        """Add a topic without any node's help, as if it had been declared before."""
        self._catalog.add_topics([topic])

    def close(self) -> None:
        self._catalog.close()

    async def run(self, ask: Callable[[Catalog], T]) -> T:
        """Call the catalog through the network."""

        async def serve() -> T:
            return ask(self._catalog)

        try:
            return await self._network.call(CATALOG, serve, timeout_s=TIMEOUT_S)
        except LinkDown as error:
            raise CatalogUnavailable(str(error)) from error
