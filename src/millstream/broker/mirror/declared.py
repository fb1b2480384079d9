"""The declared mirrors, held in memory on every node; the catalog is the source of truth."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import NamedHolder
from millstream.core.errors import InvalidMirror, MirrorExists, UnknownMirror
from millstream.core.mirror import Mirror, MirrorSettings, TopicOffsets, check_mirror
from millstream.core.setting import check_destinations, with_changes
from millstream.core.tasks import finishing
from millstream.core.topic import TopicPartition

_logger = logging.getLogger(__name__)

MIRRORS_MAX: Final = 100


class Mirrors(NamedHolder[Mirror]):
    noun = "mirror"
    unknown = UnknownMirror

    async def load(self) -> None:
        await self._load(Catalog.mirrors)

    async def find(self, name: str) -> Mirror:
        """Return the mirror of this name, asking the catalog if another node may have just declared it."""
        if name not in self._by_name:
            await self.load()
        return self.existing(name)

    @finishing
    async def create(self, name: str, overrides: Mapping[str, str], *, is_enabled: bool = True) -> Mirror:
        check_mirror(name, overrides)
        async with self._changing:
            if len(self._by_name) >= MIRRORS_MAX:
                raise InvalidMirror(f"there are {MIRRORS_MAX} mirrors already; delete some first")
            if name in self._by_name:
                raise MirrorExists(f"mirror {name!r} already exists")
            made = Mirror(
                mirror_id=self._new_id(),
                name=name,
                overrides=dict(overrides),
                is_enabled=is_enabled,
                created_ms=self._clock.now_ms(),
            )
            await self._declarations.change(Catalog.add_mirror, made)
            self._by_name[name] = made
        _logger.info("mirror created", extra={"mirror": name, "source": overrides.get("from", "")})
        self._notify()
        return made

    async def alter(self, name: str, changes: Mapping[str, str | None]) -> Mirror:
        """Change settings durably; None resets one to its default."""

        def changed(now: Mirror) -> Mirror:
            MirrorSettings.check_names(changes)
            overrides = with_changes(now.overrides, changes)
            settings = check_mirror(name, overrides)
            check_destinations(MirrorSettings, {*now.overrides, *now.sealed}, now.overrides, changes)
            if settings.rename != now.settings.rename:
                raise InvalidMirror(
                    f"mirror {name!r} already has copies, whose names cannot change; create another mirror instead"
                )
            sealed = {key: value for key, value in now.sealed.items() if key not in changes}
            return dataclasses.replace(now, overrides=overrides, sealed=sealed)

        return await self.change(name, changed)

    async def set_enabled(self, name: str, *, is_enabled: bool) -> Mirror:
        """Pause a mirror, or let it continue."""
        return await self.change(name, lambda now: dataclasses.replace(now, is_enabled=is_enabled, resumes=False))

    @finishing
    async def change(self, name: str, change: Callable[[Mirror], Mirror]) -> Mirror:
        """Change a mirror durably, as it is declared now."""
        mirror = await self.find(name)
        async with self._changing:
            stored = await self._declarations.change(Catalog.alter_mirror, mirror.mirror_id, change)
            is_new = self._by_name.get(name) != stored
            self._by_name[name] = stored
        if is_new:
            _logger.info("mirror changed", extra={"mirror": name})
            self._notify()
        return stored

    async def note_verified(
        self, mirror: Mirror, verified: TopicOffsets, group_offsets: Mapping[str, TopicOffsets]
    ) -> None:
        """Record durably up to where transactions have arrived as a whole; not once the mirror is stopped.

        `group_offsets` are those that these transactions have committed, and that are not applied yet.
        """

        def noted(now: Mirror) -> Mirror:
            if not now.is_enabled:
                raise InvalidMirror(f"mirror {now.name!r} is paused")
            return dataclasses.replace(now, verified=verified, group_offsets=group_offsets)

        await self._record(mirror, noted, is_announced=False)

    async def note_gaps(self, mirror: Mirror, gaps: Mapping[TopicPartition, int | None]) -> TopicOffsets:
        """Record durably from where on copies may lack values of keys, or that they lack none; return all gaps.

        A recorded gap is never moved up: an earlier leader may have found it. Nothing is recorded once the mirror is
        stopped: a failover that has begun would not learn of it.
        """

        def noted(now: Mirror) -> Mirror:
            if not now.is_enabled:
                raise InvalidMirror(f"mirror {now.name!r} is paused")
            merged: dict[str, dict[int, int]] = {topic: dict(starts) for topic, starts in now.gaps.items()}
            for where, start in gaps.items():
                of_topic = merged.setdefault(where.topic, {})
                known = of_topic.pop(where.partition, start)
                if start is not None and known is not None:
                    of_topic[where.partition] = min(start, known)
            return dataclasses.replace(now, gaps={topic: starts for topic, starts in merged.items() if starts})

        return (await self._record(mirror, noted)).gaps

    async def _record(self, mirror: Mirror, change: Callable[[Mirror], Mirror], *, is_announced: bool = True) -> Mirror:
        """Change durably what is recorded of a mirror, without restarting it."""
        call = self._declarations.change if is_announced else self._declarations.call
        async with self._changing:
            stored = await call(Catalog.alter_mirror, mirror.mirror_id, change)
            if mirror.name in self._by_name:
                self._by_name[mirror.name] = stored
        return stored

    def unfinished_cuts(self, name: str) -> Collection[str]:
        mirror = self._by_name.get(name)
        return () if mirror is None else mirror.cut_epochs.keys()

    async def forget_topic(self, name: str, topic: str) -> None:
        """Forget the recorded state of a copy durably, because the copy is recreated."""
        known = self._by_name.get(name)
        if known is None:
            return
        recorded = (known.verified, known.gaps, known.cut_epochs, *known.group_offsets.values())
        if not any(topic in noted for noted in recorded):
            return

        def forgotten(now: Mirror) -> Mirror:
            return dataclasses.replace(
                now,
                verified={name: offsets for name, offsets in now.verified.items() if name != topic},
                group_offsets={
                    group: {name: offsets for name, offsets in group_offsets.items() if name != topic}
                    for group, group_offsets in now.group_offsets.items()
                },
                gaps={name: offsets for name, offsets in now.gaps.items() if name != topic},
                cut_epochs={name: epochs for name, epochs in now.cut_epochs.items() if name != topic},
            )

        await self._record(known, forgotten)

    async def record_gated(self, mirror: Mirror) -> None:
        """Record durably that readers wait at commits, before there is a copy: a failover has to know it, too."""
        known = self._by_name.get(mirror.name)
        if known is not None and not known.is_gated:
            await self._record(mirror, lambda now: dataclasses.replace(now, is_gated=True))

    async def claim_sightings(self, mirror: Mirror, *, source: str, owner: str) -> dict[str, set[str]]:
        """Return the schemas and access rules that were seen at a source; from now on only this owner changes that."""
        return await self._declarations.call(Catalog.claim_sightings, mirror.mirror_id, source=source, owner=owner)

    @finishing
    async def delete(self, name: str) -> Mirror:
        """Delete a mirror durably; raise `InvalidMirror` while it writes topics."""
        mirror = await self.find(name)
        async with self._changing:
            try:
                await self._delete(Catalog.delete_mirror, mirror)
            except InvalidMirror:
                self._by_name[name] = mirror
                raise
        _logger.info("mirror deleted", extra={"mirror": name})
        self._notify()
        return mirror
