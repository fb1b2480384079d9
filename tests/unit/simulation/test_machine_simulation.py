"""Logs handed over between the processes of a machine that dies at any point, from seeds; planted bugs are found.

`make simulate` runs thousands of seeds; this file runs a few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest

from millstream.broker.cluster import machine_folder
from millstream.broker.cluster.embedded_store import CoordinationFile
from millstream.broker.log.files import write_fully
from millstream.broker.log.folder import DataFolder
from millstream.broker.log.ledger import LogKey
from millstream.broker.log.store import LogStore
from millstream_testing.machine_simulation import simulate_machine

SEEDS = range(2000, 2008)
SEEDS_MAX = 20


@pytest.mark.parametrize("seed", SEEDS)
def test_no_log_is_lost_stale_or_duplicated(seed: int) -> None:
    outcome = simulate_machine(seed)
    assert outcome.failure is None, "\n".join([*outcome.trace[-40:], f"seed {seed}"])
    assert outcome.batches > 0


def test_a_seed_is_reproducible() -> None:
    first, second = simulate_machine(2001), simulate_machine(2001)
    assert (first.digest, first.steps) == (second.digest, second.steps)


def _forget_the_mark(_layout: object, _files: object) -> None:
    """Assume that a start is not interrupted."""


def _forget_checkpoints(self: LogStore, keys: Collection[LogKey], to: LogStore) -> None:
    for key in keys:
        self._folder.move_log(key, to._folder)
        self._ledger.forget(key)


def _write_unsynced(self: CoordinationFile, record: bytes) -> None:
    write_fully(self._files, self._descriptor, record, self._end)
    self._end += len(record)


def _trust_what_exists(self: DataFolder, key: LogKey, to: DataFolder) -> None:
    old, new = self.log_folder(*key), to.log_folder(*key)
    topic = new.rpartition("/")[0]
    if not self._files.exists(topic):
        self._files.make_directory(topic)
        self._files.sync_directory(to.partitions)
    self._files.rename(old, new)
    self._files.sync_directory(topic)
    self._files.sync_directory(old.rpartition("/")[0])
    self.remove_if_empty(old.rpartition("/")[0])


def _rename_only(state: Any, old: Any, new: Any) -> Any:
    changed = _replace_node(state, old, new)
    return type(changed)(
        replicas=changed.replicas,
        leader=new if state.leader == old else state.leader,
        leader_epoch=state.leader_epoch,
        in_sync=changed.in_sync,
        eligible=changed.eligible,
    )


_replace_node = machine_folder._replace_node


@pytest.mark.parametrize(
    ("target", "name", "wrong", "first"),
    [
        (machine_folder, "mark", _forget_the_mark, 0),
        (LogStore, "hand_over", _forget_checkpoints, 0),
        (CoordinationFile, "_write", _write_unsynced, 0),
        # One of several hundred seeds exposes it.
        (DataFolder, "move_log", _trust_what_exists, 160),
        (machine_folder, "_replace_node", _rename_only, 0),
    ],
    ids=["no-mark", "no-checkpoints", "unsynced-states", "unsynced-folders", "same-epoch"],
)
def test_planted_bugs_are_found(target: object, name: str, wrong: Callable[..., Any], first: int) -> None:
    with mock.patch.object(target, name, wrong):
        assert any(simulate_machine(seed).failure for seed in range(first, first + SEEDS_MAX))
