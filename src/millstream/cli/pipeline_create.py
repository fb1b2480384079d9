"""`millstream pipeline create`: declare a pipeline that lands, transforms or routes, or a job."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from millstream.cli.connection import ask_pipelines
from millstream.cli.options import (
    DEFAULT_BROKERS,
    DEFAULT_TIMEOUT_S,
    AsJson,
    Brokers,
    IfMissing,
    Settings,
    TimeoutSeconds,
)
from millstream.cli.output import one_line, print_noted
from millstream.cli.pipeline_options import (
    Continuous,
    CronTimes,
    Decode,
    DedupeSeconds,
    DeleteWhen,
    EverySeconds,
    Expects,
    File,
    Flags,
    Format,
    Functions,
    Into,
    Keys,
    Lake,
    Maps,
    Mode,
    Name,
    OnViolation,
    OrderBy,
    Pace,
    Parameters,
    PartitionBy,
    Pattern,
    Requirements,
    Rules,
    Schemas,
    Sql,
    Start,
    Tables,
    Timeout,
    Timezone,
    Topics,
    Watermarks,
)
from millstream.cli.pipeline_rule import read_rules
from millstream.core.errors import PipelineExists
from millstream.core.pipeline import PipelineKind, check_pipeline
from millstream.core.pipeline_rules import check_rules

app = typer.Typer(
    help="Create a pipeline that lands, transforms or routes messages, or runs a program, and start it.",
    no_args_is_help=True,
)

Stopped = Annotated[bool, typer.Option("--stopped", help="Create it stopped; start it later with pipeline start.")]


class _How(NamedTuple):
    """Options that the commands share."""

    stopped: bool
    if_missing: bool
    as_json: bool
    brokers: str
    timeout: float


@app.command("land")
def land(
    name: Name,
    topic: Topics = None,
    pattern: Pattern = None,
    lake: Lake = None,
    format_: Format = None,
    every: EverySeconds = None,
    decode: Decode = None,
    schema: Schemas = None,
    dedupe: DedupeSeconds = None,
    mode: Mode = None,
    key: Keys = None,
    order_by: OrderBy = None,
    delete_when: DeleteWhen = None,
    map_: Maps = None,
    expect: Expects = None,
    on_violation: OnViolation = None,
    partition_by: PartitionBy = None,
    start: Start = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Turn topics into tables, and keep them up to date, every message exactly once."""
    flags = Flags(
        topic=topic,
        pattern=pattern,
        lake=lake,
        format=format_,
        every=every,
        decode=decode,
        schema=schema,
        dedupe=dedupe,
        mode=mode,
        key=key,
        order_by=order_by,
        delete_when=delete_when,
        map=map_,
        expect=expect,
        on_violation=on_violation,
        partition_by=partition_by,
        start=start,
        settings=settings,
    )
    _create(name, PipelineKind.LAND, flags, _How(stopped, if_missing, as_json, brokers, timeout))


@app.command("transform")
def transform(
    name: Name,
    sql: Sql = None,
    into: Into = None,
    schema: Schemas = None,
    table: Tables = None,
    watermark: Watermarks = None,
    udf: Functions = None,
    requirements: Requirements = None,
    decode: Decode = None,
    start: Start = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Write the rows of a SQL statement over topics to a topic, exactly once."""
    flags = Flags(
        sql=sql,
        into=into,
        schema=schema,
        table=table,
        watermark=watermark,
        udf=udf,
        requirements=requirements,
        decode=decode,
        start=start,
        settings=settings,
    )
    _create(name, PipelineKind.TRANSFORM, flags, _How(stopped, if_missing, as_json, brokers, timeout))


@app.command("route")
def route(
    name: Name,
    rules: Rules = None,
    decode: Decode = None,
    start: Start = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Write messages to topics according to rules, exactly once; millstream pipeline rule changes the rules."""
    flags = Flags(rules=rules, decode=decode, start=start, settings=settings)
    _create(name, PipelineKind.ROUTE, flags, _How(stopped, if_missing, as_json, brokers, timeout))


@app.command("job")
def job(
    name: Name,
    file: File = None,
    requirements: Requirements = None,
    every: Pace = None,
    cron: CronTimes = None,
    timezone: Timezone = None,
    continuous: Continuous = False,
    parameters: Parameters = None,
    run_timeout: Timeout = None,
    start: Start = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Run your own PySpark program: once, at an interval, on a schedule, or continuously."""
    flags = Flags(
        file=file,
        requirements=requirements,
        pace=every,
        cron=cron,
        timezone=timezone,
        continuous=continuous or None,
        param=parameters,
        timeout=run_timeout,
        start=start,
        settings=settings,
    )
    _create(name, PipelineKind.JOB, flags, _How(stopped, if_missing, as_json, brokers, timeout))


@app.command("ledger")
def ledger(
    name: Name,
    lake: Lake = None,
    every: EverySeconds = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Land the events of subscriptions with --ledger in a table, exactly once, and audit them every night."""
    flags = Flags(lake=lake, every=every, settings=settings)
    _create(name, PipelineKind.LEDGER, flags, _How(stopped, if_missing, as_json, brokers, timeout))


def _create(name: str, kind: PipelineKind, flags: Flags, how: _How) -> None:
    notes = _declare(name, kind, flags, how)
    shown = one_line(name)
    if notes is None:
        text = f"Pipeline {shown} already exists."
    elif how.stopped:
        text = f"Created pipeline {shown}; start it with: millstream pipeline start {shown}"
    elif kind is PipelineKind.JOB:
        text = f"Created job {shown}; see its runs with: millstream pipeline runs {shown}"
    else:
        text = f"Created pipeline {shown}; check its progress with: millstream pipeline describe {shown}"
    document = {"pipeline": name, "kind": kind, "created": notes is not None}
    print_noted(document, text, notes or (), as_json=how.as_json)


def _declare(name: str, kind: PipelineKind, flags: Flags, how: _How) -> list[str] | None:
    """Declare it and return notes; None if it exists."""
    settings = flags.settings_of(kind)
    rules = () if flags.rules is None else read_rules(flags.rules)
    # Errors in it are reported even when no broker answers.
    check_pipeline(name, kind, settings)
    check_rules(kind, rules)
    try:
        return ask_pipelines(
            how.brokers,
            how.timeout,
            lambda pipelines: pipelines.create(name, kind, settings, rules=rules, is_wanted=not how.stopped),
        ).notes
    except PipelineExists:
        if not how.if_missing:
            raise
        return None
