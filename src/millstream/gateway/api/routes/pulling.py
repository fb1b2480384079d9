"""Pull the messages of a subscription and settle them: accept, release, reject, extend."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec
from msgspec import Meta

from millstream.client.admin.messages import utc
from millstream.client.message import Lease as Delivery
from millstream.client.settling import Settler
from millstream.core.errors import MillstreamError, UnknownGroup
from millstream.core.subscription import Verb
from millstream.gateway.api.message import (
    Decode,
    LeasedDocument,
    decoded_bytes,
    decoded_members,
    held_bytes,
    members_of,
)
from millstream.gateway.api.problem import Refused, invalid, status_of
from millstream.gateway.api.route import Lane, NoFields, Request, Route
from millstream.gateway.api.services import Services
from millstream.protocol.private.subscription_messages import ReceiveRequest
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.wire.client import Client

DECODE_S_MAX: Final = 5.0
"""How long the values of one response may take to decode, while the leases of its messages run."""


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
    """A client's decision about one message."""

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
    responses: list[MillstreamError | asyncio.Future[None]] = []
    for lease, verb, delay_ms, reason in verdicts:
        delivery = deliveries[_delivery_key(lease)]
        if isinstance(delivery, MillstreamError):
            responses.append(delivery)
            continue
        if lease.worker not in settlers:
            settlers[lease.worker] = Settler(client, subscription, lease.worker)
        settler = settlers[lease.worker]
        responses.append(settler.settle(delivery, lease.offset, verb, delay_ms=delay_ms, reason=reason))
    waiting = [response for response in responses if isinstance(response, asyncio.Future)]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=SETTLE_S)
    finally:
        for settler in settlers.values():
            await settler.close()
    outcomes = [response.exception() if isinstance(response, asyncio.Future) else response for response in responses]
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


PULL_MAX: Final = 1000
WAIT_MS_MAX: Final = 60_000
PULL_BYTES: Final = 256 * 1024
PULL_BYTES_MAX: Final = 8 * 1024 * 1024
SETTLE_MAX: Final = 1000
DELAY_MS_MAX: Final = 366 * 24 * 3600 * 1000

Token = Annotated[str, Meta(min_length=1, max_length=2000)]
DelayMs = Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)]
Reason = Annotated[str, Meta(max_length=1000)]
WorkerName = Annotated[str, Meta(min_length=1, max_length=200)]


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of messages to lease, and the time to wait for them."""

    max: Annotated[int, Meta(ge=1, le=PULL_MAX)] = 10
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    max_bytes: Annotated[int, Meta(ge=1, le=PULL_BYTES_MAX)] = PULL_BYTES
    worker: WorkerName | None = None
    """The worker's name, which counts towards the subscription's `millstream.in.flight.max`; without it every pull is
    its own worker."""
    decode: Decode | None = None
    """`schema` adds the value as its schema decodes it."""


class PulledMessages(msgspec.Struct, frozen=True):
    """Messages leased to the client that pulled them."""

    messages: list[LeasedDocument]


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message is done."""

    lease: Token


class Released(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deliver the message again, after a delay or the subscription's backoff."""

    lease: Token
    delay_ms: DelayMs | None = None
    reason: Reason = ""


class Rejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dead-letter the message."""

    lease: Token
    reason: Reason = ""


class Extended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prolong the lease, by a given time or the subscription's lease duration."""

    lease: Token
    delay_ms: DelayMs | None = None


class Settle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Leases to settle, each given as its token alone or as an object with further members."""

    accept: list[Token | Accepted] = []
    release: list[Token | Released] = []
    reject: list[Token | Rejected] = []
    extend: list[Token | Extended] = []


class Settled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of one lease; without an error it is settled durably."""

    lease: str
    error: str | None = None
    status: int = 200


class SettledLeases(msgspec.Struct, frozen=True):
    """The outcomes, in the order accept, release, reject, extend."""

    results: list[Settled]
    failed: int


async def pull(services: Services, request: Request[NoFields, Pull]) -> PulledMessages:
    """Lease messages; a client that disconnects before it has the response leases none."""
    body = request.body
    name, worker = request.path["subscription"], services.new_worker(body.worker)
    request.memory.reserve(body.max_bytes)
    receive = ReceiveRequest(name, worker, body.max, body.max_bytes, body.wait_ms, address=request.address)
    messages = await receive_until(services, receive, request.disconnected)
    request.undelivered = partial(services.leasing.return_messages, name, worker, messages)
    size = sum(held_bytes(message.record) for message in messages)
    request.memory.resize(size)
    if body.decode is None:
        return PulledMessages([leased(message, worker) for message in messages])
    documents: list[LeasedDocument] = []
    until = time.monotonic() + DECODE_S_MAX
    for message in messages:
        if documents and time.monotonic() > until:
            # The rest is for another request.
            break
        more = await decoded_members(services.client, body.decode, message.topic, message.record)
        size += decoded_bytes(more)
        request.memory.resize(size)
        documents.append(leased(message, worker, **more))
    await services.leasing.return_messages(name, worker, messages[len(documents) :])
    del messages[len(documents) :]
    return PulledMessages(documents)


async def receive_until(
    services: Services, receive: ReceiveRequest, disconnected: asyncio.Future[None] | None
) -> list[LeasedMessage]:
    """Lease messages unless the client disconnects or the gateway stops meanwhile."""
    leasing = asyncio.ensure_future(services.leasing.receive(receive))
    ends = (services.stopping,) if disconnected is None else (disconnected, services.stopping)
    can_respond = False
    try:
        done, _ = await asyncio.wait((leasing, *ends), return_when=asyncio.FIRST_COMPLETED)
        can_respond = leasing in done and disconnected not in done
    finally:
        if not can_respond:
            await _return_leased(services, receive, leasing)
    return leasing.result() if can_respond else []


async def _return_leased(
    services: Services, receive: ReceiveRequest, leasing: asyncio.Future[list[LeasedMessage]]
) -> None:
    """Return messages that were leased at the last moment, since no client waits for them."""
    leasing.cancel()
    with suppress(asyncio.CancelledError, MillstreamError):
        await services.leasing.return_messages(receive.subscription, receive.worker, await leasing)


def leased(message: LeasedMessage, worker: str, **more: Any) -> LeasedDocument:
    return LeasedDocument(
        lease=token_of(message, worker),
        attempt=message.attempt,
        deadline=utc(message.deadline_ms) or "",
        **members_of(message.topic, message.topic_id, message.partition, message.record),
        **more,
    )


async def settle_leases(services: Services, request: Request[NoFields, Settle]) -> SettledLeases:
    """Settle each lease at its partition's leader; a failure does not affect the other leases."""
    body = request.body
    accept = [Accepted(lease) if isinstance(lease, str) else lease for lease in body.accept]
    release = [Released(lease) if isinstance(lease, str) else lease for lease in body.release]
    reject = [Rejected(lease) if isinstance(lease, str) else lease for lease in body.reject]
    extend = [Extended(lease) if isinstance(lease, str) else lease for lease in body.extend]
    tokens = [lease.lease for listed in (accept, release, reject, extend) for lease in listed]
    if not 0 < len(tokens) <= SETTLE_MAX:
        raise invalid(f"send 1 to {SETTLE_MAX} leases, not {len(tokens)}")
    if len(set(tokens)) != len(tokens):
        raise invalid("a lease is given twice; settle it once per request")
    verdicts = [
        *(Verdict(read_token(lease.lease), Verb.ACCEPT) for lease in accept),
        *(Verdict(read_token(lease.lease), Verb.RELEASE, lease.delay_ms, lease.reason) for lease in release),
        *(Verdict(read_token(lease.lease), Verb.REJECT, None, lease.reason) for lease in reject),
        *(Verdict(read_token(lease.lease), Verb.EXTEND, lease.delay_ms) for lease in extend),
    ]
    outcomes = await settle(services.client, request.path["subscription"], verdicts)
    results = [
        Settled(token) if error is None else Settled(token, str(error), int(status_of(error)))
        for token, error in zip(tokens, outcomes, strict=True)
    ]
    return SettledLeases(results, sum(result.error is not None for result in results))


ROUTES: Final = (
    Route(
        "POST",
        "/subscriptions/{subscription}/messages:pull",
        "Lease messages, waiting until some are available",
        pull,
        PulledMessages,
        tag="messages",
        body=Pull,
        lane=Lane.WAIT,
    ),
    Route(
        "POST",
        "/subscriptions/{subscription}/messages:settle",
        "Accept, release, reject or extend leased messages",
        settle_leases,
        SettledLeases,
        tag="messages",
        body=Settle,
    ),
)
