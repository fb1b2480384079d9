"""Every page of the console."""

from __future__ import annotations

from typing import Final

from millstream.gateway.console.pages import (
    access,
    cluster,
    dead_letters,
    groups,
    messages,
    mirrors,
    overview,
    pipelines,
    plans,
    schemas,
    subscriptions,
    tasks,
    topics,
)
from millstream.gateway.console.visit import PageRoute

ROUTES: Final[tuple[PageRoute, ...]] = (
    *overview.ROUTES,
    *topics.ROUTES,
    *messages.ROUTES,
    *subscriptions.ROUTES,
    *dead_letters.ROUTES,
    *groups.ROUTES,
    *pipelines.ROUTES,
    *cluster.ROUTES,
    *plans.ROUTES,
    *mirrors.ROUTES,
    *schemas.ROUTES,
    *access.ROUTES,
    *tasks.ROUTES,
)
