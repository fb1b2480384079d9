"""Committing a batch of a stream: with its end offsets, once, and not after the stream has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from millstream.core.errors import IllegalGeneration, MillstreamError, ProducerFenced
from millstream.core.ids import ProducerId
from millstream.pipelines.jobs.batch_loop import BatchLoop
from millstream.pipelines.jobs.transform import job as stream_writing
from millstream.pipelines.jobs.transform.job import Ends, StreamCheckpoint, StreamWriting
from millstream.pipelines.source.batch_commit import Batch, Part
from millstream.pipelines.source.options import WriteOptions
from millstream.protocol.private.transactions import TransactionalProducer

ENDS: Ends = {"orders": {0: 7}}
OFFSETS = TransactionalProducer("offsets", ProducerId(1), 0)
ROWS = TransactionalProducer("rows", ProducerId(2), 0)


class Stage:
    """A scripted coordinator instead of a loop and Spark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last = -1
        self.completed: list[tuple[str, int, tuple[str, ...]]] = []
        self.ran = 0
        self.gave_up = 0
        self.task: Callable[[Batch], list[Part]] = lambda batch: [Part(batch, 3, ROWS), Part(batch, 0, None)]
        self.offsets: MillstreamError | None = None
        self.link = self
        self.client = None
        monkeypatch.setattr(stream_writing, "Transactions", lambda _client: self)
        monkeypatch.setattr(stream_writing, "written", lambda _frame, _options, batch: _Frame(self, batch))
        monkeypatch.setattr(stream_writing, "read_part", lambda part: part)
        checkpoint: Any = _Checkpoint(Path())
        query_id: Future[str] = Future()
        query_id.set_result("query")
        loop = cast("BatchLoop", self)
        self.writing = StreamWriting(loop, WriteOptions(brokers=""), checkpoint, query_id, "stream")

    def write(self, number: int) -> None:
        self.writing(cast("Any", None), number)

    # -- the interface of the coordinator -----------------------------------------------------------------------

    def is_taken(self, batch: Batch) -> bool:
        return self.last >= batch.number

    def prepare_offsets(self, batch: Batch, ends: Ends) -> TransactionalProducer | MillstreamError:
        assert (batch.stream, ends) == ("stream", ENDS)
        return self.offsets or OFFSETS

    def start(self, made: TransactionalProducer | MillstreamError) -> Future[TransactionalProducer]:
        future: Future[TransactionalProducer] = Future()
        if isinstance(made, MillstreamError):
            future.set_exception(made)
        else:
            future.set_result(made)
        return future

    def call(self, done: bool) -> bool:
        return done

    def complete_batch(self, query: str, number: int, members: list[TransactionalProducer]) -> bool:
        if number <= self.last:
            return False
        self.last = number
        self.completed.append((query, number, tuple(member.transactional_id for member in members)))
        return True

    def abort_prepared(self, _batch: Batch, _offsets: object) -> None:
        self.gave_up += 1


class _Checkpoint(StreamCheckpoint):
    def ends(self, number: int) -> Ends:
        return ENDS if number < 9 else {}


class _Frame:
    def __init__(self, stage: Stage, batch: Batch) -> None:
        self._stage = stage
        self._batch = batch

    def collect(self) -> list[Any]:
        self._stage.ran += 1
        return [_Row(part) for part in self._stage.task(self._batch)]


class _Row:
    def __init__(self, part: Part) -> None:
        self.part = part


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_rows_are_committed_with_their_end_offsets(stage: Stage) -> None:
    stage.writing.lost = lambda number, ends: 5 if (number, ends) == (1, ENDS) else 0
    stage.write(0)
    stage.task = lambda _batch: []
    stage.write(1)
    # The offsets are committed even without any row.
    assert stage.completed == [("query", 0, ("rows", "offsets")), ("query", 1, ("offsets",))]
    assert stage.writing.counts() == {"written": 3, "lost": 5}


def test_a_batch_committed_before_is_only_recorded(stage: Stage) -> None:
    stage.last = 4
    stage.write(4)
    assert (stage.completed, stage.ran, stage.gave_up, stage.writing.counts()) == ([], 1, 0, {})


@pytest.mark.parametrize("where", ["in a task", "beside the tasks", "at the end"])
def test_a_batch_committed_by_another_run_meanwhile_is_accepted(stage: Stage, where: str) -> None:
    def fenced_in_task(batch: Batch) -> list[Part]:
        if stage.last < 0:
            stage.last = 0
            if where == "in a task":
                raise RuntimeError("Traceback …\nProducerFenced: no\n[millstream fault: unknown, ProducerFenced]\n")
        return [Part(batch, 3, None)] if where == "in a task" else [Part(batch, 3, ROWS)]

    stage.task = fenced_in_task
    stage.offsets = ProducerFenced("batch 0 is already committed") if where == "beside the tasks" else None
    stage.write(0)
    assert (stage.completed, stage.writing.counts(), stage.writing.failure) == ([], {}, None)
    # The state of its tasks is written whether or not the rows were.
    assert stage.ran == (1 if where == "at the end" else 2)


@pytest.mark.parametrize("error", [ProducerFenced("ended"), IllegalGeneration("somebody else")])
def test_a_batch_that_cannot_be_committed_fails(stage: Stage, error: MillstreamError) -> None:
    stage.offsets = error
    with pytest.raises(Exception, match="batch 0 was not written"):
        stage.write(0)
    assert (stage.writing.failure, stage.gave_up, stage.completed) == (error, 1, [])


def test_nothing_is_committed_after_the_end_or_without_offsets(stage: Stage) -> None:
    with pytest.raises(Exception, match="batch 9 was not written"):
        stage.write(9)
    assert "no record of the end offsets of batch 9" in str(stage.writing.failure)
    stage.writing.close()
    with pytest.raises(Exception, match="batch 0 was not written"):
        stage.write(0)
    assert (stage.gave_up, stage.completed) == (1, [])
