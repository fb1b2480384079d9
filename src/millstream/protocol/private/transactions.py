"""Transactions and batch commits as a client asks for them, over Kafka's own APIs and Millstream's private requests.

    async with Client.connect("127.0.0.1:9092") as client:
        transactions = Transactions(client)
        writer = await transactions.begin("spark/query/7/0/a1b2")
        await client.produce("orders", 0, batch, transactional_id=writer.transactional_id)
        await transactions.prepare(writer)
        await transactions.complete_batch("query", 7, [writer])

All requests are idempotent, so they are repeated if a response is lost.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from millstream.core.errors import ConcurrentTransactions, CoordinatorUnavailable, MillstreamError
from millstream.core.ids import NodeId, ProducerId
from millstream.protocol.messages.codec import build_request
from millstream.protocol.private.message import Request, Response, decode, encode, response_type
from millstream.protocol.wire.client import GROUP_COORDINATOR, Client
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.group_offsets import GroupMember


class BatchMember(Request[Response], frozen=True):
    """A transaction that is one part of a batch, by its producer; as a request, it prepares the transaction."""

    KEY: ClassVar = 32010
    transactional_id: str
    producer_id: int
    producer_epoch: int


class CompleteBatchResponse(Response, frozen=True, kw_only=True):
    """Whether this request committed the batch, or it was committed before."""

    done_now: bool = False


class CompleteBatchRequest(Request[CompleteBatchResponse], frozen=True):
    KEY: ClassVar = 32011
    query: str
    batch: int
    members: tuple[BatchMember, ...]


class AbortBatchResponse(Response, frozen=True, kw_only=True):
    """The number of aborted attempts."""

    aborted: int = 0


class AbortBatchRequest(Request[AbortBatchResponse], frozen=True):
    """A batch, and the run that may not start further attempts."""

    KEY: ClassVar = 32012
    query: str
    batch: int
    run: str = ""


class LastBatchResponse(Response, frozen=True, kw_only=True):
    """The last committed batch; -1 if there is none."""

    batch: int = -1


class LastBatchRequest(Request[LastBatchResponse], frozen=True):
    KEY: ClassVar = 32013
    query: str


class AbortTransactionResponse(Response, frozen=True, kw_only=True):
    """The state that the transaction was in."""

    state: str = ""


class AbortTransactionRequest(Request[AbortTransactionResponse], frozen=True):
    """A transactional id."""

    KEY: ClassVar = 32014
    transactional_id: str


TRANSACTION_COORDINATOR: Final = 1
TIMEOUT_MS: Final = 60_000

R = TypeVar("R", bound=Response)
T = TypeVar("T")

_ATTEMPT: Final = re.compile(r"spark/.+(?=/[0-9]{1,18}/[^/]+/[^/]+\Z)", re.DOTALL)
"""The prefix of the transactional ids of a query's attempts, which share one coordinator."""


class TransactionalProducer(NamedTuple):
    """A transactional id with its producer id and epoch."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int


class Transactions:
    """Sends requests to transaction coordinators."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def begin(self, transactional_id: str, *, timeout_ms: int = TIMEOUT_MS) -> TransactionalProducer:
        """Become the producer of a transactional id; the previous one is fenced."""
        timeout = timedelta(milliseconds=timeout_ms)
        request = build_request("init_producer_id", 5, transactional_id=transactional_id, transaction_timeout=timeout)

        async def attempt(node: NodeId) -> TransactionalProducer:
            response = await self._client.send(node, request)
            _check(response.error_code, f"producer of {transactional_id!r}")
            return TransactionalProducer(transactional_id, ProducerId(response.producer_id), response.producer_epoch)

        return await self._at_coordinator(transactional_id, attempt)

    async def end(self, producer: TransactionalProducer, *, commit: bool) -> TransactionalProducer:
        """Commit or abort; return the producer for the next transaction."""
        request = build_request("end_txn", 5, **_identity(producer), committed=commit)

        async def attempt(node: NodeId) -> TransactionalProducer:
            response = await self._client.send(node, request)
            _check(response.error_code, f"end of the transaction of {producer.transactional_id!r}")
            if response.producer_id < 0:
                return producer
            return producer._replace(producer_id=ProducerId(response.producer_id), epoch=response.producer_epoch)

        return await self._at_coordinator(producer.transactional_id, attempt)

    async def commit_offsets(
        self, producer: TransactionalProducer, group: str, offsets: Mapping[str, Mapping[int, int]], member: GroupMember
    ) -> None:
        """Make offsets of a group, by topic and partition, take effect when the transaction is committed."""
        topics = [
            {
                "name": topic,
                "partitions": [
                    {"partition_index": number, "committed_offset": offset, "committed_metadata": ""}
                    for number, offset in numbers.items()
                ],
            }
            for topic, numbers in offsets.items()
        ]
        request = build_request(
            "txn_offset_commit",
            5,
            **_identity(producer),
            group_id=group,
            generation_id=member.generation,
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            topics=topics,
        )

        async def attempt(node: NodeId) -> None:
            response = await self._client.send(node, request)
            for topic in response.topics:
                for partition in topic.partitions:
                    _check(
                        partition.error_code, f"offset of group {group!r} in {topic.name}-{partition.partition_index}"
                    )

        await self._client.call_coordinator(group, attempt, kind=GROUP_COORDINATOR)

    async def prepare(self, producer: TransactionalProducer) -> None:
        """Prepare one part of a batch, once it is written and acknowledged; from now on only the batch decides."""
        await self._request(producer.transactional_id, _member(producer))

    async def complete_batch(self, query: str, batch: int, members: Iterable[TransactionalProducer]) -> bool:
        """Commit all parts of a batch together; return False if the batch was committed before."""
        request = CompleteBatchRequest(query, batch, tuple(_member(member) for member in members))
        return (await self._request(_coordinator_key_of(query), request)).done_now

    async def abort_batch(self, query: str, batch: int, *, run: str = "") -> int:
        """Abort every attempt at a batch, and all that this run still starts; return how many there were."""
        request = AbortBatchRequest(query, batch, run)
        return (await self._request(_coordinator_key_of(query), request)).aborted

    async def last_batch(self, query: str) -> int:
        """Return the last committed batch of a query; -1 if there is none."""
        return (await self._request(_coordinator_key_of(query), LastBatchRequest(query))).batch

    async def abort(self, transactional_id: str) -> str:
        """Abort a transaction of another producer; return its previous state."""
        return (await self._request(transactional_id, AbortTransactionRequest(transactional_id))).state

    async def _request(self, transactional_id: str, request: Request[R]) -> R:
        async def attempt(node: NodeId) -> R:
            body = await self._client.private(node, request.KEY, encode(request))
            response = decode(body, response_type(request))
            _check(response.error, f"{transactional_id!r}", response.message)
            return response

        return await self._at_coordinator(transactional_id, attempt)

    async def _at_coordinator(self, transactional_id: str, attempt: Callable[[NodeId], Awaitable[T]]) -> T:
        place = coordinator_key(transactional_id)
        return await self._client.call_coordinator(transactional_id, attempt, kind=TRANSACTION_COORDINATOR, place=place)


def coordinator_key(transactional_id: str) -> str:
    """Return the part of a transactional id that selects its coordinator, if it is known here; otherwise all of it."""
    attempt = _ATTEMPT.match(transactional_id)
    return transactional_id if attempt is None else attempt[0]


def _coordinator_key_of(query: str) -> str:
    """Return a transactional id with the same coordinator as the query."""
    return f"spark/{query}/0/0/0"


def _identity(producer: TransactionalProducer) -> dict[str, Any]:
    return {
        "transactional_id": producer.transactional_id,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
    }


def _member(producer: TransactionalProducer) -> BatchMember:
    return BatchMember(producer.transactional_id, producer.producer_id, producer.epoch)


def _check(code: int, about: str, message: str | None = None) -> None:
    if not code:
        return
    error: MillstreamError = error_from_code(code, message, about=about)
    if isinstance(error, ConcurrentTransactions):
        # Transient, like every error that a coordinator asks to retry.
        raise CoordinatorUnavailable(str(error))
    raise error
