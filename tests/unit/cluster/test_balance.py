"""Leadership returns to each preferred replica after its own delay."""

from __future__ import annotations

from uuid import UUID

from millstream.broker.cluster.controller import Balance
from millstream.broker.cluster.keys import PartitionKey
from millstream.core.ids import PartitionIndex

AFTER_S = 30.0


def key(index: int) -> PartitionKey:
    return UUID(int=1), PartitionIndex(index)


def test_each_partition_has_its_own_delay() -> None:
    balance = Balance(AFTER_S)
    balance.track(key(0), preferred_can_lead=True, now=100)
    balance.track(key(1), preferred_can_lead=True, now=129)
    assert balance.next_due == 130
    assert balance.take_due(129.9) == []
    assert balance.take_due(130) == [key(0)]
    assert balance.next_due == 159
    assert balance.take_due(158.9) == []
    assert balance.take_due(159) == [key(1)]
    assert balance.next_due is None


def test_the_delay_restarts_only_after_a_setback() -> None:
    balance = Balance(AFTER_S)
    balance.track(key(0), preferred_can_lead=True, now=100)
    balance.track(key(0), preferred_can_lead=True, now=120)
    assert balance.next_due == 130
    balance.track(key(0), preferred_can_lead=False, now=125)
    balance.track(key(0), preferred_can_lead=True, now=128)
    assert balance.take_due(130) == []
    assert balance.take_due(158) == [key(0)]


def test_a_delay_of_zero_leaves_leaders_unchanged() -> None:
    balance = Balance(0)
    balance.track(key(0), preferred_can_lead=True, now=100)
    assert balance.next_due is None


def test_a_cleared_partition_is_forgotten() -> None:
    balance = Balance(AFTER_S)
    balance.track(key(0), preferred_can_lead=True, now=100)
    balance.clear()
    assert (balance.next_due, balance.take_due(1000)) == (None, [])
