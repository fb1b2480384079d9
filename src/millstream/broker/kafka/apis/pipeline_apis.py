"""Private requests about pipelines and the rules of routing pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi, RequestT, ResponseT, owner_of
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.report_board import LandedBoard, PipelineAdvice, PipelineBoard
from millstream.broker.security.changes import CREATE, DELETE, UPDATE, single_change
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation, ResourceType
from millstream.core.credential import Owner
from millstream.core.errors import FilterError, InvalidPipeline, MillstreamError
from millstream.core.job import RUNS_KEPT
from millstream.core.payload_columns import kept_types, parse_columns
from millstream.core.pipeline import (
    DECODE,
    DELETE_WHEN,
    EXPECT,
    FUNCTIONS,
    GROUP_PREFIX,
    LONG_TEXTS,
    NO_DECODING,
    LandSettings,
    Pipeline,
    PipelineKind,
    Rule,
    expectations_of,
    kind_of,
)
from millstream.core.subscription import FILTER
from millstream.protocol.private.message import Response
from millstream.protocol.private.pipeline_messages import (
    AlterPipelineRequest,
    AlterPipelineResponse,
    CancelRunRequest,
    CancelRunResponse,
    ChangeRulesRequest,
    ChangeRulesResponse,
    CreatePipelineRequest,
    CreatePipelineResponse,
    DeletePipelineRequest,
    JobRunsRequest,
    JobRunsResponse,
    ListPipelinesRequest,
    ListPipelinesResponse,
    RecordLandedRequest,
    RunDescription,
    RunLogRequest,
    RunLogResponse,
    StartRunRequest,
    declared_rules,
)

JOBS_ARE_OFF = (
    "jobs are off: their code runs as the user of the node and may read all that it may; where clients authenticate, "
    "set pipelines-jobs=on on the nodes to allow them"
)


class _PipelineChange(PrivateApi[RequestT, ResponseT]):
    cluster_operation = Operation.ALTER
    """A pipeline uses the node's memory, disk and lake."""

    def __init__(
        self, pipelines: Pipelines, subscriptions: Subscriptions, notes: PipelineAdvice, *, has_jobs: bool = True
    ) -> None:
        self._pipelines = pipelines
        self._subscriptions = subscriptions
        self._notes = notes
        self._has_jobs = has_jobs

    def _check_code(self, settings: Mapping[str, str | None], *, is_job: bool = False) -> None:
        """Refuse settings with code where a node runs none."""
        if not self._has_jobs and (is_job or (settings.get(FUNCTIONS) or "").strip()):
            raise InvalidPipeline(JOBS_ARE_OFF)


class PipelineCreate(_PipelineChange[CreatePipelineRequest, CreatePipelineResponse]):
    """Creates a pipeline.

    A name that is taken gets DUPLICATE_RESOURCE. Settings are those of docs/configuration.md; rules are written as in
    RuleChange. Notes are hints for its owner that are no reason to refuse it.
    """

    changes = single_change("pipeline", CREATE)

    async def handle(self, request: CreatePipelineRequest, owner: Owner | None = None) -> CreatePipelineResponse:
        self._check_code(request.settings, is_job=request.kind == PipelineKind.JOB)
        group = f"{GROUP_PREFIX}{request.name}"
        if self._subscriptions.get(group) is not None:
            raise InvalidPipeline(f"the pipeline's group {group!r} is a subscription's; choose another name")
        rules = declared_rules(request.rules)
        await check_filters_of(rules, self._subscriptions, decode=request.settings.get(DECODE, ""))
        await check_table_conditions(request.settings)
        made = await self._pipelines.create(
            request.name,
            kind_of(request.kind),
            request.settings,
            rules=rules,
            is_enabled=request.enabled,
            validate_only=request.validate_only,
            owner=owner,
        )
        return CreatePipelineResponse(pipeline_id=str(made.pipeline_id), notes=self._notes.notes_for(made))

    async def handle_from(self, client: ClientInfo, request: CreatePipelineRequest) -> CreatePipelineResponse:
        return await self.handle(request, owner_of(client))


class PipelineAlter(_PipelineChange[AlterPipelineRequest, AlterPipelineResponse]):
    """Changes, starts, stops or parks a pipeline.

    A setting of null is reset to its default. `enabled` starts or stops it; null changes nothing. `parked` is the
    reason why it is no longer run; null changes nothing. A parked pipeline runs again when it is started, or when its
    settings or rules are changed. An unknown name gets RESOURCE_NOT_FOUND. Notes are as in PipelineCreate, about
    changed settings.
    """

    changes = single_change("pipeline", UPDATE)

    async def handle(self, request: AlterPipelineRequest, owner: Owner | None = None) -> AlterPipelineResponse:
        notes: list[str] = []
        if request.settings or request.validate_only:
            notes = await self._change_settings(request, owner)
        if request.validate_only:
            return AlterPipelineResponse(notes=notes)
        if request.enabled is not None:
            await (self._pipelines.start if request.enabled else self._pipelines.stop)(request.name, owner=owner)
        if request.parked:
            await self._pipelines.park(await self._pipelines.find(request.name), request.parked)
        return AlterPipelineResponse(notes=notes)

    async def handle_from(self, client: ClientInfo, request: AlterPipelineRequest) -> AlterPipelineResponse:
        return await self.handle(request, owner_of(client))

    async def _change_settings(self, request: AlterPipelineRequest, owner: Owner | None) -> list[str]:
        self._check_code(request.settings)
        before = await self._pipelines.find(request.name)
        if request.settings.get(DECODE) == NO_DECODING:
            await check_filters_of(before.rules, self._subscriptions, decode=NO_DECODING)
        await check_table_conditions(request.settings)
        changed = await self._pipelines.alter(
            request.name, request.settings, validate_only=request.validate_only, owner=owner
        )
        return [*self._notes.notes_for(changed), *_schema_notes(before, changed)]


def _schema_notes(before: Pipeline, after: Pipeline) -> Iterator[str]:
    """Warn that a table keeps its types, if the schema changes or may change them."""
    with suppress(MillstreamError):
        old, new = before.settings, after.settings
        if not isinstance(old, LandSettings) or not isinstance(new, LandSettings) or old.decode == NO_DECODING:
            return
        if not new.schema or new.schema == old.schema:
            return
        kept = list(kept_types(parse_columns(old.schema), parse_columns(new.schema))) if old.schema else None
        if kept != []:
            yield (
                f"Columns that its tables already have keep their types{'' if kept is None else ', here: '}"
                f"{', '.join(kept or ())}; only long becomes double. To land the messages that the topics still have "
                "with other types, stop the pipeline, move its tables and their quarantines out of the lake, and "
                "start it."
            )


class PipelineDelete(PrivateApi[DeletePipelineRequest, Response]):
    """Deletes a pipeline.

    Its rules are deleted with it; its tables stay. An unknown name gets RESOURCE_NOT_FOUND.
    """

    changes = single_change("pipeline", DELETE)
    cluster_operation = Operation.ALTER

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    async def handle(self, request: DeletePipelineRequest) -> Response:
        await self._pipelines.delete(request.name)
        return Response()


class PipelineList(PrivateApi[ListPipelinesRequest, ListPipelinesResponse]):
    """Lists pipelines and their progress.

        {"names": ["land-orders"]}, or null for all
        response: {"error": 0, "message": null, "pipelines": [{"name": …, "pipeline_id": …, "kind": "land", "group": …,
        "settings": {…}, "overrides": {…}, "enabled": true, "parked": "", "created_ms": …, "version": …,
        "owner": "User:alice", "rules": [{…}], "local_tables": false, "lag": …, "report": {"state": "running",
        "rows": …, "rows_per_s": …, "lag": …, "batches": …, "restarts": …, "last_error": "", "last_error_ms": 0,
        "failing_ms": 0, "counts": {…}, "node": 1}}]}

    Every node knows all pipelines; `report` and `lag` are null unless the node that is asked runs the driver, so a
    client asks all nodes. The description with the highest `version`, which counts changes, is current. Rules, of which
    there may be many, are only returned for pipelines that are named. `local_tables` means that other nodes do not
    read the tables of this one, and would land the topics again; it is null if this node runs no pipelines.
    """

    changes = None

    def __init__(self, pipelines: Pipelines, board: PipelineBoard, advice: PipelineAdvice) -> None:
        self._pipelines = pipelines
        self._board = board
        self._advice = advice

    async def needs(self, request: ListPipelinesRequest) -> Sequence[Need]:
        """Require DESCRIBE on the groups of named pipelines; a list of all contains those the client may describe."""
        return [(Operation.DESCRIBE, ResourceType.GROUP, f"{GROUP_PREFIX}{name}") for name in request.names or ()]

    def redact(self, response: ListPipelinesResponse, rights: Rights) -> ListPipelinesResponse:
        visible = [pipeline for pipeline in response.pipelines if rights.group(Operation.DESCRIBE, pipeline["group"])]
        return msgspec.structs.replace(response, pipelines=visible)

    async def handle(self, request: ListPipelinesRequest) -> ListPipelinesResponse:
        if request.names is None:
            listed = [self._describe(pipeline, ()) for pipeline in self._pipelines.all()]
            return ListPipelinesResponse(pipelines=[_without_long_texts(pipeline) for pipeline in listed])
        selected = [await self._pipelines.find(name) for name in request.names]
        return ListPipelinesResponse(pipelines=[self._describe(pipeline, pipeline.rules) for pipeline in selected])

    def _describe(self, pipeline: Pipeline, rules: Iterable[Rule]) -> dict[str, Any]:
        return {
            "name": pipeline.name,
            "pipeline_id": str(pipeline.pipeline_id),
            "kind": pipeline.kind,
            "group": pipeline.group,
            "settings": pipeline.settings.as_strings(),
            "overrides": pipeline.shown_overrides(),
            "enabled": pipeline.is_enabled,
            "parked": pipeline.idle_reason,
            "created_ms": pipeline.created_ms,
            "version": pipeline.version,
            "owner": pipeline.owner.principal,
            "rules": list(rules),
            "local_tables": self._advice.has_local_tables(pipeline),
            "lag": self._board.lag(pipeline.name),
            "report": self._board.describe(pipeline.name),
        }


class PipelineLanded(PrivateApi[RecordLandedRequest, Response]):
    """Reports how far topics are landed.

    The driver sends it to all nodes after each batch, with the lake and the format that the pipeline is declared with.
    A topic with `retention.until.landed` keeps what follows.
    """

    changes = None

    def __init__(self, board: LandedBoard) -> None:
        self._board = board

    async def handle(self, request: RecordLandedRequest) -> Response:
        for topic in request.topics:
            self._board.take(request.pipeline_id, (request.lake, request.format), topic.topic_id, topic.offsets)
        return Response()


class RuleChange(_PipelineChange[ChangeRulesRequest, ChangeRulesResponse]):
    """Changes the rules of a route pipeline.

    Rules replace those with the same names. All changes are made, or none. A rule that uses the filter of a
    subscription names it instead of a condition. An invalid condition is refused with the position of the error.
    Deleting a rule that does not exist gets RESOURCE_NOT_FOUND; a rule with an unknown field is refused. Notes are as
    in PipelineCreate.
    """

    changes = single_change("pipeline", UPDATE)

    async def handle(self, request: ChangeRulesRequest, owner: Owner | None = None) -> ChangeRulesResponse:
        now = await self._pipelines.find(request.name)
        rules = declared_rules(request.put)
        await check_filters_of(rules, self._subscriptions, decode=now.overrides.get(DECODE, ""))
        changed = await self._pipelines.change_rules(
            request.name, rules, deleted=request.delete, validate_only=request.validate_only, owner=owner
        )
        return ChangeRulesResponse(rules=len(changed.rules), notes=self._notes.notes_for(changed))

    async def handle_from(self, client: ClientInfo, request: ChangeRulesRequest) -> ChangeRulesResponse:
        return await self.handle(request, owner_of(client))


class _JobRequest(PrivateApi[RequestT, ResponseT]):
    def __init__(self, pipelines: Pipelines, board: PipelineBoard) -> None:
        self._pipelines = pipelines
        self._board = board

    async def _find_job(self, name: str) -> Pipeline:
        pipeline = await self._pipelines.find(name)
        if not pipeline.has_own_driver:
            raise InvalidPipeline(f"pipeline {name!r} is of the kind {pipeline.kind}; only jobs have runs")
        return pipeline


class PipelineRuns(_JobRequest[JobRunsRequest, JobRunsResponse]):
    """Lists the last runs of a job, the latest first; every node knows them."""

    changes = None

    async def needs(self, request: JobRunsRequest) -> Sequence[Need]:
        """Require DESCRIBE on the pipeline's group, as for listing it."""
        return [(Operation.DESCRIBE, ResourceType.GROUP, f"{GROUP_PREFIX}{request.name}")]

    async def handle(self, request: JobRunsRequest) -> JobRunsResponse:
        job = await self._find_job(request.name)
        runs = await self._pipelines.runs(job, limit=max(1, min(request.limit, RUNS_KEPT)))
        return JobRunsResponse(runs=[RunDescription.of(run) for run in runs])


class PipelineRunLog(_JobRequest[RunLogRequest, RunLogResponse]):
    """Returns the end of a job run's output.

    The node that ran it has the text; others respond with run 0.
    """

    changes = None

    async def needs(self, request: RunLogRequest) -> Sequence[Need]:
        """Require READ on the pipeline's group: the output of a job may contain the messages that it reads."""
        return [(Operation.READ, ResourceType.GROUP, f"{GROUP_PREFIX}{request.name}")]

    async def handle(self, request: RunLogRequest) -> RunLogResponse:
        job = await self._find_job(request.name)
        number = request.run or max((run.number for run in await self._pipelines.runs(job, limit=1)), default=0)
        control = self._board.jobs
        if control is None or not number:
            return RunLogResponse()
        log = await control.read_log(job.pipeline_id, number, max(1, min(request.bytes_max, LOG_BYTES_MAX)))
        return (
            RunLogResponse()
            if log is None
            else RunLogResponse(run=number, text=log.text, is_truncated=log.is_truncated)
        )


LOG_BYTES_MAX = 1024 * 1024


class PipelineRequestRun(_JobRequest[StartRunRequest, Response]):
    """Requests a run of a job now; if one is running, the new one follows it."""

    changes = single_change("pipeline", UPDATE)
    cluster_operation = Operation.ALTER

    async def handle(self, request: StartRunRequest, owner: Owner | None = None) -> Response:
        await self._pipelines.request_run(request.name, owner=owner)
        return Response()

    async def handle_from(self, client: ClientInfo, request: StartRunRequest) -> Response:
        return await self.handle(request, owner_of(client))


class PipelineCancelRun(_JobRequest[CancelRunRequest, CancelRunResponse]):
    """Cancels the run of a job that is in progress; it is not retried, and its schedule continues.

    Only the node that runs it can cancel it; others respond with run 0, so a client asks all nodes.
    """

    changes = single_change("pipeline", UPDATE)
    cluster_operation = Operation.ALTER

    async def handle(self, request: CancelRunRequest) -> CancelRunResponse:
        job = await self._find_job(request.name)
        control = self._board.jobs
        return CancelRunResponse(run=(control.cancel(job.name) if control is not None else None) or 0)


def _without_long_texts(described: dict[str, Any]) -> dict[str, Any]:
    """Omit code and other long texts, which would make a list of pipelines too long."""
    shortened = {
        part: {name: text for name, text in described[part].items() if name not in LONG_TEXTS}
        for part in ("settings", "overrides")
    }
    return {**described, **shortened}


async def check_filters_of(rules: Collection[Rule], subscriptions: Subscriptions, *, decode: str) -> None:
    """Raise `UnknownSubscription` if a rule uses the filter of a subscription that does not exist.

    Raise `InvalidPipeline` for a condition that is invalid, or reads payloads that are not decoded: the pipeline could
    not run with it.
    """
    conditions = {rule.name: rule.condition for rule in rules if rule.condition}
    for rule in rules:
        if rule.subscription:
            conditions[rule.name] = (await subscriptions.find(rule.subscription)).overrides.get(FILTER, "")
    if any(conditions.values()):
        # Thousands of them take seconds.
        await asyncio.to_thread(_check_conditions, conditions, decode)


async def check_table_conditions(settings: Mapping[str, str | None]) -> None:
    """Raise `InvalidPipeline` for a condition of a landed table that is invalid."""
    conditions = [(DELETE_WHEN, settings.get(DELETE_WHEN) or "")]
    conditions += [(EXPECT, text) for text in expectations_of(settings.get(EXPECT) or "")]
    for name, text in conditions:
        if text:
            await asyncio.to_thread(_check_table_condition, name, text)


def _check_table_condition(name: str, text: str) -> None:
    from millstream.protocol.filter.filter import compile_filter

    try:
        compile_filter(text, bare_fields=True)
    except FilterError as error:
        raise InvalidPipeline(f"`{name}`: {error}") from error


def _check_conditions(conditions: Mapping[str, str], decode: str) -> None:
    from millstream.protocol.filter.filter import compile_filter

    for name, condition in conditions.items():
        try:
            if condition and compile_filter(condition).uses.payload and decode == NO_DECODING:
                raise InvalidPipeline(f"rule {name!r} reads payloads, which decode={NO_DECODING} does not decode")
        except FilterError as error:
            raise InvalidPipeline(f"rule {name!r}: {error}") from error
