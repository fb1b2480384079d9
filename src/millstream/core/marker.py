"""Transaction markers: the end of a transaction on one partition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millstream.core.errors import TransactionCoordinatorFenced, UnknownLeaderEpoch
from millstream.core.ids import ProducerEpoch, ProducerId

ANY_COORDINATOR: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Commits or aborts a producer's transaction."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    commit: bool
    coordinator_epoch: int
    """The epoch of the coordinator that decided; markers of earlier epochs are rejected."""
    bumps_epoch: bool = False
    """Whether the epoch is above that of the transaction's records, as under transaction version 2 (KIP-890).

    A marker with the epoch of an open transaction is then a late copy of the previous one, and is rejected.
    """
    latest_coordinator: int = ANY_COORDINATOR
    """The latest coordinator epoch that exists, as far as the partition's node knows."""

    def admitted(self, held: int) -> Marker:
        """Return the marker to write on a partition whose last marker of this producer has the coordinator epoch
        `held`.

        An epoch that no coordinator can have yet is rejected until it is known, so that a forged request cannot fence
        the real coordinators. If the partition already holds such an epoch, it is ignored: it was forged, or predates a
        restore of the coordination store from an older copy. Tools that end hanging transactions repeat the held epoch
        and are admitted.
        """
        latest = self.latest_coordinator
        if self.coordinator_epoch > latest:
            if self.coordinator_epoch != held:
                raise UnknownLeaderEpoch(
                    f"no coordinator is known that has the epoch {self.coordinator_epoch}; the latest has {latest}"
                )
            return replace(self, coordinator_epoch=latest)
        if self.coordinator_epoch < held <= latest:
            raise TransactionCoordinatorFenced(
                f"a coordinator of epoch {held} has ended a transaction of producer {self.producer_id} here, the one "
                f"of epoch {self.coordinator_epoch} is fenced"
            )
        return self
