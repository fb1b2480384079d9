"""What is said of leased messages to the node that leads them: gathered while a request is under way, sent together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from millstream.core.errors import InvalidRecordState, MillstreamError, ProtocolViolation
from millstream.core.ids import NodeId
from millstream.protocol.private.subscription_messages import (
    SETTLE_KEY,
    PartitionSettles,
    SettleAnswer,
    SettledRange,
    SettleRequest,
)
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import TRANSIENT, error_from_code

_logger = logging.getLogger(__name__)

SETTLES_MAX: Final = 1000
"""How many messages one request is about."""
ELSEWHERE_S: Final = 5.0

Ask = Callable[[int, bytes], Awaitable[memoryview]]
"""Sends one of Millstream's own requests to this node."""


class _Settlement(NamedTuple):
    message: LeasedMessage
    settled: SettledRange
    done: asyncio.Future[bool]


class Settler:
    """Settles the messages that one worker holds."""

    def __init__(self, subscription: str, worker: str, ask: Ask, client: Client) -> None:
        self._subscription = subscription
        self._worker = worker
        self._ask = ask
        self._client = client
        self._pending: list[_Settlement] = []
        self._sending: asyncio.Task[None] | None = None
        self._moving: set[asyncio.Task[None]] = set()

    async def settle(self, message: LeasedMessage, verb: int, *, delay_ms: int | None = None, reason: str = "") -> bool:
        """Say something of a message; whether it holds, and durably."""
        offset = message.record.offset
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        settled = SettledRange(offset, offset + 1, verb, delay_ms, reason, message.attempt)
        self._pending.append(_Settlement(message, settled, done))
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send(), name=f"settle {self._subscription}")
        return await done

    async def _send(self) -> None:
        try:
            # What else is said in this turn of the loop goes along.
            await asyncio.sleep(0)
            while self._pending:
                settlements, self._pending = self._pending[:SETTLES_MAX], self._pending[SETTLES_MAX:]
                with _answering(settlements):
                    await self._send_some(settlements)
        finally:
            self._sending = None

    async def _send_some(self, settlements: list[_Settlement]) -> None:
        by_place: dict[tuple[str, int], list[_Settlement]] = {}
        for one in settlements:
            by_place.setdefault((one.message.topic, one.message.partition), []).append(one)
        parts = [
            PartitionSettles(topic, partition, [one.settled for one in ones])
            for (topic, partition), ones in by_place.items()
        ]
        try:
            answer = await self._request(self._ask, parts)
            results = answer.results
        except MillstreamError as error:
            _logger.debug("leases could not be settled here", extra={"error": str(error)})
            results = [[(-1, str(error))] * len(part.verbs) for part in parts]
        for place, outcomes in zip(by_place, results, strict=True):
            ones = by_place[place]
            moved = []
            for one, (code, text) in zip(ones, outcomes, strict=True):
                refused = error_from_code(code, text) if code else None
                if refused is None or isinstance(refused, InvalidRecordState):
                    _resolve(one, refused)
                else:
                    moved.append(one)
            if moved:
                # Aside, since a leader that is away keeps nobody else waiting.
                task = asyncio.get_running_loop().create_task(self._settle_elsewhere(*place, moved))
                self._moving.add(task)
                task.add_done_callback(self._moving.discard)

    async def _settle_elsewhere(self, topic: str, partition: int, settlements: list[_Settlement]) -> None:
        with _answering(settlements):
            await self._settle_at_leader(topic, partition, settlements)

    async def _settle_at_leader(self, topic: str, partition: int, settlements: list[_Settlement]) -> None:
        """The partition is led by another node now, which has the leases too."""
        part = PartitionSettles(topic, partition, [one.settled for one in settlements])

        async def attempt(leader: NodeId) -> SettleAnswer:
            async def ask(key: int, body: bytes) -> memoryview:
                return await self._client.private(leader, key, body)

            answer = await self._request(ask, [part])
            for code, text in answer.results[0]:
                refused = error_from_code(code, text) if code else None
                if isinstance(refused, TRANSIENT):
                    raise refused
            return answer

        try:
            async with asyncio.timeout(ELSEWHERE_S):
                answer = await self._client.call_leader(topic, partition, attempt)
        except (MillstreamError, TimeoutError) as error:
            for one in settlements:
                _resolve(one, error)
            return
        for one, (code, text) in zip(settlements, answer.results[0], strict=True):
            _resolve(one, error_from_code(code, text) if code else None)

    async def _request(self, ask: Ask, parts: list[PartitionSettles]) -> SettleAnswer:
        body = msgspec.msgpack.encode(SettleRequest(self._subscription, self._worker, parts))
        try:
            answer = msgspec.msgpack.decode(await ask(SETTLE_KEY, body), type=SettleAnswer)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"the broker's answer cannot be read: {error}") from error
        if answer.error:
            raise error_from_code(answer.error, answer.message)
        if [len(outcomes) for outcomes in answer.results] != [len(part.verbs) for part in parts]:
            raise ProtocolViolation("the broker's answer does not fit what was said")
        return answer


@contextmanager
def _answering(settlements: list[_Settlement]) -> Iterator[None]:
    """Whatever goes wrong meanwhile, everybody gets an answer, since each of them holds up a place for a request."""
    try:
        yield
    except Exception as error:
        _logger.exception("leases could not be settled")
        for one in settlements:
            _resolve(one, error)


def _resolve(settlements: _Settlement, error: Exception | None) -> None:
    if error is not None:
        _logger.debug(
            "a lease could not be settled",
            extra={
                "topic": settlements.message.topic,
                "partition": settlements.message.partition,
                "error": str(error) or type(error).__name__,
            },
        )
    if not settlements.done.done():
        settlements.done.set_result(error is None)
