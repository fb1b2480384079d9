"""The end of a transaction on one partition, as its coordinator has it written there."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.model.ids import ProducerEpoch, ProducerId


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
