"""What the leader remembers of one follower between its fetches: where it is, and what it does not know yet.

The session is told of every append and every move of a high watermark of its partitions. So a fetch looks only at
partitions of which there is something to say, and ten thousand idle ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from millstream.core.ids import NodeId, Offset
from millstream.protocol.wire.replica_fetching import PartitionKey, ReplicaPosition

if TYPE_CHECKING:
    from millstream.broker.replication.partition import Partition

_NEVER_TOLD = Offset(-1)


class Waiter(Protocol):
    """A fetch that waits."""

    def wake(self) -> None:
        """Look again, soon."""

    def finish(self) -> None:
        """Answer with what is there."""


class FollowedPartition:
    """One partition of a session."""

    __slots__ = ("log_start_told", "partition", "position", "watermark_told")

    def __init__(self, position: ReplicaPosition) -> None:
        self.position = position
        self.partition: Partition | None = None
        """Whose appends the session is told of."""
        self.watermark_told = _NEVER_TOLD
        self.log_start_told = _NEVER_TOLD


class FollowerSession:
    """The partitions that one node follows here."""

    def __init__(self, node: NodeId, session_id: int) -> None:
        self.node = node
        self.session_id = session_id
        self.epoch = 1
        """Of the request that comes next."""
        self.partitions: dict[PartitionKey, FollowedPartition] = {}
        self.unread: dict[PartitionKey, None] = {}
        """Partitions to look at, in the order in which something happened to them."""
        self.moved: dict[PartitionKey, None] = {}
        """Partitions whose high watermark has moved."""
        self.waiting: Waiter | None = None
        """The fetch that waits for something to happen."""

    def __len__(self) -> int:
        return len(self.partitions)

    # -- what the partitions tell ---------------------------------------------------------------------------

    def appended(self, partition: Partition) -> None:
        """There is something to read."""
        self._note(self.unread, partition)

    def advanced(self, partition: Partition) -> None:
        """The high watermark has moved, or somebody else leads now."""
        self._note(self.moved if partition.is_leader else self.unread, partition)

    def _note(self, noted: dict[PartitionKey, None], partition: Partition) -> None:
        key = (partition.topic.topic_id, partition.index)
        if key in self.partitions:
            noted[key] = None
            self.wake()

    # -- what the follower tells ----------------------------------------------------------------------------

    def update(self, wanted: Iterable[tuple[PartitionKey, ReplicaPosition]], forgotten: Iterable[PartitionKey]) -> None:
        """Take in what a request says."""
        for key in forgotten:
            self._drop(key)
        for key, position in wanted:
            followed = self.partitions.get(key)
            if followed is None:
                self.partitions[key] = FollowedPartition(position)
            else:
                followed.position = position
            self.unread[key] = None

    def listen(self, followed: FollowedPartition, partition: Partition) -> None:
        """Be told of what happens to a partition from now on."""
        if followed.partition is not partition:
            self._stop_listening(followed)
            followed.partition = partition
            partition.listen(self)
            partition.listen_to_appends(self)

    def close(self) -> None:
        """Be told of nothing any more."""
        for key in tuple(self.partitions):
            self._drop(key)
        self.wake()

    def _drop(self, key: PartitionKey) -> None:
        self.unread.pop(key, None)
        self.moved.pop(key, None)
        followed = self.partitions.pop(key, None)
        if followed is not None:
            self._stop_listening(followed)

    def _stop_listening(self, followed: FollowedPartition) -> None:
        partition, followed.partition = followed.partition, None
        if partition is not None:
            partition.forget(self)
            partition.forget_appends(self)

    # -- waiting --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the fetch that waits look again, once for all that happens in this turn of the loop."""
        if self.waiting is not None:
            self.waiting.wake()
