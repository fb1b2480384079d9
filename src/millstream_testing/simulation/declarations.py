"""The catalog of a simulation: in memory, behind the network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar
from uuid import UUID

from millstream.core.credential import DeclaredSecurity, SecurityChange
from millstream.core.errors import CatalogUnavailable, TopicExists
from millstream.core.pipeline import Pipeline
from millstream.core.quota import QuotaEntity
from millstream.core.subscription import Subscription
from millstream.core.topic import Topic
from millstream_testing.simulation.network import LinkDown, Network

T = TypeVar("T")

CATALOG: Final = "catalog"
TIMEOUT_S = 3.0


class SimulatedDeclarations:
    """What people declared; one for all nodes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._topics: dict[UUID, Topic] = {}
        self._deleted: set[UUID] = set()
        self._subscriptions: dict[UUID, Subscription] = {}
        self._deleted_subscriptions: dict[UUID, int] = {}
        self._pipelines: dict[UUID, Pipeline] = {}
        self._next = 1

    def declare(self, topic: Topic) -> None:
        """Add a topic without any node's help, as if it had been there before."""
        self._topics[topic.topic_id] = topic

    async def topics(self) -> list[Topic]:
        """Every topic, by name."""
        return await self._ask(lambda: sorted(self._topics.values(), key=lambda topic: topic.name))

    async def add_topic(self, topic: Topic) -> None:
        """Declare a topic; `TopicExists` when its name is taken."""

        def add() -> None:
            if any(topic.name == known.name for known in self._topics.values()):
                raise TopicExists(f"topic {topic.name!r} exists")
            self.declare(topic)

        await self._ask(add)

    async def alter_topic(self, topic_id: UUID, change: Callable[[Topic], Topic]) -> Topic:
        """Change a topic as it is declared now."""

        def alter() -> Topic:
            self._topics[topic_id] = change(self._topics[topic_id])
            return self._topics[topic_id]

        return await self._ask(alter)

    async def delete_topic(self, topic: Topic, *, now_ms: int) -> None:
        """Take a topic out and leave the record that allows its files to go."""

        def delete() -> None:
            if self._topics.pop(topic.topic_id, None) is not None:
                self._deleted.add(topic.topic_id)

        await self._ask(delete)

    async def deleted_topic_ids(self) -> set[UUID]:
        """Topics whose files may go."""
        return await self._ask(lambda: set(self._deleted))

    async def forget_deleted(self, topic_id: UUID) -> None:
        """Drop the deletion record."""
        await self._ask(lambda: self._deleted.discard(topic_id))

    async def take_block(self, counter: str, size: int) -> int:
        """Take numbers for good; all counters count together here."""

        def take() -> int:
            first, self._next = self._next, self._next + size
            return first

        return await self._ask(take)

    async def client_quotas(self) -> dict[QuotaEntity, dict[str, float]]:
        """Limit no client."""
        return {}

    async def change_client_quotas(self, changes: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        """Limit no client."""

    async def group_settings(self) -> dict[str, dict[str, str]]:
        """No group has settings of its own."""
        return {}

    async def change_group_settings(self, group_id: str, overrides: Mapping[str, str]) -> None:
        """No group has settings of its own."""

    async def broker_settings(self) -> dict[str, dict[str, str]]:
        """No node has settings of its own."""
        return {}

    async def change_broker_settings(
        self, scope: str, changes: Mapping[str, str | None], *, replace: bool = False
    ) -> dict[str, str]:
        """No node has settings of its own."""
        return {}

    async def security(self) -> DeclaredSecurity:
        """Nobody is known, and nothing is allowed."""
        return DeclaredSecurity()

    async def change_security(self, change: SecurityChange) -> None:
        """Nobody is known."""

    async def subscriptions(self) -> list[Subscription]:
        """Every subscription, by name."""
        return await self._ask(lambda: sorted(self._subscriptions.values(), key=lambda one: one.name))

    async def subscriptions_named(self, names: Sequence[str]) -> list[Subscription]:
        """The subscriptions of these names that there are."""
        return [one for one in await self.subscriptions() if one.name in names]

    async def add_subscription(self, subscription: Subscription) -> None:
        """Declare a subscription."""
        await self._ask(lambda: self._subscriptions.update({subscription.subscription_id: subscription}))

    async def alter_subscription(
        self, subscription_id: UUID, change: Callable[[Subscription], Subscription]
    ) -> Subscription:
        """Change a subscription as it is declared now."""

        def alter() -> Subscription:
            self._subscriptions[subscription_id] = change(self._subscriptions[subscription_id])
            return self._subscriptions[subscription_id]

        return await self._ask(alter)

    async def delete_subscription(self, subscription: Subscription, *, now_ms: int) -> None:
        """Take a subscription out and leave the record that allows its state to go."""

        def delete() -> None:
            if self._subscriptions.pop(subscription.subscription_id, None) is not None:
                self._deleted_subscriptions[subscription.subscription_id] = now_ms

        await self._ask(delete)

    async def deleted_subscriptions(self) -> dict[UUID, int]:
        """Subscriptions whose state may go, and since when."""
        return await self._ask(lambda: dict(self._deleted_subscriptions))

    async def forget_deleted_subscription(self, subscription_id: UUID) -> None:
        """Drop the deletion record."""
        await self._ask(lambda: self._deleted_subscriptions.pop(subscription_id, None))

    async def pipelines(self) -> list[Pipeline]:
        """Every pipeline, by name."""
        return await self._ask(lambda: sorted(self._pipelines.values(), key=lambda one: one.name))

    async def pipeline_named(self, name: str) -> Pipeline | None:
        """The pipeline of this name."""
        return next((one for one in await self.pipelines() if one.name == name), None)

    async def add_pipeline(self, pipeline: Pipeline) -> None:
        """Declare a pipeline."""
        await self._ask(lambda: self._pipelines.update({pipeline.pipeline_id: pipeline}))

    async def alter_pipeline(self, pipeline_id: UUID, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        """Change a pipeline as it is declared now."""

        def alter() -> Pipeline:
            before = self._pipelines[pipeline_id]
            self._pipelines[pipeline_id] = dataclasses.replace(change(before), version=before.version + 1)
            return self._pipelines[pipeline_id]

        return await self._ask(alter)

    async def delete_pipeline(self, pipeline: Pipeline) -> None:
        """Take a pipeline out."""
        await self._ask(lambda: self._pipelines.pop(pipeline.pipeline_id, None))

    async def cluster_id(self) -> str:
        """The same for all nodes."""
        return "simulated"

    async def _ask(self, request: Callable[[], T]) -> T:
        async def serve() -> T:
            return request()

        try:
            return await self._network.call(CATALOG, serve, timeout_s=TIMEOUT_S)
        except LinkDown as error:
            raise CatalogUnavailable(str(error)) from error
