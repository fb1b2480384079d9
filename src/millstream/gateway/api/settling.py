"""Settles leases at the current leaders of their partitions, from any node's gateway."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, cast

import msgspec
from msgspec import Meta

from millstream.client.lease import Lease as Delivery
from millstream.client.settling import Settler
from millstream.core.errors import MillstreamError, UnknownGroup
from millstream.gateway.api.problem import Refused, invalid
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.wire.client import Client


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The message that is leased, and the worker that holds it."""

    topic: str
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 2)]
    attempt: Annotated[int, Meta(ge=0)]
    worker: Annotated[str, Meta(min_length=1, max_length=249)]


_decoder = msgspec.msgpack.Decoder(Lease)

_encode = msgspec.msgpack.Encoder().encode


def token_of(message: LeasedMessage, worker: str) -> str:
    lease = Lease(message.topic, message.partition, message.record.offset, message.attempt, worker)
    return base64.urlsafe_b64encode(_encode(lease)).decode().rstrip("=")


def read_token(text: str) -> Lease:
    """Decode a token; raise `Refused` if it is not one."""
    try:
        return _decoder.decode(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise not_a_lease(text) from None


def not_a_lease(text: str) -> Refused:
    """Refuse a token that is not the `lease` of a received message."""
    return invalid(f"{text[:100]!r} is not a lease; use the `lease` of a received message")


SETTLE_S: Final = 10.0
"""How long settlements are retried while leaders move."""


class Verdict(NamedTuple):
    """What a client decides about one message."""

    lease: Lease
    verb: int
    delay_ms: int | None = None
    reason: str = ""


async def settle(client: Client, subscription: str, verdicts: Sequence[Verdict]) -> list[MillstreamError | None]:
    """Settle each lease, retrying at the new leader when one moves; return an error or None for each."""
    deliveries: dict[tuple[str, int, int], Delivery | MillstreamError] = {}
    for lease, *_ in verdicts:
        if _delivery_key(lease) not in deliveries:
            deliveries[_delivery_key(lease)] = await _find_delivery(client, lease)
    settlers: dict[str, Settler] = {}
    answers: list[MillstreamError | asyncio.Future[None]] = []
    for lease, verb, delay_ms, reason in verdicts:
        delivery = deliveries[_delivery_key(lease)]
        if isinstance(delivery, MillstreamError):
            answers.append(delivery)
            continue
        if lease.worker not in settlers:
            settlers[lease.worker] = Settler(client, subscription, lease.worker)
        settler = settlers[lease.worker]
        answers.append(settler.settle(delivery, lease.offset, verb, delay_ms=delay_ms, reason=reason))
    waiting = [answer for answer in answers if isinstance(answer, asyncio.Future)]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=SETTLE_S)
    finally:
        for settler in settlers.values():
            await settler.close()
    outcomes = [answer.exception() if isinstance(answer, asyncio.Future) else answer for answer in answers]
    for outcome in outcomes:
        if outcome is not None and (isinstance(outcome, UnknownGroup) or not isinstance(outcome, MillstreamError)):
            raise outcome
    return cast("list[MillstreamError | None]", outcomes)


def _delivery_key(lease: Lease) -> tuple[str, int, int]:
    return lease.topic, lease.partition, lease.attempt


async def _find_delivery(client: Client, lease: Lease) -> Delivery | MillstreamError:
    try:
        leader = await client.leader_of(lease.topic, lease.partition)
    except MillstreamError as error:
        return error
    return Delivery(lease.topic, b"", lease.partition, node=leader, attempt=lease.attempt)
