"""Links between the processes of a simulation: delays, lost requests and responses, cuts in one or both directions.

A call is a request that may arrive late or never, work that may continue after the caller has timed out, and a response
that may be lost. Only messages are shared: both sides copy what they send.

The links of followers, the coordination store and the catalog are reached through it. A request can be executed long
after its caller has timed out, a response can be lost after the change was made, and watch events can arrive late.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.replica_fetcher import RESPONSE_S
from millstream.broker.cluster.store import Change
from millstream.broker.kafka.follower_fetch import FollowerFetch
from millstream.core.clock import Clock
from millstream.core.errors import BrokerUnreachable, CatalogUnavailable, StoreUnavailable
from millstream.core.ids import NodeId
from millstream.core.topic import Topic
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    VERSION,
    ReplicaFetch,
    ReplicaResponses,
    read_replica_responses,
    write_replica_fetch,
)
from millstream_testing.simulation.loop import Process, SimulatedLoop, current_process

T = TypeVar("T")

QUICK_MIN_S, QUICK_MAX_S = 0.0002, 0.003
SLOW_MAX_S = 0.05
SLOW_CHANCE = 0.05


class LinkDown(Exception):
    """A call got no response: a message was lost, or the target is down. The request may have been executed."""


class NotListening(LinkDown):
    """The call was certainly not executed: nothing listens there."""


class Network:
    """Every link of a simulation, by the names of its ends."""

    def __init__(self, loop: SimulatedLoop, rng: Random) -> None:
        self.endpoints: dict[str, Process] = {}
        """The process that listens under each name now."""
        self.loss_chance = 0.0
        self.late_chance = 0.0
        self.late_max_s = 4.0
        self._loop = loop
        self._rng = rng
        self._cut: set[tuple[str, str]] = set()
        self._open: dict[Process, dict[asyncio.Future[Any], None]] = {}
        self._waiting_listeners: list[asyncio.Future[None]] = []

    def cut(self, source: str, target: str) -> None:
        """Drop everything that one end sends to the other."""
        self._cut.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """Deliver what is sent from now on again."""
        self._cut.discard((source, target))
        self._wake_listeners()

    def heal_all(self) -> None:
        """Heal every cut, and reset every chance of loss."""
        self._cut.clear()
        self.loss_chance = self.late_chance = 0.0
        self._wake_listeners()

    def is_cut(self, source: str, target: str) -> bool:
        """Whether what one end sends to the other is dropped."""
        return (source, target) in self._cut

    def cuts(self) -> Iterable[tuple[str, str]]:
        """Return every cut, in order."""
        return sorted(self._cut)

    def disconnect(self, process: Process) -> None:
        """Reset the connections of a process that ended."""
        for response in self._open.pop(process, {}):
            self._loop.call_later(self.delay_s(), _fail, response, LinkDown(f"{process.name} hung up"))

    def delay_s(self) -> float:
        draw = self._rng.random
        if self.late_chance and draw() < self.late_chance:
            return draw() * self.late_max_s
        if draw() < SLOW_CHANCE:
            return draw() * SLOW_MAX_S
        return QUICK_MIN_S + draw() * (QUICK_MAX_S - QUICK_MIN_S)

    async def call(self, target: str, serve: Callable[[], Awaitable[T]], *, timeout_s: float) -> T:
        """Run `serve` in the process behind a name, and return its response; raise `LinkDown` without one.

        Errors of `serve` are raised here.
        """
        loop = self._loop
        response: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(timeout_s, _fail, response, LinkDown(f"no response from {target}"))
        source = current_process()
        self._carry(self._arrive, source, target, serve, response)
        try:
            return await response
        finally:
            timer.cancel()

    async def changes_from(self, source: str) -> None:
        """Wait until a message sent now by another end arrives; a cut only delays it."""
        here = current_process().name
        await asyncio.sleep(self.delay_s())
        while (source, here) in self._cut or (here, source) in self._cut:
            healed: asyncio.Future[None] = self._loop.create_future()
            self._waiting_listeners.append(healed)
            await healed
            await asyncio.sleep(self.delay_s())

    def _wake_listeners(self) -> None:
        waiting, self._waiting_listeners = self._waiting_listeners, []
        for healed in waiting:
            _settle(healed, None)

    def _carry(self, arrive: Callable[..., None], *arguments: Any) -> None:
        # Messages in flight belong to no process, so they arrive even if the sender dies.
        self._loop.call_later(self.delay_s(), arrive, *arguments, context=self._loop.world.context)

    def _is_lost(self, source: str, target: str) -> bool:
        return (source, target) in self._cut or (
            self.loss_chance > 0 and source != target and self._rng.random() < self.loss_chance
        )

    def _arrive(
        self, source: Process, target: str, serve: Callable[[], Awaitable[T]], response: asyncio.Future[T]
    ) -> None:
        if self._is_lost(source.name, target):
            return
        process = self.endpoints.get(target)
        if process is None or not process.alive:
            self._carry(_fail, response, NotListening(f"nothing listens at {target}"))
            return
        self._open.setdefault(process, {})[response] = None
        self._loop.spawn(process, self._serve(source, process, serve, response), name="served call")

    async def _serve(
        self, source: Process, target: Process, serve: Callable[[], Awaitable[T]], response: asyncio.Future[T]
    ) -> None:
        outcome: T | Exception
        try:
            outcome = await serve()
        except Exception as error:
            outcome = error
        self._open.get(target, {}).pop(response, None)
        if not self._is_lost(target.name, source.name):
            self._carry(_settle, response, outcome)


def _settle(response: asyncio.Future[Any], outcome: Any) -> None:
    if response.done():
        return
    if isinstance(outcome, Exception):
        response.set_exception(outcome)
    else:
        response.set_result(outcome)


def _fail(response: asyncio.Future[Any], error: Exception) -> None:
    _settle(response, error)


_SIZE_BYTES = 4
_HEADER = RequestHeader(FETCH_KEY, VERSION, 0, "replica", 0, True)

FindServer = Callable[[NodeId], FollowerFetch]
"""Returns what responds to the fetches of followers on a node; raises `BrokerUnreachable` if it does not run yet."""


class SimulatedLink:
    """A follower's link to one leader."""

    def __init__(self, name: str, node: NodeId, find: FindServer, network: Network) -> None:
        self._name = name
        self._node = node
        self._find = find
        self._network = network

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        frame = bytes(write_replica_fetch(fetch))

        async def serve() -> bytes:
            response = self._find(self._node).handle_frame(memoryview(frame), _HEADER)
            if inspect.isawaitable(response):
                response = await response
            return b"".join(response)  # type: ignore[arg-type]

        try:
            encoded = await self._network.call(self._name, serve, timeout_s=fetch.max_wait_ms / 1000 + RESPONSE_S)
        except LinkDown as error:
            raise BrokerUnreachable(str(error)) from error
        return read_replica_responses(memoryview(encoded)[_SIZE_BYTES:])

    async def close(self) -> None:
        """Do nothing: no resources are held."""


class SimulatedLinks:
    """Opens links to the nodes of a simulation."""

    def __init__(self, find: FindServer, network: Network) -> None:
        self._find = find
        self._network = network

    def open(self, node: NodeId) -> SimulatedLink:
        return SimulatedLink(node_name(node), node, self._find, self._network)


def node_name(node: NodeId) -> str:
    return f"node-{node}"


STORE = "store"
STORE_TIMEOUT_S = 2.0


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
            return await self._network.call(STORE, serve, timeout_s=STORE_TIMEOUT_S)
        except LinkDown as error:
            raise StoreUnavailable(str(error)) from error

    async def _deliver(self) -> None:
        await self._network.changes_from(STORE)


CATALOG: Final = "catalog"
CATALOG_TIMEOUT_S = 3.0


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
            return await self._network.call(CATALOG, serve, timeout_s=CATALOG_TIMEOUT_S)
        except LinkDown as error:
            raise CatalogUnavailable(str(error)) from error
