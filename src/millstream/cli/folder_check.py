"""Checks of a data folder while its broker is stopped. Everything is opened for reading only."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from millstream.cli.exit_code import ExitCode
from millstream.cli.finding import Finding, ok, problem, warning
from millstream.cli.output import counted, sized
from millstream.cli.progress import Progress
from millstream.cli.segment_scan import ScannedSegment, scan_segment
from millstream.log.segment import base_offset_of

LOCK, CLEAN_STOP, CATALOG, PARTITIONS = "lock", "clean-stop", "catalog.sqlite", "partitions"

FREE_BYTES_LOW = 100 * 1024 * 1024
FREE_SHARE_LOW = 0.05
_SHOWN_MAX = 5


def check_folder(folder: Path, *, deep: bool, show_progress: bool) -> list[Finding]:
    """Everything that can be said about a data folder."""
    if not folder.is_dir():
        advice = "give the folder of a node with --data DIR; millstream serve --data DIR makes a new one"
        return [problem("folder", f"there is no folder {folder}", advice, ExitCode.NOT_FOUND)]
    if not (folder / PARTITIONS).is_dir():
        advice = "give the folder that millstream serve was started with"
        return [problem("folder", f"{folder} is not a data folder: it has no {PARTITIONS}", advice, ExitCode.NOT_FOUND)]
    findings = [_access(folder), _space(folder)]
    if _is_locked(folder):
        findings.append(ok("lock", "a broker is using the folder"))
        advice = "check the broker with --brokers HOST:PORT, or stop it and run this again"
        findings.append(warning("segments", "not checked, since the broker is writing to them", advice))
        return findings
    findings += [ok("lock", "no broker is using the folder"), _stop(folder)]
    names, catalog_findings = _catalog(folder)
    findings += catalog_findings
    findings += _segments(folder, names, deep=deep, show_progress=show_progress)
    return findings


def _access(folder: Path) -> Finding:
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        advice = f"give it to whoever runs the broker, for example with: chown -R USER {folder}"
        return problem("folder", f"{folder} cannot be read and written by this user", advice)
    return ok("folder", f"{folder} can be read and written")


def _space(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    detail = f"{sized(usage.free)} of {sized(usage.total)} are free"
    if usage.free < FREE_BYTES_LOW:
        advice = "free space now, or lower the retention of topics: a broker with a full disk refuses writes"
        return problem("space", detail, advice)
    if usage.free < usage.total * FREE_SHARE_LOW:
        return warning("space", detail, "free space, or lower the retention of topics, before the disk is full")
    return ok("space", detail)


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _stop(folder: Path) -> Finding:
    if (folder / CLEAN_STOP).exists():
        return ok("last stop", "clean")
    advice = "nothing to do: the next start checks the ends of the logs, which takes a little longer"
    return warning("last stop", "not clean: the broker was killed, or the machine went down", advice)


def _catalog(folder: Path) -> tuple[dict[str, str], list[Finding]]:
    """The names of all topics by id, and what is to be said about the catalog."""
    path = folder / CATALOG
    if not path.exists():
        advice = "restore it from a backup; without it the broker does not know the names of its topics"
        return {}, [problem("catalog", f"{path} is missing", advice)]
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            verdict = str(connection.execute("PRAGMA quick_check").fetchone()[0])
            names = {str(row[0]): str(row[1]) for row in connection.execute("SELECT topic_id, name FROM topics")}
        finally:
            connection.close()
    except sqlite3.Error as error:
        return {}, [problem("catalog", f"{path} cannot be read: {error}", "restore it from a backup")]
    if verdict != "ok":
        return names, [problem("catalog", f"{path} is damaged: {verdict}", "restore it from a backup")]
    return names, [ok("catalog", f"{counted(len(names), 'topic')}"), *_strangers(folder, names)]


def _strangers(folder: Path, names: dict[str, str]) -> Iterator[Finding]:
    unknown = sorted({path.name for path in (folder / PARTITIONS).iterdir()} - set(names))
    if unknown:
        shown = ", ".join(unknown[:_SHOWN_MAX])
        detail = f"{counted(len(unknown), 'topic')} on disk that the catalog does not know: {shown}"
        yield warning("catalog", detail, "they are left alone; if the catalog was restored, use a newer backup of it")


def _segments(folder: Path, names: dict[str, str], *, deep: bool, show_progress: bool) -> list[Finding]:
    found = sorted(_segment_files(folder))
    total_bytes = sum(path.stat().st_size for _, _, _, path in found)
    what = f"{counted(len(found), 'segment')} with {sized(total_bytes)}"
    if not deep:
        return [ok("segments", f"{what}, not read (--quick)")]
    findings: list[Finding] = []
    before: ScannedSegment | None = None
    records = 0
    with Progress("reading segments", total_bytes=total_bytes, wanted=show_progress) as progress:
        for topic_id, partition, base_offset, path in found:
            try:
                scanned = scan_segment(path, base_offset)
            except OSError as error:
                advice = "the disk may be failing: copy the folder away, then check the disk"
                findings.append(problem("segments", f"{path} cannot be read: {error.strerror}", advice))
                continue
            follows = before is not None and before.path.parent == path.parent
            label = f"{names.get(topic_id, topic_id)}-{partition}"
            findings += _verdict(label, scanned, before if follows else None)
            before = scanned
            records += scanned.records
            progress.advance(scanned.size_bytes)
    return [*findings, ok("segments", f"{what}, {counted(records, 'message')} read")]


def _segment_files(folder: Path) -> Iterator[tuple[str, int, int, Path]]:
    for path in (folder / PARTITIONS).glob("*/*/*.log"):
        base_offset = base_offset_of(path.name)
        if base_offset is not None and path.parent.name.isdigit():
            yield path.parent.parent.name, int(path.parent.name), base_offset, path


def _verdict(label: str, scanned: ScannedSegment, before: ScannedSegment | None) -> Iterator[Finding]:
    restore = "the other offsets are unharmed and served; restore this range from a copy, if you have one"
    for first_byte, next_byte, first, next_offset in scanned.bad:
        where = f"bytes {first_byte} to {next_byte} of {scanned.path}"
        yield problem("segments", f"{label}: offsets {first} to {next_offset - 1} are damaged ({where})", restore)
    if before is not None and before.next_offset < scanned.base_offset:
        detail = f"{label}: offsets {before.next_offset} to {scanned.base_offset - 1} are missing before {scanned.path}"
        yield problem("segments", detail, restore)
    if scanned.torn_bytes:
        detail = f"{label}: the last {counted(scanned.torn_bytes, 'byte')} of {scanned.path} are no whole batch"
        advice = (
            "a write that a crash cut short; what was acknowledged is in the journal, and the next start repairs it"
        )
        yield warning("segments", detail, advice)
