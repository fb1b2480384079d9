"""What a node holds in memory of the catalog, besides topics: the one place that builds and reads every noun."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from uuid import UUID

from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.group_settings import DeclaredGroups
from millstream.broker.cluster.quotas import ClientQuotas
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.schemas.registry import SchemaRegistry
from millstream.broker.security.secrets import SecretHolder
from millstream.broker.security.state import SecurityState, parse_super_users
from millstream.core.clock import Clock
from millstream.core.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredState:
    """One holder for each noun, in the order in which they are read."""

    security: SecurityState
    quotas: ClientQuotas
    groups: DeclaredGroups
    subscriptions: Subscriptions
    pipelines: Pipelines
    schemas: SchemaRegistry
    mirrors: Mirrors

    @classmethod
    def of(
        cls, declarations: Declarations, config: Config, clock: Clock, *, new_id: Callable[[], UUID] = uuid.uuid4
    ) -> Self:
        """Build the holders; they are empty until `load`."""
        return cls(
            security=SecurityState(declarations, parse_super_users(config.super_users)),
            quotas=ClientQuotas(declarations),
            groups=DeclaredGroups(declarations, config),
            subscriptions=Subscriptions(declarations, clock, new_id=new_id),
            pipelines=Pipelines(declarations, clock, new_id=new_id),
            schemas=SchemaRegistry(declarations),
            mirrors=Mirrors(declarations, clock, new_id=new_id),
        )

    @property
    def with_secrets(self) -> tuple[SecretHolder, ...]:
        """The holders of nouns whose settings may be secrets."""
        return (self.subscriptions, self.pipelines, self.mirrors)

    async def load(self) -> None:
        """Read everything from the catalog."""
        for noun in dataclasses.fields(self):
            await getattr(self, noun.name).load()
