"""Pipelines: list, create, describe, change, delete, start, stop, the rules of routes and the runs of jobs."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.pipelines import LandedTable, PipelineClient, summary_of, tables_of
from millstream.core.job import RUNS_KEPT
from millstream.core.pipeline import NAME_LENGTH_MAX, PipelineKind, Rule, kind_of
from millstream.core.pipeline_rules import CONDITION_LENGTH_MAX, RULES_MAX, TARGETS_MAX
from millstream.gateway.api.problem import invalid
from millstream.gateway.api.route import (
    ChangedSettings,
    GivenSettings,
    NoFields,
    Request,
    Route,
    TopicName,
    changes_of,
    texts_of,
)
from millstream.gateway.api.services import Services
from millstream.protocol.private.pipeline_messages import PipelineReport, PipelineState, RunDescription

PipelineName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
RuleName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Kind = Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in PipelineKind]})]
"""An unknown kind is refused with the list of kinds."""


class RoutingRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that sends messages of a topic to other topics."""

    name: RuleName
    topic: TopicName
    targets: Annotated[list[TopicName], Meta(min_length=1, max_length=TARGETS_MAX)]
    condition: Annotated[
        str, Meta(max_length=CONDITION_LENGTH_MAX, description="A condition in SQL; empty matches all messages.")
    ] = ""
    subscription: Annotated[str, Meta(description="A subscription whose filter is used as the condition.")] = ""


Rules = Annotated[list[RoutingRule], Meta(max_length=RULES_MAX)]


class NewPipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline to declare."""

    name: PipelineName
    kind: Kind
    settings: GivenSettings = {}
    """Settings by name; the kind determines which there are."""
    rules: Rules = []
    """Only for routes."""
    enabled: Annotated[bool, Meta(description="Whether to start it at once.")] = True


class PipelineChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings to change; null resets one to its default."""

    settings: ChangedSettings


class RuleChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules to add or replace, and names of rules to delete."""

    put: Rules = []
    delete: Annotated[list[RuleName], Meta(max_length=RULES_MAX)] = []


class PipelineCreated(msgspec.Struct, frozen=True):
    """A declared pipeline."""

    pipeline: str
    id: str
    notes: list[str]
    """Hints for the owner, such as topics that do not exist yet."""


class PipelineSummary(msgspec.Struct, frozen=True):
    """A pipeline's summary."""

    pipeline: str
    kind: Kind
    state: PipelineState
    rows: int
    rows_per_s: float
    lag: int | None
    restarts: int
    error: str


class PipelineList(msgspec.Struct, frozen=True):
    """Pipelines, by name."""

    pipelines: list[PipelineSummary]


class RunList(msgspec.Struct, frozen=True):
    """The last runs of a job, the latest first."""

    runs: list[RunDescription]


class RunQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The number of runs to list."""

    limit: Annotated[int, Meta(ge=1, le=RUNS_KEPT)] = 20


class RunLog(msgspec.Struct, frozen=True):
    """The end of a run's output."""

    run: int
    text: str
    is_truncated: bool
    """Whether there was more before it."""


class RunRequested(msgspec.Struct, frozen=True):
    """A requested run."""

    pipeline: str
    requested: bool


class RunCancelled(msgspec.Struct, frozen=True):
    """A cancelled run."""

    pipeline: str
    run: int


class PipelineDescription(msgspec.Struct, frozen=True):
    """A pipeline with its settings, rules and progress."""

    name: str
    pipeline_id: str
    kind: Kind
    state: PipelineState
    group: str
    enabled: bool
    parked: str
    lag: int | None
    created_ms: int
    settings: dict[str, str]
    overrides: dict[str, str]
    rules: list[RoutingRule]
    tables: list[LandedTable]
    """The tables that a landing pipeline writes."""
    report: PipelineReport | None
    notes: list[str]
    """Hints for the owner, such as nodes that do not respond."""


class RuleList(msgspec.Struct, frozen=True):
    """The rules of a pipeline, by name."""

    rules: list[RoutingRule]


class RulesChanged(RuleList, frozen=True):
    """The rules of a pipeline after a change."""

    notes: list[str]
    """Hints for the owner, such as topics that do not exist yet."""


class PipelineEnabled(msgspec.Struct, frozen=True):
    """Whether a pipeline should run."""

    pipeline: str
    enabled: bool


async def list_pipelines(services: Services, request: Request[NoFields, NoFields]) -> PipelineList:
    pipelines = await PipelineClient(services.client).describe()
    return PipelineList([msgspec.convert(summary_of(pipeline), PipelineSummary) for pipeline in pipelines])


async def create(services: Services, request: Request[NoFields, NewPipeline]) -> PipelineCreated:
    new = request.body
    rules = msgspec.convert(new.rules, list[Rule], from_attributes=True)
    made = await PipelineClient(services.client).create(
        new.name, kind_of(new.kind), texts_of(new.settings), rules=rules, is_enabled=new.enabled
    )
    return PipelineCreated(new.name, made.pipeline_id, list(made.notes))


async def describe(services: Services, request: Request[Any, Any]) -> PipelineDescription:
    return await _describe(services, request.path["pipeline"], [])


async def _describe(services: Services, name: str, notes: list[str]) -> PipelineDescription:
    (described,) = await PipelineClient(services.client).describe([name])
    landed_tables = await tables_of(services.client, described)
    tables = [asdict(table) for table in landed_tables.tables]
    notes = [*notes, *described["notes"], *landed_tables.notes]
    return msgspec.convert({**described, "tables": tables, "notes": notes}, PipelineDescription)


async def change(services: Services, request: Request[NoFields, PipelineChanges]) -> PipelineDescription:
    if not request.body.settings:
        raise invalid("nothing to change; send `settings`")
    name = request.path["pipeline"]
    notes = await PipelineClient(services.client).alter(name, changes_of(request.body.settings))
    return await _describe(services, name, notes)


async def delete(services: Services, request: Request[NoFields, NoFields]) -> None:
    await PipelineClient(services.client).delete(request.path["pipeline"])


async def start(services: Services, request: Request[NoFields, NoFields]) -> PipelineEnabled:
    await PipelineClient(services.client).start(request.path["pipeline"])
    return PipelineEnabled(request.path["pipeline"], True)


async def stop(services: Services, request: Request[NoFields, NoFields]) -> PipelineEnabled:
    await PipelineClient(services.client).stop(request.path["pipeline"])
    return PipelineEnabled(request.path["pipeline"], False)


async def list_runs(services: Services, request: Request[RunQuery, NoFields]) -> RunList:
    runs = await PipelineClient(services.client).runs(request.path["pipeline"], limit=request.query.limit)
    return msgspec.convert({"runs": runs}, RunList)


async def read_log(services: Services, request: Request[NoFields, NoFields]) -> RunLog:
    number = request.path["run"]
    if not number.isdecimal() or len(number) > 15:
        raise invalid(f"the number of a run must be a whole number, not {number!r}; 0 is the last run")
    log = await PipelineClient(services.client).run_log(request.path["pipeline"], int(number))
    return msgspec.convert(log, RunLog)


async def request_run(services: Services, request: Request[NoFields, NoFields]) -> RunRequested:
    await PipelineClient(services.client).request_run(request.path["pipeline"])
    return RunRequested(request.path["pipeline"], True)


async def cancel_run(services: Services, request: Request[NoFields, NoFields]) -> RunCancelled:
    name = request.path["pipeline"]
    return RunCancelled(name, await PipelineClient(services.client).cancel_run(name))


async def list_rules(services: Services, request: Request[Any, Any]) -> RuleList:
    return RuleList(await _rules(services, request.path["pipeline"]))


async def change_rules(services: Services, request: Request[NoFields, RuleChanges]) -> RulesChanged:
    body, name = request.body, request.path["pipeline"]
    if not body.put and not body.delete:
        raise invalid("nothing to change; send rules to `put` or names to `delete`")
    rules = msgspec.convert(body.put, list[Rule], from_attributes=True)
    changed = await PipelineClient(services.client).change_rules(name, rules, deleted=body.delete)
    return RulesChanged(await _rules(services, name), list(changed.notes))


async def _rules(services: Services, name: str) -> list[RoutingRule]:
    (described,) = await PipelineClient(services.client).describe([name])
    return msgspec.convert(described["rules"], list[RoutingRule])


_ONE: Final = "/pipelines/{pipeline}"

ROUTES: Final = (
    Route("GET", "/pipelines", "List pipelines and their progress", list_pipelines, PipelineList),
    Route(
        "POST", "/pipelines", "Declare a pipeline", create, PipelineCreated, body=NewPipeline, status=HTTPStatus.CREATED
    ),
    Route("GET", _ONE, "Describe a pipeline", describe, PipelineDescription),
    Route("PATCH", _ONE, "Change settings of a pipeline", change, PipelineDescription, body=PipelineChanges),
    Route("DELETE", _ONE, "Delete a pipeline; its output stays", delete, None),
    Route("POST", f"{_ONE}/start", "Start a pipeline; a parked pipeline is retried", start, PipelineEnabled),
    Route("POST", f"{_ONE}/stop", "Stop a pipeline", stop, PipelineEnabled),
    Route("GET", f"{_ONE}/runs", "List the last runs of a job", list_runs, RunList, query=RunQuery),
    Route("GET", f"{_ONE}/runs/{{run}}/log", "Read the output of a job run", read_log, RunLog),
    Route("POST", f"{_ONE}/trigger", "Run a job now", request_run, RunRequested, status=HTTPStatus.ACCEPTED),
    Route("POST", f"{_ONE}/cancel", "Cancel the run of a job that is in progress", cancel_run, RunCancelled),
    Route("GET", f"{_ONE}/rules", "List the rules of a route", list_rules, RuleList),
    Route(
        "PATCH",
        f"{_ONE}/rules",
        "Add, replace and delete rules atomically",
        change_rules,
        RulesChanged,
        body=RuleChanges,
    ),
)
