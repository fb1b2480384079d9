"""The quotas of clients: declared in the catalog, held in memory for enforcement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from millstream.broker.cluster.declarations import Declarations
from millstream.core.errors import InvalidRequest
from millstream.core.quota import Allotment, QuotaEntity, candidates, check_limit
from millstream.core.tasks import finishing

_logger = logging.getLogger(__name__)

ENTITIES_MAX = 10_000


class ClientQuotas:
    """Every quota, by the entity it is for."""

    def __init__(self, declarations: Declarations) -> None:
        self._declarations = declarations
        self._limits: dict[QuotaEntity, dict[str, float]] = {}
        self._listeners: list[Callable[[], None]] = []
        # One change of the catalog at a time; readers never wait for it.
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the catalog."""
        self._limits = await self._declarations.client_quotas()
        self._notify()

    def all(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """Return every entity and its limits."""
        return self._limits

    def has(self, key: str) -> bool:
        """Whether any client's bytes are limited in this way."""
        return any(key in limits for limits in self._limits.values())

    def find(self, key: str, user: str, client_id: str) -> Allotment | None:
        """Return how many bytes a second a client may take; None if nothing limits it."""
        for entity, scope in candidates(user, client_id):
            rate = self._limits.get(entity, {}).get(key)
            if rate is not None:
                return Allotment(rate, scope)
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
            merged: dict[str, float | None] = {**before, **changes}
            limits = {key: value for key, value in merged.items() if value is not None}
            if entity not in self._limits and len(self._limits) >= ENTITIES_MAX:
                raise InvalidRequest(f"there are {ENTITIES_MAX} quotas already; remove some first")
            if validate_only or limits == before:
                return
            await self._declarations.change_client_quotas({entity: limits})
            if limits:
                self._limits[entity] = limits
            else:
                del self._limits[entity]
            _logger.info("quota changed", extra={"entity": str(entity), "limits": str(limits)})
            self._notify()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
