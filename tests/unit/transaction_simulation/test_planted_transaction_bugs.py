"""Plausible bugs planted into transactions are found by the simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from millstream.broker.coordination.shard import Shard
from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.groups.transactional_offsets import PendingOffsets
from millstream.broker.log.producers import Producers
from millstream.broker.log.transactions import NO_TRANSACTION, Guard, PackedTransactions, ProducedBatch
from millstream.broker.transactions.marker_sender import MarkedShard, MarkerSender, MarkerWriter
from millstream.broker.transactions.records import transaction_record
from millstream.broker.transactions.shard import Batches, TransactionShard
from millstream.broker.transactions.transaction import Transaction, TransactionState, UnmarkedTransaction
from millstream.core.ids import Offset
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import BatchHeader
from millstream.protocol.records.control import Marker
from millstream_testing.planted_bug import PlantedBug
from millstream_testing.transaction_simulation.world import simulate_transactions

SEEDS_MAX = 60


_write_all = MarkerSender._write_all


async def _ask_each_partition_once(self: MarkerSender, shard: MarkedShard, ending: UnmarkedTransaction) -> bool:
    sender = MarkerSender(self._shards, _Satisfied(self._writer), self._random)
    return await _write_all(sender, shard, ending)


class _Satisfied:
    """Treats every response as a success."""

    def __init__(self, writer: MarkerWriter) -> None:
        self._writer = writer

    async def write(self, marker: Marker, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, None]:
        partitions = list(partitions)
        await self._writer.write(marker, partitions)
        return dict.fromkeys(partitions)


async def _do_not_wait_for_the_decision(self: MarkerSender, shard: MarkedShard) -> None:
    try:
        known = [transactional_id for owner, transactional_id in self._in_flight if owner is shard]
        endings: Any = [] if shard.state is None else shard.state.endings(known)[1]
        for ending in endings:
            self._in_flight.add((shard, ending.transactional_id))
            self._start(self._finish(shard, ending), name="end")
    finally:
        self._collecting.discard(shard)


_loaded = TransactionShard.loaded


def _take_what_is_decided_for_done(self: TransactionShard) -> None:
    for transactional_id in self._ending:
        self._transactions[transactional_id] = self._transactions[transactional_id].complete(now_ms=0)
    self._ending.clear()
    _loaded(self)


_unpack = Producers.unpack_transactions


def _forget_what_was_open(self: Producers, packed: PackedTransactions) -> None:
    _unpack(self, packed)
    for known in self:
        known.open_from = NO_TRANSACTION
    self.transactions.open.clear()


_check = Producers.check


def _take_older_epochs(self: Producers, header: BatchHeader, now_ms: int) -> ProducedBatch | None:
    known = self.get(header.producer_id)
    return None if known is not None and header.producer_epoch < known.epoch else _check(self, header, now_ms)


def _take_late_markers(self: Producers, marker: Marker) -> Marker | None:
    known = self.get(marker.producer_id)
    return marker if known is None or known.open_from != NO_TRANSACTION else None


def _abort_without_a_new_epoch(self: TransactionShard, transaction: Transaction, _: str) -> Transaction:
    return transaction.ending(commit=False, version=0, now_ms=self._clock.now_ms())


def _time_out_all(self: TransactionShard, transactional_id: str) -> list[StateRecord]:
    transaction = self._transactions.get(transactional_id)
    if transaction is None or transaction.deadline_ms is None:
        return []
    return [transaction_record(self.aborted(transaction, "its time is up"))]


def _deadline_of_all(self: Transaction) -> int | None:
    has_one = self.state in (TransactionState.ONGOING, TransactionState.PREPARED)
    return self.started_ms + self.timeout_ms if has_one else None


_release = Shard._release_responses


def _respond_at_once(self: Shard[Any], needed: Offset) -> None:
    _release(self, Offset(0))


_ended_by = PendingOffsets.records_for_marker


def _keep_offsets_of_the_aborted(self: PendingOffsets, marker: Marker, *, now_ms: int) -> list[StateRecord]:
    return _ended_by(self, replace(marker, commit=True), now_ms=now_ms)


def _no_guard(self: Producers, header: BatchHeader, guard: Guard | None) -> None:
    """Assume that the response of the coordinator is enough, whatever has happened since."""


BUGS = (
    PlantedBug(
        "a transaction is complete before all of its markers are written",
        ((MarkerSender, "_write_all", _ask_each_partition_once),),
        ("kill", "isolate"),
    ),
    PlantedBug(
        "markers are written before the decision is durable",
        ((MarkerSender, "_collect", _do_not_wait_for_the_decision),),
        ("isolate", "cut"),
    ),
    PlantedBug(
        "a commit is acknowledged before it is durable",
        ((Shard, "_release_responses", _respond_at_once),),
        ("kill", "isolate"),
    ),
    PlantedBug(
        "the next coordinator believes that decided transactions are complete",
        ((TransactionShard, "loaded", _take_what_is_decided_for_done),),
        ("kill", "isolate"),
    ),
    PlantedBug(
        "after a restart the last stable offset ignores what is open",
        ((Producers, "unpack_transactions", _forget_what_was_open),),
        ("restart",),
    ),
    PlantedBug(
        "a batch of an epoch that is over is taken",
        (
            (Producers, "check", _take_older_epochs),
            (Producers, "check_epoch", lambda self, producer_id, epoch: None),
            (Producers, "_check_guard", _no_guard),
        ),
        ("lateness", "duplicates"),
    ),
    PlantedBug(
        "a marker that comes late ends the next transaction",
        ((Producers, "check_marker", _take_late_markers),),
        ("lateness", "duplicates"),
    ),
    PlantedBug(
        "the coordinator aborts without a new epoch",
        ((TransactionShard, "aborted", _abort_without_a_new_epoch),),
        ("kill", "duplicates"),
    ),
    PlantedBug(
        "other attempts at a batch are not ended with it",
        ((Batches, "_abort_superseded", lambda self, query, batch, except_ids=(): []),),
        ("kill",),
    ),
    PlantedBug(
        "what is prepared is aborted after its timeout",
        (
            (Transaction, "deadline_ms", property(_deadline_of_all)),
            (TransactionShard, "_time_out", _time_out_all),
        ),
        ("kill",),
    ),
    PlantedBug(
        "offsets of an aborted transaction count",
        ((PendingOffsets, "records_for_marker", _keep_offsets_of_the_aborted),),
        ("kill",),
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_transactions_replaces_code_that_exists(bug: PlantedBug) -> None:
    with bug.planted():
        pass


@pytest.mark.trial
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_transactions_is_found(bug: PlantedBug) -> None:
    with bug.planted():
        failing_seed = next(
            (seed for seed in range(SEEDS_MAX) if simulate_transactions(seed, faults=bug.faults).failure), None
        )
    assert failing_seed is not None
    assert simulate_transactions(failing_seed, faults=bug.faults).failure is None
