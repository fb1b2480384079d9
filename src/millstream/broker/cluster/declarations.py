"""What users declare, as the cluster reads it: the catalog behind an asynchronous interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.schema_store import SchemaTransaction
from millstream.broker.cluster import keys
from millstream.broker.cluster.store import CoordinationStore, Put
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock, SystemClock
from millstream.core.credential import DeclaredSecurity, SecurityChange
from millstream.core.errors import CatalogDenied, CatalogUnavailable, StoreUnavailable
from millstream.core.ids import first_producer_id
from millstream.core.job import JobRun
from millstream.core.mirror import Mirror, SightingChange
from millstream.core.pipeline import Pipeline
from millstream.core.quota import QuotaEntity
from millstream.core.schema import SchemaChanges
from millstream.core.subscription import Subscription
from millstream.core.topic import Topic

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_PRODUCER_IDS: Final = "producer-id"
Quotas = Mapping[QuotaEntity, Mapping[str, float]]


class Declarations:
    """Calls the catalog; see `broker/catalog/catalog.py` for what each call does."""

    async def cluster_id(self) -> str:
        """Return the id that clients see."""
        return await self.call(lambda catalog: catalog.cluster_id)

    async def topics(self) -> list[Topic]:
        """Return every topic, by name."""
        return await self.call(Catalog.topics)

    async def topic(self, topic_id: UUID) -> Topic | None:
        """Return one topic, if it is declared."""
        return await self.call(lambda catalog: catalog.topic(topic_id))

    async def add_topic(self, topic: Topic) -> None:
        """Declare a topic, durably."""
        await self._change(lambda catalog: catalog.add_topic(topic))

    async def alter_topic(self, topic_id: UUID, change: Callable[[Topic], Topic]) -> Topic:
        """Change the partitions or settings of a topic as it is declared now, in one step."""
        return await self._change(lambda catalog: catalog.alter_topic(topic_id, change))

    async def delete_topic(self, topic: Topic, *, now_ms: int) -> None:
        """Delete a topic and write the record that allows its files to be removed."""
        await self._change(lambda catalog: catalog.delete_topic(topic, now_ms=now_ms))

    async def deleted_topic_ids(self) -> set[UUID]:
        """Return the topics whose files may be removed."""
        return await self.call(Catalog.deleted_topic_ids)

    async def forget_deleted(self, topic_id: UUID) -> None:
        """Drop the deletion record once the files are gone."""
        await self.call(lambda catalog: catalog.forget_deleted(topic_id))

    async def take_producer_ids(self, count: int) -> int:
        """Take some producer ids, which are never given out again, and return the first.

        They come from the range of this cluster, so that those of a mirrored cluster are never among them.
        """

        def take(catalog: Catalog) -> int:
            return catalog.take_block(_PRODUCER_IDS, count, first=first_producer_id(catalog.cluster_id))

        return await self.call(take)

    async def client_quotas(self) -> dict[QuotaEntity, dict[str, float]]:
        """Return the limits of every entity that has some."""
        return await self.call(Catalog.client_quotas)

    async def change_client_quotas(self, changes: Quotas) -> None:
        """Store the limits of some entities."""
        await self._change(lambda catalog: catalog.change_client_quotas(changes))

    async def group_settings(self) -> dict[str, dict[str, str]]:
        return await self.call(Catalog.group_settings)

    async def change_group_settings(self, group_id: str, overrides: Mapping[str, str]) -> None:
        """Store the settings of a group."""
        await self._change(lambda catalog: catalog.change_group_settings(group_id, overrides))

    async def broker_settings(self) -> dict[str, dict[str, str]]:
        """Return the settings of all nodes and of each node."""
        return await self.call(Catalog.broker_settings)

    async def change_broker_settings(
        self, scope: str, changes: Mapping[str, str | None], *, replace: bool = False
    ) -> dict[str, str]:
        """Set some settings of all nodes or of one, in one step; return all that are set then."""
        return await self._change(lambda catalog: catalog.change_broker_settings(scope, changes, replace=replace))

    async def security(self) -> DeclaredSecurity:
        """Return every user and every access rule."""
        return await self.call(Catalog.security)

    async def change_security(self, change: SecurityChange, sightings: SightingChange | None = None) -> None:
        """Store a change of users and access rules, and what a mirror has seen at its source."""
        await self._change(lambda catalog: catalog.change_security(change, sightings))

    async def subscriptions(self) -> list[Subscription]:
        """Return every subscription, by name."""
        return await self.call(Catalog.subscriptions)

    async def subscriptions_named(self, names: Sequence[str]) -> list[Subscription]:
        """Return the subscriptions with these names that exist."""
        return await self.call(lambda catalog: catalog.subscriptions_named(names))

    async def add_subscription(self, subscription: Subscription) -> None:
        """Declare a subscription, durably."""
        await self._change(lambda catalog: catalog.add_subscription(subscription))

    async def alter_subscription(
        self, subscription_id: UUID, change: Callable[[Subscription], Subscription]
    ) -> Subscription:
        """Change the topics or settings of a subscription as it is declared now, in one step."""
        return await self._change(lambda catalog: catalog.alter_subscription(subscription_id, change))

    async def delete_subscription(self, subscription: Subscription, *, now_ms: int) -> None:
        """Delete a subscription and write the record that allows its state to be removed."""
        await self._change(lambda catalog: catalog.delete_subscription(subscription, now_ms=now_ms))

    async def deleted_subscriptions(self) -> dict[UUID, int]:
        """Return the subscriptions whose state may be removed, and since when."""
        return await self.call(Catalog.deleted_subscriptions)

    async def forget_deleted_subscription(self, subscription_id: UUID) -> None:
        """Drop the deletion record once the state is gone everywhere."""
        await self.call(lambda catalog: catalog.forget_deleted_subscription(subscription_id))

    async def pipelines(self) -> list[Pipeline]:
        """Return every pipeline with its rules, by name."""
        return await self.call(Catalog.pipelines)

    async def pipeline_named(self, name: str) -> Pipeline | None:
        """Return the pipeline with this name, if it exists."""
        return await self.call(lambda catalog: catalog.pipeline_named(name))

    async def add_pipeline(self, pipeline: Pipeline) -> None:
        """Declare a pipeline, durably."""
        await self._change(lambda catalog: catalog.add_pipeline(pipeline))

    async def alter_pipeline(self, pipeline_id: UUID, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        """Change a pipeline or its rules as it is declared now, in one step."""
        return await self._change(lambda catalog: catalog.alter_pipeline(pipeline_id, change))

    async def delete_pipeline(self, pipeline: Pipeline) -> None:
        """Delete a pipeline with its rules."""
        await self._change(lambda catalog: catalog.delete_pipeline(pipeline))

    async def mirrors(self) -> list[Mirror]:
        """Return every mirror, by name."""
        return await self.call(Catalog.mirrors)

    async def add_mirror(self, mirror: Mirror) -> None:
        """Declare a mirror, durably."""
        await self._change(lambda catalog: catalog.add_mirror(mirror))

    async def alter_mirror(self, mirror_id: UUID, change: Callable[[Mirror], Mirror]) -> Mirror:
        """Change a mirror as it is declared now, in one step."""
        return await self._change(lambda catalog: catalog.alter_mirror(mirror_id, change))

    async def note_mirror(self, mirror_id: UUID, change: Callable[[Mirror], Mirror]) -> Mirror:
        """Change the progress of a mirror, which nodes do not have to read at once."""
        return await self.call(lambda catalog: catalog.alter_mirror(mirror_id, change))

    async def delete_mirror(self, mirror: Mirror) -> None:
        """Delete a mirror."""
        await self._change(lambda catalog: catalog.delete_mirror(mirror))

    async def claim_sightings(self, mirror_id: UUID, *, source: str, owner: str) -> dict[str, set[str]]:
        """Return what a mirror has seen at a source; only this owner may change it from now on."""
        return await self.call(lambda catalog: catalog.claim_sightings(mirror_id, source=source, owner=owner))

    async def store_sightings(self, change: SightingChange) -> None:
        """Store what a mirror has seen at its source, which only the controller reads."""
        await self.call(lambda catalog: catalog.store_sightings(change))

    async def job_runs(self, pipeline_id: UUID, *, limit: int) -> list[JobRun]:
        """Return the last runs of a job, the latest first."""
        return await self.call(lambda catalog: catalog.job_runs(pipeline_id, limit=limit))

    async def begin_job_run(self, run: JobRun) -> bool:
        """Store that a run begins; return whether it does."""
        # Runs are not declared state, so no node is notified.
        return await self.call(lambda catalog: catalog.begin_job_run(run))

    async def update_job_run(self, before: JobRun, after: JobRun) -> bool:
        """Store the progress of a run; return False if another node has taken over."""
        return await self.call(lambda catalog: catalog.update_job_run(before, after))

    async def schema_changes(self, since: int) -> SchemaChanges:
        """Return what the schema registry stored after a change."""
        return await self.call(lambda catalog: catalog.schema_changes(since))

    async def change_schemas(
        self, since: int, work: Callable[[SchemaTransaction], None], sightings: SightingChange | None = None
    ) -> SchemaChanges:
        """Change the schema registry in one transaction, with what a mirror has seen; return all that is new."""
        return await self._change(lambda catalog: catalog.change_schemas(since, work, sightings))

    async def call(self, ask: Callable[[Catalog], T]) -> T:
        """Run one call of the catalog, without blocking the loop."""
        raise NotImplementedError

    async def _change(self, ask: Callable[[Catalog], T]) -> T:
        """Run a call that changes what the nodes of a cluster read."""
        return await self.call(ask)


class CatalogDeclarations(Declarations):
    """The catalog, each call in a thread."""

    def __init__(self, catalog: Catalog, *, is_prepared: bool = True, clock: Clock | None = None) -> None:
        self.away_since_ms: int | None = None
        """Since when, on the wall clock, it does not answer; None while it does."""
        self._catalog = catalog
        self._clock = clock or SystemClock()
        self._is_prepared = is_prepared
        self._answered_once = False
        self._preparing = asyncio.Lock()

    async def call(self, ask: Callable[[Catalog], T]) -> T:
        """Call the catalog in a thread."""
        try:
            answer = await self._ask(ask)
        except CatalogUnavailable as error:
            if self.away_since_ms is None:
                self.away_since_ms = self._clock.now_ms()
                if self._answered_once:
                    # Before that, the task that waits for the first answer reports it.
                    how = "refuses this node" if isinstance(error, CatalogDenied) else "is unavailable"
                    _logger.warning(
                        "the catalog %s; data flows, changes of topics and quotas wait",
                        how,
                        extra={"reason": str(error)},
                    )
            raise
        self._answered_once = True
        if self.away_since_ms is not None:
            _logger.info("the catalog is back", extra={"away_ms": self._clock.now_ms() - self.away_since_ms})
            self.away_since_ms = None
        return answer

    async def _ask(self, ask: Callable[[Catalog], T]) -> T:
        if not self._is_prepared:
            # The catalog of a cluster may be unavailable when a node starts; its tables are prepared later then.
            async with self._preparing:
                if not self._is_prepared:
                    await asyncio.to_thread(self._catalog.prepare)
                    self._is_prepared = True
        return await asyncio.to_thread(ask, self._catalog)


class Announcer:
    """Announces changes of the catalog to the cluster, and retries while the store is unavailable."""

    def __init__(self, store: CoordinationStore, backoff: Backoff, *, new_text: Callable[[], str]) -> None:
        self._store = store
        self._backoff = backoff
        self._new_text = new_text
        self._wanted = asyncio.Event()
        self._is_certain = True
        self.author = new_text()
        """The name of this process in what it announces; it has applied its own changes already."""

    def announce(self, *, is_certain: bool) -> None:
        """Announce a change before long; one that may have failed concerns this process too."""
        self._is_certain &= is_certain
        self._wanted.set()

    async def run(self) -> None:
        """Announce changes when asked to; runs forever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            author, self._is_certain = self.author if self._is_certain else "", True
            try:
                await self._store.change([Put(keys.CATALOG_VERSION, f"{author} {self._new_text()}")])
                self._backoff.reset()
            except StoreUnavailable as error:
                _logger.warning("a change of the catalog could not be announced yet", extra={"error": str(error)})
                self.announce(is_certain=bool(author))
                await self._backoff.pause()


class AnnouncedDeclarations(Declarations):
    """The catalog of a cluster: each change is announced to all nodes."""

    def __init__(self, inner: Declarations, announcer: Announcer) -> None:
        self._inner = inner
        self._announcer = announcer

    async def call(self, ask: Callable[[Catalog], T]) -> T:
        """Call the catalog."""
        return await self._inner.call(ask)

    async def _change(self, ask: Callable[[Catalog], T]) -> T:
        try:
            answer = await self._inner.call(ask)
        except BaseException:
            # The failure may have come too late to stop the change.
            self._announcer.announce(is_certain=False)
            raise
        self._announcer.announce(is_certain=True)
        return answer
