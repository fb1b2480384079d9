"""Barriers of a source: moments at which no transaction is half committed, for the clusters that mirror it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import UUID

from millstream.core.errors import CoordinatorUnavailable, MillstreamError, RequestTimedOut
from millstream.core.tasks import cancel_and_wait, gather_or_cancel
from millstream.protocol.private.mirror_messages import (
    BarrierRequest,
    BarrierResponse,
    HoldCommitsRequest,
    HoldCommitsResponse,
    Offsets,
)

if TYPE_CHECKING:
    from millstream.broker.groups.coordinator import GroupCoordinator
    from millstream.broker.mirror.service import MirrorService
    from millstream.broker.transactions.coordinator import TransactionCoordinator

HOLD_S: Final = 2.0
"""The longest time for which a barrier delays commits and aborts."""
HOLDS_MAX: Final = 100
OFFSETS_MAX: Final = 100_000
"""The most offsets of transactional groups that a barrier returns: beyond it, it returns none."""


class Barriers:
    """The barriers that a node takes, and the decisions that it holds back for those of others."""

    def __init__(self, service: MirrorService, transactions: TransactionCoordinator, groups: GroupCoordinator) -> None:
        self._service = service
        self._transactions = transactions
        self._groups = groups
        self._taking = asyncio.Lock()
        """Held while this node takes a barrier, so that clients that ask all the time get one after the other."""
        self._held: dict[str, asyncio.Task[None]] = {}
        """The tasks that delay commits and aborts for a barrier, by its token."""

    def close(self) -> None:
        """Release the decisions that were held back."""
        for holding in list(self._held.values()):
            holding.cancel()

    async def take(self, request: BarrierRequest) -> BarrierResponse:
        """Return the high watermarks of a moment at which no transaction is half committed.

        Decisions of all coordinators are held back for that moment; records and offsets are not. Without topics, none
        are held back, since a client that may read no topic needs no barrier.
        """
        if not request.topics:
            return BarrierResponse()
        token = uuid.uuid4().hex
        others = self._service.others
        try:
            async with asyncio.timeout(HOLD_S), self._taking, self._transactions.hold_decisions():
                own = self._transactions.led()
                hold = HoldCommitsRequest(token=token, action="hold", hold_ms=int(HOLD_S * 1000))
                began = await gather_or_cancel(self._service.ask_node(node, hold) for node in others)
                # Before the watermarks: groups also commit offsets without transactions, which are not held back, and
                # what was written before such a commit must be below the watermarks.
                topic_ids = {name: request.topic_ids.get(name) for name in request.topics}
                groups, groups_omitted = (
                    await self._read_groups(token, topic_ids) if request.with_groups else ({}, False)
                )
                watermarks = await self._service.high_watermarks(request.topics)
                offsets = {name: ends for name, ends in watermarks.items() if self._has_id(name, request.topic_ids)}
                release = HoldCommitsRequest(token=token, action="release")
                ended = await gather_or_cancel(self._service.ask_node(node, release) for node in others)
                is_same = own == self._transactions.led() and [response.shards for response in began] == [
                    response.shards for response in ended
                ]
        except TimeoutError:
            raise RequestTimedOut("transactions take too long to end; no barrier was possible") from None
        if not all(response.held for response in (*began, *ended)):
            raise RequestTimedOut("a node did not hold back transactions long enough")
        # A coordinator that was between two nodes was held back by neither.
        held = sorted(index for shards in (own, *(response.shards for response in began)) for index, _ in shards)
        if not is_same or held != list(range(self._transactions.partitions)):
            raise RequestTimedOut("a coordinator of transactions moved to another node; no barrier was possible")
        read = {
            group: {topic: ends for topic, ends in topics.items() if topic in offsets}
            for group, topics in groups.items()
        }
        return BarrierResponse(
            offsets=offsets,
            groups={group: topics for group, topics in read.items() if topics},
            groups_omitted=groups_omitted,
        )

    async def _read_groups(self, token: str, topics: Mapping[str, UUID | None]) -> tuple[dict[str, Offsets], bool]:
        """Return the offsets of transactional groups in topics, while all nodes hold back decisions.

        If they are too many, none are returned, and the second value is True.
        """
        request = HoldCommitsRequest(token=token, action="read groups", topics=dict(topics))
        responses = await gather_or_cancel(self._service.ask_node(node, request) for node in self._service.others)
        own, groups_omitted = self._groups.transactional_groups(topics, OFFSETS_MAX)
        by_node = [own, *(response.groups for response in responses)]
        if sorted(index for node_shards in by_node for index in node_shards) != list(range(self._groups.partitions)):
            raise RequestTimedOut("a coordinator of groups is loading or moving; no barrier was possible")
        offsets = {group: read for shards in by_node for groups in shards.values() for group, read in groups.items()}
        count = sum(len(ends) for read in offsets.values() for ends in read.values())
        is_over = groups_omitted or any(response.groups_omitted for response in responses) or count > OFFSETS_MAX
        return ({}, True) if is_over else (offsets, False)

    def _has_id(self, name: str, topic_ids: Mapping[str, UUID]) -> bool:
        """Whether a topic has the id by which the caller knows it, if it does."""
        if name not in topic_ids:
            return True
        topic = self._service.topics.get(name)
        return topic is not None and topic.topic_id == topic_ids[name]

    async def hold(self, request: HoldCommitsRequest) -> HoldCommitsResponse:
        """Hold back decisions for a while, release them again, or read groups meanwhile."""
        if request.action == "read groups":
            groups, groups_omitted = self._groups.transactional_groups(request.topics, OFFSETS_MAX)
            return HoldCommitsResponse(held=request.token in self._held, groups=groups, groups_omitted=groups_omitted)
        if request.action == "release":
            holding, shards = self._held.pop(request.token, None), self._transactions.led()
            if holding is None or holding.done():
                return HoldCommitsResponse(held=False)
            await cancel_and_wait(holding)
            return HoldCommitsResponse(held=True, shards=shards)
        ready = asyncio.Event()

        async def keep() -> None:
            with suppress(TimeoutError, MillstreamError):
                async with asyncio.timeout(request.hold_ms / 1000), self._transactions.hold_decisions():
                    ready.set()
                    await asyncio.Event().wait()
            self._held.pop(request.token, None)

        if len(self._held) >= HOLDS_MAX:
            raise CoordinatorUnavailable("too many mirrors ask for a barrier at once")
        holding = self._held[request.token] = asyncio.get_running_loop().create_task(keep())
        is_ready = asyncio.ensure_future(ready.wait())
        await asyncio.wait([holding, is_ready], return_when=asyncio.FIRST_COMPLETED)
        is_ready.cancel()
        return HoldCommitsResponse(held=ready.is_set(), shards=self._transactions.led())
