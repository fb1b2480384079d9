"""Plausible bugs planted into replication and election are found by the simulation."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.cluster.election import Proposal, Term
from millstream.broker.cluster.keys import partition_key
from millstream.broker.cluster.last_run import LastRun
from millstream.broker.cluster.replicas import InSyncWriter
from millstream.broker.cluster.store import Put
from millstream.broker.log.log import Log
from millstream.broker.replication import partition as partition_module
from millstream.broker.replication.in_sync import InSync, MayJoin
from millstream.broker.replication.partition import Partition
from millstream.core.errors import StoreUnavailable
from millstream.core.ids import EpochEnd, NodeId, Offset
from millstream.core.partition_state import PartitionState, encode_value
from millstream_testing.planted_bug import PlantedBug
from millstream_testing.simulation.world import simulate

SEEDS_MAX = 80


def _count_the_new_set_only(self: InSync) -> None:
    counted = (self.pending or self.state).in_sync
    self._waited_for = tuple(follower for node, follower in self._followers.items() if node in counted)


def _agree_by_offset_only(log: Log, offset: Offset, last_epoch: int) -> EpochEnd | None:
    return None if offset <= log.end_offset else EpochEnd(log.latest_epoch, log.end_offset)


_stop_leading = Partition._stop_leading


def _cut_to_the_high_watermark(self: Partition, state: PartitionState) -> None:
    _stop_leading(self, state)
    self.log.truncate_to(self.high_watermark)


async def _trust_the_lease(self: InSyncWriter, one: Any) -> None:
    """Assume that an unexpired lease lets the leader decide alone while the store is unavailable."""
    try:
        if not await self._change([one]):
            await self._read_back(one)
    except StoreUnavailable:
        in_sync = one.partition.in_sync
        if in_sync is not None and in_sync.pending is one.change.state:
            in_sync.state, in_sync.pending = one.change.state, None
            in_sync._update_waited_for()
            one.partition._advance()


def _has_fetched_something(self: InSync, node: NodeId, high_watermark: Offset, may_join: MayJoin) -> bool:
    follower = self._followers.get(node)
    return node == self._me if follower is None else follower.offset >= 0


def _has_reached_the_high_watermark(self: InSync, node: NodeId, high_watermark: Offset, may_join: MayJoin) -> bool:
    """Ignore that a new leader does not know the high watermark before its own epoch has begun."""
    follower = self._followers.get(node)
    if follower is None:
        return node == self._me
    return follower.offset >= high_watermark and may_join(node, follower.registration)


def _advance_with_too_few(self: InSync, own: Offset) -> Offset:
    return min([own, *(follower.offset for follower in self._waited_for)])


async def _overwrite(self: Term, batch: list[Proposal]) -> bool:
    return await self.change([Put(partition_key(change.partition), encode_value(change.state)) for change in batch])


BUGS = (
    PlantedBug(
        "the high watermark counts the new in-sync set before it is agreed on",
        ((InSync, "_update_waited_for", _count_the_new_set_only),),
        ("cut", "cut one way", "store away", "cut from store"),
    ),
    PlantedBug(
        "a follower compares offsets with its leader, not epochs",
        ((partition_module, "diverging_end", _agree_by_offset_only),),
        ("kill", "isolate", "cut"),
    ),
    PlantedBug(
        "a follower cuts its log to its high watermark instead of asking the leader",
        ((Partition, "_stop_leading", _cut_to_the_high_watermark),),
        ("kill", "isolate", "restart"),
    ),
    PlantedBug(
        "a leader shrinks its in-sync set alone while its lease should hold",
        ((InSyncWriter, "_write_single", _trust_the_lease),),
        ("store away", "cut"),
    ),
    PlantedBug(
        "a machine that crashed counts as if it had lost nothing",
        ((LastRun, "is_unclean", lambda self, admitted: False),),
        ("crash", "kill"),
    ),
    PlantedBug(
        "a replica joins the in-sync set before it has caught up",
        ((InSync, "_has_caught_up", _has_fetched_something),),
        ("kill", "isolate"),
    ),
    PlantedBug(
        "a replica joins a new leader that does not know yet what was acknowledged",
        ((InSync, "_has_caught_up", _has_reached_the_high_watermark),),
        ("kill", "restart", "cut one way"),
    ),
    PlantedBug(
        "the high watermark moves with too few in sync, although others stay eligible",
        ((InSync, "acknowledged", _advance_with_too_few),),
        ("kill", "isolate", "cut"),
    ),
    PlantedBug(
        "the controller writes over what was agreed on since it looked",
        ((Term, "_write", _overwrite),),
        ("restart", "lateness"),
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_replaces_code_that_exists(bug: PlantedBug) -> None:
    with bug.planted():
        pass


@pytest.mark.trial
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_and_disappears_with_its_removal(bug: PlantedBug) -> None:
    with bug.planted():
        failing_seed = next((seed for seed in range(SEEDS_MAX) if simulate(seed, faults=bug.faults).failure), None)
    assert failing_seed is not None
    assert simulate(failing_seed, faults=bug.faults).failure is None
