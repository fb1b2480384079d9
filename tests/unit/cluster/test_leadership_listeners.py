"""Coordinators follow the leadership of their partitions, whichever notification arrives first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from millstream.broker.cluster.topics import Topics
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.topic import Topic


def test_coordinators_are_notified_of_a_role_that_their_partition_already_has() -> None:
    topic = Topic(name="t", topic_id=UUID(int=1), partitions=1, replication=1, overrides={}, created_ms=0)
    # The writer of in-sync sets has read the state back before the view shows it, so applying it changes nothing.
    partition: Any = SimpleNamespace(is_leader=False, leader_epoch=3, apply=lambda versioned, *, me: None)
    reported: list[object] = []
    topics = SimpleNamespace(
        _view=SimpleNamespace(states={(topic.topic_id, 0): object()}),
        _partitions={"t": [partition]},
        _active=True,
        _me=NodeId(1),
        _notify_leadership=reported.append,
    )
    assert Topics._apply_state(cast("Any", topics), topic, PartitionIndex(0)) is partition
    assert reported == [partition]
