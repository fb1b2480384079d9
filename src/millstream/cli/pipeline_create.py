"""`millstream pipeline create`: declare a pipeline that lands, transforms or routes, or a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from millstream.cli.connection import ask_pipelines
from millstream.cli.options import (
    DEFAULT_BROKERS,
    DEFAULT_TIMEOUT_S,
    AsJson,
    Brokers,
    IfMissing,
    TimeoutSeconds,
    spread,
)
from millstream.cli.output import one_line, print_noted
from millstream.cli.pipeline_options import Flags, Name, flags_not_for
from millstream.cli.pipeline_rule import read_rules
from millstream.core.errors import PipelineExists
from millstream.core.pipeline import PipelineKind, check_pipeline
from millstream.core.pipeline_rules import check_rules

app = typer.Typer(
    help="Create a pipeline that lands, transforms or routes messages, or runs a program, and start it.",
    no_args_is_help=True,
)

Stopped = Annotated[bool, typer.Option("--stopped", help="Create it stopped; start it later with pipeline start.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """Options that all kinds share."""

    stopped: Stopped = False
    if_missing: IfMissing = False
    as_json: AsJson = False
    brokers: Brokers = DEFAULT_BROKERS
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S


_KINDS: Final = {
    PipelineKind.LAND: "Turn topics into tables, and keep them up to date, every message exactly once.",
    PipelineKind.TRANSFORM: "Write the rows of a SQL statement over topics to a topic, exactly once.",
    PipelineKind.ROUTE: "Write messages to topics according to rules, exactly once; millstream pipeline rule changes "
    "the rules.",
    PipelineKind.JOB: "Run your own PySpark program: once, at an interval, on a schedule, or continuously.",
    PipelineKind.LEDGER: "Land the events of subscriptions with --ledger in a table, exactly once, and audit them "
    "every night.",
}


def _command(kind: PipelineKind) -> Callable[..., None]:
    def create(name: Name, flags: Flags, how: _How) -> None:
        _create(name, kind, flags, how)

    return spread(create, without=flags_not_for(kind))


for _kind, _text in _KINDS.items():
    app.command(_kind.value, help=_text)(_command(_kind))


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
