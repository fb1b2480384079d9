"""The history of a subscription's workers, merged from their journals.

Times are those of one machine, in milliseconds. A message was leased at some time between the worker's request and its
response. Millstream's own client also gets the deadline of the lease, which gives the exact time unless clocks are
stepped.

A worker writes one line for each event to its journal before it continues. It records what it is about to do before it
does it, so the file is correct whenever the worker is killed: whether a receive or a settlement without a response was
carried out is unknown.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from millstream.core.subscription import Verb


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """A message as a worker received it."""

    partition: int
    offset: int
    attempt: int
    deadline_ms: int
    """When the lease ends, by the clock of its node; 0 where the client does not report it."""
    checksum: int
    """Of its value."""
    node: int = -1
    """The node that leased it, where the client reports it."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    worker: str
    subscription: str
    at_ms: int


class ReceiveSent(_Event, frozen=True, kw_only=True):
    """A worker requests messages."""

    call: int
    messages_max: int
    """The requested number."""


class ReceiveCompleted(_Event, frozen=True, kw_only=True):
    """The request got a response."""

    call: int
    from_ms: int
    """The messages were not leased before this time."""
    messages: list[Leased]


class ReceiveFailed(_Event, frozen=True, kw_only=True):
    """The request failed, and the worker no longer waits for it."""

    call: int


class SettleSent(_Event, frozen=True, kw_only=True):
    """A worker settles messages."""

    number: int
    verb: int
    positions: list[tuple[int, int, int]]
    """Partition, offset and attempt of each."""
    delay_ms: int | None = None
    node: int = -1
    """The node that the request was sent to, where the client reports it."""


class SettleCompleted(_Event, frozen=True, kw_only=True):
    """The outcome for some or all of the messages."""

    number: int
    positions: list[tuple[int, int]]
    taken: bool


class WorkerLeft(_Event, frozen=True, kw_only=True):
    """A worker leaves, perhaps with unsettled messages."""


Event = ReceiveSent | ReceiveCompleted | ReceiveFailed | SettleSent | SettleCompleted | WorkerLeft

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    return _decoder.decode(line)


def now_ms() -> int:
    """Return the wall-clock time."""
    return int(time.time() * 1000)


class JournalFile:
    """The file of one process; threads may write at the same time."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._encoder = msgspec.json.Encoder()

    def record(self, event: Event) -> None:
        """Write an event so that it survives a kill of the process."""
        os.write(self._file, self._encoder.encode(event) + b"\n")


class WorkerJournal:
    def __init__(self, journal_file: JournalFile, subscription: str, worker: str) -> None:
        self.worker = worker
        self.subscription = subscription
        self._journal_file = journal_file
        self._call = 0
        self._number = 0

    def receive_sent(self, messages_max: int) -> int:
        """Record a request before it is sent; return the time."""
        self._call += 1
        at_ms = now_ms()
        self._record(ReceiveSent, at_ms=at_ms, call=self._call, messages_max=messages_max)
        return at_ms

    def receive_completed(self, from_ms: int, messages: Sequence[Leased]) -> None:
        self._record(ReceiveCompleted, call=self._call, from_ms=from_ms, messages=list(messages))

    def receive_failed(self) -> None:
        self._record(ReceiveFailed, call=self._call)

    def settle_sent(
        self, verb: int, positions: Sequence[tuple[int, int, int]], *, delay_ms: int | None = None, node: int = -1
    ) -> int:
        """Record a settlement before it is sent; return its number."""
        self._number += 1
        self._record(
            SettleSent, number=self._number, verb=verb, positions=list(positions), delay_ms=delay_ms, node=node
        )
        return self._number

    def settle_completed(self, number: int, positions: Sequence[tuple[int, int]], *, taken: bool) -> None:
        self._record(SettleCompleted, number=number, positions=list(positions), taken=taken)

    def worker_left(self) -> None:
        self._record(WorkerLeft)

    def _record(self, kind: type[Event], **fields: object) -> None:
        about = {"worker": self.worker, "subscription": self.subscription, "at_ms": now_ms()}
        self._journal_file.record(msgspec.convert({"event": kind.__name__.lower(), **about, **fields}, Event))


class Position(NamedTuple):
    """A message, by its position in the topic."""

    partition: int
    offset: int


class Published(NamedTuple):
    """A message in the final contents of the topic."""

    key: bytes
    due_ms: int
    """The earliest time of delivery; 0 if it is not delayed."""
    checksum: int
    """Of its value."""
    sent_ms: int = 0
    """When it was published."""


class Delivery(NamedTuple):
    """A worker received a message."""

    position: Position
    worker: str
    attempt: int
    from_ms: int
    """The earliest time of the lease."""
    to_ms: int
    """The latest time of the lease."""
    deadline_ms: int
    """When the lease ends; 0 if unknown, as for Kafka's clients."""
    checksum: int
    node: int = -1
    """The node that leased it; -1 if unknown."""


class Settlement(NamedTuple):
    """A worker settled a message."""

    position: Position
    worker: str
    attempt: int
    verb: Verb
    sent_ms: int
    response_ms: int | None
    """None if no response arrived: whether it was applied is unknown."""
    taken: bool
    delay_ms: int | None = None
    node: int = -1
    """The node that the request was sent to."""

    @property
    def is_certain(self) -> bool:
        return self.taken and self.response_ms is not None

    @property
    def is_possible(self) -> bool:
        """Whether it may have been applied."""
        return self.taken or self.response_ms is None


class Call(NamedTuple):
    """A worker requested messages."""

    worker: str
    requested_ms: int
    ended_ms: int | None
    """None if it was killed before a response arrived."""
    messages_max: int
    received: int
    responded: bool


class Span(NamedTuple):
    """A period of time."""

    begin_ms: int
    end_ms: int


class Spans:
    """Periods of time, which may overlap."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans: list[Span] = []
        for span in sorted(spans):
            if self._spans and span.begin_ms <= self._spans[-1].end_ms:
                last = self._spans.pop()
                self._spans.append(Span(last.begin_ms, max(last.end_ms, span.end_ms)))
            else:
                self._spans.append(span)
        self._ends = [span.end_ms for span in self._spans]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        return self.next_ms(begin_ms) <= end_ms

    def next_ms(self, at_ms: int) -> float:
        """Return when the first period that has not ended at a time begins, which may be earlier."""
        position = bisect_left(self._ends, at_ms)
        return self._spans[position].begin_ms if position < len(self._spans) else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """The declared delivery guarantees of a subscription."""

    delivery: str
    ordered: bool
    attempts: int
    lease_ms: int


@dataclass(slots=True)
class History:
    """Everything that workers of one subscription saw."""

    deliveries: list[Delivery] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    last_ms: dict[str, int] = field(default_factory=dict)
    """When each worker last recorded something before it left."""


class GroundTruth(NamedTuple):
    """The final contents of the topics, and the faults of the nodes."""

    expected: Mapping[Position, Published]
    """The messages of the topic that match the filter."""
    dead_letters: Counter[Position]
    """How often each is in the dead letter topic."""
    disturbed: Spans
    """When nodes had faults and had not recovered, or the leader of a partition changed."""
    stepped: Spans
    """When the clock of a node was wrong."""
    is_single_node: bool = False
    """Whether there is only one node, so that no other can take over."""


def histories(events: Iterable[Event]) -> dict[str, History]:
    """Merge the journals of workers, by subscription; the events of each worker are in order."""
    found: dict[str, History] = defaultdict(History)
    open_calls: dict[tuple[str, str], ReceiveSent] = {}
    settle_completed: dict[tuple[str, str, int, Position], tuple[int, bool]] = {}
    settle_sent: list[SettleSent] = []
    worker_left: set[tuple[str, str]] = set()
    for event in events:
        history = found[event.subscription]
        worker = event.subscription, event.worker
        if worker not in worker_left:
            history.last_ms[event.worker] = max(event.at_ms, history.last_ms.get(event.worker, 0))
        if isinstance(event, WorkerLeft):
            worker_left.add(worker)
        if isinstance(event, ReceiveSent):
            open_calls[worker] = event
        elif isinstance(event, ReceiveCompleted):
            history.deliveries += _deliveries(event)
            history.calls.append(_call(open_calls.pop(worker), event.at_ms, len(event.messages), responded=True))
        elif isinstance(event, ReceiveFailed | WorkerLeft):
            if worker in open_calls:
                history.calls.append(_call(open_calls.pop(worker), event.at_ms, 0, responded=False))
        elif isinstance(event, SettleSent):
            settle_sent.append(event)
        else:
            settle_completed |= {
                (*worker, event.number, Position(*position)): (event.at_ms, event.taken) for position in event.positions
            }
    for (subscription, _), call in open_calls.items():
        found[subscription].calls.append(_call(call, None, 0, responded=False))
    for request in settle_sent:
        found[request.subscription].settlements += _settlements(request, settle_completed)
    return dict(found)


def _deliveries(event: ReceiveCompleted) -> list[Delivery]:
    return [
        Delivery(
            Position(message.partition, message.offset),
            event.worker,
            message.attempt,
            event.from_ms,
            event.at_ms,
            message.deadline_ms,
            message.checksum,
            message.node,
        )
        for message in event.messages
    ]


def _call(receive_sent: ReceiveSent, ended_ms: int | None, received: int, *, responded: bool) -> Call:
    return Call(receive_sent.worker, receive_sent.at_ms, ended_ms, receive_sent.messages_max, received, responded)


def _settlements(
    settle_sent: SettleSent, settle_completed: Mapping[tuple[str, str, int, Position], tuple[int, bool]]
) -> Iterator[Settlement]:
    for partition, offset, attempt in settle_sent.positions:
        position = Position(partition, offset)
        response_ms, taken = settle_completed.get(
            (settle_sent.subscription, settle_sent.worker, settle_sent.number, position), (None, False)
        )
        times = settle_sent.at_ms, response_ms
        yield Settlement(
            position,
            settle_sent.worker,
            attempt,
            Verb(settle_sent.verb),
            *times,
            taken,
            settle_sent.delay_ms,
            settle_sent.node,
        )


def summary(checked: Collection[History], truths: Collection[GroundTruth]) -> str:
    verbs = Counter(settlement.verb.name.lower() for history in checked for settlement in history.settlements)
    unknown = sum(settlement.response_ms is None for history in checked for settlement in history.settlements)
    refused = sum(
        settlement.response_ms is not None and not settlement.taken
        for history in checked
        for settlement in history.settlements
    )
    again = sum(delivery.attempt > 1 for history in checked for delivery in history.deliveries)
    shared = sum(not delivery.deadline_ms for history in checked for delivery in history.deliveries)
    dead_letters = sum(truth.dead_letters.total() for truth in truths)
    settled = ", ".join(f"{count} {verb}" for verb, count in sorted(verbs.items()))
    return (
        f"{sum(len(history.deliveries) for history in checked)} deliveries ({again} not the first, {shared} to share "
        f"consumers), {settled}; {refused} refused, {unknown} without a response; {dead_letters} dead letters"
    )
