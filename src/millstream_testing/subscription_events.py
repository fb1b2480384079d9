"""The journal of the workers of a subscription trial, one line for each event, written before they continue.

A worker records what it is about to do before it does it, so the file is correct whenever the worker is killed:
whether a receive or a settlement without a response was carried out is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec


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
