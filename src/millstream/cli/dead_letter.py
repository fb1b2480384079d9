"""Dead letters as an operator works on them: counted, looked at, sent back, or put away.

A dead letter topic is a log, from which nothing is taken out. So the open letters are those that a subscription of
Millstream's own on that topic has not accepted: whoever sends a letter back, or puts it away, accepts it there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.model.errors import SubscriptionExists, UnknownGroup
from millstream.model.partitioner import partition_for_key
from millstream.model.subscription import ATTEMPTS, DEAD_LETTER_TOPIC, EARLIEST, LEASE, START
from millstream.records.record import Headers, NewRecord, encode_batch
from millstream.wire.subscriptions import LeasedMessage, SubscriptionClient

if TYPE_CHECKING:
    from millstream.wire.client import Client

PREFIX = "dlq-"
OWN_PREFIX = "__dlq/"
REDRIVEN = "dlq-redriven"
ACCEPT, RELEASE = 1, 2
BATCH = 500
LEASE_MS = 600_000
HELD_MAX = 100_000

Wanted = Callable[[LeasedMessage], bool]


class DeadLetterTopic(NamedTuple):
    """A dead letter topic, the subscriptions that write to it, and how many letters are open."""

    topic: str
    subscriptions: list[str]
    letters: int


class DeadLetterDesk:
    """Works on the letters of one dead letter topic."""

    def __init__(self, client: Client, topic: str, worker: str) -> None:
        self._client = client
        self._subscriptions = SubscriptionClient(client)
        self._topic = topic
        self._worker = worker
        self._name = OWN_PREFIX + topic

    async def open(self) -> None:
        """Begin to count the letters, if nobody has before."""
        settings = {START: EARLIEST, ATTEMPTS: "0", LEASE: str(LEASE_MS)}
        with suppress(SubscriptionExists):
            await self._subscriptions.create(self._name, [self._topic], settings)

    async def letters(self, limit: int) -> AsyncIterator[list[LeasedMessage]]:
        """The open letters, some at a time, each once; they are held until they are settled."""
        taken = 0
        while taken < limit:
            some = await self._subscriptions.receive(
                self._name, self._worker, max_records=min(BATCH, limit - taken), max_bytes=8 * 1024 * 1024
            )
            if not some:
                return
            taken += len(some)
            yield some

    async def settle(self, letters: list[LeasedMessage], verb: int) -> None:
        """Accept letters, or give them back."""
        for error in await self._subscriptions.settle(self._name, self._worker, letters, verb, delay_ms=0):
            if error is not None:
                raise error

    async def send_back(self, letter: LeasedMessage, to: str | None) -> str:
        """Publish a letter's message again, where it came from or elsewhere; says to which topic."""
        headers = headers_of(letter)
        topic = to or headers.get("dlq-topic")
        if not topic:
            raise CommandFailed(
                f"letter {letter.record.offset} does not say where it came from; name a topic with --to"
            )
        if to is None and headers.get("dlq-partition", "").isdigit():
            partition = int(headers["dlq-partition"])
        else:
            partition = await self._partition_for(topic, letter)
        times = int(headers[REDRIVEN]) if headers.get(REDRIVEN, "").isdigit() else 0
        kept: Headers = tuple(header for header in letter.record.headers if not header[0].startswith(PREFIX))
        record = NewRecord(
            letter.record.key,
            letter.record.value,
            (*kept, (REDRIVEN, str(times + 1).encode())),
            letter.record.timestamp_ms,
        )
        await self._client.produce(topic, partition, encode_batch([record]))
        return topic

    async def _partition_for(self, topic: str, letter: LeasedMessage) -> int:
        """Where another topic takes a letter's message: by its key, as Kafka's clients have it."""
        found = (await self._client.metadata([topic], create=True)).topics.get(topic)
        partitions = 1 if found is None else max(1, len(found.partitions))
        key = letter.record.key
        return letter.record.offset % partitions if key is None else partition_for_key(key, partitions)


def headers_of(letter: LeasedMessage) -> dict[str, str]:
    """The headers of a letter as text; the last one of a name counts."""
    return {name: (value or b"").decode(errors="replace") for name, value in letter.record.headers}


async def dead_letter_topics(client: Client) -> list[DeadLetterTopic]:
    """Every topic that is declared as a dead letter topic."""
    told = await SubscriptionClient(client).describe()
    writers: dict[str, list[str]] = {}
    opened: dict[str, int] = {}
    for one in told:
        topic = one["settings"].get(DEAD_LETTER_TOPIC)
        if topic:
            writers.setdefault(topic, []).append(one["name"])
        if one["name"].startswith(OWN_PREFIX):
            opened[one["name"].removeprefix(OWN_PREFIX)] = sum(queue["backlog"] for queue in one["queues"])
    return [
        DeadLetterTopic(topic, names, opened.get(topic, await _stored(client, topic)))
        for topic, names in sorted(writers.items())
    ]


async def find_topic(client: Client, name: str) -> str:
    """The dead letter topic of this name, or of the subscription of this name."""
    known = await dead_letter_topics(client)
    if any(one.topic == name for one in known):
        return name
    for one in known:
        if name in one.subscriptions:
            return one.topic
    with suppress(UnknownGroup):
        (told,) = await SubscriptionClient(client).describe([name])
        raise CommandFailed(f"subscription {told['name']!r} has no dead letter topic", ExitCode.NOT_FOUND)
    raise CommandFailed(
        f"no subscription is called {name!r} or has it as its dead letter topic; see millstream dlq list",
        ExitCode.NOT_FOUND,
    )


def matcher(text: str | None) -> Wanted:
    """Whether a letter is meant; a condition in the language of subscriptions' filters."""
    if text is None:
        return lambda _letter: True
    from millstream.subscriptions.filter.batch import RecordBatch
    from millstream.subscriptions.filter.filter import compile_filter

    condition = compile_filter(text)

    def matches(letter: LeasedMessage) -> bool:
        batch: Any = RecordBatch([letter.record], topic=letter.topic, partition=letter.partition, uses=condition.uses)
        return bool(condition.matches(batch)[0])

    return matches


async def _stored(client: Client, topic: str) -> int:
    """How many letters a topic holds that nobody has worked on yet."""
    metadata = await client.metadata([topic])
    found = metadata.topics.get(topic)
    if found is None:
        return 0
    partitions = list(found.partitions)
    first = await client.list_offsets(topic, dict.fromkeys(partitions, -2))
    end = await client.list_offsets(topic, dict.fromkeys(partitions, -1))
    return sum(end[index].offset - first[index].offset for index in partitions)
