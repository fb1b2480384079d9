"""The subscriptions: declared in the catalog, held in memory on every node that delivers them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations, NamedHolder
from millstream.core.clock import Clock
from millstream.core.credential import NO_OWNER, Owner
from millstream.core.errors import CatalogUnavailable, InvalidSubscription, SubscriptionExists, UnknownSubscription
from millstream.core.setting import check_destinations, with_changes
from millstream.core.subscription import (
    OWN_PREFIX,
    Subscription,
    SubscriptionSettings,
    check_subscription,
    dead_letter_topic_for,
    settings_of_new,
    topic_of_start,
    without_secrets,
)
from millstream.core.tasks import finishing

_logger = logging.getLogger(__name__)

SUBSCRIPTIONS_MAX = 100_000
DELETION_KEPT_MS = 7 * 24 * 3600 * 1000
"""How long a deletion is remembered, for nodes that are down meanwhile."""

CheckFilter = Callable[[str], object]
"""Raises an `InvalidRequest` that points at the mistake in the text of a filter."""


class _Lookup:
    """Names that are looked up in the catalog together."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_read = False
        self.error: CatalogUnavailable | None = None


class Subscriptions(NamedHolder[Subscription]):
    """Every declared subscription, by its name and by its id."""

    noun = "subscription"
    unknown = UnknownSubscription

    def __init__(
        self,
        declarations: Declarations,
        clock: Clock,
        *,
        new_id: Callable[[], UUID] = uuid.uuid4,
    ) -> None:
        super().__init__(declarations, clock, new_id=new_id)
        self._check_filter: CheckFilter = lambda _text: None
        self._has_topic: Callable[[str], bool] = lambda _name: False
        self._by_id: dict[UUID, Subscription] = {}
        self._settings: dict[UUID, SubscriptionSettings] = {}
        self._deleted: dict[UUID, int] = {}
        self._lookup = _Lookup()

    def use_filters(self, check: CheckFilter) -> None:
        """Check the text of every filter that is declared from now on with `check`."""
        self._check_filter = check

    def use_topics(self, has_topic: Callable[[str], bool]) -> None:
        """Choose names of dead letter topics that no topic has."""
        self._has_topic = has_topic

    async def load(self) -> None:
        async with self._changing:
            declared = await self._declarations.call(Catalog.subscriptions)
            self._deleted = await self._declarations.call(Catalog.deleted_subscriptions)
            await self._forget_old_deletions()
            self._by_name = {subscription.name: subscription for subscription in declared}
            self._by_id = {subscription.subscription_id: subscription for subscription in declared}
            self._settings = {subscription.subscription_id: subscription.settings for subscription in declared}
        self._notify()

    def by_id(self, subscription_id: UUID) -> Subscription | None:
        return self._by_id.get(subscription_id)

    def settings_of(self, subscription: Subscription) -> SubscriptionSettings:
        return self._settings[subscription.subscription_id]

    def is_deleted(self, subscription_id: UUID) -> bool:
        """Whether its queues' state may be removed: only ever true because of a recorded deletion."""
        return subscription_id in self._deleted

    async def find(self, name: str) -> Subscription:
        """Return the subscription with this name; another node may have declared it just now."""
        if name not in self._by_name:
            await self._look_up(name)
        return self.existing(name)

    async def ensure(self, name: str) -> Subscription:
        """Return the subscription with this name; if it does not exist, declare it without topics, as a share group."""
        with suppress(UnknownSubscription):
            return await self.find(name)
        # Another node may declare it first.
        with suppress(SubscriptionExists):
            return await self.create(name, (), {})
        return await self.find(name)

    @finishing
    async def create(
        self,
        name: str,
        topics: Sequence[str],
        overrides: Mapping[str, str],
        *,
        starts: Mapping[str, tuple[int, ...]] | None = None,
        validate_only: bool = False,
        owner: Owner | None = None,
        subscription_id: UUID | None = None,
        is_limited: bool = True,
    ) -> Subscription:
        """Declare a subscription durably; `starts` says where its queues begin, for existing partitions.

        The defaults for new subscriptions are written into it, unless it has no topics, as a share group. One of a
        mirror has the id that it has on the source. One that is not limited is declared even if there are too many.
        """
        subscription_id = subscription_id or self._new_id()
        settings = _with_defaults(name, topics, overrides, self._dead_letter_topic(name, subscription_id, topics))
        # In a thread, since the filter language is loaded on first use.
        await asyncio.to_thread(self._check, name, topics, settings)
        async with self._changing:
            if known := self._by_name.get(name):
                raise _already_exists(known)
            if is_limited and len(self._by_name) >= SUBSCRIPTIONS_MAX:
                raise InvalidSubscription(f"there are {SUBSCRIPTIONS_MAX} subscriptions already; delete some first")
            made = Subscription(
                name=name,
                subscription_id=subscription_id,
                topics=tuple(topics),
                overrides=settings,
                created_ms=self._clock.now_ms(),
                starts=dict(starts or {}),
                owner=owner or NO_OWNER,
            )
            if validate_only:
                return made
            await self._declarations.change(Catalog.add_subscription, made)
            self._store(made)
        _logger.info("subscription created", extra={"subscription": name, "topics": ",".join(topics)})
        self._notify()
        return made

    @finishing
    async def alter(
        self,
        name: str,
        changes: Mapping[str, str | None],
        *,
        topics: Sequence[str] | None = None,
        starts: Mapping[str, tuple[int, ...]] | None = None,
        validate_only: bool = False,
        owner: Owner | None = None,
    ) -> Subscription:
        """Set some settings of a subscription, durably; None resets a setting to the default of new subscriptions.

        `starts` says where the queues of further topics begin.
        """
        subscription = await self.find(name)
        dead_letter_topic = self._dead_letter_topic(name, subscription.subscription_id, topics or subscription.topics)

        def changed(now: Subscription) -> Subscription:
            new_topics = now.topics if topics is None else tuple(topics)
            given = with_changes(now.overrides, changes)
            overrides = _with_defaults(name, new_topics, given, dead_letter_topic)
            self._check(name, new_topics, overrides)
            check_destinations(SubscriptionSettings, {*now.overrides, *now.sealed}, now.overrides, changes)
            begun = {**(starts or {}), **now.starts}
            kept = {key: offsets for key, offsets in begun.items() if topic_of_start(key) in new_topics}
            sealed = {name: value for name, value in now.sealed.items() if name not in changes}
            return dataclasses.replace(
                now, overrides=overrides, topics=new_topics, starts=kept, sealed=sealed, owner=owner or now.owner
            )

        # Checked before the catalog is asked, and again with the current declaration.
        preview = await asyncio.to_thread(changed, subscription)
        if validate_only:
            return preview
        async with self._changing:
            stored = await self._declarations.change(Catalog.alter_subscription, subscription.subscription_id, changed)
            self._store(stored)
        given = without_secrets(with_changes({}, changes))
        _logger.info("subscription changed", extra={"subscription": name, "changes": str({**changes, **given})})
        self._notify()
        return stored

    @finishing
    async def record_use(self, name: str, used_ms: int) -> None:
        subscription = self.existing(name)
        async with self._changing:
            stored = await self._declarations.change(
                Catalog.alter_subscription,
                subscription.subscription_id,
                lambda now: dataclasses.replace(now, used_ms=max(now.used_ms, used_ms)),
            )
            self._store(stored)

    @finishing
    async def delete(self, name: str) -> Subscription:
        """Delete a subscription, durably; the state of its queues is removed after that."""
        await self.find(name)
        async with self._changing:
            subscription = self.existing(name)
            now_ms = self._clock.now_ms()
            await self._declarations.change(Catalog.delete_subscription, subscription, now_ms=now_ms)
            del self._by_name[name]
            del self._by_id[subscription.subscription_id]
            del self._settings[subscription.subscription_id]
            self._deleted[subscription.subscription_id] = now_ms
        _logger.info("subscription deleted", extra={"subscription": name})
        self._notify()
        return subscription

    def _dead_letter_topic(self, name: str, subscription_id: UUID, topics: Sequence[str]) -> str:
        """Return the dead letter topic of a subscription that names none: the one it has, or an unused name."""
        others = {
            settings.dead_letter_topic for other_id, settings in self._settings.items() if other_id != subscription_id
        }
        own = self._settings.get(subscription_id)

        def is_taken(topic: str) -> bool:
            is_own = own is not None and topic == own.dead_letter_topic
            return topic in others or topic in topics or (not is_own and self._has_topic(topic))

        return dead_letter_topic_for(name, subscription_id, is_taken)

    def _check(self, name: str, topics: Sequence[str], overrides: Mapping[str, str]) -> None:
        settings = check_subscription(name, topics, overrides)
        if settings.filter:
            self._check_filter(settings.filter)

    def _store(self, subscription: Subscription) -> None:
        self._by_name[subscription.name] = subscription
        self._by_id[subscription.subscription_id] = subscription
        self._settings[subscription.subscription_id] = subscription.settings
        self._deleted.pop(subscription.subscription_id, None)

    async def _look_up(self, name: str) -> None:
        """Read the declaration of a name from the catalog, together with other names requested meanwhile.

        Any number of requests for unknown names cause one query at a time.
        """
        lookup = self._lookup
        lookup.names.add(name)
        async with self._changing:
            if name in self._by_name:
                return
            if not lookup.is_read:
                await self._read_names(lookup)
        if lookup.error is not None:
            raise lookup.error

    async def _read_names(self, lookup: _Lookup) -> None:
        # Later lookups may be for subscriptions declared from now on.
        self._lookup = _Lookup()
        try:
            declared = await self._declarations.call(Catalog.subscriptions_named, sorted(lookup.names))
        except CatalogUnavailable as error:
            lookup.error = error
            declared = []
        lookup.is_read = True
        for subscription in declared:
            self._store(subscription)
        if declared:
            self._notify()

    async def _forget_old_deletions(self) -> None:
        long_ago = self._clock.now_ms() - DELETION_KEPT_MS
        for subscription_id in [
            deleted_id for deleted_id, deleted_ms in self._deleted.items() if deleted_ms < long_ago
        ]:
            await self._declarations.call(Catalog.forget_deleted_subscription, subscription_id)
            del self._deleted[subscription_id]


def _already_exists(known: Subscription) -> SubscriptionExists:
    if known.topics:
        return SubscriptionExists(f"subscription {known.name!r} already exists")
    # Its settings, such as a push endpoint, may be of another user, so creating it does not adopt them.
    return SubscriptionExists(
        f"group {known.name!r} already exists, as a share group without topics of its own, perhaps only by its "
        "settings; give it topics with `millstream subscription update`, which keeps these settings, or delete it first"
    )


def _with_defaults(
    name: str, topics: Sequence[str], overrides: Mapping[str, str], dead_letter_topic: str
) -> dict[str, str]:
    """Return the settings with the defaults of new subscriptions; share groups and internal ones have Kafka's."""
    return (
        settings_of_new(overrides, dead_letter_topic) if topics and not name.startswith(OWN_PREFIX) else dict(overrides)
    )
