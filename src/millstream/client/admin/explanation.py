"""Why a cluster did not do what was asked, where Kafka's answer has a code and no words: what its nodes say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.client.admin.damage import node_status
from millstream.core.errors import RequestTimedOut

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client


async def explain(client: Client, what: str) -> RequestTimedOut:
    """An error that says what could not be done for now, and why as far as the node asked knows."""
    status = await node_status(client)
    reasons = [] if status is None else [*status.get("reasons", ()), *status.get("warnings", ())]
    why = "; ".join(reasons) or "the cluster has not agreed on it in time"
    return RequestTimedOut(f"{what}: {why}; try again, and millstream cluster status shows how the cluster is")
