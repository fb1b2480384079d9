"""`millstream group`: list, describe, reset and delete consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker
from millstream.cli.options import COMMON, Common, Noun, Partitions, Yes, confirm, flag
from millstream.cli.output import counted, one_line, print_json, print_line, print_list, print_result, print_table
from millstream.client.admin.groups import (
    delete_group,
    describe_group,
    group_document,
    group_summaries,
    plan_reset,
    progress_of,
    total_lag,
)
from millstream.client.admin.position import POSITION_HELP, parse_position
from millstream.protocol.wire.group_offsets import commit_offsets

if TYPE_CHECKING:
    from millstream.client.admin.groups import Group, Progress
    from millstream.core.topic import TopicPartition
    from millstream.protocol.wire.client import Client

app = Noun(help="List, describe, reset and delete consumer groups.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The name of the group.", show_default=False)]


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List all consumer groups with their lag."""
    groups = call_broker(common, group_summaries)
    keys = ("group", "type", "state", "members", "lag")
    rows = [[group[key] for key in keys] for group in groups]
    empty = "No groups yet; a consumer with a group id creates one."
    print_list({"groups": groups}, keys, rows, empty=empty, as_json=common.as_json)


@app.command("describe")
def describe(name: Name, common: Common = COMMON) -> None:
    """Show a group's members, offsets and lag."""

    async def operation(client: Client) -> tuple[Group, list[Progress]]:
        group = await describe_group(client, name)
        return group, await progress_of(client, group)

    group, progress = call_broker(common, operation)
    if common.as_json:
        print_json(group_document(group, progress))
    else:
        _print_description(group, progress)


@app.command("reset")
def reset(
    name: Name,
    to: Annotated[str, flag("--to", "POSITION", f"Where to continue reading: {POSITION_HELP}.")],
    topic: Annotated[
        list[str] | None,
        flag("--topic", "TOPIC", "Only this topic; may be repeated. Default: every topic that the group has read."),
    ] = None,
    partition: Partitions = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without doing it.")] = False,
    common: Common = COMMON,
) -> None:
    """Move a group to another position in its topics.

    Stop its consumers first. An offset outside a partition's range is moved to the nearest one in it.
    """
    position = parse_position(to)

    async def operation(client: Client) -> list[tuple[TopicPartition, int | None, int]]:
        moves = await plan_reset(client, name, topic, partition, position)
        if not dry_run:
            await commit_offsets(client, name, {where: after for where, _, after in moves})
        return moves

    moves = call_broker(common, operation)
    keys = ("topic", "partition", "before", "after")
    rows = [(where.topic, where.partition, before, after) for where, before, after in moves]
    if common.as_json:
        offsets = [dict(zip(keys, row, strict=True)) for row in rows]
        print_json({"group": name, "dry_run": dry_run, "offsets": offsets})
        return
    print_table(keys, rows)
    text = (
        "Nothing was changed (--dry-run)." if dry_run else f"Moved group {name} in {counted(len(moves), 'partition')}."
    )
    print_line(one_line(text))


@app.command("delete")
def delete(name: Name, yes: Yes = False, common: Common = COMMON) -> None:
    """Delete a group and its committed offsets. Asks for confirmation at a terminal, not in a script."""
    confirm(f"Delete group {name} and its committed offsets?", unless=yes or common.as_json)
    call_broker(common, lambda client: delete_group(client, name))
    print_result({"group": name, "deleted": True}, f"Deleted group {one_line(name)}.", as_json=common.as_json)


def _print_description(group: Group, progress: list[Progress]) -> None:
    lag = total_lag(progress)
    behind = "" if lag is None else f", {counted(lag, 'message')} behind"
    members = counted(len(group.members), "member")
    kind = "" if group.kind == "classic" else f", {group.kind} group"
    print_line(f"{one_line(group.name)}  ({group.state}{kind}, {members}{behind})")
    owners = {where: member for member in group.members for where in member.partitions}
    rows = []
    for row in progress:
        owner = owners.get(row.where)
        client = None if owner is None else f"{owner.client_id} {owner.host}"
        rows.append([row.where.topic, row.where.partition, row.committed, row.end, row.lag, client])
    if rows:
        print_line()
        print_table(["topic", "partition", "committed", "end", "lag", "read by"], rows)
