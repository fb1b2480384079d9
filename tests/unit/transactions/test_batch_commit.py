"""Batch commits: many writers, decided together, through crashes of the driver, of tasks and of the broker.

A query writes batches of several parts. Every step may fail before or after it was carried out, tasks run twice, and
leftovers of earlier runs continue meanwhile. In any case each part of each batch is committed exactly once, and a batch
as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.coordination.state_machine import Outcome
from millstream.broker.transactions.shard import TransactionShard
from millstream.broker.transactions.transaction import InitRequest, ProducerRef, attempt_of, placement_of
from millstream.core.errors import (
    InvalidProducerMapping,
    InvalidRequest,
    InvalidTransactionState,
    MillstreamError,
    ProducerFenced,
)
from millstream.core.ids import PartitionIndex, ProducerId
from millstream.core.topic import TopicPartition
from millstream.protocol.private.transactions import coordinator_key
from millstream_testing.transaction_model import ModelPartition, ReloadingCoordinator

T = TypeVar("T")

QUERY = "q"
PARTS = 3


class Crash(Exception):
    """The requesting process has died."""


class Run:
    """A coordinator, its partitions, and all writers."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.coordinator = ReloadingCoordinator()
        self.partitions = {TopicPartition("t", PartitionIndex(index)): ModelPartition() for index in range(PARTS)}
        self.attempts = count()
        self.parts: dict[int, tuple[int, int]] = {}
        """By attempt, the batch and the part that it writes."""
        self.zombies: list[Callable[[], None]] = []

    def ask(self, operation: Callable[[TransactionShard], Outcome[T]]) -> T:
        """Send a request to the coordinator; the sender may die before it is carried out or acknowledged."""
        fate = self.random.random()
        if fate < 0.015:
            raise Crash
        response = self.coordinator.run(operation)
        self.check()
        if fate < 0.03:
            raise Crash
        return response

    def attempt(self, batch: int, part: int) -> ProducerRef | None:
        """Write a part as a task does; return None if the batch is already committed."""
        if self.ask(lambda shard: shard.batches.last_batch(QUERY)) >= batch:
            return None
        number = next(self.attempts)
        self.parts[number] = (batch, part)
        name = f"spark/{QUERY}/{batch}/{part}/{number}"
        who = self.ask(lambda shard: shard.init(InitRequest(transactional_id=name, timeout_ms=60_000)))
        ref = ProducerRef(name, *who)
        partition = TopicPartition("t", PartitionIndex(part))

        def rest() -> None:
            self.ask(lambda shard: shard.add_partitions(ref, [partition], version=2))
            self.partitions[partition].append(ref.producer_id, ref.epoch, number)
            self.ask(lambda shard: shard.batches.prepare(ref))

        if self.random.random() < 0.05:
            # The task is slow, another one is started in its place, and this one continues later.
            self.zombies.append(rest)
            raise Crash
        rest()
        return ref

    def batch(self, batch: int) -> None:
        """Run a batch as a driver does, until it is committed."""
        while True:
            try:
                members = [
                    self.attempt(batch, part) for part in range(PARTS) for _ in range(self.random.choice([1, 1, 2]))
                ]
                by_part = {attempt_of_part(member): member for member in members if member is not None}
                if len(by_part) not in (0, PARTS):
                    continue
                chosen = tuple(by_part.values())
                if self.random.random() < 0.2:
                    # A driver that is presumed dead still has its members.
                    self.zombies.append(lambda: self.complete(batch, chosen))  # noqa: B023
                    raise Crash
                self.complete(batch, chosen)
            except (Crash, ProducerFenced, InvalidTransactionState, InvalidProducerMapping):
                self.run_concurrent_steps()
                continue
            return

    def complete(self, batch: int, members: tuple[ProducerRef, ...]) -> None:
        self.ask(lambda shard: shard.batches.complete(QUERY, batch, members))

    def run_concurrent_steps(self) -> None:
        self.write_markers(all_of_them=False)
        if self.random.random() < 0.2:
            self.coordinator.advance_ms(self.random.choice([1, 61_000]))
        for zombie in self.zombies[:]:
            if self.random.random() < 0.5:
                self.zombies.remove(zombie)
                try:
                    zombie()
                except (Crash, MillstreamError):
                    continue

    def write_markers(self, *, all_of_them: bool) -> None:
        for ending in self.coordinator.run(lambda shard: shard.endings()):
            for partition in ending.partitions:
                if all_of_them or self.random.random() < 0.7:
                    self.partitions[partition].end(ending)
            if all_of_them or self.random.random() < 0.3:
                for partition in ending.partitions:
                    self.partitions[partition].end(ending)
                self.coordinator.run(lambda shard: shard.complete(ending))  # noqa: B023

    def check(self) -> None:
        """Check that no part is committed twice, by decision or by marker."""
        committed: dict[tuple[int, int], set[int]] = {}
        for transaction in self.coordinator.shard:
            if transaction.is_committing:
                number = int(transaction.transactional_id.rsplit("/", 1)[1])
                committed.setdefault(self.parts[number], set()).add(number)
        for partition in self.partitions.values():
            for number, is_committed in partition.outcomes.items():
                if is_committed:
                    committed.setdefault(self.parts[number], set()).add(number)
        assert all(len(numbers) == 1 for numbers in committed.values()), f"duplicated: {committed}"
        last = self.coordinator.shard.batches.last_batch_of(QUERY)
        assert set(committed) <= {(batch, part) for batch in range(last + 1) for part in range(PARTS)}


def attempt_of_part(member: ProducerRef) -> int:
    return int(member.transactional_id.rsplit("/", 2)[1])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_part_of_every_batch_is_committed_exactly_once(seed: int) -> None:
    run = Run(seed)
    batches = 4
    for batch in range(batches):
        run.batch(batch)
        run.run_concurrent_steps()
    for zombie in run.zombies:
        try:
            zombie()
        except (Crash, MillstreamError):
            continue
    run.coordinator.advance_ms(100_000)
    run.coordinator.run(lambda shard: shard.batches.complete(QUERY, batches - 1, ()))
    run.write_markers(all_of_them=True)
    committed = [
        run.parts[number]
        for partition in run.partitions.values()
        for number, is_committed in partition.outcomes.items()
        if is_committed
    ]
    assert sorted(committed) == [(batch, part) for batch in range(batches) for part in range(PARTS)]
    assert not any(partition.undecided for partition in run.partitions.values())
    # Nothing of finished batches is kept but the number of the last one.
    assert run.coordinator.transactions == {}
    assert {query: last.batch for query, last in run.coordinator.shard.batches.queries.items()} == {QUERY: batches - 1}


@pytest.mark.parametrize(
    ("transactional_id", "found"),
    [
        ("spark/q/3/0/abc", ("q", 3, "")),
        ("spark/a/b/q/3/0/abc", ("a/b/q", 3, "")),
        ("spark/q/3/0/run-abc", ("q", 3, "run")),
        ("spark/q/3/0", None),
        ("spark/q/x/0/abc", None),
        ("spark/q/-1/0/abc", None),
        ("spark//3/0/abc", None),
        ("spark/q/99999999999999999999/0/abc", None),
        ("other/q/3/0/abc", None),
    ],
)
def test_ids_of_batches(transactional_id: str, found: tuple[str, int, str] | None) -> None:
    assert attempt_of(transactional_id) == found
    assert placement_of(transactional_id) == (transactional_id if found is None else found[0])
    # Clients share a coordinator only among ids that the broker places together.
    shared = coordinator_key(transactional_id)
    assert shared == transactional_id if found is None or found[1] >= 10**18 else shared == f"spark/{found[0]}"


class One:
    """A writer of one batch."""

    def __init__(self) -> None:
        self.coordinator = ReloadingCoordinator()

    def begin(self, name: str) -> ProducerRef:
        request = InitRequest(transactional_id=name, timeout_ms=1000)
        return ProducerRef(name, *self.coordinator.run(lambda shard: shard.init(request)))

    def write(self, ref: ProducerRef) -> None:
        partition = TopicPartition("t", PartitionIndex(0))
        self.coordinator.run(lambda shard: shard.add_partitions(ref, [partition], version=2))

    def prepare(self, ref: ProducerRef) -> None:
        self.coordinator.run(lambda shard: shard.batches.prepare(ref))

    def complete(self, batch: int, *refs: ProducerRef) -> bool:
        return self.coordinator.run(lambda shard: shard.batches.complete(QUERY, batch, refs))

    def states(self) -> dict[str, str]:
        return {name: transaction.state.value for name, transaction in self.coordinator.transactions.items()}


def test_a_prepared_transaction_has_no_timeout() -> None:
    one = One()
    ref = one.begin("spark/q/0/0/a")
    one.write(ref)
    one.prepare(ref)
    one.prepare(ref)
    one.coordinator.advance_ms(10_000_000)
    assert one.states() == {"spark/q/0/0/a": "Prepared"}
    with pytest.raises(InvalidTransactionState):
        one.write(ref)
    with pytest.raises(InvalidTransactionState):
        one.begin("spark/q/0/0/a")
    with pytest.raises(InvalidTransactionState):
        one.coordinator.run(lambda shard: shard.end(ref, commit=True, version=2))
    assert one.coordinator.run(lambda shard: shard.abort("spark/q/0/0/a")) == "Prepared"
    assert one.states() == {"spark/q/0/0/a": "PrepareAbort"}


def test_an_abandoned_run_starts_nothing_more() -> None:
    one = One()
    ref = one.begin("spark/q/0/0/first-a")
    one.write(ref)
    one.coordinator.run(lambda shard: shard.batches.abort(QUERY, 0, "first"))
    assert one.states() == {"spark/q/0/0/first-a": "PrepareAbort"}
    for late in ("spark/q/0/1/first-b", "spark/q/1/0/first-c"):
        with pytest.raises(ProducerFenced, match="was aborted"):
            one.begin(late)
    again = one.begin("spark/q/0/0/second-d")
    one.write(again)
    one.prepare(again)
    assert one.complete(0, again)
    with pytest.raises(ProducerFenced, match="was aborted"):
        one.begin("spark/q/1/0/first-e")


def test_an_unprepared_member_fails_the_whole_batch() -> None:
    one = One()
    first, second = one.begin("spark/q/0/0/a"), one.begin("spark/q/0/1/b")
    one.write(first)
    one.prepare(first)
    one.write(second)
    with pytest.raises(InvalidTransactionState):
        one.complete(0, first, second)
    assert one.states() == {"spark/q/0/0/a": "Prepared", "spark/q/0/1/b": "Ongoing"}
    one.prepare(second)
    with pytest.raises(ProducerFenced):
        one.complete(0, first, second._replace(epoch=5))
    with pytest.raises(InvalidProducerMapping):
        one.complete(0, first, second._replace(producer_id=ProducerId(5)))
    with pytest.raises(InvalidRequest):
        one.complete(1, first, second)
    assert one.complete(0, first, second)
    assert set(one.states().values()) == {"PrepareCommit"}
    assert not one.complete(0, first, second)


def test_losing_attempts_are_aborted_and_fenced() -> None:
    one = One()
    winner, loser, idle = one.begin("spark/q/2/0/a"), one.begin("spark/q/2/0/b"), one.begin("spark/q/1/0/c")
    later, other = one.begin("spark/q/3/0/d"), one.begin("spark/other/0/0/e")
    for ref in (winner, loser, later, other):
        one.write(ref)
        one.prepare(ref)
    assert one.complete(2, winner)
    assert one.states() == {
        "spark/q/2/0/a": "PrepareCommit",
        "spark/q/2/0/b": "PrepareAbort",
        "spark/q/3/0/d": "Prepared",
        "spark/other/0/0/e": "Prepared",
    }
    with pytest.raises(InvalidProducerMapping):
        one.write(idle)
    with pytest.raises(ProducerFenced):
        one.begin("spark/q/2/0/f")
    with pytest.raises(ProducerFenced):
        one.prepare(loser)


def test_a_batch_is_aborted_by_its_number() -> None:
    one = One()
    refs = [one.begin(f"spark/q/5/{part}/x") for part in range(2)]
    one.write(refs[0])
    one.prepare(refs[0])
    assert one.coordinator.run(lambda shard: shard.batches.abort(QUERY, 5)) == 2
    assert one.states() == {"spark/q/5/0/x": "PrepareAbort"}
    one.complete(6)
    with pytest.raises(InvalidTransactionState):
        one.coordinator.run(lambda shard: shard.batches.abort(QUERY, 6))
    with pytest.raises(InvalidRequest):
        one.prepare(one.begin("plain"))
