"""Transactions: list, describe, abort, and hanging ones."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.transactions import (
    ListedTransaction,
    abort_on_partition,
    abort_transaction,
    describe_transaction,
    hanging_transactions,
    list_transactions,
)
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services


class Transactions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The transactions to list."""

    state: Annotated[list[str], Meta(max_length=20, description="List only transactions in these states.")] = []
    longer_than_ms: Annotated[
        Annotated[int, Meta(ge=0, le=2**62)] | None,
        Meta(description="List only transactions that have run longer than this."),
    ] = None


class TransactionList(msgspec.Struct, frozen=True):
    """Transactional ids."""

    transactions: list[ListedTransaction]


class TransactionDescription(msgspec.Struct, frozen=True):
    """A transactional id as its coordinator knows it."""

    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int | None
    producer_id: int
    epoch: int
    partitions: list[tuple[str, int]]
    coordinator: int


class Aborted(msgspec.Struct, frozen=True):
    """An aborted transaction and the state it was in."""

    transactional_id: str
    state: str


class HangingTransaction(msgspec.Struct, frozen=True):
    """A transaction that is open on a partition and that no coordinator will end."""

    topic: str
    partition: int
    producer_id: int
    epoch: int
    start_offset: int


class HangingList(msgspec.Struct, frozen=True):
    """Hanging transactions."""

    transactions: list[HangingTransaction]


class AbortHanging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The transaction to abort on one partition; `force` aborts it there even if a coordinator knows it, which breaks
    its atomicity.
    """

    topic: Annotated[str, Meta(min_length=1, max_length=249)]
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    producer_id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    force: bool = False


async def list_all(services: Services, request: Request[Transactions, NoFields]) -> TransactionList:
    longer = -1 if request.query.longer_than_ms is None else request.query.longer_than_ms
    transactions = await list_transactions(services.client, states=request.query.state, longer_than_ms=longer)
    return TransactionList(transactions)


async def describe(services: Services, request: Request[NoFields, NoFields]) -> TransactionDescription:
    transaction = await describe_transaction(services.client, request.path["transaction"])
    return msgspec.convert(transaction.described(), TransactionDescription)


async def abort(services: Services, request: Request[NoFields, NoFields]) -> Aborted:
    name = request.path["transaction"]
    return Aborted(name, await abort_transaction(services.client, name))


async def list_hanging(services: Services, request: Request[NoFields, NoFields]) -> HangingList:
    transactions = await hanging_transactions(services.client)
    return msgspec.convert({"transactions": [transaction.described() for transaction in transactions]}, HangingList)


async def abort_hanging(services: Services, request: Request[NoFields, AbortHanging]) -> HangingTransaction:
    body = request.body
    where = TopicPartition(body.topic, PartitionIndex(body.partition))
    aborted = await abort_on_partition(services.client, where, body.producer_id, force=body.force)
    return msgspec.convert(aborted.described(), HangingTransaction)


ROUTES: Final = (
    Route("GET", "/transactions", "List transactional ids", list_all, TransactionList, query=Transactions),
    Route("GET", "/transactions/{transaction}", "Describe a transactional id", describe, TransactionDescription),
    Route("POST", "/transactions/{transaction}/abort", "Abort a transaction", abort, Aborted),
    Route("GET", "/hanging-transactions", "List hanging transactions", list_hanging, HangingList, tag="transactions"),
    Route(
        "POST",
        "/hanging-transactions",
        "Abort a hanging transaction",
        abort_hanging,
        HangingTransaction,
        body=AbortHanging,
        tag="transactions",
    ),
)
