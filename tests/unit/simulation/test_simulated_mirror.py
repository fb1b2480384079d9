"""Mirrors on the simulator: seeds without violations, and plausible planted bugs, which are found."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest

from millstream.broker.mirror import copier, failover, service
from millstream.broker.mirror.barriers import Barriers
from millstream.broker.mirror.copier import Copier, Copy
from millstream.broker.mirror.follower import Follower
from millstream.broker.mirror.service import MirrorService
from millstream.broker.replication.partition import Partition
from millstream.broker.replication.replica import Replica
from millstream.core import ids
from millstream.core.ids import Offset
from millstream_testing.mirror_simulation import simulate_mirror

SEEDS_MAX = 40


@pytest.mark.parametrize("seed", [0, 1, 10, 910156])
def test_a_seed_passes_and_is_reproducible(seed: int) -> None:
    outcome = simulate_mirror(seed)
    assert outcome.failure is None, "\n".join(outcome.trace)
    if seed == 0:
        assert simulate_mirror(seed).digest == outcome.digest


_sync_groups = Follower._sync_groups


async def _apply_what_the_source_has(self: Follower) -> None:
    await _sync_groups(self)
    self._applicable = self._committed
    await self._apply_groups(self._committed)


def _expose_everything(self: MirrorService, partitions: Iterable[Partition]) -> None:
    for partition in partitions:
        if partition.awaits_exposure:
            partition.expose(None)


_init = Copier.__init__


def _expose_as_it_arrives(self: Copier, *arguments: Any, **named: Any) -> None:
    _init(self, *arguments, **{**named, "gates": False})


def _keep_what_is_below(self: Replica, point: Offset) -> asyncio.Future[None] | None:
    log = self.log
    return self._execute_truncation(
        log.begin_restart(point) if point < log.start_offset else log.begin_truncation(point)
    )


def _count_before_a_truncation(self: Copier, partition: Partition) -> Copy | None:
    return self.copies.get((partition.topic.topic_id, partition.index))


async def _no_groups(*_: Any) -> tuple[dict[str, Any], bool]:
    return {}, False


def _no_commits(*_: Any) -> array[int]:
    return array("q")


@pytest.mark.parametrize(
    ("target", "name", "wrong"),
    [
        pytest.param(Follower, "_sync_groups", _apply_what_the_source_has, id="state ahead of data"),
        pytest.param(service, "EPOCH_STEP", 0, id="epoch not raised"),
        pytest.param(ids, "first_producer_id", lambda _: 0, id="producer ids that meet"),
        pytest.param(Copier, "__init__", _expose_as_it_arrives, id="transactions exposed as they arrive"),
        pytest.param(MirrorService, "_restrict_reads", _expose_everything, id="a restarted leader exposes everything"),
        pytest.param(service, "commits_from", _no_commits, id="a failover keeps halves of transactions"),
        pytest.param(
            Copier, "compared_copy", _count_before_a_truncation, id="records to be truncated count as arrived"
        ),
        pytest.param(Barriers, "_read_groups", _no_groups, id="offsets of groups are from before the barrier"),
        pytest.param(failover, "apply_recorded_offsets", _no_groups, id="recorded offsets of groups are not applied"),
        pytest.param(service, "own_history_start", lambda *_: None, id="a repeated failover cuts again"),
        pytest.param(copier, "_has_gaps", lambda *_: False, id="a compacted copy is exposed where values are missing"),
        pytest.param(Replica, "_truncate_to_fetch", _keep_what_is_below, id="a compacted log is cut like any other"),
    ],
)
def test_a_planted_bug_is_found(target: object, name: str, wrong: Callable[..., Any] | int) -> None:
    with mock.patch.object(target, name, wrong):
        failures = (simulate_mirror(seed).failure or "" for seed in range(SEEDS_MAX))
        assert any(failure.startswith("Violation") for failure in failures)
