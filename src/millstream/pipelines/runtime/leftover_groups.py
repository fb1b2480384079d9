"""Deletes the groups of deleted pipelines whose dead driver still counted as a member.

A run deletes its pipeline's group when it learns of the deletion, and deleting a pipeline that is not running deletes
the group at once. But a driver that was killed stays a member until its session expires.
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
"""Slightly longer than a driver's session."""
TIMEOUT_S: Final = 10.0


class LeftoverGroups:
    """Deletes the groups of deleted pipelines; on every node, since the one that ran them may be gone too."""

    def __init__(self, brokers: str, is_declared: Callable[[str], bool], *, pause_s: float = PAUSE_S) -> None:
        self._brokers = brokers
        self._is_declared = is_declared
        self._pause_s = pause_s
        self._known: frozenset[str] = frozenset()
        self._undeclared: set[str] = set()
        self._news = asyncio.Event()

    def take(self, declared: Iterable[str]) -> None:
        """Compare with the declared pipelines; missing ones were deleted."""
        before, self._known = self._known, frozenset(declared)
        self._undeclared |= before - self._known
        if self._undeclared:
            self._news.set()

    async def run(self) -> None:
        """Delete groups until cancelled; a background task of the broker."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._pause_s)
            self._news.clear()
            try:
                async with Client.connect(self._brokers, client_id=CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    for name in sorted(self._undeclared):
                        await self._settle(client, name)
            except (MillstreamError, OSError) as error:
                _logger.debug("groups of deleted pipelines will be checked again", extra={"error": str(error)})
            if self._undeclared:
                self._news.set()

    async def _settle(self, client: Client, name: str) -> None:
        try:
            if await self._is_settled(client, name):
                self._undeclared.discard(name)
        except MillstreamError as error:
            # Its coordinator is unavailable; those of other groups may not be.
            _logger.debug("a group will be checked again", extra={"pipeline": name, "error": str(error)})

    async def _is_settled(self, client: Client, name: str) -> bool:
        """Whether nothing is left of a deleted pipeline, or its group has another owner."""
        if self._is_declared(name):
            return True
        try:
            found = await describe_group(client, f"{GROUP_PREFIX}{name}")
        except UnknownGroup:
            return True
        if found.members:
            # A manual run of an undeclared pipeline keeps its progress.
            return not all(one.client_id.startswith(DRIVER_CLIENT) for one in found.members)
        await PipelineClient(client).forget_deleted(name)
        return True
