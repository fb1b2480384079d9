"""Which coordinators may end a transaction on a partition, by their epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream.core.errors import TransactionCoordinatorFenced, UnknownLeaderEpoch
from millstream.core.ids import ProducerEpoch, ProducerId
from millstream.protocol.records.control import Marker

NOTHING = -1
HUGE = 2**31 - 1


def of(coordinator: int, *, latest: int) -> Marker:
    return Marker(
        producer_id=ProducerId(7),
        producer_epoch=ProducerEpoch(0),
        commit=False,
        coordinator_epoch=coordinator,
        latest_coordinator=latest,
    )


@pytest.mark.parametrize(("coordinator", "held"), [(5, NOTHING), (5, 5), (5, 4), (9, 5), (0, NOTHING)])
def test_the_current_coordinator_is_admitted(coordinator: int, held: int) -> None:
    marker = of(coordinator, latest=9)
    assert marker.admitted(held) is marker


def test_a_replaced_coordinator_is_fenced() -> None:
    with pytest.raises(TransactionCoordinatorFenced):
        of(4, latest=9).admitted(5)


@pytest.mark.parametrize("held", [NOTHING, 5, 9])
def test_an_unknown_coordinator_epoch_is_refused(held: int) -> None:
    with pytest.raises(UnknownLeaderEpoch):
        of(10, latest=9).admitted(held)
    assert of(10, latest=10).admitted(held)


def test_a_stored_epoch_that_no_coordinator_ever_had_is_ignored() -> None:
    marker = of(3, latest=9)
    assert marker.admitted(HUGE) is marker


def test_a_tool_that_repeats_the_stored_epoch_is_admitted_and_repairs_it() -> None:
    marker = of(HUGE, latest=9)
    assert marker.admitted(HUGE) == replace(marker, coordinator_epoch=9)
