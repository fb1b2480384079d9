"""Messages between the broker and the process of a job's run: JSON lines through its pipes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, Final
from uuid import UUID

import msgspec

from millstream.broker.pipelines.report_board import PipelineReport
from millstream.core.errors import RequestTimedOut
from millstream.core.pipeline import PipelineKind

STORE_S: Final = 120.0
"""How long storing what a run takes may last."""
LOST: Final = 72
"""The exit code of an attempt whose group another one has taken over."""


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a run."""

    name: str
    kind: PipelineKind = PipelineKind.JOB
    """A job's program, or a transform whose statement calls functions."""
    pipeline_id: UUID
    overrides: dict[str, str]
    run: int
    attempt: int
    scheduled_ms: int
    pin: dict[str, Any] | None = None
    node: int = -1
    kafka: str
    lake: str
    folder: str
    master: str
    spark: dict[str, str] = {}
    packages: str = ""
    """The folder of the packages that the code needs."""
    access: dict[str, str] = {}
    """Options of the source that say how to sign in; a token only by the name of its file."""
    sample: int | None = None
    """In a dry run, how many messages of a partition are read."""
    log_level: str = "info"


class JobEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line from the process."""

    started: bool = False
    """Whether Spark has started and the code is about to run."""
    progress: dict[str, Any] | None = None
    pin: dict[str, Any] | None = None
    """The input that the run will process; the process waits until it is stored."""
    report: PipelineReport | None = None
    """The state of a transform."""
    succeeded: bool = False
    failed: str = ""
    fault: str = ""
    parked: bool = False
    """Whether another attempt would fail in the same way."""


class JobReply(msgspec.Struct, frozen=True, kw_only=True):
    """A line to the process: the input of its run is stored."""

    pinned: bool


class Pipes:
    """The pipes to the process that has started this one."""

    def __init__(self, commands: IO[bytes], events: IO[bytes], leave: Callable[[], None]) -> None:
        """Take the pipes; `leave` ends this process with all that it has started, once the other one is gone."""
        self._leave = leave
        self._commands = commands
        self._events = events
        self._lock = threading.Lock()
        self._replies: SimpleQueue[JobReply] = SimpleQueue()

    def take_order(self) -> JobOrder:
        """Read the order, and from then on notice when the other end is gone."""
        order = msgspec.json.decode(self._commands.readline(), type=JobOrder)
        threading.Thread(target=self._listen, name="read replies", daemon=True).start()
        return order

    def send(self, event: JobEvent) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._events.write(msgspec.json.encode(event) + b"\n")
            self._events.flush()

    def keep_pin(self, pin: Mapping[str, Any]) -> None:
        """Have it stored what the run takes; raise if that fails."""
        self.send(JobEvent(pin=dict(pin)))
        try:
            is_stored = self._replies.get(timeout=STORE_S).pinned
        except Empty:
            is_stored = False
        if not is_stored:
            raise RequestTimedOut("what the run takes could not be stored in the catalog; it is tried again later")

    def _listen(self) -> None:
        for line in self._commands:
            self._replies.put(msgspec.json.decode(line, type=JobReply))
        self._leave()
