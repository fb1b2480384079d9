"""Closing a connection: everything that runs is stopped concurrently, then the connection is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.client.connection import Connection
from millstream.core.errors import RequestTimedOut

HANG_S = 60


class Ending:
    """A subscriber or stream that finishes only once all others have started to stop."""

    is_closed = False

    def __init__(self, together: asyncio.Barrier, error: Exception | None = None) -> None:
        self._together = together
        self._error = error

    async def drain(self, timeout: float) -> None:
        await self.close()

    async def close(self) -> None:
        async with asyncio.timeout(HANG_S):
            await self._together.wait()
        if self._error is not None:
            raise self._error


class Closed:
    """A resource that is closed last."""

    is_closed = False

    async def __aenter__(self) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("fails", [False, True])
async def test_subscribers_and_streams_stop_concurrently(fails: bool) -> None:
    client, publisher = Closed(), Closed()
    parts: Any = (client, lambda: publisher)
    connection: Any = await Connection(*parts, client_id="test").__aenter__()
    together = asyncio.Barrier(3)
    connection._subscribers = [Ending(together, RequestTimedOut("lost") if fails else None), Ending(together)]
    connection._streams = [Ending(together)]
    if fails:
        with pytest.raises(RequestTimedOut, match="lost"):
            await connection.close()
    else:
        await connection.close()
    assert client.is_closed
    assert publisher.is_closed
