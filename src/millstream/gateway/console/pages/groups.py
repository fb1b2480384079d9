"""Consumer groups of every protocol: members, assignments, lag; reset with a preview, delete."""

from __future__ import annotations

from typing import Final

from millstream.client.admin.groups import (
    delete_group,
    describe_group,
    group_document,
    group_summaries,
    plan_reset,
    progress_of,
)
from millstream.client.admin.position import parse_position
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError
from millstream.gateway.console.render import counted
from millstream.gateway.console.visit import Page, PageRoute, Response, Visit, address, change, done
from millstream.protocol.wire.group_offsets import commit_offsets, list_groups

_GROUP: Final = ResourceType.GROUP


async def list_all(visit: Visit) -> Response:
    """List groups; lag is looked up for those on the page."""
    search = visit.search.lower()
    listed = [group for group in await list_groups(visit.services.client) if search in group[0].lower()]
    shown = await group_summaries(visit.services.client, visit.on_page(listed))
    return Page("groups.html", {**visit.paging(len(listed)), "groups": shown})


async def show(visit: Visit) -> Response:
    name, client = visit.names["group"], visit.services.client
    group = await describe_group(client, name)
    to, topic = visit.text("to"), visit.text("topic")
    context = {
        "name": name,
        "group": group_document(group, await progress_of(client, group)),
        "may_reset": await visit.may_change(Operation.READ, _GROUP, name),
        "may_delete": await visit.may_change(Operation.DELETE, _GROUP, name),
        "to": to,
        "reset_topic": topic,
        "plan": None,
        "problem": "",
    }
    if to:
        try:
            context["plan"] = await plan_reset(client, name, [topic] if topic else None, None, parse_position(to))
        except MillstreamError as error:
            context["problem"] = str(error)
    return Page("group.html", context)


async def reset(visit: Visit) -> Response:
    """Move a group that has no members."""
    name, to, topic = visit.names["group"], visit.text("to"), visit.text("topic")
    visit.confirm(name)
    moves = await plan_reset(visit.services.client, name, [topic] if topic else None, None, parse_position(to))
    await commit_offsets(visit.services.client, name, {where: after for where, _, after in moves})
    words = ("group", "reset", name, "--to", to, *(("--topic", topic) if topic else ()))
    return done(address("groups", name), f"{counted(len(moves), 'partition')} of {name} moved", *words)


async def delete(visit: Visit) -> Response:
    name = visit.names["group"]
    visit.confirm(name)
    await delete_group(visit.services.client, name)
    return done(address("groups"), f"Group {name} is deleted", "group", "delete", name)


ROUTES: Final = (
    PageRoute(path="/groups", handle=list_all),
    PageRoute(path="/groups/{group}", handle=show),
    change("/groups/{group}/reset", reset),
    change("/groups/{group}/delete", delete),
)
