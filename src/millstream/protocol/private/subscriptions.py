"""A client of subscriptions over private requests: declare, receive, settle, and trace messages."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, ClassVar, Final, NamedTuple
from uuid import UUID

import msgspec

from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    MillstreamError,
    RequestTimedOut,
    UnknownGroup,
)
from millstream.core.ids import NodeId, OffsetRange
from millstream.core.subscription import LETTERS_PREFIX, Verb
from millstream.protocol.private.leasing import LeaseResponse, fresh_until
from millstream.protocol.private.message import Request, Response, decode_response, encode, request_private
from millstream.protocol.private.subscription_messages import (
    RECEIVE_KEY,
    SETTLE_KEY,
    AlterSubscriptionRequest,
    CreateSubscriptionRequest,
    DeleteSubscriptionRequest,
    LeasedRange,
    ListSubscriptionsRequest,
    PartitionMessages,
    PartitionSettles,
    ReceiveRequest,
    ReceiveResponse,
    ReviveMessagesRequest,
    SeekSubscriptionRequest,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.records.batch import check_crc, iterate_whole_headers
from millstream.protocol.records.record import Record, decode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code


class LedgerMarkResponse(Response, frozen=True, kw_only=True):
    """The queues that the node leads."""

    queues: Sequence[MarkedQueue] = ()


class LedgerMarkRequest(Request[LedgerMarkResponse], frozen=True):
    """Names the mark, and the subscriptions; all that have a ledger if there are none."""

    KEY: ClassVar = 32042
    mark: str
    names: list[str] | None = None


class MarkedQueue(msgspec.Struct, frozen=True):
    """A queue whose window was recorded."""

    subscription: str
    subscription_id: str
    topic: str
    topic_id: str
    partition: int
    end: int
    """The offset up to which messages could be delivered then."""


async def mark_ledger(client: Client, mark: str, names: list[str] | None = None) -> list[MarkedQueue]:
    """Mark the queues of all nodes; return once that is durable."""
    marked: dict[tuple[str, str, int], MarkedQueue] = {}
    request = LedgerMarkRequest(mark, names)
    for node in (await client.metadata(())).nodes:
        response = await request_private(client, node, request, about=f"the ledger on node {node}")
        marked |= {(queue.subscription_id, queue.topic_id, queue.partition): queue for queue in response.queues}
    return list(marked.values())


class MessageTrace(Response, frozen=True, kw_only=True):
    """The life of a message in all subscriptions that the client may describe."""

    topic: str = ""
    topic_id: str = ""
    partition: int = 0
    offset: int = 0
    log_start: int = 0
    """The first offset that the log still holds."""
    subscriptions: tuple[SubscriptionTrace, ...] = ()


class MessageTraceRequest(Request[MessageTrace], frozen=True, array_like=True):
    """Names a message by its position."""

    KEY: ClassVar = 32041
    topic: str
    partition: int
    offset: int


class TraceEvent(msgspec.Struct, frozen=True):
    """An event in the life of a message in a subscription."""

    kind: str
    """The kind of the delta, in lower case: `acquired`, `released`, `accepted` …"""
    time_ms: int
    attempt: int = 0
    worker: str = ""
    """`endpoint/member`, if a worker was involved."""
    until_ms: int = 0
    """The end of the lease or of the delay; 0 without either."""
    reason: str = ""
    leader_epoch: int = 0
    sequence: int = 0
    """The frame of deltas that made it durable, counted from the start of the queue."""


class DeadLetterPosition(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int


class SubscriptionTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a message in one subscription."""

    subscription: str
    subscription_id: str
    state: str
    """waiting, blocked, delayed, leased or rejected; at the end accepted, dead-lettered, dropped, filtered, skipped,
    expired, absent, or done if the outcome is no longer known."""
    is_final: bool
    attempts: int = 0
    """The number of deliveries, as far as known."""
    worker: str = ""
    """The worker that holds it, or settled it."""
    client_id: str = ""
    address: str = ""
    """The client of that worker, if it has connected to the current leader."""
    until_ms: int = 0
    """When the lease or the delay ends; 0 if it waits for neither."""
    first_delivery_ms: int = 0
    ended_ms: int = 0
    reason: str = ""
    dead_letter: DeadLetterPosition | None = None
    ledger: bool = False
    """Whether the subscription keeps a ledger."""
    events: tuple[TraceEvent, ...] = ()
    is_complete: bool = False
    """Whether `events` are all events of the message in this subscription."""
    unknown: str = ""
    """The events that are missing, and the reason; empty if none are."""


async def message_trace(client: Client, topic: str, partition: int, offset: int) -> MessageTrace:
    """Ask the leader of a partition, which runs all its queues."""
    request = MessageTraceRequest(topic, partition, offset)

    async def attempt(leader: NodeId) -> MessageTrace:
        return await request_private(client, leader, request, about=f"{topic}-{partition} at {offset}")

    return await client.call_leader(topic, partition, attempt)


ACCEPTED: Final = "accepted"
WAIT_MS_MAX: Final = 20_000
"""The longest wait of one request; for longer waits, ask again."""


class DeliveryStateResponse(msgspec.Struct, frozen=True, array_like=True):
    error: int
    message: str | None
    state: str = ""
    attempt: int = 0
    next_ms: int = 0
    is_final: bool = False


class DeliveryStateRequest(Request[DeliveryStateResponse], frozen=True, array_like=True):
    """Names a message of a subscription, and how long to wait for its final state."""

    KEY: ClassVar = 32039
    subscription: str
    topic: str
    partition: int
    offset: int
    wait_ms: int = 0


class MessageDelivery(NamedTuple):
    """The delivery state of a message in a subscription.

    `state` is one of waiting, blocked, delayed, leased, rejected, and finally accepted, dead-lettered, dropped,
    filtered, skipped, absent, or done if it has ended and the outcome is no longer known.
    """

    state: str
    attempt: int = 0
    """The number of its last delivery; 0 before the first, or if unknown."""
    next_ms: int = 0
    """When its lease or delay ends; 0 if it waits for neither."""
    is_final: bool = False


async def delivery_state(
    client: Client, subscription: str, topic: str, partition: int, offset: int, *, wait_ms: int = 0
) -> MessageDelivery:
    """Ask the leader of a partition; with a wait of at most `WAIT_MS_MAX`, it responds when the state is final."""
    request = DeliveryStateRequest(subscription, topic, partition, offset, min(wait_ms, WAIT_MS_MAX))

    async def attempt(leader: NodeId) -> MessageDelivery:
        about = f"{topic}-{partition} at {offset} in subscription {subscription!r}"
        response = await request_private(client, leader, request, waits=wait_ms > 0, about=about)
        return MessageDelivery(response.state, response.attempt, response.next_ms, response.is_final)

    return await client.call_leader(topic, partition, attempt)


_TURN_MS: Final = 200
_NODES_S: Final = 1.0
"""How long the list of nodes is cached."""


class LeasedMessage(NamedTuple):
    """A message that a worker holds."""

    node: NodeId | None
    topic: str
    topic_id: UUID
    partition: int
    attempt: int
    deadline_ms: int
    record: Record
    lease_ms: int | None = None
    """The duration of the lease; None if nothing is leased."""
    fresh_until: float = math.inf
    """Until when the lease is certain to hold, on the monotonic clock."""

    @property
    def is_fresh(self) -> bool:
        """Return whether no other worker can have the message."""
        return monotonic() < self.fresh_until

    def extended(self, sent_at: float, lease_ms: int | None = None) -> LeasedMessage:
        """Return the message after an extension sent at a time, by default for the same duration."""
        return self._replace(fresh_until=fresh_until(sent_at, self.lease_ms if lease_ms is None else lease_ms))

    @property
    def size(self) -> int:
        """Return the size of its key, value and headers."""
        record = self.record
        headers = sum(len(name) + len(value or b"") for name, value in record.headers)
        return len(record.key or b"") + len(record.value or b"") + headers


class HeldLease(NamedTuple):
    """Consecutive messages that one worker holds; the end is exclusive."""

    topic: str
    partition: int
    start: int
    end: int
    attempt: int
    deadline_ms: int
    """When the lease ends, by the clock of the broker."""
    remaining_ms: int
    """How long until then."""
    worker: str
    client_id: str
    """The client through which the worker requested messages; empty if the queue has moved to another node since."""
    address: str


class HeldLeases(NamedTuple):
    """The leases of a subscription, the oldest messages of each partition first."""

    leases: list[HeldLease]
    omitted: int
    """How many more messages are held than those that are listed."""


class SubscriptionClient:
    """Sends requests about subscriptions."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known_nodes: list[NodeId | None] = []
        self._known_until = 0.0

    async def create(
        self, name: str, topics: Sequence[str], settings: Mapping[str, str], *, validate_only: bool = False
    ) -> UUID:
        request = CreateSubscriptionRequest(name, list(topics), dict(settings), validate_only)
        return UUID((await request_private(self._client, None, request)).subscription_id)

    async def alter(
        self, name: str, settings: Mapping[str, str | None], *, topics: Sequence[str] | None = None
    ) -> None:
        request = AlterSubscriptionRequest(name, dict(settings), None if topics is None else list(topics))
        await request_private(self._client, None, request)

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription; one with open dead letters only with `force`."""
        await request_private(self._client, None, DeleteSubscriptionRequest(name, force))

    async def revive(
        self,
        name: str,
        place: tuple[str, UUID, int, int],
        letter_topic_id: UUID,
        letters: Sequence[tuple[int, int, int]],
        closed: Sequence[tuple[int, int, int]] = (),
    ) -> list[int]:
        """Redeliver dead letters of a partition through one subscription; return the offsets that the log no longer
        has.

        The messages of a topic, its id, a partition and a leader epoch are redelivered. A letter is the offset of a
        message, and the partition and offset of its letter; none of `closed` will come again.
        """
        topic, _, partition, _ = place
        request = ReviveMessagesRequest(name, *place, letter_topic_id, list(letters), list(closed))

        async def attempt(leader: NodeId) -> list[int]:
            return list((await request_private(self._client, leader, request)).missing)

        return await self._client.call_leader(topic, partition, attempt)

    async def describe(
        self,
        names: Sequence[str] | None = None,
        places: Iterable[tuple[str, int]] = (),
        *,
        leases_max: int = 0,
        without_silent: bool = False,
    ) -> list[dict[str, Any]]:
        """Return subscriptions with all their queues and up to `leases_max` leases, from the nodes that lead them.

        For a single one, queues that have started are opened, and those on the partitions of `places`. With
        `without_silent`, the queues of nodes that do not respond are left out, unless no node responds.
        """
        request = ListSubscriptionsRequest(None if names is None else list(names), leases_max=leases_max)
        subscriptions = await self._describe_all(request, without_silent=without_silent)
        closed = {
            *places,
            *(tuple(place) for described in subscriptions.values() for place in described["stored_queues"]),
        } - {
            (queue["topic"], queue["partition"])
            for described in subscriptions.values()
            for queue in described["queues"]
        }
        if names is not None and len(subscriptions) == 1 and closed:
            # They were not used since their leader was elected.
            request = ListSubscriptionsRequest(list(names), sorted(closed), leases_max)
            subscriptions = await self._describe_all(request)
        return [subscriptions[name] for name in sorted(subscriptions)]

    async def leases(self, name: str, *, limit: int = 1000) -> HeldLeases:
        """Return the held leases of a subscription."""
        (described,) = await self.describe([name], leases_max=limit)
        held = sorted(HeldLease(**lease) for lease in described["leases"])[:limit]
        leased: int = sum(queue["leased"] for queue in described["queues"])
        return HeldLeases(held, max(0, leased - sum(lease.end - lease.start for lease in held)))

    async def _describe_all(
        self, request: ListSubscriptionsRequest, *, without_silent: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Combine what all nodes report about subscriptions."""
        by_name: dict[str, dict[str, Any]] = {}
        silent: list[MillstreamError] = []
        nodes = await self._nodes()
        for node in nodes:
            try:
                response = await request_private(self._client, node, request)
            except (BrokerUnreachable, RequestTimedOut) as error:
                # There may be other nodes by now.
                self._known_nodes = []
                silent.append(error)
                if not without_silent or len(silent) == len(nodes):
                    raise
                continue
            for described in response.subscriptions:
                known = by_name.setdefault(described["name"], described)
                if known is not described:
                    for part in known.keys() & {"queues", "push", "stored_queues", "leases"}:
                        known[part] += described[part]
                    # Each node knows some topics of a share group.
                    known["topics"] += [topic for topic in described["topics"] if topic not in known["topics"]]
                    known["has_hidden_topics"] |= described["has_hidden_topics"]
        return by_name

    async def seek(
        self, name: str, to: str, *, topic: str | None = None, partition: int | None = None
    ) -> list[dict[str, Any]]:
        """Move the queues of a subscription to another position."""
        request = SeekSubscriptionRequest(name, to, topic, partition)
        moved: list[dict[str, Any]] = []
        for node in await self._nodes():
            moved += (await request_private(self._client, node, request)).queues
        return moved

    async def receive(
        self, name: str, worker: str, *, max_records: int, max_bytes: int = 1024 * 1024, wait_ms: int = 0
    ) -> list[LeasedMessage]:
        """Lease messages, from any node that has some."""
        nodes = await self._nodes()
        if len(nodes) == 1:
            receive_request = ReceiveRequest(name, worker, max_records, max_bytes, wait_ms)
            return await self.confirmed(name, worker, await self._receive_from(nodes[0], receive_request))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            # A node without messages delays its response, so none is asked to wait long while others may have some.
            remaining_ms = max(0, int((deadline - loop.time()) * 1000))
            request = ReceiveRequest(name, worker, max_records, max_bytes, min(remaining_ms, _TURN_MS) // len(nodes))
            messages, failed = await self._receive_from_all(nodes, request)
            messages = await self.confirmed(name, worker, messages)
            # Messages that were leased must not be dropped because another node is gone.
            if not messages and failed is not None:
                raise failed
            if messages or remaining_ms == 0:
                return messages

    async def _receive_from_all(
        self, nodes: Sequence[NodeId | None], request: ReceiveRequest
    ) -> tuple[list[LeasedMessage], MillstreamError | None]:
        """Ask one node after another, since all of them together must not give more than requested."""
        messages: list[LeasedMessage] = []
        failed: MillstreamError | None = None
        # Any one, not in turn: a command asks once, and its successors would all begin with the same node.
        first = random.randrange(len(nodes))
        for node in (*nodes[first:], *nodes[:first]):
            rest = remaining(request, messages)
            if rest is None:
                break
            try:
                messages += await self._receive_from(node, rest)
            except MillstreamError as error:
                failed = error
        return messages, failed

    async def confirmed(self, name: str, worker: str, messages: Sequence[LeasedMessage]) -> list[LeasedMessage]:
        """Return the messages that are certainly held: if leases may have ended, extend all, and drop the rest."""
        if all(message.is_fresh for message in messages):
            return list(messages)
        sent_at = monotonic()
        lease_ms = min(message.lease_ms for message in messages if message.lease_ms is not None)
        outcomes = await self.settle(name, worker, messages, Verb.EXTEND, delay_ms=lease_ms)
        extended = [message.extended(sent_at, lease_ms) for message in messages]
        held = [error is None and message.is_fresh for message, error in zip(extended, outcomes, strict=True)]
        lost = [message for message, is_held in zip(messages, held, strict=True) if not is_held]
        if lost:
            # Some may be held nevertheless, if the node could not be asked in time.
            await self.settle(name, worker, lost, Verb.RETURN, delay_ms=0)
        return [message for message, is_held in zip(extended, held, strict=True) if is_held]

    async def settle(
        self,
        name: str,
        worker: str,
        messages: Iterable[LeasedMessage],
        verb: int,
        *,
        delay_ms: int | None = None,
        reason: str = "",
    ) -> list[MillstreamError | None]:
        """Settle messages, all with the same verb; return the error of each, or None."""
        listed = list(messages)
        results: list[MillstreamError | None] = [None] * len(listed)
        by_node: dict[NodeId | None, list[range]] = {}
        for run in _runs(listed):
            by_node.setdefault(listed[run.start].node, []).append(run)
        how = (verb, delay_ms, reason)
        for node, runs in by_node.items():
            refused = await self._settle_at(node, name, worker, listed, runs, how, results)
            if refused:
                # A range is settled as a whole; if it is rejected, some of its messages may be held nevertheless.
                alone = [range(at, at + 1) for run in refused for at in run]
                await self._settle_at(node, name, worker, listed, alone, how, results)
        return results

    async def _settle_at(
        self,
        node: NodeId | None,
        name: str,
        worker: str,
        listed: Sequence[LeasedMessage],
        runs: Sequence[range],
        how: tuple[int, int | None, str],
        results: list[MillstreamError | None],
    ) -> list[range]:
        """Settle ranges of one node's messages; return rejected ranges of several messages."""
        own_ranges: dict[tuple[str, int], list[range]] = {}
        for run in runs:
            own_ranges.setdefault((listed[run.start].topic, listed[run.start].partition), []).append(run)
        settles = [
            PartitionSettles(
                topic,
                partition,
                [
                    SettledRange(
                        listed[run.start].record.offset,
                        listed[run.stop - 1].record.offset + 1,
                        *how,
                        listed[run.start].attempt,
                    )
                    for run in own
                ],
            )
            for (topic, partition), own in own_ranges.items()
        ]
        body = encode(SettleRequest(name, worker, settles))
        try:
            response = decode_response(await self._client.private(node, SETTLE_KEY, body), SettleResponse)
        except MillstreamError as error:
            # Messages of other nodes can still be settled.
            for run in runs:
                results[run.start : run.stop] = [error] * len(run)
            return []
        refused: list[range] = []
        for own, outcomes in zip(own_ranges.values(), response.results, strict=True):
            for run, (code, text) in zip(own, outcomes, strict=True):
                if not code:
                    results[run.start : run.stop] = [None] * len(run)
                    continue
                for at in run:
                    results[at] = error_from_code(
                        code, text, about="" if text else f"message {listed[at].record.offset}"
                    )
                if len(run) > 1:
                    refused.append(run)
        return refused

    async def _receive_from(self, node: NodeId | None, request: ReceiveRequest) -> list[LeasedMessage]:
        sent_at = monotonic()
        try:
            body = await self._client.private(node, RECEIVE_KEY, encode(request), waits=request.wait_ms > 0)
            response = decode_response(body, ReceiveResponse)
            if (error := response.quota_error) is not None:
                raise error
        except MillstreamError:
            # The cluster may have other nodes by now.
            self._known_nodes = []
            raise
        return leased_messages(node, LeaseResponse(response, sent_at))

    async def _nodes(self) -> list[NodeId | None]:
        loop = asyncio.get_running_loop()
        if not self._known_nodes or loop.time() >= self._known_until:
            metadata = await self._client.metadata(())
            self._known_nodes = [NodeId(node_id) for node_id in sorted(metadata.nodes)]
            self._known_until = loop.time() + _NODES_S
        return self._known_nodes


def _runs(messages: Sequence[LeasedMessage]) -> list[range]:
    """Return the runs of listed messages that are consecutive in their partition and of the same attempt."""
    runs: list[range] = []
    start = 0
    for at in range(1, len(messages) + 1):
        if at == len(messages) or not _follows(messages[at - 1], messages[at]):
            runs.append(range(start, at))
            start = at
    return runs


def _follows(before: LeasedMessage, after: LeasedMessage) -> bool:
    return (
        after.record.offset == before.record.offset + 1
        and after.partition == before.partition
        and after.topic == before.topic
        and after.node == before.node
        and after.attempt == before.attempt
    )


def remaining(request: ReceiveRequest, messages: Sequence[LeasedMessage]) -> ReceiveRequest | None:
    """Build the request to the next node from what earlier nodes have given; None if the limits are reached."""
    if not messages:
        return request
    records_left = request.max_records - len(messages)
    left_bytes = request.max_bytes - sum(message.size for message in messages)
    if records_left <= 0 or left_bytes <= 0:
        return None
    return msgspec.structs.replace(
        request, max_records=records_left, max_bytes=left_bytes, wait_ms=0, at_least_one=False
    )


def leased_messages(node: NodeId | None, leased: LeaseResponse) -> list[LeasedMessage]:
    messages: list[LeasedMessage] = []
    for part in leased.response.partitions:
        place = (node, part.topic, UUID(bytes=part.topic_id), part.partition)
        lasts = (part.lease_ms, leased.fresh_until(part))
        for lease, record in _leased_records(part):
            messages.append(LeasedMessage(*place, lease.attempt, lease.deadline_ms, record, *lasts))
    return messages


def _leased_records(part: PartitionMessages) -> Iterator[tuple[LeasedRange, Record]]:
    """Yield the leased records with their leases, which ascend; other records of their batches are skipped."""
    leases, at = part.leases, 0
    for header in iterate_whole_headers(part.batches):
        while at < len(leases) and leases[at].end <= header.base_offset:
            at += 1
        if header.is_control or at == len(leases) or leases[at].start > header.last_offset:
            continue
        check_crc(part.batches, header)
        ranges = (OffsetRange(leases[index].start, leases[index].end) for index in range(at, len(leases)))
        for record in decode_batch(part.batches, header, ranges=ranges):
            while leases[at].end <= record.offset:
                at += 1
            yield leases[at], record


async def open_letters(client: Client, topic: str) -> int:
    """Count the open letters of a topic; 0 if it does not exist.

    Raises `CoordinatorUnavailable` while a partition has no leader, which alone knows its letters.
    """
    topic_metadata = (await client.metadata([topic])).topics.get(topic)
    partitions = set() if topic_metadata is None else set(topic_metadata.partitions)
    try:
        (described,) = await SubscriptionClient(client).describe(
            [LETTERS_PREFIX + topic], [(topic, index) for index in partitions]
        )
    except UnknownGroup:
        return await stored_letters(client, topic)
    unreachable = sorted(partitions - {queue["partition"] for queue in described["queues"]})
    if unreachable:
        raise CoordinatorUnavailable(
            f"the open dead letters of topic {topic!r} cannot be counted: no leader responds for partitions "
            f"{', '.join(map(str, unreachable))} now; try again when they have a leader"
        )
    return sum(queue["backlog"] for queue in described["queues"])


async def stored_letters(client: Client, topic: str) -> int:
    """Count all letters of a topic; valid while none has been redriven or purged."""
    topic_metadata = (await client.metadata([topic])).topics.get(topic)
    if topic_metadata is None:
        return 0
    partitions = list(topic_metadata.partitions)
    first = await client.list_offsets(topic, dict.fromkeys(partitions, -2))
    end = await client.list_offsets(topic, dict.fromkeys(partitions, -1))
    return sum(end[index].offset - first[index].offset for index in partitions)


def open_letters_error(topic: str, letters: int, subscriptions: Sequence[str]) -> str:
    """Return the reason not to delete a dead letter topic."""
    owners = f" of {', '.join(subscriptions)}" if subscriptions else ""
    noun, pronoun = ("letter", "it") if letters == 1 else ("letters", "them")
    return (
        f"topic {topic!r} holds {letters:,} open dead {noun}{owners}; redrive or purge {pronoun} first, or "
        f"delete {pronoun} too with millstream topic delete {topic} --force"
    )


def other_letters_error(subscription: str, topic: str) -> str:
    """Return the reason not to redrive letters of a topic to a subscription that they name."""
    return (
        f"topic {topic!r} is not the dead letter topic of subscription {subscription!r}; if the letters are its own, "
        "set its dead letter topic to this one first"
    )
