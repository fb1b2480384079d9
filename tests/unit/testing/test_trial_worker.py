"""Programs of a trial: the output of a killed one counts, and one that exits by itself is restarted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream_testing.transaction_history import EndRequested, TransactionBegun
from millstream_testing.transaction_worker import Task
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_worker import TrialWorker

UNREACHABLE = "127.0.0.1:1"
WAIT_S = 60


@pytest.fixture
def new_task(tmp_path: Path) -> Callable[[str], Task]:
    def task(producer: str) -> Task:
        return Task(
            producer=producer,
            client="confluent",
            brokers=UNREACHABLE,
            group="group",
            transactional_id="worker",
            source="source",
            outputs={"results": 1},
            file=str(tmp_path / f"{producer}.jsonl"),
            seed="1",
            abort_share=0.0,
            timeout_ms=10_000,
            stuck_s=60.0,
        )

    return task


@pytest.fixture
def worker(tmp_path: Path, new_task: Callable[[str], Task]) -> Iterator[TrialWorker]:
    started = TrialWorker("worker", tmp_path, new_task)
    started.start()
    yield started
    started.end()


def test_an_unfinished_line_is_ignored(worker: TrialWorker) -> None:
    begun = (
        '{"event":"begun","producer":"worker.0","number":0,"group":"g","source":"s","inputs":[],"outputs":[],"at":1}\n'
    )
    line = '{"event":"end_requested","producer":"worker.0","number":0,"commit":true,"at":2}\n'
    file = Path(worker.current.task.file)
    file.write_text(begun + line[:20])
    assert [type(event) for event in worker.events()] == [TransactionBegun]
    assert list(worker.events()) == []
    file.write_text(begun + line)
    assert [type(event) for event in worker.events()] == [EndRequested]


def test_a_killed_program_waits_for_its_restart_and_an_exited_one_is_restarted(worker: TrialWorker) -> None:
    worker.kill()
    worker.restart_if_ended()
    assert len(worker.processes) == 1
    worker.start()
    worker.start()
    assert worker.replaced == ["worker.1"]
    worker.processes[1].kill()
    worker.restart_if_ended()
    assert worker.replaced == []
    assert [current.is_running for current in worker.processes] == [False, False, True]


def test_a_failing_program_fails_the_trial(worker: TrialWorker) -> None:
    worker.current.process.send_signal(signal.SIGUSR1)
    worker.current.process.wait(WAIT_S)
    with pytest.raises(TrialFailed, match=r"worker\.0 exited with code"):
        worker.restart_if_ended()


def test_a_program_continues_after_a_pause(worker: TrialWorker) -> None:
    worker.pause()
    worker.stop()
    worker.resume()
    worker.current.process.wait(WAIT_S)
    worker.restart_if_ended()
    assert [current.is_running for current in worker.processes] == [False, True]
