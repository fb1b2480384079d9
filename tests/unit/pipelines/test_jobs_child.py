"""The broker's side of jobs: schedules, and runs that fail, are cancelled, or lose their node."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.owner import PipelineOwner
from millstream.broker.pipelines.report_board import PipelineBoard
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import InvalidPipeline, InvalidSetting
from millstream.core.job import JobRun, RunState
from millstream.core.pipeline import PipelineKind
from millstream.pipelines.runtime import jobs_child
from millstream.pipelines.runtime.child import driver_options
from millstream.pipelines.runtime.jobs_child import JobsChild
from millstream_testing.child_process import is_alive
from millstream_testing.waiting import until

MODULE = "millstream_testing.scripted_job"
WAIT_S = 180.0


class SoleOwner:
    """A node that runs the pipelines, without any other node."""

    is_this_node = True
    is_elsewhere = False

    def on_change(self, listener: Callable[[], None]) -> None:
        """Do nothing: it never changes."""

    def become_candidate(self) -> None:
        """It runs them already."""

    async def resign(self) -> None:
        """There is no other node."""


class JobNodes:
    """Nodes that share a catalog and run jobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._catalog = Catalog.open_folder(folder)
        self.pipelines = Pipelines(CatalogDeclarations(self._catalog), SystemClock())
        self.board = PipelineBoard(self.pipelines.all)

    @asynccontextmanager
    async def node(self, number: int = 1) -> AsyncIterator[JobsChild]:
        data = self._folder / f"node-{number}"
        options = driver_options(Config(data=str(data), node_id=number), "127.0.0.1:1")
        child = JobsChild(
            options,
            str(data),
            self.pipelines,
            self.board,
            cast("PipelineOwner", SoleOwner()),
            missing=lambda: "",
            module=MODULE,
        )
        running = asyncio.create_task(child.run())
        try:
            yield child
        finally:
            await child.stop()
            await running

    async def create(self, name: str, code: str, **settings: str) -> None:
        lines = "\n".join(f"    {line}" for line in code.splitlines())
        overrides = {key.replace("_", "."): text for key, text in settings.items()}
        given_settings = {"code": f"import os, time\n\ndef run(spark, m):\n{lines}\n", "retry.ms": "10", **overrides}
        await self.pipelines.create(name, PipelineKind.JOB, given_settings)

    async def runs(self, name: str) -> list[JobRun]:
        return list(reversed(await self.pipelines.runs(await self.pipelines.find(name))))

    async def until(self, name: str, fits: Callable[[list[JobRun]], bool]) -> list[JobRun]:
        async with asyncio.timeout(WAIT_S):
            while not fits(runs := await self.runs(name)):
                await asyncio.sleep(0.05)
        return runs

    async def ended(self, name: str, number: int = 1) -> list[JobRun]:
        return await self.until(name, lambda runs: len(runs) >= number and runs[number - 1].is_over)


@pytest.fixture
async def nodes(tmp_path: Path) -> JobNodes:
    made = JobNodes(tmp_path)
    await made.pipelines.load()
    return made


async def test_only_jobs_are_triggered(nodes: JobNodes) -> None:
    await nodes.pipelines.create("copies", PipelineKind.TRANSFORM, {"sql": "SELECT * FROM a", "into": "b"})
    with pytest.raises(
        InvalidPipeline, match="of the kind transform, which runs continuously; only jobs are triggered"
    ):
        await nodes.pipelines.request_run("copies")


async def test_a_job_runs_once_and_again_on_request_with_its_progress_and_its_log(nodes: JobNodes) -> None:
    async with nodes.node() as node:
        await nodes.create("hello", "print('hello', m.order.run)\nm.report(rows=7)")
        (run,) = await nodes.ended("hello")
        assert (run.state, run.attempt, run.progress, run.error) == (RunState.SUCCEEDED, 1, {"rows": 7}, "")
        log = await node.read_log(run.pipeline_id, 1, 10_000)
        assert log is not None
        assert "hello 1" in log.text
        assert "run 1, attempt 1, on node 1" in log.text
        end = await node.read_log(run.pipeline_id, 1, 5)
        assert end is not None
        assert (log.text.endswith(end.text), len(end.text), end.is_truncated) == (True, 5, True)
        await nodes.pipelines.request_run("hello")
        assert [run.number for run in await nodes.ended("hello", 2)] == [1, 2]
        assert [run.number for run in await nodes.pipelines.runs(await nodes.pipelines.find("hello"), limit=1)] == [2]
        assert await node.read_log(run.pipeline_id, 3, 10_000) is None


async def test_the_log_names_the_code_with_its_packages_as_the_run_does(
    nodes: JobNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(requirements: str) -> str:
        return f"{requirements} --hash=sha256:00"

    async def install(lock: str, folder: Path, *, needed: object) -> str:
        return ""

    monkeypatch.setattr(jobs_child, "resolve", resolve)
    monkeypatch.setattr(jobs_child, "install", install)
    async with nodes.node() as node:
        await nodes.create("packed", "pass", requirements="tiny==1")
        (run,) = await nodes.ended("packed")
        log = await node.read_log(run.pipeline_id, 1, 10_000)
        assert log is not None
        assert re.findall(r"\bcode (\w+)", log.text) == [run.code_hash]


async def test_an_interval_job_runs_at_once_and_then_repeatedly(nodes: JobNodes) -> None:
    async with nodes.node():
        await nodes.create("steady", "pass", every_ms="1000")
        first, second = (await nodes.ended("steady", 2))[:2]
        # On a slow machine, times pass while the first run lasts; one run makes up for all of them.
        later_ms = second.scheduled_ms - first.scheduled_ms
        assert later_ms > 0
        assert later_ms % 1000 == 0


async def test_a_failed_run_is_retried_with_the_same_input(nodes: JobNodes) -> None:
    async with nodes.node():
        taken = "taken = m.take(orders={'0': [0, m.order.attempt]})['topics']['orders']['0']"
        await nodes.create("twice", f"{taken}\nassert m.order.attempt == 2\nassert taken == [0, 1]")
        (run,) = await nodes.ended("twice")
        assert (run.state, run.attempt) == (RunState.SUCCEEDED, 2)
        # A successful run no longer stores its input.
        assert "pin" not in run.progress


async def test_the_run_after_a_permanent_failure_takes_its_input(nodes: JobNodes) -> None:
    async with nodes.node():
        taken = "taken = m.take(orders={'0': [0, m.order.run]})"
        same = "assert taken == {'batch': 1, 'topics': {'orders': {'0': [0, 1]}}}"
        code = f"{taken}\nassert m.order.run == 2, 'not yet'\n{same}"
        await nodes.create("later", code, retries="0")
        (run,) = await nodes.ended("later")
        assert (run.state, run.attempt, run.error) == (RunState.FAILED, 1, "AssertionError: not yet")
        await nodes.pipelines.request_run("later")
        _, second = await nodes.ended("later", 2)
        assert second.state is RunState.SUCCEEDED
        async with asyncio.timeout(WAIT_S):
            while (report := nodes.board.describe("later")) is None or report["state"] != "idle":
                await asyncio.sleep(0.05)
        assert (report["last_error"], report["run"]) == ("", 2)


async def test_an_error_in_the_code_itself_is_not_retried(nodes: JobNodes) -> None:
    async with nodes.node():
        await nodes.create("wrong", "undefined_name")
        (run,) = await nodes.ended("wrong")
        assert (run.state, run.attempt) == (RunState.FAILED, 1)
        assert "undefined_name" in run.error


async def test_a_run_can_be_cancelled_and_times_out_at_most_once(nodes: JobNodes) -> None:
    async with nodes.node() as node:
        await nodes.create("slow", "m.report(rows=1)\nm.wait()")
        await nodes.until("slow", lambda runs: bool(runs) and bool(runs[0].progress))
        assert node.cancel("slow") == 1
        (run,) = await nodes.ended("slow")
        assert (run.state, run.error) == (RunState.CANCELLED, "it was cancelled")
        assert node.cancel("slow") is None
        await nodes.create("late", "m.wait()", timeout_ms="300", retries="0")
        (run,) = await nodes.ended("late")
        assert (run.state, run.error) == (RunState.FAILED, "it took longer than timeout.ms, 0.3 s")


async def test_the_error_shown_is_that_of_the_last_run(nodes: JobNodes) -> None:
    async def shown() -> str:
        async with asyncio.timeout(WAIT_S):
            while (report := nodes.board.describe("fickle")) is None or report["state"] != "idle":
                await asyncio.sleep(0.05)
        return str(report["last_error"])

    async with nodes.node() as node:
        await nodes.create("fickle", "if m.order.run == 1:\n    no_such_name\nm.report(rows=1)\nm.wait()")
        await nodes.ended("fickle")
        assert "no_such_name" in await shown()
        await nodes.pipelines.request_run("fickle")
        await nodes.until("fickle", lambda runs: len(runs) > 1 and bool(runs[1].progress))
        assert node.cancel("fickle") == 2
        await nodes.ended("fickle", 2)
        assert await shown() == "it was cancelled"
    # A node that takes over knows of the run only from the catalog.
    nodes.board.clear()
    async with nodes.node(2):
        assert await shown() == "it was cancelled"


async def test_an_out_of_memory_kill_and_a_crash_end_only_their_own_run(
    nodes: JobNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_child, "OVERHEAD_BYTES", 100 * 2**20)
    async with nodes.node():
        await nodes.create("good", "m.wait()")
        small = {"memory": "50m", "python_memory": "50m", "retries": "0"}
        await nodes.create("bomb", "kept = [bytes(b'x' * 2**20) for _ in range(400)]\nm.wait()", **small)
        await nodes.create("crash", "os.kill(os.getpid(), 11)", retries="0")
        (run,) = await nodes.ended("bomb")
        assert "more than the 250 MiB that memory and python.memory give it" in run.error
        (run,) = await nodes.ended("crash")
        assert "its process ended with signal 11" in run.error
        (run,) = await nodes.runs("good")
        assert run.state is RunState.RUNNING


async def test_a_run_of_a_stopped_node_is_repeated_by_the_next_and_a_time_is_taken_once(nodes: JobNodes) -> None:
    code = "m.take(orders={'0': [0, m.order.attempt]})\nm.report(node=m.order.node)\nm.order.node == 2 or m.wait()"
    async with nodes.node(1):
        await nodes.create("moving", code, cron="0 0 1 1 *", every_ms="0")
        await nodes.pipelines.request_run("moving")
        await nodes.until("moving", lambda runs: bool(runs) and "pin" in runs[0].progress)
    (run,) = await nodes.runs("moving")
    assert run.state is RunState.RUNNING
    async with nodes.node(2):
        (run,) = await nodes.ended("moving")
        assert (run.state, run.attempt, run.node, run.progress) == (RunState.SUCCEEDED, 2, 2, {"node": 2})
        # The request is done, and the next time is far away.
        assert len(await nodes.runs("moving")) == 1


async def test_of_two_nodes_that_claim_the_jobs_one_starts_a_run(nodes: JobNodes) -> None:
    await nodes.create("once", "pass")
    job = await nodes.pipelines.find("once")
    run = JobRun(pipeline_id=job.pipeline_id, number=1, state=RunState.RUNNING, scheduled_ms=1, started_ms=1, node=1)
    assert await nodes.pipelines.begin_run(run)
    assert not await nodes.pipelines.begin_run(replace(run, node=2))
    taken = replace(run, node=2, attempt=2)
    assert await nodes.pipelines.update_run(run, taken)
    # The replaced node can neither continue nor finish it.
    assert not await nodes.pipelines.update_run(run, replace(run, state=RunState.SUCCEEDED))
    assert await nodes.runs("once") == [taken]
    await nodes.pipelines.delete("once")
    assert not await nodes.pipelines.begin_run(replace(run, number=2))


async def test_stopping_a_job_ends_its_run_with_all_its_processes(nodes: JobNodes, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = (
        f"pid = os.fork()\nif not pid:\n    os.setpgid(0, 0)\nopen('{pids}', 'a').write(f'{{os.getpid()}} ')\nm.wait()"
    )
    async with nodes.node():
        await nodes.create("forks", child)
        await until(lambda: pids.exists() and len(pids.read_text().split()) >= 2)
        await nodes.pipelines.stop("forks")
        (run,) = await nodes.ended("forks")
        assert (run.state, run.error) == (RunState.CANCELLED, "it was stopped")
    assert not [pid for pid in pids.read_text().split() if is_alive(int(pid))]


async def test_a_continuous_job_shows_what_its_queries_read(nodes: JobNodes) -> None:
    async with nodes.node():
        await nodes.create("stream", "m.report(**{'rows read': 40, 'lag': 3})\nm.wait()", continuous="true")
        async with asyncio.timeout(WAIT_S):
            while (report := nodes.board.describe("stream")) is None or not report["rows"]:
                await asyncio.sleep(0.05)
        assert (report["state"], report["rows"], report["lag"]) == ("running", 40, 3)


async def test_a_continuous_job_is_restarted_and_parked_on_permanent_failure(nodes: JobNodes) -> None:
    async with nodes.node():
        await nodes.create("stream", "m.order.attempt > 1 and m.wait()\nraise ValueError('again')", continuous="true")
        await nodes.until("stream", lambda runs: bool(runs) and runs[0].attempt == 2)
        await nodes.create("hopeless", "undefined_name", continuous="true")
        (run,) = await nodes.ended("hopeless")
        assert run.state is RunState.FAILED
        async with asyncio.timeout(WAIT_S):
            while not (await nodes.pipelines.find("hopeless")).parked:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"code": "def walk(): pass"}, "defines no function run"),
        ({"code": "def run(spark): pass"}, "has to take two arguments"),
        ({"code": "def run(:"}, "not Python"),
        ({"code": ""}, "needs `code`"),
        ({"code": "async def run(s, m): pass"}, "must not be async"),
        ({"every.ms": "1000", "cron": "0 3 * * *"}, "every.ms and cron are set"),
        ({"cron": "0 25 * * *"}, "the hour"),
        ({"every.ms": "10"}, "at least 1000"),
        ({"memory": "much"}, "memory must be an amount"),
        ({"parameters": "[]"}, "parameters must be a JSON object"),
        ({"spark": '{"x": "1"}'}, "begin with spark."),
    ],
)
async def test_an_invalid_job_is_refused(nodes: JobNodes, settings: dict[str, str], reason: str) -> None:
    values = {"code": "def run(spark, millstream): pass", **settings}
    with pytest.raises(InvalidSetting, match=reason):
        await nodes.pipelines.create("wrong", PipelineKind.JOB, values)


async def test_a_transform_with_functions_has_a_process_that_reports_and_may_park_it(nodes: JobNodes) -> None:
    code = json.dumps({"prices": "def vat(total: float) -> float:\n    return total\n"})
    settings = {"sql": "SELECT vat(total) AS vat FROM orders", "into": "taxed"}
    async with nodes.node():
        await nodes.pipelines.create(
            "taxes", PipelineKind.TRANSFORM, {**settings, "functions": "prices:vat", "functions.code": code}
        )
        (run,) = await nodes.ended("taxes")
        assert (run.state, run.attempt, run.error) == (RunState.FAILED, 1, "a function failed")
        async with asyncio.timeout(WAIT_S):
            while not (await nodes.pipelines.find("taxes")).parked:
                await asyncio.sleep(0.05)
        # A transform without functions has no such process.
        await nodes.pipelines.create("plain", PipelineKind.TRANSFORM, settings)
        assert await nodes.runs("plain") == []


LEADER = """
import os
import subprocess
import sys
from millstream.core.child_process import kill_session, processes_of_session

# One in a group of its own, as Spark's Python workers are; it complains when what it reads from is gone.
complains = [sys.executable, "-c", "print('ready', flush=True); input()"]
child = subprocess.Popen(complains, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
child.stdout.readline()
kill_session(os.getpid(), except_pid=os.getpid())
child.wait()
print([pid for pid, _ in processes_of_session(os.getpid())] == [os.getpid()], flush=True)
os._exit(0)
"""


def test_processes_killed_together_report_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LEADER], start_new_session=True, capture_output=True, text=True, check=True
    )
    assert (ran.stdout, ran.stderr) == ("True\n", "")
