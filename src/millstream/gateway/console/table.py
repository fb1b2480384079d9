"""Every page of the console."""

from __future__ import annotations

from typing import Final

from millstream.gateway.console.pages import (
    cluster,
    dead_letters,
    groups,
    messages,
    overview,
    pipelines,
    subscriptions,
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
)
