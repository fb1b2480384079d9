"""Pipelines: list, create, describe, change, delete, start, stop, and the rules of those that route."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from millstream.client.admin.pipeline_storage import tables_of
from millstream.client.admin.pipelines import PipelineClient, summary_of
from millstream.core.pipeline import (
    CONDITION_LENGTH_MAX,
    NAME_LENGTH_MAX,
    RULES_MAX,
    TARGETS_MAX,
    PipelineKind,
    Rule,
    kind_of,
)
from millstream.gateway.api.problem import invalid
from millstream.gateway.api.route import NoFields, Request, Route, TopicName
from millstream.gateway.api.services import Services
from millstream.gateway.api.setting_values import ChangedSettings, GivenSettings, changes_of, texts_of

PipelineName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
RuleName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Kind = Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in PipelineKind]})]
"""One that there is none of is refused with those that there are."""
State = Literal["waiting", "starting", "running", "retrying", "parked", "stopped"]


class RoutingRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which messages of a topic go where."""

    name: RuleName
    topic: TopicName
    targets: Annotated[list[TopicName], Meta(min_length=1, max_length=TARGETS_MAX)]
    condition: Annotated[
        str, Meta(max_length=CONDITION_LENGTH_MAX, description="A condition in SQL; empty takes all messages.")
    ] = ""
    subscription: Annotated[str, Meta(description="A subscription whose filter is the condition instead.")] = ""


Rules = Annotated[list[RoutingRule], Meta(max_length=RULES_MAX)]


class NewPipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline to be declared."""

    name: PipelineName
    kind: Kind
    settings: GivenSettings = {}
    """Settings by their names; which there are depends on the kind."""
    rules: Rules = []
    """Only for those that route."""
    wanted: Annotated[bool, Meta(description="Whether it is to run at once.")] = True


class PipelineChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings to change; what is null goes back to its default."""

    settings: ChangedSettings


class RuleChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules to put in the place of those that have their names, and names of rules to delete."""

    put: Rules = []
    delete: Annotated[list[RuleName], Meta(max_length=RULES_MAX)] = []


class PipelineCreated(msgspec.Struct, frozen=True):
    """A pipeline that was declared."""

    pipeline: str
    id: str
    notes: list[str]
    """What its owner should know, such as topics that are not there yet."""


class PipelineSummary(msgspec.Struct, frozen=True):
    """A pipeline in one line."""

    pipeline: str
    kind: Kind
    state: State
    rows: int
    rows_per_s: float
    lag: int | None
    restarts: int
    error: str


class PipelineList(msgspec.Struct, frozen=True):
    """Pipelines, by their names."""

    pipelines: list[PipelineSummary]


class PipelineReport(msgspec.Struct, frozen=True):
    """How a pipeline does, since the driver that runs it was started."""

    state: State
    rows: int
    rows_per_s: float
    lag: int | None
    batches: int
    restarts: int
    stalls: int
    still_s: float
    last_error: str
    last_error_ms: int
    failing_ms: int
    counts: dict[str, int]
    node: int


class TableDescription(msgspec.Struct, frozen=True):
    """The table of a topic: a folder of the node, or a URL, and an expression of Python that reads it."""

    topic: str
    place: str
    read: str


class PipelineDescription(msgspec.Struct, frozen=True):
    """A pipeline with its settings and rules, and how it does if it is run now."""

    name: str
    pipeline_id: str
    kind: Kind
    state: State
    group: str
    wanted: bool
    parked: str
    lag: int | None
    created_ms: int
    settings: dict[str, str]
    overrides: dict[str, str]
    rules: list[RoutingRule]
    tables: list[TableDescription]
    """Where the tables of one that lands are."""
    report: PipelineReport | None
    notes: list[str]
    """What its owner should know, such as nodes that do not answer."""


class RuleList(msgspec.Struct, frozen=True):
    """The rules of a pipeline, by their names."""

    rules: list[RoutingRule]


class RulesChanged(RuleList, frozen=True):
    """The rules of a pipeline after they were changed."""

    notes: list[str]
    """What its owner should know, such as topics that are not there yet."""


class PipelineWanted(msgspec.Struct, frozen=True):
    """Whether a pipeline is to run."""

    pipeline: str
    wanted: bool


async def list_pipelines(services: Services, request: Request[NoFields, NoFields]) -> PipelineList:
    """All pipelines."""
    found = await PipelineClient(services.client).describe()
    return PipelineList([msgspec.convert(summary_of(one), PipelineSummary) for one in found])


async def create(services: Services, request: Request[NoFields, NewPipeline]) -> PipelineCreated:
    """Declare a pipeline."""
    new = request.body
    rules = [_rule(one) for one in new.rules]
    made = await PipelineClient(services.client).create(
        new.name, kind_of(new.kind), texts_of(new.settings), rules=rules, is_wanted=new.wanted
    )
    return PipelineCreated(new.name, str(made.pipeline_id), made.notes)


async def describe(services: Services, request: Request[Any, Any]) -> PipelineDescription:
    """One pipeline."""
    return await _described(services, request.path["pipeline"], [])


async def _described(services: Services, name: str, notes: list[str]) -> PipelineDescription:
    (described,) = await PipelineClient(services.client).describe([name])
    found = await tables_of(services.client, described)
    tables = [one._asdict() for one in found.tables]
    notes = [*notes, *described["notes"], *found.notes]
    return msgspec.convert({**described, "tables": tables, "notes": notes}, PipelineDescription)


async def change(services: Services, request: Request[NoFields, PipelineChanges]) -> PipelineDescription:
    """Change a pipeline, and say how it is then."""
    if not request.body.settings:
        raise invalid("there is nothing to change; give settings")
    name = request.path["pipeline"]
    notes = await PipelineClient(services.client).alter(name, changes_of(request.body.settings))
    return await _described(services, name, notes)


async def delete(services: Services, request: Request[NoFields, NoFields]) -> None:
    """Delete a pipeline; what it wrote stays."""
    await PipelineClient(services.client).delete(request.path["pipeline"])


async def start(services: Services, request: Request[NoFields, NoFields]) -> PipelineWanted:
    """Have a pipeline run."""
    await PipelineClient(services.client).start(request.path["pipeline"])
    return PipelineWanted(request.path["pipeline"], True)


async def stop(services: Services, request: Request[NoFields, NoFields]) -> PipelineWanted:
    """Have a pipeline run no more."""
    await PipelineClient(services.client).stop(request.path["pipeline"])
    return PipelineWanted(request.path["pipeline"], False)


async def list_rules(services: Services, request: Request[Any, Any]) -> RuleList:
    """The rules of a pipeline."""
    return RuleList(await _rules(services, request.path["pipeline"]))


async def change_rules(services: Services, request: Request[NoFields, RuleChanges]) -> RulesChanged:
    """Change rules in one step, and say which there are then."""
    body, name = request.body, request.path["pipeline"]
    if not body.put and not body.delete:
        raise invalid("there is nothing to change; give rules to put or names to delete")
    rules = [_rule(one) for one in body.put]
    changed = await PipelineClient(services.client).change_rules(name, rules, gone=body.delete)
    return RulesChanged(await _rules(services, name), changed.notes)


async def _rules(services: Services, name: str) -> list[RoutingRule]:
    (described,) = await PipelineClient(services.client).describe([name])
    return msgspec.convert(described["rules"], list[RoutingRule])


def _rule(described: RoutingRule) -> Rule:
    return Rule(
        name=described.name,
        topic=described.topic,
        targets=tuple(described.targets),
        condition=described.condition,
        subscription=described.subscription,
    )


_ONE: Final = "/pipelines/{pipeline}"


def _route(method: str, path: str, summary: str, handle: Any, answer: Any, **more: Any) -> Route[Any, Any]:
    """A route; most have neither a query nor a body."""
    shared: dict[str, Any] = {"tag": "pipelines", "query": NoFields, "body": NoFields}
    return Route(method=method, path=path, summary=summary, handle=handle, answer=answer, **{**shared, **more})


ROUTES: Final = (
    _route("GET", "/pipelines", "List pipelines and how they do", list_pipelines, PipelineList),
    _route(
        "POST", "/pipelines", "Declare a pipeline", create, PipelineCreated, body=NewPipeline, status=HTTPStatus.CREATED
    ),
    _route("GET", _ONE, "Describe a pipeline", describe, PipelineDescription),
    _route("PATCH", _ONE, "Change settings of a pipeline", change, PipelineDescription, body=PipelineChanges),
    _route("DELETE", _ONE, "Delete a pipeline; what it wrote stays", delete, None, status=HTTPStatus.NO_CONTENT),
    _route("POST", f"{_ONE}/start", "Have a pipeline run; one that is parked is tried again", start, PipelineWanted),
    _route("POST", f"{_ONE}/stop", "Have a pipeline run no more", stop, PipelineWanted),
    _route("GET", f"{_ONE}/rules", "List the rules of a pipeline that routes", list_rules, RuleList),
    _route("PATCH", f"{_ONE}/rules", "Put and delete rules in one step", change_rules, RulesChanged, body=RuleChanges),
)
