"""Manual runs of a pipeline: when they end, and how they are named."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from millstream.cli.pipeline_run import _undeclared
from millstream.client.admin.pipelines import storage_in
from millstream.core.errors import GroupNotEmpty, InvalidPipeline, InvalidSetting
from millstream.core.pipeline import PipelineKind, Rule
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.runtime import manual_run as by_hand_module
from millstream.pipelines.runtime.manual_run import ManualRun, ManualRunWatch
from millstream.pipelines.runtime.runner import Stalled
from millstream.pipelines.runtime.stall_watch import Activity
from millstream_testing.pipeline_script import HANG_S, Script, UncontendedClaim, landing


def by_hand(script: Script, claim: UncontendedClaim, stopping: threading.Event | None = None) -> ManualRun:
    claim.take()
    context = JobContext(
        spark=cast("Any", None), brokers="", lake="", folder="", stopping=stopping or threading.Event()
    )
    return ManualRun(landing(), context, claim, jobs={PipelineKind.LAND: script})


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        ([Step(rows=5, lag=3), Step(rows=3, wait_s=60.0)], 8),
        ([Step()], 0),
        # Another runner was faster once.
        ([Step(lag=4), Step(rows=4)], 4),
        # More arrives all the time: the messages present at the start are enough.
        ([Step(rows=5, lag=5), Step(rows=6, lag=5)], 11),
    ],
)
def test_once_ends_when_everything_present_at_the_start_is_processed(lines: list[Step], rows: int) -> None:
    script = Script(*lines)
    running = by_hand(script, UncontendedClaim())
    running.run(once=True)
    assert (running.tally.rows, script.closed) == (rows, 1)
    assert not script.at_end.is_set()
    assert script.contexts[0].member().member_id == "me"


def test_it_continues_until_it_is_stopped_or_taken_over() -> None:
    stopping = threading.Event()
    script = Script(Step(rows=1), Step(rows=1))
    claim = UncontendedClaim()
    running = by_hand(script, claim, stopping)
    running_thread = threading.Thread(target=running.run, kwargs={"once": False})
    running_thread.start()
    assert script.at_end.wait(60)
    stopping.set()
    running_thread.join(60)
    assert running.tally.rows == 2

    lost = by_hand(Script(), claim, stopping)
    claim.lose()
    with pytest.raises(GroupNotEmpty, match="another run"):
        lost.run(once=False)


def test_a_failure_is_reported_with_the_progress_before_it() -> None:
    script = Script(Step(rows=1, lag=1), ValueError("no"))
    running = by_hand(script, UncontendedClaim())
    with pytest.raises(ValueError, match="no"):
        running.run(once=True)
    assert (running.tally.rows, script.closed) == (1, 1)


class Java:
    """A Spark stand-in whose Java process can be queried and killed."""

    def __init__(self) -> None:
        self.is_killed = threading.Event()

    def kill(self) -> None:
        self.is_killed.set()


def run_watched(script: Script, java: Java, monkeypatch: pytest.MonkeyPatch, *, reacts: bool) -> list[str]:
    """Run with a short stall limit; return why the process had to end, if it had."""
    monkeypatch.setattr(by_hand_module, "activity_of", lambda _spark: Activity())
    monkeypatch.setattr(by_hand_module, "kill_java", Java.kill)
    monkeypatch.setattr(by_hand_module, "END_S", 0.05)
    claim, stopping = UncontendedClaim(), threading.Event()
    claim.take()
    spark: Any = java
    context = JobContext(spark=spark, brokers="", lake="", folder="", stopping=stopping)
    running = ManualRun(
        landing(**{"stall.ms": "300"}),
        context,
        claim,
        cancel=stopping.set if reacts else lambda: None,
        jobs={PipelineKind.LAND: script},
    )
    left: list[str] = []

    def leave(reason: str) -> None:
        left.append(reason)
        stopping.set()

    cancel_s = HANG_S if reacts else 0.2
    with (
        ManualRunWatch(running, spark, leave, check_interval_s=0.05, cancel_s=cancel_s),
        pytest.raises(Stalled) as stalled,
    ):
        running.run(once=False)
    assert script.closed == 1
    return [str(stalled.value), *left]


def test_a_stalled_step_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    script, java = Script(Step(rows=2, lag=1)), Java()
    script.fails_when_stopped = True
    (reason,) = run_watched(script, java, monkeypatch, reacts=True)
    assert reason.endswith("s and was cancelled")
    assert not java.is_killed.is_set()


def test_a_step_that_cannot_be_cancelled_loses_its_java_and_then_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script, java = Script(Step(rows=1)), Java()
    script.fails_when_stopped = True
    reason, left = run_watched(script, java, monkeypatch, reacts=False)
    assert reason == left
    assert reason.endswith("and could not be cancelled")
    assert java.is_killed.is_set()


def test_an_undeclared_pipeline_has_a_stable_name() -> None:
    rule = Rule(name="r", topic="orders", targets=("queue",))
    names = [
        _undeclared(PipelineKind.LAND, {"topics": "orders,bills"}, (), None),
        _undeclared(PipelineKind.LAND, {"pattern": "o.*"}, (), None),
        _undeclared(PipelineKind.TRANSFORM, {"sql": "SELECT * FROM orders", "into": "large"}, (), None),
        _undeclared(PipelineKind.ROUTE, {}, (rule,), None),
        _undeclared(PipelineKind.LAND, {"topics": "orders"}, (), "mine"),
    ]
    assert [pipeline.name for pipeline in names] == [
        "land-orders-bills",
        "land-all",
        "transform-large",
        "route-orders",
        "mine",
    ]
    again = _undeclared(PipelineKind.LAND, {"topics": "orders"}, (), "mine")
    assert again.pipeline_id == names[-1].pipeline_id
    with pytest.raises(InvalidSetting, match="set either"):
        _undeclared(PipelineKind.LAND, {}, (), None)
    with pytest.raises(InvalidPipeline, match="--rules"):
        _undeclared(PipelineKind.ROUTE, {}, (), None)


def test_places_are_in_the_data_folder_unless_the_node_says_otherwise() -> None:
    assert storage_in("/data")[:2] == ("/data/lake", "/data/pipelines")
    assert storage_in("/data", lake="s3://bucket/lake", folder="/shared")[:2] == ("s3://bucket/lake", "/shared")
