"""Asks every node of a cluster for the messages of a subscription that it has.

Each node is asked by a long poll of its own, on a connection of its own, so nothing waits behind it. What the polls may
ask for is shared out to them, the first first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from math import inf
from time import monotonic
from typing import Final

from millstream.client.settling import REPEATED
from millstream.core.errors import MillstreamError, ProtocolViolation
from millstream.core.ids import NodeId
from millstream.protocol.private.leasing import Leased, LeaseRequests
from millstream.protocol.private.subscription_messages import Receive
from millstream.protocol.wire.client import BACKOFF_S_MAX, BACKOFF_S_MIN, Client
from millstream.protocol.wire.refusal import refusal

_logger = logging.getLogger(__name__)

WAIT_MS: Final = 30_000
_ANSWER_S_MAX: Final = 30.0
_BYTES_MAX: Final = 1024 * 1024
_NODES_S: Final = 5.0
"""How often the nodes of the cluster are asked for at most."""

_LAST_ANSWER_S: Final = 1.0
"""How long the end waits for an answer that may be on its way with messages; nodes hang up sooner if there is none."""

Share = Callable[[int, int], int]
"""How many messages one more node may be asked for, while so many are asked for already, of so many nodes."""

TakeIn = Callable[[NodeId, Leased], None]
"""Called with what a node gives."""


class Polls:
    """The polls of one worker, one for each node."""

    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        *,
        share: Share,
        take_in: TakeIn,
        failed: Callable[[MillstreamError], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._share = share
        self._take_in = take_in
        self._failed = failed
        """Told why nothing comes any more."""
        self._loop = asyncio.get_running_loop()
        self.hungry: deque[asyncio.Future[int]] = deque()
        """Polls that wait for credit; each is told how many messages it may ask for."""
        self.is_stopping = False
        """Whether nobody is asked any more."""
        self.asked = 0
        """How many messages are asked for."""
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._requests = LeaseRequests()
        self._sent: dict[NodeId, float] = {}
        """When the requests that have no answer yet were begun."""
        self._asked_nodes = 0.0

    async def follow_nodes(self) -> Collection[NodeId]:
        """Have one poll for each node that the cluster has now."""
        self._asked_nodes = self._loop.time()
        nodes = (await self._client.metadata(())).nodes
        for node in nodes:
            if node not in self._tasks and not self.is_stopping:
                task = self._tasks[node] = self._loop.create_task(self._poll(node))
                task.add_done_callback(partial(self._ended, node))
        return nodes

    def feed(self) -> None:
        """Let polls ask for what there is room for."""
        while self.hungry and not self.is_stopping and (share := self._share(self.asked, len(self._tasks))):
            waiting = self.hungry.popleft()
            if not waiting.done():
                self.asked += share
                waiting.set_result(share)

    def withdraw(self) -> None:
        """Have nodes answer at once; there may be nothing that messages could be asked for with."""
        self._requests.withdraw()

    def oldest_sent(self) -> float:
        """When the oldest request was begun that has no answer yet; infinity if there is none."""
        return min(self._sent.values(), default=inf)

    async def stop(self) -> None:
        """Ask for no more; what nodes have leased by then is taken in, or returned if it comes too late."""
        self.is_stopping = True
        tasks = list(self._tasks.values())
        self._requests.withdraw()
        for waiting in self.hungry:
            if not waiting.done():
                waiting.set_result(0)
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_LAST_ANSWER_S)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Return what arrives too late."""
        await self._requests.close(_LAST_ANSWER_S)

    def _ended(self, node: NodeId, task: asyncio.Task[None]) -> None:
        self._tasks.pop(node, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.is_stopping = True
            told = error if isinstance(error, MillstreamError) else ProtocolViolation(f"receiving failed: {error!r}")
            self._failed(told)

    async def _poll(self, node: NodeId) -> None:
        pause_s = 0.0
        while not self.is_stopping:
            wanted = await self._reserve()
            if not wanted:
                continue
            leased: Leased | None = None
            self._sent[node] = monotonic()
            try:
                leased = await self._ask(node, wanted)
                pause_s = 0.0
            except REPEATED as error:
                _logger.debug("node %s gives nothing of %r for now: %s", node, self._subscription, error)
                pause_s = min(max(BACKOFF_S_MIN, pause_s * 2), BACKOFF_S_MAX)
            finally:
                self.asked -= wanted
                del self._sent[node]
            if leased is not None:
                self._take_in(node, leased)
            # What this node did not give may be asked of another one.
            self.feed()
            if not await self._is_there(node):
                return
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _is_there(self, node: NodeId) -> bool:
        """Whether the cluster still has a node; others that it has got are asked from now on."""
        if self._loop.time() - self._asked_nodes < _NODES_S:
            return True
        try:
            return node in await self.follow_nodes()
        except REPEATED:
            return True

    async def _reserve(self) -> int:
        """How many messages to ask for; waits until there is room, behind the polls that wait already."""
        waiting: asyncio.Future[int] = self._loop.create_future()
        self.hungry.append(waiting)
        self.feed()
        return await waiting

    async def _ask(self, node: NodeId, wanted: int) -> Leased:
        request = Receive(self._subscription, self._worker, wanted, _BYTES_MAX, WAIT_MS)
        pool = await self._client.pool_of(node)
        leased = await self._requests.ask(pool, request, timeout_s=WAIT_MS / 1000 + _ANSWER_S_MAX)
        if leased.answer.error:
            raise refusal(leased.answer.error, leased.answer.message, about=f"subscription {self._subscription!r}")
        return leased
