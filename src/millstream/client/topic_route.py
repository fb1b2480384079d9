"""Which partition of a topic a message goes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from millstream.client.arguments import check_whole
from millstream.client.partition_queue import PartitionQueue
from millstream.core.errors import UnknownTopic
from millstream.core.partitioner import partition_for_key

_KEYS_MAX: Final = 10_000
"""Keys whose partition is kept in mind, since hashing one costs more than all the rest of a publish."""


class TopicRoute:
    """The partitions of one topic: a key always leads to the same; messages without go together, batch by batch."""

    __slots__ = ("_by_key", "_sticky", "is_used", "name", "queues", "topic_id")

    def __init__(self, name: str, topic_id: str, queues: Sequence[PartitionQueue]) -> None:
        self.name = name
        self.topic_id = topic_id
        self.queues = list(queues)
        self.is_used = False
        """Whether something was published since this was last looked at."""
        self._by_key: dict[bytes, PartitionQueue] = {}
        self._sticky = random.choice(self.queues)

    def choose(self, key: bytes | None, partition: int | None) -> PartitionQueue:
        """The queue of the partition for a message."""
        self.is_used = True
        if partition is not None:
            return self._fixed(partition)
        if key is None:
            return self._any()
        queue = self._by_key.get(key)
        if queue is None:
            if len(self._by_key) >= _KEYS_MAX:
                self._by_key.clear()
            queue = self._by_key[bytes(key)] = self.queues[partition_for_key(bytes(key), len(self.queues))]
        return queue

    def extend(self, queues: Sequence[PartitionQueue]) -> None:
        """The topic has got more partitions, so keys may belong elsewhere from now on."""
        self.queues += queues
        self._by_key.clear()

    def _any(self) -> PartitionQueue:
        queue = self._sticky
        if queue.waiting and len(queue.waiting) == 1 and queue.lane is not None:
            return queue
        if len(self.queues) > 1:
            # The last batch has left or is full, or its leader is unknown: go on with a partition that has a leader.
            at = queue.index
            turn = self.queues[at + 1 :] + self.queues[: at + 1]
            self._sticky = next((one for one in turn if one.lane is not None), turn[0])
        return self._sticky

    def _fixed(self, partition: int) -> PartitionQueue:
        check_whole("partition", partition)
        if not partition < len(self.queues):
            last = len(self.queues) - 1
            raise UnknownTopic(f"topic {self.name!r} has no partition {partition}; the last is {last}")
        return self.queues[partition]
