"""Pipelines: state, rate, lag, errors; start and stop, settings, rules of routes, runs of jobs and their logs."""

from __future__ import annotations

import time
from typing import Any, Final

from millstream.client.admin.pipeline_storage import tables_of
from millstream.client.admin.pipelines import PipelineClient, pipeline_of, summary_of
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.core.pipeline import PipelineKind, Rule
from millstream.core.pipeline_rules import check_rules
from millstream.core.setting import HIDDEN
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.pages.subscriptions import try_condition
from millstream.gateway.console.visit import PAGE_ROWS, Answer, Done, Page, PageRoute, Visit, address, change, command

RULES_SHOWN: Final = 200
RULES_TRIED: Final = 20
RUNS_SHOWN: Final = 50
VALUE_CHARACTERS_MAX: Final = 256 * 1024


async def list_all(visit: Visit) -> Answer:
    """List pipelines."""
    search, page = visit.text("search", length_max=249), visit.number("page", 0, high=1_000_000)
    found = [summary_of(one) for one in await PipelineClient(visit.services.client).describe()]
    rows = [one for one in found if search.lower() in one["pipeline"].lower()]
    context = {
        "pipelines": rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS],
        "total": len(rows),
        "search": search,
        "page": page,
        "rows": PAGE_ROWS,
    }
    return Page("pipelines.html", context)


async def show(visit: Visit) -> Answer:
    """Show one pipeline, and if asked for which recent messages its rules match."""
    name, client = visit.names["pipeline"], visit.services.client
    (described,) = await PipelineClient(client).describe([name])
    found = await tables_of(client, described)
    kind = described["kind"]
    context = {
        "name": name,
        "described": described,
        "report": described["report"] or {},
        "summary": summary_of(described),
        "tables": [one._asdict() for one in found.tables],
        "notes": [*described["notes"], *found.notes],
        "rules": described["rules"][:RULES_SHOWN],
        "rules_left": max(0, len(described["rules"]) - RULES_SHOWN),
        "runs": [],
        "tried": {},
        "problem": "",
        "settings": [one for one in sorted(described["settings"].items()) if one[0] != "code"],
        "code": described["settings"].get("code", ""),
        "changeable": [key for key in sorted(described["settings"]) if described["settings"][key] != HIDDEN],
        "may_change": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
    }
    if kind == PipelineKind.JOB:
        context["runs"] = [_run(one) for one in await PipelineClient(client).runs(name, limit=RUNS_SHOWN)]
    if kind == PipelineKind.ROUTE and visit.text("try") == "1":
        try:
            context["tried"] = await _try_rules(visit, described)
        except MillstreamError as error:
            context["problem"] = str(error)
    return Page("pipeline.html", context)


def _run(run: dict[str, Any]) -> dict[str, Any]:
    ended_ms = run["ended_ms"] or time.time() * 1000
    progress = {key: value for key, value in run["progress"].items() if key != "pin"}
    return {**run, "took_s": max(0.0, ended_ms - run["started_ms"]) / 1000, "progress": progress}


async def _try_rules(visit: Visit, described: dict[str, Any]) -> dict[str, str]:
    """Return how many of the recent messages of its topic each rule matches; nothing is routed."""
    tried = {}
    for rule in pipeline_of(described).rules[:RULES_TRIED]:
        if rule.subscription:
            tried[rule.name] = f"as subscription {rule.subscription} does"
            continue
        if not await visit.may(Operation.READ, ResourceType.TOPIC, rule.topic):
            raise NotAuthorized(f"trying the rules needs READ on topic {rule.topic!r}")
        (found,) = await try_condition(visit, [rule.topic], rule.condition or "TRUE") or [{"matched": 0, "read": 0}]
        tried[rule.name] = f"{found['matched']:,} of {found['read']:,}"
    return tried


async def start(visit: Visit) -> Answer:
    """Start a pipeline; a parked one is retried."""
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).start(name)
    return _done(name, f"Pipeline {name} starts", "start", name)


async def stop(visit: Visit) -> Answer:
    """Stop a pipeline."""
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).stop(name)
    return _done(name, f"Pipeline {name} stops", "stop", name)


async def delete(visit: Visit) -> Answer:
    """Delete a pipeline; what it wrote stays."""
    name = visit.names["pipeline"]
    visit.confirm(name)
    await PipelineClient(visit.services.client).delete(name)
    return Done(address("pipelines"), f"Pipeline {name} is deleted: {command('pipeline', 'delete', name)}")


async def alter(visit: Visit) -> Answer:
    """Change a setting, or check a change without making it."""
    name, key = visit.names["pipeline"], visit.text("setting")
    value = visit.text("setting_value", length_max=VALUE_CHARACTERS_MAX).replace("\r\n", "\n")
    if not key:
        raise invalid("choose a setting")
    is_trial, is_reset = visit.text("only") == "check", visit.text("reset") == "1"
    changes = {key: None if is_reset else value}
    notes = await PipelineClient(visit.services.client).alter(name, changes, validate_only=is_trial)
    said = " ".join(notes)
    if is_trial:
        return Done(
            address("pipelines", name), f"{key} could be changed like this; nothing was changed. {said}".strip()
        )
    words = ("--unset", key) if is_reset else ("--set", f"{key}={value}")
    return _done(name, f"Pipeline {name} is changed. {said}".strip(), "update", name, *words)


async def put_rule(visit: Visit) -> Answer:
    """Add or replace a rule of a route, or try its condition on recent messages."""
    name, rule = visit.names["pipeline"], visit.text("rule", length_max=249)
    topic, targets = visit.text("topic", length_max=249), visit.text("to").replace(",", " ").split()
    condition = visit.text("where", length_max=65_536)
    new = Rule(name=rule, topic=topic, targets=tuple(targets), condition=condition)
    check_rules(PipelineKind.ROUTE, [new])
    is_trial = visit.text("only") == "check"
    changed = await PipelineClient(visit.services.client).change_rules(name, [new], validate_only=is_trial)
    said = " ".join(changed.notes)
    if is_trial:
        found = await try_condition(visit, [topic], condition or "TRUE")
        matched = "".join(f"{one['matched']:,} of {one['read']:,} recent messages of {topic} match. " for one in found)
        return Done(address("pipelines", name), f"The rule could be put; nothing was changed. {matched}{said}".strip())
    words = ["--topic", topic, *(word for one in targets for word in ("--to", one))]
    if condition:
        words += ["--where", condition]
    return _done(name, f"Rule {rule} applies from the next batch on. {said}".strip(), "rule", "put", name, rule, *words)


async def delete_rule(visit: Visit) -> Answer:
    """Delete a rule; what it has routed stays."""
    name, rule = visit.names["pipeline"], visit.text("rule", length_max=249)
    visit.confirm(rule)
    left = (await PipelineClient(visit.services.client).change_rules(name, gone=[rule])).rules
    return _done(name, f"Rule {rule} is deleted, {left:,} left", "rule", "delete", name, rule)


async def trigger(visit: Visit) -> Answer:
    """Run a job now."""
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).request_run(name)
    return _done(name, f"Job {name} runs now, or after the run in progress", "trigger", name)


async def cancel_run(visit: Visit) -> Answer:
    """Cancel the run of a job that is in progress."""
    name = visit.names["pipeline"]
    visit.confirm(name)
    run = await PipelineClient(visit.services.client).cancel_run(name)
    return _done(name, f"Run {run} of {name} is cancelled", "cancel", name)


async def show_run(visit: Visit) -> Answer:
    """Show a run of a job, and what it has printed."""
    name, number = visit.names["pipeline"], visit.names["run"]
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise invalid(f"{number!r} is not the number of a run")
    pipelines = PipelineClient(visit.services.client)
    runs = [one for one in await pipelines.runs(name, limit=100) if one["run"] == int(number)]
    log, problem = {"text": "", "is_cut": False}, ""
    try:
        log = await pipelines.run_log(name, int(number))
    except MillstreamError as error:
        problem = str(error)
    context = {
        "name": name,
        "number": int(number),
        "run": _run(runs[0]) if runs else None,
        "log": log,
        "problem": problem,
        "is_running": bool(runs) and not runs[0]["ended_ms"],
    }
    return Page("run.html", context)


def _done(name: str, text: str, *words: object) -> Done:
    return Done(address("pipelines", name), f"{text}: {command('pipeline', *words)}")


_ONE: Final = "/pipelines/{pipeline}"

ROUTES: Final = (
    PageRoute(path="/pipelines", handle=list_all),
    PageRoute(path=_ONE, handle=show),
    PageRoute(path=f"{_ONE}/runs/{{run}}", handle=show_run),
    change(f"{_ONE}/start", start),
    change(f"{_ONE}/stop", stop),
    change(f"{_ONE}/settings", alter),
    change(f"{_ONE}/rule", put_rule),
    change(f"{_ONE}/delete-rule", delete_rule),
    change(f"{_ONE}/trigger", trigger),
    change(f"{_ONE}/cancel", cancel_run),
    change(f"{_ONE}/delete", delete),
)
