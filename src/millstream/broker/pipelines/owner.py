"""The node that runs a cluster's pipelines: the one that created the key `pipelines-owner`, until its session ends.

The key only decides who tries. That no batch is committed twice is ensured by the pipelines' groups, which have one
member, and by the comparisons of each commit; so a node that does not know yet that it was replaced is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import NodeRegistration
from millstream.broker.cluster.store import ABSENT, CoordinationStore, Delete, Expect, Put
from millstream.broker.cluster.view import ClusterView, ViewChange
from millstream.core.backoff import Backoff
from millstream.core.errors import StoreRefused, StoreUnavailable
from millstream.core.ids import NodeId

_logger = logging.getLogger(__name__)


class PipelineOwner:
    """A node's view of the owner of the pipelines, and its candidate; a single node is the only candidate."""

    def __init__(
        self,
        me: NodeId,
        store: CoordinationStore,
        view: ClusterView,
        *,
        registered: Callable[[], NodeRegistration | None],
        random: Random,
    ) -> None:
        self._me = me
        self._store = store
        self._view = view
        self._registered = registered
        self._random = random
        self._revision: int | None = None
        self._has_resigned = False
        self._is_candidate = asyncio.Event()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._last_notified = (False, False)
        view.listen(self._on_view_change)

    @property
    def is_this_node(self) -> bool:
        """Whether this node believes that it runs the pipelines."""
        return self._revision is not None and not self._has_resigned

    @property
    def is_elsewhere(self) -> bool:
        """Whether another node does."""
        return not self.is_this_node and self._view.pipelines_owner not in (None, self._me)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def become_candidate(self) -> None:
        """Take part in the election: this node can run pipelines."""
        self._is_candidate.set()

    async def run(self) -> None:
        """Become the owner whenever there is none, once this node is a candidate; runs forever."""
        await self._is_candidate.wait()
        backoff = Backoff(self._random)
        while True:
            try:
                self._revision = await self._acquire()
                _logger.info("this node runs the pipelines")
                backoff.reset()
                self._notify()
                await self._until_replaced(self._revision)
                _logger.info("this node no longer runs the pipelines")
            except StoreUnavailable as error:
                level = logging.DEBUG if isinstance(error, StoreRefused) else logging.INFO
                _logger.log(
                    level, "the candidate for pipelines waits for the coordination store", extra={"error": str(error)}
                )
                await backoff.pause()
            finally:
                self._revision = None
                self._notify()

    async def resign(self) -> None:
        """Release the ownership at once, because this node is about to stop."""
        revision, self._has_resigned = self._revision, True
        if revision is None:
            return
        try:
            await self._store.change([Delete(keys.PIPELINES_OWNER)], [Expect(keys.PIPELINES_OWNER, revision)])
        except StoreUnavailable as error:
            # The key expires with this node's session.
            _logger.debug("the ownership of pipelines could not be released", extra={"error": str(error)})

    async def _acquire(self) -> int:
        """Wait until the key is free and create it; return its revision."""
        view, me = self._view, self._me
        while True:
            self._changed.clear()
            registered = None if self._has_resigned or me in view.leaving else self._registered()
            if registered is not None and view.pipelines_owner == me:
                # Left over from an earlier run of this node, or from an attempt whose response was lost.
                expected = Expect(keys.PIPELINES_OWNER, view.pipelines_owner_revision)
                await self._store.change([Delete(keys.PIPELINES_OWNER)], [expected])
            elif registered is not None and view.pipelines_owner is None:
                revision = await self._store.change(
                    [Put(keys.PIPELINES_OWNER, str(me), leased=True)],
                    [Expect(keys.PIPELINES_OWNER, ABSENT), Expect(keys.node_key(me), registered.revision)],
                )
                if revision is not None:
                    return revision
            await self._changed.wait()

    async def _until_replaced(self, revision: int) -> None:
        view = self._view
        while view.revision < revision or view.pipelines_owner_revision == revision:
            self._changed.clear()
            await self._changed.wait()

    def _on_view_change(self, _change: ViewChange) -> None:
        self._changed.set()
        self._notify()

    def _notify(self) -> None:
        now = (self.is_this_node, self.is_elsewhere)
        if now != self._last_notified:
            self._last_notified = now
            for listener in self._listeners:
                listener()
