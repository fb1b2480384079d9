"""The coordination store of a simulation: the embedded one behind a network that delays, loses and cuts.

A request can be executed long after its caller has timed out, a response can be lost after the change was made, and
watch events can arrive late. Leases expire in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.store import Change
from millstream.core.clock import Clock
from millstream.core.errors import StoreUnavailable
from millstream_testing.simulation.network import LinkDown, Network

T = TypeVar("T")

STORE = "store"
TIMEOUT_S = 2.0


class ObservedService(EmbeddedService):
    """The service itself; the rules see every change before any node does."""

    def __init__(self, clock: Clock, *, on_changed: Callable[[], None]) -> None:
        super().__init__(clock)
        self._on_changed = on_changed

    def _execute(self, changes: Sequence[Change], lease: int | None) -> None:
        before = self.revision
        super()._execute(changes, lease)
        if self.revision != before:
            self._on_changed()


class SimulatedStore(EmbeddedStore):
    """The access of one node to the service."""

    def __init__(self, service: EmbeddedService, clock: Clock, network: Network) -> None:
        super().__init__(service, clock)
        self._network = network

    async def _send(self, request: Callable[[], T]) -> T:
        async def serve() -> T:
            return request()

        try:
            return await self._network.call(STORE, serve, timeout_s=TIMEOUT_S)
        except LinkDown as error:
            raise StoreUnavailable(str(error)) from error

    async def _deliver(self) -> None:
        await self._network.changes_from(STORE)
