"""Who is told of what happens to a partition. All are called on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from millstream.broker.replication.partition import Partition


class AdvanceListener(Protocol):
    """Somebody who waits for new records, such as a long poll."""

    def advanced(self, partition: Partition) -> None:
        """Called on the loop each time the high watermark has moved, the leader has changed, or it has closed."""


class AppendListener(Protocol):
    """A follower's session, which waits for whatever is appended."""

    def appended(self, partition: Partition) -> None:
        """Called on the loop each time the leader's log has grown."""


class InSyncKeeper(Protocol):
    """Whoever sees to the in-sync sets of the partitions that this node leads."""

    def behind(self, partition: Partition) -> None:
        """Somebody in sync does not have all of the log; told once until everybody has."""

    def wants_change(self, partition: Partition) -> None:
        """It is worth to ask the partition for a change of its in-sync set now."""
