"""How many messages wait for each pipeline: asked of the brokers every few seconds, whoever runs it and whether or not.

What a driver says of that is from its last batch, and one that fails, is parked or was stopped says nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from millstream.client.admin.backlog import Backlogs, Reader, reader_of
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import Pipeline
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

CLIENT_ID: Final = "millstream-pipeline-lag"
LOOK_S: Final = 5.0
PAUSE_S_MIN: Final = 1.0
"""So long is at least between two looks, however often something changes."""
SHARE_MAX: Final = 10
"""A look that takes long is followed by a pause so many times as long."""
PAUSE_S_MAX: Final = 30.0
"""And no longer than this: it may have taken long because a node did not answer."""
TIMEOUT_S: Final = 10.0


class LagWatch:
    """Keeps knowing how far the declared pipelines are behind."""

    def __init__(
        self,
        brokers: str,
        declared: Callable[[], Sequence[Pipeline]],
        take: Callable[[Mapping[str, int]], None],
    ) -> None:
        """`declared` tells which pipelines are to be looked at now, `take` is told what waits for each."""
        self._brokers = brokers
        self._declared = declared
        self._take = take
        self._news = asyncio.Event()
        self._lags: dict[str, int] = {}
        self._read: dict[tuple[UUID, int], Reader | None] = {}
        """What was worked out of each version of a pipeline: statements and rules may be long."""

    def look(self) -> None:
        """Have a look soon: something has changed."""
        self._news.set()

    async def run(self) -> None:
        """Look until it is cancelled; a background task of the broker."""
        while True:
            # Nothing is asked while no pipeline is declared.
            while not self._declared():
                self._lags.clear()
                await self._wait(None)
            try:
                async with Client.connect(self._brokers, client_id=CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    await self._keep_looking(client)
            except (MillstreamError, OSError) as error:
                _logger.debug("what waits for pipelines is not known", extra={"error": str(error)})
                await asyncio.sleep(LOOK_S)

    async def _keep_looking(self, client: Client) -> None:
        backlogs = Backlogs(client)
        while declared := self._declared():
            began = time.monotonic()
            found = await backlogs.lags(self._readers(declared))
            names = {one.name for one in declared}
            # Of what could not be asked just now the last that was known holds.
            self._lags = {name: lag for name, lag in {**self._lags, **found}.items() if name in names}
            if self._declared():
                # Else it is for another node to tell by now.
                self._take(dict(self._lags))
            took_s = time.monotonic() - began
            await asyncio.sleep(min(max(PAUSE_S_MIN, took_s * SHARE_MAX), PAUSE_S_MAX))
            await self._wait(LOOK_S - PAUSE_S_MIN)

    def _readers(self, declared: Iterable[Pipeline]) -> list[Reader]:
        known = self._read
        self._read = {}
        for one in declared:
            key = (one.pipeline_id, one.version)
            self._read[key] = known[key] if key in known else reader_of(one)
        return [reader for reader in self._read.values() if reader is not None]

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        finally:
            self._news.clear()
