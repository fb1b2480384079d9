"""Asks the nodes to record, in the ledger, which messages are unfinished now: the cut of an audit."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.protocol.private.message import decode, encode
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

LEDGER_MARK_KEY: Final = 32042


class LedgerMarkRequest(msgspec.Struct, frozen=True):
    """Names the mark, and the subscriptions; all that have a ledger if there are none."""

    mark: str
    names: list[str] | None = None


class MarkedQueue(msgspec.Struct, frozen=True):
    """A queue whose window was recorded."""

    subscription: str
    subscription_id: str
    topic: str
    topic_id: str
    partition: int
    end: int
    """The offset up to which messages could be delivered then."""


class LedgerMarkResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The queues that the node leads."""

    error: int = 0
    message: str | None = None
    queues: list[MarkedQueue] = []


async def mark_ledger(client: Client, mark: str, names: list[str] | None = None) -> list[MarkedQueue]:
    """Mark the queues of all nodes; return once that is durable."""
    found: dict[tuple[str, str, int], MarkedQueue] = {}
    body = encode(LedgerMarkRequest(mark, names))
    for node in (await client.metadata(())).nodes:
        answer = decode(await client.private(NodeId(node), LEDGER_MARK_KEY, body), LedgerMarkResponse)
        if answer.error:
            error: MillstreamError = error_from_code(answer.error, answer.message, about=f"the ledger on node {node}")
            raise error
        found |= {(one.subscription_id, one.topic_id, one.partition): one for one in answer.queues}
    return list(found.values())
