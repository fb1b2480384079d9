"""Pipelines: state, rate, lag, errors, rules; start and stop."""

from __future__ import annotations

from typing import Final

from millstream.client.admin.pipeline_storage import tables_of
from millstream.client.admin.pipelines import PipelineClient, summary_of
from millstream.core.acl import Operation, ResourceType
from millstream.gateway.console.visit import PAGE_ROWS, Answer, Done, Page, PageRoute, Visit, address, change, command

RULES_SHOWN: Final = 200


async def list_all(visit: Visit) -> Answer:
    """List pipelines."""
    search, page = visit.text("search", length_max=249), visit.number("page", 0, high=1_000_000)
    found = [summary_of(one) for one in await PipelineClient(visit.services.client).describe()]
    rows = [one for one in found if search.lower() in one["pipeline"].lower()]
    context = {
        "pipelines": rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS],
        "total": len(rows),
        "search": search,
        "page": page,
        "rows": PAGE_ROWS,
    }
    return Page("pipelines.html", context)


async def show(visit: Visit) -> Answer:
    """Show one pipeline."""
    name = visit.names["pipeline"]
    (described,) = await PipelineClient(visit.services.client).describe([name])
    found = await tables_of(visit.services.client, described)
    context = {
        "name": name,
        "described": described,
        "report": described["report"] or {},
        "summary": summary_of(described),
        "tables": [one._asdict() for one in found.tables],
        "notes": [*described["notes"], *found.notes],
        "rules": described["rules"][:RULES_SHOWN],
        "rules_left": max(0, len(described["rules"]) - RULES_SHOWN),
        "may_change": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
    }
    return Page("pipeline.html", context)


async def start(visit: Visit) -> Answer:
    """Start a pipeline; a parked one is retried."""
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).start(name)
    return Done(address("pipelines", name), f"Pipeline {name} starts: {command('pipeline', 'start', name)}")


async def stop(visit: Visit) -> Answer:
    """Stop a pipeline."""
    name = visit.names["pipeline"]
    await PipelineClient(visit.services.client).stop(name)
    return Done(address("pipelines", name), f"Pipeline {name} stops: {command('pipeline', 'stop', name)}")


async def delete(visit: Visit) -> Answer:
    """Delete a pipeline; what it wrote stays."""
    name = visit.names["pipeline"]
    visit.confirm(name)
    await PipelineClient(visit.services.client).delete(name)
    return Done(address("pipelines"), f"Pipeline {name} is deleted: {command('pipeline', 'delete', name)}")


ROUTES: Final = (
    PageRoute(path="/pipelines", handle=list_all),
    PageRoute(path="/pipelines/{pipeline}", handle=show),
    change("/pipelines/{pipeline}/start", start),
    change("/pipelines/{pipeline}/stop", stop),
    change("/pipelines/{pipeline}/delete", delete),
)
