from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest

from millstream.broker.cluster.last_run import FolderOwner, change_owner
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import FORMAT
from millstream.cli import folder_check
from millstream.cli.doctor import Finding, Severity
from millstream.cli.exit_code import ExitCode
from millstream.cli.folder_check import check_folder
from millstream.protocol.records.record import NewRecord, encode_batch


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Folder:
    """A data folder with one topic, built by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.topic_id = str(uuid4())
        (path / "partitions" / self.topic_id / "0").mkdir(parents=True)
        (path / "lock").touch()
        (path / "clean-stop").touch()
        (path / "format").write_bytes(FORMAT)
        with sqlite3.connect(path / "catalog.sqlite") as connection:
            connection.execute("CREATE TABLE topics (topic_id TEXT, name TEXT)")
            connection.execute("INSERT INTO topics VALUES (?, 'orders')", (self.topic_id,))
        connection.close()

    def segment(self, base_offset: int, records: int, *, tail: bytes = b"") -> Path:
        path = self.path / "partitions" / self.topic_id / "0" / f"{base_offset:020}.log"
        path.write_bytes(bytes(encode_batch([NewRecord(None, b"v")] * records, base_offset=base_offset)) + tail)
        return path

    def check(self, *, deep: bool = True) -> dict[str, list[Finding]]:
        findings: dict[str, list[Finding]] = {}
        for finding in check_folder(self.path, deep=deep, show_progress=False):
            findings.setdefault(finding.check, []).append(finding)
        return findings


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "data")


def severities(findings: dict[str, list[Finding]], *, but: str = "space") -> set[Severity]:
    return {
        finding.severity for check, check_findings in findings.items() if check != but for finding in check_findings
    }


def test_a_healthy_folder_has_no_findings(folder: Folder) -> None:
    folder.segment(0, 3)
    folder.segment(3, 2)
    findings = folder.check()
    assert severities(findings) == {Severity.OK}
    assert "2 segments" in findings["segments"][0].detail
    assert "5 messages read" in findings["segments"][0].detail


def test_every_process_of_a_machine_is_checked(folder: Folder) -> None:
    folder.segment(0, 3, tail=b"torn")
    names = ("format", "clean-stop", "partitions")
    (folder.path / "node-1001").mkdir()
    for name in names:
        (folder.path / name).rename(folder.path / "node-1001" / name)
    Folder(folder.path / "node-1").segment(0, 2)
    findings = folder.check()
    assert [finding.severity for finding in findings["last stop"] + findings["format"]] == [Severity.OK] * 4
    whole, torn, read = findings["segments"]
    assert (whole.detail[:7], whole.detail[-16:]) == ("node-1:", " 2 messages read")
    assert (torn.severity, torn.detail.startswith("node-1001: orders-0: no whole batch")) == (Severity.PROBLEM, True)
    assert read.detail.startswith("node-1001: 1 segment")
    with (folder.path / "node-1" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in folder.check()["segments"][0].detail


def test_a_member_of_a_cluster_has_its_catalog_elsewhere(folder: Folder) -> None:
    folder.segment(0, 3, tail=b"torn")
    (folder.path / "catalog.sqlite").unlink()
    assert folder.check()["catalog"][0].severity is Severity.PROBLEM
    change_owner(DiskFiles(), str(folder.path), FolderOwner(node_id=1, cluster="main", cluster_id="c"))
    findings = folder.check()
    (catalog,) = findings["catalog"]
    assert (catalog.severity, "'main'" in catalog.detail) == (Severity.OK, True)
    assert findings["segments"][0].detail.startswith(f"{folder.topic_id}-0: no whole batch")


def test_checking_changes_nothing(folder: Folder) -> None:
    folder.segment(0, 3, tail=b"torn")
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    folder.check()
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_read_only_file_system_is_checked(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.segment(0, 3, tail=b"torn")
    change_owner(DiskFiles(), str(folder.path), FolderOwner(node_id=1))
    opens = os.open

    def refuse_writing(path: str | Path, flags: int, *more: int, **options: int) -> int:
        if str(path).startswith(str(folder.path)) and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opens(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse_writing)
    monkeypatch.setattr(folder_check, "_is_read_only", lambda _folder: True)
    findings = folder.check()
    assert "read-only" in findings["folder"][0].detail
    assert findings["folder"][0].severity is Severity.WARNING
    assert findings["catalog"][0].severity is Severity.OK
    assert "3 messages read" in findings["segments"][-1].detail


def test_the_log_of_the_catalog_counts_and_stays_as_it_is(folder: Folder) -> None:
    """A node that was killed leaves changes in SQLite's write-ahead log."""
    folder.segment(0, 3)
    catalog, added = folder.path / "catalog.sqlite", str(uuid4())
    with closing(sqlite3.connect(catalog)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("INSERT INTO topics VALUES (?, 'added')", (added,))
        connection.commit()
        killed = {path: path.read_bytes() for path in folder.path.glob("catalog.sqlite-wal")}
    for path, content in killed.items():
        path.write_bytes(content)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert folder.check()["catalog"][0].detail == "2 topics"
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    # After a clean stop there is no log, but the catalog still has that mode.
    for path in killed:
        path.unlink()
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert folder.check()["catalog"][0].severity is Severity.OK
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_another_format_version_is_a_problem(folder: Folder) -> None:
    (folder.path / "format").write_bytes(b"format 99")
    assert folder.check()["format"][0].severity is Severity.PROBLEM
    (folder.path / "format").unlink()
    assert folder.check()["format"][0].severity is Severity.PROBLEM


def test_an_unclean_stop_is_reported_but_needs_no_action(folder: Folder) -> None:
    (folder.path / "clean-stop").unlink()
    (finding,) = folder.check()["last stop"]
    assert (finding.severity, finding.detail[:9]) == (Severity.OK, "not clean")


def test_a_folder_in_use_is_not_read(folder: Folder) -> None:
    folder.segment(0, 1, tail=b"being written")
    with (folder.path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        findings = folder.check()
    assert findings["lock"][0].detail == "a broker is using the folder"
    assert "in use by a running broker" in findings["segments"][0].detail
    assert {finding.severity for finding in (*findings["lock"], *findings["segments"])} == {Severity.OK}


def test_a_torn_tail_after_a_clean_stop_is_a_problem(folder: Folder) -> None:
    folder.segment(0, 1, tail=b"torn")
    (finding, _) = folder.check()["segments"]
    assert finding.severity is Severity.PROBLEM
    assert "although the last stop was clean" in finding.detail


def test_a_torn_tail_after_a_crash_is_a_warning(folder: Folder) -> None:
    (folder.path / "clean-stop").unlink()
    path = folder.segment(0, 1, tail=b"torn")
    (finding, _) = folder.check()["segments"]
    assert (finding.severity, finding.detail) == (
        Severity.WARNING,
        f"orders-0: no whole batch in the last 4 bytes of {path}",
    )


def test_a_missing_segment_is_a_problem(folder: Folder) -> None:
    folder.segment(0, 3)
    folder.segment(5, 2)
    (finding, _) = folder.check()["segments"]
    assert finding.severity is Severity.PROBLEM
    assert "orders-0: offsets 3 to 4 are missing" in finding.detail


def test_a_quick_check_reads_no_segment(folder: Folder) -> None:
    folder.segment(0, 1, tail=b"torn")
    (finding,) = folder.check(deep=False)["segments"]
    assert (finding.severity, "--quick" in finding.detail) == (Severity.OK, True)


def test_a_segment_that_cannot_be_read_is_a_problem(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.segment(0, 1)

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder_check, "scan_segment", failing)
    assert "cannot be read: Input/output error" in folder.check()["segments"][0].detail


def test_a_missing_catalog_is_a_problem(folder: Folder) -> None:
    (folder.path / "catalog.sqlite").unlink()
    (finding,) = folder.check()["catalog"]
    assert (finding.severity, "is missing" in finding.detail) == (Severity.PROBLEM, True)


def test_a_damaged_catalog_is_a_problem(folder: Folder) -> None:
    (folder.path / "catalog.sqlite").write_bytes(b"this is no database" * 100)
    (finding,) = folder.check()["catalog"]
    assert (finding.severity, "cannot be read" in finding.detail) == (Severity.PROBLEM, True)


def test_data_of_unknown_topics_is_a_warning(folder: Folder) -> None:
    (folder.path / "partitions" / "stranger").mkdir()
    (_, finding) = folder.check()["catalog"]
    assert (finding.severity, "stranger" in finding.detail) == (Severity.WARNING, True)


@pytest.mark.parametrize(
    ("free", "severity"), [(1, Severity.PROBLEM), (10**9, Severity.WARNING), (10**11, Severity.OK)]
)
def test_low_disk_space_is_reported(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, free: int, severity: Severity
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**12, 10**12 - free, free))
    assert folder.check()["space"][0].severity is severity


def test_a_folder_without_data_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        (finding,) = check_folder(path, deep=True, show_progress=False)
        assert (finding.severity, finding.exit_code) == (Severity.PROBLEM, ExitCode.NOT_FOUND)
