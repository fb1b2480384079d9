"""One running pipeline: its steps, failures, changes and end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from typing import Any, cast

import pytest

from millstream.core.errors import BrokerUnreachable, GroupNotEmpty, InvalidRequest, UnknownTopic
from millstream.core.pipeline import Pipeline
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.jobs.job import JobContext, JobKind, Step
from millstream.pipelines.runtime.runner import FAILURES_MAX, WINDOW_S, DriverContext, Runner, Tally
from millstream_testing.pipeline_script import HANG_S, Script, UncontendedClaim, landing

NO_SPARK = cast("Any", None)


class Watched:
    """A runner in its thread, with all of its reports."""

    def __init__(self, script: JobKind, claim: UncontendedClaim) -> None:
        self.claim = claim
        self.reported: list[str] = []
        self.steps: list[object] = []
        self._news = threading.Condition()
        around = DriverContext(
            make=script,
            context=lambda _pipeline: JobContext(spark=NO_SPARK, brokers="", lake="", folder=""),
            claim=self._claimed,
            begun=lambda: self.steps.append("begun"),
            ended=self.steps.append,
            lost=lambda: self.steps.append("lost"),
            changed=self._changed,
            backoff_s=0.001,
            backoff_max_s=0.002,
            occupied_s=0.001,
        )
        self.runner = Runner(landing(), around, node=3)
        self.thread = threading.Thread(target=self.runner.run)

    def until(self, state: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: state in self.reported, HANG_S)

    def _claimed(self, group: str, on_lost: Any) -> UncontendedClaim:
        assert group == "pipeline-landing"
        self.claim.on_lost = on_lost
        return self.claim

    def _changed(self) -> None:
        with self._news:
            self.reported.append(self.runner.report().state)
            self._news.notify_all()


@contextmanager
def running(script: Script, claim: UncontendedClaim | None = None) -> Iterator[Watched]:
    watched = Watched(script, claim or UncontendedClaim())
    watched.thread.start()
    try:
        yield watched
    finally:
        watched.runner.stop()
        watched.thread.join(HANG_S)
        assert not watched.thread.is_alive()


def test_a_step_that_loses_java_stays_in_progress() -> None:
    class Py4JNetworkError(Exception):
        """Named as in py4j."""

    script = Script(ValueError("odd"), Py4JNetworkError("Response from Java side is empty"), Step(rows=3))
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
    assert watched.steps[:6] == ["begun", False, "begun", "lost", "begun", True]


def test_a_step_that_only_waits_is_not_in_progress() -> None:
    seen: list[list[object]] = []

    class Waiting:
        """Finds no work, then some."""

        def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
            self.context = context

        def step(self) -> Step:
            if not seen:
                self.context.idle()
            seen.append(list(watched.steps))
            if len(seen) > 2:
                raise ValueError("odd")
            return Step()

        def close(self) -> None:
            watched.runner.stop()

    watched = Watched(Waiting, UncontendedClaim())
    watched.thread.start()
    watched.thread.join(HANG_S)
    # Whatever ends the driver while the first step waits, this pipeline is not to blame.
    assert seen[:3] == [["begun", True], ["begun", True, "begun"], ["begun", True, "begun", True, "begun"]]
    assert watched.steps == ["begun", True, "begun", True, "begun", False]


def test_a_missing_topic_is_waited_for() -> None:
    missing = [UnknownTopic("topic 'orders' does not exist")] * (FAILURES_MAX + 1)
    script = Script(*missing, Step(rows=3))
    with running(script) as watched:
        assert watched.runner.report().lag is None
        assert script.at_end.wait(HANG_S)
        report = watched.runner.report()
        assert (report.state, report.rows, report.lag, report.restarts) == ("running", 3, 0, 0)
    assert "waiting" in watched.reported
    assert "parked" not in watched.reported


def test_steps_are_counted_and_reported() -> None:
    script = Script(Step(rows=5, lag=7, counts={"files": 2}), Step(lag=7), Step(rows=7, counts={"files": 1}))
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        report = watched.runner.report()
        assert (report.name, report.state, report.node) == ("landing", "running", 3)
        assert (report.rows, report.batches, report.lag, report.restarts) == (12, 2, 0, 0)
        assert report.counts == {"files": 3}
        assert report.rows_per_s > 0
        assert script.contexts[0].member().member_id == "me"
        assert watched.steps == ["begun", True] * 3 + ["begun"]
    assert watched.runner.report().state == "stopped"
    assert (watched.claim.taken, watched.claim.left, script.closed) == (1, 1, 1)


def test_a_failure_is_reported_and_the_job_is_recreated() -> None:
    script = Script(Step(rows=1), ValueError("no such column"), Step(rows=2))
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        report = watched.runner.report()
        assert (report.state, report.rows, report.restarts) == ("running", 3, 1)
        assert report.last_error == "ValueError: no such column"
        assert report.last_error_ms > 0
        assert "retrying" in watched.reported
    assert len(script.contexts) == 2
    assert watched.claim.taken == 1


def test_a_pipeline_that_keeps_failing_is_parked() -> None:
    failures = [RuntimeError("it cannot be")] * FAILURES_MAX
    script = Script(*failures[1:], Step(rows=1), *failures)
    with running(script) as watched:
        watched.thread.join(HANG_S)
        report = watched.runner.report()
        assert (report.state, report.last_error) == ("parked", "RuntimeError: it cannot be")
        assert report.restarts == 2 * FAILURES_MAX - 1
        assert watched.claim.left == 1
    assert watched.runner.report().state == "parked"


def test_a_declaration_error_is_retried_once() -> None:
    script = Script(InvalidRequest("no such column"), Step(rows=1), *[InvalidRequest("no such column")] * 2)
    with running(script) as watched:
        watched.thread.join(HANG_S)
        report = watched.runner.report()
        assert (report.state, report.rows, report.restarts) == ("parked", 1, 3)


def test_an_unavailable_service_parks_nothing_for_any_time() -> None:
    away = [BrokerUnreachable("nobody responds"), OSError("Generic S3 error"), OSError(ENOSPC, "no space left")]
    script = Script(*away * FAILURES_MAX, Step(rows=1))
    with running(script) as watched:
        watched.until("retrying")
        assert watched.runner.report().failing_ms > 0
        assert script.at_end.wait(HANG_S)
        report = watched.runner.report()
        assert (report.state, report.restarts, report.failing_ms) == ("running", 3 * FAILURES_MAX, 0)


def test_failures_while_the_group_is_unreachable_do_not_count() -> None:
    script = Script(Step(rows=1), *[RuntimeError("the task failed")] * (3 * FAILURES_MAX))
    claim = UncontendedClaim()
    claim.confirms = False
    with running(script, claim) as watched:
        assert script.at_end.wait(HANG_S)
        assert watched.runner.report().restarts == 3 * FAILURES_MAX


def test_it_waits_while_another_runner_has_the_claim() -> None:
    busy = [GroupNotEmpty("it is being run by 'cli'")] * 3
    script = Script(Step(rows=1))
    with running(script, UncontendedClaim(busy)) as watched:
        watched.until("waiting")
        assert script.at_end.wait(HANG_S)
        report = watched.runner.report()
        assert (report.state, report.restarts) == ("running", 0)
        assert report.last_error == "it is being run by 'cli'"


def test_a_lost_claim_is_retaken_before_another_step() -> None:
    script = Script(Step(rows=1))
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        script.at_end.clear()
        watched.claim.lose()
        assert script.at_end.wait(HANG_S)
        assert watched.claim.taken == 2
        assert len(script.contexts) == 2


def test_new_settings_make_a_new_job_under_the_same_claim() -> None:
    script = Script()
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        script.at_end.clear()
        watched.runner.change(landing(decode="json"))
        assert script.at_end.wait(HANG_S)
        assert watched.claim.taken == 1
    assert [pipeline.overrides.get("decode") for pipeline in script.pipelines] == [None, "json"]


def test_cancellation_by_a_stop_is_not_a_failure() -> None:
    script = Script()
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        script.fails_when_stopped = True
    report = watched.runner.report()
    assert (report.state, report.last_error, report.restarts) == ("stopped", "", 0)


def test_an_abandoned_step_is_a_failure_with_a_reason() -> None:
    script = Script(Step(rows=1))
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        assert watched.runner.progress.is_working
        script.at_end.clear()
        script.fails_when_stopped = True
        watched.runner.cancel_step("it made no progress for 60 s and was cancelled")
        # The script has nothing that can be cancelled.
        script.contexts[0].stopping.set()
        assert script.at_end.wait(HANG_S)
        report = watched.runner.report()
        assert (report.last_error, report.restarts, report.stalls) == (
            "it made no progress for 60 s and was cancelled",
            1,
            1,
        )


def test_a_batch_that_continues_beyond_its_steps_shows_no_progress_and_can_be_abandoned() -> None:
    script = Script(Step(rows=1), *[Step(lag=5, is_open=True)] * 3)
    with running(script) as watched:
        assert script.at_end.wait(HANG_S)
        assert watched.steps == ["begun", True, *["begun", False] * 3, "begun"]
        signs = watched.runner.progress.count
        script.contexts[0].progress()
        assert watched.runner.progress.count == signs + 1
    stuck = Script(Step(lag=5, is_open=True, wait_s=HANG_S), Step(lag=5, is_open=True))
    with running(stuck) as watched:
        watched.until("running")
        watched.runner.cancel_step("it hangs")
        stuck.contexts[0].stopping.set()
        assert stuck.at_end.wait(HANG_S)


def test_a_waiting_pipeline_is_not_busy() -> None:
    script = Script(Step(rows=1, wait_s=HANG_S))
    with running(script) as watched:
        watched.until("running")
        while watched.runner.progress.is_working:
            pass


def test_the_rate_is_that_of_the_last_minute() -> None:
    now = [0.0]
    tally = Tally(lambda: now[0])
    tally.add(Step(rows=600))
    assert tally.rows_per_s == 600
    now[0] = 30.0
    tally.add(Step(rows=600), 1.5)
    assert tally.rows_per_s == 40
    now[0] = 30.0 + WINDOW_S - 1
    assert tally.rows_per_s == 10
    now[0] = 1000.0
    assert tally.rows_per_s == 0
    tally.add(Step(lag=3))
    assert [(batch.rows, batch.seconds) for batch in tally.recent] == [(600, 1.5), (600, 0.0)], "the latest first"


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (InvalidRequest("say what is landed"), "say what is landed"),
        (ValueError("wrong"), "ValueError: wrong"),
        (ValueError(), "ValueError"),
        (
            RuntimeError(
                "Job aborted: Traceback (most recent call last):\n"
                "  File \"a.py\", line 3, in f\n    g()\nKeyError: 'id'\n\n\tat org.apache.spark.X.y(X.scala:1)\n"
            ),
            "RuntimeError: KeyError: 'id'",
        ),
        (RuntimeError("[PARSE] near 'FRM'\n\tat org.apache.spark.X.y(X.scala:1)"), "RuntimeError: [PARSE] near 'FRM'"),
        (OSError("Generic S3 error\n\x1b[31m↳\x1b[0m refused"), "OSError: Generic S3 error\n↳ refused"),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 3988 + " …"),
    ],
)
def test_reasons_are_reported_without_traces(error: Exception, reported: str) -> None:
    assert reason_of(error) == reported
