"""The atomic commit of a batch: tasks write its parts, and the driver commits or aborts them together.

Every attempt at a task writes in its own transaction. Its id contains the query, the batch and the run of the
driver; a stream adds a name by which its driver can find its attempts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from pyspark.sql.datasource import WriterCommitMessage

from millstream.client.admin.transactions import ONGOING, PREPARED, list_transactions
from millstream.core.errors import BrokerUnreachable, InvalidSetting, InvalidTransactionState, RequestTimedOut
from millstream.core.heap import freeze_worker_heap
from millstream.pipelines.source.link import Link, task_link
from millstream.pipelines.source.options import SourceOffsets, WriteOptions
from millstream.pipelines.source.target_topic import supports_batch_commit
from millstream.protocol.private.transactions import TransactionalProducer, Transactions

OFFSETS_TASK: Final = 1_000_000_000
"""The number of the task that commits offsets, which Spark never uses."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a query in one run of the driver."""

    query: str
    number: int
    run: str = ""
    stream: str = ""
    """The stream's name; when Spark asks to abort, it gives neither the query nor the run."""

    def new_attempt(self, task: int) -> str:
        attempt = uuid4().hex[:12]
        named = f"{self.stream}.{attempt}" if self.stream else attempt
        return f"spark/{self.query}/{self.number}/{task}/{f'{self.run}-{named}' if self.run else named}"


@dataclass(frozen=True)
class Part(WriterCommitMessage):
    """The part of a batch that one task wrote: the transaction to commit, if there is one."""

    batch: Batch
    rows: int
    member: TransactionalProducer | None


async def prepare_offsets(
    transactions: Transactions, transactional_id: str, source: SourceOffsets
) -> TransactionalProducer:
    member = await transactions.begin(transactional_id)
    await transactions.commit_offsets(member, source.group, source.offsets, source.member)
    await transactions.prepare(member)
    return member


def commit_parts(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], batch: Batch | None = None
) -> None:
    """Commit a batch atomically: all of its parts, and the source offsets even if there is no part."""
    parts = [part for part in messages if isinstance(part, Part)]
    members = [part.member for part in parts if part.member is not None]
    batch = batch or (parts[0].batch if parts else None)
    if batch is not None and (members or options.source is not None):
        link = task_link(options)
        if not supports_batch_commit(link):
            raise InvalidSetting("sourceOffsets needs Millstream's batch commit, which this broker does not support")
        link.call(_commit(link, options.source, batch, members))
    freeze_worker_heap()


async def _commit(
    link: Link, source: SourceOffsets | None, batch: Batch, members: Sequence[TransactionalProducer]
) -> None:
    transactions = Transactions(link.client)
    if source is not None:
        if await transactions.last_batch(batch.query) >= batch.number:
            return
        members = [*members, await prepare_offsets(transactions, batch.new_attempt(OFFSETS_TASK), source)]
    await transactions.complete_batch(batch.query, batch.number, members)


def next_batch(link: Link, query: str) -> int:
    """Return the number of a query's next batch; undecided transactions of an earlier run, which would block the
    offsets forever, are aborted.
    """
    transactions = Transactions(link.client)
    while True:
        number = link.call(transactions.last_batch(query)) + 1
        # Otherwise it has just been committed.
        with suppress(InvalidTransactionState):
            link.call(transactions.abort_batch(query, number))
            return number


def abort_batch(options: WriteOptions, batch: Batch) -> None:
    """Abort every attempt at a batch, including those that its run still starts."""
    link = task_link(options)
    if supports_batch_commit(link):
        link.call(Transactions(link.client).abort_batch(batch.query, batch.number, run=batch.run))


def abort_stream(
    options: WriteOptions, stream: str, number: int, messages: Sequence[WriterCommitMessage | None]
) -> None:
    """Abort a batch of a stream, whose query is known from returned parts or from transactional ids with its name."""
    batch = next((part.batch for part in messages if isinstance(part, Part)), None)
    if batch is None and stream:
        batch = _last_tried(task_link(options), stream, number)
    if batch is not None:
        abort_batch(options, batch)


def abort_undecided(options: WriteOptions, stream: str) -> bool:
    """Abort undecided transactions of a stream's earlier runs; return whether all nodes responded."""
    link = task_link(options)
    if not supports_batch_commit(link):
        return True
    pattern = rf"spark/([^/]+)/(\d+)/\d+/([^/-]+)-{re.escape(stream)}\.[0-9a-f]+"
    try:
        undecided = link.call(list_transactions(link.client, states=(ONGOING, PREPARED), matching=pattern))
    except (BrokerUnreachable, RequestTimedOut):
        # A node is unavailable. Fetching offsets reports those that are still blocked.
        return False
    matches = (re.fullmatch(pattern, transaction.transactional_id) for transaction in undecided)
    for batch in {Batch(match[1], int(match[2]), match[3]) for match in matches if match is not None}:
        with suppress(InvalidTransactionState):
            # Otherwise it has just been committed.
            abort_batch(options, batch)
    return True


def _last_tried(link: Link, stream: str, number: int) -> Batch | None:
    if not supports_batch_commit(link):
        return None
    pattern = rf"spark/([^/]+)/{number}/\d+/(?:([^/-]+)-)?{re.escape(stream)}\.[0-9a-f]+"
    transactions = link.call(list_transactions(link.client, matching=pattern))
    if not transactions:
        return None
    # Attempts of earlier runs are known for days. Producer ids grow, so the newest one shows the current run.
    youngest = re.fullmatch(pattern, max(transactions, key=lambda ref: ref.producer_id).transactional_id)
    return None if youngest is None else Batch(youngest[1], number, youngest[2] or "", stream)
