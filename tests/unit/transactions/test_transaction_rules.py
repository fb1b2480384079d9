"""The rules of the coordinator, one by one: allowed operations by state, under both versions of the protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeVar

import pytest

from millstream.broker.coordination.state_machine import Deferred, Outcome, Timers
from millstream.broker.transactions.records import transaction_record
from millstream.broker.transactions.shard import TransactionShard
from millstream.broker.transactions.transaction import (
    EPOCH_MAX,
    InitRequest,
    InitResponse,
    ProducerRef,
    Transaction,
    TransactionFilter,
    TransactionLimits,
    TransactionState,
)
from millstream.core.errors import (
    ConcurrentTransactions,
    CoordinatorUnavailable,
    InvalidProducerMapping,
    InvalidTransactionState,
    NotCoordinator,
    PolicyViolation,
    ProducerFenced,
    TransactionAbortable,
    UnknownTransaction,
)
from millstream.core.ids import PartitionIndex, ProducerId
from millstream.core.topic import TopicPartition
from millstream_testing.clock import ManualClock

T = TypeVar("T")

ID = "tx"
PARTITION = TopicPartition("t", PartitionIndex(0))
OTHER = TopicPartition("t", PartitionIndex(1))


class Coordinator:
    """One shard whose records are applied at once."""

    def __init__(self, **limits: int) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.ids: Iterator[int] = count(100)
        self.endings = 0
        self.shard = TransactionShard(
            self.timers,
            limits=TransactionLimits(**limits),
            clock=self.clock,
            take_producer_id=lambda: ProducerId(next(self.ids)),
            on_ending=self._noted,
        )
        self.shard.loaded()

    def _noted(self) -> None:
        self.endings += 1

    def run(self, operation: Callable[[TransactionShard], Outcome[T]]) -> T:
        records, response = operation(self.shard)
        for record in records:
            self.shard.replay(record)
        return response.result() if isinstance(response, Deferred) else response

    def init(self, expected: tuple[int, int] | None = None) -> InitResponse:
        expected_producer = None if expected is None else (ProducerId(expected[0]), expected[1])
        request = InitRequest(transactional_id=ID, timeout_ms=1000, expected=expected_producer)
        return self.run(lambda shard: shard.init(request))

    def add(self, who: InitResponse, *partitions: TopicPartition, version: int = 0) -> None:
        named = ProducerRef(ID, *who)
        self.run(lambda shard: shard.add_partitions(named, partitions or (PARTITION,), version=version))

    def end(self, who: InitResponse, *, commit: bool = True, version: int = 0) -> InitResponse:
        return self.run(lambda shard: shard.end(ProducerRef(ID, *who), commit=commit, version=version))

    def complete(self) -> None:
        (ending,) = self.run(lambda shard: shard.endings())
        self.run(lambda shard: shard.complete(ending))

    def fire(self) -> None:
        for timer in self.timers.take_due(100):
            for record in timer.action():
                self.shard.replay(record)

    def put(self, **changed: Any) -> None:
        fields: dict[str, Any] = {
            "transactional_id": ID,
            "producer_id": ProducerId(7),
            "epoch": 0,
            "timeout_ms": 1000,
            "updated_ms": self.clock.now_ms(),
            **changed,
        }
        self.shard.replay(transaction_record(Transaction(**fields)))

    @property
    def transaction(self) -> Transaction:
        return next(iter(self.shard))

    @property
    def state(self) -> str:
        return self.transaction.state.value


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


def test_a_transaction_of_version_1(coordinator: Coordinator) -> None:
    who = coordinator.init()
    assert who == (100, 0)
    coordinator.add(who)
    assert coordinator.state == "Ongoing"
    coordinator.add(who, OTHER)
    assert coordinator.end(who) == (-1, -1)
    assert (coordinator.state, coordinator.endings) == ("PrepareCommit", 1)
    for commit in (True, False):
        with pytest.raises(ConcurrentTransactions):
            coordinator.end(who, commit=commit)
    with pytest.raises(ConcurrentTransactions):
        coordinator.add(who)
    coordinator.complete()
    assert (coordinator.state, coordinator.transaction.partitions) == ("CompleteCommit", frozenset())
    assert coordinator.end(who) == (-1, -1)
    with pytest.raises(InvalidTransactionState):
        coordinator.end(who, commit=False)
    coordinator.add(who)
    assert coordinator.state == "Ongoing"


def test_the_epoch_increases_with_each_transaction_of_version_2(coordinator: Coordinator) -> None:
    who = coordinator.init()
    coordinator.add(who, version=2)
    following = coordinator.end(who, version=2)
    assert following == (100, 1)
    (ending,) = coordinator.run(lambda shard: shard.endings())
    assert (ending.epoch, ending.version, ending.commit) == (1, 2, True)
    for known in (who, following):
        with pytest.raises(ConcurrentTransactions):
            coordinator.end(known, version=2)
    coordinator.complete()
    assert coordinator.end(who, version=2) == following
    with pytest.raises(ProducerFenced):
        coordinator.add(who, version=2)
    coordinator.add(following, version=2)


@pytest.mark.parametrize(
    ("state", "commit", "retry", "outcome"),
    [
        (TransactionState.EMPTY, False, True, ProducerFenced),
        (TransactionState.EMPTY, False, False, None),
        (TransactionState.EMPTY, True, True, ProducerFenced),
        (TransactionState.EMPTY, True, False, InvalidTransactionState),
        (TransactionState.COMPLETE_ABORT, False, True, "same"),
        (TransactionState.COMPLETE_ABORT, False, False, None),
        (TransactionState.COMPLETE_ABORT, True, True, InvalidTransactionState),
        (TransactionState.COMPLETE_ABORT, True, False, InvalidTransactionState),
        (TransactionState.COMPLETE_COMMIT, False, True, InvalidTransactionState),
        (TransactionState.COMPLETE_COMMIT, False, False, None),
        (TransactionState.COMPLETE_COMMIT, True, True, "same"),
        (TransactionState.COMPLETE_COMMIT, True, False, InvalidTransactionState),
    ],
)
def test_ends_follow_kafkas_table(
    coordinator: Coordinator, state: TransactionState, commit: bool, retry: bool, outcome: Any
) -> None:
    coordinator.put(epoch=5, state=state, started_ms=1)
    who = InitResponse(ProducerId(7), 4 if retry else 5)
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            coordinator.end(who, commit=commit, version=2)
        assert coordinator.transaction.state is state
        return
    reported = coordinator.end(who, commit=commit, version=2)
    assert reported == ((7, 5) if outcome == "same" else (7, 6))
    assert coordinator.transaction.state is (state if outcome == "same" else TransactionState.PREPARE_ABORT)


def test_a_newer_producer_aborts_and_fences(coordinator: Coordinator) -> None:
    older = coordinator.init()
    coordinator.add(older)
    with pytest.raises(ConcurrentTransactions):
        coordinator.init()
    assert coordinator.state == "PrepareAbort"
    with pytest.raises(ConcurrentTransactions):
        coordinator.init()
    with pytest.raises(ProducerFenced):
        coordinator.end(older)
    coordinator.complete()
    assert coordinator.init() == (100, 2)


def test_each_fencing_by_the_coordinator_is_logged(coordinator: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millstream.broker.transactions.shard")
    coordinator.add(coordinator.init())
    assert caplog.messages == []
    with pytest.raises(ConcurrentTransactions):
        coordinator.init()
    coordinator.complete()
    coordinator.add(coordinator.init())
    coordinator.clock.advance_ms(1100)
    coordinator.fire()
    assert set(caplog.messages) == {"a producer is fenced"}
    lines = [
        (
            transaction.transactional_id,
            transaction.producer_id,
            transaction.epoch,
            transaction.next_epoch,
            transaction.reason,
        )
        for transaction in named(caplog)
    ]
    begins = "a new producer uses its transactional id"
    assert lines == [
        (ID, 100, 0, 1, begins),
        (ID, 100, 1, 2, begins),
        (ID, 100, 2, 3, "its transaction timed out"),
    ]


def named(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return list(caplog.records)


def test_a_producer_continues_after_an_error(coordinator: Coordinator) -> None:
    who = coordinator.init()
    assert coordinator.init(expected=who) == (100, 1)
    # The response was lost, and the client retries.
    assert coordinator.init(expected=who) == (100, 1)
    with pytest.raises(ProducerFenced):
        coordinator.init(expected=(100, 7))
    with pytest.raises(ProducerFenced):
        coordinator.init(expected=(99, 1))
    assert coordinator.init() == (100, 2)
    with pytest.raises(ProducerFenced):
        coordinator.init(expected=(100, 1))


def test_a_new_producer_id_takes_over_when_epochs_are_exhausted(coordinator: Coordinator) -> None:
    coordinator.put(epoch=EPOCH_MAX - 1, state=TransactionState.COMPLETE_COMMIT, started_ms=1)
    assert coordinator.init(expected=(7, EPOCH_MAX - 1)) == (100, 0)
    # A repeated request comes from the previous producer.
    assert coordinator.init(expected=(7, EPOCH_MAX - 1)) == (100, 0)
    coordinator.put(epoch=EPOCH_MAX - 1, state=TransactionState.COMPLETE_COMMIT, started_ms=1)
    assert coordinator.init() == (101, 0)


def test_a_transaction_ends_with_a_new_producer_id_when_epochs_are_exhausted(coordinator: Coordinator) -> None:
    coordinator.put(
        epoch=EPOCH_MAX - 1, state=TransactionState.ONGOING, started_ms=1, partitions=frozenset({PARTITION})
    )
    who = InitResponse(ProducerId(7), EPOCH_MAX - 1)
    assert coordinator.end(who, version=2) == (100, 0)
    (ending,) = coordinator.run(lambda shard: shard.endings())
    assert (ending.producer_id, ending.epoch) == (7, EPOCH_MAX)
    # The id in the response is not in the state yet.
    completed = InitResponse(ProducerId(100), 0)
    with pytest.raises(ConcurrentTransactions):
        coordinator.add(completed, version=2)
    with pytest.raises(ConcurrentTransactions):
        coordinator.end(completed, version=2)
    with pytest.raises(ConcurrentTransactions):
        coordinator.init(expected=completed)
    coordinator.complete()
    assert (coordinator.transaction.producer_id, coordinator.transaction.epoch) == (100, 0)
    assert coordinator.end(who, version=2) == (100, 0)


def test_unknown_producers_and_wrong_ids_are_refused(coordinator: Coordinator) -> None:
    stranger = InitResponse(ProducerId(5), 0)
    for _ in range(2):
        with pytest.raises(InvalidProducerMapping):
            coordinator.add(stranger)
        for version in (0, 2):
            with pytest.raises(InvalidProducerMapping):
                coordinator.end(stranger, version=version)
        coordinator.put()
    with pytest.raises(ProducerFenced):
        coordinator.add(InitResponse(ProducerId(7), 3))


def test_verification_refuses_partitions_outside_the_transaction(coordinator: Coordinator) -> None:
    who = coordinator.init()
    coordinator.add(who)
    responses = coordinator.run(lambda shard: shard.verify(ProducerRef(ID, *who), (PARTITION, OTHER)))
    assert responses[PARTITION] is None
    assert isinstance(responses[OTHER], TransactionAbortable)


def test_a_transaction_that_exceeds_its_timeout_is_aborted(coordinator: Coordinator) -> None:
    who = coordinator.init()
    coordinator.add(who)
    coordinator.clock.advance_ms(900)
    coordinator.add(who, OTHER)
    coordinator.fire()
    assert coordinator.state == "Ongoing"
    coordinator.clock.advance_ms(200)
    coordinator.fire()
    assert coordinator.state == "PrepareAbort"
    coordinator.complete()
    with pytest.raises(ProducerFenced):
        coordinator.add(who)
    assert coordinator.init() == (100, 2)


def test_the_end_is_postponed_without_an_available_producer_id(coordinator: Coordinator) -> None:
    def none() -> ProducerId:
        raise CoordinatorUnavailable("none")

    coordinator.put(epoch=EPOCH_MAX - 1, state=TransactionState.ONGOING, started_ms=coordinator.clock.now_ms())
    coordinator.shard._take_producer_id = none
    coordinator.clock.advance_ms(2000)
    coordinator.fire()
    assert coordinator.state == "Ongoing"
    coordinator.shard._take_producer_id = lambda: ProducerId(55)
    coordinator.clock.advance_ms(2000)
    coordinator.fire()
    assert (coordinator.state, coordinator.transaction.next_producer_id) == ("PrepareAbort", 55)


def test_unused_ids_expire() -> None:
    coordinator = Coordinator(id_expiration_ms=10_000, sweep_ms=1000, tombstones_max=1)
    coordinator.put(transactional_id="a")
    coordinator.put(transactional_id="b")
    coordinator.put(transactional_id="busy", updated_ms=0, state=TransactionState.PREPARED, started_ms=1)
    for _ in range(40):
        coordinator.clock.advance_ms(1000)
        coordinator.fire()
    assert [transaction.transactional_id for transaction in coordinator.shard] == ["busy"]


def complete_third(query: str, shard: TransactionShard) -> Outcome[bool]:
    return shard.batches.complete(query, 3, ())


def test_queries_without_commits_expire() -> None:
    coordinator = Coordinator(id_expiration_ms=10_000, sweep_ms=1000, tombstones_max=1)
    for query in ("a", "b", "busy", "active"):
        coordinator.run(partial(complete_third, query))
    attempt = coordinator.run(
        lambda shard: shard.init(InitRequest(transactional_id="spark/busy/4/0/x", timeout_ms=60_000))
    )
    coordinator.run(lambda shard: shard.batches.prepare(ProducerRef("spark/busy/4/0/x", *attempt)))

    def known() -> list[str]:
        return sorted(coordinator.shard.batches.queries)

    for second in range(9):
        coordinator.clock.advance_ms(1000)
        coordinator.fire()
        if second == 5:
            coordinator.run(lambda shard: shard.batches.complete("active", 4, ()))
    assert known() == ["a", "active", "b", "busy"]
    for _ in range(4):
        coordinator.clock.advance_ms(1000)
        coordinator.fire()
    assert known() == ["active", "busy"]
    for _ in range(20):
        coordinator.clock.advance_ms(1000)
        coordinator.fire()
    assert known() == ["busy"]
    assert coordinator.run(lambda shard: shard.batches.last_batch("a")) == -1


def test_the_number_of_queries_is_bounded() -> None:
    coordinator = Coordinator(queries_max=1)
    coordinator.run(lambda shard: shard.batches.complete("a", 0, ()))
    with pytest.raises(PolicyViolation):
        coordinator.run(lambda shard: shard.batches.complete("b", 0, ()))
    with pytest.raises(PolicyViolation):
        coordinator.run(lambda shard: shard.init(InitRequest(transactional_id="spark/b/0/0/x", timeout_ms=60_000)))
    coordinator.run(lambda shard: shard.batches.complete("a", 1, ()))
    coordinator.run(lambda shard: shard.init(InitRequest(transactional_id="spark/a/2/0/x", timeout_ms=60_000)))


def test_the_number_of_ids_is_bounded() -> None:
    coordinator = Coordinator(ids_max=1)
    coordinator.put(transactional_id="a")
    with pytest.raises(PolicyViolation):
        coordinator.init()


def test_an_administrator_aborts(coordinator: Coordinator) -> None:
    with pytest.raises(UnknownTransaction):
        coordinator.run(lambda shard: shard.abort(ID))
    who = coordinator.init()
    with pytest.raises(InvalidTransactionState):
        coordinator.run(lambda shard: shard.abort(ID))
    coordinator.add(who)
    assert coordinator.run(lambda shard: shard.abort(ID)) == "Ongoing"
    assert coordinator.run(lambda shard: shard.abort(ID)) == "PrepareAbort"
    coordinator.put(state=TransactionState.PREPARE_COMMIT, started_ms=1)
    with pytest.raises(InvalidTransactionState):
        coordinator.run(lambda shard: shard.abort(ID))


def test_listing_and_describing(coordinator: Coordinator) -> None:
    who = coordinator.init()
    coordinator.add(who, OTHER, PARTITION)
    coordinator.clock.advance_ms(500)
    described = coordinator.run(lambda shard: shard.describe(ID))
    assert (described.state.value, described.partitions) == ("Ongoing", frozenset({PARTITION, OTHER}))

    def listed(**filters: Any) -> int:
        return len(coordinator.run(lambda shard: shard.listing(TransactionFilter(**filters))))

    assert listed() == listed(states={"Ongoing"}) == listed(producer_ids={100}) == listed(longer_than_ms=400) == 1
    assert listed(states={"Empty"}) == listed(producer_ids={1}) == listed(longer_than_ms=600) == 0
    assert coordinator.shard.counts()["Ongoing"] == 1


def waiting(coordinator: Coordinator) -> Deferred[None]:
    _, later = coordinator.shard.wait_ended(ID)
    assert isinstance(later, Deferred)
    return later


def test_waiters_for_an_end_are_notified(coordinator: Coordinator) -> None:
    coordinator.run(lambda shard: shard.wait_ended(ID))
    who = coordinator.init()
    reported = []
    for _ in range(2):
        coordinator.add(who)
        coordinator.end(who)
        reported.append(waiting(coordinator))
        assert [result.completed for result in reported[-1:]] == [False]
        if len(reported) == 1:
            coordinator.complete()
    coordinator.shard.unload()
    assert [result.error for result in reported[:1]] == [None]
    assert isinstance(reported[1].error, NotCoordinator)
