"""The history of transactions: the actions of programs and the reads of readers. `transaction_check.py` checks it.

history = TransactionHistory()
history.add(TransactionBegun("worker-1.2", 7, "group", "in", [Input(0, 40, 42)], [Output("out", 3, 0, 40)], at=...))
history.add(EndRequested("worker-1.2", 7, commit=True, at=...))    # before the client commits
history.add(TransactionEnded("worker-1.2", 7, committed=True, at=...))    # when the client says that it is done
history.add(ConsumerStarted("audit", committed=True))          # a reader, and its isolation level
history.add(Positioned("audit", "out", 3, 0))                  # it was assigned, or sought
history.add(Polled("audit", "out", 3, 41, "worker-1.2", 7, 0, at=...))
history.add(OffsetObserved("offsets", "group", "in", 0, 42, at=...))  # a committed offset, as an observer saw it
report = check(history, complete=["audit"])                     # "audit" has read everything to the end

In a file, events are JSON objects, one per line. A transaction is its producer (one life of a program) and a number
that the producer counts up; a message is its transaction and its index among the outputs. Everything that a transaction
will write is recorded before it begins. Times are those of one clock for all processes, in nanoseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec


class Input(msgspec.Struct, frozen=True, array_like=True):
    """The input of a transaction from a partition of its source: the offsets from `first` to `next`, exclusive."""

    partition: int
    first: int
    next: int


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A message of a transaction: its target, and the message of the source that it was made from."""

    topic: str
    partition: int
    source_partition: int
    source_offset: int


class TransactionBegun(msgspec.Struct, frozen=True, tag="begun", tag_field="event"):
    """A transaction is about to begin. Of one message of the source it writes at most one to each topic."""

    producer: str
    number: int
    group: str
    source: str
    inputs: list[Input]
    outputs: list[Output]
    at: int


class EndRequested(msgspec.Struct, frozen=True, tag="end_requested", tag_field="event"):
    """The program is about to ask its client to commit or abort."""

    producer: str
    number: int
    commit: bool
    at: int


class TransactionEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="event"):
    """The client has reported that the transaction is committed or aborted."""

    producer: str
    number: int
    committed: bool
    at: int


class ConsumerStarted(msgspec.Struct, frozen=True, tag="consumer_started", tag_field="event"):
    """A reader starts, of committed data or of everything."""

    consumer: str
    committed: bool


class Positioned(msgspec.Struct, frozen=True, tag="positioned", tag_field="event"):
    """A reader continues from here; offset -1 means from its next poll."""

    consumer: str
    topic: str
    partition: int
    offset: int = -1


class Polled(msgspec.Struct, frozen=True, tag="polled", tag_field="event"):
    """A reader received a message."""

    consumer: str
    topic: str
    partition: int
    offset: int
    producer: str
    number: int
    index: int
    at: int


class OffsetObserved(msgspec.Struct, frozen=True, tag="offset_observed", tag_field="event"):
    """An observer fetched the committed offset of a group."""

    observer: str
    group: str
    topic: str
    partition: int
    offset: int
    at: int


Event: TypeAlias = (
    TransactionBegun | EndRequested | TransactionEnded | ConsumerStarted | Positioned | Polled | OffsetObserved
)

_DECODER = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    event: Event = _DECODER.decode(line)
    return event


Key = tuple[str, int]
"""A transaction: its producer and its number."""

Message = tuple[str, int, int]
"""A message: its transaction and its index among the outputs."""

NOT_A_MESSAGE = -1
"""In the column of messages: the reader was positioned."""


@dataclass(slots=True)
class Transaction:
    """The actions of a program in one transaction, as far as it got."""

    begun: TransactionBegun
    end_requested: list[tuple[bool, int]] = field(default_factory=list)
    """Whether to commit, and when, each time."""
    committed: bool | None = None
    """How it ended according to the client; None if unknown."""

    @property
    def commit_requested_at(self) -> int | None:
        """When it was first asked to commit."""
        return min((at for commit, at in self.end_requested if commit), default=None)

    @property
    def is_aborted(self) -> bool:
        """Whether it cannot have committed: the client reported it, or was only asked to abort."""
        return self.committed is False or (bool(self.end_requested) and self.commit_requested_at is None)

    @property
    def may_be_committed(self) -> bool:
        """Whether it has committed, or may have."""
        return not self.is_aborted and self.commit_requested_at is not None

    def output(self, index: int) -> Output | None:
        """Return one of its messages, if it has that many."""
        return self.begun.outputs[index] if 0 <= index < len(self.begun.outputs) else None


class Polls:
    """The messages that a reader received from one partition, in order, in columns."""

    def __init__(self) -> None:
        self._offsets, self._messages, self._times = array("q"), array("q"), array("q")

    def add(self, offset: int, message: int, at: int) -> None:
        """Add one poll, or a position."""
        self._offsets.append(offset)
        self._messages.append(message)
        self._times.append(at)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self._offsets, self._messages, self._times, strict=True)


@dataclass(slots=True)
class TransactionHistory:
    """The actions of programs and the reads of readers. Polls are kept in columns, everything else as events."""

    transactions: dict[Key, Transaction] = field(default_factory=dict)
    readers: dict[str, bool] = field(default_factory=dict)
    polls: dict[tuple[str, str, int], Polls] = field(default_factory=dict)
    observed_offsets: list[OffsetObserved] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    _numbers: dict[Message, int] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add one event; raise `ValueError` for one of an unknown transaction or reader."""
        match event:
            case TransactionBegun():
                self.transactions[event.producer, event.number] = Transaction(event)
            case EndRequested():
                self._transaction(event).end_requested.append((event.commit, event.at))
            case TransactionEnded():
                self._transaction(event).committed = event.committed
            case ConsumerStarted():
                self.readers[event.consumer] = event.committed
            case Positioned():
                self._polls_of(event).add(event.offset, NOT_A_MESSAGE, 0)
            case Polled():
                message = self._number((event.producer, event.number, event.index))
                self._polls_of(event).add(event.offset, message, event.at)
            case OffsetObserved():
                self.observed_offsets.append(event)

    def events(self) -> Iterator[Event]:
        """Return everything recorded, as events of a file."""
        for (producer, number), transaction in self.transactions.items():
            yield transaction.begun
            for commit, at in transaction.end_requested:
                yield EndRequested(producer, number, commit, at)
            if transaction.committed is not None:
                yield TransactionEnded(producer, number, transaction.committed, transaction.begun.at)
        yield from (ConsumerStarted(consumer, committed) for consumer, committed in self.readers.items())
        for place, polls in self.polls.items():
            for offset, message, at in polls:
                positioned = message == NOT_A_MESSAGE
                yield Positioned(*place, offset) if positioned else Polled(*place, offset, *self.messages[message], at)
        yield from self.observed_offsets

    def save(self, path: Path) -> None:
        """Write one JSON object per line."""
        encoder = msgspec.json.Encoder()
        with path.open("wb") as file:
            for event in self.events():
                file.write(encoder.encode(event) + b"\n")

    @classmethod
    def load(cls, path: Path) -> TransactionHistory:
        """Read what `save` wrote; raise `ValueError` with the number of the line that cannot be read."""
        history = cls()
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        history.add(decode(line))
                except (msgspec.MsgspecError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
        return history

    def _transaction(self, event: EndRequested | TransactionEnded) -> Transaction:
        found = self.transactions.get((event.producer, event.number))
        if found is None:
            raise ValueError(f"transaction {event.number} of {event.producer} has not begun")
        return found

    def _polls_of(self, event: Positioned | Polled) -> Polls:
        place = (event.consumer, event.topic, event.partition)
        polls = self.polls.get(place)
        if polls is None:
            if event.consumer not in self.readers:
                raise ValueError(f"reader {event.consumer} was never started")
            polls = self.polls[place] = Polls()
        return polls

    def _number(self, message: Message) -> int:
        found = self._numbers.get(message)
        if found is None:
            found = self._numbers[message] = len(self.messages)
            self.messages.append(message)
        return found
