"""The acknowledged operations of clients, and the possible outcomes of every transaction. The model trusts no broker.

A transaction is identified by the number in its records. Nothing becomes visible whose commit was never sent; what was
acknowledged as committed is completely visible, what was acknowledged as aborted is not visible at all, and everything
else has the same outcome on every partition. Of the attempts at a batch, exactly those that one CompleteBatch named
become visible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.broker.transactions.records import TransactionKey, read_key, read_transaction
from millstream.broker.transactions.transaction import ENDING
from millstream.core.ids import NO_PRODUCER_ID
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import BatchHeader, read_header
from millstream.protocol.records.control import read_marker
from millstream.protocol.records.record import decode_batch
from millstream_testing.simulation.rules import Violation

Batch = tuple[str, int]
"""A query and the number of its batch."""


@dataclass(slots=True)
class ModelTransaction:
    """A transaction as its client knows it."""

    number: int
    transactional_id: str
    instance: int
    batch: Batch | None = None
    written: dict[str, TopicPartition] = field(default_factory=dict)
    """The acknowledged values and their positions."""
    offsets_acknowledged: bool = False
    """Whether it committed an offset of its group, which is its number."""
    commit_sent: bool = False
    committed: bool = False
    """Whether that was acknowledged to its client."""
    abort_reason: str | None = None
    """The reason why it must never become visible, if known."""
    outcomes: dict[TopicPartition, bool] = field(default_factory=dict)
    """By partition: the outcome according to its marker."""
    visible: dict[str, int] = field(default_factory=dict)
    """How often each of its records became visible."""


@dataclass(slots=True)
class _ModelBatch:
    completes: list[frozenset[int]] = field(default_factory=list)
    """The members of every CompleteBatch that was sent."""
    winner: frozenset[int] | None = None
    is_committed: bool = False
    """Whether a client got its commit acknowledged."""
    abort_sent: bool = False
    attempts: list[ModelTransaction] = field(default_factory=list)


class Model:
    """Every transaction of a run."""

    def __init__(self) -> None:
        self.transactions: list[ModelTransaction] = []
        self._of_id: dict[str, list[ModelTransaction]] = {}
        self._batches: dict[Batch, _ModelBatch] = {}

    # -- clients ----------------------------------------------------------------------------------------------

    def begin(self, transactional_id: str, instance: int, batch: Batch | None = None) -> ModelTransaction:
        transaction = ModelTransaction(len(self.transactions), transactional_id, instance, batch)
        self.transactions.append(transaction)
        self._of_id.setdefault(transactional_id, []).append(transaction)
        if batch is not None:
            self._of(batch).attempts.append(transaction)
        return transaction

    def begun_so_far(self) -> int:
        return len(self.transactions)

    def initialized(self, transactional_id: str, instance: int, begun_before: int) -> None:
        """Record that a producer was initialized: open transactions of earlier producers must not commit."""
        for transaction in self._of_id.get(transactional_id, ()):
            if transaction.instance != instance and transaction.number < begun_before and not transaction.commit_sent:
                self.mark_aborted(transaction, "a newer producer was initialized")

    def commit_acknowledged(self, transaction: ModelTransaction) -> None:
        if transaction.abort_reason is not None:
            raise Violation(
                f"transaction {transaction.number} was acknowledged as committed, although {transaction.abort_reason}"
            )
        if False in transaction.outcomes.values():
            raise Violation(f"transaction {transaction.number} was acknowledged as committed, but is aborted")
        transaction.committed = True

    def mark_aborted(self, transaction: ModelTransaction, reason: str) -> None:
        """Record that a transaction can never become visible."""
        transaction.abort_reason = transaction.abort_reason or reason
        if transaction.committed or True in transaction.outcomes.values():
            raise Violation(f"transaction {transaction.number} is committed, although {reason}")

    # -- batches ----------------------------------------------------------------------------------------------

    def complete_sent(self, batch: Batch, members: Iterable[ModelTransaction]) -> None:
        """Record that a driver requests the commit of a batch."""
        members = list(members)
        for transaction in members:
            transaction.commit_sent = True
        self._of(batch).completes.append(frozenset(transaction.number for transaction in members))

    def complete_acknowledged(self, batch: Batch, members: Iterable[ModelTransaction], *, by_this: bool) -> None:
        """Record an acknowledged batch commit, by this request or an earlier one."""
        named = frozenset(transaction.number for transaction in members)
        of_batch = self._of(batch)
        if by_this:
            if of_batch.winner not in (None, named):
                raise Violation(f"batch {batch} was committed twice, by {of_batch.winner} and by {named}")
            of_batch.winner = named
            for transaction in of_batch.attempts:
                if transaction.number not in named:
                    self.mark_aborted(transaction, f"batch {batch} was committed without it")
        self.batch_acknowledged(batch)

    def batch_acknowledged(self, batch: Batch) -> None:
        """Record that a batch was reported as committed."""
        of_batch = self._of(batch)
        of_batch.is_committed = True
        if not of_batch.completes:
            raise Violation(f"batch {batch} is reported as committed, but no driver asked for that")

    def abort_sent(self, batch: Batch) -> None:
        """Record that a driver requests to abort all attempts at a batch."""
        self._of(batch).abort_sent = True

    def abort_acknowledged(self, batch: Batch, begun_before: int) -> None:
        """Record that all attempts that had started when the driver asked are aborted."""
        for transaction in self._of(batch).attempts:
            if transaction.number < begun_before and not transaction.commit_sent:
                self.mark_aborted(transaction, f"batch {batch} was aborted")

    def complete_refused(self, batch: Batch, *, all_prepared: bool, reason: str) -> None:
        """Record a refused batch commit; only its driver may have ended what was prepared."""
        of_batch = self._of(batch)
        if of_batch.is_committed:
            raise Violation(f"batch {batch} is committed, but committing it again failed: {reason}")
        if all_prepared and not of_batch.abort_sent and len(of_batch.completes) == 1:
            raise Violation(f"batch {batch} was refused, although all of its members were prepared: {reason}")

    def _of(self, batch: Batch) -> _ModelBatch:
        return self._batches.setdefault(batch, _ModelBatch())

    # -- the logs ---------------------------------------------------------------------------------------------

    def decided(self, partition: TopicPartition, numbers: Collection[int], values: list[str], *, commit: bool) -> None:
        """Record a committed marker that ends a transaction with these records on one partition."""
        if len(numbers) > 1:
            raise Violation(f"{partition}: one marker ends several transactions: {sorted(numbers)}")
        for number in numbers:
            transaction = self.transactions[number]
            if partition in transaction.outcomes:
                raise Violation(f"{partition}: transaction {number} ends twice")
            if commit:
                self._check_may_commit(transaction, partition)
            elif transaction.committed:
                raise Violation(f"{partition}: transaction {number} is aborted, but was acknowledged as committed")
            if (not commit) in transaction.outcomes.values():
                raise Violation(f"transaction {number} is torn: {partition} is {commit}, others {transaction.outcomes}")
            transaction.outcomes[partition] = commit
            if commit:
                for value in values:
                    transaction.visible[value] = transaction.visible.get(value, 0) + 1

    def _check_may_commit(self, transaction: ModelTransaction, partition: TopicPartition) -> None:
        if not transaction.commit_sent:
            raise Violation(f"{partition}: transaction {transaction.number} is committed, but no client asked for that")
        if transaction.abort_reason is not None:
            raise Violation(
                f"{partition}: transaction {transaction.number} is committed, although {transaction.abort_reason}"
            )

    def offset_seen(self, transactional_id: str, before: int, offset: int) -> None:
        """Check the offset of the group of a transactional id against the one that was read before."""
        if offset < before:
            raise Violation(f"the offset of {transactional_id} went back from {before} to {offset}")
        if offset < 0:
            return
        transaction = self.transactions[offset]
        if (
            transaction.transactional_id != transactional_id
            or not transaction.commit_sent
            or transaction.abort_reason is not None
        ):
            raise Violation(f"the offset of {transactional_id} comes from {transaction}")

    # -- in the end -------------------------------------------------------------------------------------------

    def check_all(self) -> None:
        """Check the final state, after everything is healed and read."""
        for transaction in self.transactions:
            is_visible = bool(transaction.visible)
            if transaction.committed or is_visible:
                missing = [value for value in transaction.written if transaction.visible.get(value) != 1]
                if missing or set(transaction.visible) != set(transaction.written):
                    raise Violation(
                        f"transaction {transaction.number} is not visible completely and once: {transaction}"
                    )
        for batch, of_batch in self._batches.items():
            self._check_batch(batch, of_batch)

    def _check_batch(self, batch: Batch, of_batch: _ModelBatch) -> None:
        visible = frozenset(transaction.number for transaction in of_batch.attempts if transaction.visible)
        if of_batch.winner is not None and visible != of_batch.winner:
            raise Violation(f"batch {batch} was committed as {sorted(of_batch.winner)}, visible is {sorted(visible)}")
        if visible not in of_batch.completes and (visible or of_batch.is_committed):
            raise Violation(f"batch {batch}: visible is {sorted(visible)}, asked for was {of_batch.completes}")

    def offset_of(self, transactional_id: str) -> int:
        """Return the offset that must be committed in the end."""
        transaction = [
            transaction.number
            for transaction in self._of_id.get(transactional_id, ())
            if transaction.offsets_acknowledged and transaction.visible
        ]
        return max(transaction, default=-1)


class Decision(NamedTuple):
    """A transaction is to end on every partition with a marker of this epoch."""

    producer_id: int
    epoch: int
    commit: bool


class Decisions:
    """Every decision that was ever committed."""

    def __init__(self) -> None:
        self._made: set[Decision] = set()

    def __contains__(self, decision: Decision) -> bool:
        return decision in self._made

    def add(self, batch: bytes) -> None:
        for record in decode_batch(batch, read_header(batch)):
            key = read_key(record.key or b"")
            if not isinstance(key, TransactionKey) or record.value is None:
                continue
            transaction = read_transaction(key.transactional_id, record.value)
            if transaction.state in ENDING:
                self._made.add(Decision(transaction.producer_id, transaction.epoch, transaction.is_committing))


class Open(NamedTuple):
    """A transaction without a marker yet."""

    first_offset: int
    values: dict[int, str]
    """By offset."""


class Visible:
    """A partition: its open transactions, and the records that the others made visible."""

    def __init__(self, partition: TopicPartition, model: Model, decisions: Decisions) -> None:
        self.partition = partition
        self.values: dict[int, str] = {}
        """Every visible record by its offset."""
        self.end = 0
        self.batches = 0
        """The number of processed batches."""
        self._model = model
        self._decisions = decisions
        self._open: dict[int, Open] = {}

    @property
    def first_open(self) -> int | None:
        """Return where the oldest open transaction begins."""
        return min((transaction.first_offset for transaction in self._open.values()), default=None)

    def add(self, batch: bytes) -> None:
        header = read_header(batch)
        self.end = header.next_offset
        self.batches += 1
        if header.is_control:
            self._end_transaction(batch, header)
            return
        if header.producer_id == NO_PRODUCER_ID or not header.is_transactional:
            raise Violation(f"{self.partition}: a batch at {header.base_offset} belongs to no transaction")
        opened = self._open.setdefault(header.producer_id, Open(header.base_offset, {}))
        for record in decode_batch(batch, header):
            opened.values[record.offset] = (record.value or b"").decode()

    def _end_transaction(self, batch: bytes, header: BatchHeader) -> None:
        marker = read_marker(batch, header)
        opened = self._open.pop(header.producer_id, None)
        if marker is None:
            return
        if Decision(marker.producer_id, marker.producer_epoch, marker.commit) not in self._decisions:
            raise Violation(
                f"{self.partition}: no durable decision exists for the marker at {header.base_offset}: {marker}"
            )
        if opened is None:
            return
        values = list(opened.values.values())
        self._model.decided(self.partition, {number_of(value) for value in values}, values, commit=marker.commit)
        if marker.commit:
            self.values.update(opened.values)

    def check_read(self, read: dict[int, str], first: int, next_offset: int) -> None:
        """Compare what a consumer received with what is visible."""
        expected = {offset: value for offset, value in self.values.items() if first <= offset < next_offset}
        if read != expected:
            raise Violation(f"{self.partition}: read {read} from {first} to {next_offset}, visible is {expected}")


def number_of(value: str) -> int:
    """Return the number of the transaction of a record."""
    return int(value.partition(".")[0])
