"""The catalog in a node's memory, except topics: quotas, group settings, subscriptions, pipelines and more."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations, Holder
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.schemas.registry import SchemaRegistry
from millstream.broker.security.secrets import SecretHolder
from millstream.broker.security.state import SecurityState, parse_super_users
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import InvalidGroupId, InvalidRequest
from millstream.core.group import DECLARED, HEARTBEAT, SESSION, parse_group_settings
from millstream.core.quota import QuotaEntity, QuotaRate, candidates, check_limit
from millstream.core.setting import with_changes
from millstream.core.tasks import finishing

_logger = logging.getLogger(__name__)

ENTITIES_MAX = 10_000


class ClientQuotas(Holder):
    """Every quota, by the entity it is for."""

    def __init__(self, declarations: Declarations) -> None:
        super().__init__(declarations)
        self._limits: dict[QuotaEntity, dict[str, float]] = {}

    async def load(self) -> None:
        self._limits = await self._declarations.call(Catalog.client_quotas)
        self._notify()

    def all(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        return self._limits

    def has(self, key: str) -> bool:
        """Whether any client's bytes are limited in this way."""
        return any(key in limits for limits in self._limits.values())

    def find(self, key: str, user: str, client_id: str) -> QuotaRate | None:
        """Return a client's limit in bytes per second; None if it has none."""
        for entity, scope in candidates(user, client_id):
            rate = self._limits.get(entity, {}).get(key)
            if rate is not None:
                return QuotaRate(rate, scope)
        return None

    @finishing
    async def alter(
        self, entity: QuotaEntity, changes: Mapping[str, float | None], *, validate_only: bool = False
    ) -> None:
        """Set some limits of an entity, durably; None removes a limit."""
        for key, value in changes.items():
            if value is not None:
                check_limit(key, value)
        async with self._changing:
            before = self._limits.get(entity, {})
            limits = with_changes(before, changes)
            if entity not in self._limits and len(self._limits) >= ENTITIES_MAX:
                raise InvalidRequest(f"there are {ENTITIES_MAX} quotas already; remove some first")
            if validate_only or limits == before:
                return
            await self._declarations.change(Catalog.change_client_quotas, {entity: limits})
            if limits:
                self._limits[entity] = limits
            else:
                del self._limits[entity]
            _logger.info("quota changed", extra={"entity": str(entity), "limits": str(limits)})
            self._notify()


GROUPS_MAX: Final = 100_000
GROUP_ID_CHARACTERS_MAX: Final = 1024
_NONE: Final[Mapping[str, int]] = {}


class DeclaredGroups(Holder):
    """Every group with settings, whether it has members or not."""

    def __init__(self, declarations: Declarations, config: Config) -> None:
        self.defaults: Mapping[str, int] = {
            SESSION: config.group_consumer_session_ms,
            HEARTBEAT: config.group_consumer_heartbeat_ms,
        }
        """The settings of groups without their own."""
        super().__init__(declarations)
        self._overrides: dict[str, dict[str, str]] = {}
        self._parsed: dict[str, Mapping[str, int]] = {}

    async def load(self) -> None:
        self._overrides = await self._declarations.call(Catalog.group_settings)
        self._parsed = {
            group_id: {name: DECLARED[name].parse(text) for name, text in overrides.items() if name in DECLARED}
            for group_id, overrides in self._overrides.items()
        }

    def all(self) -> Mapping[str, Mapping[str, str]]:
        return self._overrides

    def overrides_of(self, group_id: str) -> Mapping[str, str]:
        return self._overrides.get(group_id, {})

    def values_of(self, group_id: str) -> Mapping[str, int]:
        return self._parsed.get(group_id, _NONE)

    @finishing
    async def alter(self, group_id: str, changes: Mapping[str, str | None], *, validate_only: bool = False) -> None:
        """Set some settings of a group, durably; None resets one to the node's."""
        if not 0 < len(group_id) <= GROUP_ID_CHARACTERS_MAX:
            raise InvalidGroupId(f"a group id has 1 to {GROUP_ID_CHARACTERS_MAX} characters, not {len(group_id)}")
        async with self._changing:
            overrides = with_changes(self.overrides_of(group_id), changes)
            parsed = parse_group_settings(overrides, self.defaults)
            if group_id not in self._overrides and len(self._overrides) >= GROUPS_MAX:
                raise InvalidRequest(f"{GROUPS_MAX} groups have settings already; remove some first")
            if validate_only or overrides == self.overrides_of(group_id):
                return
            await self._declarations.change(Catalog.change_group_settings, group_id, overrides)
            if overrides:
                self._overrides[group_id], self._parsed[group_id] = overrides, parsed
            else:
                self._overrides.pop(group_id, None)
                self._parsed.pop(group_id, None)
            _logger.info("group settings changed", extra={"group": group_id, "settings": str(overrides)})


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
        built = cls(
            security=SecurityState(declarations, parse_super_users(config.super_users)),
            quotas=ClientQuotas(declarations),
            groups=DeclaredGroups(declarations, config),
            subscriptions=Subscriptions(declarations, clock, new_id=new_id),
            pipelines=Pipelines(declarations, clock, new_id=new_id),
            schemas=SchemaRegistry(declarations),
            mirrors=Mirrors(declarations, clock, new_id=new_id),
        )
        built.security.load_owned = built._load_owned
        return built

    @property
    def with_secrets(self) -> tuple[SecretHolder, ...]:
        """Return the holders of declarations whose settings may be secrets."""
        return (self.subscriptions, self.pipelines, self.mirrors)

    async def _load_owned(self) -> None:
        await self.subscriptions.load()
        await self.pipelines.load()

    async def load(self) -> None:
        for noun in dataclasses.fields(self):
            await getattr(self, noun.name).load()
