"""Work in progress: how far it is, what it said, and a button that stops it."""

from __future__ import annotations

from typing import Final

from millstream.gateway.console.visit import Answer, Done, Page, PageRoute, Visit, address, change


async def show(visit: Visit) -> Answer:
    """Show one piece of work."""
    work = visit.works.find(visit.names["work"], visit.person)
    return Page("work.html", {"work": work, "measured": work.measure()})


async def stop(visit: Visit) -> Answer:
    """Stop it; what it has done stays done."""
    work = visit.works.find(visit.names["work"], visit.person)
    work.stop()
    return Done(address("works", work.id), "")


ROUTES: Final = (
    PageRoute(path="/works/{work}", handle=show),
    change("/works/{work}/stop", stop),
)
