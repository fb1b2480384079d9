"""The watchdog of pipelines: a stalled one is cancelled, and if it cannot be, the driver is replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.pipelines.runtime.runner import Progress
from millstream.pipelines.runtime.stall_watch import Activity, Watch

CHECK_INTERVAL_S = 5.0


class Pipeline:
    def __init__(self, name: str = "a", *, stall_s: float = 60.0) -> None:
        self.name = name
        self.progress = Progress()
        self.is_ending = False
        self.stall_s = stall_s
        self.given_up: list[str] = []
        self.progress.work()

    def cancel_step(self, reason: str) -> None:
        self.given_up.append(reason)


class Scene:
    """A watchdog whose clock and Spark belong to the test."""

    def __init__(self, *pipelines: Pipeline) -> None:
        self.now_s = 0.0
        self.activity = Activity()
        self.replaced: list[tuple[str, str]] = []
        self.asked = 0
        self.silent = threading.Event()
        self.silent.set()
        self.watch = Watch(
            lambda: pipelines,
            self._ask,
            lambda name, reason: self.replaced.append((name, reason)),
            check_interval_s=CHECK_INTERVAL_S,
            cancel_s=20.0,
            orphan_s=20.0,
            java_s=30.0,
            clock=lambda: self.now_s,
        )

    def advance(self, seconds: float) -> None:
        """Check as often as a driver would."""
        for _ in range(round(seconds / CHECK_INTERVAL_S)):
            self.now_s += CHECK_INTERVAL_S
            self.watch.check()

    def _ask(self) -> Activity:
        self.asked += 1
        self.silent.wait()
        return self.activity


@contextmanager
def watched(*pipelines: Pipeline) -> Iterator[Scene]:
    scene = Scene(*pipelines)
    over = threading.Event()
    over.set()
    try:
        yield scene
    finally:
        scene.silent.set()
        scene.watch.run(over)


def test_a_pipeline_with_progress_is_left_alone_and_spark_is_not_queried() -> None:
    pipeline = Pipeline()
    with watched(pipeline) as scene:
        for _ in range(100):
            pipeline.progress.record()
            scene.advance(CHECK_INTERVAL_S)
        assert (pipeline.given_up, scene.replaced, scene.asked, pipeline.progress.stalled_s) == ([], [], 0, 0.0)


def test_a_long_batch_that_makes_progress_is_not_cancelled() -> None:
    pipeline = Pipeline()
    with watched(pipeline) as scene:
        for tasks in range(100):
            scene.activity = Activity({"a": tasks}, {"a": 1})
            scene.advance(50)
        assert (pipeline.given_up, scene.replaced) == ([], [])
        assert scene.asked > 100


def test_a_stalled_pipeline_is_abandoned_once_and_then_the_driver_is_replaced() -> None:
    one, other = Pipeline(), Pipeline("b")
    with watched(one, other) as scene:
        for _ in range(12):
            scene.activity = Activity({"a": 7}, {"a": 1})
            other.progress.record()
            scene.advance(CHECK_INTERVAL_S)
        assert one.progress.stalled_s == 50.0
        assert one.given_up == []
        scene.advance(10)
        assert one.given_up == ["it made no progress for 60 s and was cancelled"]
        assert scene.replaced == []
        scene.advance(20)
        assert len(one.given_up) == 1
        assert scene.replaced == [("a", "it made no progress for 80 s and could not be cancelled")]


def test_a_pipeline_that_resumes_after_it_was_abandoned_gets_its_full_time_again() -> None:
    pipeline = Pipeline()
    with watched(pipeline) as scene:
        scene.advance(65)
        assert len(pipeline.given_up) == 1
        pipeline.progress.record()
        scene.advance(60)
        assert len(pipeline.given_up) == 1
        scene.advance(5)
        assert len(pipeline.given_up) == 2
        assert scene.replaced == []


def test_a_waiting_or_unlimited_pipeline_is_left_alone() -> None:
    waiting, patient = Pipeline("a"), Pipeline("b", stall_s=0.0)
    waiting.progress.rest()
    with watched(waiting, patient) as scene:
        scene.advance(10_000)
        assert (waiting.given_up, patient.given_up, scene.replaced) == ([], [], [])
        assert patient.progress.stalled_s > 9000
        # One that must end does, whatever else it is allowed to do.
        patient.is_ending = True
        scene.advance(CHECK_INTERVAL_S)
        assert [name for name, _ in scene.replaced] == ["b"]


def test_a_pipeline_whose_tasks_are_queued_behind_others_is_not_blamed() -> None:
    hanging, waiting = Pipeline("a"), Pipeline("b", stall_s=30.0)
    with watched(hanging, waiting) as scene:
        scene.activity = Activity({"a": 1, "b": 1}, {"a": 1, "b": 0})
        scene.advance(70)
        assert (len(hanging.given_up), waiting.given_up) == (1, [])
        # No other pipeline is left, and still nothing runs.
        scene.activity = Activity({"b": 1}, {"b": 0})
        hanging.progress.rest()
        scene.advance(40)
        assert len(waiting.given_up) == 1


def test_cancelled_tasks_that_block_others_cause_the_driver_to_be_replaced() -> None:
    one, other = Pipeline("a"), Pipeline("b")
    with watched(one, other) as scene:
        one.progress.rest()
        scene.activity = Activity({"b": 1}, {"b": 1}, {"a": 1})
        scene.advance(40)
        assert scene.replaced == []
        scene.activity = Activity({"b": 1}, {"b": 0}, {"a": 1})
        scene.advance(20)
        assert [name for name, _ in scene.replaced] == ["a"]
        assert other.given_up == []


def test_an_unresponsive_java_replaces_the_driver() -> None:
    pipeline = Pipeline(stall_s=3600.0)
    with watched(pipeline) as scene:
        scene.watch._check_interval_s = scene.watch._java_s = 0.01
        scene.silent.clear()
        for _ in range(3):
            scene.now_s += 0.01
            scene.watch.check()
        assert scene.replaced[0] == ("", "the Java process has not responded for 0 s")


def test_no_pipeline_is_blamed_while_java_is_unresponsive() -> None:
    pipeline = Pipeline(stall_s=10.0)
    with watched(pipeline) as scene:
        scene.watch._java_s = 500.0
        scene.silent.clear()
        for _ in range(10):
            scene.now_s += CHECK_INTERVAL_S
            scene.watch._check_interval_s = 0.01
            scene.watch.check()
            scene.watch._check_interval_s = CHECK_INTERVAL_S
        assert (pipeline.given_up, scene.replaced) == ([], [])
        scene.silent.set()
        scene.advance(20)
        assert pipeline.given_up == ["it made no progress for 10 s and was cancelled"]


def test_a_suspended_process_blames_no_pipeline() -> None:
    pipeline = Pipeline()
    with watched(pipeline) as scene:
        scene.advance(20)
        scene.now_s += 100_000
        scene.watch.check()
        assert (pipeline.given_up, scene.replaced) == ([], [])


def test_a_failing_spark_query_is_not_progress() -> None:
    pipeline = Pipeline()
    with watched(pipeline) as scene:

        def failing() -> Activity:
            raise RuntimeError("no such job")

        scene.watch._activity = failing
        scene.advance(70)
        assert len(pipeline.given_up) == 1
