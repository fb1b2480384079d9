"""Leases messages of a subscription, from whichever nodes lead its partitions, and gives back what nobody got.

A node answers when it has messages, so all nodes are asked at once while a client waits, each on a connection of its
own. When one has answered, the others are hung up on, which they take as that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

import msgspec

from millstream.http.message import message_bytes
from millstream.http.unpacking import Unpacking, leased_stubs
from millstream.model.errors import MillstreamError, NotFound, ProtocolViolation, QuotaExceeded, RequestTimedOut
from millstream.model.ids import NodeId
from millstream.model.verb import Verb
from millstream.wire.client import Client
from millstream.wire.codec import response_body_at
from millstream.wire.refusal import TRANSIENT, refusal
from millstream.wire.subscription_messages import RECEIVE_KEY, Receive, ReceiveAnswer
from millstream.wire.subscriptions import LeasedMessage, SubscriptionClient

_logger = logging.getLogger(__name__)

NODES_S: Final = 1.0
"""For how long it is not asked again which nodes there are."""

PAUSE_S: Final = 0.1
ANSWER_S: Final = 15.0
GIVE_BACK_S: Final = 5.0
HUNG_S: Final = 10.0
"""For how long a node that did not answer in time is not asked before the others have been."""
_PASSING: Final = (*TRANSIENT, RequestTimedOut)

_decoder = msgspec.msgpack.Decoder(ReceiveAnswer)
_encode = msgspec.msgpack.Encoder().encode


class Leasing:
    """Asks the nodes of one cluster for messages."""

    def __init__(self, client: Client, unpacking: Unpacking) -> None:
        self._client = client
        self._unpacking = unpacking
        self._subscriptions = SubscriptionClient(client)
        self._nodes: list[NodeId] = []
        self._known_until = 0.0
        self._hung_until: dict[NodeId, float] = {}
        self._turn = 0

    async def receive(self, request: Receive) -> list[LeasedMessage]:
        """Lease messages, and wait for some if there are none now."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ms / 1000
        nodes = await self._all_nodes()
        messages: list[LeasedMessage] = []
        held_back: list[QuotaExceeded] = []
        if len(nodes) > 1 or not request.wait_ms:
            messages = await self._at_once(nodes, msgspec.structs.replace(request, wait_ms=0), held_back)
        while not messages and (left_s := deadline - loop.time()) > 0:
            asked_at = loop.time()
            waiting = msgspec.structs.replace(request, wait_ms=int(left_s * 1000) + 1)
            held_back.clear()
            messages = await self._first(await self._all_nodes(), waiting, held_back)
            if not messages and loop.time() - asked_at < PAUSE_S:
                # Leaders move: nodes answer at once that they have nothing.
                self._nodes = []
                await asyncio.sleep(min(PAUSE_S, left_s))
        if held_back and not messages:
            raise held_back[0]
        return messages

    async def give_back(self, subscription: str, worker: str, messages: Sequence[LeasedMessage]) -> None:
        """Return what never got to the one it was leased for: that does not count as delivered.

        What cannot be given back comes back by itself.
        """
        if messages:
            with suppress(MillstreamError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._subscriptions.settle(subscription, worker, messages, Verb.RETURN, delay_ms=0)

    async def _at_once(
        self, nodes: Sequence[NodeId], request: Receive, held_back: list[QuotaExceeded]
    ) -> list[LeasedMessage]:
        """One node after the other, since all of them together give no more than was asked for."""
        messages: list[LeasedMessage] = []
        failed: list[MillstreamError] = []
        asked = self._in_turn(nodes)
        is_wanted = False
        try:
            for node in asked:
                taken = sum(message_bytes(one.record) for one in messages)
                left, left_bytes = request.max_records - len(messages), request.max_bytes - taken
                if left <= 0 or left_bytes <= 0:
                    break
                rest = msgspec.structs.replace(request, max_records=left, max_bytes=left_bytes)
                try:
                    messages += await self._from(node, rest)
                except QuotaExceeded as error:
                    held_back.append(error)
                except _PASSING as error:
                    failed.append(error)
            is_wanted = True
        finally:
            if not is_wanted:
                # Nobody gets what the first nodes have leased, since the client is gone or another node refuses.
                await self.give_back(request.subscription, request.worker, messages)
        if len(failed) == len(asked):
            self._nodes = []
            raise failed[0]
        return messages

    def _in_turn(self, nodes: Sequence[NodeId]) -> list[NodeId]:
        """Each time beginning with another one, without those that hang, unless all do."""
        now = asyncio.get_running_loop().time()
        self._hung_until = {node: until for node, until in self._hung_until.items() if now < until}
        self._turn += 1
        first = self._turn % len(nodes)
        turned = [*nodes[first:], *nodes[:first]]
        return [node for node in turned if node not in self._hung_until] or turned

    async def _first(
        self, nodes: Sequence[NodeId], request: Receive, held_back: list[QuotaExceeded]
    ) -> list[LeasedMessage]:
        """All nodes at once, until one has something; nothing when none has."""
        asking = [asyncio.ensure_future(self._from(node, request)) for node in nodes]
        wanted = 0
        messages: list[LeasedMessage] = []
        try:
            for answered in asyncio.as_completed(asking):
                try:
                    if await answered:
                        break
                except QuotaExceeded as error:
                    held_back.append(error)
                except _PASSING:
                    continue
            wanted = request.max_records
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            told = [task.result() for task in asking if not task.cancelled() and task.exception() is None]
            messages += chain.from_iterable(told)
            # More than was asked for, or all of it when nobody asks any more.
            await self.give_back(request.subscription, request.worker, messages[wanted:])
        return messages[:wanted]

    async def _from(self, node: NodeId, request: Receive) -> list[LeasedMessage]:
        pool = await self._client.pool_of(node)
        async with pool.borrowed() as channel:
            timeout_s = ANSWER_S + request.wait_ms / 1000
            try:
                frame = await channel.exchange(RECEIVE_KEY, 0, [_encode(request)], timeout_s=timeout_s)
            except RequestTimedOut:
                self._hung_until[node] = asyncio.get_running_loop().time() + HUNG_S
                raise
        try:
            answer = _decoder.decode(frame[response_body_at(RECEIVE_KEY, 0, frame) :])
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"the broker's answer cannot be read: {error}") from error
        if answer.error:
            raise _refused(answer, request.subscription)
        if (held_back := answer.held_back) is not None:
            raise held_back
        return await self._unpack(node, request, answer)

    async def _unpack(self, node: NodeId, request: Receive, answer: ReceiveAnswer) -> list[LeasedMessage]:
        """Read what was leased, up to the bytes asked for; return the rest, and release what cannot be read."""
        name, worker = request.subscription, request.worker
        try:
            leased = await self._unpacking.read_leased(node, answer, request.max_bytes)
        except BaseException:
            await self.give_back(name, worker, leased_stubs(node, answer))
            raise
        try:
            await self.give_back(name, worker, leased.surplus)
            for message, reason in leased.unreadable:
                extra = {"subscription": name, "partition": f"{message.topic}-{message.partition}"}
                _logger.warning(
                    "a message cannot be delivered: %s", reason, extra={**extra, "offset": message.record.offset}
                )
                with suppress(MillstreamError):
                    await self._subscriptions.settle(name, worker, [message], Verb.RELEASE, reason=reason)
        except BaseException:
            await self.give_back(name, worker, leased.messages)
            raise
        return leased.messages

    async def _all_nodes(self) -> list[NodeId]:
        now = asyncio.get_running_loop().time()
        if not self._nodes or now >= self._known_until:
            self._nodes = sorted((await self._client.metadata(())).nodes)
            self._known_until = now + NODES_S
        return self._nodes


def _refused(answer: ReceiveAnswer, subscription: str) -> MillstreamError:
    error = refusal(answer.error, answer.message)
    return error if answer.message or not isinstance(error, NotFound) else NotFound(f"no subscription {subscription!r}")
