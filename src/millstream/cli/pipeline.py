"""`millstream pipeline`: create, list, describe, update, start, stop, run and delete pipelines, and their rules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from millstream.cli import pipeline_create, pipeline_rule, pipeline_run
from millstream.cli.connection import ask
from millstream.cli.options import (
    DEFAULT_BROKERS,
    DEFAULT_TIMEOUT_S,
    AsJson,
    Brokers,
    Settings,
    TimeoutSeconds,
    Unset,
    Yes,
    ask_person,
    parse_assignments,
)
from millstream.cli.output import (
    counted,
    one_line,
    print_answer,
    print_json,
    print_line,
    print_note,
    print_noted,
    print_settings,
    print_table,
)
from millstream.cli.pipeline_options import Name
from millstream.cli.pipeline_question import ask_pipelines
from millstream.pipelines.jobs.headline import headline

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client

app = typer.Typer(
    help="Create, list, describe, update, start, stop, run and delete pipelines, which run on Spark.",
    no_args_is_help=True,
)
app.add_typer(pipeline_create.app, name="create")
app.add_typer(pipeline_rule.app, name="rule")
app.command("run")(pipeline_run.run)

TABLES_TOLD: Final = 20
"""So many tables are told of; all of them are below the same place."""
STILL_S_TOLD: Final = 30.0
"""A batch that has made no progress for so long is told of; Spark itself tells of its tasks every ten seconds."""


@app.command("list")
def list_(
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """List all pipelines and how they do."""
    from millstream.client.admin.pipelines import summary_of

    rows = [summary_of(told) for told in ask_pipelines(brokers, timeout, lambda pipelines: pipelines.describe())]
    if as_json:
        print_json({"pipelines": rows})
    elif rows:
        keys = ("pipeline", "kind", "state", "rows", "rows_per_s", "lag", "restarts", "error")
        print_table([key.replace("_", "-") for key in keys], [[_shown(key, row[key]) for key in keys] for row in rows])
    else:
        print_line("No pipelines yet; make one with millstream pipeline create.")


@app.command("describe")
def describe(
    name: Name,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Show what a pipeline is to do, and how it does."""
    told = ask(brokers, timeout, lambda client: _described(client, name))
    if as_json:
        print_json(told)
        return
    print_line(f"{one_line(name)}  ({told['kind']}, {told['state']})")
    facts = _facts(told)
    width = max(10, *map(len, facts))
    for word, text in facts.items():
        # What Spark says of a statement points at the place, in lines below each other.
        for at, line in enumerate(text.splitlines() or [""]):
            print_line(f"{('' if at else word).ljust(width)}  {one_line(line)}")
    print_line()
    print_settings(told["settings"], told["overrides"])
    if told["kind"] == "route":
        print_line()
        print_line(f"{counted(len(told['rules']), 'rule')}; millstream pipeline rule list {one_line(name)} shows them.")
    for note in told["notes"]:
        print_note(one_line(note))


@app.command("update")
def update(
    name: Name,
    settings: Settings = None,
    unset: Unset = None,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Change settings of a pipeline, which goes on with them where it is; one that is parked is tried again."""
    changes: dict[str, str | None] = {**parse_assignments(settings or [], flag="--set"), **dict.fromkeys(unset or [])}
    if not changes:
        raise typer.BadParameter("there is nothing to change; give --set or --unset")
    notes = ask_pipelines(brokers, timeout, lambda pipelines: pipelines.alter(name, changes))
    said = f"Changed pipeline {one_line(name)}."
    print_noted({"pipeline": name, "changes": changes}, said, notes, as_json=as_json)


@app.command("start")
def start(
    name: Name,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Have a pipeline run; one that is parked is tried again."""
    ask_pipelines(brokers, timeout, lambda pipelines: pipelines.start(name))
    print_answer({"pipeline": name, "wanted": True}, f"Started pipeline {one_line(name)}.", as_json=as_json)


@app.command("stop")
def stop(
    name: Name,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Have a pipeline run no more; when it is started again it goes on where it was."""
    ask_pipelines(brokers, timeout, lambda pipelines: pipelines.stop(name))
    print_answer({"pipeline": name, "wanted": False}, f"Stopped pipeline {one_line(name)}.", as_json=as_json)


@app.command("delete")
def delete(
    name: Name,
    yes: Yes = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Delete a pipeline; tables and topics that it wrote stay. A person at a terminal is asked first."""
    ask_person(f"Delete pipeline {name} and forget how far it came?", unless=yes or as_json)
    ask_pipelines(brokers, timeout, lambda pipelines: pipelines.delete(name))
    print_answer({"pipeline": name, "deleted": True}, f"Deleted pipeline {one_line(name)}.", as_json=as_json)


async def _described(client: Client, name: str) -> dict[str, Any]:
    from millstream.client.admin.landed_tables import tables_of
    from millstream.client.admin.pipelines import PipelineClient

    (told,) = await PipelineClient(client).describe([name])
    found = await tables_of(client, told)
    return {**told, "tables": [one._asdict() for one in found.tables], "notes": [*told["notes"], *found.notes]}


def _tables(tables: Sequence[dict[str, str]]) -> dict[str, str]:
    """Where the tables are, a line each, and how the first of them is read."""
    if not tables:
        return {}
    places = [one["place"] for one in tables[:TABLES_TOLD]]
    more = len(tables) - len(places)
    return {"tables": "\n".join([*places, *([f"and {more} more"] if more else [])]), "read by": tables[0]["read"]}


def _facts(told: dict[str, Any]) -> dict[str, str]:
    facts = {"id": told["pipeline_id"], "group": told["group"], **_tables(told["tables"])}
    report = told["report"]
    if told["parked"]:
        facts["parked"] = told["parked"]
    elif report is not None and report.get("failing_ms"):
        facts["failing"] = f"since {_when(report['failing_ms'])}; it is tried again at least every minute"
    lag = told.get("lag")
    if lag is not None or report is not None:
        facts["lag"] = "not known yet" if lag is None else f"{lag:,}"
    if report is not None:
        facts.update(_reported(report, parked=told["parked"]))
    return facts


def _reported(report: dict[str, Any], *, parked: str) -> dict[str, str]:
    facts = {
        "node": str(report["node"]),
        "rows": f"{report['rows']:,} in {counted(report['batches'], 'batch')}, {report['rows_per_s']:,.0f} a second",
        "restarts": str(report["restarts"]),
    }
    if report.get("stalls"):
        facts["stalls"] = f"{report['stalls']} (batches that made no progress and were given up)"
    if report.get("still_s", 0.0) >= STILL_S_TOLD:
        facts["still"] = f"no progress for {report['still_s']:.0f} s"
    facts.update({what: f"{number:,}" for what, number in sorted(report["counts"].items())})
    if report["last_error"]:
        said = "as above" if report["last_error"] == parked else report["last_error"].rstrip()
        facts["last error"] = f"({_when(report['last_error_ms'])}) {said}"
    return facts


def _when(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")


def _shown(key: str, value: Any) -> Any:
    if key == "rows_per_s":
        return round(value)
    if key == "error":
        return headline(value) or None
    return value
