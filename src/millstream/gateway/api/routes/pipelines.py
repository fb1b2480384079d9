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
from millstream.gateway.api.parts import Parts
from millstream.gateway.api.problem import invalid
from millstream.gateway.api.route import Asked, Nothing, Route, TopicName
from millstream.gateway.api.setting_values import ChangedSettings, GivenSettings, changes_of, texts_of

PipelineName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
RuleName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Kind = Literal["land", "transform", "route"]
GivenKind = Annotated[str, Meta(extra_json_schema={"enum": [kind.value for kind in PipelineKind]})]
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
    kind: GivenKind
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


async def list_pipelines(parts: Parts, asked: Asked[Nothing, Nothing]) -> PipelineList:
    """All pipelines."""
    found = await PipelineClient(parts.client).describe()
    return PipelineList([msgspec.convert(summary_of(one), PipelineSummary) for one in found])


async def create(parts: Parts, asked: Asked[Nothing, NewPipeline]) -> PipelineCreated:
    """Declare a pipeline."""
    new = asked.body
    rules = [_rule(one) for one in new.rules]
    made = await PipelineClient(parts.client).create(
        new.name, kind_of(new.kind), texts_of(new.settings), rules=rules, is_wanted=new.wanted
    )
    return PipelineCreated(new.name, str(made.pipeline_id), made.notes)


async def describe(parts: Parts, asked: Asked[Any, Any]) -> PipelineDescription:
    """One pipeline."""
    return await _described(parts, asked.path["pipeline"], [])


async def _described(parts: Parts, name: str, notes: list[str]) -> PipelineDescription:
    (told,) = await PipelineClient(parts.client).describe([name])
    found = await tables_of(parts.client, told)
    tables = [one._asdict() for one in found.tables]
    notes = [*notes, *told["notes"], *found.notes]
    return msgspec.convert({**told, "tables": tables, "notes": notes}, PipelineDescription)


async def change(parts: Parts, asked: Asked[Nothing, PipelineChanges]) -> PipelineDescription:
    """Change a pipeline, and say how it is then."""
    if not asked.body.settings:
        raise invalid("there is nothing to change; give settings")
    name = asked.path["pipeline"]
    notes = await PipelineClient(parts.client).alter(name, changes_of(asked.body.settings))
    return await _described(parts, name, notes)


async def delete(parts: Parts, asked: Asked[Nothing, Nothing]) -> None:
    """Delete a pipeline; what it wrote stays."""
    await PipelineClient(parts.client).delete(asked.path["pipeline"])


async def start(parts: Parts, asked: Asked[Nothing, Nothing]) -> PipelineWanted:
    """Have a pipeline run."""
    await PipelineClient(parts.client).start(asked.path["pipeline"])
    return PipelineWanted(asked.path["pipeline"], True)


async def stop(parts: Parts, asked: Asked[Nothing, Nothing]) -> PipelineWanted:
    """Have a pipeline run no more."""
    await PipelineClient(parts.client).stop(asked.path["pipeline"])
    return PipelineWanted(asked.path["pipeline"], False)


async def list_rules(parts: Parts, asked: Asked[Any, Any]) -> RuleList:
    """The rules of a pipeline."""
    return RuleList(await _rules(parts, asked.path["pipeline"]))


async def change_rules(parts: Parts, asked: Asked[Nothing, RuleChanges]) -> RulesChanged:
    """Change rules in one step, and say which there are then."""
    said, name = asked.body, asked.path["pipeline"]
    if not said.put and not said.delete:
        raise invalid("there is nothing to change; give rules to put or names to delete")
    rules = [_rule(one) for one in said.put]
    changed = await PipelineClient(parts.client).change_rules(name, rules, gone=said.delete)
    return RulesChanged(await _rules(parts, name), changed.notes)


async def _rules(parts: Parts, name: str) -> list[RoutingRule]:
    (told,) = await PipelineClient(parts.client).describe([name])
    return msgspec.convert(told["rules"], list[RoutingRule])


def _rule(told: RoutingRule) -> Rule:
    return Rule(
        name=told.name,
        topic=told.topic,
        targets=tuple(told.targets),
        condition=told.condition,
        subscription=told.subscription,
    )


_ONE: Final = "/pipelines/{pipeline}"


def _route(method: str, path: str, summary: str, handle: Any, answer: Any, **more: Any) -> Route[Any, Any]:
    """A route; most have neither a query nor a body."""
    shared: dict[str, Any] = {"tag": "pipelines", "query": Nothing, "body": Nothing}
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
