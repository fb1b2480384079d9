"""The batches of queries in one shard: which attempts there are, which batch was the last, and how one is decided.

The decision is one append: the last batch of the query, every member as committed and every other attempt as aborted
are the records of a single batch in the log, which is there as a whole or not at all. Markers follow from there as for
any other transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from millstream.broker.coordination.state import Outcome, StateRecord
from millstream.broker.transactions.batch import NO_BATCH, Attempt, LastBatch, Member, attempt_of, check_members
from millstream.broker.transactions.records import (
    query_record,
    query_tombstone,
    transaction_record,
    transaction_tombstone,
)
from millstream.broker.transactions.requests import ProducerRef
from millstream.broker.transactions.transaction import (
    ENDING,
    EPOCH_PER_TRANSACTION,
    IDLE,
    NO_TIME_MS,
    Transaction,
    TransactionState,
)
from millstream.core.clock import Clock
from millstream.core.errors import (
    InvalidProducerMapping,
    InvalidRequest,
    InvalidTransactionState,
    PolicyViolation,
    ProducerFenced,
)

_MAY_PREPARE = frozenset({TransactionState.EMPTY, TransactionState.ONGOING})


class Batches:
    """Looks at the transactions of the shard, and says what becomes of those that belong to batches."""

    def __init__(
        self,
        transactions: Mapping[str, Transaction],
        *,
        clock: Clock,
        abort: Callable[[Transaction, str], Transaction],
        queries_max: int,
    ) -> None:
        self._transactions = transactions
        self._clock = clock
        self._abort = abort
        self._queries_max = queries_max
        self.queries: dict[str, LastBatch] = {}
        """The last batch of every query that has one."""
        self._attempts: dict[str, dict[str, None]] = {}

    def last_batch_of(self, query: str) -> int:
        """The last batch of a query that was committed; -1 if none was."""
        last = self.queries.get(query)
        return NO_BATCH if last is None else last.batch

    def last_batch(self, query: str) -> Outcome[int]:
        """Which batch of a query was committed last."""
        return [], self.last_batch_of(query)

    def check_may_begin(self, attempt: Attempt) -> None:
        """Raise when nobody would commit what this attempt writes."""
        known = self.queries.get(attempt.query)
        if known is not None and attempt.batch <= known.batch:
            raise ProducerFenced(f"batch {attempt.batch} of query {attempt.query!r} is committed already")
        if known is not None and attempt.run and attempt.run == known.ended_run:
            raise ProducerFenced(f"the run {attempt.run!r} of query {attempt.query!r} was given up")
        if not self._has_room(attempt.query):
            raise self._full()

    def prepare(self, who: ProducerRef) -> Outcome[None]:
        """A writer has written all of its part: from here on only the batch decides."""
        attempt = attempt_of(who.transactional_id)
        if attempt is None:
            raise InvalidRequest(f"{who.transactional_id!r} does not belong to a batch")
        transaction = self._checked(Member(*who))
        if attempt.batch <= self.last_batch_of(attempt.query):
            raise ProducerFenced(f"batch {attempt.batch} of query {attempt.query!r} is committed already")
        if transaction.state is TransactionState.PREPARED:
            return [], None
        if transaction.state not in _MAY_PREPARE:
            raise InvalidTransactionState(f"{who.transactional_id!r} is {transaction.state.value}")
        return [transaction_record(transaction.prepared(now_ms=self._clock.now_ms()))], None

    def complete(self, query: str, batch: int, members: tuple[Member, ...]) -> Outcome[bool]:
        """Commit all members together, and abort every other attempt up to this batch; False if that was done before.

        A member that is not prepared fails the whole: nothing is decided then.
        """
        check_members(query, batch, members)
        if batch <= self.last_batch_of(query):
            return self._cleared(query, self.last_batch_of(query)), False
        if not self._has_room(query):
            raise self._full()
        named = {member.transactional_id for member in members}
        records = [query_record(query, self._known(query)._replace(batch=batch))]
        for member in dict.fromkeys(members):
            transaction = self._checked(member)
            if transaction.state is not TransactionState.PREPARED:
                raise InvalidTransactionState(f"{member.transactional_id!r} is {transaction.state.value}, not prepared")
            committed = transaction.ending(commit=True, version=EPOCH_PER_TRANSACTION, now_ms=self._clock.now_ms())
            records.append(transaction_record(committed))
        return records + self._cleared(query, batch, but=named), True

    def abort(self, query: str, batch: int, run: str = "") -> Outcome[int]:
        """Abort every attempt at one batch that is not decided; the answer is how many there were.

        When a run is named, no further attempt of it may begin.
        """
        if batch <= self.last_batch_of(query):
            raise InvalidTransactionState(f"batch {batch} of query {query!r} is committed already")
        undecided = [one for number, one in self._of(query) if number == batch and one.state not in ENDING]
        records = [self._ended(one, f"batch {batch} is aborted") for one in undecided]
        if run and self._has_room(query):
            records.append(query_record(query, self._known(query)._replace(ended_run=run)))
        return records, len(undecided)

    def replay_query(self, query: str, last: LastBatch | None) -> None:
        """Take over the last batch of a query; None when it is forgotten."""
        if last is None:
            self.queries.pop(query, None)
        else:
            self.queries[query] = last

    def expired(self, *, before_ms: int, limit: int) -> list[StateRecord]:
        """What forgets queries that have committed nothing since then and have no attempts under way."""
        found: list[StateRecord] = []
        for query, last in self.queries.items():
            if len(found) >= limit:
                break
            if last.updated_ms == NO_TIME_MS:
                # An older release did not write down when it was; its time counts from now on.
                found.append(query_record(query, last._replace(updated_ms=self._clock.now_ms())))
            elif last.updated_ms <= before_ms and query not in self._attempts:
                found.append(query_tombstone(query))
        return found

    def note(self, transactional_id: str) -> None:
        """A transactional id is there."""
        attempt = attempt_of(transactional_id)
        if attempt is not None:
            self._attempts.setdefault(attempt.query, {})[transactional_id] = None

    def forget(self, transactional_id: str) -> None:
        """A transactional id is gone."""
        attempt = attempt_of(transactional_id)
        if attempt is not None and attempt.query in self._attempts:
            self._attempts[attempt.query].pop(transactional_id, None)
            if not self._attempts[attempt.query]:
                del self._attempts[attempt.query]

    def _known(self, query: str) -> LastBatch:
        known = self.queries.get(query, LastBatch(NO_BATCH, NO_TIME_MS))
        return known._replace(updated_ms=self._clock.now_ms())

    def _has_room(self, query: str) -> bool:
        return query in self.queries or len(self.queries) < self._queries_max

    def _full(self) -> PolicyViolation:
        return PolicyViolation(f"a coordinator keeps the last batches of at most {self._queries_max} queries")

    def _of(self, query: str) -> Iterator[tuple[int, Transaction]]:
        for transactional_id in self._attempts.get(query, ()):
            attempt = attempt_of(transactional_id)
            if attempt is not None:
                yield attempt.batch, self._transactions[transactional_id]

    def _cleared(self, query: str, batch: int, but: Collection[str] = ()) -> list[StateRecord]:
        """What ends every attempt up to a batch that lost."""
        return [
            self._ended(one, f"batch {batch} is committed without it")
            for number, one in self._of(query)
            if number <= batch and one.transactional_id not in but and one.state not in ENDING
        ]

    def _ended(self, transaction: Transaction, reason: str) -> StateRecord:
        if transaction.state in IDLE:
            return transaction_tombstone(transaction.transactional_id)
        return transaction_record(self._abort(transaction, reason))

    def _checked(self, member: Member) -> Transaction:
        transaction = self._transactions.get(member.transactional_id)
        if transaction is None or transaction.producer_id != member.producer_id:
            raise InvalidProducerMapping(f"{member.transactional_id!r} has no producer id {member.producer_id}")
        if transaction.epoch != member.epoch:
            raise ProducerFenced(
                f"producer {member.producer_id} of {member.transactional_id!r} is at epoch {transaction.epoch}, "
                f"not {member.epoch}"
            )
        return transaction
