"""Producer ids at hand: the state machine cannot wait for the catalog, so a few are taken before it needs them."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from millstream.core.errors import CoordinatorUnavailable, MillstreamError
from millstream.core.ids import ProducerId

KEPT: Final = 4


class ProducerIds(Protocol):
    """Where producer ids come from: unique for ever, across restarts and crashes."""

    async def next(self) -> ProducerId:
        """Give out an id that nobody has had before."""


class SpareIds:
    """A few ids that nobody has yet."""

    def __init__(self, producer_ids: ProducerIds) -> None:
        self._producer_ids = producer_ids
        self._spare: deque[ProducerId] = deque()
        self._error: MillstreamError | None = None

    async def fill(self) -> None:
        """See that there are some; when there is no getting any, only who needs one is told."""
        try:
            while len(self._spare) < KEPT:
                self._spare.append(await self._producer_ids.next())
        except MillstreamError as error:
            self._error = error
        else:
            self._error = None

    def take(self) -> ProducerId:
        """Take one."""
        if not self._spare:
            raise CoordinatorUnavailable(f"there is no producer id at hand: {self._error or 'try again'}")
        return self._spare.popleft()
