"""The reports of this node's pipeline driver: state and counts of each pipeline, what has landed, and advice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec

from millstream.broker.cluster.topics import Topics
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.errors import MillstreamError
from millstream.core.metric import Metric, Sample
from millstream.core.pipeline import LandSettings, LedgerSettings, Pipeline
from millstream.core.setting import suggestion
from millstream.core.topic import TopicPartition
from millstream.protocol.private.pipeline_messages import LOCAL_TABLES, STATES, PipelineReport

NAMED_MAX: Final = 5

Routes = Mapping[str, Mapping[str, str]]
"""For each topic, the topics that its messages reach, and through which pipeline."""


class PipelineAdvice:
    """Compares a pipeline with the existing topics and pipelines."""

    def __init__(self, pipelines: Pipelines, topics: Topics, *, has_local_lake: bool | None = False) -> None:
        self._pipelines = pipelines
        self._topics = topics
        self._has_local_lake = has_local_lake

    def has_local_tables(self, pipeline: Pipeline) -> bool | None:
        """Whether only this node reads the tables that a pipeline writes here; None if this node runs no pipelines."""
        with suppress(MillstreamError):
            settings = pipeline.settings
            writes_tables = isinstance(settings, LandSettings | LedgerSettings) and not settings.lake
            return self._has_local_lake and writes_tables
        return False

    def notes_for(self, pipeline: Pipeline) -> list[str]:
        """Return the hints, a sentence each."""
        with suppress(MillstreamError):
            # The declaration of an older node may not be readable here.
            return [
                *self._missing_notes(pipeline),
                *_unused_notes(pipeline),
                *self._loop_notes(pipeline),
                *([LOCAL_TABLES] if self.has_local_tables(pipeline) else []),
            ]
        return []

    def _missing_notes(self, pipeline: Pipeline) -> Iterator[str]:
        if not pipeline.settings.names_every_topic:
            return
        missing = [name for name in pipeline.flows() if self._topics.get(name) is None]
        known = [topic.name for topic in self._topics.all()] if missing else []
        for name in missing[:NAMED_MAX]:
            yield f"There is no topic {name!r} yet; the pipeline waits for it{suggestion(name, known) or '.'}"
        if len(missing) > NAMED_MAX:
            yield f"{len(missing) - NAMED_MAX} more of its topics do not exist yet either."

    def _loop_notes(self, pipeline: Pipeline) -> Iterator[str]:
        routes = _routes(
            [
                *(other_pipeline for other_pipeline in self._pipelines.all() if other_pipeline.name != pipeline.name),
                pipeline,
            ]
        )
        for topic, targets in pipeline.flows().items():
            for target in sorted(targets):
                path = _find_path(routes, target, topic)
                if path is not None:
                    round_trip = [topic, *path]
                    steps = zip(round_trip, path, strict=False)
                    names = sorted({pipeline.name, *(routes[start][other] for start, other in steps)})
                    yield (
                        f"Messages may loop forever: {' to '.join(round_trip)}, through the pipelines "
                        f"{', '.join(names)}. Add a condition that ends the loop."
                    )
                    return


def _unused_notes(pipeline: Pipeline) -> Iterator[str]:
    for setting, name, reads in pipeline.settings.unused_names():
        yield f"The statement does not read {name!r}, which `{setting}` names{suggestion(name, reads) or '.'}"


def _routes(pipelines: Iterable[Pipeline]) -> dict[str, dict[str, str]]:
    routes: dict[str, dict[str, str]] = {}
    for pipeline in pipelines:
        with suppress(MillstreamError):
            for topic, targets in pipeline.flows().items():
                routes.setdefault(topic, {}).update(dict.fromkeys(targets, pipeline.name))
    return routes


def _find_path(routes: Routes, start: str, goal: str) -> list[str] | None:
    """Return the topics from one to another, both included; None if messages do not get there."""
    before: dict[str, str | None] = {start: None}
    waiting = [start]
    for topic in waiting:
        if topic == goal:
            path = [topic]
            while (last := before[path[0]]) is not None:
                path.insert(0, last)
            return path
        for target in routes.get(topic, {}):
            if target not in before:
                before[target] = topic
                waiting.append(target)
    return None


Offsets = Mapping[int, int]
"""The next offset that is not in the table, by partition."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A landing pipeline as it is declared now."""

    place: tuple[str, str]
    """The lake of the pipeline, possibly the node's, and the format of its tables."""
    takes: Callable[[str], bool]
    landed: dict[UUID, Offsets] = field(default_factory=dict)
    """The landed offsets in that place, by topic."""


class LandedBoard:
    """The last report of each pipeline for each topic.

    Nothing of it is stored. What a pipeline has not reported since this node started counts as not landed, and the
    driver reports it with every batch, empty ones included. Only what is in the table that a pipeline is declared with
    counts: not what a manual run wrote elsewhere, nor what another pipeline of the same name, or with another lake,
    did.
    """

    def __init__(self, pipelines: Pipelines, topics: Topics) -> None:
        self._pipelines = pipelines
        self._topics = topics
        self._landings: dict[UUID, Landing] = {}
        self._by_topic: dict[str, list[Landing]] = {}
        """The pipelines that land a topic, by name; cached until pipelines or topics change."""
        self._topics_version = -1

    def start(self) -> None:
        """Register as the source of retention floors."""
        self._read()
        self._pipelines.on_change(self._read)
        self._topics.use_landed_floor(self.floor)

    def take(self, pipeline_id: UUID, place: tuple[str, str], topic_id: UUID, offsets: Offsets) -> None:
        """Record a pipeline's progress in landing a topic, with the location of its tables."""
        landing = self._landings.get(pipeline_id)
        if landing is None or landing.place != place or self._topics.by_id(topic_id) is None:
            return
        for gone in [topic_id for topic_id in landing.landed if self._topics.by_id(topic_id) is None]:
            del landing.landed[gone]
        landing.landed[topic_id] = dict(offsets)

    def floor(self, place: TopicPartition) -> int:
        """Return from which offset on a partition is not in the tables of all pipelines that land it; the end if there
        is none.
        """
        topic = self._topics.get(place.topic)
        if topic is None:
            return 0
        try:
            partition = self._topics.partition(place.topic, place.partition)
        except MillstreamError:
            # The partition is moving, and nothing of it may be deleted meanwhile.
            return 0
        if not partition.is_leader:
            # Only the leader knows; followers start where it does.
            return partition.log_start
        landed = [
            landing.landed.get(topic.topic_id, {}).get(place.partition, 0) for landing in self._landings_of(place.topic)
        ]
        return min(landed, default=0)

    def _landings_of(self, topic: str) -> list[Landing]:
        """Return the pipelines that land a topic; patterns are matched once per topic."""
        if self._topics_version != self._topics.version:
            self._by_topic.clear()
            self._topics_version = self._topics.version
        landings = self._by_topic.get(topic)
        if landings is None:
            landings = self._by_topic[topic] = [landing for landing in self._landings.values() if landing.takes(topic)]
        return landings

    def _read(self) -> None:
        """Follow the declared pipelines, keeping reports of those that still land in the same place."""
        before, self._landings = self._landings, {}
        self._by_topic.clear()
        for pipeline in self._pipelines.all():
            try:
                settings = pipeline.settings
            except MillstreamError:
                # A newer node may have declared settings that are unknown here.
                continue
            if isinstance(settings, LandSettings | LedgerSettings):
                known = before.get(pipeline.pipeline_id)
                place = settings.lake, settings.format
                landed = known.landed if known is not None and known.place == place else {}
                self._landings[pipeline.pipeline_id] = Landing(place, settings.matcher(), landed)


class JobControl(Protocol):
    """The jobs that this node runs."""

    def cancel(self, name: str) -> int | None:
        """Cancel the run of a job that is in progress; return its number, None if none runs here."""

    async def read_log(self, pipeline_id: UUID, run: int, bytes_max: int) -> JobLog | None:
        """Return the end of a run's output; None if this node does not have it."""


class JobLog(msgspec.Struct, frozen=True):
    """The output of a run of a job."""

    text: str
    is_truncated: bool
    """Whether it was cut to its end."""


class PipelineBoard:
    """The last report of each pipeline that this node runs; other nodes have none."""

    def __init__(self, declared: Callable[[], Iterable[Pipeline]] = tuple) -> None:
        self._declared = declared
        self._reports: dict[str, PipelineReport] = {}
        self._job_reports: dict[str, PipelineReport] = {}
        self.jobs: JobControl | None = None
        """Runs the jobs of this node, once it has started."""
        self._lags: dict[str, int] = {}
        self.restarts = 0

    def take(self, reports: Iterable[PipelineReport]) -> None:
        self._reports = {report.name: report for report in reports}

    def clear(self) -> None:
        """Drop the reports, since the driver has ended or another node has taken over."""
        self._reports = {}
        self._lags = {}

    def take_jobs(self, reports: Iterable[PipelineReport]) -> None:
        """Replace the reports of jobs, which have their own drivers."""
        self._job_reports = {report.name: report for report in reports}

    def _all_reports(self) -> dict[str, PipelineReport]:
        return {**self._reports, **self._job_reports}

    def take_lags(self, lags: Mapping[str, int]) -> None:
        """Record the lag of each pipeline, whether it is running or not."""
        self._lags = dict(lags)

    def lag(self, pipeline: str) -> int | None:
        """Return the lag of a pipeline, if known here."""
        report = self._all_reports().get(pipeline)
        return self._lags.get(pipeline, None if report is None else report.lag)

    def describe(self, pipeline: str) -> dict[str, Any] | None:
        """Return the report of a pipeline, if it runs here."""
        report = self._all_reports().get(pipeline)
        return None if report is None else {**msgspec.structs.asdict(report), "lag": self.lag(pipeline)}

    def metrics(self) -> Iterable[Metric]:
        """Return the metrics: of declarations on every node, of running pipelines where they run."""
        declared = list(self._declared())
        if not declared:
            return
        yield _gauge(
            "parked",
            "1 if a pipeline is parked because it cannot run as declared; reported by every node.",
            [_sample(pipeline.name, float(bool(pipeline.idle_reason))) for pipeline in declared],
        )
        lags = [(pipeline.name, self.lag(pipeline.name)) for pipeline in declared]
        if any(lag is not None for _, lag in lags):
            yield _gauge(
                "lag",
                "Messages that a pipeline has not read yet, whether or not it is running.",
                [_sample(name, lag) for name, lag in lags if lag is not None],
            )
        known = self._all_reports()
        if known:
            yield from self._metrics_of_the_driver(list(known.values()))

    def _metrics_of_the_driver(self, reports: list[PipelineReport]) -> Iterable[Metric]:
        yield _gauge(
            "state",
            "1 for the current state of a pipeline: waiting, idle, starting, running, retrying, parked or stopped.",
            [_sample(report.name, float(report.state == state), state=state) for report in reports for state in STATES],
        )
        now_ms = time.time() * 1000
        for kind, name, text, value in _VALUES:
            yield kind(name, text, [_sample(report.name, value(report)) for report in reports])
        yield _gauge(
            "failing_seconds",
            "Seconds since a pipeline began to fail; 0 while it succeeds.",
            [_sample(report.name, _seconds(report.failing_ms, now_ms)) for report in reports],
        )
        yield _counter(
            "counted",
            "Other counters of jobs, by name, such as files and quarantined rows.",
            [
                _sample(report.name, number, what=what)
                for report in reports
                for what, number in sorted(report.counts.items())
            ],
        )
        yield _gauge(
            "level",
            "Other last values of jobs, by name, such as what the last audit of a ledger found.",
            [
                _sample(report.name, number, what=what)
                for report in reports
                for what, number in sorted(report.levels.items())
            ],
        )
        yield _counter("driver_restarts", "Restarts of the Spark driver of this node.", [Sample(self.restarts)])


def _seconds(since_ms: int, now_ms: float) -> float:
    return round(max(0.0, now_ms - since_ms) / 1000, 1) if since_ms else 0.0


def _gauge(name: str, help_text: str, samples: Iterable[Sample]) -> Metric:
    return Metric(f"millstream_pipeline_{name}", "gauge", help_text, samples)


def _counter(name: str, help_text: str, samples: Iterable[Sample]) -> Metric:
    return Metric(f"millstream_pipeline_{name}_total", "counter", help_text, samples)


def _sample(pipeline: str, value: float, **more: str) -> Sample:
    return Sample(value, (("pipeline", pipeline), *more.items()))


_VALUES: Final[tuple[tuple[Callable[..., Metric], str, str, Callable[[PipelineReport], float]], ...]] = (
    (_counter, "rows", "Messages that a pipeline has read.", lambda report: report.rows),
    (_gauge, "rows_per_second", "Messages that a pipeline reads per second.", lambda report: report.rows_per_s),
    (_counter, "batches", "Batches that a pipeline has completed.", lambda report: report.batches),
    (_counter, "restarts", "Restarts of a pipeline after a failure.", lambda report: report.restarts),
    (
        _counter,
        "stalls",
        "Batches of a pipeline that were cancelled for lack of progress.",
        lambda report: report.stalls,
    ),
    (
        _gauge,
        "stalled_seconds",
        "Seconds that the current batch has made no progress.",
        lambda report: report.stalled_s,
    ),
)
"""The metrics that are a field of each report."""
