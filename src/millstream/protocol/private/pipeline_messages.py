"""Private requests about pipelines, and the reports that their drivers send to their node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Literal, get_args
from uuid import UUID

import msgspec

from millstream.core.job import JobRun, RunState
from millstream.core.pipeline import Rule
from millstream.protocol.private.message import Request, Response


class LandedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of landing one topic: the next offset of each partition that is not in the table."""

    topic_id: UUID
    offsets: dict[int, int]


class RecordLandedRequest(Request[Response], frozen=True, kw_only=True):
    """The progress of a pipeline in landing its topics, and the location of its tables, according to its settings."""

    KEY: ClassVar = 32055
    pipeline_id: UUID
    lake: str
    format: str
    topics: list[LandedTopic]


class CreatePipelineResponse(Response, frozen=True, kw_only=True):
    """The id of a declared pipeline, and remarks for its owner."""

    pipeline_id: str = ""
    notes: Sequence[str] = ()


class NewRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule as it is sent: one whose condition is misspelt must not become a rule for all messages."""

    name: str
    topic: str
    targets: tuple[str, ...]
    condition: str = ""
    subscription: str = ""

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> list[NewRule]:
        return msgspec.convert(list(rules), list[NewRule], from_attributes=True)


def declared_rules(rules: Sequence[NewRule]) -> list[Rule]:
    """Return the rules of a request."""
    return msgspec.convert(rules, list[Rule], from_attributes=True)


class CreatePipelineRequest(Request[CreatePipelineResponse], frozen=True, kw_only=True):
    KEY: ClassVar = 32050
    name: str
    kind: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    rules: Sequence[NewRule] = ()
    enabled: bool = True
    validate_only: bool = False


class AlterPipelineResponse(Response, frozen=True, kw_only=True):
    """Remarks for the owner of a changed pipeline."""

    notes: Sequence[str] = ()


class AlterPipelineRequest(Request[AlterPipelineResponse], frozen=True, kw_only=True):
    """Changes of a pipeline; None keeps a value."""

    KEY: ClassVar = 32051
    name: str
    settings: dict[str, str | None] = msgspec.field(default_factory=dict)
    enabled: bool | None = None
    parked: str | None = None
    validate_only: bool = False


class ChangeRulesResponse(Response, frozen=True, kw_only=True):
    """The number of rules after the change, and remarks for the owner of the pipeline."""

    rules: int = 0
    notes: Sequence[str] = ()


class ChangeRulesRequest(Request[ChangeRulesResponse], frozen=True, kw_only=True):
    """Rules to add or replace, and the names of rules to delete."""

    KEY: ClassVar = 32054
    name: str
    put: Sequence[NewRule] = ()
    delete: list[str] = msgspec.field(default_factory=list)
    validate_only: bool = False


class ListPipelinesResponse(Response, frozen=True, kw_only=True):
    pipelines: Sequence[dict[str, Any]] = ()


class ListPipelinesRequest(Request[ListPipelinesResponse], frozen=True, kw_only=True):
    """Names of pipelines; None means all."""

    KEY: ClassVar = 32053
    names: list[str] | None = None


LOCAL_TABLES: Final = (
    "Its tables are in the data folder of the node that runs it: a node that takes over lands the topics again, in new "
    "tables in its own folder. Set pipelines-lake on all nodes to a folder or URL that all of them reach."
)


class DeletePipelineRequest(Request[Response], frozen=True, kw_only=True):
    KEY: ClassVar = 32052
    name: str


class JobRunsResponse(Response, frozen=True, kw_only=True):
    """The last runs of a job, the latest first."""

    runs: Sequence[RunDescription] = ()


class JobRunsRequest(Request[JobRunsResponse], frozen=True, kw_only=True):
    """Requests the last runs of a job."""

    KEY: ClassVar = 32056
    name: str
    limit: int = 20


class RunDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a job, with all attempts at it."""

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


class RunLogResponse(Response, frozen=True, kw_only=True):
    """The end of a run's output; `run` is 0 if the node does not have it."""

    run: int = 0
    text: str = ""
    is_truncated: bool = False


class RunLogRequest(Request[RunLogResponse], frozen=True, kw_only=True):
    """Requests the output of a run; 0 is the last run."""

    KEY: ClassVar = 32057
    name: str
    run: int = 0
    bytes_max: int = 256 * 1024


class StartRunRequest(Request[Response], frozen=True, kw_only=True):
    KEY: ClassVar = 32059
    name: str


class CancelRunResponse(Response, frozen=True, kw_only=True):
    """The number of the run that was cancelled; 0 if none runs on the node."""

    run: int = 0


class CancelRunRequest(Request[CancelRunResponse], frozen=True, kw_only=True):
    KEY: ClassVar = 32058
    name: str


PipelineState = Literal["waiting", "idle", "starting", "running", "retrying", "parked", "stopped"]

STATES: Final[tuple[PipelineState, ...]] = get_args(PipelineState)


class RecentBatch(msgspec.Struct, frozen=True):
    ended_ms: int
    rows: int
    """Messages read."""
    seconds: float


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one pipeline, counted from the start of its driver."""

    name: str
    state: PipelineState
    rows: int = 0
    """Messages read."""
    rows_per_s: float = 0.0
    lag: int | None = None
    """Messages not read yet; None before the first batch."""
    batches: int = 0
    recent: list[RecentBatch] = []
    """The last batches, the latest first."""
    restarts: int = 0
    """Restarts after a failure."""
    stalls: int = 0
    """Batches cancelled because they made no progress."""
    stalled_s: float = 0.0
    """How long the running batch has made no progress."""
    last_error: str = ""
    last_error_ms: int = 0
    failing_ms: int = 0
    """The time since which every step has failed; 0 otherwise."""
    counts: dict[str, int] = {}
    """Further counts by name: files, quarantined rows …"""
    levels: dict[str, int] = {}
    """Gauges by name, each valid until the next value: what the last audit of a ledger found …"""
    facts: dict[str, str] = {}
    """Further texts by name: the columns of tables …"""
    node: int = -1
    """The node whose driver runs it."""
    run: int = 0
    """The number of a job's last run."""
    next_run_ms: int = 0
    """When a job runs next; 0 if that is not known."""
