"""The API of a job's code: the second argument of `run(spark, millstream)`.

A run is repeated until it has succeeded, on any node. So that nothing it writes appears twice and nothing is left out,
the messages it takes are pinned before the first of them is read, and everything it writes is identified by their
batch: a repeated run takes the same messages and skips what is already written. The batch is done when the offsets of
the job's group are committed, which happens when the run has succeeded.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import module_from_spec, spec_from_loader
from linecache import cache as _source_lines
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from millstream.core.errors import InvalidRequest, NotFound
from millstream.core.job import ENTRY
from millstream.core.pipeline import LATEST, JobSettings, named_texts
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.options import BROKERS, read_options
from millstream.pipelines.source.ranges import admitted, commit_offsets, stable_offsets
from millstream.protocol.wire.group_offsets import GroupMember

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from millstream.pipelines.source.link import Link

FORMAT: Final = "millstream"
CLIENT_ID: Final = "millstream-job"
APPLICATION_PREFIX: Final = "job-"
"""The prefix of the names by which the coordinator identifies the writes of jobs."""

Pin = dict[str, Any]
"""The messages that a run takes: `{"batch": number, "topics": {topic: {partition: [start, end]}}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The driver's side of a run."""

    spark: SparkSession
    link: Link
    brokers: str
    access: Access = NO_ACCESS
    lake: str
    folder: str
    name: str
    pipeline_id: UUID
    group: str
    settings: JobSettings
    run: int
    attempt: int
    scheduled_ms: int
    pin: Pin | None = None
    """The messages that an earlier attempt, or a failed run, has taken."""
    member: Callable[[], GroupMember] = GroupMember
    keep_pin: Callable[[Pin], None] = lambda _pin: None
    """Stores durably which messages are taken, before they are read."""
    report: Callable[[Mapping[str, Any]], None] = lambda _progress: None
    is_dry: bool = False


@dataclass(slots=True)
class _WrittenNames:
    names: set[str] = field(default_factory=set)
    streams: dict[str, StreamingQuery] = field(default_factory=dict)


class JobApi:
    """The second argument of `run`."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._pin: Pin = context.pin or {"batch": context.run, "topics": {}}
        self._written = _WrittenNames()
        self._progress: dict[str, Any] = {}
        self._connecting = {BROKERS: context.brokers, **context.access.as_options()}
        self.log = logging.getLogger(f"job.{context.name}")
        """A logger whose lines `millstream pipeline logs` shows; so does everything that is printed."""

    # -- which run this is ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self._context.name

    @property
    def run(self) -> int:
        """The number of the run; attempts at the same run share it."""
        return self._context.run

    @property
    def attempt(self) -> int:
        """1 for the first attempt at the run."""
        return self._context.attempt

    @property
    def scheduled(self) -> datetime:
        """The time for which the run was due, in UTC."""
        return datetime.fromtimestamp(self._context.scheduled_ms / 1000, UTC)

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters given with `--param`."""
        return named_texts("parameters", self._context.settings.parameters)

    @property
    def is_dry_run(self) -> bool:
        """Whether nothing is written and only a sample is read."""
        return self._context.is_dry

    # -- reading --------------------------------------------------------------------------------------------

    def read(self, *topics: str, **options: object) -> DataFrame:
        """Return all messages of topics; options are those of `format("millstream")`."""
        return self._load(self._context.spark.read.format(FORMAT), topics, options)

    def read_stream(self, *topics: str, **options: object) -> DataFrame:
        """Return a stream of the messages of topics, from the first on unless `startingOffsets` says otherwise."""
        start = {"startingOffsets": self._context.settings.start}
        return self._load(self._context.spark.readStream.format(FORMAT), topics, {**start, **options})

    def new_messages(self, *topics: str, **options: object) -> DataFrame:
        """Return the messages that no successful run has taken yet.

        They are taken when this run succeeds. Until then every attempt, and the next run if this one fails permanently,
        takes exactly the same ones.
        """
        _check_topics(topics)
        context, pinned = self._context, self._pin["topics"]
        missing = [topic for topic in topics if topic not in pinned]
        if missing:
            pinned.update(self._ranges(missing))
            context.keep_pin(self._pin)
        ends: list[dict[str, dict[str, int]]] = [
            {topic: {number: both[at] for number, both in pinned[topic].items()} for topic in topics} for at in (0, 1)
        ]
        range_options = {"startingOffsets": json.dumps(ends[0]), "endingOffsets": json.dumps(ends[1])}
        # Partitions that were added since are left to the next run.
        range_options["assign"] = json.dumps({topic: sorted(map(int, pinned[topic])) for topic in topics})
        return self._load(context.spark.read.format(FORMAT), (), {**options, **range_options})

    def table(self, topic: str) -> DataFrame:
        """Return the lake table that a topic is landed in, or the table at a folder or URL."""
        from millstream.pipelines.jobs.transform.prepared_query import rows_of
        from millstream.pipelines.lake.storage import Storage

        place, format_name = self._place(topic)
        storage = Storage.reached_from_here(place)
        if format_name == "parquet":
            return self._context.spark.read.parquet(storage.url)
        return rows_of(self._context.spark, storage, storage.table())[0]

    # -- writing --------------------------------------------------------------------------------------------

    def write(self, frame: DataFrame, topic: str | None = None, *, name: str = "", **options: object) -> None:
        """Write rows to a topic, or to the topics that they name, atomically and once per batch.

        Give each write of a run its own `name` if several go to the same topic.
        """
        name = name or topic or "rows"
        if name in self._written.names:
            raise InvalidRequest(f"this run has already written {name!r}; give each write its own name")
        self._written.names.add(name)
        known = {"txnAppId": self.application(name), "txnVersion": self._pin["batch"]}
        write_options = {**self._connecting, "topic": topic, **known, **options}
        writer = frame.write.format(FORMAT).mode("append")
        for option, value in write_options.items():
            if value is not None:
                writer = writer.option(option, cast("Any", value))
        writer.save()
        self.report(**{f"written to {name}": "done"})

    def write_stream(
        self, frame: DataFrame, topic: str | None = None, *, name: str = "", trigger: str = "", **options: object
    ) -> StreamingQuery:
        """Start writing a stream to a topic, exactly once; return the query, for `run` to return.

        `trigger` is the time between batches, such as `10 seconds`.
        """
        name = name or topic or "rows"
        writer = frame.writeStream.format(FORMAT).queryName(name)
        writer = writer.option("checkpointLocation", self.checkpoint(name))
        if trigger:
            writer = writer.trigger(processingTime=trigger)
        if topic is not None:
            writer = writer.option("topic", topic)
        for option, value in {**self._connecting, **options}.items():
            writer = writer.option(option, cast("Any", value))
        query = writer.start()
        self._written.streams[name] = query
        return query

    def checkpoint(self, name: str) -> str:
        """Return the checkpoint folder of a streaming query, which all nodes can reach and later runs continue from."""
        if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise InvalidRequest(
                f"the name of a checkpoint may contain only letters, digits, dots and dashes, not {name!r}"
            )
        return f"{self._context.folder.rstrip('/')}/jobs/{self._context.pipeline_id}/{name}"

    def application(self, name: str = "rows") -> str:
        """Return the `txnAppId` of a write; with `txnVersion`, the `batch`, it is written once."""
        return f"{APPLICATION_PREFIX}{self._context.pipeline_id}-{name}"

    @property
    def batch(self) -> int:
        """The number of this run's batch: its own, or that of the failed run whose messages it takes again."""
        return int(self._pin["batch"])

    def report(self, **progress: object) -> None:
        """Show progress with the run: numbers and texts by name."""
        self._progress.update(
            {name: value if isinstance(value, int | float) else str(value) for name, value in progress.items()}
        )
        self._context.report(self._progress)

    # -- what the driver calls ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Commit what the run has taken, after it has succeeded."""
        context, topics = self._context, self._pin["topics"]
        if topics and not context.is_dry:
            ends = {topic: {int(number): both[1] for number, both in topics[topic].items()} for topic in topics}
            context.link.call(commit_offsets(context.link.client, context.group, ends, context.member()))

    def _ranges(self, topics: Sequence[str]) -> dict[str, dict[str, list[int]]]:
        from millstream.pipelines.source.offset_resolver import OffsetResolver

        context = self._context
        reader_options = {BROKERS: context.brokers, "subscribe": ",".join(topics), "kafka.client.id": CLIENT_ID}
        resolver = OffsetResolver(read_options(reader_options, context.access))
        partitions = resolver.partitions()
        committed = context.link.call(stable_offsets(context.link.client, context.group))
        latest, earliest = resolver.latest(partitions), resolver.earliest(partitions)
        start: dict[str, dict[int, int]] = {}
        for topic, numbers in partitions.items():
            known = committed.get(topic, {})
            otherwise = latest if context.settings.start == LATEST and not known else earliest
            start[topic] = {number: known.get(number, otherwise[topic][number]) for number in numbers}
        end = admitted(start, latest, context.settings.batch_max)
        return {
            topic: {str(number): [offset, max(offset, end[topic][number])] for number, offset in numbers.items()}
            for topic, numbers in start.items()
        }

    def _load(self, reader: Any, topics: Sequence[str], options: Mapping[str, object]) -> DataFrame:
        if topics:
            _check_topics(topics)
            reader = reader.option("subscribe", ",".join(topics))
        for name, value in {**self._connecting, **options}.items():
            reader = reader.option(name, value)
        return cast("DataFrame", reader.load())

    def _place(self, topic: str) -> tuple[str, str]:
        from millstream.pipelines.source.landed_history import all_landings

        if "/" in topic:
            return topic, "delta"
        # A table with every message precedes one with a row per key.
        for settings, lake in sorted(all_landings(self._context.link), key=lambda landing: landing[0].mode):
            if settings.takes(topic):
                return f"{lake}/{topic}", settings.format
        raise NotFound(
            f"no pipeline lands topic {topic!r}; create one with: millstream pipeline create land NAME --topic {topic}"
        )


def _check_topics(topics: Sequence[str]) -> None:
    if not topics or not all(isinstance(topic, str) and topic for topic in topics):
        raise InvalidRequest("name the topics to read")


def load_code(code: str, name: str, file_name: str) -> Callable[[Any, Any], Any]:
    """Run the code of a job as a module, and return its function."""
    module = load_module(code, f"millstream_job_{name.replace('-', '_').replace('.', '_')}", file_name)
    return cast("Callable[[Any, Any], Any]", getattr(module, ENTRY))


def load_module(code: str, module_name: str, file_name: str) -> ModuleType:
    """Run code as a module whose functions Spark's workers can be sent."""
    from pyspark import cloudpickle

    spec = spec_from_loader(module_name, loader=None, origin=file_name)
    if spec is None:
        raise ImportError(f"no module can be loaded from {file_name}")
    module: ModuleType = module_from_spec(spec)
    module.__file__ = file_name
    sys.modules[module_name] = module
    # Workers cannot import it, so its functions travel by value.
    cast("Any", cloudpickle).register_pickle_by_value(module)
    # For tracebacks, which show the lines.
    _source_lines[file_name] = (len(code), None, code.splitlines(keepends=True), file_name)
    exec(compile(code, file_name, "exec"), module.__dict__)
    return module


def queries_of(returned: object) -> list[StreamingQuery]:
    """Return the streaming queries that `run` has returned; raise `InvalidRequest` for anything else but None."""
    listed: list[Any] = list(returned) if isinstance(returned, list | tuple) else [] if returned is None else [returned]
    for query in listed:
        if not (hasattr(query, "awaitTermination") and hasattr(query, "lastProgress")):
            raise InvalidRequest(
                f"{ENTRY} returned {type(query).__name__}; it must return nothing, a streaming query or a list of them"
            )
    return listed
