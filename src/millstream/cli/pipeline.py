"""`millstream pipeline`: create, list, describe, update, start, stop, run, delete pipelines, their rules and runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import NAMESPACE_OID, uuid5

import typer

from millstream.cli import pipeline_rule, pipeline_run
from millstream.cli.connection import call_broker, call_pipelines
from millstream.cli.options import COMMON, Common, IfMissing, Noun, Settings, Unset, Yes, confirm, expand_options, flag
from millstream.cli.output import (
    counted,
    local_time,
    one_line,
    print_json,
    print_line,
    print_list,
    print_note,
    print_result,
    print_settings,
    print_with_notes,
)
from millstream.cli.pipeline_options import Flags, Name, Program, Requirements, flags_not_for
from millstream.cli.pipeline_rule import read_rules
from millstream.cli.pipeline_run import CommandRun, Folder, Master, Memory, look_up, refuse_without_packages
from millstream.core.errors import InvalidPipeline, PipelineExists
from millstream.core.job import code_hash
from millstream.core.pipeline import LONG_TEXTS, SECRET_SETTINGS, Pipeline, PipelineKind, check_pipeline
from millstream.core.pipeline_rules import check_rules
from millstream.core.setting import HIDDEN, named_by_caller
from millstream.pipelines.jobs.error_reason import headline

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client


Since = Annotated[
    str,
    flag(
        "--since",
        "TIME|AGE",
        "The first messages by their timestamps: a time (2026-01-31T12:00:00Z), an age (7d) or start.",
    ),
]
Until = Annotated[str | None, flag("--until", "TIME|AGE", "The end, exclusive: a time or an age. Default: now.")]

_DIGEST_CHARACTERS = 8


def backfill(
    name: Name,
    since: Since,
    until: Until = None,
    master: Master = "",
    memory: Memory = "1g",
    folder: Folder = None,
    common: Common = COMMON,
) -> None:
    """Process stored messages of a time range. The pipeline may run; repeating the command changes nothing."""
    from millstream.pipelines.jobs.job import TimeWindow

    window = TimeWindow(_time_ms(since, flag="--since"), _time_ms(until or "0s", flag="--until"))
    if window.since_ms >= window.until_ms:
        raise typer.BadParameter("--since must be before --until")
    refuse_without_packages()
    declared, places = call_broker(common, lambda client: look_up(client, name, None, common.brokers))
    if declared.kind is PipelineKind.ROUTE:
        raise InvalidPipeline(f"pipeline {name!r} routes messages; a backfill is for land and transform")
    past = _backfill_pipeline(declared, f"{since} {until}" if until is not None else since)
    of = declared.pipeline_id
    by_hand = CommandRun(
        past, places, common.brokers, is_declared=False, lake=None, folder=folder, window=window, backfilled=of
    )
    by_hand.run(master, memory, once=True, as_json=common.as_json)


def requarantine(name: Name, master: Master = "", memory: Memory = "1g", common: Common = COMMON) -> None:
    """Decode quarantined messages again, and land those that fit. The landing pipeline must be stopped."""
    refuse_without_packages()
    from millstream.pipelines.jobs.land.backfill import make_requarantine

    declared, places = call_broker(common, lambda client: look_up(client, name, None, common.brokers))
    if declared.kind is not PipelineKind.LAND:
        raise InvalidPipeline(f"pipeline {name!r} does not land messages, so it has no quarantine")
    jobs = {PipelineKind.LAND: make_requarantine}
    by_hand = CommandRun(declared, places, common.brokers, is_declared=True, lake=None, folder=None, jobs=jobs)
    by_hand.run(master, memory, once=True, as_json=common.as_json)


def _backfill_pipeline(pipeline: Pipeline, when: str) -> Pipeline:
    """Return a separate pipeline for a backfill; the same command continues it."""
    identity = uuid5(NAMESPACE_OID, f"millstream backfill {pipeline.pipeline_id} {pipeline.version} {when}")
    name = f"{pipeline.name[:150]}-backfill-{identity.hex[:_DIGEST_CHARACTERS]}"
    return replace(pipeline, pipeline_id=identity, name=name)


def _time_ms(text: str, *, flag: str) -> int:
    from millstream.client.admin.position import Kind, parse_position

    position = parse_position(text, now_ms=time.time_ns() // 1_000_000)
    if position.kind is Kind.START:
        return 0
    if position.kind is not Kind.TIME:
        raise typer.BadParameter(f"{flag} takes a time, such as 2026-01-31T12:00:00Z, or an age, such as 7d")
    return position.value


app = Noun(
    help="Create, run and manage pipelines, which run on Spark.",
    no_args_is_help=True,
)
app.command("run")(expand_options(pipeline_run.run, without=flags_not_for(None)))
app.command("backfill")(backfill)
app.command("requarantine")(requarantine)

TABLES_SHOWN_MAX: Final = 20
"""The maximum number of tables shown; all of them have the same parent."""
STALLED_S_MIN: Final = 30.0
"""How long a batch must have made no progress to be reported; Spark reports on its tasks every ten seconds."""


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List all pipelines and their state."""
    from millstream.client.admin.pipelines import summary_of

    rows = [summary_of(described) for described in call_pipelines(common, lambda pipelines: pipelines.describe())]
    keys = ("pipeline", "kind", "state", "rows", "rows_per_s", "lag", "restarts", "error")
    shown = [[_displayed_value(key, row[key]) for key in keys] for row in rows]
    empty = "No pipelines yet; create one with: millstream pipeline create"
    print_list({"pipelines": rows}, keys, shown, empty=empty, as_json=common.as_json)


@app.command("describe")
def describe(name: Name, common: Common = COMMON) -> None:
    """Show a pipeline's settings and state."""
    described = call_broker(common, lambda client: _describe(client, name))
    if common.as_json:
        print_json(described)
        return
    print_line(f"{one_line(name)}  ({described['kind']}, {described['state']})")
    facts = _facts(described)
    width = max(10, *map(len, facts))
    for word, text in facts.items():
        # Spark's errors about a statement mark the position on the lines below.
        for at, line in enumerate(text.splitlines() or [""]):
            print_line(f"{('' if at else word).ljust(width)}  {one_line(line)}")
    print_line()
    long = [name for name in LONG_TEXTS if name in described["settings"]]
    settings, overrides = (
        {name: text for name, text in described[part].items() if name not in long} for part in ("settings", "overrides")
    )
    print_settings(settings, overrides)
    if described["kind"] == "route":
        print_line()
        print_line(
            f"{counted(len(described['rules']), 'rule')}; millstream pipeline rule list {one_line(name)} shows them."
        )
    for note in described["notes"]:
        print_note(one_line(note))


Run = Annotated[int, flag("--run", "N", "The number of the run. Default: the last one.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100, help="How many runs to show.")]


@app.command("runs")
def runs(name: Name, limit: Limit = 20, common: Common = COMMON) -> None:
    """List the runs of a job, the latest first."""
    from millstream.client.admin.pipelines import shown_run

    runs_listed = call_pipelines(common, lambda pipelines: pipelines.runs(name, limit=limit))
    columns = ["run", "state", "due", "took", "attempt", "node", "code", "progress", "error"]
    document, rows = {"pipeline": name, "runs": runs_listed}, [_run_row(shown_run(run)) for run in runs_listed]
    print_list(document, columns, rows, empty=f"Job {one_line(name)} has not run yet.", as_json=common.as_json)


@app.command("logs")
def logs(name: Name, run: Run = 0, common: Common = COMMON) -> None:
    """Show the output of a job run: the last 256 KiB of it."""
    log = call_pipelines(common, lambda pipelines: pipelines.run_log(name, run))
    if common.as_json:
        print_json({"pipeline": name, **log})
        return
    if log["is_truncated"]:
        print_note("this is the end of a longer log")
    for line in log["text"].splitlines():
        print_line(one_line(line))


@app.command("trigger")
def trigger(name: Name, common: Common = COMMON) -> None:
    """Run a job now, regardless of its schedule. If it is running, the next run follows."""
    call_pipelines(common, lambda pipelines: pipelines.request_run(name))
    shown = one_line(name)
    text = f"Job {shown} is running; see: millstream pipeline runs {shown}"
    print_result({"pipeline": name, "requested": True}, text, as_json=common.as_json)


@app.command("cancel")
def cancel(name: Name, common: Common = COMMON) -> None:
    """Cancel the current run of a job. It is not retried, and the schedule continues."""
    number = call_pipelines(common, lambda pipelines: pipelines.cancel_run(name))
    text = f"Cancelled run {number} of job {one_line(name)}."
    print_result({"pipeline": name, "run": number}, text, as_json=common.as_json)


def _run_row(run: dict[str, Any]) -> list[Any]:
    return [
        run["run"],
        run["state"],
        local_time(run["scheduled_ms"]),
        f"{run['took_s']:.0f} s",
        run["attempt"],
        run["node"],
        run["code_hash"],
        ", ".join(f"{key}: {value}" for key, value in run["progress"].items()),
        headline(run["error"]) or None,
    ]


@app.command("update")
def update(
    name: Name,
    settings: Settings = None,
    unset: Unset = None,
    file: Program = None,
    requirements: Requirements = None,
    common: Common = COMMON,
) -> None:
    """Change settings of a pipeline. It continues with them; a parked pipeline is retried."""
    flags = Flags(file=file, requirements=requirements, settings=settings)
    changes: dict[str, str | None] = {**flags.settings_of(PipelineKind.JOB), **dict.fromkeys(unset or [])}
    if not changes:
        raise typer.BadParameter("nothing to change; pass --set or --unset, or --file or --requirements for a job")
    notes = call_pipelines(common, lambda pipelines: pipelines.alter(name, changes))
    text = f"Changed pipeline {one_line(name)}."
    shown = {setting: HIDDEN if value and setting in SECRET_SETTINGS else value for setting, value in changes.items()}
    print_with_notes({"pipeline": name, "changes": shown}, text, notes, as_json=common.as_json)


@app.command("start")
def start(name: Name, common: Common = COMMON) -> None:
    """Start a pipeline; a parked pipeline is retried."""
    call_pipelines(common, lambda pipelines: pipelines.start(name))
    print_result({"pipeline": name, "enabled": True}, f"Started pipeline {one_line(name)}.", as_json=common.as_json)


@app.command("stop")
def stop(name: Name, common: Common = COMMON) -> None:
    """Stop a pipeline. When it is started again, it continues where it stopped."""
    call_pipelines(common, lambda pipelines: pipelines.stop(name))
    print_result({"pipeline": name, "enabled": False}, f"Stopped pipeline {one_line(name)}.", as_json=common.as_json)


@app.command("delete")
def delete(name: Name, yes: Yes = False, common: Common = COMMON) -> None:
    """Delete a pipeline; tables and topics that it wrote stay. Asks for confirmation at a terminal."""
    confirm(f"Delete pipeline {name} and its progress?", unless=yes or common.as_json)
    call_pipelines(common, lambda pipelines: pipelines.delete(name))
    print_result({"pipeline": name, "deleted": True}, f"Deleted pipeline {one_line(name)}.", as_json=common.as_json)


async def _describe(client: Client, name: str) -> dict[str, Any]:
    from millstream.client.admin.pipelines import PipelineClient, tables_of

    (described,) = await PipelineClient(client).describe([name])
    tables = await tables_of(client, described)
    return {
        **described,
        "tables": [asdict(table) for table in tables.tables],
        "notes": [*described["notes"], *tables.notes],
    }


def _tables(tables: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the locations of the tables, and how to read the first of them."""
    if not tables:
        return {}
    locations = [table["location"] for table in tables[:TABLES_SHOWN_MAX]]
    more = len(tables) - len(locations)
    return {"tables": "\n".join([*locations, *([f"and {more} more"] if more else [])]), "read by": tables[0]["read"]}


def _facts(described: dict[str, Any]) -> dict[str, str]:
    facts = {"id": described["pipeline_id"], "group": described["group"], **_tables(described["tables"])}
    report = described["report"]
    if described.get("owner"):
        facts["owner"] = described["owner"]
    if described["parked"]:
        facts["parked"] = described["parked"]
    elif report is not None and report.get("failing_ms"):
        retried = "" if described["kind"] == "job" else "; it is retried at least every minute"
        facts["failing"] = f"since {local_time(report['failing_ms'])}{retried}"
    lag = described.get("lag")
    if described["kind"] == "job":
        return {**facts, **_job_facts(described)}
    if lag is not None or report is not None:
        facts["lag"] = "not known yet" if lag is None else f"{lag:,}"
    if report is not None:
        facts.update(_report_facts(report, parked=described["parked"]))
    return facts


def _job_facts(described: dict[str, Any]) -> dict[str, str]:
    code = described["settings"]["code"]
    facts = {
        "code": f"{counted(len(code.splitlines()), 'line')}, {code_hash(code, described['settings']['lock'])}, version "
        f"{described['version']}; millstream pipeline describe {described['name']} --json shows it"
    }
    report = described["report"]
    if report is None:
        return facts
    facts["node"] = str(report["node"])
    facts["runs"] = f"{report['run']}; see: millstream pipeline runs {described['name']}"
    if report["next_run_ms"]:
        facts["next run"] = local_time(report["next_run_ms"])
    if report["last_error"]:
        facts["last error"] = f"({local_time(report['last_error_ms'])}) {report['last_error'].rstrip()}"
    return facts


def _report_facts(report: dict[str, Any], *, parked: str) -> dict[str, str]:
    facts = {
        "node": str(report["node"]),
        "rows": f"{report['rows']:,} in {counted(report['batches'], 'batch')}, {report['rows_per_s']:,.0f} a second",
        "restarts": str(report["restarts"]),
    }
    if report.get("stalls"):
        facts["stalls"] = f"{report['stalls']} (batches that were cancelled because they made no progress)"
    if report.get("stalled_s", 0.0) >= STALLED_S_MIN:
        facts["stalled"] = f"no progress for {report['stalled_s']:.0f} s"
    facts.update({name: f"{number:,}" for name, number in sorted(report["counts"].items())})
    for name, number in sorted(report.get("levels", {}).items()):
        facts[name] = local_time(number * 1000) if name.endswith("_seconds") else f"{number:,}"
    facts.update(report.get("facts", {}))
    if report["last_error"]:
        text = "as above" if report["last_error"] == parked else report["last_error"].rstrip()
        facts["last error"] = f"({local_time(report['last_error_ms'])}) {text}"
    return facts


def _displayed_value(key: str, value: Any) -> Any:
    if key == "rows_per_s":
        return round(value)
    if key == "error":
        return headline(value) or None
    return value


create_app = Noun(
    help="Create and start a pipeline of one of these kinds.",
    no_args_is_help=True,
)

Stopped = Annotated[bool, typer.Option("--stopped", help="Create it stopped; start it later with pipeline start.")]


_KINDS: Final = {
    PipelineKind.LAND: "Land topics in tables, every message exactly once.",
    PipelineKind.TRANSFORM: "Write the rows of a SQL statement to a topic, exactly once.",
    PipelineKind.ROUTE: "Route messages to topics by rules, exactly once. millstream pipeline rule changes the rules.",
    PipelineKind.JOB: "Run your own PySpark program. It runs once, at an interval, on a schedule, or continuously.",
    PipelineKind.LEDGER: "Land the events of deliveries in a table, and audit them. Includes subscriptions with "
    "--ledger; the audit runs once a day.",
}


def _command(kind: PipelineKind) -> Callable[..., None]:
    def create(
        name: Name, flags: Flags, stopped: Stopped = False, if_missing: IfMissing = False, common: Common = COMMON
    ) -> None:
        with named_by_caller(flags.flags_of_settings()):
            notes = _declare(name, kind, flags, common, stopped=stopped, if_missing=if_missing)
        text = _outcome(one_line(name), kind, is_new=notes is not None, stopped=stopped)
        document = {"pipeline": name, "kind": kind, "created": notes is not None}
        print_with_notes(document, text, notes or (), as_json=common.as_json)

    return expand_options(create, without=flags_not_for(kind))


for _kind, _text in _KINDS.items():
    create_app.command(_kind.value, help=_text)(_command(_kind))
app.add_typer(create_app, name="create")
app.add_typer(pipeline_rule.app, name="rule")


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
) -> Sequence[str] | None:
    """Declare it and return notes; None if it exists."""
    settings = flags.settings_of(kind)
    rules = () if flags.rules is None else read_rules(flags.rules)
    # Errors in it are reported even when no broker responds.
    check_pipeline(name, kind, settings)
    check_rules(kind, rules)
    try:
        return call_pipelines(
            common,
            lambda pipelines: pipelines.create(name, kind, settings, rules=rules, is_enabled=not stopped),
        ).notes
    except PipelineExists:
        if not if_missing:
            raise
        return None
