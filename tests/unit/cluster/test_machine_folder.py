"""The stores of a machine: acknowledged changes survive, and partitions are spread evenly."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster import keys
from millstream.broker.cluster.embedded_store import CoordinationFile, EmbeddedService, EmbeddedStore
from millstream.broker.cluster.keys import PartitionKey, parse_partition
from millstream.broker.cluster.machine_folder import Layout, assign_partitions, mark, open_coordination, settle
from millstream.broker.cluster.store import Delete, Put
from millstream.broker.log.files import DiskFiles
from millstream.core.clock import SystemClock
from millstream.core.errors import ClusterMismatch, CorruptState, InvalidSetting
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, encode_value
from millstream_testing.files import MemoryFiles
from millstream_testing.node_group import single_node

FOLDER = "/data"
FILE = f"{FOLDER}/coordination"


def opened(files: MemoryFiles) -> EmbeddedService:
    return EmbeddedService(SystemClock(), file=CoordinationFile(files, FOLDER))


def new_files() -> MemoryFiles:
    files = MemoryFiles(1)
    files.make_directory(FOLDER)
    files.sync_directory("/")
    return files


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.text(max_size=5)), max_size=40))
def test_acknowledged_changes_survive_a_crash(changes: list[tuple[str, str | None]]) -> None:
    files = new_files()
    service, expected = opened(files), dict[str, str]()
    for key, value in changes:
        service.change([Delete(key) if value is None else Put(key, value)], [], None)
        expected.pop(key, None)
        if value is not None:
            expected[key] = value
    revision = service.revision
    files.crash()
    again = opened(files)
    assert {key: entry.value for key, entry in again.read("").entries.items()} == expected
    assert again.revision == revision


async def test_sessions_end_with_the_process_and_revisions_continue() -> None:
    files = new_files()
    service = opened(files)
    service.change([Put("nodes/1", "x", leased=True), Put("kept", "y")], [], service.grant(float("inf")))
    revision = service.revision
    files.kill()
    again = opened(files)
    assert (list(again.read("").entries), again.revision >= revision) == (["kept"], True)
    again.change([Put("nodes/1", "x", leased=True)], [], again.grant(float("inf")))
    given_revision = again.revision
    assert given_revision > revision
    files.kill()
    # Only a session key was changed at that revision, and the revision is not reused.
    assert opened(files).revision >= given_revision


def test_a_torn_record_is_ignored_and_a_damaged_one_is_refused() -> None:
    files = new_files()
    service = opened(files)
    ends = []
    for number in range(3):
        service.change([Put("key", "value" * 10 + str(number))], [], None)
        ends.append(service._file._end)  # type: ignore[union-attr]
    descriptor = files.open(FILE)
    files.write_at(descriptor, b"\xff", ends[1] + 20)
    assert opened(files).read("").entries["key"].value.endswith("1")
    files.write_at(descriptor, b"\xff", 20)
    with pytest.raises(CorruptState, match="damaged at byte 0"):
        opened(files)


partitions = st.dictionaries(
    st.tuples(st.integers(1, 4), st.integers(0, 9)), st.sampled_from([1, 1001, 2001]), max_size=40
)


@given(partitions, st.integers(1, 4))
def test_partitions_are_spread_evenly(found: dict[tuple[int, int], int], cores: int) -> None:
    current: dict[PartitionKey, NodeId] = {
        (UUID(int=topic), PartitionIndex(index)): NodeId(node) for (topic, index), node in found.items()
    }
    nodes = Layout.of(FOLDER, 1, cores).nodes
    placed = assign_partitions(current, nodes)
    assert placed.keys() == current.keys()
    assert set(placed.values()) <= set(nodes)
    total = Counter(placed.values())
    assert max(total.values(), default=0) <= -(-len(placed) // cores) + 1
    for topic, size in Counter(key[0] for key in placed).items():
        share = Counter(node for key, node in placed.items() if key[0] == topic)
        assert max(share.values()) <= -(-size // cores)


def test_the_ids_of_a_machine_leave_room_for_other_machines() -> None:
    assert Layout.of(FOLDER, 7, 3).nodes == (7, 1007, 2007)
    with pytest.raises(InvalidSetting, match="below 1000"):
        Layout.of(FOLDER, 1000, 2)


def test_the_logs_of_a_machine_in_a_cluster_need_no_stores_of_its_own() -> None:
    files = new_files()
    layout = Layout.of(FOLDER, 1, 2)
    assert layout.fits(files)
    for folder in layout.folders.values():
        files.make_directory(f"{folder}/partitions/{UUID(int=1)}/0")
        assert layout.fits(files)
    assert not layout.is_settled(files)
    assert not Layout.of(FOLDER, 1, 1).fits(files)
    assert Layout.of(FOLDER, 1, 3).fits(files)
    assert not Layout.of(FOLDER, 2, 2).fits(files)


@pytest.mark.parametrize(
    ("folders", "first", "cores", "flags"),
    [
        (["node-1", "node-1001"], 1, 1, "--node-id 1 --cores 2"),
        (["node-7", "node-1007", "node-3007"], 7, 2, "--node-id 7 --cores 4"),
        (["node-1"], 1, 1, "--node-id 1 --cores 2"),
        (["."], 1, 2, "--node-id 1 --cores 1"),
    ],
)
def test_a_machine_in_a_cluster_may_not_change_its_number_of_processes(
    folders: list[str], first: int, cores: int, flags: str
) -> None:
    files = new_files()
    for folder in folders:
        files.make_directory(f"{FOLDER}/{folder}/partitions".replace("/./", "/"))
    with pytest.raises(ClusterMismatch, match=f"pass {flags} as before"):
        Layout.of(FOLDER, first, cores).check_owner(files, in_cluster=True)
    Layout.of(FOLDER, first, int(flags[-1])).check_owner(files, in_cluster=True)


@pytest.mark.parametrize(("cores", "added"), [(2, []), (3, ["[2007]"]), (4, ["[2007, 3007]"])])
def test_a_machine_in_a_cluster_is_warned_that_more_processes_are_for_good(
    cores: int, added: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    files = new_files()
    Layout.of(FOLDER, 7, cores).check_owner(files, in_cluster=True)
    assert not caplog.records
    for folder in ("node-7", "node-1007"):
        files.make_directory(f"{FOLDER}/{folder}/partitions")
    Layout.of(FOLDER, 7, cores).check_owner(files, in_cluster=True)
    warned = [record for record in caplog.records if "cannot be lowered again" in record.getMessage()]
    assert [warning.new_nodes for warning in warned] == added  # type: ignore[attr-defined]


async def test_a_retired_node_of_a_machine_is_no_longer_drained(tmp_path: Path) -> None:
    files, clock = DiskFiles(), SystemClock()
    async with single_node(tmp_path) as topics:
        await topics.create("orders", partitions=2)
    await settle(Layout.of(str(tmp_path), 1, 2), files, clock)
    drained = [Put(keys.drained_key(node), "") for node in (NodeId(1), NodeId(1001))]
    with closing(open_coordination(files, str(tmp_path), clock)) as service:
        await EmbeddedStore(service, clock).change(drained)
    await settle(Layout.of(str(tmp_path), 1, 1), files, clock)
    with closing(open_coordination(files, str(tmp_path), clock)) as service:
        assert list(service.read(keys.DRAINED).entries) == [keys.drained_key(NodeId(1))]


@pytest.fixture
async def moving(tmp_path: Path) -> tuple[Path, PartitionKey]:
    """Return the folder of a machine with three processes, with a partition that a plan moves between two of them."""
    async with single_node(tmp_path) as topics:
        topic = await topics.create("orders", partitions=6)
    await settle(Layout.of(str(tmp_path), 1, 3), DiskFiles(), SystemClock())
    key = next(key for key, state in states(tmp_path).items() if state.replicas == (2001,))
    change(tmp_path, key, replicas=(NodeId(1), NodeId(2001)))
    assert key[0] == topic.topic_id
    return tmp_path, key


def states(data: Path) -> dict[PartitionKey, PartitionState]:
    with closing(open_coordination(DiskFiles(), str(data), SystemClock())) as service:
        entries = service.read(keys.PARTITIONS).entries.items()
    return {
        parse_partition(key.removeprefix(keys.PARTITIONS)): PartitionState.from_json(entry.value)
        for key, entry in entries
    }


def change(data: Path, key: PartitionKey, **fields: Any) -> None:
    changed = replace(states(data)[key], **fields)
    with closing(open_coordination(DiskFiles(), str(data), SystemClock())) as service:
        service.change([Put(keys.partition_key(key), encode_value(changed))], [], None)


def folders_of(data: Path, key: PartitionKey) -> list[str]:
    return sorted(path.parent.parent.parent.name for path in data.glob(f"**/partitions/{key[0]}/{key[1]}"))


@pytest.mark.parametrize("cores", [1, 2])
async def test_a_node_with_a_partition_being_moved_is_not_retired(
    moving: tuple[Path, PartitionKey], cores: int
) -> None:
    (data, key), files, clock = moving, DiskFiles(), SystemClock()
    before = states(data)
    with pytest.raises(ClusterMismatch, match=f"partition {key[1]} of topic orders .* --cores 3 as before"):
        await settle(Layout.of(str(data), 1, cores), files, clock)
    assert (states(data), Layout.of(str(data), 1, 3).is_settled(files)) == (before, True)


async def test_a_partition_being_moved_stays_where_it_is(moving: tuple[Path, PartitionKey]) -> None:
    (data, key), files, clock = moving, DiskFiles(), SystemClock()
    copy = data / "node-1/partitions" / str(key[0]) / str(key[1])
    copy.mkdir(parents=True)
    state = states(data)[key]
    for cores in (3, 4):
        # As a refused start of an earlier version left it.
        mark(Layout.of(str(data), 1, cores), files)
        await settle(Layout.of(str(data), 1, cores), files, clock)
        assert Layout.of(str(data), 1, cores).is_settled(files)
        assert (states(data)[key], folders_of(data, key)) == (state, ["node-1", "node-2001"])


@pytest.mark.parametrize("cores", [1, 2, 3])
async def test_the_leftover_copy_of_a_finished_move_is_removed(moving: tuple[Path, PartitionKey], cores: int) -> None:
    (data, key), files, clock = moving, DiskFiles(), SystemClock()
    change(data, key, replicas=(NodeId(2001),))
    log = f"partitions/{key[0]}/{key[1]}"
    shutil.copytree(data / "node-2001" / log, data / "node-1" / log)
    with closing(open_coordination(files, str(data), clock)) as service:
        service.change([Put(keys.removed_key(key, NodeId(1)), "")], [], None)
    moved = (data / "node-2001" / log).stat().st_ino
    layout = Layout.of(str(data), 1, cores)
    mark(layout, files)
    await settle(layout, files, clock)
    (host,) = states(data)[key].replicas
    assert [(path, path.stat().st_ino) for path in data.glob(f"**/{log}")] == [(Path(layout.folders[host], log), moved)]
    with closing(open_coordination(files, str(data), clock)) as service:
        assert not service.read(keys.REMOVED).entries
