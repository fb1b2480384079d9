"""The parts of a batch, which tasks write and the driver commits or aborts together.

Every attempt at a task writes in a transaction of its own. Its id says which batch of which query it belongs to and by
which run of the driver it was tried; a stream adds a name that its driver can find its attempts by.
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
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import SourceOffsets, WriteOptions
from millstream.pipelines.source.target_topic import supports_batch_commit
from millstream.pipelines.source.worker_heap import freeze_worker_heap
from millstream.protocol.private.transactions import TransactionalProducer, Transactions

OFFSETS_TASK: Final = 1_000_000_000
"""The number of the task that commits offsets, which is none of Spark's."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a query as one run of the driver writes it."""

    query: str
    number: int
    run: str = ""
    stream: str = ""
    """What the driver of a stream knows it by; Spark tells it neither the query nor the run when it is to abort."""

    def new_attempt(self, task: int) -> str:
        """A transactional id for one attempt at one task."""
        attempt = uuid4().hex[:12]
        named = f"{self.stream}.{attempt}" if self.stream else attempt
        return f"spark/{self.query}/{self.number}/{task}/{f'{self.run}-{named}' if self.run else named}"


@dataclass(frozen=True)
class Part(WriterCommitMessage):
    """What one task wrote, for the driver: the member of the batch that is to be committed, if there is one."""

    batch: Batch
    rows: int
    member: TransactionalProducer | None


async def prepare_offsets(
    transactions: Transactions, transactional_id: str, source: SourceOffsets
) -> TransactionalProducer:
    """Prepare the member of a batch that commits its source offsets."""
    member = await transactions.begin(transactional_id)
    await transactions.commit_offsets(member, source.group, source.offsets, source.member)
    await transactions.prepare(member)
    return member


def commit_parts(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], batch: Batch | None = None
) -> None:
    """Commit a batch at once: all of its parts, and the offsets that go with them even if there is no part."""
    parts = [part for part in messages if isinstance(part, Part)]
    members = [part.member for part in parts if part.member is not None]
    batch = batch or (parts[0].batch if parts else None)
    if batch is not None and (members or options.source is not None):
        link = writing_link(options)
        if not supports_batch_commit(link):
            raise InvalidSetting("sourceOffsets needs Millstream's batch commit, which this broker does not know")
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


def abort_batch(options: WriteOptions, batch: Batch) -> None:
    """Abort every attempt at a batch, and those that its run still begins."""
    link = writing_link(options)
    if supports_batch_commit(link):
        link.call(Transactions(link.client).abort_batch(batch.query, batch.number, run=batch.run))


def abort_stream(
    options: WriteOptions, stream: str, number: int, messages: Sequence[WriterCommitMessage | None]
) -> None:
    """Abort a batch of a stream, whose query is known from parts that came back, or from ids that have its name."""
    batch = next((part.batch for part in messages if isinstance(part, Part)), None)
    if batch is None and stream:
        batch = _last_tried(writing_link(options), stream, number)
    if batch is not None:
        abort_batch(options, batch)


def abort_undecided(options: WriteOptions, stream: str) -> bool:
    """Abort what earlier runs of a stream have begun and not decided; whether all nodes could be asked for that."""
    link = writing_link(options)
    if not supports_batch_commit(link):
        return True
    pattern = rf"spark/([^/]+)/(\d+)/\d+/([^/-]+)-{re.escape(stream)}\.[0-9a-f]+"
    try:
        left = link.call(list_transactions(link.client, states=(ONGOING, PREPARED), matching=pattern))
    except (BrokerUnreachable, RequestTimedOut):
        # A node is away. Offsets that are held up show when they are asked for.
        return False
    found = (re.fullmatch(pattern, one.transactional_id) for one in left)
    for batch in {Batch(each[1], int(each[2]), each[3]) for each in found if each is not None}:
        with suppress(InvalidTransactionState):
            # Else it was committed just now.
            abort_batch(options, batch)
    return True


def writing_link(options: WriteOptions) -> Link:
    """The connection of this process for writing; a task or a commit waits for brokers that just start again."""
    return link_to(
        options.brokers, client_id=options.client_id, timeout_s=options.timeout_s, patience_s=options.timeout_s
    )


def _last_tried(link: Link, stream: str, number: int) -> Batch | None:
    if not supports_batch_commit(link):
        return None
    pattern = rf"spark/([^/]+)/{number}/\d+/(?:([^/-]+)-)?{re.escape(stream)}\.[0-9a-f]+"
    found = link.call(list_transactions(link.client, matching=pattern))
    if not found:
        return None
    # Attempts of earlier runs are known for days. Producer ids grow, so the youngest tells which run this is.
    youngest = re.fullmatch(pattern, max(found, key=lambda one: one.producer_id).transactional_id)
    return None if youngest is None else Batch(youngest[1], number, youngest[2] or "", stream)
