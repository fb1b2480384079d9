"""The declarations of users: an asynchronous interface to the catalog."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import keys
from millstream.broker.cluster.store import CoordinationStore, Put
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import CatalogDenied, CatalogUnavailable, MillstreamError, StoreUnavailable
from millstream.core.ids import ProducerId

_logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Declarations:
    """Calls the methods of the catalog without blocking the loop."""

    async def call(self, method: Callable[Concatenate[Catalog, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a method that reads, or whose changes nodes need not read at once."""
        return await self.run(lambda catalog: method(catalog, *arguments, **named))

    async def change(self, method: Callable[Concatenate[Catalog, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a method whose changes all nodes must read."""
        return await self.call(method, *arguments, **named)

    async def run(self, ask: Callable[[Catalog], T]) -> T:
        raise NotImplementedError


class Holder:
    """Holds the declarations of one kind in memory; the catalog is the source of truth.

    The catalog is changed by one task at a time, and readers never wait for that.
    """

    def __init__(self, declarations: Declarations) -> None:
        self._declarations = declarations
        self._changing = asyncio.Lock()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


class Named(Protocol):
    """Something that is declared under a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


class NamedHolder(Holder, Generic[N]):
    """Holds the declarations of one kind, by name."""

    noun: ClassVar[str]
    unknown: ClassVar[type[MillstreamError]]

    def __init__(self, declarations: Declarations, clock: Clock, *, new_id: Callable[[], UUID] = uuid.uuid4) -> None:
        super().__init__(declarations)
        self._clock = clock
        self._new_id = new_id
        self._by_name: dict[str, N] = {}

    def all(self) -> list[N]:
        """Return everything, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def get(self, name: str) -> N | None:
        return self._by_name.get(name)

    def existing(self, name: str) -> N:
        """Return the declaration with this name; raise the error of an unknown one if it does not exist."""
        declared = self._by_name.get(name)
        if declared is None:
            raise self._unknown_error(name)
        return declared

    def _unknown_error(self, name: str) -> MillstreamError:
        noun = self.noun
        return self.unknown(
            f"{noun} {name!r} does not exist; `millstream {noun} list` and GET /v1/{noun}s list those that do"
        )

    async def _load(self, read: Callable[[Catalog], list[N]]) -> None:
        async with self._changing:
            declared = {declaration.name: declaration for declaration in await self._declarations.call(read)}
            is_new = declared != self._by_name
            self._by_name = declared
        if is_new:
            self._notify()

    async def _delete(self, delete: Callable[[Catalog, N], None], declared: N) -> None:
        try:
            await self._declarations.change(delete, declared)
        finally:
            # Also if another node has deleted it.
            self._by_name.pop(declared.name, None)


class CatalogDeclarations(Declarations):
    """The catalog, each call in a thread."""

    def __init__(self, catalog: Catalog, *, is_prepared: bool = True, clock: Clock | None = None) -> None:
        self.unavailable_since_ms: int | None = None
        """The wall-clock time since which it has not responded; None while it responds."""
        self._catalog = catalog
        self._clock = clock or SystemClock()
        self._is_prepared = is_prepared
        self._has_responded = False
        self._preparing = asyncio.Lock()

    async def run(self, ask: Callable[[Catalog], T]) -> T:
        try:
            response = await self._call_catalog(ask)
        except CatalogUnavailable as error:
            if self.unavailable_since_ms is None:
                self.unavailable_since_ms = self._clock.now_ms()
                if self._has_responded:
                    # Until then, the task that waits for the first response reports it.
                    how = "refuses this node" if isinstance(error, CatalogDenied) else "is unavailable"
                    _logger.warning(
                        "the catalog %s; clients are served, but changes of topics and quotas wait",
                        how,
                        extra={"reason": str(error)},
                    )
            raise
        self._has_responded = True
        if self.unavailable_since_ms is not None:
            _logger.info("the catalog is back", extra={"away_ms": self._clock.now_ms() - self.unavailable_since_ms})
            self.unavailable_since_ms = None
        return response

    async def _call_catalog(self, ask: Callable[[Catalog], T]) -> T:
        if not self._is_prepared:
            # The catalog of a cluster may be unavailable when a node starts; its tables are prepared later then.
            async with self._preparing:
                if not self._is_prepared:
                    await asyncio.to_thread(self._catalog.prepare)
                    self._is_prepared = True
        return await asyncio.to_thread(ask, self._catalog)


class Announcer:
    """Announces changes of the catalog to the cluster, and retries while the store is unavailable."""

    def __init__(self, store: CoordinationStore, backoff: Backoff, *, new_text: Callable[[], str]) -> None:
        self._store = store
        self._backoff = backoff
        self._new_text = new_text
        self._requested = asyncio.Event()
        self._is_certain = True
        self.author = new_text()
        """The name of this process in its announcements; it has already applied its own changes."""

    def announce(self, *, is_certain: bool) -> None:
        """Announce a change soon; after a possible failure, this process reads it back too."""
        self._is_certain &= is_certain
        self._requested.set()

    async def run(self) -> None:
        """Announce requested changes; runs forever."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            author, self._is_certain = self.author if self._is_certain else "", True
            try:
                await self._store.change([Put(keys.CATALOG_VERSION, f"{author} {self._new_text()}")])
                self._backoff.reset()
            except StoreUnavailable as error:
                _logger.warning("a catalog change could not be announced yet", extra={"error": str(error)})
                self.announce(is_certain=bool(author))
                await self._backoff.pause()


class AnnouncedDeclarations(Declarations):
    """The catalog of a cluster: each change is announced to all nodes."""

    def __init__(self, inner: Declarations, announcer: Announcer) -> None:
        self._inner = inner
        self._announcer = announcer

    async def run(self, ask: Callable[[Catalog], T]) -> T:
        return await self._inner.run(ask)

    async def change(self, method: Callable[Concatenate[Catalog, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            response = await self.call(method, *arguments, **named)
        except BaseException:
            # The change may have been made before the failure.
            self._announcer.announce(is_certain=False)
            raise
        self._announcer.announce(is_certain=True)
        return response


_BLOCK = 1000


class ProducerIds:
    """Hands out producer ids from blocks taken from the catalog.

    While `run` runs, the next block is taken when half of one is used, so that producers can begin while the catalog is
    unavailable or its disk is full.
    """

    def __init__(self, declarations: Declarations) -> None:
        self._declarations = declarations
        self._ids: deque[int] = deque()
        self._is_low = asyncio.Event()
        self._is_low.set()
        self._lock = asyncio.Lock()

    async def next(self) -> ProducerId:
        """Return a producer id that was never used before."""
        while not self._ids:
            await self._refill(1)
        taken = self._ids.popleft()
        if len(self._ids) <= _BLOCK // 2:
            self._is_low.set()
        return ProducerId(taken)

    async def run(self) -> None:
        """Reserve blocks in advance; runs forever."""
        backoff = Backoff()
        while True:
            await self._is_low.wait()
            try:
                await self._refill(_BLOCK // 2 + 1)
                self._is_low.clear()
                backoff.reset()
            except MillstreamError as error:
                # A producer that needs an id meanwhile tries on its own.
                if not backoff.failures:
                    _logger.warning("producer ids could not be allocated", extra={"reason": str(error)})
                await backoff.pause()

    async def _refill(self, least: int) -> None:
        """Reserve another block unless at least this many ids are left."""
        async with self._lock:
            if len(self._ids) < least:
                first = await self._declarations.call(Catalog.take_producer_ids, _BLOCK)
                self._ids.extend(range(first, first + _BLOCK))
