"""`millstream pipeline create`: declare a pipeline that lands, transforms or routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import ask
from millstream.cli.options import DEFAULT_BROKERS, DEFAULT_TIMEOUT_S, AsJson, Brokers, TimeoutSeconds
from millstream.cli.output import one_line, print_answer
from millstream.cli.pipeline_options import (
    Decode,
    DedupeSeconds,
    EverySeconds,
    Format,
    Into,
    Lake,
    Name,
    Pattern,
    Rules,
    Schema,
    Settings,
    Sql,
    Start,
    Tables,
    Topics,
    TopicSchemas,
    Watermarks,
    land_settings,
    shared_settings,
    transform_settings,
)
from millstream.cli.pipeline_rule import read_rules
from millstream.model.errors import PipelineExists
from millstream.model.pipeline import PipelineKind, Rule, check_pipeline, check_rules

if TYPE_CHECKING:
    from millstream.wire.client import Client

app = typer.Typer(
    help="Declare a pipeline that lands, transforms or routes; it is run from then on.", no_args_is_help=True
)

Stopped = Annotated[bool, typer.Option("--stopped", help="Only declare it; start it later with pipeline start.")]
IfMissing = Annotated[
    bool, typer.Option("--if-not-exists", help="Succeed, and change nothing, when it is there already.")
]


@app.command("land")
def land(
    name: Name,
    topic: Topics = None,
    pattern: Pattern = None,
    lake: Lake = None,
    format_: Format = None,
    every: EverySeconds = None,
    decode: Decode = None,
    schema: Schema = None,
    dedupe: DedupeSeconds = None,
    start: Start = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Make tables of topics, and keep them up to date, every message exactly once."""
    given = land_settings(topic, pattern, lake, format_, every, decode, schema, dedupe)
    given.update(shared_settings(start, settings))
    created = _declare(name, PipelineKind.LAND, given, (), stopped, if_missing, brokers, timeout)
    _tell(name, PipelineKind.LAND, created, stopped, as_json=as_json)


@app.command("transform")
def transform(
    name: Name,
    sql: Sql = None,
    into: Into = None,
    schema: TopicSchemas = None,
    table: Tables = None,
    watermark: Watermarks = None,
    decode: Decode = None,
    start: Start = None,
    settings: Settings = None,
    stopped: Stopped = False,
    if_missing: IfMissing = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Write the rows of an SQL statement over topics to a topic, exactly once."""
    given = transform_settings(sql, into, decode, schemas=schema, tables=table, watermarks=watermark)
    given.update(shared_settings(start, settings))
    created = _declare(name, PipelineKind.TRANSFORM, given, (), stopped, if_missing, brokers, timeout)
    _tell(name, PipelineKind.TRANSFORM, created, stopped, as_json=as_json)


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
    """Write messages to the topics that rules say, exactly once; millstream pipeline rule changes the rules."""
    given = {**({} if decode is None else {"decode": decode}), **shared_settings(start, settings)}
    listed = () if rules is None else read_rules(rules)
    created = _declare(name, PipelineKind.ROUTE, given, listed, stopped, if_missing, brokers, timeout)
    _tell(name, PipelineKind.ROUTE, created, stopped, as_json=as_json)


def _declare(
    name: str,
    kind: PipelineKind,
    settings: dict[str, str],
    rules: Sequence[Rule],
    is_stopped: bool,
    if_missing: bool,
    brokers: str,
    timeout: float,
) -> bool:
    """Declare it; whether it was not there."""
    # What is wrong with it is told even when no broker answers.
    check_pipeline(name, kind, settings)
    check_rules(kind, rules)

    async def question(client: Client) -> bool:
        from millstream.admin.pipelines import PipelineClient

        try:
            await PipelineClient(client).create(name, kind, settings, rules=rules, is_wanted=not is_stopped)
        except PipelineExists:
            if not if_missing:
                raise
            return False
        return True

    return ask(brokers, timeout, question)


def _tell(name: str, kind: PipelineKind, created: bool, is_stopped: bool, *, as_json: bool) -> None:
    if not created:
        text = f"There is already a pipeline {one_line(name)}."
    elif is_stopped:
        text = f"Created pipeline {one_line(name)}; start it with: millstream pipeline start {one_line(name)}"
    else:
        text = f"Created pipeline {one_line(name)}; see how it does with: millstream pipeline describe {one_line(name)}"
    print_answer({"pipeline": name, "kind": kind, "created": created}, text, as_json=as_json)
