"""Looks up the delivery state of a message, for publishers with a receipt."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from millstream.core.ids import NodeId
from millstream.protocol.private.message import decode, encode
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

DELIVERY_STATE_KEY: Final = 32039
ACCEPTED: Final = "accepted"
WAIT_MS_MAX: Final = 20_000
"""The longest wait of one request; for longer waits, ask again."""


class DeliveryStateRequest(msgspec.Struct, frozen=True, array_like=True):
    """Names a message of a subscription, and how long to wait for its final state."""

    subscription: str
    topic: str
    partition: int
    offset: int
    wait_ms: int = 0


class DeliveryStateAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The delivery state."""

    error: int
    message: str | None
    state: str = ""
    attempt: int = 0
    next_ms: int = 0
    is_final: bool = False


class MessageDelivery(NamedTuple):
    """The delivery state of a message in a subscription.

    `state` is one of waiting, blocked, delayed, leased, rejected, and finally accepted, dead-lettered, dropped,
    filtered, skipped, absent, or done if it has ended and the outcome is no longer known.
    """

    state: str
    attempt: int
    """The number of its last delivery; 0 before the first, or if unknown."""
    next_ms: int
    """When its lease or delay ends; 0 if it waits for neither."""
    is_final: bool


async def delivery_state(
    client: Client, subscription: str, topic: str, partition: int, offset: int, *, wait_ms: int = 0
) -> MessageDelivery:
    """Ask the leader of a partition; with a wait of at most `WAIT_MS_MAX`, it answers when the state is final."""
    request = DeliveryStateRequest(subscription, topic, partition, offset, min(wait_ms, WAIT_MS_MAX))
    body = encode(request)

    async def attempt(leader: NodeId) -> MessageDelivery:
        frame = await client.private(leader, DELIVERY_STATE_KEY, body, waits=wait_ms > 0)
        answer = decode(frame, DeliveryStateAnswer)
        if answer.error:
            raise error_from_code(answer.error, answer.message, about=f"{topic}-{partition} at {offset}")
        return MessageDelivery(answer.state, answer.attempt, answer.next_ms, answer.is_final)

    return await client.call_leader(topic, partition, attempt)
