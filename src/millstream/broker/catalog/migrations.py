"""How the catalog of an older Millstream becomes today's, one version of the schema after the other.

A step must be repeatable, since a crash may come between it and the new version number, which is written last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sqlalchemy import Connection

from millstream.broker.catalog.tables import (
    SCHEMA_VERSION,
    client_quotas,
    deleted_subscriptions,
    group_settings,
    pipelines,
    routing_rules,
    subscriptions,
)


def _add_client_quotas(connection: Connection) -> None:
    client_quotas.create(connection, checkfirst=True)


def _add_subscriptions(connection: Connection) -> None:
    subscriptions.create(connection, checkfirst=True)
    deleted_subscriptions.create(connection, checkfirst=True)


def _add_pipelines(connection: Connection) -> None:
    pipelines.create(connection, checkfirst=True)
    routing_rules.create(connection, checkfirst=True)


def _add_group_settings(connection: Connection) -> None:
    group_settings.create(connection, checkfirst=True)


STEPS: Mapping[int, Callable[[Connection], None]] = MappingProxyType(
    {2: _add_client_quotas, 3: _add_subscriptions, 4: _add_pipelines, 5: _add_group_settings}
)
"""What leads to each version from the one before."""


def migrate(connection: Connection, found: int) -> None:
    """Carry a catalog from the version found to the newest."""
    for version in range(found + 1, SCHEMA_VERSION + 1):
        STEPS[version](connection)
