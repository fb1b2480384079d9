"""Hanging transactions: open on a partition, but unknown to any coordinator that would end them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from millstream.client.admin import transactions
from millstream.client.admin.transactions import DescribedTransaction, ListedTransaction, OpenTransaction
from millstream.core.errors import UnknownTransaction
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.wire.client import Client

NODE = NodeId(1)
FIRST, SECOND = (TopicPartition("t", PartitionIndex(index)) for index in range(2))


def opened(producer_id: int, where: TopicPartition = FIRST, *, start: int = 0) -> OpenTransaction:
    return OpenTransaction(
        where=where, leader=NODE, producer_id=producer_id, epoch=0, coordinator_epoch=-1, start_offset=start
    )


class Cluster:
    """Scripted responses of partitions and coordinators; partitions may change theirs between requests."""

    def __init__(self) -> None:
        self.open: list[list[OpenTransaction]] = []
        self.known: dict[str, tuple[int, str, tuple[TopicPartition, ...]]] = {}
        self.forgotten: set[str] = set()

    async def open_transactions(self, _client: Client, _topics: Iterable[str] | None = None) -> list[OpenTransaction]:
        return self.open.pop(0) if len(self.open) > 1 else self.open[0]

    async def list_transactions(self, _client: Client) -> list[ListedTransaction]:
        return [ListedTransaction(name, producer, state) for name, (producer, state, _) in self.known.items()]

    async def describe_transaction(self, _client: Client, name: str) -> DescribedTransaction:
        if name in self.forgotten:
            raise UnknownTransaction(name)
        producer, state, partitions = self.known[name]
        return DescribedTransaction(name, state, 1000, 0, producer, 0, partitions, NODE)

    async def hanging(self) -> list[OpenTransaction]:
        return await transactions.hanging_transactions(cast("Any", None))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    for name in ("open_transactions", "list_transactions", "describe_transaction"):
        monkeypatch.setattr(transactions, name, getattr(made, name))
    return made


async def test_without_open_transactions_none_hangs(cluster: Cluster) -> None:
    cluster.open = [[]]
    assert await cluster.hanging() == []


@pytest.mark.parametrize("state", ["Ongoing", "Prepared", "PrepareCommit", "PrepareAbort"])
async def test_a_transaction_that_its_coordinator_will_end_does_not_hang(cluster: Cluster, state: str) -> None:
    cluster.open = [[opened(7), opened(7, SECOND)]]
    cluster.known = {"a": (7, state, (FIRST, SECOND))}
    assert await cluster.hanging() == []
    cluster.known = {"a": (7, state, (FIRST,))}
    assert await cluster.hanging() == [opened(7, SECOND)]
    cluster.forgotten = {"a"}
    assert len(await cluster.hanging()) == 2


@pytest.mark.parametrize("state", ["Empty", "CompleteCommit", "CompleteAbort"])
async def test_a_transaction_that_its_coordinator_has_completed_hangs(cluster: Cluster, state: str) -> None:
    cluster.open = [[opened(7), opened(8)]]
    cluster.known = {"a": (7, state, ()), "b": (8, "Ongoing", (FIRST,))}
    assert await cluster.hanging() == [opened(7)]


async def test_a_transaction_unknown_to_coordinators_hangs(cluster: Cluster) -> None:
    cluster.open = [[opened(7)]]
    assert await cluster.hanging() == [opened(7)]


async def test_a_transaction_that_ends_between_the_requests_does_not_hang(cluster: Cluster) -> None:
    cluster.open = [[opened(7)], [opened(7, start=20)]]
    cluster.known = {"a": (7, "CompleteCommit", ())}
    assert await cluster.hanging() == []
