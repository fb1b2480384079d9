"""Files of failed attempts are deleted, also late ones; files of a table never are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.pipelines.jobs.land import abandoned_files as leftovers_module
from millstream.pipelines.jobs.land.abandoned_files import EMPTY_LISTINGS_MAX, KEPT_S, PAUSE_S, SWEEP_S, AbandonedFiles
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable
from millstream.pipelines.lake.task_writer import TaskWriter
from millstream_testing.lake_rows import LANDED, TOPIC, delta_rows, once, rows

FAILED = "0123456789abcdef"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(storage: Storage, attempt: str, offsets: range = range(5)) -> TaskWriter:
    writer = TaskWriter(storage, RAW, TOPIC, landed=LANDED, attempt=attempt)
    writer.write(rows(0, offsets))
    writer.close()
    return writer


def fail(leftovers: AbandonedFiles, writer: TaskWriter) -> None:
    with (
        pytest.raises(OSError, match="full"),
        leftovers.watch(FAILED, [(writer.storage, writer.folder), (writer.storage.suffixed("__quarantine"), "")]),
    ):
        raise OSError("full")


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition("_")[2][:16] for path in folder.rglob("*.parquet"))


def test_files_of_a_failed_attempt_are_deleted_including_late_ones(tmp_path: Path) -> None:
    storage, clock = Storage.at(str(tmp_path / "orders")), Clock()
    leftovers = AbandonedFiles(clock)
    other = "fedcba9876543210"
    write(storage, other)
    writer = write(storage, FAILED)
    write(storage.suffixed("__quarantine"), FAILED)
    fail(leftovers, writer)
    assert names(tmp_path) == [other]
    for clock.now in range(int(PAUSE_S), int(KEPT_S) + 1, int(PAUSE_S)):
        write(storage, FAILED)
        assert leftovers.sweep() == 1
    clock.now += PAUSE_S
    write(storage, FAILED)
    assert leftovers.sweep() == 0
    assert names(tmp_path) == [FAILED, other]


def test_files_of_a_successful_attempt_are_kept(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path / "orders"))
    leftovers = AbandonedFiles()
    with leftovers.watch(FAILED, [(storage, "")]):
        write(storage, FAILED)
    assert leftovers.sweep() == 0
    assert names(tmp_path) == [FAILED]


def test_files_of_a_table_are_never_deleted(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path / "orders"))
    table = LakeTable(storage)
    writer = table.writer(RAW, TOPIC, landed=LANDED, attempt=FAILED)
    writer.write(rows(0, range(5)))
    assert table.commit(writer.close(), {(TOPIC, 0): (0, 5)}, schema=RAW)
    fail(AbandonedFiles(), write(storage, FAILED))
    assert delta_rows(storage) == once(0, range(5))
    assert names(tmp_path) == [FAILED]


def test_an_unavailable_location_hides_no_failure_and_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files = Storage.data_files

    def away(storage: Storage, folder: str = "") -> Iterator[str]:
        if storage.url.endswith("away"):
            raise OSError("away")
        return data_files(storage, folder)

    monkeypatch.setattr(Storage, "data_files", away)
    clock = Clock()
    leftovers = AbandonedFiles(clock)
    orders = Storage.at(str(tmp_path / "orders"))
    fail(leftovers, TaskWriter(Storage.at(str(tmp_path / "away")), RAW, TOPIC, landed=LANDED))
    fail(leftovers, write(orders, FAILED))
    assert names(tmp_path) == []
    clock.now = PAUSE_S
    write(orders, FAILED)
    assert leftovers.sweep() + leftovers.sweep() == 1
    clock.now = KEPT_S + 1
    leftovers.sweep()
    write(orders, FAILED)
    assert leftovers.sweep() == 0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of listings of each table, by name."""
    counted: Counter[str] = Counter()
    data_files = Storage.data_files

    def count(storage: Storage, folder: str = "") -> Iterator[str]:
        counted[Path(storage.url).name] += 1
        return data_files(storage, folder)

    monkeypatch.setattr(Storage, "data_files", count)
    return counted


def test_folders_are_listed_once_a_minute_until_nothing_appears_for_a_while(
    tmp_path: Path, looks: Counter[str]
) -> None:
    storage, clock, signs = Storage.at(str(tmp_path / "orders")), Clock(), Counter[str]()
    leftovers = AbandonedFiles(clock)
    fail(leftovers, write(storage, FAILED))
    assert looks["orders"] == 1
    for clock.now in range(int(KEPT_S)):
        leftovers.sweep(lambda: signs.update(["sign"]))
    # The first listing found something, those of the quarantine nothing.
    assert looks == {"orders": 1 + EMPTY_LISTINGS_MAX, "orders__quarantine": EMPTY_LISTINGS_MAX}
    assert signs["sign"] == looks.total() - 2


def test_a_slow_sweep_leaves_the_rest_to_the_next_one(
    tmp_path: Path, looks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    leftovers = AbandonedFiles(clock)
    places = [(Storage.at(str(tmp_path / f"{number:02}")), "") for number in range(16)]

    def slowly(storage: Storage, folder: str = "") -> Iterator[str]:
        looks[Path(storage.url).name] += 1
        clock.now += SWEEP_S + 1
        return iter(())

    monkeypatch.setattr(Storage, "data_files", slowly)
    with pytest.raises(OSError, match="full"), leftovers.watch(FAILED, places):
        raise OSError("full")
    assert 0 < len(looks) < len(places)
    for _sweep in places:
        leftovers.sweep()
    assert len(looks) == len(places)


def test_a_failed_sweep_hides_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_given: object, **_named: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(leftovers_module, "ThreadPoolExecutor", refuse)
    fail(AbandonedFiles(), write(Storage.at(str(tmp_path / "orders")), FAILED))
