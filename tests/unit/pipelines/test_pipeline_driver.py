"""The driver: what it runs and reports, and which pipelines run together after a crash."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import pytest

from millstream.core.errors import InvalidRequest
from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.pipelines.jobs.job import Job, JobContext, Step
from millstream.pipelines.runtime.driver import CommandReader, Driver, Turns, run
from millstream.pipelines.runtime.driver_messages import (
    AssignedPipeline,
    DriverCommand,
    DriverEvent,
    EventWriter,
    Options,
)
from millstream.protocol.private.pipeline_messages import PipelineReport
from millstream_testing.pipeline_script import HANG_S, Script, UncontendedClaim, landing

OPTIONS = Options(
    kafka="127.0.0.1:1",
    node=3,
    lake="/lake",
    folder="/folder",
    master="",
    memory="1g",
    spark={},
    log="/spark.log",
    log_level="info",
    log_format="text",
)


class Scene:
    """A driver without Spark whose jobs follow scripts, one for each pipeline."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.sent: list[DriverEvent] = []
        self.exit_codes: list[int] = []
        self._news = threading.Condition()
        self.driver = Driver(
            OPTIONS,
            None,
            self._send,
            lambda _group, _on_lost: UncontendedClaim(),
            jobs={PipelineKind.LAND: self._make},
            report_s=0.0,
            backoff_s=0.001,
            leave=self.exit_codes.append,
        )

    def script(self, name: str, *lines: Step | Exception) -> Script:
        self.scripts[name] = Script(*lines)
        return self.scripts[name]

    def until(self, condition: Callable[[list[DriverEvent]], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: condition(self.sent), HANG_S)

    def reported(self, name: str) -> PipelineReport | None:
        reports = [event.reports for event in self.sent if event.reports is not None]
        return next((report for report in reports[-1] if report.name == name), None) if reports else None

    def _make(self, pipeline: Pipeline, context: JobContext) -> Job:
        return self.scripts[pipeline.name](pipeline, context)

    def _send(self, event: DriverEvent) -> None:
        with self._news:
            self.sent.append(event)
            self._news.notify_all()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.driver.end()


def test_it_runs_its_pipelines_and_reports(scene: Scene) -> None:
    first, second = scene.script("a", Step(rows=3)), scene.script("b", Step(rows=4))
    scene.driver.declare([AssignedPipeline(landing("a")), AssignedPipeline(landing("b"))])
    assert first.at_end.wait(HANG_S)
    assert second.at_end.wait(HANG_S)
    scene.until(lambda _said: _rows(scene, "a") == 3 and _rows(scene, "b") == 4)
    assert first.contexts[0].lake == "/lake"
    assert first.contexts[0].brokers == "127.0.0.1:1"
    steps = [event for event in scene.sent if "a" in (event.begun, event.ended)]
    assert [(event.begun, event.has_succeeded) for event in steps] == [("a", False), ("", True), ("a", False)]

    scene.driver.declare([AssignedPipeline(landing("b"))])
    scene.until(lambda _said: scene.reported("a") is None)
    assert _rows(scene, "b") == 4


def test_a_change_makes_a_new_job_and_an_equal_command_does_not(scene: Scene) -> None:
    script = scene.script("a")
    scene.driver.declare([AssignedPipeline(landing("a"))])
    assert script.at_end.wait(HANG_S)
    scene.driver.declare([AssignedPipeline(landing("a"))])
    script.at_end.clear()
    scene.driver.declare([AssignedPipeline(landing("a", decode="json"))])
    assert script.at_end.wait(HANG_S)
    assert [pipeline.overrides.get("decode") for pipeline in script.pipelines] == [None, "json"]


def test_a_parked_pipeline_is_retried_with_a_new_attempt_number(scene: Scene) -> None:
    script = scene.script("a", *[InvalidRequest("no")] * 2, Step(rows=1))
    scene.driver.declare([AssignedPipeline(landing("a"))])
    scene.until(lambda _said: _state(scene, "a") == "parked")
    scene.driver.declare([AssignedPipeline(landing("a"))])
    assert not script.at_end.is_set()
    scene.driver.declare([AssignedPipeline(landing("a"), attempt=1)])
    assert script.at_end.wait(HANG_S)


def test_a_recreated_pipeline_starts_after_the_end_of_the_old_one(scene: Scene) -> None:
    script = scene.script("a")
    before = landing("a")
    scene.driver.declare([AssignedPipeline(before)])
    assert script.at_end.wait(HANG_S)
    script.at_end.clear()
    after = dataclasses.replace(before, pipeline_id=uuid.uuid4())
    scene.driver.declare([AssignedPipeline(after)])
    assert script.at_end.wait(HANG_S)
    assert script.pipelines == [before, after]
    assert script.closed == 1


def test_a_suspect_stopped_while_waiting_for_its_turn_does_nothing(scene: Scene) -> None:
    first, second = scene.script("a"), scene.script("b", Step(rows=1))
    scene.driver.declare([AssignedPipeline(landing("a"), is_suspect=True)])
    assert first.at_end.wait(HANG_S)
    scene.driver.declare(
        [AssignedPipeline(landing("a"), is_suspect=True), AssignedPipeline(landing("b"), is_suspect=True)]
    )
    scene.until(lambda _said: _state(scene, "b") is not None)
    scene.driver.declare([AssignedPipeline(landing("a"), is_suspect=True)])
    scene.driver.declare([])
    scene.driver.end()
    assert second.next_line() == Step(rows=1)


def test_suspects_take_turns_until_a_step_succeeds() -> None:
    turns = Turns()
    turns.suspect("a")
    turns.suspect("b")
    turns.acquire("a")
    turns.acquire("c")
    waiting = threading.Thread(target=turns.acquire, args=("b",))
    waiting.start()
    turns.release("c", has_succeeded=False)
    assert waiting.is_alive()
    turns.release("a", has_succeeded=True)
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    # One is cleared, the other still has its turn.
    turns.acquire("a")
    turns.release("a", has_succeeded=True)
    turns.release("b", has_succeeded=False)
    turns.acquire("b")
    turns.release("b", has_succeeded=True)


def test_commands_and_reports_round_trip() -> None:
    rules = (Rule(name="all", topic="orders", targets=("queue",)),)
    assigned = AssignedPipeline(dataclasses.replace(landing("a"), kind=PipelineKind.ROUTE, rules=rules), 2, True)
    assert msgspec.json.decode(msgspec.json.encode(DriverCommand([assigned])), type=DriverCommand) == DriverCommand(
        [assigned]
    )
    stream = io.BytesIO()
    events = EventWriter(stream)
    events.send(DriverEvent(begun="a"))
    events.send(DriverEvent(reports=[PipelineReport(name="a", state="running", counts={"files": 1})]))
    commands = [msgspec.json.decode(line, type=DriverEvent) for line in stream.getvalue().splitlines()]
    assert commands[0] == DriverEvent(begun="a")
    assert commands[1].reports == [PipelineReport(name="a", state="running", counts={"files": 1})]
    stream.close()
    events.send(DriverEvent(ended="a"))


def _rows(scene: Scene, name: str) -> int | None:
    report = scene.reported(name)
    return None if report is None else report.rows


def _state(scene: Scene, name: str) -> str | None:
    report = scene.reported(name)
    return None if report is None else report.state


def test_a_broker_that_dies_while_spark_starts_ends_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    is_gone, is_starting = threading.Event(), threading.Event()

    def start(*_: object, **__: object) -> None:
        is_starting.set()
        assert is_gone.wait(HANG_S)
        raise InvalidRequest("the test is over")

    monkeypatch.setattr("millstream.pipelines.runtime.spark_session.open_session", start)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as commands, os.fdopen(writer, "wb") as broker:
        driving = threading.Thread(target=_drive, args=(commands, is_gone.set))
        driving.start()
        assert is_starting.wait(HANG_S)
        broker.write(msgspec.json.encode(DriverCommand([])) + b"\n")
        broker.flush()
        assert not is_gone.is_set()
        broker.close()
        driving.join(HANG_S)
    assert is_gone.is_set()


def _drive(commands: IO[bytes], leave: Callable[[], None]) -> None:
    with pytest.raises(InvalidRequest):
        run(OPTIONS, commands, EventWriter(io.BytesIO()), leave=leave)


def test_early_commands_of_the_broker_are_applied_when_there_is_work() -> None:
    reader, writer = os.pipe()
    left: list[bool] = []
    with os.fdopen(reader, "rb") as commands, os.fdopen(writer, "wb") as broker:
        broker.write(b"one\ntwo\n")
        broker.flush()
        lines = CommandReader(commands, lambda: left.append(True)).lines()
        assert [next(lines), next(lines)] == [b"one\n", b"two\n"]
        broker.close()
        assert list(lines) == []
    assert left == []
