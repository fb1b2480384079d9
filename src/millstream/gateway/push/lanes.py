"""The connections to one endpoint: as many as requests are under way, kept for a while, the last used first.

Each has a transport of its own. One pool for all of them would look through all its connections with every request.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Final

import httpx

IDLE_S: Final = 30.0


def spare_lookups() -> None:
    """Say once and for all that sniffio is not there, for a process that does nothing but send.

    httpcore looks for it with every lock that it takes, in all folders where modules may be.
    """
    if find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]


class Lanes:
    """Lends connections; whoever borrows minds how many."""

    def __init__(self, trust: ssl.SSLContext) -> None:
        self._trust = trust
        # The one that was not used for longest is first.
        self._free: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        """A connection for one request; it is opened when it is used."""
        lane = self._free.pop()[1] if self._free else self._make()
        try:
            yield lane
        except BaseException:
            # What is left on it belongs to nobody.
            await lane.aclose()
            raise
        if self._is_closed:
            await lane.aclose()
            return
        self._free.append((asyncio.get_running_loop().time(), lane))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    async def close(self) -> None:
        """Close all of them."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        while self._free:
            await self._free.pop()[1].aclose()
        if self._closing:
            await asyncio.wait(self._closing)

    def _make(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)
        return httpx.AsyncHTTPTransport(verify=self._trust, limits=limits, trust_env=False)

    def _close_idle(self) -> None:
        """Close what was not used for a while."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        while self._free and self._free[0][0] <= loop.time() - IDLE_S:
            task = loop.create_task(self._free.popleft()[1].aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if self._free:
            self._sweep = loop.call_at(self._free[0][0] + IDLE_S, self._close_idle)
