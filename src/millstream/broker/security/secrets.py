"""The secrets of the catalog while a node runs: follows the key file, and reports secrets that cannot be opened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.sealing import Sealable, SealedSecret, Sealing
from millstream.core.errors import InvalidSetting, MillstreamError
from millstream.core.setting import seal_problem

_logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 2.0
_NAMED_MAX: Final = 10


class SecretHolder(Protocol):
    """A node's copy of declarations that have secrets."""

    def all(self) -> Iterable[Sealable]: ...
    async def load(self) -> None: ...
    def on_change(self, listener: Callable[[], None], /) -> None: ...


class StoredSecrets:
    """The sealed secrets of the catalog, and whether this node can open them."""

    def __init__(self, catalog: Catalog, sealing: Sealing, holders: Sequence[SecretHolder]) -> None:
        self._catalog = catalog
        self._sealing = sealing
        self._holders = holders
        self._problems: dict[str, str] = {}
        self._has_problems = asyncio.Event()
        for holder in holders:
            holder.on_change(self._check_sealed)
        self._check_sealed()

    async def list(self) -> list[SealedSecret]:
        return await asyncio.to_thread(self._catalog.secrets)

    async def reseal(self) -> int:
        """Reseal secrets of older keys with the newest key; return how many."""
        resealed = await asyncio.to_thread(self._catalog.reseal)
        _logger.info("secrets resealed", extra={"count": resealed, "key": self.newest_key_id()})
        return resealed

    def newest_key_id(self) -> str:
        """Return the id of the key that seals; empty without one."""
        try:
            return self._sealing.current().key_id
        except InvalidSetting:
            return ""

    def warnings(self) -> Iterable[str]:
        """Yield the secrets that this node cannot open, and why."""
        for place, problem in sorted(self._problems.items())[:_NAMED_MAX]:
            yield f"{place}: {problem}"

    async def run(self) -> None:
        """Retry secrets that cannot be opened when the key file changes; runs forever."""
        while True:
            await self._has_problems.wait()
            await asyncio.sleep(CHECK_INTERVAL_S)
            if not self._sealing.has_changed():
                continue
            try:
                for holder in self._holders:
                    await holder.load()
            except MillstreamError as error:
                _logger.warning("secrets could not be read again", extra={"error": str(error)})

    def _check_sealed(self) -> None:
        problems = {
            f"{declaration.noun} {declaration.name!r}": seal_problem(declaration.sealed)
            for holder in self._holders
            for declaration in holder.all()
            if declaration.sealed
        }
        for place in sorted(problems.keys() - self._problems.keys())[:_NAMED_MAX]:
            _logger.warning(
                "a secret cannot be opened; what needs it is parked", extra={"of": place, "reason": problems[place]}
            )
        self._problems = problems
        if problems:
            self._has_problems.set()
        else:
            self._has_problems.clear()
