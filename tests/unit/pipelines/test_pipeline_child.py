"""The broker's side of pipelines: when a driver runs, what it reports, and pipelines that crash it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import msgspec
import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.owner import PipelineOwner
from millstream.broker.pipelines.report_board import PipelineBoard
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import CatalogUnavailable, InvalidSetting
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.core.scratch import PREFIX
from millstream.pipelines.runtime.child import DriverReports, PipelineChild, driver_options, idle_reason_of
from millstream.pipelines.runtime.driver_messages import DriverEvent, Options
from millstream.pipelines.runtime.spark_session import DIED
from millstream.pipelines.source.session import default_settings, launch_settings
from millstream.protocol.private.pipeline_messages import PipelineReport
from millstream_testing.pipeline_script import HANG_S, landing

DRIVER = "millstream_testing.scripted_driver"


class Owner:
    """The owner of the pipelines, set by a test."""

    def __init__(self) -> None:
        self.is_this_node = True
        self.is_elsewhere = False
        self.has_resigned = False
        self.became_candidate = asyncio.Event()
        self._listener: Callable[[], None] = lambda: None

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def set_owner(self, *, mine: bool) -> None:
        self.is_this_node, self.is_elsewhere = mine, not mine
        self._listener()

    def become_candidate(self) -> None:
        self.became_candidate.set()

    async def resign(self) -> None:
        self.has_resigned = True


class Board(PipelineBoard):
    """A board that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def take(self, reports: object) -> None:
        super().take(reports)  # type: ignore[arg-type]
        self.changed.set()

    def clear(self) -> None:
        super().clear()
        self.changed.set()

    def report(self, name: str) -> PipelineReport:
        reported = self.describe(name)
        return (
            PipelineReport(name=name, state="stopped")
            if reported is None
            else msgspec.convert(reported, PipelineReport)
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Scene:
    """A child process with its surroundings."""

    def __init__(self, declared: Pipelines, *, spare_s: float | None = None) -> None:
        self.declared = declared
        self.board = Board()
        self.owner = Owner()
        self.missing = ""
        self.child = PipelineChild(
            driver_options(Config(), "127.0.0.1:1"),
            declared,
            self.board,
            cast("PipelineOwner", self.owner),
            missing=lambda: self.missing,
            module=DRIVER,
            backoff_min_s=0.01,
            spare_s=spare_s,
        )

    async def declare(self, name: str, word: str, **settings: str) -> Pipeline:
        return await self.declared.create(name, PipelineKind.LAND, {"topics": word, **settings})

    async def until_parked(self, name: str) -> str:
        await self.board.until(lambda: bool(self._parked(name)))
        return self._parked(name)

    def _parked(self, name: str) -> str:
        pipeline = self.declared.get(name)
        return "" if pipeline is None else pipeline.parked


@asynccontextmanager
async def scene_in(folder: Path, *, spare_s: float | None = None) -> AsyncIterator[Scene]:
    catalog = Catalog.open_folder(folder)
    declared = Pipelines(CatalogDeclarations(catalog), SystemClock())
    scene = Scene(declared, spare_s=spare_s)
    running = asyncio.create_task(scene.child.run())
    try:
        yield scene
    finally:
        await scene.child.stop()
        await asyncio.wait_for(running, HANG_S)
        catalog.close()


async def test_a_driver_runs_while_a_pipeline_is_due_and_continues_after_a_kill(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.declare("a", "orders")
        await scene.board.until(lambda: scene.board.report("a").rows > 2)
        report = scene.board.report("a")
        assert (report.state, report.node, report.counts["files"]) == ("running", 1, report.rows)

        first = scene.child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await scene.board.until(lambda: scene.board.report("a").restarts == 1)
        assert scene.board.report("a").rows >= report.rows
        await scene.board.until(lambda: scene.board.report("a").rows > report.rows + 5)
        assert scene.child.pid not in (None, first)
        assert scene.board.restarts == 1
        assert scene.board.report("a").restarts == 1
        assert scene.board.report("a").last_error == "the driver ended with signal 9"

        await scene.declared.stop("a")
        await scene.board.until(lambda: scene.child.pid is None)
        await scene.board.until(lambda: scene.board.report("a").state == "stopped")
        assert scene.board.report("a").restarts == 1
        assert scene.board.restarts == 1
    assert scene.owner.has_resigned


async def test_a_pipeline_that_keeps_failing_is_parked_without_affecting_others(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.declare("good", "orders")
        await scene.declare("bad", "failing")
        assert await scene.until_parked("bad") == "the script fails this step"
        await scene.board.until(lambda: scene.board.report("good").rows > 2)
        assert scene.board.restarts == 0
        # A restart by the user retries it.
        await scene.declared.start("bad")
        assert await scene.until_parked("bad") == "the script fails this step"


async def test_a_pipeline_that_crashes_the_driver_is_parked_without_affecting_others(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.declare("good", "idle")
        await scene.declare("deadly", "deadly")
        assert "died 3 times in a row" in await scene.until_parked("deadly")
        await scene.board.until(lambda: scene.board.report("good").state == "running")
        assert scene.board.restarts == 3
        assert not scene.declared.all()[1].parked


async def test_a_hanging_pipeline_replaces_the_driver_without_affecting_others(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.declare("good", "orders")
        await scene.board.until(lambda: scene.board.report("good").rows > 0)
        await scene.declare("hanging", "hanging", **{"stall.ms": "20"})
        reason = await scene.until_parked("hanging")
        assert "died 3 times in a row" in reason
        assert "the driver was replaced: pipeline 'hanging': it made no progress for" in reason
        rows = scene.board.report("good").rows
        await scene.board.until(lambda: scene.board.report("good").rows > rows + 2)
        assert scene.board.restarts == 3
        assert scene.board.report("good").stalls == 0


async def test_a_silent_driver_is_killed(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.declare("a", "orders")
        await scene.board.until(lambda: scene.board.report("a").rows > 0)
        first, rows = scene.child.pid, scene.board.report("a").rows
        assert first is not None
        scene.child._silent_s = 0.6
        # A slow machine may be silent for that long anyway.
        await scene.board.until(lambda: scene.board.report("a").rows > rows or scene.board.restarts > 0)
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGSTOP)
        await scene.board.until(lambda: scene.board.restarts > 0)
        scene.child._silent_s = HANG_S
        assert scene.board.report("a").last_error == "the driver was silent for 1 s, and was killed"
        await scene.board.until(lambda: scene.child.pid not in (None, first))


async def test_a_node_that_is_not_the_owner_runs_nothing(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.owner.set_owner(mine=False)
        await scene.declare("a", "orders")
        assert scene.board.describe("a") is None
        scene.owner.set_owner(mine=True)
        await scene.board.until(lambda: scene.board.report("a").state == "running")
        scene.owner.set_owner(mine=False)
        await scene.board.until(lambda: scene.child.pid is None)
        assert scene.board.describe("a") is None
        assert scene.child.restarts == 0


async def test_a_missing_prerequisite_is_reported_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.pipelines.runtime.child.CHECK_INTERVAL_S", 0.01)
    async with scene_in(tmp_path) as scene:
        scene.missing = "pipelines run on Spark; install it"
        await scene.declare("a", "orders")
        report = scene.board.report("a")
        assert (report.state, report.last_error) == ("waiting", scene.missing)
        assert scene.child.pid is None
        # In a cluster, a node that could run none when it started is no candidate yet.
        scene.owner.is_this_node = False
        assert not scene.owner.became_candidate.is_set()
        scene.missing = ""  # without a notification
        async with asyncio.timeout(HANG_S):
            await scene.owner.became_candidate.wait()
        scene.owner.set_owner(mine=True)
        await scene.board.until(lambda: scene.board.report("a").state == "running")


async def test_an_unavailable_catalog_stops_all_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.pipelines.runtime.child.PARK_PAUSE_S", 0.01)
    async with scene_in(tmp_path) as scene:
        park, calls = scene.declared.park, 0

        async def away(pipeline: Pipeline, reason: str) -> Pipeline:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise CatalogUnavailable("no response")
            return await park(pipeline, reason)

        monkeypatch.setattr(scene.declared, "park", away)
        await scene.declare("bad", "failing")
        await scene.until_parked("bad")
        assert calls == 3


def test_only_consecutive_crashes_are_counted() -> None:
    roll = DriverReports(1)
    for _ in range(2):
        roll.apply(DriverEvent(begun="a"))
        roll.driver_ended(-9, is_death=True)
    assert roll.is_suspect("a")
    roll.apply(DriverEvent(begun="a"))
    roll.apply(DriverEvent(ended="a", has_succeeded=True))
    assert not roll.is_suspect("a")
    for deaths in range(3):
        assert roll.blamed() == []
        roll.apply(DriverEvent(begun="a"))
        roll.apply(DriverEvent(begun="b"))
        roll.apply(DriverEvent(ended="b", has_succeeded=deaths == 0))
        roll.driver_ended(-9, is_death=True)
    assert roll.blamed() == [("a", "the driver ended with signal 9")]
    assert roll.blamed() == []
    assert not roll.is_suspect("b")


def test_only_the_pipeline_that_caused_a_replacement_is_suspected() -> None:
    roll = DriverReports(1)
    reports = [PipelineReport(name=name, state="running", stalled_s=9.0) for name in ("a", "b")]
    for _ in range(3):
        roll.apply(DriverEvent(reports=reports))
        roll.apply(DriverEvent(begun="a"))
        roll.apply(DriverEvent(begun="b"))
        roll.apply(DriverEvent(failed="replaced", stuck="b"))
        roll.driver_ended(71, is_death=True)
        assert (roll.is_suspect("a"), roll.is_suspect("b")) == (False, True)
    reported = {
        report.name: report for report in roll.reports([landing("a"), landing("b")], is_running=False, idle_reason="")
    }
    assert [(report.restarts, report.stalled_s) for report in reported.values()] == [(3, 0.0), (3, 0.0)]
    assert roll.blamed() == [("b", "replaced")]
    # A pipeline that was in progress at any other crash is suspected as before.
    roll.apply(DriverEvent(begun="a"))
    roll.driver_ended(-9, is_death=True)
    assert roll.is_suspect("a")


def test_the_exit_reason_of_a_driver_is_reported_until_the_next_one_reports() -> None:
    roll = DriverReports(1)
    due = [landing("a")]
    assert roll.reports(due, is_running=True, idle_reason="")[0].state == "starting"
    roll.apply(DriverEvent(failed="no Java was found"))
    roll.driver_ended(1, is_death=True)
    report = roll.reports(due, is_running=False, idle_reason="")[0]
    assert (report.state, report.last_error) == ("retrying", "no Java was found")
    roll.driver_ended(-9, is_death=True)
    assert roll.reports(due, is_running=False, idle_reason="")[0].last_error == "the driver ended with signal 9"
    roll.driver_ended(DIED, is_death=True)
    assert "spark.log" in roll.reports(due, is_running=False, idle_reason="")[0].last_error
    reported = roll.reports(due, is_running=False, idle_reason="install them")[0]
    assert (reported.state, reported.last_error) == ("waiting", "install them")
    roll.apply(DriverEvent(reports=[PipelineReport(name="a", state="running", rows=5, counts={"files": 1})]))
    roll.driver_ended(0, is_death=False)
    roll.apply(DriverEvent(reports=[PipelineReport(name="a", state="running", rows=2, counts={"files": 1})]))
    report = roll.reports(due, is_running=True, idle_reason="")[0]
    assert (report.rows, report.restarts, report.counts) == (7, 0, {"files": 2})
    roll.forget([])
    assert roll.reports(due, is_running=True, idle_reason="")[0].rows == 2


def test_counters_continue_after_a_pipeline_was_parked_and_retried() -> None:
    roll = DriverReports(1)
    roll.forget(["a"])
    pipeline = landing("a")
    parked = dataclasses.replace(pipeline, parked="no such column")
    failed = PipelineReport(name="a", state="parked", rows=5, restarts=4, last_error="no such column", last_error_ms=7)
    roll.apply(DriverEvent(reports=[failed]))
    roll.apply(DriverEvent(reports=[]))
    (reported,) = roll.last_reports([parked])
    assert (reported.state, reported.rows, reported.restarts, reported.last_error_ms) == ("parked", 5, 4, 7)
    roll.apply(DriverEvent(reports=[PipelineReport(name="a", state="running", rows=1)]))
    roll.apply(DriverEvent(reports=[PipelineReport(name="a", state="starting")]))
    (reported,) = roll.reports([pipeline], is_running=True, idle_reason="")
    assert (reported.state, reported.rows, reported.restarts) == ("starting", 6, 4)
    assert roll.last_reports([landing("b")]) == []
    # Nothing is kept of a deleted one, even if the driver still reports it.
    roll.forget([])
    roll.apply(DriverEvent(reports=[]))
    assert roll.last_reports([parked]) == []


def test_the_time_since_no_driver_could_be_started_is_reported() -> None:
    roll = DriverReports(1)
    roll.driver_ended(1, is_death=True)
    (first,) = roll.reports([landing("a")], is_running=False, idle_reason="")
    roll.driver_ended(1, is_death=True)
    (then,) = roll.reports([landing("a")], is_running=False, idle_reason="")
    assert then.failing_ms == first.failing_ms > 0


def test_a_node_reports_where_its_driver_runs() -> None:
    config = Config(data="/d", advertise="broker:9092", pipelines_spark="spark.a=1; spark.b=x=y")
    options = driver_options(config, "127.0.0.1:9092")
    assert (options.lake, options.folder, options.master) == ("/d/lake", "/d/pipelines", "")
    assert options.spark == {"spark.a": "1", "spark.b": "x=y"}
    assert options.kafka == "127.0.0.1:9092"
    # Executors on other machines need an address that they can reach.
    assert driver_options(config.replace(pipelines_master="spark://host:7077"), "x:1").kafka == "broker:9092"
    with pytest.raises(InvalidSetting, match=r"spark\.NAME=VALUE"):
        Config.of({"pipelines-spark": "memory=2g"})
    with pytest.raises(InvalidSetting, match=r"pipelines-master: .* Spark Connect"):
        Config.of({"pipelines-master": "sc://host:15002"})
    assert "pipelines-enabled" in idle_reason_of(Config(pipelines_enabled=False))
    assert idle_reason_of(Config()) == ""


def test_credentials_of_spark_are_not_process_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    word = "a-secret-of-spark"
    config = Config(pipelines_spark=f"spark.hadoop.fs.s3a.secret.key={word};spark.sql.shuffle.partitions=2")
    options = driver_options(config, "127.0.0.1:9092")
    assert word not in options.argument + repr(config)
    monkeypatch.setattr(sys, "argv", ["driver", options.argument])
    for name, value in options.environment.items():
        monkeypatch.setenv(name, value)
    assert Options.take() == options
    # Neither the driver's Java nor its Python workers inherit them.
    assert not options.environment.keys() & os.environ.keys()
    assert launch_settings(options.spark) == {"spark.sql.shuffle.partitions": "2"}
    with pytest.raises(InvalidSetting) as refused:
        Config.of({"pipelines-spark": f"spark.a=b;{word}"})
    assert word not in str(refused.value)


@pytest.mark.parametrize("master", [{}, *({"spark.master": name} for name in ("local", "local[1]", "local[2,3]"))])
def test_spark_on_this_machine_cannot_be_reached_from_others(master: dict[str, str]) -> None:
    settings = default_settings(master)
    assert (settings["spark.driver.bindAddress"], settings["spark.authenticate"]) == ("127.0.0.1", "true")
    assert "spark.driver.host" not in default_settings({"spark.master": "spark://10.0.0.1:7077"})


def test_a_broker_imports_nothing_of_spark() -> None:
    program = "import sys, millstream.broker.node; print(*sys.modules)"
    imported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"pyspark", "pyarrow", "deltalake"}.isdisjoint(imported)


async def test_a_spare_driver_takes_over_and_ends_with_the_last_pipeline(tmp_path: Path) -> None:
    async with scene_in(tmp_path, spare_s=0.05) as scene:
        child = scene.child
        await scene.declare("a", "orders")
        await scene.board.until(lambda: scene.board.report("a").rows > 2 and child.spare_pid is not None)
        first, spare = child.pid, child.spare_pid
        assert first is not None
        assert spare is not None
        os.kill(first, signal.SIGKILL)
        await scene.board.until(lambda: child.pid == spare and scene.board.report("a").state == "running")
        # Another spare is started, and a dead one is replaced.
        await scene.board.until(lambda: child.spare_pid not in (None, spare))
        second = child.spare_pid
        assert second is not None
        os.kill(second, signal.SIGKILL)
        await scene.board.until(lambda: child.spare_pid not in (None, second))
        third = child.spare_pid
        assert third is not None
        await scene.declared.stop("a")
        await scene.board.until(lambda: child.pid is None and child.spare_pid is None)
    for pid in (spare, third):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_spare_driver_is_started_as_soon_as_all_pipelines_run(tmp_path: Path) -> None:
    async with scene_in(tmp_path, spare_s=3600) as scene:
        child = scene.child
        await scene.declare("a", "orders")
        await scene.board.until(lambda: child.spare_pid is not None)
        first, spare = child.pid, child.spare_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        # So is the one that replaces the spare.
        await scene.board.until(lambda: child.pid == spare and child.spare_pid not in (None, spare))


async def test_a_spare_driver_ends_with_a_crashing_node(tmp_path: Path) -> None:
    catalog = Catalog.open_folder(tmp_path)
    scene = Scene(Pipelines(CatalogDeclarations(catalog), SystemClock()), spare_s=0.05)
    running = asyncio.create_task(scene.child.run())
    await scene.declare("a", "orders")
    await scene.board.until(lambda: scene.child.spare_pid is not None)
    pids = (scene.child.pid, scene.child.spare_pid)
    running.cancel()
    await asyncio.wait([running], timeout=HANG_S)
    assert running.cancelled()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    catalog.close()


async def test_a_stopping_node_removes_the_leftovers_of_a_killed_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{PREFIX}killed"
    async with scene_in(tmp_path):
        (folder / "blocks").mkdir(parents=True)
    assert not folder.exists()
