"""Reading a table writes nothing, and sees everything that a crash left half done."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import open_table
from millstream_testing.lake_rows import TOPIC, land, next_offset, rows, write, write_quarantine


class Killed(BaseException):
    """The process died here."""


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """All files and their modification times."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def read(folder: Path, format: str) -> tuple[int, list[int], list[int]]:
    """The position of a table, and the offsets of its rows and of its quarantined rows."""
    table = open_table(str(folder / "orders"), format=format)
    scans = table.scan(TOPIC, 0, 0, 99, ["offset"]), table.scan_quarantined(TOPIC, 0, 0, 99, ["offset"])
    there, odd = ([offset for batch in batches for offset in batch.column("offset").to_pylist()] for batches in scans)
    return table.reached([(TOPIC, 0)]).get((TOPIC, 0), 0), there, odd


def crash(folder: Path, format: str, monkeypatch: pytest.MonkeyPatch, before: tuple[type, str]) -> None:
    """Land twenty messages, two of which are invalid, and die before all files are in place."""
    table = open_table(str(folder / "orders"), format=format)
    assert land(table, 0, 0, 10)
    files, bad = write(table, [rows(0, range(10, 18))]), write_quarantine(table, 0, [18, 19])
    owner, name = before
    act = getattr(owner, name)

    def killed(self: object, *given: object, **named: object) -> object:
        if name == "publish" or not named.get("metadata"):
            raise Killed
        return act(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(Killed):
            table.commit(files, {(TOPIC, 0): (10, 20)}, schema=RAW, quarantined=bad)


@pytest.mark.parametrize(
    ("format", "before"),
    [("delta", (DeltaLog, "commit")), ("parquet", (DeltaLog, "commit")), ("parquet", (Storage, "publish"))],
)
def test_reading_changes_nothing(
    tmp_path: Path, format: str, before: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(tmp_path, format) == (0, [], [])
    assert not list(tmp_path.iterdir())
    crash(tmp_path, format, monkeypatch, before)
    as_it_was = tree(tmp_path)
    assert read(tmp_path, format) == (20, list(range(18)), [18, 19])
    assert tree(tmp_path) == as_it_was
    # The next writer completes the interrupted commit, and readers see no difference.
    assert next_offset(open_table(str(tmp_path / "orders"), format=format)) == 20
    assert tree(tmp_path) != as_it_was
    assert read(tmp_path, format) == (20, list(range(18)), [18, 19])


def test_a_deleted_quarantine_blocks_nothing(tmp_path: Path) -> None:
    table = open_table(str(tmp_path / "orders"))
    assert table.commit([], {(TOPIC, 0): (0, 2)}, schema=RAW, quarantined=write_quarantine(table, 0, [0, 1]))
    shutil.rmtree(tmp_path / "orders__quarantine")
    assert read(tmp_path, "delta") == (2, [], [])
    assert land(open_table(str(tmp_path / "orders")), 0, 2, 4)
    assert table.commit([], {(TOPIC, 0): (4, 5)}, schema=RAW, quarantined=write_quarantine(table, 0, [4]))
    assert read(tmp_path, "delta") == (5, [2, 3], [4])
