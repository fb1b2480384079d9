"""Pipelines: state, rate, lag, errors; start and stop, settings, rules of routes, runs of jobs and their logs."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from millstream.client.admin.pipelines import PipelineClient, pipeline_of, shown_run, storage_in, summary_of, tables_of
from millstream.client.admin.security import create_token, revoke_token
from millstream.core.acl import EVERYONE, WILDCARD, Operation, Permission, ResourceType, parse_rules
from millstream.core.child_process import environment_without_settings, hang_up, read_events, send_line, spawn_module
from millstream.core.errors import (
    CoordinatorUnavailable,
    InvalidRequest,
    MillstreamError,
    NotAuthorized,
    RequestTimedOut,
)
from millstream.core.pipeline import SECRET_SETTINGS, Pipeline, PipelineKind, Rule
from millstream.core.pipeline_rules import check_rules
from millstream.core.private_file import write_private
from millstream.core.scratch import temporary_folder_async
from millstream.core.setting import HIDDEN
from millstream.gateway.api.problem import invalid
from millstream.gateway.api.services import Services
from millstream.gateway.console.pages.subscriptions import try_condition
from millstream.gateway.console.tasks import Task, TaskProgress
from millstream.gateway.console.visit import (
    Checked,
    ConsoleSettings,
    Done,
    Page,
    PageRoute,
    Response,
    Visit,
    address,
    change,
    done,
)
from millstream.protocol.wire.credentials import NODE_CREDENTIALS

RULES_SHOWN: Final = 200
RULES_TRIED: Final = 20
RUNS_SHOWN: Final = 50
VALUE_CHARACTERS_MAX: Final = 256 * 1024
DRY_RUN_S: Final = 180.0
DRY_RUN_USUAL_S: Final = 40.0
"""How long a dry run usually takes: most of it is Spark's start."""
RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024
_DRY_RUN: Final = "millstream.pipelines.runtime.dry_run"
_TRYING: Final = asyncio.Semaphore(1)
"""One dry run at a time: it takes a gigabyte of memory."""
_STATEMENT: Final = "sql"
_MAY_READ: Final = (
    *parse_rules(Permission.ALLOW, EVERYONE, "read,describe", "topic:*", False, WILDCARD),
    *parse_rules(Permission.ALLOW, EVERYONE, "describe", "group:*", False, WILDCARD),
)


async def list_all(visit: Visit) -> Response:
    pipelines = [summary_of(pipeline) for pipeline in await PipelineClient(visit.services.client).describe()]
    rows = [pipeline for pipeline in pipelines if visit.search.lower() in pipeline["pipeline"].lower()]
    return Page("pipelines.html", {**visit.paging(len(rows)), "pipelines": visit.on_page(rows)})


async def show(visit: Visit) -> Response:
    """Show one pipeline, and if asked for which recent messages its rules match."""
    name, client = visit.names["pipeline"], visit.services.client
    (described,) = await PipelineClient(client).describe([name])
    tables = await tables_of(client, described)
    kind = described["kind"]
    context = {
        "name": name,
        "described": described,
        "report": described["report"] or {},
        "summary": summary_of(described),
        "tables": tables.tables,
        "notes": [*described["notes"], *tables.notes],
        "rules": described["rules"][:RULES_SHOWN],
        "rules_left": max(0, len(described["rules"]) - RULES_SHOWN),
        "runs": [],
        "tried": {},
        "problem": "",
        "has_dry_run": _has_dry_run(described),
        "dry_run_refusal": dry_run_refusal(described, visit.settings),
        "statement": described["settings"].get(_STATEMENT, "") if kind == PipelineKind.TRANSFORM else "",
        "settings": [setting for setting in sorted(described["settings"].items()) if setting[0] != "code"],
        "code": described["settings"].get("code", ""),
        "changeable": [key for key in sorted(described["settings"]) if key not in SECRET_SETTINGS],
        "may_change": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
    }
    if kind == PipelineKind.JOB:
        context["runs"] = [shown_run(run) for run in await PipelineClient(client).runs(name, limit=RUNS_SHOWN)]
    if kind == PipelineKind.ROUTE and visit.text("try") == "1":
        try:
            context["tried"] = await _try_rules(visit, described)
        except MillstreamError as error:
            context["problem"] = str(error)
    return Page("pipeline.html", context)


async def _try_rules(visit: Visit, described: dict[str, Any]) -> dict[str, str]:
    """Count the recent messages of the topic that each rule matches, without routing them."""
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


async def start(visit: Visit) -> Response:
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).start(name)
    return _done(name, f"Pipeline {name} is starting", "start", name)


async def stop(visit: Visit) -> Response:
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).stop(name)
    return _done(name, f"Pipeline {name} is stopping", "stop", name)


async def delete(visit: Visit) -> Response:
    name = visit.names["pipeline"]
    visit.confirm(name)
    await PipelineClient(visit.services.client).delete(name)
    return done(address("pipelines"), f"Pipeline {name} is deleted", "pipeline", "delete", name)


async def alter(visit: Visit) -> Response:
    """Change a setting, or check a change without making it."""
    name, key = visit.names["pipeline"], visit.text("setting")
    value = visit.text("setting_value", length_max=VALUE_CHARACTERS_MAX).replace("\r\n", "\n")
    if not key:
        raise invalid("choose a setting")
    if key in SECRET_SETTINGS:
        # The page shows what was set, and the command that sets it.
        raise invalid(f"{key} is secret: set it on the command line")
    is_trial, is_reset = visit.text("only") == "check", visit.text("reset") == "1"
    changes = {key: None if is_reset else value}
    notes = await PipelineClient(visit.services.client).alter(name, changes, validate_only=is_trial)
    notes_text = " ".join(notes)
    if is_trial:
        return Checked(f"The value of {key} is valid; nothing was changed. {notes_text}".strip())
    words = ("--unset", key) if is_reset else ("--set", f"{key}={value}")
    return _done(name, f"Pipeline {name} is changed. {notes_text}".strip(), "update", name, *words)


async def dry_run(visit: Visit) -> Response:
    """Try a pipeline on the newest messages, in its own process and with the rights of the user."""
    name, client = visit.names["pipeline"], visit.services.client
    (described,) = await PipelineClient(client).describe([name])
    pipeline = pipeline_of(described)
    if not _has_dry_run(described):
        raise invalid(
            f"{name} has no dry run in the console; for a job or a transform with functions, use millstream "
            f"pipeline run {name} --dry-run"
        )
    if not await visit.may_change(Operation.ALTER, ResourceType.CLUSTER):
        raise NotAuthorized("a dry run starts a process on this node, which needs ALTER on the cluster")
    if refusal := dry_run_refusal(described, visit.settings):
        raise invalid(refusal)
    statement = visit.text(_STATEMENT, length_max=VALUE_CHARACTERS_MAX).replace("\r\n", "\n")
    if statement and pipeline.kind is PipelineKind.TRANSFORM:
        pipeline = replace(pipeline, overrides={**pipeline.overrides, _STATEMENT: statement})
    lake = storage_in(visit.settings.data, lake=visit.settings.lake).lake if pipeline.kind is PipelineKind.LAND else ""

    async def act(task: Task, services: Services) -> str:
        document = await _try_in_process(pipeline, lake, services, is_guarded=bool(visit.principal))
        for topic in document["columns"] if "columns" in document else [topic["topic"] for topic in document["topics"]]:
            await visit.audit_reading(topic, "dry-run", client=services.client)
        task.result = document
        return "Nothing was written or committed."

    task = Task(visit.user, visit.session, f"Dry run of {name}", address("pipelines", name), "")
    reading = "Reading the newest messages."
    if pipeline.kind is PipelineKind.TRANSFORM:
        reading = "Starting Spark, then reading the newest messages."
    task.measure = lambda: TaskProgress(min(0.95, task.took_s / DRY_RUN_USUAL_S), reading)
    started = await visit.tasks.start(task, act, visit.acting)
    # Also if it has ended: its page shows the rows.
    return Done(address("tasks", started.id), "")


def _has_dry_run(described: dict[str, Any]) -> bool:
    kind = PipelineKind(described["kind"])
    return kind in (PipelineKind.LAND, PipelineKind.TRANSFORM) and not pipeline_of(described).has_own_driver


def dry_run_refusal(described: Mapping[str, Any], settings: ConsoleSettings) -> str:
    """Return why this node cannot try a pipeline that has a dry run; empty if it can."""
    if not settings.runs_pipelines:
        return (
            "this node runs no pipelines, since pipelines-enabled is off; use the console of a node that does, or the "
            "command line"
        )
    secret = sorted(name for name, text in described["overrides"].items() if text == HIDDEN)
    if secret:
        return (
            f"the console is not given {', '.join(secret)}, which is secret; use the command line, with the object "
            "store's credentials in its environment"
        )
    return ""


async def _try_in_process(pipeline: Pipeline, lake: str, services: Services, *, is_guarded: bool) -> dict[str, Any]:
    """Run the process of a dry run; where users are authorized, it gets a read-only token."""
    from millstream.pipelines.runtime.dry_run import DryRunOrder, DryRunResponse
    from millstream.pipelines.source.access import connection_access

    access = connection_access(NODE_CREDENTIALS.get())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_TRYING)
        scratch = await stack.enter_async_context(temporary_folder_async())
        if is_guarded:
            made = await create_token(services.client, _MAY_READ, lifetime_ms=int(2 * DRY_RUN_S * 1000))
            stack.push_async_callback(_revoke, services, made.token_id)
            path = Path(scratch, "token")
            write_private(path, made.token.encode())
            access = replace(access, token_file=str(path))
        order = DryRunOrder(pipeline=pipeline, kafka=services.kafka_address, lake=lake, access=access.as_options())
        # Temporary files go to the scratch folder: the process may be killed, and could then not remove them.
        environment = {**environment_without_settings(), "TMPDIR": scratch}
        process = await spawn_module(_DRY_RUN, stderr=DEVNULL, limit=RESPONSE_BYTES_MAX, env=environment)
        stack.push_async_callback(_kill, process)
        await send_line(process, order)
        try:
            async with asyncio.timeout(DRY_RUN_S):
                response = await anext(read_events(process, DryRunResponse, name="a dry run"), None)
        except TimeoutError:
            raise RequestTimedOut(f"the dry run took longer than {DRY_RUN_S:g} s, and was ended") from None
        if response is None:
            raise CoordinatorUnavailable("the dry run process exited without a result; it may have run out of memory")
        if response.failed:
            raise InvalidRequest(response.failed)
        return response.document


async def _revoke(services: Services, token_id: str) -> None:
    # It expires soon anyway.
    with suppress(MillstreamError):
        await revoke_token(services.client, token_id)


async def _kill(process: Process) -> None:
    hang_up(process)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def put_rule(visit: Visit) -> Response:
    """Add or replace a rule of a route, or try its condition on recent messages."""
    name, rule = visit.names["pipeline"], visit.text("rule", length_max=249)
    topic, targets = visit.text("topic", length_max=249), visit.text("to").replace(",", " ").split()
    condition = visit.text("where", length_max=65_536)
    new = Rule(name=rule, topic=topic, targets=tuple(targets), condition=condition)
    check_rules(PipelineKind.ROUTE, [new])
    is_trial = visit.text("only") == "check"
    changed = await PipelineClient(visit.services.client).change_rules(name, [new], validate_only=is_trial)
    notes_text = " ".join(changed.notes)
    if is_trial:
        results = await try_condition(visit, [topic], condition or "TRUE")
        matched = "".join(
            f"{result['matched']:,} of {result['read']:,} recent messages of {topic} match. " for result in results
        )
        return Checked(f"The rule is valid; nothing was changed. {matched}{notes_text}".strip())
    words = ["--topic", topic, *(word for target in targets for word in ("--to", target))]
    if condition:
        words += ["--where", condition]
    return _done(
        name, f"Rule {rule} applies from the next batch on. {notes_text}".strip(), "rule", "put", name, rule, *words
    )


async def delete_rule(visit: Visit) -> Response:
    """Delete a rule; messages that it has routed stay."""
    name, rule = visit.names["pipeline"], visit.text("rule", length_max=249)
    visit.confirm(rule)
    remaining = (await PipelineClient(visit.services.client).change_rules(name, deleted=[rule])).rules
    return _done(name, f"Rule {rule} is deleted, {remaining:,} left", "rule", "delete", name, rule)


async def trigger(visit: Visit) -> Response:
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).request_run(name)
    return _done(name, f"Job {name} runs now, or after the run in progress", "trigger", name)


async def cancel_run(visit: Visit) -> Response:
    name = visit.names["pipeline"]
    visit.confirm(name)
    run = await PipelineClient(visit.services.client).cancel_run(name)
    return _done(name, f"Run {run} of {name} is cancelled", "cancel", name)


async def show_run(visit: Visit) -> Response:
    name, number = visit.names["pipeline"], visit.names["run"]
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise invalid(f"{number!r} is not the number of a run")
    pipelines = PipelineClient(visit.services.client)
    runs = [run for run in await pipelines.runs(name, limit=100) if run["run"] == int(number)]
    log, problem = {"text": "", "is_truncated": False}, ""
    try:
        log = await pipelines.run_log(name, int(number))
    except MillstreamError as error:
        problem = str(error)
    context = {
        "name": name,
        "number": int(number),
        "run": shown_run(runs[0]) if runs else None,
        "log": log,
        "problem": problem,
        "is_running": bool(runs) and not runs[0]["ended_ms"],
    }
    return Page("run.html", context)


def _done(name: str, text: str, *words: object) -> Done:
    return done(address("pipelines", name), text, "pipeline", *words)


_ONE: Final = "/pipelines/{pipeline}"

ROUTES: Final = (
    PageRoute(path="/pipelines", handle=list_all),
    PageRoute(path=_ONE, handle=show),
    PageRoute(path=f"{_ONE}/runs/{{run}}", handle=show_run),
    change(f"{_ONE}/start", start),
    change(f"{_ONE}/stop", stop),
    change(f"{_ONE}/settings", alter),
    change(f"{_ONE}/dry-run", dry_run),
    change(f"{_ONE}/rule", put_rule),
    change(f"{_ONE}/delete-rule", delete_rule),
    change(f"{_ONE}/trigger", trigger),
    change(f"{_ONE}/cancel", cancel_run),
    change(f"{_ONE}/delete", delete),
)
