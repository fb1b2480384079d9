"""The groups of pipelines that were deleted while a driver that is dead still counted as their member.

Whoever runs a pipeline takes its group away when it hears of the deletion, and whoever deletes one that nobody runs
does so at once. But a driver that was killed stays the member until its session ends, and does nothing any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from millstream.client.admin.groups import describe_group
from millstream.client.admin.pipelines import PipelineClient
from millstream.core.errors import MillstreamError, UnknownGroup
from millstream.core.pipeline import GROUP_PREFIX
from millstream.pipelines.runtime.driver_messages import DRIVER_CLIENT
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

CLIENT_ID: Final = "millstream-pipeline-groups"
PAUSE_S: Final = 12.0
"""A little longer than the session of a driver."""
TIMEOUT_S: Final = 10.0


class LeftoverGroups:
    """Looks after the groups of pipelines that are gone; on every node, since the one that ran them may be gone too."""

    def __init__(self, brokers: str, is_declared: Callable[[str], bool], *, pause_s: float = PAUSE_S) -> None:
        self._brokers = brokers
        self._is_declared = is_declared
        self._pause_s = pause_s
        self._known: frozenset[str] = frozenset()
        self._undeclared: set[str] = set()
        self._news = asyncio.Event()

    def take(self, declared: Iterable[str]) -> None:
        """The pipelines that there are now; what is missing was deleted."""
        before, self._known = self._known, frozenset(declared)
        self._undeclared |= before - self._known
        if self._undeclared:
            self._news.set()

    async def run(self) -> None:
        """Take groups away until it is cancelled; a background task of the broker."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._pause_s)
            self._news.clear()
            try:
                async with Client.connect(self._brokers, client_id=CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    for name in sorted(self._undeclared):
                        await self._settle(client, name)
            except (MillstreamError, OSError) as error:
                _logger.debug("groups of deleted pipelines are looked at later", extra={"error": str(error)})
            if self._undeclared:
                self._news.set()

    async def _settle(self, client: Client, name: str) -> None:
        try:
            if await self._is_settled(client, name):
                self._undeclared.discard(name)
        except MillstreamError as error:
            # Its coordinator is away; those of others may be there.
            _logger.debug("a group is looked at later", extra={"pipeline": name, "error": str(error)})

    async def _is_settled(self, client: Client, name: str) -> bool:
        """Whether nothing is left of a pipeline that is gone, or what is left is somebody else's by now."""
        if self._is_declared(name):
            return True
        try:
            found = await describe_group(client, f"{GROUP_PREFIX}{name}")
        except UnknownGroup:
            return True
        if found.members:
            # Whoever runs one of this name by hand, without declaring it, keeps its progress.
            return not all(one.client_id.startswith(DRIVER_CLIENT) for one in found.members)
        await PipelineClient(client).forget_deleted(name)
        return True
