"""What becomes of the batches of a stream: their rows are written, and committed with the places where they end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING
from uuid import uuid4

from millstream.core.errors import CorruptState
from millstream.pipelines.jobs.batch_loop import BatchLoop, is_refused, read_part
from millstream.pipelines.jobs.transform.output_rows import written
from millstream.pipelines.jobs.transform.stream_checkpoint import Ends, StreamCheckpoint
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.parts import Batch, Part
from millstream.protocol.private.transactions import TransactionalProducer, Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class _NotWrittenError(Exception):
    """What Spark is told when a batch failed."""


class _ClosedError(Exception):
    """The stream was stopped before a batch of it was committed."""


class StreamWriting:
    """The function of `foreachBatch`, from one start of a stream to its stop."""

    def __init__(
        self, loop: BatchLoop, options: WriteOptions, checkpoint: StreamCheckpoint, query_id: Future[str], stream: str
    ) -> None:
        """`query_id` is what Spark knows the checkpoint by, `stream` is in the names of all attempts."""
        self._loop = loop
        self._options = options
        self._checkpoint = checkpoint
        self._query_id = query_id
        self._stream = stream
        self._run = uuid4().hex[:12]
        self._lock = threading.Lock()
        self._is_closed = False
        self._counted: Counter[str] = Counter()
        self.lost: Callable[[int, Ends], int] = lambda _number, _ends: 0
        """How many offsets a batch of a number, which ends there, leaves out."""
        self.failure: BaseException | None = None
        """Why the last batch was not written."""

    def __call__(self, frame: DataFrame, number: int) -> None:
        """Write a batch. One that Spark has called for before may be there already."""
        batch = Batch(self._query_id.result(), number, self._run, self._stream)
        try:
            ends = self._checkpoint.ends(number)
            if not ends:
                raise CorruptState(f"Spark has not written down where batch {number} ends")
            lost = self.lost(number, ends)
            rows = self._commit(frame, batch, ends)
        except BaseException as error:
            self.failure = error
            # Spark looks through the whole text of an error of its own, and dies of a long one.
            raise _NotWrittenError(f"batch {number} was not written") from None
        if rows is not None:
            with self._lock:
                self._counted.update({"written": rows, "lost": lost} if lost else {"written": rows})

    def counts(self) -> Counter[str]:
        """What was counted until now."""
        with self._lock:
            return Counter(self._counted)

    def close(self) -> None:
        """Commit nothing from here on; one commit that is under way is waited for."""
        with self._lock:
            self._is_closed = True

    # -- how ------------------------------------------------------------------------------------------------------

    def _commit(self, frame: DataFrame, batch: Batch, ends: Ends) -> int | None:
        """How many rows were written; None if the batch was committed before."""
        if self._loop.is_taken(batch):
            self._remember(frame, batch)
            return None
        offsets = self._loop.link.start(self._loop.prepare_offsets(batch, ends))
        try:
            parts = self._parts(frame, batch)
            is_done = self._complete(batch, parts, offsets)
        except BaseException as error:
            self._loop.give_up(batch, offsets)
            if not (is_refused(error) and self._loop.is_taken(batch)):
                raise
            # Somebody else was faster.
            self._remember(frame, batch)
            return None
        return sum(part.rows for part in parts if part.member is not None) if is_done else None

    def _complete(self, batch: Batch, parts: list[Part], offsets: Future[TransactionalProducer]) -> bool:
        members = [part.member for part in parts if part.member is not None]
        members.append(offsets.result())
        link = self._loop.link
        with self._lock:
            if self._is_closed:
                raise _ClosedError
            return link.call(Transactions(link.client).complete_batch(batch.query, batch.number, members))

    def _remember(self, frame: DataFrame, batch: Batch) -> None:
        """Have a batch counted into the state whose rows are there: tasks find that out, and write nothing."""
        self._parts(frame, batch)

    def _parts(self, frame: DataFrame, batch: Batch) -> list[Part]:
        return [read_part(row.part) for row in written(frame, self._options, batch).collect()]
