"""The state machine of one partition of `__transaction_state`: its transactional ids and their transactions.

Every public operation is a plain function of the state that returns the records to append and the response, now or
later. Nothing here reads a clock that was not given to it, waits, or does I/O. Decided transactions that need markers
are announced through `on_ending`; the writer of the markers confirms them with `complete`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Final

from millstream.broker.coordination.state_machine import Deferred, Outcome, StateRecord, Timers
from millstream.broker.transactions.records import (
    QueryKey,
    TransactionKey,
    query_record,
    query_tombstone,
    read_key,
    read_query,
    read_transaction,
    transaction_record,
    transaction_tombstone,
)
from millstream.broker.transactions.transaction import (
    ENDING,
    EPOCH_MAX,
    EPOCH_PER_TRANSACTION,
    IDLE,
    NO_BATCH,
    NO_EPOCH,
    NO_TIME_MS,
    Attempt,
    InitRequest,
    InitResponse,
    LastBatch,
    ProducerRef,
    Transaction,
    TransactionFilter,
    TransactionLimits,
    TransactionState,
    UnmarkedTransaction,
    attempt_of,
    check_members,
    is_exhausted,
)
from millstream.core.clock import Clock
from millstream.core.errors import (
    ConcurrentTransactions,
    CoordinatorUnavailable,
    InvalidProducerMapping,
    InvalidRequest,
    InvalidTransactionState,
    MillstreamError,
    NotCoordinator,
    PolicyViolation,
    ProducerFenced,
    TransactionAbortable,
    UnknownTransaction,
)
from millstream.core.ids import NO_PRODUCER_ID, ProducerId
from millstream.core.topic import TopicPartition

_logger = logging.getLogger(__name__)

_MAY_PREPARE = frozenset({TransactionState.EMPTY, TransactionState.ONGOING})


class Batches:
    """Decides the transactions of a shard that belong to batches."""

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
        self._attempts: dict[str, dict[str, None]] = {}

    def last_batch_of(self, query: str) -> int:
        """Return the last committed batch of a query; -1 if there is none."""
        last = self.queries.get(query)
        return NO_BATCH if last is None else last.batch

    def last_batch(self, query: str) -> Outcome[int]:
        return [], self.last_batch_of(query)

    def check_may_begin(self, attempt: Attempt) -> None:
        """Raise if the transaction of this attempt could never be committed."""
        known = self.queries.get(attempt.query)
        if known is not None and attempt.batch <= known.batch:
            raise ProducerFenced(f"batch {attempt.batch} of query {attempt.query!r} is already committed")
        if known is not None and attempt.run and attempt.run == known.ended_run:
            raise ProducerFenced(f"the run {attempt.run!r} of query {attempt.query!r} was aborted")
        if not self._has_room(attempt.query):
            raise self._full_error()

    def prepare(self, who: ProducerRef) -> Outcome[None]:
        """Prepare the transaction of a writer: from now on only the batch decides it."""
        attempt = attempt_of(who.transactional_id)
        if attempt is None:
            raise InvalidRequest(f"{who.transactional_id!r} does not belong to a batch")
        transaction = self._require_member(who)
        if attempt.batch <= self.last_batch_of(attempt.query):
            raise ProducerFenced(f"batch {attempt.batch} of query {attempt.query!r} is already committed")
        if transaction.state is TransactionState.PREPARED:
            return [], None
        if transaction.state not in _MAY_PREPARE:
            raise InvalidTransactionState(f"{who.transactional_id!r} is {transaction.state.value}")
        return [transaction_record(transaction.prepared(now_ms=self._clock.now_ms()))], None

    def complete(self, query: str, batch: int, members: tuple[ProducerRef, ...]) -> Outcome[bool]:
        """Commit all members together, and abort every other attempt up to this batch; return False if that was done
        before.

        If one member is not prepared, nothing is decided.
        """
        check_members(query, batch, members)
        if batch <= self.last_batch_of(query):
            return self._abort_superseded(query, self.last_batch_of(query)), False
        if not self._has_room(query):
            raise self._full_error()
        named = {member.transactional_id for member in members}
        records = [query_record(query, self._known(query)._replace(batch=batch))]
        for member in dict.fromkeys(members):
            transaction = self._require_member(member)
            if transaction.state is not TransactionState.PREPARED:
                raise InvalidTransactionState(f"{member.transactional_id!r} is {transaction.state.value}, not prepared")
            committed = transaction.ending(commit=True, version=EPOCH_PER_TRANSACTION, now_ms=self._clock.now_ms())
            records.append(transaction_record(committed))
        return records + self._abort_superseded(query, batch, except_ids=named), True

    def abort(self, query: str, batch: int, run: str = "") -> Outcome[int]:
        """Abort every undecided attempt at one batch; return their number. A named run may begin no further attempt."""
        if batch <= self.last_batch_of(query):
            raise InvalidTransactionState(f"batch {batch} of query {query!r} is already committed")
        undecided = [
            attempt for number, attempt in self._attempts_of(query) if number == batch and attempt.state not in ENDING
        ]
        records = [self._ending_record(attempt, f"batch {batch} is aborted") for attempt in undecided]
        if run and self._has_room(query):
            records.append(query_record(query, self._known(query)._replace(ended_run=run)))
        return records, len(undecided)

    def replay_query(self, query: str, last: LastBatch | None) -> None:
        """Apply the last batch of a query; None removes it."""
        if last is None:
            self.queries.pop(query, None)
        else:
            self.queries[query] = last

    def expired(self, *, before_ms: int, limit: int) -> list[StateRecord]:
        """Build the records that remove queries that have committed nothing since a time and have no open attempts."""
        tombstones: list[StateRecord] = []
        for query, last in self.queries.items():
            if len(tombstones) >= limit:
                break
            if last.updated_ms <= before_ms and query not in self._attempts:
                tombstones.append(query_tombstone(query))
        return tombstones

    def add_attempt(self, transactional_id: str) -> None:
        attempt = attempt_of(transactional_id)
        if attempt is not None:
            self._attempts.setdefault(attempt.query, {})[transactional_id] = None

    def forget(self, transactional_id: str) -> None:
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

    def _full_error(self) -> PolicyViolation:
        return PolicyViolation(f"a coordinator keeps the last batches of at most {self._queries_max} queries")

    def _attempts_of(self, query: str) -> Iterator[tuple[int, Transaction]]:
        for transactional_id in self._attempts.get(query, ()):
            attempt = attempt_of(transactional_id)
            if attempt is not None:
                yield attempt.batch, self._transactions[transactional_id]

    def _abort_superseded(self, query: str, batch: int, except_ids: Collection[str] = ()) -> list[StateRecord]:
        """Build the records that abort every attempt up to a batch."""
        return [
            self._ending_record(attempt, f"batch {batch} is committed without it")
            for number, attempt in self._attempts_of(query)
            if number <= batch and attempt.transactional_id not in except_ids and attempt.state not in ENDING
        ]

    def _ending_record(self, transaction: Transaction, reason: str) -> StateRecord:
        if transaction.state in IDLE:
            return transaction_tombstone(transaction.transactional_id)
        return transaction_record(self._abort(transaction, reason))

    def _require_member(self, member: ProducerRef) -> Transaction:
        transaction = self._transactions.get(member.transactional_id)
        if transaction is None or transaction.producer_id != member.producer_id:
            raise InvalidProducerMapping(f"{member.transactional_id!r} has no producer id {member.producer_id}")
        if transaction.epoch != member.epoch:
            raise ProducerFenced(
                f"producer {member.producer_id} of {member.transactional_id!r} is at epoch {transaction.epoch}, "
                f"not {member.epoch}"
            )
        return transaction


_SWEEP: Final = "sweep"

_RETRY_MS: Final = 1000

_WAITING_MAX: Final = 100
"""The maximum number of requests that wait for one transaction to end; further ones are refused."""

_NO_PRODUCER: Final = InitResponse(NO_PRODUCER_ID, NO_EPOCH)

_COMPLETE_FOR: Final = {True: TransactionState.COMPLETE_COMMIT, False: TransactionState.COMPLETE_ABORT}

TakeProducerId = Callable[[], ProducerId]
"""Returns an unused producer id; raises `CoordinatorUnavailable` if none is available."""


class TransactionShard:
    """Transactional ids of one partition."""

    def __init__(
        self,
        timers: Timers,
        *,
        limits: TransactionLimits,
        clock: Clock,
        take_producer_id: TakeProducerId,
        on_ending: Callable[[], None] = lambda: None,
    ) -> None:
        self._timers = timers
        self._limits = limits
        self._clock = clock
        self._take_producer_id = take_producer_id
        self._on_ending = on_ending
        self._transactions: dict[str, Transaction] = {}
        # In the order of their decisions, so that the oldest is ended first.
        self._ending: dict[str, None] = {}
        self._ended_waiters: dict[str, list[Deferred[None]]] = {}
        self._loaded = False
        self.batches = Batches(self._transactions, clock=clock, abort=self.aborted, queries_max=limits.queries_max)

    @property
    def has_endings(self) -> bool:
        return bool(self._ending)

    # Producers

    def init(self, request: InitRequest) -> Outcome[InitResponse]:
        """Start or restart a producer; the previous owner of the id is fenced."""
        known = self._transactions.get(request.transactional_id)
        self._check_may_begin(request.transactional_id, known)
        now_ms = self._clock.now_ms()
        transaction = known or Transaction(
            transactional_id=request.transactional_id,
            producer_id=self._take_producer_id(),
            timeout_ms=request.timeout_ms,
            updated_ms=now_ms,
        )
        _check_not_ending(transaction)
        _check_expected(transaction, request.expected)
        if transaction.state is TransactionState.ONGOING:
            # The next attempt finds it ended, and gets an epoch that the aborted transaction never had.
            aborted = self.aborted(transaction, "a new producer uses its transactional id")
            return [transaction_record(aborted)], Deferred.refused(_concurrent_error(transaction))
        if transaction.state not in IDLE:
            raise InvalidTransactionState(f"{request.transactional_id!r} is prepared; its batch decides about it")
        expected_epoch = None if request.expected is None else request.expected[1]
        begun = self._initialize(transaction, expected_epoch, request.timeout_ms, now_ms)
        if known is not None and request.expected is None:
            _log_fenced(known, begun, "a new producer uses its transactional id")
        return [transaction_record(begun)], InitResponse(begun.producer_id, begun.epoch)

    def add_partitions(self, who: ProducerRef, partitions: Iterable[TopicPartition], *, version: int) -> Outcome[None]:
        """Add partitions to the producer's transaction, which starts with the first of them."""
        transaction = self._known(who.transactional_id)
        _check_not_ending(transaction)
        _check_producer(transaction, who)
        if transaction.state is TransactionState.PREPARED:
            raise InvalidTransactionState(f"{who.transactional_id!r} is prepared; nothing can be added")
        added = frozenset(partitions)
        if transaction.state is TransactionState.ONGOING and added <= transaction.partitions:
            return [], None
        extended = transaction.with_partitions(added, version=version, now_ms=self._clock.now_ms())
        return [transaction_record(extended)], None

    def verify(
        self, who: ProducerRef, partitions: Iterable[TopicPartition]
    ) -> Outcome[dict[TopicPartition, MillstreamError | None]]:
        transaction = self._known(who.transactional_id)
        # Only open transactions are verified, so the epoch is checked first, to detect late batches.
        _check_producer(transaction, who)
        _check_not_ending(transaction)
        return [], {
            partition: None
            if partition in transaction.partitions
            else TransactionAbortable(f"{partition} is not part of the transaction of {who.transactional_id!r}")
            for partition in partitions
        }

    def undecided_partitions(self, transactional_id: str) -> frozenset[TopicPartition]:
        """Return the partitions of a transaction that may still be committed or aborted."""
        transaction = self._transactions.get(transactional_id)
        return frozenset() if transaction is None or transaction.state in ENDING else transaction.partitions

    def end(self, who: ProducerRef, *, commit: bool, version: int) -> Outcome[InitResponse]:
        """Commit or abort; version 2 of the protocol gets the id and epoch for the next transaction."""
        transaction = self._known(who.transactional_id)
        if version < EPOCH_PER_TRANSACTION:
            _check_producer(transaction, who)
            _check_not_ending(transaction)
            return self._end_first_version(transaction, commit=commit)
        _check_not_ending(transaction)
        return self._end_second_version(transaction, who, commit=commit)

    def abort(self, transactional_id: str) -> Outcome[str]:
        """Abort a hanging transaction on behalf of an administrator; return its previous state."""
        transaction = self._require_known(transactional_id)
        if transaction.state in IDLE:
            raise InvalidTransactionState(f"{transactional_id!r} has no transaction to abort")
        if transaction.is_committing:
            raise InvalidTransactionState(f"{transactional_id!r} is being committed, which cannot be undone")
        was = transaction.state.value
        if transaction.state in ENDING:
            return [], was
        return [transaction_record(self.aborted(transaction, "an administrator aborts its transaction"))], was

    # Markers

    def endings(self, known: Iterable[str] = (), *, limit: int = 1000) -> Outcome[list[UnmarkedTransaction]]:
        """Return the decided transactions that need markers, without those that the caller knows of."""
        left_out = set(known)
        endings: list[UnmarkedTransaction] = []
        for transactional_id in self._ending:
            if len(endings) >= limit:
                break
            if transactional_id not in left_out:
                endings.append(_ending_of(self._transactions[transactional_id]))
        return [], endings

    def complete(self, ending: UnmarkedTransaction) -> Outcome[None]:
        """Complete a transaction whose markers are all written."""
        transaction = self._transactions.get(ending.transactional_id)
        if transaction is None or transaction.state not in ENDING or _ending_of(transaction) != ending:
            return [], None
        if attempt_of(ending.transactional_id) is not None:
            # Its id is never used again.
            return [transaction_tombstone(ending.transactional_id)], None
        return [transaction_record(transaction.complete(now_ms=self._clock.now_ms()))], None

    def confirmed(self, ending: UnmarkedTransaction) -> Outcome[bool]:
        """Write a decision again: a node that can do so durably is still the coordinator. Return False if the
        transaction is complete.
        """
        transaction = self._transactions.get(ending.transactional_id)
        if transaction is None or transaction.state not in ENDING or _ending_of(transaction) != ending:
            return [], False
        return [transaction_record(transaction)], True

    def wait_ended(self, transactional_id: str) -> Outcome[None]:
        """Wait until the markers of an ending transaction are written; return at once if there are none."""
        if transactional_id not in self._ending:
            return [], None
        waiting = self._ended_waiters.setdefault(transactional_id, [])
        if len(waiting) >= _WAITING_MAX:
            return [], None
        later: Deferred[None] = Deferred()
        waiting.append(later)
        return [], later

    # For administrators

    def describe(self, transactional_id: str) -> Outcome[Transaction]:
        return [], self._require_known(transactional_id)

    def listing(self, filter_: TransactionFilter) -> Outcome[list[Transaction]]:
        now_ms = self._clock.now_ms()
        return [], [
            transaction for transaction in self._transactions.values() if _matches(transaction, filter_, now_ms)
        ]

    def counts(self) -> dict[str, int]:
        counted = {state.value: 0 for state in TransactionState}
        for transaction in self._transactions.values():
            counted[transaction.state.value] += 1
        return counted

    # The fold

    def replay(self, record: StateRecord) -> None:
        key = read_key(record.key)
        if isinstance(key, TransactionKey):
            self._replay_transaction(key.transactional_id, record.value)
        elif isinstance(key, QueryKey):
            self.batches.replay_query(key.query, None if record.value is None else read_query(record.value))

    def loaded(self) -> None:
        """Set the timers of open transactions, and request the markers that a crash left unwritten."""
        self._loaded = True
        for transaction in self._transactions.values():
            self._set_timeout(transaction)
        self._timers.schedule(_SWEEP, 0, self._sweep, pure=True)
        if self._ending:
            self._on_ending()

    def unload(self) -> None:
        """Refuse all parked requests with NOT_COORDINATOR."""
        waiting, self._ended_waiters = self._ended_waiters, {}
        for laters in waiting.values():
            for later in laters:
                later.refuse(NotCoordinator("the state of this transaction is read back from the log"))

    def durable_keys(self) -> list[Hashable]:
        return [*map(TransactionKey, self._transactions), *map(QueryKey, self.batches.queries)]

    def durable_record(self, key: Hashable) -> StateRecord | None:
        if isinstance(key, TransactionKey):
            transaction = self._transactions.get(key.transactional_id)
            return None if transaction is None else transaction_record(transaction)
        if isinstance(key, QueryKey) and key.query in self.batches.queries:
            return query_record(key.query, self.batches.queries[key.query])
        return None

    def aborted(self, transaction: Transaction, reason: str) -> Transaction:
        """Return the transaction aborted by the coordinator itself: the producer is fenced."""
        ended = self._decide(transaction, commit=False)
        _log_fenced(transaction, ended, reason)
        return ended

    # Internals

    def _check_may_begin(self, transactional_id: str, known: Transaction | None) -> None:
        attempt = attempt_of(transactional_id)
        if attempt is not None:
            self.batches.check_may_begin(attempt)
        if known is None and len(self._transactions) >= self._limits.ids_max:
            raise PolicyViolation(f"a coordinator keeps at most {self._limits.ids_max} transactional ids")

    def _initialize(self, transaction: Transaction, expected: int | None, timeout_ms: int, now_ms: int) -> Transaction:
        if is_exhausted(transaction.epoch) and expected in (None, transaction.epoch):
            keeps = expected is not None
            fresh = self._take_producer_id()
            return transaction.with_new_producer(fresh, keeps_last_epoch=keeps, timeout_ms=timeout_ms, now_ms=now_ms)
        return transaction.with_epoch_bumped(expected, timeout_ms=timeout_ms, now_ms=now_ms)

    def _end_first_version(self, transaction: Transaction, *, commit: bool) -> Outcome[InitResponse]:
        state = transaction.state
        if state is TransactionState.ONGOING or (state is TransactionState.PREPARED and not commit):
            ended = transaction.ending(commit=commit, version=0, now_ms=self._clock.now_ms())
            return [transaction_record(ended)], _NO_PRODUCER
        if state is _COMPLETE_FOR[commit]:
            return [], _NO_PRODUCER
        raise _wrong_state_error(transaction, commit=commit)

    def _end_second_version(self, transaction: Transaction, who: ProducerRef, *, commit: bool) -> Outcome[InitResponse]:
        state = transaction.state
        is_retry = _is_retried_end(transaction, who)
        if transaction.producer_id != who.producer_id and not is_retry:
            raise _mapping_error(transaction, who)
        is_current = transaction.epoch == who.epoch
        if not is_current and not (is_retry and state in _COMPLETE_FOR.values()):
            raise _fenced_error(transaction, who)
        if not is_current:
            if state is _COMPLETE_FOR[commit]:
                return [], InitResponse(transaction.producer_id, transaction.epoch)
            raise _wrong_state_error(transaction, commit=commit)
        if commit and state is not TransactionState.ONGOING:
            raise _wrong_state_error(transaction, commit=commit)
        ended = self._decide(transaction, commit=commit)
        after = ended.complete(now_ms=ended.updated_ms)
        return [transaction_record(ended)], InitResponse(after.producer_id, after.epoch)

    def _decide(self, transaction: Transaction, *, commit: bool) -> Transaction:
        successor = self._take_producer_id() if is_exhausted(transaction.epoch) else NO_PRODUCER_ID
        return transaction.ending(
            commit=commit, version=EPOCH_PER_TRANSACTION, now_ms=self._clock.now_ms(), next_producer_id=successor
        )

    def _known(self, transactional_id: str) -> Transaction:
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            raise InvalidProducerMapping(f"{transactional_id!r} has no producer id")
        return transaction

    def _require_known(self, transactional_id: str) -> Transaction:
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            raise UnknownTransaction(f"there is no transactional id {transactional_id!r}")
        return transaction

    def _replay_transaction(self, transactional_id: str, value: bytes | None) -> None:
        before = self._transactions.get(transactional_id)
        if value is None:
            self._transactions.pop(transactional_id, None)
            self._timers.cancel(transactional_id)
            self.batches.forget(transactional_id)
            after = None
        else:
            after = self._transactions[transactional_id] = read_transaction(transactional_id, value)
            self.batches.add_attempt(transactional_id)
            if self._loaded:
                self._set_timeout(after)
        was_ending = before is not None and before.state in ENDING
        is_ending = after is not None and after.state in ENDING
        if is_ending and not was_ending:
            self._ending[transactional_id] = None
            if self._loaded:
                self._on_ending()
        elif was_ending and not is_ending:
            del self._ending[transactional_id]
            for later in self._ended_waiters.pop(transactional_id, ()):
                later.resolve(None)

    def _set_timeout(self, transaction: Transaction) -> None:
        transactional_id = transaction.transactional_id
        deadline_ms = transaction.deadline_ms
        if deadline_ms is None:
            self._timers.cancel(transactional_id)
            return
        delay_ms = max(0, deadline_ms - self._clock.now_ms())
        self._timers.schedule(transactional_id, delay_ms, lambda: self._time_out(transactional_id), pure=True)

    def _time_out(self, transactional_id: str) -> list[StateRecord]:
        transaction = self._transactions.get(transactional_id)
        if transaction is None or transaction.state is not TransactionState.ONGOING:
            return []
        # If the append is refused, this is retried; otherwise the change of state cancels it.
        self._timers.schedule(transactional_id, _RETRY_MS, lambda: self._time_out(transactional_id), pure=True)
        try:
            return [transaction_record(self.aborted(transaction, "its transaction timed out"))]
        except CoordinatorUnavailable:
            return []

    def _sweep(self) -> list[StateRecord]:
        """Delete ids and last batches of queries that have been unused for a long time."""
        most = self._limits.tombstones_max
        oldest_ms = self._clock.now_ms() - self._limits.id_expiration_ms
        expired: list[StateRecord] = []
        for transaction in self._transactions.values():
            if len(expired) >= most:
                break
            if transaction.state in IDLE and transaction.updated_ms <= oldest_ms:
                expired.append(transaction_tombstone(transaction.transactional_id))
        expired += self.batches.expired(before_ms=oldest_ms, limit=most - len(expired))
        pause_ms = _RETRY_MS if len(expired) >= most else self._limits.sweep_ms
        self._timers.schedule(_SWEEP, pause_ms, self._sweep, pure=True)
        return expired

    def __iter__(self) -> Iterator[Transaction]:
        return iter(self._transactions.values())


def _check_not_ending(transaction: Transaction) -> None:
    """Refuse requests while markers are being written.

    As in Kafka, this precedes the checks of the epoch and mostly of the id: the client may learn the id and epoch that
    apply only once the markers are written, so neither distinguishes a zombie from the producer itself.
    """
    if transaction.state in ENDING:
        raise _concurrent_error(transaction)


def _check_expected(transaction: Transaction, expected: tuple[ProducerId, int] | None) -> None:
    """Check that a producer names its last id and epoch, or the one whose epochs are exhausted."""
    if expected is None or transaction.epoch == NO_EPOCH:
        return
    producer_id, epoch = expected
    if producer_id == transaction.producer_id:
        return
    if producer_id == transaction.previous_producer_id and is_exhausted(epoch):
        return
    raise ProducerFenced(
        f"{transaction.transactional_id!r} belongs to producer {transaction.producer_id} at epoch {transaction.epoch} "
        f"now, not to producer {producer_id} at epoch {epoch}"
    )


def _check_producer(transaction: Transaction, who: ProducerRef) -> None:
    if transaction.producer_id != who.producer_id:
        raise _mapping_error(transaction, who)
    if transaction.epoch != who.epoch:
        raise _fenced_error(transaction, who)


def _is_retried_end(transaction: Transaction, who: ProducerRef) -> bool:
    """Return whether the client repeats the request that ended the transaction, which incremented the epoch."""
    if transaction.producer_id == who.producer_id and transaction.epoch == who.epoch + 1:
        return True
    overflowed = who.epoch == EPOCH_MAX - 1 and transaction.epoch == 0
    return overflowed and transaction.previous_producer_id == who.producer_id


def _log_fenced(before: Transaction, after: Transaction, reason: str) -> None:
    named = {
        "transactional_id": before.transactional_id,
        "producer_id": before.producer_id,
        "epoch": before.epoch,
        "next_producer_id": after.producer_id,
        "next_epoch": after.epoch,
        "reason": reason,
    }
    _logger.info("a producer is fenced", extra=named)


def _mapping_error(transaction: Transaction, who: ProducerRef) -> InvalidProducerMapping:
    return InvalidProducerMapping(
        f"{who.transactional_id!r} has the producer id {transaction.producer_id}, not {who.producer_id}"
    )


def _fenced_error(transaction: Transaction, who: ProducerRef) -> ProducerFenced:
    return ProducerFenced(
        f"producer {who.producer_id} of {who.transactional_id!r} is at epoch {transaction.epoch}, not {who.epoch}"
    )


def _concurrent_error(transaction: Transaction) -> ConcurrentTransactions:
    return ConcurrentTransactions(f"the last transaction of {transaction.transactional_id!r} is still being ended")


def _wrong_state_error(transaction: Transaction, *, commit: bool) -> InvalidTransactionState:
    outcome = "committed" if commit else "aborted"
    return InvalidTransactionState(
        f"{transaction.transactional_id!r} is {transaction.state.value} and cannot be {outcome}"
    )


def _ending_of(transaction: Transaction) -> UnmarkedTransaction:
    return UnmarkedTransaction(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.epoch,
        transaction.is_committing,
        transaction.version,
        transaction.partitions,
    )


def _matches(transaction: Transaction, filter_: TransactionFilter, now_ms: int) -> bool:
    if filter_.states and transaction.state.value not in filter_.states:
        return False
    if filter_.producer_ids and transaction.producer_id not in filter_.producer_ids:
        return False
    return filter_.longer_than_ms < 0 or (
        transaction.started_ms >= 0 and now_ms - transaction.started_ms > filter_.longer_than_ms
    )
