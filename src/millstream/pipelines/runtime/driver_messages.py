"""Messages between the broker and its Spark processes, the driver and the runs of jobs: JSON lines through pipes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, Final

import msgspec

from millstream.core.errors import RequestTimedOut
from millstream.core.pipeline import Pipeline
from millstream.protocol.private.pipeline_messages import PipelineReport

DRIVER_CLIENT: Final = "pipelines-node-"
"""The prefix of drivers' client ids; the node id follows."""
SPARK_VARIABLE: Final = "_MILLSTREAM_SPARK"
"""Holds the settings of Spark, which may contain credentials: every user can see the arguments of a process."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's options for the process."""

    kafka: str
    node: int
    authorizes: bool = False
    """Whether pipelines have to act with the rights of their owners."""
    lake: str
    folder: str
    master: str
    memory: str
    spark: dict[str, str]
    log: str
    """The file of Spark's output."""
    is_spare: bool = False
    """Whether this is a spare driver, which has time to warm up."""
    log_level: str
    log_format: str

    @property
    def argument(self) -> str:
        """The options for the driver's command line."""
        return msgspec.json.encode(msgspec.structs.replace(self, spark={})).decode()

    @property
    def environment(self) -> dict[str, str]:
        return {SPARK_VARIABLE: msgspec.json.encode(self.spark).decode()}

    @classmethod
    def take(cls) -> Options:
        """Read the options of this process, and remove those that its children must not inherit."""
        options = msgspec.json.decode(sys.argv[1], type=cls)
        spark = msgspec.json.decode(os.environ.pop(SPARK_VARIABLE, "{}"), type=dict[str, str])
        return msgspec.structs.replace(options, spark=spark)


class AssignedPipeline(msgspec.Struct, frozen=True):
    pipeline: Pipeline
    attempt: int = 0
    """A changed number restarts a parked pipeline."""
    is_suspect: bool = False
    """Whether it was running when a driver died, so that it never runs together with another suspect."""


class DriverCommand(msgspec.Struct, frozen=True):
    """A line from the broker: every pipeline to run."""

    pipelines: list[AssignedPipeline]


class DriverEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line to the broker: reports, or the start or end of a pipeline's step."""

    reports: list[PipelineReport] | None = None
    begun: str = ""
    ended: str = ""
    has_succeeded: bool = False
    """Whether the step that ended succeeded."""
    failed: str = ""
    """The reason why the driver cannot work, or has to be replaced."""
    stuck: str = ""
    """The pipeline that caused it, if there is one."""


STORE_S: Final = 120.0
"""How long storing the input of a run may take."""
LOST: Final = 72
"""The exit code of an attempt whose group another one has taken over."""


ROWS_READ: Final = "rows read"
LAG: Final = "lag"
"""Entries of a run's progress: the rows that its streaming queries have read so far, and their lag."""


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a run."""

    pipeline: Pipeline
    """A job, or a transform whose statement calls functions."""
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
    """Options of the source with the credentials; a token is given by the name of its file."""
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


class JobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A line to the process: the input of its run is stored."""

    pinned: bool


class EventWriter:
    """Writes whole lines to the broker, from any thread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: DriverEvent | JobEvent) -> None:
        with self._lock, suppress(OSError, ValueError):
            # A broker that is gone has closed the other pipe too, which ends this process.
            self._stream.write(msgspec.json.encode(event) + b"\n")
            self._stream.flush()


class Pipes:
    """The pipes to the process that has started this one."""

    def __init__(self, commands: IO[bytes], events: IO[bytes], leave: Callable[[], None]) -> None:
        """Use these pipes; `leave` ends this process and its children once the other process has ended."""
        self._leave = leave
        self._commands = commands
        self.send: Callable[[JobEvent], None] = EventWriter(events).send
        self._responses: SimpleQueue[JobResponse] = SimpleQueue()

    def take_order(self) -> JobOrder:
        """Read the order, and from then on detect when the other process has ended."""
        order = msgspec.json.decode(self._commands.readline(), type=JobOrder)
        threading.Thread(target=self._listen, name="read responses", daemon=True).start()
        return order

    def keep_pin(self, pin: Mapping[str, Any]) -> None:
        """Store which messages the run takes; raise if that fails."""
        self.send(JobEvent(pin=dict(pin)))
        try:
            is_stored = self._responses.get(timeout=STORE_S).pinned
        except Empty:
            is_stored = False
        if not is_stored:
            raise RequestTimedOut("the input of the run could not be stored in the catalog; it is retried later")

    def _listen(self) -> None:
        for line in self._commands:
            self._responses.put(msgspec.json.decode(line, type=JobResponse))
        self._leave()
