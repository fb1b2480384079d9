"""How many messages wait for each pipeline: asked of the brokers every few seconds, whoever runs it and whether or not.

What a driver says of that is from its last batch, and one that fails, is parked or was stopped says nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from millstream.admin.groups import committed_offsets
from millstream.admin.position import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from millstream.model.errors import MillstreamError
from millstream.model.expression import compile_expression
from millstream.model.ids import PartitionIndex
from millstream.model.pipeline import LATEST, LandSettings, Pipeline
from millstream.model.topic import TopicPartition
from millstream.wire.client import Client
from millstream.wire.cluster_metadata import ClusterMetadata
from millstream.wire.fetching import READ_COMMITTED

_logger = logging.getLogger(__name__)

CLIENT_ID: Final = "millstream-pipeline-lag"
LOOK_S: Final = 5.0
PAUSE_S_MIN: Final = 1.0
"""So long is at least between two looks, however often something changes."""
SHARE_MAX: Final = 10
"""A look that takes long is followed by a pause so many times as long."""
TIMEOUT_S: Final = 10.0
_ASKED_AT_ONCE: Final = 16


class Bounds(NamedTuple):
    """Where a partition begins and ends for those who read what is committed."""

    start: int
    end: int


class Reading(NamedTuple):
    """What a pipeline reads, as it was declared."""

    name: str
    group: str
    topics: frozenset[str]
    pattern: re.Pattern[str] | None
    from_latest: bool

    def among(self, there: ClusterMetadata) -> set[str]:
        """The topics of it that there are."""
        if self.pattern is None:
            return {topic for topic in self.topics if topic in there.topics}
        fits = self.pattern.fullmatch
        return {name for name, topic in there.topics.items() if not topic.is_internal and fits(name)}


def reading_of(pipeline: Pipeline) -> Reading | None:
    """What a pipeline reads; None if that cannot be told from its settings."""
    try:
        settings = pipeline.settings
        topics = frozenset(pipeline.flows())
        pattern = settings.pattern if isinstance(settings, LandSettings) else ""
        compiled = compile_expression(pattern) if pattern else None
    except MillstreamError:
        return None
    return Reading(pipeline.name, pipeline.group, topics, compiled, settings.start == LATEST)


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
        self._read: dict[tuple[UUID, int], Reading | None] = {}
        """What was worked out of each version of a pipeline: statements and rules may be long."""

    def look(self) -> None:
        """Have a look soon: something has changed."""
        self._news.set()

    async def run(self) -> None:
        """Look until it is cancelled; a background task of the broker."""
        while True:
            # Nothing is asked while no pipeline is declared.
            while not self._declared():
                await self._wait(None)
            try:
                async with Client.connect(self._brokers, client_id=CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    await self._keep_looking(client)
            except (MillstreamError, OSError) as error:
                _logger.debug("what waits for pipelines is not known", extra={"error": str(error)})
                await asyncio.sleep(LOOK_S)

    async def _keep_looking(self, client: Client) -> None:
        while declared := self._declared():
            began = time.monotonic()
            found = await lags_of(client, self._readings(declared))
            names = {one.name for one in declared}
            # Of what could not be asked just now the last that was known holds.
            self._lags = {name: lag for name, lag in {**self._lags, **found}.items() if name in names}
            if self._declared():
                # Else it is for another node to tell by now.
                self._take(self._lags)
            took_s = time.monotonic() - began
            await asyncio.sleep(max(PAUSE_S_MIN, took_s * SHARE_MAX))
            await self._wait(LOOK_S - PAUSE_S_MIN)

    def _readings(self, declared: Iterable[Pipeline]) -> list[Reading]:
        known = self._read
        self._read = {}
        for one in declared:
            key = (one.pipeline_id, one.version)
            self._read[key] = known[key] if key in known else reading_of(one)
        return [reading for reading in self._read.values() if reading is not None]

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        finally:
            self._news.clear()


async def lags_of(client: Client, readings: Sequence[Reading]) -> dict[str, int]:
    """By pipeline, how many messages are there that it has not taken; those whose topics are missing are left out."""
    has_pattern = any(one.pattern is not None for one in readings)
    there = await client.metadata(None if has_pattern else sorted(set().union(*(one.topics for one in readings))))
    read = {one.name: one.among(there) for one in readings}
    limit = asyncio.Semaphore(_ASKED_AT_ONCE)
    topics = sorted(set().union(*read.values()))
    found = await asyncio.gather(*(_bounds(client, topic, there, limit) for topic in topics))
    bounds = dict(zip(topics, found, strict=True))
    asked = [one for one in readings if read[one.name]]
    lags = await asyncio.gather(*(_lag_of(client, one, read[one.name], bounds, limit) for one in asked))
    return {one.name: lag for one, lag in zip(asked, lags, strict=True) if lag is not None}


async def _bounds(
    client: Client, topic: str, there: ClusterMetadata, limit: asyncio.Semaphore
) -> dict[int, Bounds] | None:
    partitions = list(there.topics[topic].partitions)
    async with limit:
        try:
            starts = await client.list_offsets(topic, dict.fromkeys(partitions, EARLIEST_TIMESTAMP))
            ends = await client.list_offsets(
                topic, dict.fromkeys(partitions, LATEST_TIMESTAMP), isolation=READ_COMMITTED
            )
        except MillstreamError:
            # It was deleted just now, or one of its leaders is away; the last that was known holds.
            return None
    return {number: Bounds(starts[number].offset, ends[number].offset) for number in partitions}


async def _lag_of(
    client: Client,
    reading: Reading,
    topics: Iterable[str],
    bounds: Mapping[str, Mapping[int, Bounds] | None],
    limit: asyncio.Semaphore,
) -> int | None:
    async with limit:
        try:
            committed = await committed_offsets(client, reading.group)
        except MillstreamError:
            return None
    lag = 0
    for topic in topics:
        of_topic = bounds[topic]
        if of_topic is None:
            return None
        # Nothing waits for one that is to begin at the end, and has not begun.
        at_end = reading.from_latest and not any(where.topic == topic for where in committed)
        for number, (start, end) in of_topic.items():
            offset = committed.get(TopicPartition(topic, PartitionIndex(number)), end if at_end else start)
            lag += max(0, end - max(offset, start))
    return lag
