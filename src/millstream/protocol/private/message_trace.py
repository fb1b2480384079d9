"""Asks what became of a message in every subscription of its topic."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.core.ids import NodeId
from millstream.protocol.private.message import decode, encode
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

MESSAGE_TRACE_KEY: Final = 32041


class MessageTraceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Names a message by its position."""

    topic: str
    partition: int
    offset: int


class TraceEvent(msgspec.Struct, frozen=True):
    """One event in the life of a message in a subscription."""

    kind: str
    """The kind of the delta, in lower case: `acquired`, `released`, `accepted` …"""
    time_ms: int
    attempt: int = 0
    worker: str = ""
    """`endpoint/member`, if a worker was involved."""
    until_ms: int = 0
    """The end of the lease or of the delay; 0 if there is none."""
    reason: str = ""
    leader_epoch: int = 0
    sequence: int = 0
    """The frame of deltas that made it durable, counted from the start of the queue."""


class DeadLetterPosition(msgspec.Struct, frozen=True):
    """Where the dead letter of a message is."""

    topic: str
    partition: int
    offset: int


class SubscriptionTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The life of a message in one subscription."""

    subscription: str
    subscription_id: str
    state: str
    """waiting, blocked, delayed, leased or rejected; at the end accepted, dead-lettered, dropped, filtered, skipped,
    expired, absent, or done if the outcome is no longer known."""
    is_final: bool
    attempts: int = 0
    """The number of deliveries, as far as known."""
    worker: str = ""
    """Who holds it, or settled it."""
    client_id: str = ""
    address: str = ""
    """The client of that worker, if it has connected to the current leader."""
    until_ms: int = 0
    """When the lease or the delay ends; 0 if it waits for neither."""
    first_delivery_ms: int = 0
    ended_ms: int = 0
    reason: str = ""
    dead_letter: DeadLetterPosition | None = None
    ledger: bool = False
    """Whether the subscription keeps a ledger."""
    events: tuple[TraceEvent, ...] = ()
    is_complete: bool = False
    """Whether `events` are all events of the message in this subscription."""
    unknown: str = ""
    """What cannot be known, and why; empty if nothing is missing."""


class MessageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The life of a message in all subscriptions that the client may describe."""

    error: int = 0
    message: str | None = None
    topic: str = ""
    topic_id: str = ""
    partition: int = 0
    offset: int = 0
    log_start: int = 0
    """The first offset that the log still holds."""
    subscriptions: tuple[SubscriptionTrace, ...] = ()


async def message_trace(client: Client, topic: str, partition: int, offset: int) -> MessageTrace:
    """Ask the leader of a partition, which runs all its queues."""
    body = encode(MessageTraceRequest(topic, partition, offset))

    async def attempt(leader: NodeId) -> MessageTrace:
        answer = decode(await client.private(leader, MESSAGE_TRACE_KEY, body), MessageTrace)
        if answer.error:
            raise error_from_code(answer.error, answer.message, about=f"{topic}-{partition} at {offset}")
        return answer

    return await client.call_leader(topic, partition, attempt)
