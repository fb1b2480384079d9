"""`millstream pipeline run`: run a declared or an undeclared pipeline in this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TextIO
from uuid import NAMESPACE_OID, UUID, uuid5

import typer

from millstream.cli.connection import call_broker, command_credentials
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, DEFAULT_TIMEOUT_S, Common, flag
from millstream.cli.output import counted, one_line, print_note, print_result
from millstream.cli.pipeline_options import Flags
from millstream.cli.pipeline_rule import read_rules
from millstream.core.child_process import kill_session
from millstream.core.errors import GroupNotEmpty, InvalidPipeline, InvalidRequest, MillstreamError, UnknownTopic
from millstream.core.pipeline import LAND_PREFIX, Pipeline, PipelineKind, Rule, check_pipeline
from millstream.core.pipeline_rules import check_rules
from millstream.core.scratch import temporary_folder
from millstream.core.setting import named_by_caller

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.client.admin.pipelines import PipelineStorage
    from millstream.pipelines.jobs.job import JobKind, TimeWindow
    from millstream.pipelines.runtime.claim import Claim
    from millstream.pipelines.runtime.driver_messages import JobEvent, JobOrder
    from millstream.pipelines.runtime.manual_run import ManualRun
    from millstream.pipelines.runtime.runner import Tally
    from millstream.pipelines.source.access import Access
    from millstream.pipelines.source.link import Link
    from millstream.protocol.wire.client import Client


class Terminated(BaseException):
    """SIGTERM arrived. Not an `Exception`, so that retries and suppressions do not treat it as a failure."""


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the command like Ctrl-C; a second one has no effect."""

    def end(_number: int, _frame: FrameType | None) -> None:
        # `timeout` sends it to the process and to its group.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Terminated:
        reason = "stopped by SIGTERM; the next run continues after the last commit"
        raise CommandFailed(reason, ExitCode.TERMINATED) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _reported() -> Iterator[None]:
    """Report errors of Spark and of users' code by their reason, without Java's stack trace."""
    from millstream.pipelines.jobs.error_reason import reason_of

    try:
        yield
    except MillstreamError:
        raise
    except Exception as error:
        raise CommandFailed(reason_of(error)) from error


NAMED: Final = 10
"""How many fields without a column are named."""


def show_landing(pipeline: Pipeline, brokers: str, lake: str, *, as_json: bool) -> None:
    """Decode the newest messages as landing would, and print what would be landed."""
    from millstream.pipelines.runtime.dry_run import land_sample

    with signed_in(brokers) as (scratch, _, access), _reported():
        documents = land_sample(pipeline, brokers, access, lake, scratch)["topics"]
    lines = [line for document in documents for line in _landing_lines(document)]
    print_result({"topics": documents}, "\n".join(lines), as_json=as_json)


def _landing_lines(document: dict[str, Any]) -> list[str]:
    table = "the table" if document["exists"] else "a new table"
    lines = [
        f"{one_line(document['topic'])}: {table} at {one_line(document['table'])}",
        f"columns: {_columns(document['columns'])}",
    ]
    if document["exists"] and document["added"]:
        lines.append(f"new columns: {', '.join(map(one_line, document['added']))}")
    if document["dropped"]:
        named = ", ".join(map(one_line, document["dropped"][:NAMED]))
        more = ", …" if len(document["dropped"]) > NAMED else ""
        lines.append(f"without a column: {counted(len(document['dropped']), 'field')} ({named}{more})")
    deletes = f" ({document['deletes']:,} of them delete their key)" if document["deletes"] else ""
    ignored = document["sampled"] - document["landed"] - document["quarantined"]
    lines.append(
        f"Of {counted(document['sampled'], 'message')} it would land {document['landed']:,}{deletes} and quarantine "
        f"{document['quarantined']:,}."
    )
    if ignored > 0:
        lines.append(f"{counted(ignored, 'tombstone')} after a delete would be ignored.")
    lines += [f"quarantined, {number:,}: {one_line(reason)}" for reason, number in document["reasons"].items()]
    lines += [json.dumps(row, ensure_ascii=False) for row in document["rows"]]
    return lines


def show_dry_run(pipeline: Pipeline, brokers: str, *, master: str, memory: str, as_json: bool) -> None:
    """Start Spark, try the pipeline on the latest messages, and print the result."""
    from millstream.pipelines.runtime.dry_run import transform_sample

    with signed_in(brokers) as (scratch, _, access), _reported():
        document = transform_sample(pipeline, brokers, access, scratch, master=master, memory=memory)
    print_result(document, _text(document), as_json=as_json)


def _text(document: dict[str, Any]) -> str:
    way = "a Spark stream with a checkpoint" if document["has_state"] else "batch by batch, without a checkpoint"
    rows, written = document["rows"], document["written"]
    lines = [f"{one_line(topic)}: {_columns(columns)}" for topic, columns in document["columns"].items()]
    lines += [f"gives: {_columns(document['output'])}", f"runs as: {way}", "", document["plan"], ""]
    shown = f"{written:,}, for example:" if written > len(rows) else f"{written:,}:"
    lines.append(f"Of {counted(document['sampled'], 'message')} it would write {shown if rows else 'nothing.'}")
    lines += [json.dumps(row, default=str, ensure_ascii=False) for row in rows]
    if document["undecoded"]:
        messages = counted(document["undecoded"], "message")
        lines.append(
            f"{messages} of the sample cannot be decoded, or do not match the columns; `payload_error` says why."
        )
    return "\n".join(lines)


def _columns(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{one_line(name)} {kind}" for name, kind in columns.items())


PROGRESS_S: Final = 10.0
"""The shortest interval of progress lines if stderr is not a terminal."""


class Stages:
    """Reports the progress of one piece of work, by name."""

    def __init__(self, name: str) -> None:
        self._name = one_line(name)
        self._file: TextIO | None = None
        self._shown: Any = None
        self._task: Any = None
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        # Its own handle: while Java starts, the usual one is redirected to a log.
        self._file = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
        if self._file.isatty():
            self._show(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def show(self, stage: str) -> None:
        self._shown_at = time.monotonic()
        if self._shown is not None:
            self._shown.update(self._task, note=stage)
        elif self._file is not None:
            self._file.write(f"{self._name}: {stage}\n")
            self._file.flush()

    def move(self, note: str, *, is_new_failure: bool = True) -> None:
        """Report progress in the stage; without `is_new_failure`, only the live line changes."""
        if self._shown is not None or (is_new_failure and time.monotonic() - self._shown_at >= PROGRESS_S):
            self.show(note)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _show(self, file: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._shown = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeElapsedColumn(),
            console=Console(file=file),
            transient=True,
        )
        self._task = self._shown.add_task(self._name, note="")
        self._shown.start()


KindOrName = Annotated[
    str,
    typer.Argument(
        metavar="NAME|KIND",
        help="The name of a declared pipeline; or land, transform, route or job, to run one without declaring it.",
        show_default=False,
    ),
]

TopicNames = Annotated[
    list[str] | None, typer.Argument(metavar="TOPIC", help="For land: the topics.", show_default=False)
]

Once = Annotated[bool, typer.Option("--once", help="Process what is stored, then exit. Default: run until Ctrl-C.")]

Dry = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="For a transform: show its plan and its output for a sample; for landing: show the columns, and which "
        "messages of a sample would be quarantined; for a job: run it on a sample and show what it would write. "
        "Nothing is written.",
    ),
]

RunName = Annotated[
    str | None,
    flag(
        "--name",
        "NAME",
        "The name of an undeclared pipeline, under which its next run continues. Default: derived from its topics.",
    ),
]

Master = Annotated[
    str,
    typer.Option("--master", metavar="URL", help="The Spark master; empty means this machine, with all cores but one."),
]

Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="The memory of Spark's Java process.")]

Folder = Annotated[str | None, flag("--folder", "FOLDER", "Where checkpoints are stored. Default: the node's setting.")]

_NAME_MAX: Final = 190


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    master: Master = ""
    memory: Memory = "1g"
    folder: Folder = None


def run(
    kind_or_name: KindOrName,
    topics: TopicNames = None,
    once: Once = False,
    dry: Dry = False,
    name: RunName = None,
    *,
    flags: Flags,
    how: RunOptions,
    common: Common = COMMON,
) -> None:
    """Run a pipeline in this process, with progress and a summary. Refused while another process runs it."""
    lake = flags.lake if flags.lake is None or "://" in flags.lake else os.path.abspath(flags.lake)
    flags = replace(flags, topic=[*(topics or ()), *(flags.topic or ())], lake=lake)
    described = _described_by(kind_or_name, flags, name)
    if described is not None:
        refuse_without_packages(starts_spark=not (dry and described.kind is PipelineKind.LAND))
    is_declared, brokers = described is None, common.brokers
    pipeline, places = call_broker(common, lambda client: look_up(client, kind_or_name, described, brokers))
    if described is None:
        refuse_without_packages(starts_spark=not (dry and pipeline.kind is PipelineKind.LAND))
    by_hand = CommandRun(pipeline, places, brokers, is_declared=is_declared, lake=flags.lake, folder=how.folder)
    if pipeline.kind is PipelineKind.JOB:
        run_job(pipeline, places, brokers, master=how.master, is_declared=is_declared, dry=dry, as_json=common.as_json)
    elif dry and pipeline.kind is PipelineKind.LAND:
        show_landing(pipeline, brokers, flags.lake or places.lake, as_json=common.as_json)
    elif dry:
        show_dry_run(pipeline, brokers, master=how.master, memory=how.memory, as_json=common.as_json)
    else:
        by_hand.run(how.master, how.memory, once=once, as_json=common.as_json)


def run_job(
    pipeline: Pipeline,
    places: PipelineStorage,
    brokers: str,
    *,
    master: str,
    is_declared: bool,
    dry: bool,
    as_json: bool,
) -> None:
    """Run a job's program once, in its own process that prints here; a dry run writes nothing."""
    from millstream.pipelines.runtime.driver_messages import JobOrder

    if is_declared and not dry:
        raise InvalidPipeline(f"job {pipeline.name!r} is run by a node: millstream pipeline trigger {pipeline.name}")
    with signed_in(brokers) as (scratch, _, access):
        order = JobOrder(
            pipeline=pipeline,
            # Later than any before, so that what it writes is new.
            run=int(time.time()),
            attempt=1,
            scheduled_ms=int(time.time() * 1000),
            kafka=brokers,
            lake=places.lake,
            folder=scratch if dry else places.folder,
            master=master,
            access=access.as_options(),
            sample=SAMPLE if dry else None,
            log_level="warning",
        )
        command = [sys.executable, "-m", "millstream.pipelines.runtime.job_driver"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                ended = _follow_job(process, order)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            finally:
                # Java's workers are in groups of their own.
                kill_session(process.pid)
    if not ended.succeeded:
        raise CommandFailed(ended.failed or "the process of the job ended; its output may say why")
    what = "would have succeeded" if dry else "succeeded"
    text = f"Job {one_line(pipeline.name)} {what}."
    print_result({"pipeline": pipeline.name, "kind": "job", "dry_run": dry}, text, as_json=as_json)


END_S: Final = 10.0
"""How long the process of a job may take to clean up."""
SAMPLE: Final = 100
"""How many messages of a partition a dry run of a job reads."""


def _follow_job(process: subprocess.Popen[bytes], order: JobOrder) -> JobEvent:
    """Send the process its task, and return its final report."""
    import msgspec

    from millstream.pipelines.runtime.driver_messages import JobEvent, JobResponse

    if process.stdin is None or process.stdout is None:
        return JobEvent()
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.flush()
    for line in process.stdout:
        event = msgspec.json.decode(line, type=JobEvent)
        if event.pin is not None:
            process.stdin.write(msgspec.json.encode(JobResponse(pinned=True)) + b"\n")
            process.stdin.flush()
        if event.succeeded or event.failed:
            return event
    return JobEvent()


def _described_by(kind_or_name: str, flags: Flags, name: str | None) -> Pipeline | None:
    """Return the pipeline that the flags describe; None for the name of a declared one, which takes no flags."""
    if kind_or_name in set(PipelineKind):
        return _undeclared_by(PipelineKind(kind_or_name), flags, name)
    _refuse_changes(kind_or_name, flags, name)
    return None


def _undeclared_by(kind: PipelineKind, flags: Flags, name: str | None) -> Pipeline:
    with named_by_caller(flags.flags_of_settings()):
        settings = flags.settings_of(kind)
        return _undeclared(kind, settings, () if flags.rules is None else read_rules(flags.rules), name)


def _refuse_changes(kind_or_name: str, flags: Flags, name: str | None) -> None:
    """Reject flags that would change a declared pipeline; only the location of its tables may differ."""
    given_flags = [flag for flag in flags.given() if flag != "--lake"] + ([] if name is None else ["--name"])
    if given_flags:
        raise typer.BadParameter(
            f"{given_flags[0]} applies only to a pipeline that is not declared; {kind_or_name!r} runs as declared, "
            "and is changed with millstream pipeline update"
        )


def _undeclared(kind: PipelineKind, settings: dict[str, str], rules: Sequence[Rule], name: str | None) -> Pipeline:
    """Return an undeclared pipeline; one of the same name continues where it ended."""
    if name is None:
        about = settings.get("into") if kind is PipelineKind.TRANSFORM else settings.get("topics", "").replace(",", "-")
        if kind is PipelineKind.JOB:
            about = "by-hand"
        about = about or "-".join(sorted({rule.topic for rule in rules})) or "all"
        name = f"{LAND_PREFIX if kind is PipelineKind.LAND else f'{kind}-'}{about}"[:_NAME_MAX]
    check_pipeline(name, kind, settings)
    check_rules(kind, rules)
    if kind is PipelineKind.ROUTE and not rules:
        raise InvalidPipeline("pass --rules: without rules, nothing is routed")
    pipeline_id = uuid5(NAMESPACE_OID, f"millstream pipeline {name}")
    return Pipeline(pipeline_id=pipeline_id, name=name, kind=kind, overrides=settings, rules=tuple(rules))


def refuse_without_packages(*, starts_spark: bool = True) -> None:
    """Raise `CommandFailed` with what to install if packages of pipelines are missing."""
    from millstream.pipelines.runtime.spark_session import missing_packages

    missing = missing_packages(starts_spark=starts_spark)
    if missing:
        raise CommandFailed(missing)


async def look_up(
    client: Client, name: str, pipeline: Pipeline | None, brokers: str
) -> tuple[Pipeline, PipelineStorage]:
    """Return the pipeline, looked up unless given, and the locations of the nodes' tables and checkpoints.

    Raises `UnknownTopic` if there is nothing to read: Spark takes long to start.
    """
    from millstream.client.admin.pipelines import PipelineClient, pipeline_of, storage_of

    places = await storage_of(client)
    if pipeline is None:
        (described,) = await PipelineClient(client).describe([name])
        pipeline = pipeline_of(described)
    topics = sorted(pipeline.flows())
    if topics and not (await client.metadata(topics)).topics:
        raise UnknownTopic(
            f"topic {topics[0]!r} does not exist at {brokers}; create it with: millstream topic create {topics[0]}"
        )
    return pipeline, places


@contextmanager
def signed_in(brokers: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[tuple[str, Link, Access]]:
    """Connect as the command's user, with a temporary folder for the run.

    Spark's queries sign in with a token in a file of that folder.
    """
    from millstream.pipelines.source.access import TokenFiles, connection_access
    from millstream.pipelines.source.link import Link

    credentials = command_credentials()
    link = Link(brokers, f"pipeline-run-{os.getpid()}", timeout_s, credentials=credentials)
    base = connection_access(credentials)
    with unwound_by_sigterm(), temporary_folder() as scratch:
        tokens = TokenFiles(link, scratch, base)
        try:
            access = tokens.access_of("")
        except InvalidRequest:
            # The brokers do not authenticate clients, so no token is needed.
            access = base
        try:
            yield scratch, link, access
        finally:
            tokens.close()


class CommandRun:
    def __init__(
        self,
        pipeline: Pipeline,
        places: PipelineStorage,
        brokers: str,
        *,
        is_declared: bool,
        lake: str | None,
        folder: str | None,
        window: TimeWindow | None = None,
        backfilled: UUID | None = None,
        jobs: Mapping[PipelineKind, JobKind] | None = None,
    ) -> None:
        """Run a pipeline; `window` limits it to a time range, as a backfill of the pipeline `backfilled`, and `jobs`
        replaces its own kind of job.
        """
        self._pipeline = pipeline
        self._window = window
        self._backfilled = backfilled
        self._jobs = jobs
        self._is_declared = is_declared
        self._brokers = brokers
        self._lake = self._resolve_location("--lake", lake, places.lake, places)
        self._lake_is_shared = lake is None
        self._folder = self._resolve_location("--folder", folder, places.folder, places)
        self._stopping = threading.Event()
        self._stages = Stages(pipeline.name)
        self._rows_shown = 0
        self._began = time.monotonic()

    def _resolve_location(self, flag: str, option: str | None, of_node: str, places: PipelineStorage) -> str:
        if option is not None:
            return option
        lands = self._pipeline.kind is PipelineKind.LAND
        is_needed = not lands if flag == "--folder" else lands and not self._pipeline.overrides.get("lake")
        if is_needed and of_node.startswith(places.data) and not os.path.isdir(places.data):
            raise CommandFailed(f"the node stores it in {of_node}, which is not on this machine; pass {flag}")
        return of_node

    def run(self, master: str, memory: str, *, once: bool, as_json: bool) -> None:
        """Claim it, start Spark, and run steps; print a summary, also when interrupted."""
        from millstream.pipelines.runtime.claim import SESSION_S, Claim
        from millstream.pipelines.runtime.manual_run import ManualRunWatch

        with signed_in(self._brokers, max(DEFAULT_TIMEOUT_S, SESSION_S)) as (scratch, link, access):
            claim = Claim(link, self._pipeline.group, is_declared=self._is_declared, on_lost=self._stopping.set)
            try:
                self._acquire_claim(claim)
                with self._stages:
                    spark = self._start(master, memory, log=os.path.join(scratch, "spark.log"))
                    running = self._running(claim, spark, access)
                    with ManualRunWatch(running, spark, lambda reason: self._exit_stalled(claim, scratch, reason)):
                        self._drive(running, once=once, as_json=as_json)
            finally:
                with suppress(MillstreamError):
                    claim.leave()

    def _acquire_claim(self, claim: Claim) -> None:
        try:
            claim.take()
        except GroupNotEmpty as occupied:
            name = self._pipeline.name
            hint = f"; stop it first: millstream pipeline stop {name}" if self._is_declared else ""
            raise GroupNotEmpty(f"pipeline {name!r} is not run: {occupied}{hint}") from None

    def _start(self, master: str, memory: str, *, log: str) -> SparkSession:
        from millstream.pipelines.runtime.spark_session import open_session

        self._stages.show("starting Spark …")
        spark = open_session(master, memory=memory, settings={}, log=log)
        self._stages.show("running")
        return spark

    def _running(self, claim: Claim, spark: SparkSession, access: Access) -> ManualRun:
        from millstream.pipelines.jobs.job import JobContext
        from millstream.pipelines.runtime.manual_run import ManualRun

        name = self._pipeline.name
        # Both belong to this thread; the pool shows whether tasks make progress.
        spark.sparkContext.setJobGroup(name, f"pipeline {name}", interruptOnCancel=True)
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        context = JobContext(
            spark=spark,
            brokers=self._brokers,
            access=access,
            lake=self._lake,
            lake_is_shared=self._lake_is_shared,
            folder=self._folder,
            stopping=self._stopping,
            window=self._window,
            backfilled=self._backfilled,
        )
        return ManualRun(
            self._pipeline,
            context,
            claim,
            on_step=self._on_step,
            cancel=lambda: spark.sparkContext.cancelJobGroup(name),
            **({} if self._jobs is None else {"jobs": self._jobs}),
        )

    def _drive(self, running: ManualRun, *, once: bool, as_json: bool) -> None:
        from millstream.pipelines.runtime.runner import Stalled

        # Without `once`, an interruption is the usual end.
        ended = "interrupted after " if once else ""
        try:
            with _reported():
                running.run(once=once)
            ended = ""
        except Stalled as stalled:
            ended = "stopped after "
            raise CommandFailed(self._stall_message(str(stalled)), ExitCode.TIMED_OUT) from None
        except Exception:
            ended = "failed after "
            raise
        finally:
            self._stages.end()
            self._summarize(running.tally, ended, as_json=as_json)

    def _exit_stalled(self, claim: Claim, scratch: str, reason: str) -> None:
        """Clean up and end the process, whose main thread hangs; called by the watchdog."""
        from millstream.pipelines.runtime.spark_session import remove_scratch

        print_note(f"millstream: {self._stall_message(reason)}")
        claim.leave()
        remove_scratch()
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(ExitCode.TIMED_OUT)

    def _stall_message(self, reason: str) -> str:
        about = f"pipeline {self._pipeline.name!r} was stopped: {reason}"
        return f"{about}; the next run repeats what was not committed, and stall.ms sets how long a batch may stall"

    def _summarize(self, tally: Tally, ended: str, *, as_json: bool) -> None:
        pipeline = self._pipeline
        seconds = round(time.monotonic() - self._began, 1)
        document = {
            "pipeline": pipeline.name,
            "kind": pipeline.kind,
            "rows": tally.rows,
            "batches": tally.batches,
            "lag": tally.lag,
            "seconds": seconds,
            "counts": tally.counts,
        }
        counts = "".join(f", {name} {number:,}" for name, number in sorted(tally.counts.items()) if number)
        batches = counted(tally.batches, "batch")
        messages = counted(tally.rows, "message")
        text = f"{one_line(pipeline.name)}: {ended}{messages} in {batches} and {seconds:g} s{counts}"
        print_result(document, f"{text}; {tally.lag:,} left." if tally.lag else f"{text}.", as_json=as_json)

    def _on_step(self, tally: Tally) -> None:
        note = f"{tally.rows:,} messages, {tally.rows_per_s:,.0f}/s, {tally.lag:,} left"
        self._stages.move(note, is_new_failure=tally.rows != self._rows_shown)
        self._rows_shown = tally.rows
