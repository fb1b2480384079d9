"""The events of a history of transactions, as programs and readers record them: one JSON object per line.

A transaction is its producer (one life of a program) and a number that the producer counts up; a message is its
transaction and its index among the outputs. Everything that a transaction will write is recorded before it begins.
Times are those of one clock for all processes, in nanoseconds.
"""

from __future__ import annotations

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
