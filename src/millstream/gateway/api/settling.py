"""Settles leases at the current leaders of their partitions, from any node's gateway."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Final, NamedTuple
from uuid import UUID

import msgspec
from msgspec import Meta

from millstream.core.errors import InvalidRecordState, MillstreamError, UnknownGroup
from millstream.core.ids import Offset
from millstream.core.verb import Verb
from millstream.gateway.api.problem import Refused, invalid
from millstream.protocol.private.delivery_state import ACCEPTED, delivery_state
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.records.record import Record
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import TRANSIENT


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
    """Return the token of a leased message."""
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

PAUSE_S: Final = 0.2

_NO_ID: Final = UUID(int=0)


class Verdict(NamedTuple):
    """What a client decides about one message."""

    lease: Lease
    verb: int
    delay_ms: int | None = None
    reason: str = ""


async def settle(client: Client, subscription: str, verdicts: Sequence[Verdict]) -> list[MillstreamError | None]:
    """Settle each lease, retrying at the new leader when one moves; return an error or None for each."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    outcomes: list[MillstreamError | None] = [None] * len(verdicts)
    left = list(range(len(verdicts)))
    repeated: set[int] = set()
    while True:
        await _settle_some(client, subscription, verdicts, left, outcomes)
        left = [at for at in left if isinstance(outcomes[at], TRANSIENT)]
        repeated.update(left)
        if not left or loop.time() + PAUSE_S > deadline:
            await _find_out(client, subscription, verdicts, repeated, outcomes)
            return outcomes
        await asyncio.sleep(PAUSE_S)
        with suppress(MillstreamError):
            # Refreshes the leaders. If no node answers, leases that were settled stay settled.
            await client.metadata({verdicts[at].lease.topic for at in left})


async def _find_out(
    client: Client,
    subscription: str,
    verdicts: Sequence[Verdict],
    repeated: Iterable[int],
    outcomes: list[MillstreamError | None],
) -> None:
    """Look up messages that were accepted more than once: the first request may have succeeded and its answer been
    lost.

    The message is then held by no worker, which is how the second request was answered.
    """
    with suppress(MillstreamError, TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            for at in repeated:
                lease, verb, *_ = verdicts[at]
                if verb == Verb.ACCEPT and isinstance(outcomes[at], InvalidRecordState):
                    results = await delivery_state(client, subscription, lease.topic, lease.partition, lease.offset)
                    if results.state == ACCEPTED:
                        outcomes[at] = None


async def _settle_some(
    client: Client,
    subscription: str,
    verdicts: Sequence[Verdict],
    places: Iterable[int],
    outcomes: list[MillstreamError | None],
) -> None:
    alike: dict[tuple[str, int, int | None, str], list[int]] = {}
    for at in places:
        one = verdicts[at]
        alike.setdefault((one.lease.worker, one.verb, one.delay_ms, one.reason), []).append(at)
    subscriptions = SubscriptionClient(client)
    for (worker, verb, delay_ms, reason), some in alike.items():
        some.sort(key=lambda at: (verdicts[at].lease.topic, verdicts[at].lease.partition, verdicts[at].lease.offset))
        try:
            messages = [await _held(client, verdicts[at].lease) for at in some]
            results = await subscriptions.settle(subscription, worker, messages, verb, delay_ms=delay_ms, reason=reason)
        except MillstreamError as error:
            results = [error] * len(some)
        for at, outcome in zip(some, results, strict=True):
            if isinstance(outcome, UnknownGroup):
                raise outcome
            outcomes[at] = outcome


async def _held(client: Client, lease: Lease) -> LeasedMessage:
    leader = await client.leader_of(lease.topic, lease.partition)
    record = Record(Offset(lease.offset), 0, None, None, ())
    return LeasedMessage(leader, lease.topic, _NO_ID, lease.partition, lease.attempt, 0, record)
