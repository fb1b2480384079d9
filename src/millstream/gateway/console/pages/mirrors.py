"""Mirrors: what is copied from other clusters, and how far; pause, resume, fail over."""

from __future__ import annotations

from typing import Final

from millstream.client.admin.mirrors import MirrorClient, summary_of
from millstream.core.acl import Operation, ResourceType
from millstream.gateway.console.visit import Page, PageRoute, Response, Visit, address, change, done

PARTITIONS_SHOWN: Final = 200


async def list_all(visit: Visit) -> Response:
    mirrors = await MirrorClient(visit.services.client).describe()
    return Page("mirrors.html", {"mirrors": [summary_of(mirror) for mirror in mirrors]})


async def show(visit: Visit) -> Response:
    """Show one mirror and its copies; those that are furthest behind come first."""
    name = visit.names["mirror"]
    (described,) = await MirrorClient(visit.services.client).describe([name])
    partitions = sorted(described["partitions"], key=lambda partition: -(partition["lag"] or 0))
    context = {
        "name": name,
        "described": described,
        "partitions": partitions[:PARTITIONS_SHOWN],
        "omitted": max(0, len(partitions) - PARTITIONS_SHOWN),
        "may_change": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
    }
    return Page("mirror.html", context)


async def pause(visit: Visit) -> Response:
    return await _set_enabled(visit, "pause", "is paused; its copies stay readable", is_enabled=False)


async def resume(visit: Visit) -> Response:
    return await _set_enabled(visit, "resume", "copies again", is_enabled=True)


async def _set_enabled(visit: Visit, verb: str, outcome: str, *, is_enabled: bool) -> Response:
    name = visit.names["mirror"]
    await MirrorClient(visit.services.client).set_enabled(name, is_enabled=is_enabled)
    return done(address("mirrors", name), f"Mirror {name} {outcome}", "mirror", verb, name)


async def fail_over(visit: Visit) -> Response:
    name = visit.names["mirror"]
    visit.confirm(name)
    await MirrorClient(visit.services.client).fail_over(name)
    return done(address("mirrors", name), f"The copies of {name} are writable", "mirror", "failover", name)


ROUTES: Final = (
    PageRoute(path="/mirrors", handle=list_all),
    PageRoute(path="/mirrors/{mirror}", handle=show),
    change("/mirrors/{mirror}/pause", pause),
    change("/mirrors/{mirror}/resume", resume),
    change("/mirrors/{mirror}/failover", fail_over),
)
