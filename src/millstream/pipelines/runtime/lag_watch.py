"""Measures the lag of every pipeline at the brokers every few seconds, whether or not it is running.

The lag in a driver's report is from its last batch, and a pipeline that fails, is parked or was stopped reports none.
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
"""The minimum time between measurements, however often something changes."""
SHARE_MAX: Final = 10
"""The pause after a slow measurement, as a multiple of its duration."""
PAUSE_S_MAX: Final = 30.0
"""The longest pause: a measurement may have been slow because a node did not answer."""
TIMEOUT_S: Final = 10.0


class LagWatch:
    """Tracks the lag of the declared pipelines."""

    def __init__(
        self,
        brokers: str,
        declared: Callable[[], Sequence[Pipeline]],
        take: Callable[[Mapping[str, int]], None],
    ) -> None:
        """Measure the pipelines that `declared` returns, and pass the lags to `take`."""
        self._brokers = brokers
        self._declared = declared
        self._take = take
        self._news = asyncio.Event()
        self._lags: dict[str, int] = {}
        self._read: dict[tuple[UUID, int], Reader | None] = {}
        """The readers of each version of a pipeline; statements and rules may be long."""

    def look(self) -> None:
        """Measure soon, since something has changed."""
        self._news.set()

    async def run(self) -> None:
        """Measure until cancelled; a background task of the broker."""
        while True:
            # No connection is made while no pipeline is declared.
            while not self._declared():
                self._lags.clear()
                await self._wait(None)
            try:
                async with Client.connect(self._brokers, client_id=CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    await self._keep_looking(client)
            except (MillstreamError, OSError) as error:
                _logger.debug("the lag of pipelines is unknown", extra={"error": str(error)})
                await asyncio.sleep(LOOK_S)

    async def _keep_looking(self, client: Client) -> None:
        backlogs = Backlogs(client)
        while declared := self._declared():
            began = time.monotonic()
            found = await backlogs.lags(self._readers(declared))
            names = {one.name for one in declared}
            # The last known lag holds for what could not be measured now.
            self._lags = {name: lag for name, lag in {**self._lags, **found}.items() if name in names}
            if self._declared():
                # Otherwise another node reports by now.
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
