"""A consumer group as it is described: for programs, in one document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.client.admin.groups import Group, Progress
    from millstream.protocol.wire.client import Client


async def group_summary(client: Client, name: str, state: str, kind: str) -> dict[str, Any]:
    """A group in one line."""
    from millstream.client.admin.groups import describe_group, progress_of

    group = await describe_group(client, name)
    lag = total_lag(await progress_of(client, group))
    return {"group": name, "state": state, "type": kind, "members": len(group.members), "lag": lag}


def total_lag(progress: list[Progress]) -> int | None:
    """How many offsets a group is behind in all partitions; None where nothing is committed."""
    known = [one.lag for one in progress if one.lag is not None]
    return sum(known) if known else None


def group_document(group: Group, progress: list[Progress]) -> dict[str, Any]:
    """A group's members, offsets and lag."""
    owners = {where: member.member_id for member in group.members for where in member.partitions}
    return {
        "group": group.name,
        "type": group.kind,
        "state": group.state,
        "protocol": group.protocol,
        "lag": total_lag(progress),
        "members": [
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.host,
                "partitions": [[where.topic, where.partition] for where in member.partitions],
            }
            for member in group.members
        ],
        "offsets": [
            {
                "topic": one.where.topic,
                "partition": one.where.partition,
                "committed": one.committed,
                "start": one.start,
                "end": one.end,
                "lag": one.lag,
                "member": owners.get(one.where),
            }
            for one in progress
        ],
    }
