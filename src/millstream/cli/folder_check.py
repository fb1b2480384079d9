"""Checks of a data folder while its broker is stopped. Everything is opened read-only."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from millstream.broker.cluster.last_run import FolderOwner
from millstream.broker.cluster.machine_folder import NODE_PREFIX
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import CLEAN_STOP_NAME, FORMAT, FORMAT_NAME, LOCK_NAME, PARTITIONS_NAME
from millstream.broker.log.ledger import LEDGER_NAME, last_states
from millstream.broker.log.scan import BadRange, Scan, Window
from millstream.broker.log.segment import base_offset_of
from millstream.broker.log.state import LogState, decode_state
from millstream.cli.doctor import Finding, Severity, check_space, passed, problem, warning
from millstream.cli.exit_code import ExitCode
from millstream.cli.output import Progress, counted, sized
from millstream.core.scratch import temporary_folder


@dataclass(slots=True)
class ScannedSegment:
    path: Path
    size_bytes: int
    next_offset: int
    batches: int = 0
    records: int = 0
    bad: list[BadRange] = field(default_factory=list)
    torn_bytes: int = 0
    """Bytes after the last whole batch, with nothing valid after them: what a crash leaves."""


def scan_segment(path: Path, base_offset: int, limit: int, advance: Callable[[int], None]) -> ScannedSegment:
    """Check framing, order and CRC of every batch below `limit`, where the next segment takes over.

    `advance` is called with the number of bytes read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        scanned = ScannedSegment(path, os.fstat(descriptor).st_size, base_offset)
        _scan(Scan(Window(DiskFiles(), descriptor, scanned.size_bytes), 0, base_offset, limit=limit), scanned, advance)
    finally:
        os.close(descriptor)
    return scanned


def _scan(scan: Scan, scanned: ScannedSegment, advance: Callable[[int], None]) -> None:
    done = 0
    for found in scan:
        if not isinstance(found, BadRange):
            scanned.batches += 1
            scanned.records += found.record_count
            scanned.next_offset = found.next_offset
        elif found.next_offset >= 0:
            scanned.bad.append(found)
        else:
            scanned.torn_bytes = found.end - found.start
        advance(scan.position - done)
        done = scan.position
    advance(scanned.size_bytes - done)


CATALOG_NAME = "catalog.sqlite"

_SHOWN_MAX = 5

_NO_LIMIT = 2**63 - 1


def check_folder(folder: Path, *, deep: bool, show_progress: bool) -> list[Finding]:
    if not folder.is_dir():
        advice = "pass the folder of a node with --data DIR; millstream serve --data DIR creates a new one"
        return [problem("folder", f"there is no folder {folder}", advice, ExitCode.NOT_FOUND)]
    # On a machine with several broker processes, each has its own folder with logs.
    stores = [path for path in (folder, *sorted(folder.glob(f"{NODE_PREFIX}*"))) if (path / PARTITIONS_NAME).is_dir()]
    if not stores:
        advice = "pass the folder that millstream serve was started with"
        return [
            problem("folder", f"{folder} is not a data folder: it has no {PARTITIONS_NAME}", advice, ExitCode.NOT_FOUND)
        ]
    findings = list(map(_check_access, dict.fromkeys((folder, *stores))))
    if not _is_read_only(folder):
        findings.append(_check_space(folder))
    if any(map(_is_locked, (folder, *stores))):
        findings.append(passed("lock", "a broker is using the folder"))
        findings.append(
            passed("segments", "in use by a running broker, which checks them; query it with doctor --brokers")
        )
        return findings
    findings.append(passed("lock", "no broker is using the folder"))
    cluster = next(filter(None, (FolderOwner.read(DiskFiles(), str(store)).cluster for store in stores)), "")
    if cluster:
        names: dict[str, str] = {}
        findings.append(passed("catalog", f"that of cluster {cluster!r}; topics are shown by their ids"))
    else:
        names, catalog = _check_catalog(folder)
        findings.append(catalog)
    for store in stores:
        results = [_check_format(store), _check_stop(store)]
        if cluster:
            names = {path.name: path.name for path in (store / PARTITIONS_NAME).iterdir()}
        elif catalog.severity is Severity.OK:
            results += _check_unknown_topics(store, names)
        results += _check_segments(store, names, deep=deep, show_progress=show_progress)
        where = "" if store == folder else f"{store.name}: "
        findings += [replace(result, detail=where + result.detail) for result in results]
    return findings


def _check_access(folder: Path) -> Finding:
    if _is_read_only(folder) and os.access(folder, os.R_OK | os.X_OK):
        detail = f"{folder} is on a read-only file system: it can be checked, but no broker can run on it"
        return warning("folder", detail, "copy it to another disk to start a broker on it")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        advice = f"make the broker's account its owner, for example with: chown -R USER {folder}"
        return problem("folder", f"{folder} cannot be read and written by this user", advice)
    return passed("folder", f"{folder} can be read and written")


def _is_read_only(folder: Path) -> bool:
    """Return whether the folder is on a file system that is mounted read-only, like a restored snapshot."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _check_space(folder: Path) -> Finding:
    total, _, free = shutil.disk_usage(folder)
    return check_space(total, free)


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _check_format(folder: Path) -> Finding:
    try:
        content = (folder / FORMAT_NAME).read_bytes()
    except OSError as error:
        return problem("format", f"{folder / FORMAT_NAME} cannot be read: {error.strerror}", "restore it from a backup")
    if content != FORMAT:
        detail = f"the folder was written in a format that this version does not know: {content[:80]!r}"
        return problem("format", detail, "use the version of millstream that wrote it, or a newer one")
    return passed("format", "known to this version")


def _check_stop(folder: Path) -> Finding:
    if (folder / CLEAN_STOP_NAME).exists():
        return passed("last stop", "clean")
    return passed("last stop", "not clean; the next start checks the ends of the logs")


def _check_catalog(folder: Path) -> tuple[dict[str, str], Finding]:
    """Return the names of all topics by id, and the finding about the catalog."""
    path = folder / CATALOG_NAME
    if not path.exists():
        advice = "restore it from a backup; without it the broker does not know the names of its topics"
        return {}, problem("catalog", f"{path} is missing", advice)
    try:
        with _open_catalog(path) as connection:
            verdict = str(connection.execute("PRAGMA quick_check").fetchone()[0])
            names = {str(row[0]): str(row[1]) for row in connection.execute("SELECT topic_id, name FROM topics")}
    except (sqlite3.Error, OSError) as error:
        return {}, problem("catalog", f"{path} cannot be read: {error}", "restore it from a backup")
    if verdict != "ok":
        return names, problem("catalog", f"{path} is damaged: {verdict}", "restore it from a backup")
    return names, passed("catalog", f"{counted(len(names), 'topic')}")


@contextmanager
def _open_catalog(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the catalog without creating or changing a file next to it.

    SQLite maintains an index of the write-ahead log even for readers, and without it ignores the log. So a catalog
    whose log holds changes, as after an unclean stop or in a snapshot of a running node, is read from a copy.
    """
    log = path.with_name(f"{path.name}-wal")
    with temporary_folder() as scratch:
        where, mode = path, "immutable=1"
        if log.exists() and log.stat().st_size:
            where, mode = Path(scratch, path.name), "mode=rw"
            for file in (path, log):
                shutil.copyfile(file, where.with_name(file.name))
        with closing(sqlite3.connect(f"{where.absolute().as_uri()}?{mode}", uri=True)) as connection:
            yield connection


def _check_unknown_topics(folder: Path, names: dict[str, str]) -> Iterator[Finding]:
    unknown = sorted({path.name for path in (folder / PARTITIONS_NAME).iterdir()} - set(names))
    if unknown:
        shown = ", ".join(unknown[:_SHOWN_MAX])
        detail = f"{counted(len(unknown), 'topic')} on disk that the catalog does not know: {shown}"
        yield warning(
            "catalog", detail, "they are left unchanged; if the catalog was restored, use a newer backup of it"
        )


class _Segment(NamedTuple):
    topic_id: str
    partition: int
    base_offset: int
    path: Path

    def is_followed_by(self, other: _Segment | None) -> bool:
        return other is not None and self[:2] == other[:2]


def _check_segments(folder: Path, names: dict[str, str], *, deep: bool, show_progress: bool) -> list[Finding]:
    segments = sorted(_segment_files(folder))
    total_bytes = sum(segment.path.stat().st_size for segment in segments)
    subject = f"{counted(len(segments), 'segment')} with {sized(total_bytes)}"
    if not deep:
        return [passed("segments", f"{subject}, not read (--quick)")]
    findings = list(_check_missing_files(folder, names, segments))
    stopped_clean = (folder / CLEAN_STOP_NAME).exists()
    records = 0
    with Progress("reading segments", total_bytes=total_bytes, enabled=show_progress) as progress:
        for segment, following in zip_longest(segments, segments[1:]):
            limit = following.base_offset if segment.is_followed_by(following) else _NO_LIMIT
            label = f"{names.get(segment.topic_id, segment.topic_id)}-{segment.partition}"
            try:
                scanned = scan_segment(segment.path, segment.base_offset, limit, progress.advance)
            except OSError as error:
                advice = "the disk may be failing: copy the folder to another disk, then check this one"
                findings.append(problem("segments", f"{segment.path} cannot be read: {error.strerror}", advice))
                continue
            findings += _verdict(label, scanned, limit, stopped_clean=stopped_clean)
            records += scanned.records
    return [*findings, passed("segments", f"{subject}, {counted(records, 'message')} read")]


def _segment_files(folder: Path) -> Iterator[_Segment]:
    for path in (folder / PARTITIONS_NAME).glob("*/*/*.log"):
        base_offset = base_offset_of(path.name)
        if base_offset is not None and path.parent.name.isdigit():
            yield _Segment(path.parent.parent.name, int(path.parent.name), base_offset, path)


def _check_missing_files(folder: Path, names: dict[str, str], segments: list[_Segment]) -> Iterator[Finding]:
    """Report missing files at the start and end of logs, according to the last checkpoint.

    A gap in between is found at the segment before it.
    """
    try:
        states = last_states((folder / LEDGER_NAME).read_bytes())
    except OSError:
        return
    bases: dict[tuple[str, int], set[int]] = {}
    for segment in segments:
        bases.setdefault((segment.topic_id, segment.partition), set()).add(segment.base_offset)
    for (topic_id, partition), content in sorted(states.items()):
        state = decode_state(content)
        if state is None or str(topic_id) not in names:
            continue
        base_offsets = bases.get((str(topic_id), partition), set())
        for first, after in _missing_ranges(state, base_offsets):
            if not base_offsets or first < min(base_offsets) or after > max(base_offsets):
                where = f"a file of {folder / PARTITIONS_NAME / str(topic_id) / str(partition)}"
                yield _lost_finding(f"{names[str(topic_id)]}-{partition}", "missing", first, after, where)


def _missing_ranges(state: LogState, base_offsets: set[int]) -> Iterator[tuple[int, int]]:
    """Return the ranges of missing files, now or since an earlier start."""
    swapped = {base for base, _ in state.swaps}
    ranges = [(lost.start, lost.end) for lost in state.lost if lost.segment < 0]
    ranges += [
        (segment.base_offset, segment.next_offset)
        for segment in state.segments
        if segment.base_offset not in base_offsets | swapped
    ]
    for first, after in sorted(ranges):
        if max(first, state.start_offset) < after:
            yield max(first, state.start_offset), after


def _verdict(label: str, scanned: ScannedSegment, limit: int, *, stopped_clean: bool) -> Iterator[Finding]:
    for bad in scanned.bad:
        where = f"bytes {bad.start} to {bad.end} of {scanned.path}"
        yield _lost_finding(label, "damaged", bad.first, bad.next_offset, where)
    if limit != _NO_LIMIT and scanned.next_offset < limit:
        yield _lost_finding(label, "missing", scanned.next_offset, limit, f"at the end of {scanned.path}")
    elif scanned.torn_bytes:
        detail = f"{label}: no whole batch in the last {counted(scanned.torn_bytes, 'byte')} of {scanned.path}"
        if stopped_clean:
            # A clean stop leaves no unfinished write, so these bytes were complete once.
            advice = "the disk damaged messages that were stored; restore them from a copy, if you have one"
            yield problem("segments", f"{detail}, although the last stop was clean", advice)
            return
        advice = "a write that a crash interrupted; the next start removes it, or completes it from the journal"
        yield warning("segments", detail, advice)


def _lost_finding(label: str, how: str, first: int, next_offset: int, where: str) -> Finding:
    advice = "the other offsets are intact and served; restore this range from a copy, if you have one"
    return problem("segments", f"{label}: offsets {first} to {next_offset - 1} are {how} ({where})", advice)
