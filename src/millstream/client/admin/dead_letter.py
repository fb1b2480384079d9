"""Operations on dead letters: count, show, redrive, publish, purge.

Nothing is removed from a dead letter topic. Its open letters are those that an internal subscription on the topic has
not accepted; redriving or purging a letter accepts it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

from millstream.client.admin.browse import allowed_rights, existing_topics
from millstream.client.admin.position import EARLIEST_TIMESTAMP
from millstream.client.admin.topics import find_topic as find_existing_topic
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import (
    Conflict,
    CoordinatorUnavailable,
    InvalidRecordState,
    InvalidRequest,
    MillstreamError,
    NotAuthorized,
    NotFound,
    StorageFailure,
    SubscriptionExists,
    TopicNotAuthorized,
    UnknownGroup,
    UnknownTopic,
)
from millstream.core.headers import LETTER_PREFIX, LETTER_PUBLISHED, LETTER_REDRIVEN
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.subscription import (
    ATTEMPTS,
    DEAD_LETTER_TOPIC,
    EARLIEST,
    IN_FLIGHT_MAX,
    LEASE,
    LETTERS_PREFIX,
    NO_DEAD_LETTERS,
    START,
    Verb,
)
from millstream.core.topic import TopicPartition, partition_for_key
from millstream.protocol.private.subscriptions import (
    LeasedMessage,
    SubscriptionClient,
    open_letters_error,
    other_letters_error,
    stored_letters,
)
from millstream.protocol.records.record import Headers, NewRecord, encode_batch
from millstream.protocol.wire.error_codes import TRANSIENT

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata


class DeadLetterProducer:
    """An idempotent producer: a message resent after a failover is stored once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[tuple[str, int], int] = {}
        self._partitions: dict[str, int] = {}

    async def open(self) -> tuple[int, int]:
        """Return the producer id and epoch, which are requested on first use."""
        if self._producer is None:
            self._producer = await self._client.init_producer_id()
        return self._producer

    async def send(self, topic: str, partition: int | None, record: NewRecord, *, spread: int) -> None:
        """Publish to a partition, or by key as Kafka's clients do; without a key, `spread` selects the partition."""
        partitions = await self.partitions_of(topic)
        if partition is None or partition >= partitions:
            partition = spread % partitions if record.key is None else partition_for_key(record.key, partitions)
        producer_id, producer_epoch = await self.open()
        sequence = self._sequences.get((topic, partition), 0)
        batch = encode_batch([record], producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=sequence)
        await self._client.produce(topic, partition, batch)
        self._sequences[topic, partition] = (sequence + 1) & 0x7FFFFFFF

    async def partitions_of(self, topic: str) -> int:
        """Return a topic's number of partitions without creating it."""
        if topic not in self._partitions:
            advice = f"create it with: millstream topic create {topic}, or name another one with --to-topic"
            self._partitions[topic] = len((await find_existing_topic(self._client, topic, advice=advice)).partitions)
        return self._partitions[topic]


BATCH = 500

LEASE_MS = 60_000
"""Short, because letters of a killed command stay locked for this long."""

EXTEND_S = 15.0

RELEASE_S_MAX = 5.0
"""How long the end of a command waits for letters to be returned."""

HELD_MAX = 100_000

ROUND_MAX = 50_000
"""How many letters are redriven at a time, in the order of their messages; more letters take several rounds."""

SKIPPED_MAX = 20_000
"""How many letters that do not match are held, so that they are open again at once; more are open again later."""

SKIPPED_MS = 60_000
"""How long these are held back, so that a pass does not meet them again."""

NO_ORIGIN = "the letter does not say where it came from"

_PAUSE_S = 0.25

_NO_OFFSETS = range(0)

_PASSES = (*TRANSIENT, UnknownGroup)
"""Transient errors: a failover, or a subscription that a node does not know yet."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeadLetterTopic:
    """A dead letter topic, the subscriptions that write to it, and its number of open letters."""

    topic: str
    subscriptions: list[str]
    letters: int
    unreachable: list[int]
    """The partitions without a leader, or whose leader did not respond; their letters are not counted."""
    refused: int
    """Messages that the topic refuses as letters, which are tried again."""
    refusals: list[str]
    """The reasons for the refusals, and what to do."""


class Queue(NamedTuple):
    """The queue in which messages died, and the leader epoch in which they were written."""

    subscription: str
    topic: str
    topic_id: UUID
    partition: int
    leader_epoch: int


class Letter(NamedTuple):
    """The offset of a message, and the position of its letter in the dead letter topic."""

    offset: int
    letter_partition: int
    letter_offset: int


class Origin(NamedTuple):
    """The original position of a letter's message."""

    queue: Queue
    letter: Letter


def origin_of(letter: LeasedMessage) -> Origin | None:
    """Return the origin of a letter's message, if the headers name it; anyone can publish to the topic."""
    headers = headers_of(letter)
    try:
        topic_id, partition = UUID(headers["dlq-topic-id"]), int(headers["dlq-partition"])
        epoch = int(headers["dlq-leader-epoch"])
        if not 0 <= epoch < 2**31:
            return None
        queue = Queue(headers["dlq-subscription"], headers["dlq-topic"], topic_id, partition, epoch)
        return Origin(queue, Letter(int(headers["dlq-offset"]), letter.partition, letter.record.offset))
    except (KeyError, ValueError):
        return None


class DeadLetterClient:
    def __init__(self, client: Client, topic: str, worker: str, *, patience_s: float) -> None:
        self._client = client
        self._subscriptions = SubscriptionClient(client)
        self.topic = topic
        self._worker = worker
        self._name = LETTERS_PREFIX + topic
        self._patience_s = patience_s
        self._held: dict[tuple[int, int], LeasedMessage] = {}
        self._sent: set[tuple[int, int]] = set()
        """The held letters that were, or may have been, sent."""
        self._leaders: dict[int, NodeId | None] = {}
        # Closed letters whose message queues have not been notified yet.
        self._closed: dict[Queue, list[Letter]] = {}
        self._letter_topic_id = UUID(int=0)
        self._post = DeadLetterProducer(client)
        self._skipped: dict[int, int] = {}
        """The last letter of each partition that was held back."""
        self.held_back = 0
        """Letters that were skipped; they are open again within `SKIPPED_MS`."""
        self.held_by_others = 0
        self.unreachable = 0
        self.not_authorized: NotAuthorized | None = None
        """The missing right because of which some messages were not redelivered."""

    async def open(self) -> None:
        """Start tracking the topic's letters, if that has not happened yet."""
        settings = {LEASE: str(LEASE_MS), IN_FLIGHT_MAX: str(HELD_MAX)}
        try:
            described = await self._describe_subscription(self._name, *TRANSIENT)
        except UnknownGroup:
            with suppress(SubscriptionExists):
                await self._subscriptions.create(self._name, [self.topic], {START: EARLIEST, ATTEMPTS: "0", **settings})
            return
        if any(described["settings"].get(name) != value for name, value in settings.items()):
            await self._subscriptions.alter(self._name, settings)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Keep the leases of held letters during the work, and return unsettled letters at the end."""
        extending = asyncio.create_task(self._extend())
        try:
            yield
        finally:
            extending.cancel()
            with suppress(asyncio.CancelledError):
                await extending
            # Leases that cannot be returned expire; this error must not hide the outcome of the work.
            with suppress(MillstreamError, TimeoutError):
                async with asyncio.timeout(min(RELEASE_S_MAX, self._patience_s)):
                    await self._give_back()

    async def letters(self, remaining: Callable[[], int]) -> AsyncIterator[list[LeasedMessage]]:
        """Yield the open letters in batches, each once, while any remain; they are held until they are settled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while len(self._held) < HELD_MAX and (number := remaining()) > 0:
            received = await self._retry_transient(partial(self._receive, min(BATCH, number)))
            self._leaders.update({letter.partition: letter.node for letter in received})
            some = [letter for letter in received if letter.record.offset > self._skipped.get(letter.partition, -1)]
            await self._hold_back(
                [letter for letter in received if letter.record.offset <= self._skipped.get(letter.partition, -1)]
            )
            if received and not some:
                # Only letters are left that were held back before.
                return
            if some:
                self._held.update({_position(letter): letter for letter in some})
                yield some
                # From here on, held letters are only settled.
                for letter in some:
                    if _position(letter) in self._held:
                        self._held[_position(letter)] = without_content(letter)
                deadline = loop.time() + self._patience_s
            elif await self._is_at_end() or loop.time() + _PAUSE_S > deadline:
                return
            else:
                await asyncio.sleep(_PAUSE_S)

    async def skip(self, letters: Sequence[LeasedMessage]) -> None:
        """Return letters that do not match, for other commands to find a minute later."""
        await self._hold_back(letters)
        self.held_back += len(letters)
        for letter in letters:
            self._held.pop(_position(letter), None)
            self._skipped[letter.partition] = max(letter.record.offset, self._skipped.get(letter.partition, -1))

    async def _hold_back(self, letters: Sequence[LeasedMessage]) -> None:
        for start in range(0, len(letters), BATCH):
            await self._settle(letters[start : start + BATCH], Verb.RETURN, delay_ms=SKIPPED_MS)

    async def redrivable_in(self, queue: Queue) -> tuple[range, str]:
        """Return the offsets whose messages can be redelivered in a queue, and why others cannot."""
        needed = (
            (Operation.READ, ResourceType.GROUP, queue.subscription),
            (Operation.READ, ResourceType.TOPIC, queue.topic),
        )
        may_read_subscription, may_read_topic = await allowed_rights(self._client, needed)
        if not may_read_subscription:
            return _NO_OFFSETS, f"redriving needs READ on subscription {queue.subscription!r}"
        if not may_read_topic:
            return _NO_OFFSETS, f"redriving needs READ on topic {queue.topic!r}"
        try:
            described = await self._describe_subscription(queue.subscription, *TRANSIENT)
        except UnknownGroup as error:
            return _NO_OFFSETS, str(error)
        if described["settings"].get(DEAD_LETTER_TOPIC) != self.topic:
            return _NO_OFFSETS, other_letters_error(queue.subscription, self.topic)
        topic_metadata = (await self._client.metadata([queue.topic])).topics.get(queue.topic)
        if (
            topic_metadata is None
            or topic_metadata.topic_id != queue.topic_id
            or queue.partition not in topic_metadata.partitions
        ):
            return _NO_OFFSETS, _original_gone(queue)
        where = TopicPartition(queue.topic, PartitionIndex(queue.partition))
        epoch, end = await self._client.end_of_epoch(where, queue.leader_epoch)
        if epoch != queue.leader_epoch:
            return _NO_OFFSETS, _original_gone(queue)
        listed = await self._client.list_offsets(queue.topic, {queue.partition: EARLIEST_TIMESTAMP})
        return range(int(listed[queue.partition].offset), end), _original_gone(queue)

    async def close(self, letters: Sequence[LeasedMessage], *, are_revived: bool = False) -> int:
        """Close letters; return how many may still be open because a failover lost their leases.

        The queues of revived messages are notified with the next messages that are revived, or by `forget_closed`.
        """
        uncertain = 0
        for letter, error in zip(letters, await self._settle(letters, Verb.ACCEPT), strict=True):
            if error is not None and not isinstance(error, InvalidRecordState):
                raise error
            self._held.pop(_position(letter), None)
            self._sent.discard(_position(letter))
            if error is not None:
                uncertain += 1
            elif are_revived and (origin := origin_of(letter)) is not None:
                self._closed.setdefault(origin.queue, []).append(origin.letter)
        return uncertain

    async def revive(self, letters: Sequence[LeasedMessage]) -> list[str | None]:
        """Redeliver the messages of letters through their own subscriptions; return None or the reason for each."""
        reasons: list[str | None] = [NO_ORIGIN] * len(letters)
        by_queue: dict[Queue, list[tuple[int, Letter]]] = {}
        for at, letter in enumerate(letters):
            origin = origin_of(letter)
            if origin is not None:
                by_queue.setdefault(origin.queue, []).append((at, origin.letter))
                self._letter_topic_id = letter.topic_id
        for queue, some in by_queue.items():
            missing = await self._revive_in(queue, [letter for _, letter in some])
            for at, stored in some:
                reasons[at] = missing.get(stored.offset)
        return reasons

    async def forget_closed(self) -> None:
        """Notify the queues of revived messages that their letters are closed; a missed notification costs little."""
        with suppress(MillstreamError):
            for queue in list(self._closed):
                await self._revive_in(queue, [])

    async def _revive_in(self, queue: Queue, letters: list[Letter]) -> dict[int, str]:
        """Revive messages in one queue; return the offsets that cannot be revived, and why."""
        closed = self._closed.get(queue, [])[:BATCH]
        place = (queue.topic, queue.topic_id, queue.partition, queue.leader_epoch)
        try:
            missing_offsets = await self._retry_transient(
                lambda: self._subscriptions.revive(queue.subscription, place, self._letter_topic_id, letters, closed),
                *TRANSIENT,
                # A range that the disk lost is being fetched from another replica.
                StorageFailure,
            )
        except UnknownTopic:
            return dict.fromkeys((letter.offset for letter in letters), _original_gone(queue))
        except (NotFound, InvalidRequest, NotAuthorized) as error:
            if isinstance(error, NotAuthorized):
                self.not_authorized = error
            return dict.fromkeys((letter.offset for letter in letters), str(error))
        self._closed.pop(queue, None)
        return dict.fromkeys(missing_offsets, _original_gone(queue))

    async def check_target(self, topic: str) -> None:
        """Raise `UnknownTopic` if the target topic does not exist."""
        await self._retry_transient(lambda: self._post.partitions_of(topic), *TRANSIENT)

    async def publish(self, letter: LeasedMessage, topic: str) -> None:
        """Publish a letter's message to a topic, in its original partition if it is the original topic."""
        headers = headers_of(letter)
        partition = int(headers["dlq-partition"]) if headers.get("dlq-partition", "").isdigit() else None
        times = int(headers[LETTER_REDRIVEN]) if headers.get(LETTER_REDRIVEN, "").isdigit() else 0
        published = headers.get(LETTER_PUBLISHED) or str(letter.record.timestamp_ms)
        kept: Headers = tuple(header for header in letter.record.headers if not header[0].startswith(LETTER_PREFIX))
        story = ((LETTER_REDRIVEN, str(times + 1).encode()), (LETTER_PUBLISHED, published.encode()))
        # Its original time could be too old for the topic: rejected, or deleted before anyone reads it.
        record = NewRecord(letter.record.key, letter.record.value, (*kept, *story), int(time() * 1000))
        await self.check_target(topic)
        await self._retry_transient(self._post.open, *TRANSIENT)
        self._sent.add(_position(letter))
        is_origin = topic == headers.get("dlq-topic")
        await self._post.send(topic, partition if is_origin else None, record, spread=letter.record.offset)

    async def _receive(self, number: int) -> list[LeasedMessage]:
        return await self._subscriptions.receive(
            self._name, self._worker, max_records=number, max_bytes=8 * 1024 * 1024
        )

    async def _is_at_end(self) -> bool:
        """Return whether all queues responded and none has letters left; during a failover some do not respond."""
        described = await self._describe_subscription(self._name, *_PASSES)
        topic_metadata = (await self._client.metadata([self.topic])).topics.get(self.topic)
        partitions = set() if topic_metadata is None else set(topic_metadata.partitions)
        self.unreachable = len(partitions - {queue["partition"] for queue in described["queues"]})
        # Letters that another command has skipped are held back as well.
        held = sum(queue["leased"] + queue["parked"] for queue in described["queues"])
        self.held_by_others = max(0, held - len(self._held) - self.held_back)
        return not self.unreachable and not any(queue["available"] for queue in described["queues"])

    async def _describe_subscription(self, name: str, *passing: type[MillstreamError]) -> dict[str, Any]:
        (described,) = await self._retry_transient(lambda: self._subscriptions.describe([name]), *passing)
        return described

    async def _settle(
        self, letters: Iterable[LeasedMessage], verb: int, *, delay_ms: int = 0
    ) -> list[MillstreamError | None]:
        """Settle letters at the current leaders; leases usually survive a failover."""
        listed = list(letters)
        results: list[MillstreamError | None] = [None] * len(listed)
        unsettled = list(range(len(listed)))

        async def attempt() -> None:
            nonlocal unsettled
            some = [listed[at]._replace(node=self._leaders[listed[at].partition]) for at in unsettled]
            errors = await self._subscriptions.settle(
                self._name, self._worker, some, verb, delay_ms=None if verb == Verb.EXTEND else delay_ms
            )
            for at, error in zip(unsettled, errors, strict=True):
                results[at] = error
            unsettled = [at for at in unsettled if isinstance(results[at], _PASSES)]
            failed = next((results[at] for at in unsettled), None)
            if failed is not None:
                await self._find_leaders()
                raise failed

        with suppress(*_PASSES):
            await self._retry_transient(attempt)
        return results

    async def _give_back(self) -> None:
        """Return untouched letters, which does not count as a delivery, and release those that were sent."""
        for verb, is_sent in ((Verb.RETURN, False), (Verb.RELEASE, True)):
            letters = [letter for place, letter in self._held.items() if (place in self._sent) == is_sent]
            if letters:
                await self._settle(letters, verb)

    async def _find_leaders(self) -> None:
        topic_metadata = (await self._client.metadata([self.topic])).topics.get(self.topic)
        for partition in () if topic_metadata is None else topic_metadata.partitions.values():
            if partition.leader_id >= 0:
                self._leaders[partition.partition] = partition.leader_id

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(EXTEND_S)
            # A lost lease shows when its letter is settled.
            with suppress(MillstreamError):
                await self._settle(self._held.values(), Verb.EXTEND)

    async def _retry_transient(self, attempt: Callable[[], Awaitable[T]], *named: type[MillstreamError]) -> T:
        """Retry transient errors, for as long as the command may wait."""
        return await _retry_transient(attempt, self._patience_s, named or _PASSES)


def _original_gone(queue: Queue) -> str:
    return f"topic {queue.topic!r} no longer has the original"


def _position(letter: LeasedMessage) -> tuple[int, int]:
    return letter.partition, letter.record.offset


def headers_of(letter: LeasedMessage) -> dict[str, str]:
    """Return the headers of a letter as text; the last of a name counts."""
    return {name: (value or b"").decode(errors="replace") for name, value in letter.record.headers}


def without_content(letter: LeasedMessage) -> LeasedMessage:
    """Return a letter with its headers only: letters may be many and large."""
    return letter._replace(record=letter.record._replace(key=None, value=None))


async def _retry_transient(
    attempt: Callable[[], Awaitable[T]], patience_s: float, passing: tuple[type[MillstreamError], ...]
) -> T:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return await attempt()
        except passing:
            if loop.time() + _PAUSE_S > deadline:
                raise
        await asyncio.sleep(_PAUSE_S)


async def dead_letter_topics(client: Client, *, patience_s: float = 0.0) -> list[DeadLetterTopic]:
    """Return every dead letter topic; partitions without a response are asked again for a while."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        topics = await count_letters(client, await SubscriptionClient(client).describe(without_silent=True))
        if not any(topic.unreachable for topic in topics) or loop.time() + _PAUSE_S > deadline:
            return topics
        await asyncio.sleep(_PAUSE_S)


async def count_letters(client: Client, described: Iterable[dict[str, Any]]) -> list[DeadLetterTopic]:
    writers: dict[str, list[dict[str, Any]]] = {}
    opened: dict[str, list[dict[str, Any]]] = {}
    for subscription in described:
        topic = subscription["settings"].get(DEAD_LETTER_TOPIC, NO_DEAD_LETTERS)
        if topic != NO_DEAD_LETTERS:
            writers.setdefault(topic, []).append(subscription)
        if subscription["name"].startswith(LETTERS_PREFIX):
            topic = subscription["name"].removeprefix(LETTERS_PREFIX)
            opened[topic] = subscription["queues"]
            # Letters outlive a subscription that was deleted by force.
            writers.setdefault(topic, [])
    # Most dead letter topics do not exist before the first letter.
    exist = await existing_topics(client, sorted(writers))
    metadata = (await client.metadata(exist)).topics if exist else {}
    counted = [
        await _count_letters(client, topic, metadata.get(topic), wrote, opened.get(topic))
        for topic, wrote in sorted(writers.items())
    ]
    return [topic for topic in counted if topic.subscriptions or topic.letters or topic.unreachable]


async def _count_letters(
    client: Client,
    topic: str,
    metadata: TopicMetadata | None,
    writers: Sequence[dict[str, Any]],
    queues: Sequence[dict[str, Any]] | None,
) -> DeadLetterTopic:
    """Count the letters of a topic, from the queues that track them, if any."""
    unreachable = set() if metadata is None else set(metadata.partitions)
    letters = 0
    if queues is not None:
        letters = sum(queue["backlog"] for queue in queues)
        unreachable -= {queue["partition"] for queue in queues}
    elif unreachable:
        with suppress(*TRANSIENT):
            letters = await stored_letters(client, topic)
            unreachable.clear()
    refusing = [queue for writer in writers for queue in writer["queues"] if queue["refused_letters"]]
    return DeadLetterTopic(
        topic,
        [writer["name"] for writer in writers],
        letters,
        sorted(unreachable),
        sum(queue["refused_letters"] for queue in refusing),
        sorted({queue["letter_refusal"] for queue in refusing}),
    )


async def find_topic(client: Client, name: str, *, patience_s: float) -> str:
    """Find the dead letter topic with this name, or of the subscription with this name; wait out a failover."""
    known = await _retry_transient(lambda: dead_letter_topics(client), patience_s, TRANSIENT)
    if any(subscription.topic == name for subscription in known):
        return name
    for topic in known:
        if name in topic.subscriptions:
            return topic.topic
    with suppress(UnknownGroup):
        (described,) = await SubscriptionClient(client).describe([name])
        if DEAD_LETTER_TOPIC not in described["settings"]:
            raise TopicNotAuthorized(f"you may not describe the dead letter topic of subscription {name!r}")
        raise NotFound(f"subscription {name!r} has no dead letter topic")
    raise NotFound(
        f"no subscription is called {name!r} or has it as its dead letter topic; `millstream dlq list` and GET "
        "/v1/dead-letters list the topics"
    )


async def check_no_open_letters(client: Client, topic: str) -> None:
    """Raise `Conflict` for a dead letter topic that holds open letters."""
    dead_letter_topic = await _dead_letter_topic(client, topic)
    if dead_letter_topic is not None and dead_letter_topic.unreachable:
        raise CoordinatorUnavailable(
            f"the open dead letters of topic {topic!r} cannot be counted: no leader responds for partitions "
            f"{', '.join(map(str, dead_letter_topic.unreachable))} now; try again when they have a leader"
        )
    if dead_letter_topic is not None and dead_letter_topic.letters:
        raise Conflict(open_letters_error(topic, dead_letter_topic.letters, dead_letter_topic.subscriptions))


async def close_letters_of(client: Client, topic: str) -> None:
    """Close every open letter of a topic unread, if it is a dead letter topic."""
    if await _dead_letter_topic(client, topic) is not None:
        await DeadLetterClient(client, topic, "close-all", patience_s=RELEASE_S_MAX).open()
        await SubscriptionClient(client).seek(LETTERS_PREFIX + topic, "latest")


async def _dead_letter_topic(client: Client, topic: str) -> DeadLetterTopic | None:
    # Brokers other than Millstream have no subscriptions, and return nothing readable.
    with suppress(MillstreamError, ValueError):
        return next(
            (
                dead_letter_topic
                for dead_letter_topic in await dead_letter_topics(client)
                if dead_letter_topic.topic == topic
            ),
            None,
        )
    return None


LetterFilter = Callable[["LeasedMessage"], bool]
Act = Callable[["DeadLetterClient", "LeasedMessage"], Awaitable[None]]


@dataclass(slots=True)
class LetterPass:
    """A pass over letters: which of them it takes, and what came of them."""

    matches: LetterFilter | None = None
    limit: int | None = None
    """The most letters that it processes."""
    on_progress: Callable[[int], None] = lambda _done: None

    done: int = 0
    unmatched: int = 0
    uncertain: int = 0
    """Done, but the lease was lost meanwhile, so the letter may still be open."""
    held: int = 0
    """Held by other commands; they are open again within a minute."""
    held_back: int = 0
    """Examined and left open, but held back from other commands for a minute if there are very many."""
    refused: dict[str, int] = field(default_factory=dict)
    """Left open because the message cannot be redelivered, by reason."""
    revived: dict[str, int] = field(default_factory=dict)
    """Redelivered, by subscription."""
    unreachable: int = 0
    """Partitions without a leader."""
    selected: int = 0
    """Matching letters that were found so far."""
    is_stopped: bool = False
    """Set by the caller to end early, after the letters in progress."""
    has_begun: bool = False
    """Whether letters were taken, which are held back from other commands until they are closed or released."""
    in_progress: int = 0
    """Letters that are processed at the moment; after an interruption they may or may not be closed."""

    def end(self, dlq: DeadLetterClient) -> None:
        """Record which letters a dlq did not reach, and which it held back."""
        self.held, self.held_back, self.unreachable = dlq.held_by_others, dlq.held_back, dlq.unreachable


def undeliverable_note(refused: dict[str, int], remedy: str) -> str:
    """Describe which letters were left open, why, and how to publish their messages anyway."""
    count = sum(refused.values())
    subject = "1 letter is" if count == 1 else f"{count:,} letters are"
    return f"{subject} left open: {'; '.join(sorted(refused))}. To publish from the letters instead: {remedy}"


async def compile_letter_filter(condition: str | None) -> LetterFilter | None:
    """Return the predicate of a filter on letters; None if there is no filter."""
    return None if condition is None else await asyncio.to_thread(_matcher, condition)


def _matcher(condition: str) -> LetterFilter:
    # Imported here, in a thread: the filter compiler takes long to load.
    from millstream.protocol.filter.filter import matcher

    return matcher(condition)


async def process_letters(dlq: DeadLetterClient, act: Act | None, outcome: LetterPass, *, keep: bool) -> None:
    """Process every matching open letter, and close it unless `keep` is set; without an act, close many at a time."""
    await dlq.open()
    async with dlq.holding():
        await _process_letters(dlq, act, outcome, keep=keep)
    outcome.end(dlq)


async def redrive_letters(dlq: DeadLetterClient, outcome: LetterPass) -> None:
    """Redeliver every matching open letter through its own subscription, and close it; raise if no right allows any.

    The letters are collected first, so that messages are redelivered in the order of their offsets, not of their
    deaths: all of them, or `ROUND_MAX` at a time if there are more.
    """
    chosen: list[LeasedMessage] = []

    async def choose(_dlq: DeadLetterClient, letter: LeasedMessage) -> None:
        chosen.append(without_content(letter))

    await dlq.open()
    done = 0
    async with dlq.holding():
        while True:
            outcome.done = done
            await _process_letters(dlq, choose, outcome, keep=True, at_once=ROUND_MAX)
            chosen_now = sorted(chosen, key=_origin_key)
            chosen.clear()
            outcome.done = done
            for start in range(0, len(chosen_now), BATCH):
                if outcome.is_stopped:
                    break
                await _redrive_some(dlq, chosen_now[start : start + BATCH], outcome)
                outcome.on_progress(outcome.done)
            done = outcome.done
            if len(chosen_now) < ROUND_MAX or outcome.is_stopped:
                break
        await dlq.forget_closed()
    outcome.end(dlq)
    if dlq.not_authorized is not None and not outcome.done:
        raise dlq.not_authorized


async def _redrive_some(dlq: DeadLetterClient, letters: Sequence[LeasedMessage], outcome: LetterPass) -> None:
    outcome.in_progress = len(letters)
    reasons = await dlq.revive(letters)
    done = [letter for letter, reason in zip(letters, reasons, strict=True) if reason is None]
    outcome.uncertain += await dlq.close(done, are_revived=True)
    outcome.in_progress = 0
    outcome.done += len(done)
    _add(outcome.refused, [reason for reason in reasons if reason is not None])
    _add(outcome.revived, [headers_of(letter)["dlq-subscription"] for letter in done])


async def preview_redrive(dlq: DeadLetterClient, outcome: LetterPass) -> None:
    """Count the letters that a redrive would affect, by subscription and by reason; every letter stays open."""
    redrivable: dict[Queue, tuple[range, str]] = {}

    async def count(_dlq: DeadLetterClient, letter: LeasedMessage) -> None:
        origin = origin_of(letter)
        if origin is None:
            _add(outcome.refused, [NO_ORIGIN])
            return
        queue = origin.queue
        if queue not in redrivable:
            redrivable[queue] = await dlq.redrivable_in(queue)
        offsets, reason = redrivable[queue]
        if origin.letter.offset in offsets:
            _add(outcome.revived, [queue.subscription])
        else:
            _add(outcome.refused, [reason])

    await dlq.open()
    async with dlq.holding():
        await _process_letters(dlq, count, outcome, keep=True, is_preview=True)
    outcome.done = sum(outcome.revived.values())
    outcome.end(dlq)


def _origin_key(letter: LeasedMessage) -> tuple[str, str, int, int]:
    """Return a sort key: where the message came from."""
    origin = origin_of(letter)
    if origin is None:
        return "", "", 0, letter.record.offset
    return origin.queue.subscription, origin.queue.topic, origin.queue.partition, origin.letter.offset


def _add(counts: dict[str, int], reasons: Iterable[str]) -> None:
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1


async def _process_letters(
    dlq: DeadLetterClient,
    act: Act | None,
    outcome: LetterPass,
    *,
    keep: bool,
    at_once: int | None = None,
    is_preview: bool = False,
) -> None:
    """Act on matching letters, until there are no more, `limit` are done, or `at_once` were found in this pass.

    Each letter is closed as soon as it was acted on; without an act, those that were received together are.
    """
    skipped: list[LeasedMessage] = []
    handled = 0

    def missing() -> int:
        # A search leases more letters than it needs; other commands take no more than they use.
        left = BATCH if outcome.limit is None else outcome.limit - outcome.done
        if at_once is not None and handled >= at_once:
            return 0
        return BATCH if outcome.matches is not None and left > 0 else left

    async for letters in dlq.letters(missing):
        outcome.has_begun = True
        closing: list[LeasedMessage] = []
        for letter in letters:
            if outcome.is_stopped or (outcome.limit is not None and outcome.done + len(closing) >= outcome.limit):
                break
            if outcome.matches is not None and not outcome.matches(letter):
                outcome.unmatched += 1
                skipped.append(without_content(letter))
                continue
            if act is None:
                closing.append(letter)
                continue
            outcome.in_progress = 0 if keep else 1
            await act(dlq, letter)
            if not keep:
                outcome.uncertain += await dlq.close([letter])
            outcome.in_progress = 0
            outcome.done += 1
            outcome.selected += 1
            handled += 1
            if is_preview:
                skipped.append(without_content(letter))
        if closing:
            outcome.in_progress = len(closing)
            outcome.uncertain += await dlq.close(closing)
            outcome.in_progress = 0
            outcome.done += len(closing)
            outcome.selected += len(closing)
        if outcome.is_stopped:
            return
        if len(skipped) > SKIPPED_MAX:
            await dlq.skip(skipped)
            skipped.clear()
        if not keep or is_preview:
            outcome.on_progress(outcome.done)
