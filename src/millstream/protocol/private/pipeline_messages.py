"""Private requests about pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from millstream.core.job import JobRun, RunState
from millstream.core.pipeline import Rule
from millstream.protocol.private.message import Response

CREATE_KEY: Final = 32050
ALTER_KEY: Final = 32051
DELETE_KEY: Final = 32052
LIST_KEY: Final = 32053
RULES_KEY: Final = 32054
LANDED_KEY: Final = 32055
RUNS_KEY: Final = 32056
RUN_LOG_KEY: Final = 32057
CANCEL_RUN_KEY: Final = 32058
REQUEST_RUN_KEY: Final = 32059


class LandedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """How far one topic was landed: the next offset of each partition that is not in the table."""

    topic_id: UUID
    offsets: dict[int, int]


class Landed(msgspec.Struct, frozen=True, kw_only=True):
    """How far a pipeline has landed its topics, and where, according to its settings."""

    pipeline_id: UUID
    lake: str
    format: str
    topics: list[LandedTopic]


class RuleMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule of a route in JSON."""

    name: str
    topic: str
    targets: list[str]
    condition: str = ""
    subscription: str = ""

    @classmethod
    def of(cls, rule: Rule) -> RuleMessage:
        return msgspec.convert(rule, cls, from_attributes=True)

    def rule(self) -> Rule:
        return msgspec.convert(self, Rule, from_attributes=True)


class NewPipeline(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    settings: dict[str, str] = {}
    rules: list[RuleMessage] = []
    enabled: bool = True
    validate_only: bool = False


class PipelineChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of a pipeline; None keeps a value."""

    name: str
    settings: dict[str, str | None] = {}
    enabled: bool | None = None
    parked: str | None = None
    validate_only: bool = False


class RuleChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Rules to add or replace, and the names of rules to delete."""

    name: str
    put: list[RuleMessage] = []
    delete: list[str] = []
    validate_only: bool = False


class PipelineNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of pipelines; None means all."""

    names: list[str] | None = None


LOCAL_TABLES: Final = (
    "Its tables are in the data folder of the node that runs it: a node that takes over lands the topics again, in new "
    "tables in its own folder. Set pipelines-lake on all nodes to a folder or URL that all of them reach."
)


class DeletePipelineRequest(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class CreatePipelineResponse(Response, frozen=True, kw_only=True):
    """The id of a declared pipeline, and remarks for its owner."""

    pipeline_id: str = ""
    notes: Sequence[str] = ()


class AlterPipelineResponse(Response, frozen=True, kw_only=True):
    """Remarks for the owner of a changed pipeline."""

    notes: Sequence[str] = ()


class ListPipelinesResponse(Response, frozen=True, kw_only=True):
    pipelines: Sequence[dict[str, Any]] = ()


class RuleChangeResponse(Response, frozen=True, kw_only=True):
    """The number of rules after the change, and remarks for the owner of the pipeline."""

    rules: int = 0
    notes: Sequence[str] = ()


class JobRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the last runs of a job."""

    name: str
    limit: int = 20


class RunDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a job, with all attempts at it."""

    run: int
    state: RunState
    scheduled_ms: int
    started_ms: int
    ended_ms: int
    attempt: int
    node: int
    code_hash: str
    version: int
    error: str
    progress: dict[str, Any]

    @classmethod
    def of(cls, run: JobRun) -> RunDescription:
        return cls(run=run.number, **{name: getattr(run, name) for name in cls.__struct_fields__ if name != "run"})


class JobRunsResponse(Response, frozen=True, kw_only=True):
    """The last runs of a job, the latest first."""

    runs: Sequence[RunDescription] = ()


class RunLogRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the output of a run; 0 is the last run."""

    name: str
    run: int = 0
    bytes_max: int = 256 * 1024


class RunLogResponse(Response, frozen=True, kw_only=True):
    """The end of a run's output; `run` is 0 if the node does not have it."""

    run: int = 0
    text: str = ""
    is_truncated: bool = False


class JobName(msgspec.Struct, frozen=True, kw_only=True):
    """Names a job whose run is asked for or cancelled."""

    name: str


class CancelRunResponse(Response, frozen=True, kw_only=True):
    """The number of the run that was cancelled; 0 if none runs on the node."""

    run: int = 0
