"""What a client settles a message with: everything that any node's gateway has to know of the lease, as one text."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta

from millstream.gateway.api.problem import Refused, invalid
from millstream.protocol.private.subscriptions import LeasedMessage


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Which message is held, and by whom."""

    topic: str
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 2)]
    attempt: Annotated[int, Meta(ge=0)]
    worker: Annotated[str, Meta(min_length=1, max_length=249)]


_decoder = msgspec.msgpack.Decoder(Lease)
_encode = msgspec.msgpack.Encoder().encode


def token_of(message: LeasedMessage, worker: str) -> str:
    """The token of a message that a worker holds."""
    lease = Lease(message.topic, message.partition, message.record.offset, message.attempt, worker)
    return base64.urlsafe_b64encode(_encode(lease)).decode().rstrip("=")


def read_token(text: str) -> Lease:
    """The lease that a token tells of, or `Refused`."""
    try:
        return _decoder.decode(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise not_a_lease(text) from None


def not_a_lease(text: str) -> Refused:
    """Somebody settles with something else than what a message came with."""
    return invalid(f"{text[:100]!r} is no lease; a lease is the `lease` of a message that was received")
