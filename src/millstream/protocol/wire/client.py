"""The small asynchronous Kafka client that the CLI, the gateway, followers, the SDK and Spark use.

It finds the leader of each partition, negotiates versions once per connection, retries transient errors, and
raises the errors of `core/errors.py`. Records go in and come out as whole batches; `records/` makes and reads them.

    async with Client.connect("127.0.0.1:9092") as client:
        produced = await client.produce("orders", 0, batch)
        response = await client.fetch("orders", 0, produced.base_offset)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from millstream.core.backoff import Backoff
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidRequest,
    MillstreamError,
    NotLeader,
    RequestTimedOut,
    StorageFailure,
    UnexpectedServer,
    UnknownTopic,
    UnsupportedVersion,
)
from millstream.core.ids import EpochEnd, NodeId, Offset, PartitionIndex
from millstream.core.setting import parse_address
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import build_request, load_request_class, load_response_class, response_body_at
from millstream.protocol.messages.primitives import Buffer
from millstream.protocol.messages.shape import reshape
from millstream.protocol.wire import fetch, list_offsets, produce
from millstream.protocol.wire.channel import BORROWED_MAX, Channel, Pool
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, NodeMetadata, from_response
from millstream.protocol.wire.credentials import NODE_CREDENTIALS, Credentials
from millstream.protocol.wire.error_codes import TRANSIENT, error_from_code, no_coordinator_error, no_producer_error
from millstream.protocol.wire.fetch import READ_UNCOMMITTED, FetchedPartition, FetchLimits
from millstream.protocol.wire.list_offsets import Listed, ListedOffset
from millstream.protocol.wire.produce import Produced

_logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S_MAX: Final = 10.0
BACKOFF_S_MAX: Final = 1.0
ACKS_NONE: Final = 0
PRODUCE_S_MIN: Final = 0.1
"""How long a last attempt may take, even if the time is nearly up."""
INSPECTION_S: Final = 10.0
"""How long a read waits while a broker determines which offsets its disk lost, or restores them from a replica."""

_OF_MEMBERS: Final = frozenset({11, 14})
"""JoinGroup and SyncGroup, which wait for other members."""

_BLOCKING: Final = frozenset({1, 78}) | _OF_MEMBERS
"""Every request that a broker may delay: Fetch and ShareFetch wait for records."""

GROUP_COORDINATOR: Final = 0

COORDINATORS_MAX: Final = 1024
"""How many coordinators a client remembers."""

_ADVICE: Final = "start one with `millstream serve`, or pass the address of a running one with --brokers HOST:PORT"


class Client:
    """A client of one cluster. Use it as a context manager; one instance serves many tasks of one loop."""

    def __init__(
        self,
        bootstrap: Collection[tuple[str, int]],
        *,
        client_id: str,
        timeout_s: float,
        connect_s: float = 0.0,
        waiting_max: int = BORROWED_MAX,
        advice: str = _ADVICE,
        credentials: Credentials | None = None,
    ) -> None:
        self._bootstrap = tuple(bootstrap)
        self._client_id = client_id
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        """How long to retry connecting before giving up."""
        self._waiting_max = waiting_max
        self._credentials = credentials or NODE_CREDENTIALS.get()
        self._advice = advice
        """The advice given if no broker responds."""
        self._pools: dict[tuple[str, int], Pool] = {}
        self._nodes: dict[NodeId, NodeMetadata] = {}
        self._leaders: dict[TopicPartition, NodeId] = {}
        self._coordinators: dict[tuple[int, str], NodeId] = {}
        self._closed = False

    @classmethod
    def connect(
        cls,
        addresses: str,
        *,
        client_id: str = "millstream",
        timeout_s: float = 30.0,
        connect_s: float = 0.0,
        waiting_max: int = BORROWED_MAX,
        advice: str = _ADVICE,
        credentials: Credentials | None = None,
    ) -> Self:
        """Prepare a client from `host:port,host:port`; entering it connects to the first that responds.

        If none does, connecting is retried for `connect_s` seconds, since a broker may be starting. At most
        `waiting_max` requests may wait at one node for records or messages, each on its own connection.
        """
        parts = [part.strip() for part in addresses.split(",") if part.strip()]
        bootstrap = [parse_address(part, name="the broker address") for part in parts or [addresses]]
        return cls(
            bootstrap,
            client_id=client_id,
            timeout_s=timeout_s,
            connect_s=connect_s,
            waiting_max=waiting_max,
            advice=advice,
            credentials=credentials,
        )

    async def __aenter__(self) -> Self:
        try:
            await self._first_response()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; pending and later requests fail."""
        self._closed = True
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            await pool.close()

    # -- any request ----------------------------------------------------------------------------------------

    async def send(self, node: NodeId | None, request: Any, *, timeout_s: float | None = None) -> Any:
        """Send a message to a node (any, if None) in a version that both know; the response has the message's version.

        A request that the broker may delay, such as JoinGroup, has its own connection while it waits. When a node
        throttles the client, the next request to it is sent after the pause.
        """
        pool = await self._reach(node)
        await pool.unmuted()
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        if request.__api_key__ not in _BLOCKING:
            return await _call(pool, await pool.shared(), request, patience_s)
        async with pool.borrowed(by_member=request.__api_key__ in _OF_MEMBERS) as channel:
            return await _call(pool, channel, request, patience_s)

    async def private(
        self,
        node: NodeId | None,
        api_key: int,
        body: bytes,
        *,
        version: int = 0,
        waits: bool = False,
        timeout_s: float | None = None,
    ) -> memoryview:
        """Send a private request, whose body is bytes; return the body of the response.

        One that the broker may delay has its own connection while it waits.
        """
        pool = await self._reach(node)
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        if waits:
            async with pool.borrowed() as channel:
                frame = await channel.exchange(api_key, version, [body], timeout_s=patience_s)
        else:
            frame = await (await pool.shared()).exchange(api_key, version, [body], timeout_s=patience_s)
        return frame[response_body_at(api_key, version, frame) :]

    async def pool_for(self, node: NodeId | None) -> Pool:
        """Return the connections to a node (any, if None), for callers that manage requests themselves."""
        return await self._reach(node)

    def throttle_of(self, topic: str) -> float:
        """Return for how many seconds the leaders of a topic's partitions throttle the client; the longest."""
        # Checked before every publish over HTTP; there hardly ever is a throttle.
        for pool in self._pools.values():
            if pool.muted_until:
                break
        else:
            return 0.0
        pauses = {place: pool.pause_s for place, pool in self._pools.items() if pool.pause_s}
        leaders = {leader for partition, leader in self._leaders.items() if partition.topic == topic}
        nodes = [self._nodes[leader] for leader in leaders if leader in self._nodes]
        return max((pauses.get((node.host, node.port), 0.0) for node in nodes), default=0.0)

    async def serves(self, api_key: int) -> bool:
        """Return whether the broker serves an API; Apache Kafka has none of Millstream's own."""

        async def attempt() -> bool:
            pool = await self._reach(None)
            return api_key in (await pool.shared()).versions

        return await self._retrying(attempt)

    # -- the cluster ----------------------------------------------------------------------------------------

    async def metadata(
        self, topics: Iterable[str] | None = None, *, create: bool = False, node: NodeId | None = None
    ) -> ClusterMetadata:
        """Request the cluster's and some topics' metadata (all, if None) from a node (any, if None); `create` lets the
        broker create missing topics.
        """
        requested = topics if topics is None else tuple(topics)
        return await self._retrying(lambda: self._fetch_metadata(requested, create=create, node=node))

    async def leader_of(self, topic: str, partition: int, *, create: bool = False) -> NodeId:
        """Return the leader of a partition, from the cache or by asking."""
        return await self._retrying(lambda: self._find_leader(topic, partition, create=create))

    def forget_leaders(self) -> None:
        """Look up every leader again when it is next needed."""
        self._leaders.clear()

    async def coordinator(self, group: str) -> NodeId:
        return await self._retrying(lambda: self._find_coordinator(group))

    async def call_coordinator(
        self, name: str, attempt: Callable[[NodeId], Awaitable[T]], *, kind: int, place: str = ""
    ) -> T:
        """Call a function with the coordinator of a name, again with the new one if it moves or a response is lost.

        The coordinator is remembered until a call fails. Names that share one by rule share a `place`.
        """
        key = kind, place or name

        async def once() -> T:
            known = self._coordinators.get(key)
            if known is None:
                known = await self._find_coordinator(name, kind)
                while len(self._coordinators) >= COORDINATORS_MAX:
                    self._coordinators.pop(next(iter(self._coordinators)))
                self._coordinators[key] = known
            try:
                return await attempt(known)
            except MillstreamError:
                self._coordinators.pop(key, None)
                raise

        return await self._retrying(once)

    async def call_leader(
        self, topic: str, partition: int, attempt: Callable[[NodeId], Awaitable[T]], *, create: bool = False
    ) -> T:
        """Call a function with the leader of a partition, again with the new one if it moves or a response is lost."""

        async def once() -> T:
            return await attempt(await self._find_leader(topic, partition, create=create))

        return await self._retrying(once)

    # -- records --------------------------------------------------------------------------------------------

    async def init_producer_id(self, topic: str | None = None) -> tuple[int, int]:
        """Return the id and epoch of a new idempotent producer; an error names the topic that it is for."""
        request = build_request("init_producer_id", 5, transaction_timeout=timedelta(minutes=1))
        response = await self.send(None, request)
        if response.error_code:
            raise no_producer_error(response.error_code, topic)
        return response.producer_id, response.producer_epoch

    async def produce(
        self,
        topic: str,
        partition: int,
        batches: Buffer,
        *,
        acks: int = -1,
        timeout_ms: int | None = None,
        transactional_id: str | None = None,
    ) -> Produced:
        """Append whole batches to a partition; with `acks=0` the offset is unknown: -1.

        The broker may take `timeout_ms` to acknowledge them; without it, everything together takes no longer than the
        client's own timeout.

        Transient rejections are retried. If a response is lost, batches of an idempotent producer are sent again too,
        since the broker recognizes them; others are not, since they could be duplicated.
        """
        # Loading the checksum library takes longer than most commands of the CLI.
        from millstream.protocol.records.batch import read_header

        idempotent = read_header(batches).producer_id >= 0

        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s

        async def attempt() -> Produced:
            nonlocal deadline
            pool = await self._reach(await self._find_leader(topic, partition, create=True))
            # A pause that the broker requests is not a failure.
            deadline += await pool.unmuted()
            left_s = max(PRODUCE_S_MIN, deadline - loop.time())
            if timeout_ms is not None:
                left_s += timeout_ms / 1000
            patience_ms = int(left_s * 1000) if timeout_ms is None else timeout_ms
            return await self._produce_to(
                pool,
                topic,
                partition,
                batches,
                acks=acks,
                timeout_ms=patience_ms,
                timeout_s=left_s,
                transactional_id=transactional_id,
            )

        return await self._retrying(attempt, lost_is_transient=idempotent)

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int = 1024 * 1024,
        max_wait_ms: int = 500,
        min_bytes: int = 1,
        isolation: int = READ_UNCOMMITTED,
    ) -> FetchedPartition:
        """Read from one partition; wait up to `max_wait_ms` for `min_bytes`.

        Raise `CorruptBatch` where the disk has lost the offset, and `StorageFailure` if that is not known after
        `INSPECTION_S`.
        """
        position = TopicPartition(topic, PartitionIndex(partition))
        limits = FetchLimits(max_bytes, max_wait_ms, min_bytes, isolation)

        async def attempt() -> FetchedPartition:
            leader = await self._find_leader(topic, partition)
            return fetch.single_partition(await self.fetch_from(leader, {position: Offset(offset)}, limits), position)

        return await self._while_inspected(lambda: self._retrying(attempt))

    async def fetch_many(
        self, positions: Mapping[TopicPartition, Offset], limits: FetchLimits
    ) -> dict[TopicPartition, FetchedPartition]:
        """Read from many partitions, with one concurrent request per leader.

        Partitions whose leader has moved are missing from the result; the next call finds the new one. So does one
        after a leader could not be reached, which is raised. Partitions that a disk does not serve now are missing
        while others have records; otherwise they are read again, up to `INSPECTION_S`.
        """
        return await self._while_inspected(lambda: self._fetch_many_once(positions, limits))

    async def _fetch_many_once(
        self, positions: Mapping[TopicPartition, Offset], limits: FetchLimits
    ) -> dict[TopicPartition, FetchedPartition]:

        async def fetch(leader: NodeId, offsets: dict[TopicPartition, Offset]) -> dict[TopicPartition, Any]:
            try:
                return {**await self.fetch_from(leader, offsets, limits)}
            except (BrokerUnreachable, RequestTimedOut):
                for partition in offsets:
                    self._leaders.pop(partition, None)
                raise

        by_leader: dict[NodeId, dict[TopicPartition, Offset]] = {}
        for partition, offset in positions.items():
            leader = await self.leader_of(partition.topic, partition.partition)
            by_leader.setdefault(leader, {})[partition] = offset
        fetched: dict[TopicPartition, FetchedPartition] = {}
        unserved: StorageFailure | None = None
        for response in await gather_or_cancel(fetch(*request) for request in by_leader.items()):
            for partition, result in response.items():
                if isinstance(result, TRANSIENT):
                    self._leaders.pop(partition, None)
                elif isinstance(result, StorageFailure):
                    # In a cluster, another replica may lead by the next attempt.
                    self._leaders.pop(partition, None)
                    unserved = result
                elif isinstance(result, MillstreamError):
                    raise result
                else:
                    fetched[partition] = result
        if unserved is not None and not any(result.records for result in fetched.values()):
            raise unserved
        return fetched

    async def list_offsets(
        self, topic: str, times_ms: Mapping[int, int], *, isolation: int = READ_UNCOMMITTED
    ) -> dict[int, ListedOffset]:
        """Look up offsets by time, per partition: -2 earliest, -1 latest, -3 of the largest timestamp, otherwise a
        time.
        """

        async def attempt() -> dict[int, ListedOffset]:
            by_leader: dict[NodeId, dict[TopicPartition, int]] = {}
            for number, time_ms in times_ms.items():
                times = by_leader.setdefault(await self._find_leader(topic, number), {})
                times[TopicPartition(topic, PartitionIndex(number))] = time_ms
            listed: dict[int, ListedOffset] = {}
            for leader, times in by_leader.items():
                offsets = await self._list_from(leader, times, isolation)
                listed.update({where.partition: list_offsets.listed_in(offsets, where) for where in times})
            return listed

        # A lookup by time reads batches.
        return await self._while_inspected(lambda: self._retrying(attempt))

    async def end_of_epoch(self, where: TopicPartition, epoch: int) -> EpochEnd:
        """Return the largest leader epoch of a partition up to the given one, and where it ends."""
        partition = {"partition": where.partition, "leader_epoch": epoch}
        topics = [{"topic": where.topic, "partitions": [partition]}]
        request = build_request("offset_for_leader_epoch", 4, replica_id=-1, topics=topics)

        async def attempt(leader: NodeId) -> EpochEnd:
            response = (await self.send(leader, request)).topics[0].partitions[0]
            if response.error_code:
                raise error_from_code(response.error_code, None, about=f"history of {where}")
            return EpochEnd(response.leader_epoch, response.end_offset)

        return await self.call_leader(where.topic, where.partition, attempt)

    async def list_offsets_of(
        self, times_ms: Mapping[TopicPartition, int], *, isolation: int = READ_UNCOMMITTED
    ) -> Listed:
        """Look up offsets in many topics, with few requests per leader.

        Each is requested once: an error takes the place of one whose leader is unreachable or has moved, and the next
        call asks the new one.
        """
        unknown = sorted({where.topic for where in times_ms if where not in self._leaders})
        if unknown:
            await self.metadata(unknown)
        listed: Listed = {where: NotLeader(f"{where} has no leader now") for where in times_ms}
        by_leader: dict[NodeId, dict[TopicPartition, int]] = {}
        for where, time_ms in times_ms.items():
            if where in self._leaders:
                by_leader.setdefault(self._leaders[where], {})[where] = time_ms
        for offsets in await gather_or_cancel(self._list_or_fail(*request, isolation) for request in by_leader.items()):
            listed.update(offsets)
        for where, listed_offset in listed.items():
            if isinstance(listed_offset, MillstreamError):
                self._leaders.pop(where, None)
        return listed

    # -- one attempt ----------------------------------------------------------------------------------------

    async def _fetch_metadata(
        self, topics: Collection[str] | None, *, create: bool = False, node: NodeId | None = None
    ) -> ClusterMetadata:
        from kio.schema.metadata.v13.request import MetadataRequest, MetadataRequestTopic
        from kio.schema.types import TopicName

        named = None
        if topics is not None:
            named = tuple(MetadataRequestTopic(topic_id=None, name=TopicName(name)) for name in topics)
        request = MetadataRequest(
            topics=named, allow_auto_topic_creation=create, include_topic_authorized_operations=False
        )
        response = from_response(await self.send(node, request))
        self._cache_metadata(response, topics)
        return response

    async def _find_leader(self, topic: str, partition: int, *, create: bool = False) -> NodeId:
        place = TopicPartition(topic, PartitionIndex(partition))
        known = self._leaders.get(place)
        if known is not None:
            return known
        response = await self._fetch_metadata([topic], create=create)
        if topic in response.errors:
            needs = "DESCRIBE, which READ and WRITE include"
            raise error_from_code(response.errors[topic], None, about=f"topic {topic!r}", needs=needs)
        partitions = response.topics[topic].partitions if topic in response.topics else {}
        if place.partition not in partitions:
            raise UnknownTopic(f"topic {topic!r} has {len(partitions)} partitions, but no partition {partition}")
        if place not in self._leaders:
            raise NotLeader(f"{place} has no leader now; its nodes may be down")
        return self._leaders[place]

    async def _produce_to(
        self,
        pool: Pool,
        topic: str,
        partition: int,
        batches: Buffer,
        *,
        acks: int,
        timeout_ms: int,
        timeout_s: float,
        transactional_id: str | None,
    ) -> Produced:
        channel = await pool.shared()
        version = channel.version_for(produce.PRODUCE_KEY, newest=produce.NEWEST, oldest=produce.OLDEST)
        body = produce.write_produce(
            version, topic, partition, batches, acks=acks, timeout_ms=timeout_ms, transactional_id=transactional_id
        )
        if acks == ACKS_NONE:
            await channel.send(produce.PRODUCE_KEY, version, body)
            return Produced(Offset(-1), -1)
        try:
            frame = await channel.exchange(produce.PRODUCE_KEY, version, body, timeout_s=timeout_s)
        except BrokerUnreachable as error:
            raise _ResponseLost(str(error)) from error
        response, throttle_ms = produce.read_produce_response(version, frame, about=f"publish to {topic}-{partition}")
        pool.mute(throttle_ms / 1000)
        if isinstance(response, MillstreamError):
            raise response
        return response

    async def fetch_from(
        self,
        leader: NodeId,
        positions: Mapping[TopicPartition, Offset],
        limits: FetchLimits,
        topic_ids: Mapping[str, UUID] | None = None,
    ) -> dict[TopicPartition, FetchedPartition | MillstreamError]:
        """Read from partitions of one leader, once; an error takes the place of a partition that it does not serve.

        With the ids of all topics, nothing is read from a topic that was recreated under the same name. Raise
        `UnsupportedVersion` if the broker does not know topics by id.
        """
        pool = await self._reach(leader)
        await pool.unmuted()
        async with pool.borrowed() as channel:
            newest = fetch.NEWEST if topic_ids is None else fetch.BY_ID
            version = channel.version_for(fetch.FETCH_KEY, newest=newest, oldest=fetch.OLDEST)
            if topic_ids is not None and version < fetch.BY_ID:
                raise UnsupportedVersion(f"the broker at {channel.address} does not fetch by topic id")
            body = fetch.write_fetch(version, positions, limits, topic_ids)
            timeout_s = limits.max_wait_ms / 1000 + self._timeout_s
            frame = await channel.exchange(fetch.FETCH_KEY, version, [body], timeout_s=timeout_s)
        pool.mute(fetch.read_throttle_ms(version, frame) / 1000)
        return fetch.read_fetched(version, frame, topic_ids)

    async def _list_from(self, leader: NodeId, times_ms: Mapping[TopicPartition, int], isolation: int) -> Listed:
        pool = await self._reach(leader)
        listed: Listed = {}
        for portion in list_offsets.portions(times_ms):
            await pool.unmuted()
            channel = await pool.shared()
            key, newest, oldest = list_offsets.LIST_OFFSETS_KEY, list_offsets.NEWEST, list_offsets.OLDEST
            version = channel.version_for(key, newest=newest, oldest=oldest)
            body = list_offsets.write_listing(version, portion, isolation, self._timeout_s)
            frame = await channel.exchange(key, version, [body], timeout_s=self._timeout_s)
            offsets, pause_s = list_offsets.read_listed(version, frame)
            pool.mute(pause_s)
            listed.update(offsets)
        return listed

    async def _list_or_fail(self, leader: NodeId, times_ms: Mapping[TopicPartition, int], isolation: int) -> Listed:
        try:
            return await self._list_from(leader, times_ms, isolation)
        except (RequestTimedOut, *TRANSIENT) as error:
            return dict.fromkeys(times_ms, error)

    async def _find_coordinator(self, name: str, kind: int = GROUP_COORDINATOR) -> NodeId:
        request = build_request("find_coordinator", 6, key_type=kind, coordinator_keys=[name])
        response = (await self.send(None, request)).coordinators[0]
        if response.error_code:
            raise no_coordinator_error(response.error_code, response.error_message, name)
        node_id = NodeId(response.node_id)
        self._nodes[node_id] = NodeMetadata(node_id=node_id, host=response.host, port=response.port, rack=None)
        return node_id

    # -- reaching nodes -------------------------------------------------------------------------------------

    async def _reach(self, node: NodeId | None) -> Pool:
        if node is None:
            return await self._connect_to_any()
        if node not in self._nodes:
            await self._fetch_metadata([])
        known = self._nodes.get(node)
        if known is None:
            raise BrokerUnreachable(f"node {node} is not in the cluster now; its nodes are {sorted(self._nodes)}")
        pool = self._pool(known.host, known.port)
        try:
            await pool.shared()
        except BrokerUnreachable as error:
            raise BrokerUnreachable(
                f"node {node} cannot be reached at the address it advertises ({error}); start it with "
                "`millstream serve`, or correct its address with --advertise HOST:PORT"
            ) from error
        return pool

    async def _first_response(self) -> None:
        """Find a broker that responds, since one may be starting; a silent one is given the time of a response."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while True:
            try:
                await self._connect_to_any(f" within {self._connect_s:g} s" if self._connect_s else "")
                return
            except BrokerUnreachable as error:
                is_silent = isinstance(error.__cause__, RequestTimedOut)
                left_s = begun - loop.time() + max(self._connect_s, self._timeout_s if is_silent else 0.0)
                if left_s <= 0:
                    raise
                if not is_silent and not backoff.failures:
                    _logger.warning(
                        "no broker responds at %s yet; retrying for %.3g s", _join_addresses(self._bootstrap), left_s
                    )
            # A silent broker has been waited for already.
            delay_s = backoff.take_s()
            await asyncio.sleep(0.0 if is_silent else min(delay_s, left_s))

    async def _connect_to_any(self, within: str = "") -> Pool:
        """Return a pool whose shared connection is open: an existing one, otherwise the first that can be opened."""
        nodes = [(node.host, node.port) for node in self._nodes.values()]
        # The given address is the nearest: for a gateway its own node. Another node may hang without being detected
        # yet.
        for host, port in (*self._bootstrap, *nodes):
            if self._pool(host, port).is_open:
                return self._pool(host, port)
        addresses = dict.fromkeys([*nodes, *self._bootstrap])
        reasons: list[str] = []
        silent: RequestTimedOut | None = None
        may_be_down = False
        for host, port in addresses:
            try:
                await self._pool(host, port).shared()
            except (BrokerUnreachable, RequestTimedOut) as error:
                reasons.append(str(error))
                may_be_down |= not isinstance(error, UnexpectedServer)
                silent = error if isinstance(error, RequestTimedOut) else silent
            else:
                return self._pool(host, port)
        tried = _join_addresses(addresses) + ("" if silent else within)
        if not may_be_down:
            raise UnexpectedServer(f"no broker responded at {tried}: {'; '.join(reasons)}")
        advised = f"; {self._advice}" if self._advice else ""
        raise BrokerUnreachable(f"no broker responded at {tried} ({'; '.join(reasons)}){advised}") from silent

    def _pool(self, host: str, port: int) -> Pool:
        if self._closed:
            raise InvalidRequest("the client is closed; open another one")
        pool = self._pools.get((host, port))
        if pool is None:
            connect_s = min(self._timeout_s, CONNECT_S_MAX)
            pool = Pool(
                host,
                port,
                client_id=self._client_id,
                connect_s=connect_s,
                borrowed_max=self._waiting_max,
                credentials=self._credentials,
            )
            self._pools[host, port] = pool
        return pool

    def _cache_metadata(self, response: ClusterMetadata, requested: Collection[str] | None) -> None:
        self._nodes = dict(response.nodes)
        requested_names = None if requested is None else set(requested)
        self._leaders = {
            partition: leader
            for partition, leader in self._leaders.items()
            if requested_names is not None and partition.topic not in requested_names
        }
        for topic in response.topics.values():
            for partition in topic.partitions.values():
                if partition.leader_id >= 0:
                    self._leaders[TopicPartition(topic.name, partition.partition)] = partition.leader_id

    # -- retries --------------------------------------------------------------------------------------------

    async def _while_inspected(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry a read while a disk does not serve it: the first reader of damage is ahead of its inspection."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(self._timeout_s, INSPECTION_S)
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while True:
            try:
                return await attempt()
            except StorageFailure:
                if loop.time() + backoff.next_s > deadline:
                    raise
            await backoff.pause()

    async def _retrying(self, attempt: Callable[[], Awaitable[T]], *, lost_is_transient: bool = True) -> T:
        """Retry transient failures with backoff and fresh metadata, while time is left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while True:
            try:
                return await attempt()
            except _ResponseLost as error:
                if not lost_is_transient or loop.time() + backoff.next_s > deadline:
                    raise RequestTimedOut(f"{error} Whether the records were stored is unknown.") from error
            except TRANSIENT:
                if loop.time() + backoff.next_s > deadline:
                    raise
            self._leaders.clear()
            await backoff.pause()


async def _call(pool: Pool, channel: Channel, request: Any, timeout_s: float) -> Any:
    key, newest = request.__api_key__, request.__version__
    version = channel.version_for(key, newest=newest)
    response = await channel.call(reshape(request, load_request_class(key, version)), timeout_s=timeout_s)
    throttle = getattr(response, "throttle_time", None)
    if throttle is not None:
        pool.mute(throttle.total_seconds())
    return reshape(response, load_response_class(key, newest))


class _ResponseLost(MillstreamError):
    """The connection broke after a request was sent and before its response arrived."""


def _join_addresses(addresses: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in addresses)
