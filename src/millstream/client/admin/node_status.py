"""The status of nodes, by a private request: damage of their disks, and reasons for timeouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.core.errors import MillstreamError, NotAuthorized, RequestTimedOut
from millstream.core.topic import TRANSACTION_STATE
from millstream.protocol.private.message import Nothing, decode_document, encode

if TYPE_CHECKING:
    from millstream.core.ids import NodeId
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata

NODE_STATUS_KEY = 32000


class DamagedOffsets(NamedTuple):
    """Offsets of a partition that the disk lost; others are unharmed."""

    topic: str
    partition: int
    first: int
    next_offset: int
    is_repaired: bool = False
    """Whether they are being fetched from other replicas."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}: the disk lost the offsets {self.first} to {self.next_offset - 1}"

    @property
    def advice(self) -> str:
        """Say what to do about it."""
        if self.is_repaired:
            return (
                "nothing while the replicas run: the offsets are fetched from another replica; "
                "if this persists, see the log of this node"
            )
        if self.topic == TRANSACTION_STATE:
            # No group reads this topic; what it lost are decisions about transactions.
            return (
                "the other offsets are intact and in use; transactions whose state was lost may never end by "
                "themselves: find them with millstream transaction list --hanging, and end them with "
                "millstream transaction abort"
            )
        return (
            "the other offsets are intact and served; restore these from a copy, if you have one, and move a group "
            f"past them with: millstream group reset GROUP --topic {self.topic} --partition {self.partition} "
            f"--to {self.next_offset}"
        )


async def node_status(client: Client, node: NodeId | None = None) -> dict[str, Any] | None:
    """Return a node's status; None if it does not answer this request, like brokers other than Millstream.

    Raise `NotAuthorized` if this client may not ask.
    """
    try:
        status: dict[str, Any] = decode_document(await client.private(node, NODE_STATUS_KEY, encode(Nothing())))
    except NotAuthorized:
        raise
    except MillstreamError:
        return None
    return status


async def _find_status(client: Client, node: NodeId | None = None) -> dict[str, Any] | None:
    try:
        return await node_status(client, node)
    except NotAuthorized:
        return None


def damage_in(status: dict[str, Any]) -> list[DamagedOffsets]:
    """Return the damage in a node's status."""
    return [
        DamagedOffsets(one["topic"], one["partition"], one["first"], one["next"], one["repair"])
        for one in status["damage"]
    ]


async def find_damage(client: Client, topic: TopicMetadata, partitions: Iterable[int]) -> list[DamagedOffsets] | None:
    """Return what the leaders of some partitions lost of them; None if a leader does not report it."""
    wanted = set(partitions)
    leaders = {one.leader_id for one in topic.partitions.values() if one.partition in wanted and one.leader_id >= 0}
    lost: list[DamagedOffsets] = []
    for leader in sorted(leaders):
        status = await _find_status(client, leader)
        if status is None or "damage" not in status:
            return None
        lost += [one for one in damage_in(status) if one.topic == topic.name and one.partition in wanted]
    return sorted(lost)


async def timeout_with_reasons(client: Client, attempted: str) -> RequestTimedOut:
    """Build an error that says what could not be done, with the reasons that the node reports."""
    status = await _find_status(client)
    reasons = [] if status is None else [*status.get("reasons", ()), *status.get("warnings", ())]
    reason = "; ".join(reasons) or "the cluster did not complete it in time"
    return RequestTimedOut(f"{attempted}: {reason}; try again, and check the cluster with millstream cluster status")
