"""The connections of a client to one broker address.

A broker answers the requests of one connection in order, so a fetch that waits for records delays everything behind it.
Ordinary requests therefore share one pipelined connection, and each request that may wait, such as a fetch or a
JoinGroup, borrows a separate one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from millstream.core.errors import BrokerUnreachable
from millstream.protocol.wire.channel import Channel
from millstream.protocol.wire.credentials import NODE_CREDENTIALS, Credentials

BORROWED_MAX: Final = 16
MEMBERS_MAX: Final = 256
"""Members of one group wait for each other in JoinGroup, so more of these run concurrently."""

MUTED_S_MAX: Final = 300.0
"""The longest throttle time that is believed."""


class Pool:
    """One shared connection and a few to borrow, opened on first use and again when lost."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        connect_s: float,
        borrowed_max: int = BORROWED_MAX,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port
        self._client_id = client_id
        self._connect_s = connect_s
        self._credentials = credentials or NODE_CREDENTIALS.get()
        self._shared: Channel | None = None
        self._opening = asyncio.Lock()
        self._free: list[Channel] = []
        self._lent: set[Channel] = set()
        self._slots = asyncio.Semaphore(borrowed_max)
        self._member_slots = asyncio.Semaphore(MEMBERS_MAX)
        self._closed = False
        self.muted_until = 0.0
        """Until when the broker throttles the client; 0 if it does not."""

    @property
    def is_open(self) -> bool:
        """Return whether the shared connection is open."""
        return self._shared is not None and self._shared.is_open

    async def shared(self) -> Channel:
        """Return the connection for requests that are answered at once."""
        async with self._opening:
            if self._shared is None or not self._shared.is_open:
                self._shared = await self._open()
            return self._shared

    @asynccontextmanager
    async def borrowed(self, *, by_member: bool = False) -> AsyncIterator[Channel]:
        """Borrow a connection for one request that may wait, possibly of a group's member."""
        async with self._member_slots if by_member else self._slots:
            channel = self._take_free() or await self._open()
            self._lent.add(channel)
            try:
                yield channel
            finally:
                self._lent.discard(channel)
                if channel.is_open and channel.is_idle and not self._closed:
                    self._free.append(channel)
                else:
                    await channel.close()

    def mute(self, seconds: float) -> None:
        """Delay all requests to the broker, on any connection: it throttles the client."""
        if seconds > 0:
            until = asyncio.get_running_loop().time() + min(seconds, MUTED_S_MAX)
            self.muted_until = max(self.muted_until, until)

    @property
    def pause_s(self) -> float:
        """Return for how much longer the broker throttles the client."""
        if not self.muted_until:
            return 0.0
        pause_s = self.muted_until - asyncio.get_running_loop().time()
        if pause_s <= 0:
            self.muted_until = pause_s = 0.0
        return pause_s

    async def unmuted(self) -> float:
        """Wait until the broker may be sent something; return how long that took, in seconds."""
        waited = 0.0
        while (pause := self.pause_s) > 0:
            await asyncio.sleep(pause)
            waited += pause
        return waited

    async def close(self) -> None:
        """Close every connection, including those that are borrowed or being opened."""
        self._closed = True
        channels, self._free = [*self._free, *self._lent], []
        if self._shared is not None:
            channels.append(self._shared)
            self._shared = None
        for channel in channels:
            await channel.close()

    def _take_free(self) -> Channel | None:
        while self._free:
            channel = self._free.pop()
            if channel.is_open:
                return channel
        return None

    async def _open(self) -> Channel:
        channel = await Channel.open(
            self._host,
            self._port,
            client_id=self._client_id,
            timeout_s=self._connect_s,
            credentials=self._credentials,
        )
        if self._closed:
            await channel.close()
            raise BrokerUnreachable("the client was closed while it connected")
        return channel
