"""Counting dead letters while a node is down: uncounted partitions are named, and retried for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pytest

from millstream.client.admin import dead_letter
from millstream.client.admin.dead_letter import check_no_open_letters, dead_letter_topics
from millstream.core.errors import BrokerUnreachable, CoordinatorUnavailable
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.subscription import DEAD_LETTER_TOPIC, LETTERS_PREFIX, NO_DEAD_LETTERS
from millstream.protocol.private.browse_messages import ListedTopic, ListTopicsRequest, ListTopicsResponse
from millstream.protocol.private.message import encode
from millstream.protocol.private.subscription_messages import ListSubscriptionsResponse
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata, TopicMetadata

ONE, TWO = NodeId(1), NodeId(2)
DEAD = "dead"


class Cluster(Client):
    """Two nodes that each lead one partition of a dead letter topic with three open letters; one may be down."""

    def __init__(self, away_for: int) -> None:
        self.away_for = away_for

    async def metadata(self, topics: Iterable[str] | None = (), **_: Any) -> ClusterMetadata:
        partitions = {
            PartitionIndex(index): PartitionMetadata(
                partition=PartitionIndex(index), leader_id=leader, leader_epoch=Epoch(0), replicas=(), in_sync=()
            )
            for index, leader in enumerate((ONE, TWO))
        }
        topic = TopicMetadata(name=DEAD, topic_id=UUID(int=1), is_internal=False, partitions=partitions)
        nodes: Any = {ONE: "one", TWO: "two"}
        return ClusterMetadata(cluster_id="", controller_id=ONE, nodes=nodes, topics={DEAD: topic}, errors={})

    async def private(
        self,
        node: NodeId | None,
        api_key: int,
        body: bytes,
        *,
        version: int = 0,
        waits: bool = False,
        timeout_s: float | None = None,
    ) -> memoryview[int]:
        if node == TWO and self.away_for:
            self.away_for -= 1
            raise BrokerUnreachable("node 2 is away")
        if api_key == ListTopicsRequest.KEY:
            topic = ListedTopic(DEAD, str(UUID(int=1)), 2, 1, False, 0, 0, 0, 0, 0)
            return memoryview(encode(ListTopicsResponse(topics=[topic], total=1)))
        queue = {"topic": DEAD, "partition": 0 if node == ONE else 1, "backlog": 3, "refused_letters": 0}
        letters = _declared(LETTERS_PREFIX + DEAD, NO_DEAD_LETTERS, [queue])
        return memoryview(encode(ListSubscriptionsResponse(subscriptions=[_declared("billing", DEAD, []), letters])))


def _declared(name: str, dead_letter_topic: str, queues: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {DEAD_LETTER_TOPIC: dead_letter_topic}
    return {
        "name": name,
        "topics": [],
        "has_hidden_topics": False,
        "settings": settings,
        "queues": queues,
        "push": [],
        "stored_queues": [],
    }


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter, "_PAUSE_S", 0.0)


async def test_partitions_without_a_response_are_named() -> None:
    (topic,) = await dead_letter_topics(Cluster(away_for=1), patience_s=-1.0)
    assert (topic.subscriptions, topic.letters, topic.unreachable) == (["billing"], 3, [1])


async def test_the_count_waits_for_a_failover() -> None:
    (topic,) = await dead_letter_topics(Cluster(away_for=3), patience_s=60.0)
    assert (topic.letters, topic.unreachable) == (6, [])


async def test_a_topic_whose_letters_cannot_be_counted_is_kept() -> None:
    with pytest.raises(CoordinatorUnavailable, match="partitions 1 now"):
        await check_no_open_letters(Cluster(away_for=10**9), DEAD)
