"""The source of a mirror: any Kafka through the public protocol, Millstream also through private requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Self
from uuid import UUID

from millstream.core.acl import Acl, AclFilter
from millstream.core.errors import CopyDiverged, MillstreamError, UnknownTopicId, UnsupportedVersion
from millstream.core.ids import EpochEnd, NodeId, Offset
from millstream.core.mirror import MirrorSettings
from millstream.core.subscription import QueueKey
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.message import R, Request, request_private
from millstream.protocol.private.mirror_messages import (
    ANY_SEQUENCE,
    OfferRequest,
    OfferResponse,
)
from millstream.protocol.wire.admin_requests import describe_acls
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, TopicMetadata
from millstream.protocol.wire.credentials import Credentials, client_tls
from millstream.protocol.wire.fetch import FetchedPartition, FetchLimits

Fetched = dict[TopicPartition, FetchedPartition | MillstreamError]

TIMEOUT_S = 30.0


def credentials_of(settings: MirrorSettings) -> Credentials:
    return Credentials(
        tls=client_tls(ca_text=settings.tls_ca or None) if settings.tls or settings.tls_ca else None,
        user=settings.user,
        password=settings.password,
        token=(lambda: settings.token) if settings.token else None,
        mechanism=settings.mechanism if settings.user else "",
    )


class Source:
    """A connection to the source; use it as a context manager."""

    def __init__(self, settings: MirrorSettings, *, name: str, advice: str = "") -> None:
        self.client = Client.connect(
            settings.source,
            client_id=f"mirror-{name}",
            timeout_s=TIMEOUT_S,
            credentials=credentials_of(settings),
            advice=advice
            or "check that the source is running and reachable from here; its address is changed with "
            f"`millstream mirror update {name} --set from=HOST:PORT`",
            waiting_max=64,
        )
        self.cluster_id = ""
        self.is_millstream = False

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        try:
            self.cluster_id = (await self.client.metadata([])).cluster_id
            self.is_millstream = await self.client.serves(OfferRequest.KEY)
        except BaseException:
            await self.client.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.client.close()

    async def metadata(self, topics: Iterable[str] | None = None) -> ClusterMetadata:
        return await self.client.metadata(topics)

    async def ask(self, node: NodeId | None, request: Request[R], *, waits: bool = False) -> R:
        return await request_private(self.client, node, request, waits=waits, about="the source")

    async def fetch(
        self,
        leader: NodeId,
        positions: Mapping[TopicPartition, Offset],
        limits: FetchLimits,
        topic_ids: Mapping[str, UUID | None],
    ) -> Fetched:
        """Read from partitions of one leader; a topic that has another id now gets `UnknownTopicId`.

        A topic whose id is None, because the source has no ids, is read by its name.
        """
        known = {name: topic_id for name, topic_id in topic_ids.items() if topic_id is not None}
        by_id = {where: offset for where, offset in positions.items() if where.topic in known}
        by_name = {where: offset for where, offset in positions.items() if where.topic not in known}
        requests = [self._fetch_by_id(leader, by_id, limits, known)] if by_id else []
        if by_name:
            requests.append(self.client.fetch_from(leader, by_name, limits))
        return {where: response for fetched in await gather_or_cancel(requests) for where, response in fetched.items()}

    async def _fetch_by_id(
        self,
        leader: NodeId,
        positions: Mapping[TopicPartition, Offset],
        limits: FetchLimits,
        topic_ids: Mapping[str, UUID],
    ) -> Fetched:
        try:
            return await self.client.fetch_from(leader, positions, limits, topic_ids)
        except UnsupportedVersion:
            fetched = await self.client.fetch_from(leader, positions, limits)
        # Kafka before 3.1 names topics, but not in fetches. An id never comes back: if the leader that has served the
        # fetch still knows it, the records are of this topic.
        now = (await self.client.metadata({where.topic for where in positions}, node=leader)).topics
        return {
            where: response
            if where.topic in now and now[where.topic].topic_id == topic_ids[where.topic]
            else UnknownTopicId(f"fetch from {where}: the topic has another id now")
            for where, response in fetched.items()
        }

    async def end_of_epoch(self, where: TopicPartition, epoch: int) -> EpochEnd:
        """Return the largest epoch of the source's log up to the given one, and where it ends."""
        return await self.client.end_of_epoch(where, epoch)

    async def acls(self) -> list[Acl]:
        return await describe_acls(self.client, AclFilter())

    async def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the high watermarks of partitions; those that cannot be asked are missing."""
        listed = await self.client.list_offsets_of(dict.fromkeys(partitions, -1))
        return {
            where: listed_offset.offset
            for where, listed_offset in listed.items()
            if not isinstance(listed_offset, MillstreamError)
        }


def known_id(topic: TopicMetadata) -> UUID | None:
    """Return the id of a topic of the source; None if the source has no ids."""
    return topic.topic_id if topic.topic_id.int else None


def is_original(copy: Topic, topic: TopicMetadata) -> bool:
    """Whether a topic of the source is the one of which a copy was made, as far as ids show it."""
    return copy.original_id is None or known_id(topic) in (None, copy.original_id)


def recreated_error(name: str) -> CopyDiverged:
    """Return the error of a copy whose original has another id now."""
    return CopyDiverged(
        f"topic {name!r} was deleted on the source and created again, so nothing more is copied; delete its copy here "
        "to mirror the new topic from the start (exclude the topic first if it is not wanted), or fail over to keep "
        "the copy"
    )


async def offer_pages(
    ask: Callable[[OfferRequest], Awaitable[OfferResponse]],
    topics: Iterable[UUID],
    known: Mapping[QueueKey, int] | None = None,
) -> AsyncIterator[OfferResponse]:
    """Yield a node's data of some topics other than records, page by page, each queue once.

    `known` are queues with their last writes, which are left out unless they were written since.
    """
    seen = dict(known or {})
    while True:
        offer = await ask(OfferRequest(topics=list(topics), known=list(seen.items())))
        yield offer
        fresh = {queue.key for queue in offer.queues if seen.get(queue.key) != ANY_SEQUENCE}
        if not offer.has_more or not fresh:
            return
        seen |= dict.fromkeys(fresh, ANY_SEQUENCE)
