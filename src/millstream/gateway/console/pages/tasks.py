"""The page of a task: its progress or its result, and a button that stops it."""

from __future__ import annotations

from typing import Final

from millstream.gateway.console.visit import Done, Page, PageRoute, Response, Visit, address, change


async def show(visit: Visit) -> Response:
    task = visit.tasks.find(visit.names["task"], visit.session)
    return Page("task.html", {"task": task, "measured": task.measure()})


async def stop(visit: Visit) -> Response:
    """Stop it; what it has done stays done."""
    task = visit.tasks.find(visit.names["task"], visit.session)
    task.stop()
    return Done(address("tasks", task.id), "")


ROUTES: Final = (
    PageRoute(path="/tasks/{task}", handle=show),
    change("/tasks/{task}/stop", stop),
)
