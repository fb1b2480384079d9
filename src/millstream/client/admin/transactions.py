"""Operations on transactions, over Kafka's APIs and Millstream's private requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from millstream.core.errors import InvalidRequest, InvalidTransactionState, UnknownTopic, UnknownTransaction
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import build_request
from millstream.protocol.messages.primitives import Reader, Writer
from millstream.protocol.private.transactions import TRANSACTION_COORDINATOR, Transactions
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

_DESCRIBE_KEY = 65
_NOT_FOUND = 105
ONGOING, PREPARED = "Ongoing", "Prepared"
OPEN_STATES = frozenset({ONGOING, PREPARED, "PrepareCommit", "PrepareAbort"})
STATES = (
    "Empty",
    ONGOING,
    PREPARED,
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """A transactional id as one row."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class DescribedTransaction:
    """A transactional id as its coordinator describes it; `started_ms` is -1 if no transaction has started."""

    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int
    producer_id: int
    epoch: int
    partitions: tuple[TopicPartition, ...]
    coordinator: NodeId

    def described(self) -> dict[str, Any]:
        started_ms = None if self.started_ms < 0 else self.started_ms
        partitions = [(partition.topic, partition.partition) for partition in self.partitions]
        return {**asdict(self), "started_ms": started_ms, "partitions": partitions}


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open on a partition, as the partition knows it."""

    where: TopicPartition
    leader: NodeId
    producer_id: int
    epoch: int
    coordinator_epoch: int
    start_offset: int

    def described(self) -> dict[str, Any]:
        return {
            "topic": self.where.topic,
            "partition": self.where.partition,
            "producer_id": self.producer_id,
            "epoch": self.epoch,
            "start_offset": self.start_offset,
        }


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    """An idempotent or transactional producer that has written to a partition lately."""

    where: TopicPartition
    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    """When it last wrote, by the timestamps of its records; -1 if that is not known."""
    in_transaction: bool


async def list_transactions(
    client: Client, *, states: Iterable[str] = (), longer_than_ms: int = -1, matching: str | None = None
) -> list[ListedTransaction]:
    """List the transactional ids of every node, optionally those that a regular expression matches in full.

    Raises `InvalidRequest` for an unknown state.
    """
    filters = {"duration_filter": longer_than_ms, "transactional_id_pattern": matching}
    request = build_request("list_transactions", 2, state_filters=states, **filters)
    transactions: list[ListedTransaction] = []
    for node in (await client.metadata([])).nodes:
        response = await client.send(node, request)
        if response.error_code:
            raise error_from_code(response.error_code, None, about="the list of transactions")
        if response.unknown_state_filters:
            raise InvalidRequest(
                f"there is no state {response.unknown_state_filters[0]!r}; "
                f"a transaction is in one of {', '.join(STATES)}"
            )
        transactions += [
            ListedTransaction(
                transaction_state.transactional_id, transaction_state.producer_id, transaction_state.transaction_state
            )
            for transaction_state in response.transaction_states
        ]
    return sorted(transactions, key=lambda transaction: transaction.transactional_id)


async def describe_transaction(client: Client, transactional_id: str) -> DescribedTransaction:
    async def attempt(node: NodeId) -> DescribedTransaction:
        body = Writer(flexible=True)
        body.array_length(1)
        body.string(transactional_id)
        body.no_tags()
        return _read_described(await client.private(node, _DESCRIBE_KEY, bytes(body.buffer)), node)

    return await client.call_coordinator(transactional_id, attempt, kind=TRANSACTION_COORDINATOR)


def _read_described(body: memoryview, node: NodeId) -> DescribedTransaction:
    # Parsed by hand: an unknown start is -1, for which kio's time type has no value.
    reader = Reader(body)
    reader.int32()
    reader.array_length()
    code, transactional_id, state = reader.int16(), reader.string(), reader.string()
    if code == _NOT_FOUND:
        raise UnknownTransaction(
            f"transactional id {transactional_id!r} does not exist; `millstream transaction list` and GET "
            "/v1/transactions list those that do"
        )
    if code:
        raise error_from_code(code, None, about=f"transactional id {transactional_id!r}")
    timeout_ms, started_ms, producer_id, epoch = reader.int32(), reader.int64(), reader.int64(), reader.int16()
    partitions: list[TopicPartition] = []
    for _ in range(reader.array_length()):
        topic = reader.string()
        partitions += [TopicPartition(topic, PartitionIndex(index)) for index in reader.int32_array()]
        reader.skip_tags()
    return DescribedTransaction(
        transactional_id, state, timeout_ms, started_ms, producer_id, epoch, tuple(partitions), node
    )


async def abort_transaction(client: Client, transactional_id: str) -> str:
    """Abort a transaction that its coordinator knows; return its previous state."""
    return await Transactions(client).abort(transactional_id)


async def open_transactions(client: Client, topics: Iterable[str] | None = None) -> list[OpenTransaction]:
    producers = await _producers(client, topics)
    return [_opened(*producer) for producer in producers if producer[2].current_txn_start_offset >= 0]


async def active_producers(client: Client, topic: str) -> list[ActiveProducer]:
    """Return the producers that the partitions of a topic know, the latest first."""
    producers = [
        ActiveProducer(
            where=where,
            producer_id=producer.producer_id,
            epoch=producer.producer_epoch,
            last_sequence=producer.last_sequence,
            last_timestamp_ms=producer.last_timestamp,
            in_transaction=producer.current_txn_start_offset >= 0,
        )
        for where, _leader, producer in await _producers(client, [topic])
    ]
    return sorted(producers, key=lambda producer: -producer.last_timestamp_ms)


async def _producers(client: Client, topics: Iterable[str] | None) -> list[tuple[TopicPartition, NodeId, Any]]:
    by_leader: dict[NodeId, dict[str, list[int]]] = {}
    for name, topic in (await client.metadata(topics)).topics.items():
        for index, partition in topic.partitions.items():
            if partition.leader_id >= 0:
                by_leader.setdefault(partition.leader_id, {}).setdefault(name, []).append(index)
    producers: list[tuple[TopicPartition, NodeId, Any]] = []
    for leader, led in by_leader.items():
        topic_requests = [{"name": name, "partition_indexes": indexes} for name, indexes in led.items()]
        for topic in (await client.send(leader, build_request("describe_producers", 0, topics=topic_requests))).topics:
            for response in topic.partitions:
                where = TopicPartition(topic.name, PartitionIndex(response.partition_index))
                if response.error_code:
                    raise error_from_code(
                        response.error_code, response.error_message, about=f"the producers of {where}"
                    )
                producers += [(where, leader, producer) for producer in response.active_producers]
    return producers


def _opened(where: TopicPartition, leader: NodeId, producer: Any) -> OpenTransaction:
    return OpenTransaction(
        where=where,
        leader=leader,
        producer_id=producer.producer_id,
        epoch=producer.producer_epoch,
        coordinator_epoch=producer.coordinator_epoch,
        start_offset=producer.current_txn_start_offset,
    )


async def hanging_transactions(client: Client) -> list[OpenTransaction]:
    """Return transactions that are open on a partition although no coordinator will end them.

    Partitions are asked before and after the coordinators, so that transactions that start or end meanwhile are left
    out.
    """
    before = set(await open_transactions(client))
    if not before:
        return []
    known = {
        transaction.producer_id: transaction
        for transaction in await list_transactions(client)
        if transaction.state in OPEN_STATES
    }
    held: dict[str, frozenset[TopicPartition]] = {}
    for producer_id in {transaction.producer_id for transaction in before} & known.keys():
        name = known[producer_id].transactional_id
        held[name] = await _partitions_of(client, name)
    hanging = {
        transaction
        for transaction in before
        if (of := known.get(transaction.producer_id)) is None or transaction.where not in held[of.transactional_id]
    }
    if not hanging:
        return []
    still_open = await open_transactions(client, {transaction.where.topic for transaction in hanging})
    return [transaction for transaction in still_open if transaction in hanging]


async def _check_exists(client: Client, where: TopicPartition) -> None:
    topic = (await client.metadata([where.topic])).topics.get(where.topic)
    if topic is None or where.partition not in topic.partitions:
        raise UnknownTopic(f"there is no partition {where}")


async def _partitions_of(client: Client, transactional_id: str) -> frozenset[TopicPartition]:
    try:
        return frozenset((await describe_transaction(client, transactional_id)).partitions)
    except UnknownTransaction:
        return frozenset()


async def abort_on_partition(
    client: Client, where: TopicPartition, producer_id: int, *, force: bool = False
) -> OpenTransaction:
    """Write the marker that no coordinator will write.

    Without `force`, refuse if a coordinator knows the transaction: ending it on one partition alone would break it.
    """
    opened = [
        transaction for transaction in await open_transactions(client, [where.topic]) if transaction.where == where
    ]
    transaction = next(
        (open_transaction for open_transaction in opened if open_transaction.producer_id == producer_id), None
    )
    if transaction is None:
        await _check_exists(client, where)
        raise InvalidTransactionState(f"producer {producer_id} has no open transaction on {where}")
    if not force and transaction not in await hanging_transactions(client):
        known = next((listed for listed in await list_transactions(client) if listed.producer_id == producer_id), None)
        named = "its transactional id" if known is None else repr(known.transactional_id)
        raise InvalidTransactionState(
            f"the transaction of producer {producer_id} on {where} is not hanging: its coordinator knows it, and "
            f"ending it on one partition would break its atomicity; abort all of it with "
            f"`millstream transaction abort {named}`"
        )
    marker = {
        "producer_id": producer_id,
        "producer_epoch": transaction.epoch,
        "transaction_result": False,
        "topics": [{"name": where.topic, "partition_indexes": [where.partition]}],
        "coordinator_epoch": max(transaction.coordinator_epoch, 0),
    }
    response = await client.send(transaction.leader, build_request("write_txn_markers", 1, markers=[marker]))
    code = response.markers[0].topics[0].partitions[0].error_code
    if code:
        raise error_from_code(code, None, about=f"the marker for {where}")
    return transaction
