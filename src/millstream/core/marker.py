"""The end of a transaction on one partition, as its coordinator has it written there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millstream.core.errors import TransactionCoordinatorFenced, UnknownLeaderEpoch
from millstream.core.ids import ProducerEpoch, ProducerId

ANY_COORDINATOR: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A transaction of a producer is committed or aborted."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    commit: bool
    coordinator_epoch: int
    """Of the coordinator that decided; one of an earlier epoch is refused."""
    bumps_epoch: bool = False
    """Whether the epoch is above that of the transaction's records, as it is under transaction version 2 (KIP-890).

    Then a marker of the epoch in which a transaction is open is a late copy of the one before it, and is refused.
    """
    latest_coordinator: int = ANY_COORDINATOR
    """The latest epoch that a coordinator can have, as far as the node knows on whose partition this is written."""

    def admitted(self, held: int) -> Marker:
        """The marker as a partition may write it that holds one of this producer of the coordinator epoch `held`.

        An epoch that no coordinator can have yet is refused until it is known, so that a request which made it up does
        not fence the coordinators that there are. Where such an epoch is held already, it counts for nothing: it was
        made up, or is of a time before the coordination store was restored from an older copy. Tools that end what
        hangs repeat the epoch that is held, and are let in.
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
                f"of epoch {self.coordinator_epoch} is no longer in charge"
            )
        return self
