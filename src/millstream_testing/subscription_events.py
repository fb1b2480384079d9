"""The journal of the workers of a subscription trial, one line for each event, written before they continue.

A worker records what it is about to do before it does it, so the file is true whenever the worker is killed: a
receive or a settlement without a response may have happened, or not.
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


class _Note(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    worker: str
    subscription: str
    at_ms: int


class ReceiveSent(_Note, frozen=True, kw_only=True):
    """A worker requests messages."""

    call: int
    wanted: int
    """The requested number."""


class ReceiveCompleted(_Note, frozen=True, kw_only=True):
    """The request got a response."""

    call: int
    from_ms: int
    """The messages were not leased before this time."""
    messages: list[Leased]


class ReceiveFailed(_Note, frozen=True, kw_only=True):
    """The request failed, and the worker no longer waits for it."""

    call: int


class SettleSent(_Note, frozen=True, kw_only=True):
    """A worker settles messages."""

    number: int
    verb: int
    places: list[tuple[int, int, int]]
    """Partition, offset and attempt of each."""
    delay_ms: int | None = None
    node: int = -1
    """The node that the request was sent to, where the client reports it."""


class SettleCompleted(_Note, frozen=True, kw_only=True):
    """The outcome for some or all of the messages."""

    number: int
    places: list[tuple[int, int]]
    taken: bool


class WorkerLeft(_Note, frozen=True, kw_only=True):
    """A worker leaves, and may leave messages behind."""


Event = ReceiveSent | ReceiveCompleted | ReceiveFailed | SettleSent | SettleCompleted | WorkerLeft

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    """Read one line."""
    return _decoder.decode(line)


def now_ms() -> int:
    """Return the wall-clock time."""
    return int(time.time() * 1000)


class Notebook:
    """The file of one process; threads may write at the same time."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._encoder = msgspec.json.Encoder()

    def note(self, event: Event) -> None:
        """Write an event; it survives a kill of the process."""
        os.write(self._file, self._encoder.encode(event) + b"\n")


class WorkerJournal:
    """The journal of one worker of one subscription."""

    def __init__(self, notebook: Notebook, subscription: str, worker: str) -> None:
        self.worker = worker
        self.subscription = subscription
        self._notebook = notebook
        self._call = 0
        self._number = 0

    def receive_sent(self, wanted: int) -> int:
        """Record a request before it is sent; return when it began."""
        self._call += 1
        at_ms = now_ms()
        self._note(ReceiveSent, at_ms=at_ms, call=self._call, wanted=wanted)
        return at_ms

    def receive_completed(self, from_ms: int, messages: Sequence[Leased]) -> None:
        self._note(ReceiveCompleted, call=self._call, from_ms=from_ms, messages=list(messages))

    def receive_failed(self) -> None:
        self._note(ReceiveFailed, call=self._call)

    def settle_sent(
        self, verb: int, places: Sequence[tuple[int, int, int]], *, delay_ms: int | None = None, node: int = -1
    ) -> int:
        """Record a settlement before it is sent; return its number."""
        self._number += 1
        self._note(SettleSent, number=self._number, verb=verb, places=list(places), delay_ms=delay_ms, node=node)
        return self._number

    def settle_completed(self, number: int, places: Sequence[tuple[int, int]], *, taken: bool) -> None:
        """Record the response to a settlement."""
        self._note(SettleCompleted, number=number, places=list(places), taken=taken)

    def worker_left(self) -> None:
        """Record that the worker leaves."""
        self._note(WorkerLeft)

    def _note(self, kind: type[Event], **fields: object) -> None:
        about = {"worker": self.worker, "subscription": self.subscription, "at_ms": now_ms()}
        self._notebook.note(msgspec.convert({"event": kind.__name__.lower(), **about, **fields}, Event))
