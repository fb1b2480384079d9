"""What there is to do once per mirror: topics, settings, partitions, groups, queues and transactions.

Only the controller of the target does it. Everything here may be repeated, so two nodes that both take themselves for
the controller for a moment do no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from millstream.broker.mirror.copier import Copier
from millstream.broker.mirror.source import Source
from millstream.core.errors import MillstreamError, TopicExists
from millstream.core.topic import INTERNAL_TOPICS, TopicSettings
from millstream.protocol.private.mirror_messages import OFFER_KEY, OfferRequest, OfferResponse
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.topic_configs import topic_configs

if TYPE_CHECKING:
    from millstream.broker.mirror.service import MirrorRun

_logger = logging.getLogger(__name__)

TOPICS_S: Final = 1.0
"""How often the source is asked for its topics."""
CONFIGS_S: Final = 10.0
"""How often the source is asked for the settings of known topics."""


class Follower:
    """The owner's part of a mirror."""

    def __init__(self, run: MirrorRun, source: Source, copier: Copier) -> None:
        self._run = run
        self._service = run.service
        self._source = source
        self._copier = copier
        self._settings = run.settings
        self._configs_at = 0.0
        self._absent: dict[str, int] = {}
        """Copies whose original is gone, and how often in a row it was not found."""

    async def run(self) -> None:
        """Run until cancelled or until the source cannot be reached."""
        while True:
            if self._service.is_owner:
                await self._sync_topics()
            await asyncio.sleep(TOPICS_S)

    # -- topics ---------------------------------------------------------------------------------------------

    async def _sync_topics(self) -> None:
        metadata = await self._source.metadata()
        mirrored = frozenset[str]()
        if self._source.is_millstream:
            offer = await self._source.ask(None, OFFER_KEY, OfferRequest(), OfferResponse)
            mirrored = frozenset(offer.mirrored)
        now = self._service.clock.monotonic()
        checks_configs = now >= self._configs_at
        if checks_configs:
            self._configs_at = now + CONFIGS_S
        for name, topic in sorted(metadata.topics.items()):
            if not self._is_wanted(topic):
                continue
            key = f"topic {name}"
            if name in mirrored:
                self._run.notes[key] = f"topic {name!r} is a mirror's copy on the source, and is not mirrored again"
                continue
            try:
                await self._sync_topic(topic, checks_configs=checks_configs)
                self._run.notes.pop(key, None)
            except MillstreamError as error:
                self._run.notes[key] = f"topic {name!r}: {error}"
        await self._sync_deletions(metadata.topics)

    def _is_wanted(self, topic: TopicMetadata) -> bool:
        if topic.is_internal or topic.name in INTERNAL_TOPICS:
            return False
        only = self._run.mirror.topic_ids
        if only is not None and topic.topic_id not in only:
            return False
        return self._settings.takes(topic.name)

    async def _sync_topic(self, original: TopicMetadata, *, checks_configs: bool) -> None:
        topics, name = self._service.topics, self._settings.rename + original.name
        copy = topics.get(name)
        if copy is None:
            await self._create(original, name)
            return
        if copy.mirror != self._run.mirror.name:
            if copy.mirror:
                raise TopicExists(f"{name!r} is a copy of mirror {copy.mirror!r} here")
            raise TopicExists(f"{name!r} exists here already; delete it, or mirror it under another name (--rename)")
        if not self._settings.rename and original.topic_id.int and copy.topic_id != original.topic_id:
            raise TopicExists(
                f"{name!r} was deleted on the source and created anew; delete the copy here to mirror the new one"
            )
        if len(original.partitions) > copy.partitions:
            await topics.add_partitions(name, len(original.partitions))
            self._run.refreshed.set()
        if checks_configs:
            wanted = await self._overrides(original.name)
            if dict(copy.overrides) != wanted:
                await topics.alter(name, wanted, replace=True)

    async def _create(self, original: TopicMetadata, name: str) -> None:
        service, settings = self._service, self._settings
        nodes = len(service.membership.nodes())
        replication = min(settings.replication or original.replication or 1, nodes)
        topic_id = None if settings.rename or not original.topic_id.int else original.topic_id
        await service.topics.create(
            name,
            partitions=len(original.partitions),
            replication=max(1, replication),
            overrides=await self._overrides(original.name),
            mirror=self._run.mirror.name,
            topic_id=topic_id,
        )
        self._run.refreshed.set()

    async def _overrides(self, name: str) -> dict[str, str]:
        """Return what the owner of a topic has set on the source, as far as topics here have such settings."""
        found = {
            key: config.value
            for key, config in (await topic_configs(self._source.client, name)).items()
            if config.is_override and config.value is not None
        }
        usable: dict[str, str] = {}
        for key, text in found.items():
            try:
                TopicSettings.from_strings({key: text}, base=self._service.topics.defaults_for(1))
                usable[key] = text
            except MillstreamError as error:
                self._run.notes[f"setting {name} {key}"] = f"topic {name!r} is mirrored without {key}={text}: {error}"
        return usable

    async def _sync_deletions(self, originals: Mapping[str, TopicMetadata]) -> None:
        """Delete copies of deleted topics, if that is wanted; otherwise they stay as they are."""
        for copy in self._service.copied_topics(self._run.mirror.name):
            name = self._run.mirror.source_name(copy)
            if name in originals:
                self._absent.pop(name, None)
                continue
            self._absent[name] = self._absent.get(name, 0) + 1
            if not self._settings.deletions:
                self._run.notes[f"topic {name}"] = f"topic {name!r} is gone from the source; its copy stays"
            elif self._absent[name] >= 3:
                await self._service.topics.delete(copy.name)
