"""Private requests that administer subscriptions; receiving and settling have separate files."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import msgspec

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import append_here
from millstream.broker.coordination.shard import complete
from millstream.broker.kafka.api import (
    ClientInfo,
    Need,
    PrivateApi,
    RequestT,
    ResponseT,
    error_code,
    error_message,
    owner_of,
    topic_with_id,
)
from millstream.broker.kafka.subscription_service import SubscriptionService, letter_needs
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.replication.partition import Partition
from millstream.broker.security.changes import CREATE, DELETE, UPDATE, single_change
from millstream.broker.security.rights import Rights, SubscribedTopic
from millstream.broker.subscriptions.lease import DeltaKind, HeldRange
from millstream.broker.subscriptions.state_shard import (
    LoadQueue,
    LoadQueueResponse,
    ReadFrames,
    ReadFramesResponse,
    StateCoordinator,
    WriteQueues,
    WriteQueuesResponse,
    WriteResult,
)
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.credential import Owner
from millstream.core.errors import (
    ClusterNotAuthorized,
    CorruptState,
    InvalidRequest,
    InvalidSubscription,
    InvalidTopicName,
    MillstreamError,
    NotLeader,
    OffsetOutOfRange,
    TopicNotAuthorized,
    UnknownTopic,
)
from millstream.core.ids import NodeId, Offset
from millstream.core.subscription import (
    DEAD_LETTER_TOPIC,
    NO_DEAD_LETTERS,
    OWN_PREFIX,
    PAUSED,
    READ_COMMITTED,
    QueueKey,
    Subscription,
    SubscriptionSettings,
    check_subscription,
)
from millstream.core.topic import TopicPartition
from millstream.protocol.private.message import Response
from millstream.protocol.private.subscription_messages import (
    AlterSubscriptionRequest,
    AppendLetterRequest,
    AppendLetterResponse,
    CreateSubscriptionRequest,
    CreateSubscriptionResponse,
    DeleteSubscriptionRequest,
    ForgetSubscriptionRequest,
    ListSubscriptionsRequest,
    ListSubscriptionsResponse,
    ReviveMessagesRequest,
    ReviveMessagesResponse,
    SeekSubscriptionRequest,
    SeekSubscriptionResponse,
)
from millstream.protocol.private.subscriptions import (
    WAIT_MS_MAX,
    DeliveryStateRequest,
    DeliveryStateResponse,
    LedgerMarkRequest,
    LedgerMarkResponse,
    MarkedQueue,
    MessageTrace,
    MessageTraceRequest,
    other_letters_error,
)


class _SubscriptionApi(PrivateApi[RequestT, ResponseT]):
    def __init__(self, service: SubscriptionService) -> None:
        self._service = service
        self._subscriptions = service.declared


def _check_offset(partition: Partition, offset: int) -> None:
    """Raise `OffsetOutOfRange` for an offset that the log does not have yet."""
    end = partition.log.end_offset
    if not 0 <= offset < end:
        raise OffsetOutOfRange(
            f"{partition.log.partition} ends at {end}, there is no message at {offset}",
            start=partition.log_start,
            end=end,
        )


class SubscriptionCreate(_SubscriptionApi[CreateSubscriptionRequest, CreateSubscriptionResponse]):
    """Creates a subscription.

    A name that is taken gets DUPLICATE_RESOURCE, and the group of a pipeline is refused. Settings are those of
    docs/configuration.md.
    """

    changes = single_change("subscription", CREATE)

    def __init__(self, service: SubscriptionService, pipelines: Pipelines) -> None:
        super().__init__(service)
        self._pipelines = pipelines

    async def needs(self, request: CreateSubscriptionRequest) -> Sequence[Need]:
        return [
            (Operation.READ, ResourceType.GROUP, request.name),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in request.topics),
            *letter_needs(request.name, request.settings),
        ]

    async def handle(
        self, request: CreateSubscriptionRequest, owner: Owner | None = None
    ) -> CreateSubscriptionResponse:
        settings = check_subscription(request.name, request.topics, request.settings)
        pipeline = self._pipelines.of_group(request.name)
        if pipeline is not None:
            raise InvalidSubscription(f"{request.name!r} is the group of pipeline {pipeline!r}; choose another name")
        made = await self._subscriptions.create(
            request.name,
            request.topics,
            request.settings,
            starts=await self._service.starts(request.topics, settings),
            validate_only=request.validate_only,
            owner=owner,
        )
        return CreateSubscriptionResponse(subscription_id=str(made.subscription_id))

    async def handle_from(self, client: ClientInfo, request: CreateSubscriptionRequest) -> CreateSubscriptionResponse:
        return await self.handle(request, owner_of(client))


class SubscriptionAlter(_SubscriptionApi[AlterSubscriptionRequest, Response]):
    """Changes a subscription.

    A setting of null is reset to its default; topics of null are left unchanged.
    """

    changes = single_change("subscription", UPDATE)

    def first_needs(self, request: AlterSubscriptionRequest) -> Sequence[Need]:
        return [(Operation.ALTER_CONFIGS, ResourceType.GROUP, request.name)]

    async def needs(self, request: AlterSubscriptionRequest) -> Sequence[Need]:
        """Require ALTER_CONFIGS on the subscription, READ on all its topics: settings may push their messages."""
        # Those that the request names come first, so that an error may name them.
        topics = {*(request.topics or ()), *await self._service.topics_of(request.name)}
        return [
            *self.first_needs(request),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in sorted(topics)),
            *letter_needs(request.name, request.settings),
        ]

    async def handle(self, request: AlterSubscriptionRequest, owner: Owner | None = None) -> Response:
        SubscriptionSettings.check_names(request.settings)
        await self._service.alter(
            request.name,
            request.settings,
            topics=request.topics,
            validate_only=request.validate_only,
            owner=owner,
        )
        return Response()

    async def handle_from(self, client: ClientInfo, request: AlterSubscriptionRequest) -> Response:
        return await self.handle(request, owner_of(client))


class SubscriptionDelete(_SubscriptionApi[DeleteSubscriptionRequest, Response]):
    """Deletes a subscription.

    The state of its queues is deleted; the messages stay in their topics. An unknown name gets GROUP_ID_NOT_FOUND. A
    subscription with open dead letters gets NON_EMPTY_GROUP unless it is forced; its letters then stay in their topic.
    """

    changes = single_change("subscription", DELETE)

    async def needs(self, request: DeleteSubscriptionRequest) -> Sequence[Need]:
        return [(Operation.DELETE, ResourceType.GROUP, request.name)]

    async def handle(self, request: DeleteSubscriptionRequest) -> Response:
        await self._service.delete(request.name, force=request.force)
        return Response()


if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery
    from millstream.broker.subscriptions.fold import Fold

LEASES_MAX = 10_000

_TURN: Final = 100
"""Subscriptions that are described before others get their turn of the loop."""

_COUNTERS = {
    "accepted": DeltaKind.ACCEPTED,
    "released": DeltaKind.RELEASED,
    "expired": DeltaKind.EXPIRED,
    "rejected": DeltaKind.REJECTING,
    "dead_lettered": DeltaKind.DEAD_LETTERED,
    "dropped": DeltaKind.DROPPED,
    "filtered": DeltaKind.FILTERED,
}


class SubscriptionList(_SubscriptionApi[ListSubscriptionsRequest, ListSubscriptionsResponse]):
    """Lists subscriptions and their queues.

        {"names": ["billing"], "open": [["orders", 0]], "leases_max": 0}, or null for all
        response: {"error": 0, "message": null, "subscriptions": [{"name": …, "subscription_id": …, "topics": […],
        "settings": {…}, "overrides": {…}, "created_ms": …, "queues": [{"topic": …, "partition": …, "backlog": …, …}],
        "stored_queues": [["orders", 0], …], "push": [{"node": 1, "state": "up", "concurrency": 8, …}],
        "owner": "User:alice", "leases": [{"topic": …, "partition": …, "start": …, "end": …, "attempt": …,
        "deadline_ms": …, "remaining_ms": …, "worker": …, "client_id": …, "address": …}], "has_hidden_topics": false}]}

    Every node knows all subscriptions, but lists only the queues that it leads and has open, and those of a mirror's
    copies whose states it stores, so a client asks all nodes. `stored_queues` are the queues whose states it stores,
    for named subscriptions; it opens and lists those of `open` that it leads. The topics of a share group without
    declared topics are those of `stored_queues`, and those that members subscribe to, if the node coordinates the
    group. `push` is the state of the node's push process for the subscription's endpoint. `leases` holds the oldest
    leased ranges, at most as many as requested; client id and address are those of the last connection of the worker,
    empty if it has not connected since the node leads the queue. Values of secret settings are never returned.
    `has_hidden_topics` is true if topics that the client may not describe are left out, with their queues and leases,
    and the state of push. Settings need DESCRIBE_CONFIGS on the subscription, or READ on it and no hidden topics;
    others see whether it is paused, and its dead letter topic if they may describe that.
    """

    changes = None

    async def needs(self, request: ListSubscriptionsRequest) -> Sequence[Need]:
        """Require DESCRIBE on named subscriptions; a list of all contains those the client may describe."""
        opened = sorted({topic for topic, _ in request.open})
        return [
            *((Operation.DESCRIBE, ResourceType.GROUP, name) for name in request.names or ()),
            *((Operation.DESCRIBE, ResourceType.TOPIC, topic) for topic in opened),
        ]

    def redact(self, response: ListSubscriptionsResponse, rights: Rights) -> ListSubscriptionsResponse:
        """Omit subscriptions that the client may not describe, and such topics of the others."""
        visible = [
            _without_hidden_settings(_without_hidden_topics(subscription, rights), rights)
            for subscription in response.subscriptions
            if rights.group(Operation.DESCRIBE, subscription["name"])
        ]
        return msgspec.structs.replace(response, subscriptions=visible)

    async def handle(self, request: ListSubscriptionsRequest) -> ListSubscriptionsResponse:
        if request.names is None:
            selected = self._subscriptions.all()
        else:
            selected = [await self._subscriptions.find(name) for name in request.names]
            await self._open_queues(selected, request.open)
        begun = self._service.share_topics.stored_queues()
        queues: dict[UUID, list[Delivery]] = {}
        engine = self._service.loaded
        for delivery in () if engine is None else engine.deliveries:
            queues.setdefault(delivery.key.subscription_id, []).append(delivery)
        described = []
        # Before other work gets its turn, which may delete some.
        settings = [self._subscriptions.settings_of(subscription) for subscription in selected]
        copied = await self._copied_queues(
            {subscription.subscription_id: settings[at].isolation for at, subscription in enumerate(selected)}
        )
        for at, subscription in enumerate(selected):
            if at % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            document = self._describe(subscription, settings[at], queues, begun.get(subscription.subscription_id, []))
            document["queues"] += copied.get(subscription.subscription_id, ())
            described.append(document if request.names is not None else {**document, "stored_queues": []})
        if leases_max := max(0, min(request.leases_max, LEASES_MAX)):
            for subscription, document in zip(selected, described, strict=True):
                document["leases"] = self._leases(queues.get(subscription.subscription_id, ()), leases_max)
        return ListSubscriptionsResponse(subscriptions=described)

    async def _open_queues(self, subscriptions: Iterable[Subscription], places: Iterable[tuple[str, int]]) -> None:
        for topic, index in places:
            # A node without a replica has no such partition, and leadership may move meanwhile.
            with suppress(NotLeader):
                partition = self._service.topics.partition(topic, index)
                if partition.is_leader and not partition.topic.mirror:
                    engine = await self._service.engine()
                    for subscription in subscriptions:
                        if topic in await self._service.share_topics.of(subscription):
                            await engine.delivery(subscription, partition)

    async def _copied_queues(self, isolations: Mapping[UUID, str]) -> dict[UUID, list[dict[str, Any]]]:
        """Describe the queues of copies whose states this node stores; no node opens them before a failover."""
        topics = self._service.topics
        copies = {topic.topic_id: topic.name for topic in topics.all() if topic.mirror}
        if not copies:
            return {}
        places: dict[str, dict[QueueKey, tuple[TopicPartition, Fold]]] = {}
        for key, image in self._service.states.images(
            lambda key: key.topic_id in copies and key.subscription_id in isolations
        ):
            place = TopicPartition(copies[key.topic_id], key.partition)
            places.setdefault(isolations[key.subscription_id], {})[key] = place, image.fold
        queues_by_subscription: dict[UUID, list[dict[str, Any]]] = {}
        for isolation, queues in places.items():
            ends = await self._service.readable_ends({place for place, _ in queues.values()}, isolation)
            for key, (place, fold) in queues.items():
                row = self._copied_queue(place, fold, ends.get(place, 0))
                queues_by_subscription.setdefault(key.subscription_id, []).append(row)
        return queues_by_subscription

    def _copied_queue(self, place: TopicPartition, fold: Fold, end: int) -> dict[str, Any]:
        from millstream.broker.subscriptions.delivery import age_ms
        from millstream.broker.subscriptions.log_scan import failover_marks

        now_ms, oldest_age_ms = self._service.clock.now_ms(), 0
        # A node without a replica knows neither.
        with suppress(MillstreamError):
            partition = self._service.topics.partition(place.topic, place.partition)
            end -= failover_marks(partition, fold.window.end, end)
            oldest_age_ms = age_ms(partition, fold.oldest, now_ms)
        row = _queue_row(place, fold, max(0, end - fold.window.end))
        # The source writes nothing when a delay has passed.
        due = fold.count_due(now_ms)
        moved = {"parked": row["parked"] - due, "available": row["available"] + due}
        return {**row, **moved, "oldest_age_ms": oldest_age_ms if row["backlog"] else 0}

    def _push_status(self, subscription: Subscription) -> list[dict[str, Any]]:
        """Return the push status on this node; a client combines those of all nodes."""
        status = self._service.push.describe(subscription.name)
        return [] if status is None else [{"node": self._service.node_id, **status}]

    def _leases(self, queues: Iterable[Delivery], leases_max: int) -> list[dict[str, Any]]:
        now_ms = self._service.clock.now_ms()
        listed: list[dict[str, Any]] = []
        for delivery in queues:
            listed += [_describe_lease(delivery, held, now_ms) for held in delivery.held_ranges()[:leases_max]]
        return sorted(listed, key=lambda lease: (lease["topic"], lease["partition"], lease["start"]))[:leases_max]

    def _describe(
        self,
        subscription: Subscription,
        settings: SubscriptionSettings,
        queues: Mapping[UUID, Iterable[Delivery]],
        stored_queues: Sequence[tuple[str, int]],
    ) -> dict[str, Any]:
        known = self._service.share_topics.members(subscription.name) | {topic for topic, _ in stored_queues}
        now_ms = self._service.clock.now_ms()
        return {
            "name": subscription.name,
            "subscription_id": str(subscription.subscription_id),
            "topics": subscription.topics or sorted(known),
            "settings": settings.as_strings(),
            "overrides": subscription.shown_overrides(),
            "created_ms": subscription.created_ms,
            "queues": [_describe_queue(delivery, now_ms) for delivery in queues.get(subscription.subscription_id, ())],
            "stored_queues": stored_queues,
            "push": self._push_status(subscription),
            "owner": subscription.owner.principal,
            "has_hidden_topics": False,
        }


def _without_hidden_topics(described: dict[str, Any], rights: Rights) -> dict[str, Any]:
    """Omit everything about topics that the client may not describe from a subscription."""

    def is_visible(topic: str) -> bool:
        return rights.topic(Operation.DESCRIBE, topic)

    shown = {
        **described,
        "topics": [topic for topic in described["topics"] if is_visible(topic)],
        "stored_queues": [place for place in described["stored_queues"] if is_visible(place[0])],
    }
    for part in described.keys() & {"queues", "leases"}:
        shown[part] = [queue for queue in described[part] if is_visible(queue["topic"])]
    if len(shown["topics"]) < len(described["topics"]):
        # The counts of push are of all topics.
        shown |= {"has_hidden_topics": True, "push": []}
    return shown


def _without_hidden_settings(described: dict[str, Any], rights: Rights) -> dict[str, Any]:
    """Omit the settings of a subscription, and everything that only they reveal, unless the client may see them."""
    name, dead_letter_topic = described["name"], described["settings"][DEAD_LETTER_TOPIC]
    is_worker = rights.group(Operation.READ, name) and not described["has_hidden_topics"]
    if is_worker or rights.group(Operation.DESCRIBE_CONFIGS, name):
        return described
    shown = {**described, "push": []}
    kept = {PAUSED}
    if dead_letter_topic == NO_DEAD_LETTERS or rights.topic(Operation.DESCRIBE, dead_letter_topic):
        kept.add(DEAD_LETTER_TOPIC)
    else:
        shown["queues"] = [{**queue, "letter_refusal": ""} for queue in described["queues"]]
    for part in ("settings", "overrides"):
        shown[part] = {setting: value for setting, value in described[part].items() if setting in kept}
    return shown


def _describe_lease(delivery: Delivery, held: HeldRange, now_ms: int) -> dict[str, Any]:
    return {
        "topic": delivery.partition.topic.name,
        "partition": delivery.partition.index,
        "start": held.first,
        "end": held.last + 1,
        "attempt": held.attempt,
        "deadline_ms": held.deadline_ms,
        "remaining_ms": max(0, held.deadline_ms - now_ms),
        "worker": held.worker,
        **held.origin._asdict(),
    }


def _describe_queue(delivery: Delivery, now_ms: int) -> dict[str, Any]:
    row = _queue_row(delivery.partition.log.partition, delivery.queue.fold, delivery.unscanned)
    return {
        **row,
        "oldest_age_ms": delivery.oldest_age_ms(now_ms) if row["backlog"] else 0,
        "waiting_workers": delivery.waiting,
        "refused_letters": len(delivery.refused_letters),
        "letter_refusal": delivery.letter_refusal if delivery.refused_letters else "",
    }


def _queue_row(place: TopicPartition, fold: Fold, unscanned: int) -> dict[str, Any]:
    """Describe a queue by its state and the number of messages that it has not scanned."""
    from millstream.broker.subscriptions.queue import counts_of

    counts = counts_of(fold)
    return {
        "topic": place.topic,
        "partition": place.partition,
        "oldest": fold.oldest,
        "backlog": fold.unfinished + unscanned,
        "oldest_age_ms": 0,
        "waiting_workers": 0,
        **counts._asdict(),
        "available": counts.available + unscanned,
        **{name: fold.counters[kind] for name, kind in _COUNTERS.items()},
        "redelivered": fold.redelivered,
        "refused_letters": 0,
        "letter_refusal": "",
    }


AT_OFFSET = "offset:"
AT_TIME = "at:"
_DIGITS_MAX = 18


class SubscriptionSeek(_SubscriptionApi[SeekSubscriptionRequest, SeekSubscriptionResponse]):
    """Moves a subscription to another position.

    `to` is `earliest`, `latest`, `at:<ms>` or `offset:<n>`. It moves the queues that this node leads, of one topic or
    partition or of all, so a client asks all nodes. Outstanding leases become void; messages after the new position are
    delivered again. A state that cannot be read is replaced.
    """

    changes = single_change("subscription", UPDATE)

    def first_needs(self, request: SeekSubscriptionRequest) -> Sequence[Need]:
        needs: list[Need] = [(Operation.READ, ResourceType.GROUP, request.name)]
        return needs if request.topic is None else [*needs, (Operation.READ, ResourceType.TOPIC, request.topic)]

    async def needs(self, request: SeekSubscriptionRequest) -> Sequence[Need]:
        topics = await self._service.topics_of(request.name)
        return [
            *self.first_needs(request),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in topics),
        ]

    async def handle(self, request: SeekSubscriptionRequest) -> SeekSubscriptionResponse:
        subscription = await self._subscriptions.find(request.name)
        _check_seek_target(request.to)
        engine = await self._service.engine()
        moved = []
        topics = await self._service.share_topics.of(subscription) if request.topic is None else (request.topic,)
        for partition in self._service.topics.led_of(topics):
            if request.partition not in (None, partition.index):
                continue
            try:
                delivery = await engine.delivery(subscription, partition)
            except CorruptState:
                isolation = self._subscriptions.settings_of(subscription).isolation
                start = await _resolve_offset(partition, isolation, request.to)
                delivery = await engine.replace(subscription, partition, start)
            offset = await _resolve_offset(partition, delivery.settings.isolation, request.to)
            delivery.seek(offset)
            await delivery.durable()
            moved.append({"topic": partition.topic.name, "partition": partition.index, "offset": offset})
        return SeekSubscriptionResponse(queues=moved)


def _check_seek_target(to: str) -> None:
    number = to.removeprefix(AT_OFFSET).removeprefix(AT_TIME)
    is_number = number.isascii() and number.isdigit() and len(number) <= _DIGITS_MAX
    if to not in ("earliest", "latest") and not (is_number and to.startswith((AT_OFFSET, AT_TIME))):
        raise InvalidRequest(
            f"a position must be earliest, latest, at:<milliseconds since 1970> or offset:<n>, not {to!r}"
        )


async def _resolve_offset(partition: Partition, isolation: str, to: str) -> Offset:
    end = partition.last_stable_offset if isolation == READ_COMMITTED else partition.high_watermark
    if to == "earliest":
        return partition.log_start
    if to == "latest":
        return end
    if to.startswith(AT_OFFSET):
        return Offset(max(partition.log_start, min(end, int(to.removeprefix(AT_OFFSET)))))
    result = await partition.log.find_time(int(to.removeprefix(AT_TIME)), up_to=end)
    return end if result is None else Offset(max(partition.log_start, result[0]))


_PLACE: Final = struct.Struct(">iq")
MARK_LENGTH_MAX: Final = 249
"""A mark is written to each queue by clients that may only describe it."""


class SubscriptionRevive(_SubscriptionApi[ReviveMessagesRequest, ReviveMessagesResponse]):
    """Redelivers the messages of dead letters.

    The messages at these offsets are available again in this one subscription, as if they had never been delivered, in
    the order of their offsets; in an ordered subscription before all later messages of their keys. Asking again with
    the same letters does nothing, until the letters are named in `closed`. `missing` are messages that the log no
    longer has; at their offsets may be others, from another leader epoch. They are all that are asked for when the
    topic is another one by now. Letters of a topic that is not the dead letter topic of the subscription are refused.
    The leader of the partition responds, when it is durable. While the queue does not know yet that one of the letters
    is written, the response is COORDINATOR_NOT_AVAILABLE, nothing is revived, and the client asks again.
    """

    changes = single_change("subscription", UPDATE)

    def first_needs(self, request: ReviveMessagesRequest) -> Sequence[Need]:
        return [
            (Operation.READ, ResourceType.GROUP, request.name),
            (Operation.READ, ResourceType.TOPIC, request.topic),
        ]

    async def needs(self, request: ReviveMessagesRequest) -> Sequence[Need]:
        letter_topic = self._service.topics.by_id(request.letter_topic_id)
        if letter_topic is None:
            return ()
        return [(Operation.READ, ResourceType.TOPIC, SubscribedTopic(letter_topic.name))]

    async def handle(self, request: ReviveMessagesRequest) -> ReviveMessagesResponse:
        subscription = await self._subscriptions.find(request.name)
        if request.topic not in await self._service.share_topics.of(subscription):
            raise InvalidSubscription(f"subscription {request.name!r} no longer delivers topic {request.topic!r}")
        letter_topic = topic_with_id(self._service.topics, request.letter_topic_id)
        if letter_topic.name != self._subscriptions.settings_of(subscription).dead_letter_topic:
            # Anyone may publish what looks like its letters to another topic.
            raise InvalidSubscription(other_letters_error(request.name, letter_topic.name))
        partition = self._service.topics.partition(request.topic, request.partition)
        if partition.topic.topic_id != request.topic_id:
            return ReviveMessagesResponse(missing=[offset for offset, _, _ in request.letters])
        delivery = await self._service.delivery(subscription, partition)
        letters, closed = (
            {Offset(offset): request.letter_topic_id.bytes + _PLACE.pack(*place) for offset, *place in listed}
            for listed in (request.letters, request.closed)
        )
        return ReviveMessagesResponse(missing=await delivery.revive(letters, closed, epoch=request.leader_epoch))


class SubscriptionForget(_SubscriptionApi[ForgetSubscriptionRequest, Response]):
    """Discards the delivery state of a topic.

    The node that serves DeleteShareGroupOffsets sends it to every node twice: with `only_close` the queues of the topic
    are closed, and without it their states go. When they are next used they begin where the subscription's
    `share.auto.offset.reset` says.
    """

    changes = None

    async def handle(self, request: ForgetSubscriptionRequest) -> Response:
        subscription = await self._subscriptions.find(request.name)
        topic = self._service.topics.get(request.topic)
        if topic is None:
            raise UnknownTopic(f"there is no topic {request.topic!r}")
        if request.only_close:
            engine = self._service.loaded
            if engine is not None:
                engine.close_queues(subscription.subscription_id, topic.topic_id)
        else:
            await self._service.states.forget(
                lambda key: key.subscription_id == subscription.subscription_id and key.topic_id == topic.topic_id
            )
        return Response()


class AppendLetter(PrivateApi[AppendLetterRequest, AppendLetterResponse]):
    """Appends a dead letter of another node.

    It responds when all replicas have it. A letter is exempt from the schema rule of its topic, since the message that
    it holds may not conform to it. So the sender has to be a node also without authentication: it shows the secret of
    its registration, which other nodes read in the coordination store. Any other sender gets
    CLUSTER_AUTHORIZATION_FAILED.
    """

    changes = None

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(self, request: AppendLetterRequest) -> AppendLetterResponse:
        node = self._membership.node(NodeId(request.node_id))
        if node is None or not node.secret or not compare_digest(node.secret.encode(), request.secret.encode()):
            raise ClusterNotAuthorized("only nodes of this cluster may write dead letters to each other")
        partition = self._topics.partition(request.topic, request.partition)
        if partition.topic.is_internal:
            raise InvalidTopicName(f"topic {request.topic!r} is internal; it cannot hold dead letters")
        return AppendLetterResponse(0, None, await append_here(self._topics, partition, request.batch))


class DeliveryState(_SubscriptionApi[DeliveryStateRequest, DeliveryStateResponse]):
    """Returns the delivery state of a message.

    With a wait, it responds when the state is final: accepted, dead-lettered, dropped, filtered, skipped, absent, or
    done where it is not remembered how. Before that it is waiting, blocked, delayed, leased or rejected, and `next ms`
    is the time that it waits for. A queue has 256 such waits at most; further ones get POLICY_VIOLATION.
    """

    changes = None
    waits_for_others = True

    async def needs(self, request: DeliveryStateRequest) -> Sequence[Need]:
        return [
            (Operation.DESCRIBE, ResourceType.GROUP, request.subscription),
            (Operation.DESCRIBE, ResourceType.TOPIC, request.topic),
        ]

    async def handle(self, request: DeliveryStateRequest) -> DeliveryStateResponse:
        subscription = await self._subscriptions.find(request.subscription)
        if request.topic not in await self._service.share_topics.of(subscription):
            raise UnknownTopic(f"subscription {subscription.name!r} does not deliver topic {request.topic!r}")
        if request.wait_ms < 0:
            raise InvalidRequest("the wait must not be negative")
        partition = self._service.topics.partition(request.topic, request.partition)
        delivery = await self._service.delivery(subscription, partition)
        _check_offset(partition, request.offset)
        # Imported on first use, together with the queues.
        from millstream.broker.subscriptions.outcomes import message_state

        start = subscription.start_on(partition.topic.name, partition.topic.topic_id, partition.index)
        wait_s = min(request.wait_ms, WAIT_MS_MAX) / 1000
        current = await message_state(delivery, request.offset, start=start, wait_s=wait_s)
        return DeliveryStateResponse(0, None, *current)


class LedgerMark(_SubscriptionApi[LedgerMarkRequest, LedgerMarkResponse]):
    """Records in the ledger which messages of queues are unfinished now.

    It responds when that is durable. Each node marks the queues that it leads, so a client asks all nodes. An audit
    compares events with the mark.
    """

    changes = None

    async def needs(self, request: LedgerMarkRequest) -> Sequence[Need]:
        if request.names is None:
            return [(Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)]
        return [(Operation.DESCRIBE, ResourceType.GROUP, name) for name in request.names]

    def redact(self, response: LedgerMarkResponse, rights: Rights) -> LedgerMarkResponse:
        """Refuse a client that may not describe a topic: an audit without some queues would not add up."""
        if all(rights.topic(Operation.DESCRIBE, queue.topic) for queue in response.queues):
            return response
        error = TopicNotAuthorized("this needs DESCRIBE on every topic that the ledger covers")
        return LedgerMarkResponse(error=int(error_code(error)), message=error_message(error))

    async def handle(self, request: LedgerMarkRequest) -> LedgerMarkResponse:
        if len(request.mark) > MARK_LENGTH_MAX:
            raise InvalidRequest(f"a mark of the ledger has at most {MARK_LENGTH_MAX} characters")
        if request.names is None:
            subscriptions: Sequence[Subscription] = list(self._subscriptions.all())
        else:
            subscriptions = [await self._subscriptions.find(name) for name in request.names]
        marked: list[MarkedQueue] = []
        for subscription in subscriptions:
            if not self._subscriptions.settings_of(subscription).ledger:
                continue
            topics = await self._service.share_topics.of(subscription)
            marked += [
                await self._mark_queue(subscription, partition, request.mark)
                for partition in self._service.topics.led_of(topics)
            ]
        return LedgerMarkResponse(queues=marked)

    async def _mark_queue(self, subscription: Subscription, partition: Partition, mark: str) -> MarkedQueue:
        from millstream.broker.subscriptions.frame import LEDGER_REQUESTED
        from millstream.broker.subscriptions.log_scan import readable_end

        delivery = await self._service.delivery(subscription, partition)
        delivery.mark_window(f"{LEDGER_REQUESTED} {mark}")
        end = readable_end(partition, delivery.settings.isolation)
        delivery.queue_changed()
        await delivery.durable(is_all=True)
        topic = partition.topic
        return MarkedQueue(
            subscription.name,
            str(subscription.subscription_id),
            topic.name,
            str(topic.topic_id),
            partition.index,
            end,
        )


class MessageTracing(_SubscriptionApi[MessageTraceRequest, MessageTrace]):
    """Returns what happened to a message in every subscription of its topic.

    The leader of the partition responds, for the subscriptions that the client may describe. Events are those that the
    node remembers, the last ones of each queue; with a ledger, also those that have not landed yet. `unknown` says what
    is missing.
    """

    changes = None

    async def needs(self, request: MessageTraceRequest) -> Sequence[Need]:
        return [(Operation.DESCRIBE, ResourceType.TOPIC, request.topic)]

    def redact(self, response: MessageTrace, rights: Rights) -> MessageTrace:
        """Omit subscriptions that the client may not describe, and letters in such topics."""
        visible = [
            subscription
            for subscription in response.subscriptions
            if rights.group(Operation.DESCRIBE, subscription.subscription)
        ]
        for at, subscription in enumerate(visible):
            if subscription.dead_letter is not None and not rights.topic(
                Operation.DESCRIBE, subscription.dead_letter.topic
            ):
                visible[at] = msgspec.structs.replace(subscription, dead_letter=None)
        return msgspec.structs.replace(response, subscriptions=tuple(visible))

    async def handle(self, request: MessageTraceRequest) -> MessageTrace:
        partition = self._service.topics.partition(request.topic, request.partition)
        if not partition.is_leader:
            raise NotLeader(f"{partition.log.partition} is led by another node")
        _check_offset(partition, request.offset)
        topic = partition.topic
        traces = []
        for subscription in sorted(self._subscriptions.all(), key=lambda subscription: subscription.name):
            if subscription.name.startswith(OWN_PREFIX):
                continue
            if topic.name not in await self._service.share_topics.of(subscription):
                continue
            # Imported on first use, together with the queues.
            from millstream.broker.subscriptions.outcomes import trace_message

            delivery = await self._service.delivery(subscription, partition)
            start = subscription.start_on(topic.name, topic.topic_id, partition.index)
            traces.append(await trace_message(delivery, request.offset, subscription=subscription.name, start=start))
        return MessageTrace(
            topic=topic.name,
            topic_id=str(topic.topic_id),
            partition=partition.index,
            offset=request.offset,
            log_start=partition.log_start,
            subscriptions=tuple(traces),
        )


class _QueueStateApi(PrivateApi[RequestT, ResponseT]):
    def __init__(self, states: StateCoordinator) -> None:
        self._states = states


class LoadQueueState(_QueueStateApi[LoadQueue, LoadQueueResponse]):
    """Returns the stored state of a queue to the queue's leader.

    After the response, leaders with an older epoch can write no more (FENCED_LEADER_EPOCH). May be repeated.
    """

    changes = None

    async def handle(self, request: LoadQueue) -> LoadQueueResponse:
        stored = await self._states.load(request.key, request.leader_epoch)
        return LoadQueueResponse(0, None, stored.snapshot, stored.sequence)


class ReadQueueFrames(_QueueStateApi[ReadFrames, ReadFramesResponse]):
    """Returns the frames of a queue about one message, as far as they are still in the log, to the queue's leader."""

    changes = None

    async def handle(self, request: ReadFrames) -> ReadFramesResponse:
        return ReadFramesResponse(0, None, await self._states.frames(request.key, request.offset, request.since_ms))


class WriteQueueStates(_QueueStateApi[WriteQueues, WriteQueuesResponse]):
    """Stores the changes of queues, for the node that leads them.

    It responds when all of it is durable. Writes of one queue are numbered without gaps. A repeated write counts once,
    a write that leaves a gap gets OUT_OF_ORDER_SEQUENCE_NUMBER, and a write of a leader that was replaced gets
    FENCED_LEADER_EPOCH.
    """

    changes = None

    async def handle(self, request: WriteQueues) -> WriteQueuesResponse:
        written: asyncio.Future[list[WriteResult]] = asyncio.get_running_loop().create_future()
        self._states.write(request.state_partition, request.writes, partial(complete, written))
        results = await written
        outcomes = [(int(error_code(error)), error_message(error)) for error in results]
        return WriteQueuesResponse(0, None, outcomes)
