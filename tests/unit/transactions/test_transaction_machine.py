"""Random histories of producers, timeouts, administrators and crashes against a simple model.

The coordinator is reloaded from its log after every step. Markers are written one by one, with crashes between them;
responses are lost, and clients retry. At the end every transaction has the same outcome on all of its partitions as for
its producer, and nothing is left open.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.transactions.records import transaction_record
from millstream.broker.transactions.transaction import (
    EPOCH_MAX,
    IDLE,
    InitRequest,
    InitResponse,
    ProducerRef,
    UnmarkedTransaction,
)
from millstream.core.errors import (
    ConcurrentTransactions,
    FencedProducer,
    InvalidProducerMapping,
    InvalidTransactionState,
    ProducerFenced,
    UnknownTransaction,
)
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream_testing.transaction_model import ModelPartition, ReloadingCoordinator

FENCED = (ProducerFenced, FencedProducer, InvalidProducerMapping)
PARTITIONS = [TopicPartition("t", PartitionIndex(index)) for index in range(3)]
NAMES = ("a", "b")


class Client:
    """One producer's own view."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.who: InitResponse | None = None
        self.transaction: int | None = None
        self.wants: bool | None = None
        """What it has asked for without knowing the response."""

    @property
    def ref(self) -> ProducerRef:
        assert self.who is not None
        return ProducerRef(self.name, *self.who)

    def fenced(self) -> None:
        self.who = self.transaction = self.wants = None


class Producers:
    """Producers that share transactional ids, and a coordinator that is reloaded after each step."""

    def __init__(self) -> None:
        self.coordinator = ReloadingCoordinator()
        self.partitions = {partition: ModelPartition() for partition in PARTITIONS}
        self.clients = [Client(name, version) for name in NAMES for version in (0, 2, 2)]
        self.numbers = 0
        self.touched: dict[int, set[TopicPartition]] = defaultdict(set)
        self.fates: dict[int, set[bool]] = {}
        """By transaction, how it may end; both where a response was lost and never came."""

    def init(self, index: int, *, goes_on: bool) -> None:
        client = self.clients[index]
        expected = (client.who.producer_id, client.who.epoch) if goes_on and client.who is not None else None
        request = InitRequest(transactional_id=client.name, timeout_ms=10_000, expected=expected)
        try:
            client.who = self.coordinator.run(lambda shard: shard.init(request))
        except ConcurrentTransactions:
            return
        except ProducerFenced:
            client.fenced()
            return
        client.transaction = client.wants = None

    def write(self, index: int, at: int) -> None:
        client = self.clients[index]
        if client.who is None or client.wants is not None:
            return
        partition = PARTITIONS[at]
        ref = client.ref
        number = self.numbers if client.transaction is None else client.transaction
        try:
            self.coordinator.run(lambda shard: shard.add_partitions(ref, [partition], version=client.version))
            responses = self.coordinator.run(lambda shard: shard.verify(ref, [partition]))
            assert responses == {partition: None}
            self.partitions[partition].append(ref.producer_id, ref.epoch, number)
        except ConcurrentTransactions:
            return
        except FENCED:
            client.fenced()
            return
        if client.transaction is None:
            client.transaction = number
            self.fates[number] = {False}
            self.numbers += 1
        self.touched[number].add(partition)

    def end(self, index: int, *, commit: bool, lost: bool) -> None:
        client = self.clients[index]
        if client.who is None or client.transaction is None:
            return
        commit = commit if client.wants is None else client.wants
        ref, number = client.ref, client.transaction
        if commit:
            # Until the response arrives it may have happened or not.
            self.fates[number].add(True)
        try:
            reported = self.coordinator.run(lambda shard: shard.end(ref, commit=commit, version=client.version))
        except ConcurrentTransactions:
            client.wants = commit
            return
        except (*FENCED, InvalidTransactionState):
            if client.wants is None:
                # Refused at the first attempt, so it certainly did not happen.
                self.fates[number] = {False}
            client.fenced()
            return
        if lost:
            client.wants = commit
            return
        self.fates[number] = {commit}
        client.transaction = client.wants = None
        if client.version == 2:
            client.who = reported

    def write_markers(self, at: int, *, finish: bool) -> None:
        endings = self.coordinator.run(lambda shard: shard.endings())
        if not endings:
            return
        ending = endings[at % len(endings)]
        for partition in sorted(ending.partitions, key=str)[: None if finish else at]:
            self.partitions[partition].end(ending)
        if finish:
            self.coordinator.run(lambda shard: shard.complete(ending))

    def wait(self, milliseconds: int) -> None:
        self.coordinator.advance_ms(milliseconds)

    def administrator_aborts(self, name: str) -> None:
        try:
            self.coordinator.run(lambda shard: shard.abort(name))
        except (UnknownTransaction, InvalidTransactionState):
            return

    def use_up_epochs(self, name: str) -> None:
        """A producer at the maximum epoch: its clients know, since they created it."""
        transaction = self.coordinator.transactions.get(name)
        if transaction is None or transaction.state not in IDLE or transaction.epoch >= EPOCH_MAX - 3:
            return
        jumped = replace(transaction, epoch=EPOCH_MAX - 3, last_epoch=-1)
        self.coordinator.run(lambda shard: ([transaction_record(jumped)], None))
        for client in self.clients:
            if client.name == name:
                client.fenced()

    def no_transaction_is_torn(self) -> None:
        for number, fates in self.fates.items():
            outcomes = {
                partition.outcomes[number] for partition in self.partitions.values() if number in partition.outcomes
            }
            assert len(outcomes) <= 1, f"transaction {number} is torn"
            assert outcomes <= fates, f"transaction {number} ended without a request"

    def drain(self) -> None:
        """Let everything end, and check the final state."""
        self.coordinator.advance_ms(20_000)
        while endings := self.coordinator.run(lambda shard: shard.endings()):
            for ending in endings:
                self._finish(ending)
        for number, fates in self.fates.items():
            for partition in self.touched[number]:
                assert number in self.partitions[partition].outcomes, f"transaction {number} hangs on {partition}"
                assert self.partitions[partition].outcomes[number] in fates
        assert not any(partition.undecided for partition in self.partitions.values())

    def _finish(self, ending: UnmarkedTransaction) -> None:
        for partition in ending.partitions:
            self.partitions[partition].end(ending)
        self.coordinator.run(lambda shard: shard.complete(ending))


def step(history: Producers, random: Random) -> None:
    kind = random.randrange(10)
    if kind < 2:
        history.init(random.randrange(6), goes_on=random.random() < 0.5)
    elif kind < 5:
        history.write(random.randrange(6), random.randrange(3))
    elif kind < 7:
        history.end(random.randrange(6), commit=random.random() < 0.5, lost=random.random() < 0.4)
    elif kind < 9:
        history.write_markers(random.randrange(3), finish=random.random() < 0.6)
    elif random.random() < 0.5:
        history.wait(random.choice([1, 5_000, 11_000]))
    else:
        happens = random.choice([history.administrator_aborts, history.use_up_epochs])
        happens(random.choice(NAMES))


@given(seed=st.integers(0, 2**32 - 1))
def test_no_transaction_is_torn_or_hangs(seed: int) -> None:
    random = Random(seed)
    history = Producers()
    for _ in range(60):
        step(history, random)
        history.no_transaction_is_torn()
    history.drain()
