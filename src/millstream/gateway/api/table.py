"""Every route of the API."""

from __future__ import annotations

from typing import Any, Final

from millstream.gateway.api.route import Route
from millstream.gateway.api.routes import (
    cluster,
    dead_letters,
    groups,
    listening,
    messages,
    mirrors,
    pipelines,
    publishing,
    pulling,
    subscriptions,
    topics,
    transactions,
)

ROUTES: Final[tuple[Route[Any, Any], ...]] = (
    *publishing.ROUTES,
    *pulling.ROUTES,
    *listening.ROUTES,
    *messages.ROUTES,
    *topics.ROUTES,
    *subscriptions.ROUTES,
    *groups.ROUTES,
    *dead_letters.ROUTES,
    *pipelines.ROUTES,
    *mirrors.ROUTES,
    *transactions.ROUTES,
    *cluster.ROUTES,
)
