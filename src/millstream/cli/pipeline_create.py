"""`millstream pipeline create`: declare a pipeline that lands, transforms or routes, or a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from millstream.cli.connection import ask_pipelines
from millstream.cli.options import COMMON, Common, IfMissing, Noun, spread
from millstream.cli.output import one_line, print_noted
from millstream.cli.pipeline_options import Flags, Name, flags_not_for
from millstream.cli.pipeline_rule import read_rules
from millstream.core.errors import PipelineExists
from millstream.core.pipeline import PipelineKind, check_pipeline
from millstream.core.pipeline_rules import check_rules

app = Noun(
    help="Create a pipeline that lands, transforms or routes messages, or runs a program, and start it.",
    no_args_is_help=True,
)

Stopped = Annotated[bool, typer.Option("--stopped", help="Create it stopped; start it later with pipeline start.")]


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
    def create(
        name: Name, flags: Flags, stopped: Stopped = False, if_missing: IfMissing = False, common: Common = COMMON
    ) -> None:
        notes = _declare(name, kind, flags, common, stopped=stopped, if_missing=if_missing)
        text = _outcome(one_line(name), kind, is_new=notes is not None, stopped=stopped)
        document = {"pipeline": name, "kind": kind, "created": notes is not None}
        print_noted(document, text, notes or (), as_json=common.as_json)

    return spread(create, without=flags_not_for(kind))


for _kind, _text in _KINDS.items():
    app.command(_kind.value, help=_text)(_command(_kind))


def _outcome(name: str, kind: PipelineKind, *, is_new: bool, stopped: bool) -> str:
    if not is_new:
        return f"Pipeline {name} already exists."
    if stopped:
        return f"Created pipeline {name}; start it with: millstream pipeline start {name}"
    if kind is PipelineKind.JOB:
        return f"Created job {name}; see its runs with: millstream pipeline runs {name}"
    return f"Created pipeline {name}; check its progress with: millstream pipeline describe {name}"


def _declare(
    name: str, kind: PipelineKind, flags: Flags, common: Common, *, stopped: bool, if_missing: bool
) -> list[str] | None:
    """Declare it and return notes; None if it exists."""
    settings = flags.settings_of(kind)
    rules = () if flags.rules is None else read_rules(flags.rules)
    # Errors in it are reported even when no broker answers.
    check_pipeline(name, kind, settings)
    check_rules(kind, rules)
    try:
        return ask_pipelines(
            common,
            lambda pipelines: pipelines.create(name, kind, settings, rules=rules, is_wanted=not stopped),
        ).notes
    except PipelineExists:
        if not if_missing:
            raise
        return None
