"""Operations on pipelines, over Millstream's private requests."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from millstream.client.admin.cluster_status import ask_all_nodes
from millstream.client.admin.groups import delete_group, describe_group
from millstream.core.errors import (
    GroupNotEmpty,
    MillstreamError,
    NotFound,
    PipelineExists,
    SubscriptionExists,
    UnknownGroup,
)
from millstream.core.ids import NodeId
from millstream.core.pipeline import GROUP_PREFIX, GROUP_TYPE, LAND_PREFIX, LandSettings, Pipeline, PipelineKind, Rule
from millstream.core.setting import HIDDEN
from millstream.protocol.private.message import NODE_STATUS_KEY, Request, Response, request_document, request_private
from millstream.protocol.private.pipeline_messages import (
    LOCAL_TABLES,
    AlterPipelineRequest,
    CancelRunRequest,
    ChangeRulesRequest,
    ChangeRulesResponse,
    CreatePipelineRequest,
    CreatePipelineResponse,
    DeletePipelineRequest,
    JobRunsRequest,
    ListPipelinesRequest,
    NewRule,
    RunLogRequest,
    StartRunRequest,
)
from millstream.protocol.wire.admin_requests import NODE_RESOURCE, describe_configs
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

R = TypeVar("R", bound=Response)

_WELL: Final = ("running", "stopped")
"""States in which an earlier error no longer matters."""

_UNCLAIMED: Final = "no node runs it yet; nodes with pipelines-enabled on and Spark installed run pipelines"

FAILING_S_MAX: Final = 300.0
"""A dependency that has been unreachable for this long is reported."""

QUARANTINED_SHARE_MAX: Final = 0.01

WARNED_MAX: Final = 5
"""Warnings of one kind: more have the same cause."""

_FAULTS: Final = "audit_faults"
"""The gauge with the findings of a ledger's last audit."""


class PipelineClient:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def create(
        self,
        name: str,
        kind: PipelineKind | str,
        settings: Mapping[str, str],
        *,
        rules: Iterable[Rule] = (),
        is_enabled: bool = True,
        validate_only: bool = False,
    ) -> CreatePipelineResponse:
        """Declare a pipeline; discard the offsets that an earlier one of the same name left behind."""
        body = CreatePipelineRequest(
            name=name,
            kind=str(kind),
            settings=dict(settings),
            rules=NewRule.of(rules),
            enabled=is_enabled,
            validate_only=True,
        )
        response = await self._request(None, body)
        if not validate_only:
            await self._forget_progress(name)
            response = await self._request(None, msgspec.structs.replace(body, validate_only=False))
        return response

    async def _forget_progress(self, name: str) -> None:
        """Delete the offsets of an earlier pipeline of this name; other groups are untouched."""
        group = f"{GROUP_PREFIX}{name}"
        try:
            described = await describe_group(self._client, group)
            if described.protocol_type in ("", GROUP_TYPE):
                await delete_group(self._client, group)
                return
        except UnknownGroup:
            return
        except GroupNotEmpty:
            raise GroupNotEmpty(
                f"a pipeline {name!r} is still running, manually or because it was just deleted; "
                f"`millstream group describe {group}` shows where, and when it has ended"
            ) from None
        raise GroupNotEmpty(
            f"the group {group!r} of the pipeline is used by consumers and has offsets; choose another name, or "
            f"delete the group: millstream group delete {group}"
        )

    async def alter(self, name: str, settings: Mapping[str, str | None], *, validate_only: bool = False) -> list[str]:
        """Change settings; None restores a default. Return notes for the owner."""
        body = AlterPipelineRequest(name=name, settings=dict(settings), validate_only=validate_only)
        return list((await self._request(None, body)).notes)

    async def start(self, name: str) -> None:
        await self._request(None, AlterPipelineRequest(name=name, enabled=True))

    async def stop(self, name: str) -> None:
        await self._request(None, AlterPipelineRequest(name=name, enabled=False))

    async def delete(self, name: str) -> None:
        """Delete it and its offsets; its output stays."""
        await self._request(None, DeletePipelineRequest(name=name))
        # The node that runs it needs a moment to learn of this, and deletes the group afterwards.
        with suppress(UnknownGroup, GroupNotEmpty):
            await delete_group(self._client, f"{GROUP_PREFIX}{name}")

    async def forget_deleted(self, name: str) -> None:
        """Delete the group of a pipeline that is no longer declared; for the process that ran it."""
        try:
            await self.describe([name])
        except NotFound:
            with suppress(UnknownGroup, GroupNotEmpty):
                await delete_group(self._client, f"{GROUP_PREFIX}{name}")

    async def change_rules(
        self, name: str, rules: Iterable[Rule] = (), *, deleted: Iterable[str] = (), validate_only: bool = False
    ) -> ChangeRulesResponse:
        body = ChangeRulesRequest(name=name, put=NewRule.of(rules), delete=list(deleted), validate_only=validate_only)
        return await self._request(None, body)

    async def describe(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return pipelines with their `state` and the report of the node that runs them, and with rules if named.

        Every node is asked, and the newest version is returned. A node that does not respond is skipped as long as
        another does; `notes` say so for pipelines that it may be running.
        """
        body = ListPipelinesRequest(names=None if names is None else list(names))
        responses, failed = await ask_all_nodes(self._client, lambda node: self._request(node, body))
        by_name: dict[str, dict[str, Any]] = {}
        local: dict[str, list[bool]] = defaultdict(list)
        for response in responses:
            for described in response.pipelines:
                if (is_local := described.get("local_tables")) is not None:
                    local[described["name"]].append(is_local)
                by_name[described["name"]] = _merge_reports(by_name.get(described["name"]), described)
        if not by_name and failed:
            raise failed[0]
        silent = [f"{error}" for error in failed]
        for pipeline in by_name.values():
            # Another node has to be able to take over, and any of them may.
            pipeline["local_tables"] = len(local[pipeline["name"]]) > 1 and any(local[pipeline["name"]])
            pipeline["state"] = state_of(pipeline)
            pipeline["notes"] = silent if pipeline["report"] is None else []
            if pipeline["state"] == "waiting" and not (pipeline["report"] or silent):
                pipeline["notes"] = [_UNCLAIMED]
        return [status for _name, status in sorted(by_name.items())]

    async def runs(self, name: str, *, limit: int = 20) -> list[dict[str, Any]]:
        """Return the last runs of a job, the latest first."""
        response = await self._request(None, JobRunsRequest(name=name, limit=limit))
        return [msgspec.to_builtins(run) for run in response.runs]

    async def request_run(self, name: str) -> None:
        """Request a run of a job now; if one is in progress, the next follows it."""
        await self._request(None, StartRunRequest(name=name))

    async def cancel_run(self, name: str) -> int:
        """Cancel the run of a job that is in progress, wherever it runs; return its number."""
        responses = await self._request_all(CancelRunRequest(name=name))
        cancelled = [response.run for response in responses if response.run]
        if not cancelled:
            raise NotFound(f"no run of job {name!r} is running; see `millstream pipeline runs {name}`")
        return cancelled[0]

    async def run_log(self, name: str, run: int = 0) -> dict[str, Any]:
        """Return the end of a run's output, from the node that has it: `run`, `text` and `is_truncated`.

        0 is the last run. If several nodes made attempts at it, their outputs are concatenated.
        """
        responses = await self._request_all(RunLogRequest(name=name, run=run))
        logs = [response for response in responses if response.run]
        if not logs:
            what = f"run {run}" if run else "the last run"
            raise NotFound(f"no node has a log of {what} of job {name!r}; see `millstream pipeline runs {name}`")
        newest = max(response.run for response in logs)
        texts = [response for response in logs if response.run == newest]
        return {
            "run": newest,
            "text": "".join(response.text for response in texts),
            "is_truncated": any(response.is_truncated for response in texts),
        }

    async def _request_all(self, request: Request[R]) -> list[R]:
        """Ask every node; those that do not respond are skipped as long as another does."""
        responses, failed = await ask_all_nodes(self._client, lambda node: self._request(node, request))
        if failed and not responses:
            raise failed[0]
        return responses

    async def _request(self, node: NodeId | None, request: Request[R]) -> R:
        try:
            return await request_private(self._client, node, request)
        except SubscriptionExists as error:
            # Its code stands for any name that is taken.
            raise PipelineExists(str(error)) from None


def _merge_reports(known: dict[str, Any] | None, described: dict[str, Any]) -> dict[str, Any]:
    """Combine the descriptions of two nodes; the report comes from the node that runs the pipeline."""
    if known is None:
        return described
    newest = described if described["version"] > known["version"] else known
    reports = [report for report in (known["report"], described["report"]) if report is not None]
    lags = [lag for lag in (known.get("lag"), described.get("lag")) if lag is not None]
    # A node on which it waits reports why; another node may be running it.
    report = min(reports, key=lambda report: report["state"] == "waiting", default=None)
    return {**newest, "report": report, "lag": lags[-1] if lags else None}


def shown_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as lists show it, with its duration so far, and the progress that its code reported."""
    ended_ms = run["ended_ms"] or time.time() * 1000
    progress = {key: value for key, value in run["progress"].items() if key != "pin"}
    return {**run, "took_s": max(0.0, ended_ms - run["started_ms"]) / 1000, "progress": progress}


async def land_topic(client: Client, topic: str, *, validate_only: bool = False) -> str:
    """Declare that a topic is landed, unless it already is; return the pipeline's name."""
    name = f"{LAND_PREFIX}{topic}"
    with suppress(PipelineExists):
        await PipelineClient(client).create(name, PipelineKind.LAND, {"topics": topic}, validate_only=validate_only)
    return name


def state_of(described: Mapping[str, Any]) -> str:
    """Return a pipeline's state: declarations override the driver's report, which may be older."""
    if not described["enabled"]:
        return "stopped"
    if described["parked"]:
        return "parked"
    report = described["report"]
    return "waiting" if report is None else str(report["state"])


def summary_of(described: Mapping[str, Any]) -> dict[str, Any]:
    report = described["report"] or {"last_error": " ".join(described["notes"])}
    return {
        "pipeline": described["name"],
        "kind": described["kind"],
        "state": described["state"],
        "rows": report.get("rows", 0),
        "rows_per_s": report.get("rows_per_s", 0.0),
        "lag": described.get("lag", report.get("lag")),
        "restarts": report.get("restarts", 0),
        "error": described["parked"] or ("" if described["state"] in _WELL else report.get("last_error", "")),
    }


class PipelineWarning(NamedTuple):
    """A problem with pipelines, and what to do about it."""

    names: Sequence[str]
    text: str
    advice: str


def pipeline_warnings(pipelines: Sequence[Mapping[str, Any]], *, now_ms: float) -> list[PipelineWarning]:
    """Return the problems of described pipelines, a few of each kind."""
    parked = [_parked(pipeline) for pipeline in pipelines if pipeline["state"] == "parked"]
    failing = [_failing(pipeline, now_ms) for pipeline in pipelines if _is_failing(pipeline, now_ms)]
    quarantined = [_quarantined(pipeline) for pipeline in pipelines if _is_much_quarantined(pipeline)]
    audited = [
        _audited(pipeline) for pipeline in pipelines if (pipeline["report"] or {}).get("levels", {}).get(_FAULTS)
    ]
    return [
        found
        for kind in (parked, _waiting(pipelines), failing, quarantined, audited, _local(pipelines))
        for found in kind[:WARNED_MAX]
    ]


def _parked(pipeline: Mapping[str, Any]) -> PipelineWarning:
    name = pipeline["name"]
    return PipelineWarning(
        [name],
        f"pipeline {name} is parked and no longer runs: {_first_line(pipeline['parked'])}",
        f"millstream pipeline describe {name} shows the details; fix the cause, and it is retried when its settings "
        f"or rules are changed, or by: millstream pipeline start {name}",
    )


def _waiting(pipelines: Sequence[Mapping[str, Any]]) -> list[PipelineWarning]:
    """Group pipelines that no node runs by the reason: usually it is the same for all."""
    by_reason: dict[str, list[str]] = {}
    for pipeline in pipelines:
        if pipeline["state"] == "waiting":
            by_reason.setdefault((pipeline["report"] or {}).get("last_error", ""), []).append(pipeline["name"])
    return [
        PipelineWarning(
            names,
            f"{_counted(names)} {'waits' if len(names) == 1 else 'wait'}: "
            f"{_first_line(reason) or 'no node runs pipelines'}",
            "provide what is missing, and it resumes automatically; nodes with pipelines-enabled on and Spark "
            "installed run pipelines",
        )
        for reason, names in by_reason.items()
    ]


def _local(pipelines: Sequence[Mapping[str, Any]]) -> list[PipelineWarning]:
    names = [pipeline["name"] for pipeline in pipelines if pipeline.get("local_tables")]
    text = (
        f"the tables of {_counted(names)} are in the data folder of the node that runs pipelines: a node that takes "
        "over lands the topics again, in new tables in its own folder"
    )
    advice = "set pipelines-lake on all nodes to a folder or URL that all of them reach"
    return [PipelineWarning(names, text, advice)] if names else []


def _counted(names: Sequence[str]) -> str:
    count = "1 pipeline" if len(names) == 1 else f"{len(names)} pipelines"
    return f"{count} ({', '.join(names[:WARNED_MAX])}{', …' if len(names) > WARNED_MAX else ''})"


def _is_failing(pipeline: Mapping[str, Any], now_ms: float) -> bool:
    since_ms = int((pipeline["report"] or {}).get("failing_ms", 0))
    is_tried = pipeline["state"] in ("retrying", "starting")
    return bool(is_tried and since_ms and now_ms - since_ms > FAILING_S_MAX * 1000)


def _failing(pipeline: Mapping[str, Any], now_ms: float) -> PipelineWarning:
    name, report = pipeline["name"], pipeline["report"]
    minutes = (now_ms - report["failing_ms"]) / 60_000
    return PipelineWarning(
        [name],
        f"pipeline {name} has failed for {minutes:.0f} minutes: {_first_line(report['last_error'])}",
        f"it resumes automatically once the cause is gone; millstream pipeline describe {name} shows the details",
    )


def _is_much_quarantined(pipeline: Mapping[str, Any]) -> bool:
    report = pipeline["report"] or {}
    return _quarantined_count(report) > QUARANTINED_SHARE_MAX * int(report.get("rows", 0))


def _quarantined_count(report: Mapping[str, Any]) -> int:
    return int(report.get("counts", {}).get("quarantined", 0))


def _quarantined(pipeline: Mapping[str, Any]) -> PipelineWarning:
    name, report = pipeline["name"], pipeline["report"]
    return PipelineWarning(
        [name],
        f"pipeline {name} put {_quarantined_count(report):,} of {report['rows']:,} messages into quarantine",
        "the column `reason` of the table with the ending __quarantine says why, message by message",
    )


def _audited(pipeline: Mapping[str, Any]) -> PipelineWarning:
    name, faults = pipeline["name"], pipeline["report"]["levels"][_FAULTS]
    return PipelineWarning(
        [name],
        f"the last audit of pipeline {name} found {'1 fault' if faults == 1 else f'{faults:,} faults'}",
        "millstream audit names every message that does not add up",
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def pipeline_of(described: Mapping[str, Any]) -> Pipeline:
    """Convert a described pipeline; it has rules only if it was requested by name."""
    return Pipeline(
        pipeline_id=UUID(described["pipeline_id"]),
        name=described["name"],
        kind=PipelineKind(described["kind"]),
        # Secrets are not shown: another cluster has its own credentials.
        overrides={name: text for name, text in described["overrides"].items() if text != HIDDEN},
        rules=msgspec.convert(described["rules"], tuple[Rule, ...]),
    )


LAKE: Final = "lake"
FOLDER: Final = "pipelines"

_LAKE_SETTING: Final = "pipelines-lake"
_FOLDER_SETTING: Final = "pipelines-folder"


class PipelineStorage(NamedTuple):
    """Folders or URLs, as seen by the node."""

    lake: str
    folder: str
    data: str
    """The node's data folder, possibly on another machine."""


def storage_in(data: str, *, lake: str = "", folder: str = "") -> PipelineStorage:
    return PipelineStorage(lake or os.path.join(data, LAKE), folder or os.path.join(data, FOLDER), data)


async def storage_of(client: Client, *, node: int | None = None) -> PipelineStorage:
    """Return a node's locations, by default the first node's; the settings are the same on all nodes, data folders need
    not be.
    """
    nodes = (await client.metadata(())).nodes
    chosen = NodeId(node) if node is not None and node in nodes else min(nodes)
    keys = (_LAKE_SETTING, _FOLDER_SETTING)
    (result,) = await describe_configs(client, NODE_RESOURCE, [str(chosen)], keys, node=chosen)
    if result.error_code:
        raise error_from_code(result.error_code, result.error_message, about=f"settings of node {chosen}")
    configs = {config.name: config.value or "" for config in result.configs}
    status = await request_document(client, chosen, NODE_STATUS_KEY)
    return storage_in(status["data"], lake=configs.get(_LAKE_SETTING, ""), folder=configs.get(_FOLDER_SETTING, ""))


async def ledger_pipeline(client: Client) -> Pipeline | None:
    declared = [
        pipeline for pipeline in await PipelineClient(client).describe() if pipeline["kind"] == PipelineKind.LEDGER
    ]
    return pipeline_of(declared[0]) if declared else None


async def ledger_lake(client: Client) -> str:
    """Return the location of the ledger's table; raise `NotFound` if no pipeline lands it."""
    pipeline = await ledger_pipeline(client)
    if pipeline is None:
        raise NotFound("no pipeline lands a ledger; create one with: millstream pipeline create ledger NAME")
    return pipeline.overrides.get("lake") or (await storage_of(client)).lake


_READERS: Final = {
    "delta": "deltalake.DeltaTable({location!r}).to_pandas()",
    "parquet": "pandas.read_parquet({location!r})",
}


@dataclass(frozen=True, slots=True)
class LandedTable:
    """The table of a topic."""

    topic: str
    location: str
    """A folder on the node that runs the pipeline, or a URL."""
    read: str
    """A Python expression that reads the table."""


class LandedTables(NamedTuple):
    """The tables of a pipeline by topic, and notes about them."""

    tables: list[LandedTable]
    notes: list[str]


async def tables_of(client: Client, described: Mapping[str, Any]) -> LandedTables:
    """Return the tables of a pipeline; with a pattern, those of existing topics."""
    notes = [LOCAL_TABLES] if described.get("local_tables") else []
    try:
        settings = pipeline_of(described).settings
        if not isinstance(settings, LandSettings):
            return LandedTables([], notes)
        report = described["report"]
        lake = settings.lake or (await storage_of(client, node=report and report["node"])).lake
        names = settings.topic_names or await _existing_topics(client, settings)
    except MillstreamError as error:
        return LandedTables([], [f"The locations of its tables are unknown: {error}"])
    located = {name: f"{lake.rstrip('/')}/{name}" for name in names}
    reader = _READERS[settings.format]
    return LandedTables([LandedTable(name, at, reader.format(location=at)) for name, at in located.items()], notes)


async def _existing_topics(client: Client, settings: LandSettings) -> list[str]:
    topics = (await client.metadata()).topics.values()
    return sorted(topic.name for topic in topics if not topic.is_internal and settings.takes(topic.name))
