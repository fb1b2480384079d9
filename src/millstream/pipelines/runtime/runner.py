"""Runs one pipeline in a thread: claims it, runs step after step, and restarts after a failure.

A step is durable when it returns or can be repeated, so a runner may end at any moment. Failures of dependencies are
retried until these are back. A pipeline that fails repeatedly for other reasons, without a successful step in between,
is parked until it is changed or started.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from millstream.core.backoff import delay_after
from millstream.core.errors import GroupNotEmpty, MillstreamError, UnknownTopic
from millstream.core.pipeline import Pipeline
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.jobs.job import Job, JobContext, JobKind, Step
from millstream.pipelines.runtime.fault import Fault, fault_of, is_java_lost
from millstream.protocol.private.pipeline_messages import PipelineReport, PipelineState, RecentBatch
from millstream.protocol.wire.group_offsets import GroupMember

_logger = logging.getLogger(__name__)

WINDOW_S: Final = 60.0
"""The window of the rate."""

_SPAN_S_MIN: Final = 1.0

_STEPS_MAX: Final = 1000

RECENT_MAX: Final = 10


class Tally:
    """Sums up the steps of one pipeline."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._recent_steps: deque[tuple[float, int]] = deque(maxlen=_STEPS_MAX)
        self._counts: Counter[str] = Counter()
        self.facts: dict[str, str] = {}
        self.levels: dict[str, int] = {}
        self.rows = 0
        self.lag = 0
        self.is_started = False
        """Whether a step was done, so that the lag is known."""
        self.batches = 0
        self._recent: deque[RecentBatch] = deque(maxlen=RECENT_MAX)

    def add(self, step: Step, seconds: float = 0.0) -> None:
        """Add a step, and how long it took; one without messages is not a batch."""
        self.lag = step.lag
        self.is_started = True
        self._counts.update(step.counts)
        if step.facts:
            self.facts = dict(step.facts)
        if step.levels:
            self.levels = {**self.levels, **step.levels}
        if step.rows:
            self.rows += step.rows
            self.batches += 1
            self._recent_steps.append((self._clock(), step.rows))
            self._recent.appendleft(RecentBatch(int(time.time() * 1000), step.rows, round(seconds, 3)))

    @property
    def recent(self) -> list[RecentBatch]:
        return list(self._recent)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    @property
    def rows_per_s(self) -> float:
        """Return messages per second, over the last minute or since the start."""
        now = self._clock()
        # A copy, since the reporting thread is not the one that adds.
        recent_steps = [step for step in list(self._recent_steps) if step[0] >= now - WINDOW_S]
        since = max(self._began, now - WINDOW_S)
        if len(recent_steps) == _STEPS_MAX:
            since = max(since, recent_steps[0][0])
        return round(sum(rows for _, rows in recent_steps) / max(_SPAN_S_MIN, now - since), 1)


class Progress:
    """Whether a pipeline is working, and how often it has progressed."""

    def __init__(self) -> None:
        self.is_working = False
        """False while it waits for messages, for its turn, or for a pause to end."""
        self.count = 0
        self.stalled_s = 0.0
        """How long it has worked without a sign of progress, as the watch has seen."""

    def record(self) -> None:
        """Record progress; may be called by any thread."""
        # Of two concurrent increments one may be lost, and the number still changes.
        self.count += 1

    def work(self) -> None:
        """Expect progress from now on."""
        self.is_working = True
        self.record()

    def rest(self) -> None:
        """Expect no progress from now on."""
        self.is_working = False
        self.record()


FAILURES_MAX: Final = 10
"""Failures in a row, over some minutes, that park a pipeline when their cause is unknown."""

WEIGHTS: Final = {Fault.OUTSIDE: 0, Fault.UNKNOWN: 1, Fault.DECLARED: FAILURES_MAX // 2}
"""The weight of a failure: a wrong declaration is retried once, not ten times."""

BACKOFF_S_MIN: Final = 1.0

BACKOFF_S_MAX: Final = 60.0

OCCUPIED_S: Final = 3.0
"""How often to check whether another run still owns the pipeline, or a topic is still missing."""


class Stalled(MillstreamError):
    """A step made no progress and was cancelled."""


def stall_s_of(pipeline: Pipeline) -> float:
    """Return the longest time a step may make no progress; 0 means no limit."""
    try:
        return pipeline.settings.stall_ms / 1000
    except MillstreamError:
        # The job raises the same error when it is made.
        return 0.0


class HeldClaim(Protocol):
    """The claim, as the runner uses it."""

    def member(self) -> GroupMember:
        """Return the current member."""

    @property
    def is_confirmed(self) -> bool:
        """Whether the broker has responded recently."""

    @property
    def is_held(self) -> bool:
        """Whether no other run has taken over."""

    def take(self) -> None:
        """Take the claim, or raise `GroupNotEmpty`."""

    def leave(self) -> None:
        """Release the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverContext:
    """The driver's side of a runner."""

    make: JobKind
    context: Callable[[Pipeline], JobContext]
    """Returns the context of a pipeline's jobs, without the parts that belong to one run."""
    claim: Callable[[str, Callable[[], None]], HeldClaim]
    """Makes the claim on a group; the second argument is called when it is lost."""
    turn: Callable[[], None] = lambda: None
    """Called before each step by the runner's thread; waits for its turn."""
    begun: Callable[[], None] = lambda: None
    """Called when the step starts."""
    ended: Callable[[bool], None] = lambda _well: None
    """Called after each step, or when it begins to wait for messages, with whether it succeeded."""
    lost: Callable[[], None] = lambda: None
    """Called instead when Java ended during the step: the driver may end while the step is running."""
    cancel: Callable[[], None] = lambda: None
    """Cancels Spark's jobs for this pipeline."""
    changed: Callable[[], None] = lambda: None
    """Called when there is something new to report."""
    backoff_s: float = BACKOFF_S_MIN
    backoff_max_s: float = BACKOFF_S_MAX
    occupied_s: float = OCCUPIED_S


class Runner:
    """Runs one pipeline until `stop`, or until it is parked."""

    def __init__(self, pipeline: Pipeline, driver: DriverContext, *, node: int = -1) -> None:
        self._driver = driver
        self._node = node
        self._tally = Tally()
        self._lock = threading.Lock()
        self._declared = pipeline
        self._job_ends = threading.Event()
        """Set when the current job has to end: permanently, for a new one, or because the claim was lost."""
        self._ended = threading.Event()
        self._claim = driver.claim(pipeline.group, self._end_job)
        self._failures = 0
        """Failures in a row, by weight."""
        self._tries = 0
        """Failures in a row, of any cause."""
        self._failing_ms = 0
        self._restarts = 0
        self._stalls = 0
        self._given_up = ""
        """The reason why the running step was cancelled, if it was."""
        self._is_begun = False
        """Whether a step is working, not only waiting."""
        self.progress = Progress()
        self._state: PipelineState = "starting"
        self._error = ""
        self._error_ms = 0

    @property
    def declared(self) -> Pipeline:
        return self._declared

    @property
    def name(self) -> str:
        return self._declared.name

    @property
    def is_ending(self) -> bool:
        return self._ended.is_set()

    @property
    def stall_s(self) -> float:
        return stall_s_of(self._declared)

    def cancel_step(self, reason: str) -> None:
        """Cancel the running step for a reason; called by the watch."""
        self._given_up = reason
        self._stalls += 1
        _logger.warning("a pipeline is cancelled", extra={"pipeline": self.name, "reason": reason})
        self._driver.cancel()

    def change(self, pipeline: Pipeline) -> None:
        """Continue with other settings or rules after the running step."""
        with self._lock:
            self._declared = pipeline
            self._failures = self._tries = 0
            self._job_ends.set()

    def stop(self) -> None:
        """End `run` soon, cancelling a running step."""
        with self._lock:
            self._ended.set()
            self._job_ends.set()
        self._driver.cancel()

    def report(self) -> PipelineReport:
        return PipelineReport(
            name=self._declared.name,
            state=self._state,
            rows=self._tally.rows,
            rows_per_s=self._tally.rows_per_s,
            lag=self._tally.lag if self._tally.is_started else None,
            batches=self._tally.batches,
            recent=self._tally.recent,
            restarts=self._restarts,
            stalls=self._stalls,
            stalled_s=round(self.progress.stalled_s, 1),
            last_error=self._error,
            last_error_ms=self._error_ms,
            failing_ms=self._failing_ms,
            counts=self._tally.counts,
            levels=self._tally.levels,
            facts=self._tally.facts,
            node=self._node,
        )

    def run(self) -> None:
        """Run steps until `stop`, or until it has failed too often; in its own thread."""
        self.progress.work()
        try:
            while not self._ended.is_set() and self._state != "parked":
                self._attempt()
        finally:
            self._claim.leave()
            self.progress.rest()
            if self._state != "parked":
                self._set_state("stopped")

    def _attempt(self) -> None:
        """Run one job, from its creation to its end."""
        with self._lock:
            if self._ended.is_set():
                return
            self._job_ends = stopping = threading.Event()
            pipeline = self._declared
        self._given_up = ""
        try:
            if not self._claim.is_held:
                self._claim.take()
            job = self._driver.make(pipeline, self._context(pipeline, stopping))
        except GroupNotEmpty as occupied:
            self._record_error(occupied)
            self._set_state("waiting")
            self._pause(stopping, self._driver.occupied_s)
            return
        except Exception as error:
            self._handle_failure(error, stopping)
            return
        try:
            self._steps(job, stopping)
        finally:
            self._close(job)

    def _steps(self, job: Job, stopping: threading.Event) -> None:
        try:
            while not stopping.is_set():
                wait_s = self._step(job)
                if wait_s:
                    self._pause(stopping, wait_s)
        except Exception as error:
            self._handle_failure(error, stopping)

    def _step(self, job: Job) -> float:
        self.progress.is_working = False
        self._driver.turn()
        self.progress.is_working = True
        self._driver.begun()
        self._is_begun = True
        if self._ended.is_set():
            # It waited for its turn and was stopped meanwhile.
            self._end_step(has_succeeded=False)
            return 0.0
        if self._state in ("starting", "waiting"):
            self._set_state("running")
        started = time.monotonic()
        try:
            step = job.step()
        except BaseException as error:
            if is_java_lost(error):
                self._driver.lost()
            else:
                self._end_step(has_succeeded=False)
            raise
        self._end_step(has_succeeded=not step.is_open)
        self._tally.add(step, time.monotonic() - started)
        if step.is_open:
            if self._given_up:
                raise Stalled(self._given_up)
            return step.wait_s
        self.progress.record()
        self._given_up = ""
        self._failures = self._tries = self._failing_ms = 0
        self._set_state("running")
        return step.wait_s

    def _end_step(self, *, has_succeeded: bool) -> None:
        """Report the end of a step, unless it was reported when the step began to wait."""
        if self._is_begun:
            self._is_begun = False
            self._driver.ended(has_succeeded)

    def _handle_failure(self, error: Exception, stopping: threading.Event) -> None:
        if self._ended.is_set():
            # The runner was asked to end, and its work was cancelled.
            return
        if self._given_up:
            # A cancelled step's own error explains nothing.
            error, self._given_up = Stalled(self._given_up), ""
        self.progress.record()
        self._record_error(error)
        if isinstance(error, UnknownTopic):
            # The topic may be created later.
            self._set_state("waiting")
            self._pause(stopping, self._driver.occupied_s)
            return
        self._restarts += 1
        self._tries += 1
        self._failing_ms = self._failing_ms or self._error_ms
        # Failures while the broker is unreachable say nothing about the pipeline.
        fault = fault_of(error) if self._claim.is_confirmed else Fault.OUTSIDE
        self._failures += WEIGHTS[fault]
        if self._failures >= FAILURES_MAX:
            _logger.error("a pipeline is parked", extra={"pipeline": self._declared.name, "error": self._error})
            self._set_state("parked")
            return
        _logger.warning(
            "a pipeline failed and is restarted",
            extra={"pipeline": self._declared.name, "error": self._error},
            exc_info=error if fault == Fault.UNKNOWN and not isinstance(error, MillstreamError) else None,
        )
        self._set_state("retrying")
        driver = self._driver
        self._pause(stopping, delay_after(self._tries - 1, first_s=driver.backoff_s, max_s=driver.backoff_max_s))

    def _pause(self, stopping: threading.Event, seconds: float) -> None:
        self.progress.rest()
        stopping.wait(seconds)
        self.progress.work()

    def _close(self, job: Job) -> None:
        # Resources that could not be released end with the driver.
        with suppress(Exception):
            job.close()

    def _context(self, pipeline: Pipeline, stopping: threading.Event) -> JobContext:
        return replace(
            self._driver.context(pipeline),
            rules=pipeline.rules,
            stopping=stopping,
            member=lambda: self._claim.member(),
            idle=lambda: self._end_step(has_succeeded=True),
            progress=self.progress.record,
        )

    def _end_job(self) -> None:
        with self._lock:
            self._job_ends.set()

    def _record_error(self, error: Exception) -> None:
        self._error = reason_of(error, name=self.name)
        self._error_ms = int(time.time() * 1000)

    def _set_state(self, state: PipelineState) -> None:
        self._state = state
        self._driver.changed()
