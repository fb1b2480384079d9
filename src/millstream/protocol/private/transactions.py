"""Transactions and batch commits as a client asks for them, over Kafka's own APIs and Millstream's private requests.

    async with Client.connect("127.0.0.1:9092") as client:
        transactions = Transactions(client)
        writer = await transactions.begin("spark/query/7/0/a1b2")
        await client.produce("orders", 0, batch, transactional_id=writer.transactional_id)
        await transactions.prepare(writer)
        await transactions.complete_batch("query", 7, [writer])

Everything here may be repeated, so answers that were lost are asked for again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from millstream.core.errors import ConcurrentTransactions, CoordinatorUnavailable, MillstreamError, ProtocolViolation
from millstream.core.ids import NodeId, ProducerId
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

GROUP_COORDINATOR: Final = 0
TRANSACTION_COORDINATOR: Final = 1
PREPARE_KEY: Final = 32010
COMPLETE_BATCH_KEY: Final = 32011
ABORT_BATCH_KEY: Final = 32012
LAST_BATCH_KEY: Final = 32013
ABORT_KEY: Final = 32014
TIMEOUT_MS: Final = 60_000


class TransactionalProducer(NamedTuple):
    """A transactional id, and the producer id and epoch that it has."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int


class GroupMember(NamedTuple):
    """Who commits offsets of a group: one of its members, or nobody, whom only a group without members lets do so."""

    member_id: str = ""
    generation: int = -1
    instance_id: str | None = None


class Transactions:
    """Speaks to the coordinators of transactions."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def begin(self, transactional_id: str, *, timeout_ms: int = TIMEOUT_MS) -> TransactionalProducer:
        """Become the producer of a transactional id; whoever had it before is fenced."""
        from kio.schema.init_producer_id.v5 import request

        messages: Any = request
        asked = messages.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout=timedelta(milliseconds=timeout_ms)
        )

        async def attempt(node: NodeId) -> TransactionalProducer:
            answer = await self._client.send(node, asked)
            _check(answer.error_code, f"producer of {transactional_id!r}")
            return TransactionalProducer(transactional_id, ProducerId(answer.producer_id), answer.producer_epoch)

        return await self._client.call_coordinator(transactional_id, attempt, kind=TRANSACTION_COORDINATOR)

    async def end(self, producer: TransactionalProducer, *, commit: bool) -> TransactionalProducer:
        """Commit or abort; the producer for the next transaction comes back."""
        from kio.schema.end_txn.v5 import request

        messages: Any = request
        asked = messages.EndTxnRequest(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            committed=commit,
        )

        async def attempt(node: NodeId) -> TransactionalProducer:
            answer = await self._client.send(node, asked)
            _check(answer.error_code, f"end of the transaction of {producer.transactional_id!r}")
            if answer.producer_id < 0:
                return producer
            return producer._replace(producer_id=ProducerId(answer.producer_id), epoch=answer.producer_epoch)

        return await self._client.call_coordinator(producer.transactional_id, attempt, kind=TRANSACTION_COORDINATOR)

    async def commit_offsets(
        self, producer: TransactionalProducer, group: str, offsets: Mapping[str, Mapping[int, int]], member: GroupMember
    ) -> None:
        """Have offsets of a group, by topic and partition, count when the transaction is committed."""
        from kio.schema.txn_offset_commit.v5 import request

        messages: Any = request
        asked = messages.TxnOffsetCommitRequest(
            transactional_id=producer.transactional_id,
            group_id=group,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            generation_id=member.generation,
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            topics=tuple(
                messages.TxnOffsetCommitRequestTopic(
                    name=topic,
                    partitions=tuple(
                        messages.TxnOffsetCommitRequestPartition(
                            partition_index=number, committed_offset=offset, committed_metadata=""
                        )
                        for number, offset in numbers.items()
                    ),
                )
                for topic, numbers in offsets.items()
            ),
        )

        async def attempt(node: NodeId) -> None:
            answer = await self._client.send(node, asked)
            for topic in answer.topics:
                for one in topic.partitions:
                    _check(one.error_code, f"offset of group {group!r} in {topic.name}-{one.partition_index}")

        await self._client.call_coordinator(group, attempt, kind=GROUP_COORDINATOR)

    async def prepare(self, producer: TransactionalProducer) -> None:
        """Everything of one part of a batch is written and acknowledged; only the batch decides from here on."""
        await self._ask(producer.transactional_id, PREPARE_KEY, _member(producer))

    async def complete_batch(self, query: str, batch: int, members: Iterable[TransactionalProducer]) -> bool:
        """Commit all parts of a batch together; False if the batch was committed before."""
        body = {"query": query, "batch": batch, "members": [_member(member) for member in members]}
        return bool((await self._ask(_place_of(query), COMPLETE_BATCH_KEY, body))["done_now"])

    async def abort_batch(self, query: str, batch: int, *, run: str = "") -> int:
        """Abort every attempt at a batch, and all that this run still begins; says how many there were."""
        body = {"query": query, "batch": batch, "run": run}
        return int((await self._ask(_place_of(query), ABORT_BATCH_KEY, body))["aborted"])

    async def last_batch(self, query: str) -> int:
        """The last batch of a query that was committed; -1 if none was."""
        return int((await self._ask(_place_of(query), LAST_BATCH_KEY, {"query": query}))["batch"])

    async def abort(self, transactional_id: str) -> str:
        """End a transaction of somebody else; says in which state it was."""
        answer = await self._ask(transactional_id, ABORT_KEY, {"transactional_id": transactional_id})
        return str(answer["state"])

    async def _ask(self, transactional_id: str, api_key: int, body: dict[str, Any]) -> dict[str, Any]:
        async def attempt(node: NodeId) -> dict[str, Any]:
            content = await self._client.private(node, api_key, json.dumps(body).encode())
            answer = _document(content)
            _check(answer["error"], f"{transactional_id!r}", answer.get("message"))
            return answer

        return await self._client.call_coordinator(transactional_id, attempt, kind=TRANSACTION_COORDINATOR)


def _place_of(query: str) -> str:
    """A transactional id whose coordinator is that of the query."""
    return f"spark/{query}/0/0/0"


def _member(producer: TransactionalProducer) -> dict[str, Any]:
    return {
        "transactional_id": producer.transactional_id,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
    }


def _document(content: memoryview) -> dict[str, Any]:
    try:
        answer = json.loads(bytes(content))
    except ValueError as error:
        raise ProtocolViolation(f"the answer is no JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("error"), int):
        raise ProtocolViolation("the answer does not say how the request went")
    return answer


def _check(code: int, about: str, message: str | None = None) -> None:
    if not code:
        return
    error: MillstreamError = error_from_code(code, message, about=about)
    if isinstance(error, ConcurrentTransactions):
        # It passes by itself, as all that a coordinator asks to be tried again.
        raise CoordinatorUnavailable(str(error))
    raise error
