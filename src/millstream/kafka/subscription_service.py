"""Everything about subscriptions on this node, put together: what is declared, the queues, and where they are kept."""

from __future__ import annotations

from collections.abc import Iterable
from random import SystemRandom

from millstream.cluster.membership import Membership
from millstream.cluster.producer_ids import ProducerIds
from millstream.cluster.subscriptions import Subscriptions
from millstream.cluster.topics import Topics
from millstream.config import Config
from millstream.model.clock import Clock
from millstream.model.metric import Metric, gauge
from millstream.model.subscription import QueueKey
from millstream.subscriptions.engine import Engine, Surroundings
from millstream.subscriptions.image import Image
from millstream.subscriptions.letter_box import LetterBox
from millstream.subscriptions.routed_store import RoutedStateStore
from millstream.subscriptions.state_coordinator import StateCoordinator
from millstream.transactions.peers import WirePeers


class SubscriptionService:
    """The subscriptions of one node."""

    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        subscriptions: Subscriptions,
        producer_ids: ProducerIds,
        *,
        config: Config,
        clock: Clock,
    ) -> None:
        me = membership.me.node_id
        random = SystemRandom()
        self.topics = topics
        self.declared = subscriptions
        self.states = StateCoordinator(topics, config, clock, _image)
        self._peers = WirePeers(membership.node, me=me)
        self._store = RoutedStateStore(self.states, self._peers, random, me=me)
        self.engine = Engine(
            Surroundings(
                topics=topics,
                subscriptions=subscriptions,
                store=self._store,
                clock=clock,
                random=random,
                box=LetterBox(topics, lambda: ",".join(f"{node.host}:{node.port}" for node in membership.nodes())),
                next_producer_id=producer_ids.next,
                forget_deleted=lambda: self.states.forget(subscriptions.is_deleted),
            )
        )

    def metrics(self) -> Iterable[Metric]:
        """How many queues are kept and open."""
        yield gauge("millstream_queues_kept", "Queues whose state this node keeps.", self.states.queues)
        yield gauge("millstream_queues_open", "Queues that this node leads and has open.", self.engine.open_count)

    async def start(self) -> None:
        """Begin to load what the log has, and the queues of what is declared."""
        await self.states.start()
        self.engine.start()

    async def close(self) -> None:
        """Send workers who wait away, and let what was written become durable."""
        await self.engine.close()
        await self._store.close()
        await self.states.close()
        await self._peers.close()


def _image(key: QueueKey, snapshot: bytes | None) -> Image:
    image = Image(key)
    if snapshot is not None:
        image.replay(snapshot)
    return image
