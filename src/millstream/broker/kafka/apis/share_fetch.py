"""ShareFetch (key 78), versions 1 to 2: acquires messages for a share consumer, and acknowledges earlier ones
(KIP-932).

The queue of each partition of the member's session leases messages to it, oldest first; the response holds their
batches and the acquired ranges. If none are available, it waits up to `max_wait`. The session stores the partitions:
epoch 0 opens it, each further request increments the epoch, -1 closes it and releases the member's leases.

Invalid requests of a session get SHARE_SESSION_NOT_FOUND or INVALID_SHARE_SESSION_EPOCH; a session also ends with its
connection. Sessions and leases belong to the principal that opened them, not to others that name the same member, and
sessions to its API token. A topic of the session that may no longer be read gets TOPIC_AUTHORIZATION_FAILED in each
response, until it may be read again or the client removes it from the session; the response waits for messages of the
others. An acknowledgement of a message that the member does not hold (any more) gets INVALID_RECORD_STATE, and no
message of that partition is acknowledged. NOT_LEADER_OR_FOLLOWER includes the current leader.

Version 2 adds renewals (the acknowledgement 4), announced by `is_renew_ack`: such a request acquires nothing, and its
limits must be 0. It also adds `share_acquire_mode`: by default a batch is acquired as a whole, beyond `max_records`; in
mode 1 that is a strict limit.

Acquired messages count towards the client's `consumer_byte_rate`. A client over its quota gets no messages until it is
within it again. It is neither muted nor throttled, since that would delay its acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.share_fetch.v2.request import ShareFetchRequest
from kio.schema.share_fetch.v2.response import (
    AcquiredRecords,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
    ShareFetchableTopicResponse,
    ShareFetchResponse,
)
from kio.schema.types import BrokerId
from kio.static.primitive import Records, i16, i32, i32Timedelta, i64

from millstream.broker.kafka import share_codec
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message, owned_name
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.kafka.share_consumers import (
    CLOSES,
    OPENS,
    Acknowledgements,
    Settled,
    ShareConsumers,
    SharePartition,
    ShareSession,
    check_member_id,
    outcome_of,
    session_key,
)
from millstream.broker.net.response import Buffers, Promise
from millstream.broker.subscriptions.lease import Lease, Origin
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest, MillstreamError, TopicNotAuthorized
from millstream.core.subscription import AT_LEAST_ONCE, Subscription
from millstream.protocol.messages.codec import RequestHeader, write_response

if TYPE_CHECKING:
    from millstream.broker.subscriptions.receiving import Grant

_MILLISECOND: Final = timedelta(milliseconds=1)
_RECORD_LIMIT: Final = 1
_WAIT_MS_MAX: Final = 300_000
_ACKNOWLEDGED_MS_MAX: Final = 20
"""How long a response with acknowledgement results is delayed at most, since a client may wait for them. Where messages
arrive often it carries some, which saves requests.
"""
_BYTES_MAX: Final = 16 * 1024 * 1024
"""A response is held in memory as a whole; one batch is given however large it is."""
_PAUSE_MS: Final = 100
_KNOWN_TO_CLIENTS: Final = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.kafka_storage_error,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.topic_authorization_failed,
        ErrorCode.corrupt_message,
    }
)
"""The codes that share consumers handle; Java's stops at any other except UNKNOWN_SERVER_ERROR, after which it retries.
"""

_RETRIED_AT_ONCE: Final = frozenset({ErrorCode.unknown_server_error, ErrorCode.topic_authorization_failed})
"""The second, where a session has no other topics than those that its client may no longer read."""


class _Results:
    def __init__(self) -> None:
        self.acknowledged: Mapping[SharePartition, Exception | None] = {}
        self.failed: dict[SharePartition, Exception] = {}
        self.leases: dict[SharePartition, list[Lease]] = {}
        self.records: dict[SharePartition, bytes] = {}
        self.lease_ms: int | None = None
        """How long the leases were granted for, the shortest of them."""

    def add(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            place = grant.delivery.key.topic_id, int(grant.delivery.key.partition)
            self.leases[place] = grant.received.leases
            self.records[place] = b"".join(grant.received.batches)
        self.lease_ms = min((grant.lease_ms for grant in grants if grant.lease_ms is not None), default=None)

    async def pause_if_retried(self) -> None:
        """Wait a moment if there is an error after which the client retries immediately."""
        if any(_share_error_code(error) in _RETRIED_AT_ONCE for error in self.failed.values()):
            await asyncio.sleep(_PAUSE_MS / 1000)


class ShareFetch(Api[ShareFetchRequest, ShareFetchResponse]):
    key = 78
    versions = (1, 2)
    changes = None
    waits_for_others = True

    def __init__(self, consumers: ShareConsumers, quota: QuotaMeter, *, bytes_max: int) -> None:
        self._consumers = consumers
        self._quota = quota
        self._bytes_max = bytes_max

    def respond_to_frame(
        self, frame: memoryview, header: RequestHeader, client: ClientInfo
    ) -> Buffers | Promise | None:
        """Respond to a request that continues a session on open queues, without a task and the generic codec."""
        if client.rights is not None or self._quota.is_limiting:
            return None
        request = share_codec.read_plain(frame, header)
        if request is None or min(request.max_wait_ms, request.max_records, request.max_bytes) <= 0:
            return None
        consumers = self._consumers
        subscription = consumers.service.declared.get(request.group_id)
        if subscription is None:
            return None
        lease_ms = consumers.service.declared.settings_of(subscription).lease_ms
        member = request.group_id, request.member_id
        deliveries = consumers.ready(subscription, member, request.epoch, request.partitions)
        if not deliveries or len({topic for topic, _ in deliveries}) > 1:
            return None
        if any(delivery.settings.delivery != AT_LEAST_ONCE for delivery in deliveries.values()):
            return None
        session = consumers.session(member, request.epoch, client.presence, partitions=request.partitions)
        if isinstance(session, ErrorCode):
            return None
        settled: Settled = {
            place: consumers.settle_in(deliveries[place], request.member_id, ranges)
            for place, ranges in request.acknowledged.items()
        }
        from millstream.broker.subscriptions.delivery import Demand
        from millstream.broker.subscriptions.receiving import ParkedLease

        demand = Demand(
            consumers.worker(request.member_id),
            request.max_records,
            min(request.max_bytes, self._bytes_max, _BYTES_MAX),
            whole_batches=request.acquire_mode != _RECORD_LIMIT,
            origin=Origin(client.client_id, client.address),
        )
        client.fetch_requests += 1

        def respond(grants: list[Grant], error: Exception | None) -> Buffers | Coroutine[Any, Any, Buffers]:
            results = _Results()
            results.add(grants)
            results.acknowledged = {place: outcome_of(result) for place, result in settled.items()}
            if error is not None:
                results.failed = dict.fromkeys(deliveries, error)
                return respond_after_pause(results)
            return self._encode(header, client, subscription, results, lease_ms)

        async def respond_after_pause(results: _Results) -> Buffers:
            await results.pause_if_retried()
            return self._encode(header, client, subscription, results, lease_ms)

        def refuse(error: BaseException) -> Buffers:
            response = self.refusal(error_code(error), error_message(error))
            return [write_response(self.key, header.version, header.correlation_id, response)]

        return ParkedLease(consumers.service.budget, demand.worker, client.presence, respond, refuse).begin(
            list(deliveries.values()),
            demand,
            wait_s=min(request.max_wait_ms, _WAIT_MS_MAX if not settled else _ACKNOWLEDGED_MS_MAX) / 1000,
            writes=[
                result for result in settled.values() if result is not None and not isinstance(result, MillstreamError)
            ],
        )

    def _encode(
        self,
        header: RequestHeader,
        client: ClientInfo,
        subscription: Subscription,
        results: _Results,
        lease_ms: int,
    ) -> Buffers:
        """Account for a response and encode it."""
        size = sum(map(len, results.records.values()))
        client.fetched_bytes += size
        if self._quota.is_limiting:
            self._quota.take(client, size)
        # The group may be deleted meanwhile.
        results.lease_ms = results.lease_ms or lease_ms
        if results.failed or any(results.acknowledged.values()):
            response = self._build_response(subscription, results, client)
            return [write_response(self.key, header.version, header.correlation_id, response)]
        places = list(dict.fromkeys([*results.acknowledged, *results.leases]))
        return share_codec.write_plain(header, results.lease_ms, places, results.leases, results.records)

    async def handle(self, request: ShareFetchRequest, client: ClientInfo) -> ShareFetchResponse:
        client.fetch_requests += 1
        member_id = owned_name(check_member_id(request.member_id), client)
        group_id, epoch = request.group_id or "", request.share_session_epoch
        acknowledged = _acknowledgements(request)
        _check(request, acknowledged)
        session = self._consumers.session(
            session_key(group_id, member_id, client),
            epoch,
            client.presence,
            principal="" if client.rights is None else client.rights.principal,
            partitions=_requested_partitions(request),
            forgotten=_forgotten_partitions(request),
        )
        if isinstance(session, ErrorCode):
            return self.refusal(session)
        results = _Results()
        try:
            subscription = await self._consumers.service.declared.find(group_id)
            settled = await self._consumers.settle(subscription, member_id, acknowledged, renews=request.is_renew_ack)
        finally:
            if epoch == CLOSES:
                self._consumers.release(session)
        # Settlements become durable while more messages are acquired.
        if epoch != CLOSES and request.max_records > 0 and request.max_bytes > 0:
            await self._acquire(request, client, subscription, session, settled, results)
        results.acknowledged = await self._consumers.confirm(settled)
        size = sum(map(len, results.records.values()))
        client.fetched_bytes += size
        if self._quota.is_limiting:
            self._quota.take(client, size)
        return self._build_response(subscription, results, client)

    def downgrade(self, version: int, response: ShareFetchResponse) -> ShareFetchResponse:
        """Both versions have the same response."""
        return response

    async def _acquire(
        self,
        request: ShareFetchRequest,
        client: ClientInfo,
        subscription: Subscription,
        session: ShareSession,
        settled: Settled,
        results: _Results,
    ) -> None:
        # Loaded with the first subscription; the node has one now.
        from millstream.broker.subscriptions.delivery import Demand
        from millstream.broker.subscriptions.receiving import receive

        deliveries = {}
        for place in session.partitions:
            try:
                # The session may remember topics that the client may no longer read.
                _check_read(client, subscription.name, place[0])
                deliveries[place] = await self._consumers.delivery(subscription, place)
            except MillstreamError as error:
                results.failed[place] = error
        demand = Demand(
            self._consumers.worker(session.member[1]),
            request.max_records,
            self._quota.allowance(client, min(request.max_bytes, self._bytes_max, _BYTES_MAX)),
            whole_batches=request.share_acquire_mode != _RECORD_LIMIT,
            origin=Origin(client.client_id, client.address),
        )
        # As in Kafka, topics that may not be read any more stay in the session, and do not hasten the response.
        failures = results.failed.values()
        is_hasty = bool(failures) and not (
            deliveries and all(isinstance(failure, TopicNotAuthorized) for failure in failures)
        )
        patience_ms = 0 if is_hasty else _WAIT_MS_MAX if not settled else _ACKNOWLEDGED_MS_MAX
        wait_ms = min(request.max_wait // _MILLISECOND, patience_ms)
        if is_hasty:
            await results.pause_if_retried()
        remaining_ms = await self._wait_for_quota(client, max(0, wait_ms))
        if remaining_ms is None:
            return
        try:
            grants = await receive(
                list(deliveries.values()),
                demand,
                self._consumers.service.budget,
                wait_s=remaining_ms / 1000,
                also_after=partial(self._consumers.confirm, settled) if settled else None,
            )
        except MillstreamError as error:
            results.failed.update(dict.fromkeys(deliveries, error))
            await results.pause_if_retried()
        else:
            results.add(_readable(grants, demand.worker, client, subscription.name, results))

    async def _wait_for_quota(self, client: ClientInfo, wait_ms: int) -> int | None:
        """Wait until a client owes nothing of its quota; how much longer it waits then, or None if that took all."""
        while owed_ms := self._quota.owed_ms(client):
            await asyncio.sleep(min(owed_ms, wait_ms) / 1000)
            if owed_ms > wait_ms:
                return None
            wait_ms -= owed_ms
        return wait_ms

    def _build_response(self, subscription: Subscription, results: _Results, client: ClientInfo) -> ShareFetchResponse:
        by_topic: dict[UUID, list[PartitionData]] = {}
        for topic_id, index in dict.fromkeys([*results.acknowledged, *results.failed, *results.leases]):
            by_topic.setdefault(topic_id, []).append(self._build_partition((topic_id, index), results))
        lease_ms = results.lease_ms or self._consumers.service.declared.settings_of(subscription).lease_ms
        return ShareFetchResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            acquisition_lock_timeout=i32Timedelta.parse(timedelta(milliseconds=lease_ms)),
            responses=tuple(
                ShareFetchableTopicResponse(topic_id=topic_id, partitions=tuple(partitions))
                for topic_id, partitions in by_topic.items()
            ),
            node_endpoints=tuple(
                NodeEndpoint(node_id=BrokerId(node.node_id), host=host, port=i32(port), rack=node.rack)
                for node, host, port in self._consumers.leaders({**results.acknowledged, **results.failed}, client)
            ),
        )

    def _build_partition(self, place: SharePartition, results: _Results) -> PartitionData:
        failed = results.failed.get(place)
        refused = results.acknowledged.get(place)
        leader = self._consumers.leader(place, failed or refused)
        return PartitionData(
            partition_index=i32(place[1]),
            error_code=ErrorCode.none if failed is None else _share_error_code(failed),
            error_message=error_message(failed),
            acknowledge_error_code=i16(int(error_code(refused))),
            acknowledge_error_message=error_message(refused),
            current_leader=LeaderIdAndEpoch(leader_id=i32(leader.node_id), leader_epoch=i32(leader.epoch)),
            records=Records(results.records.get(place, b"")),
            acquired_records=tuple(
                AcquiredRecords(
                    first_offset=i64(lease.first), last_offset=i64(lease.last), delivery_count=i16(lease.attempt)
                )
                for lease in results.leases.get(place, ())
            ),
        )


def _check(request: ShareFetchRequest, acknowledged: Acknowledgements) -> None:
    if acknowledged and request.share_session_epoch == OPENS:
        raise InvalidRequest("a new session has nothing to acknowledge yet")
    limits = (request.max_wait // _MILLISECOND, request.min_bytes, request.max_bytes, request.max_records)
    if request.is_renew_ack and any(limits):
        raise InvalidRequest("a request that renews leases fetches nothing, so its limits must be 0")


def _share_error_code(error: Exception) -> ErrorCode:
    code = error_code(error)
    return code if code in _KNOWN_TO_CLIENTS else ErrorCode.unknown_server_error


def _requested_partitions(request: ShareFetchRequest) -> list[SharePartition]:
    return [
        (topic.topic_id, partition.partition_index)
        for topic in request.topics
        if topic.topic_id is not None
        for partition in topic.partitions
    ]


def _forgotten_partitions(request: ShareFetchRequest) -> list[SharePartition]:
    return [
        (topic.topic_id, index)
        for topic in request.forgotten_topics_data
        if topic.topic_id is not None
        for index in topic.partitions
    ]


def _acknowledgements(request: ShareFetchRequest) -> Acknowledgements:
    return {
        (topic.topic_id, partition.partition_index): partition.acknowledgement_batches
        for topic in request.topics
        if topic.topic_id is not None
        for partition in topic.partitions
        if partition.acknowledgement_batches
    }


def _check_read(client: ClientInfo, group_id: str, topic_id: UUID) -> None:
    rights = client.rights
    name = None if rights is None else rights.topic_name(topic_id)
    if rights is not None and name is not None:
        rights.require(Operation.READ, ResourceType.GROUP, group_id)
        rights.require(Operation.READ, ResourceType.TOPIC, name)


def _readable(grants: list[Grant], worker: str, client: ClientInfo, group_id: str, results: _Results) -> list[Grant]:
    """Return the leases that the client may still read, since it may have waited for minutes; return the others."""
    from millstream.broker.subscriptions.receiving import return_leases

    readable: list[Grant] = []
    for grant in grants:
        key = grant.delivery.key
        try:
            _check_read(client, group_id, key.topic_id)
        except MillstreamError as error:
            return_leases([grant], worker)
            results.failed[key.topic_id, int(key.partition)] = error
        else:
            readable.append(grant)
    return readable
