"""Runs that die anywhere, run twice or commit late: every offset is in the table or its quarantine exactly once."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.core.errors import StalePlan
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream.pipelines.lake.table_file import WrittenFile
from millstream_testing.lake_rows import (
    LANDED,
    TOPIC,
    delta_rows,
    files_rows,
    in_this_process,
    next_offset,
    rows,
    write,
    write_quarantine,
)

PARTITIONS = 2
NARROW = RAW.append(pa.field("total", pa.int64()))


class Killed(BaseException):
    """The process died here."""


class Fuse:
    """Kills a run at its n-th critical step, just before or just after it."""

    def __init__(self, steps: int, *, is_after: bool) -> None:
        self._left = steps
        self._is_after = is_after

    def around(self, act: Callable[..., object]) -> Callable[..., object]:
        def burning(*args: object, **named: object) -> object:
            self._left -= 1
            if self._left == 0 and not self._is_after:
                raise Killed
            result = act(*args, **named)
            if self._left == 0:
                raise Killed
            return result

        return burning


@contextmanager
def killed_at(fuse: Fuse | None) -> Iterator[None]:
    """Arm a fuse in every commit to a log, every change of a table and every move of a file."""
    if fuse is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        places = ((DeltaLog, "commit"), (DeltaLog, "replace_all"), (DeltaLog, "_create"), (Storage, "publish"))
        for owner, name in places:
            patched.setattr(owner, name, fuse.around(getattr(owner, name)))
        with suppress(Killed):
            yield


@dataclass
class Run:
    """A step that was planned and written, but not committed yet."""

    table: LakeTable
    schema: pa.Schema
    files: list[WrittenFile]
    quarantined: list[WrittenFile]
    offsets: dict[tuple[str, int], tuple[int, int]]
    bad: set[tuple[int, int]]


FUSES = st.one_of(st.none(), st.builds(Fuse, st.integers(1, 5), is_after=st.booleans()))


class Landing(RuleBasedStateMachine):
    """Runs of one table in any order, each with its own opinion of which rows are bad."""

    FORMAT = "delta"

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.storage = Storage.at(str(Path(self._folder.name) / "orders"))
        self.runs: list[Run] = []
        self.next = dict.fromkeys(range(PARTITIONS), 0)
        self.bad: set[tuple[int, int]] = set()

    def teardown(self) -> None:
        self._folder.cleanup()

    def open(self) -> LakeTable:
        return open_table(self.storage.url, format=self.FORMAT)

    @rule(
        sizes=st.dictionaries(st.integers(0, PARTITIONS - 1), st.integers(1, 6), min_size=1),
        every=st.integers(1, 4),
    )
    def plan_and_write(self, sizes: dict[int, int], every: int) -> None:
        table = self.open()
        run = Run(table, table.schema() or NARROW, [], [], {}, set())
        for partition, size in sizes.items():
            start = next_offset(table, partition)
            span = range(start, start + size)
            bad = [offset for offset in span if offset % every == 1]
            good = [offset for offset in span if offset not in bad]
            run.files += write(table, [rows(partition, good, run.schema, total=good)], run.schema)
            run.quarantined += write_quarantine(table, partition, bad)
            run.offsets[TOPIC, partition] = (start, start + size)
            run.bad |= {(partition, offset) for offset in bad}
        self.runs.append(run)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 100), fuse=FUSES, is_kept=st.booleans())
    def commit(self, number: int, fuse: Fuse | None, is_kept: bool) -> None:
        run = self.runs[number % len(self.runs)]
        fits = all(self.next[partition] == start for (_, partition), (start, _end) in run.offsets.items())
        fits = fits and run.schema == (self.open().schema() or NARROW)
        done: bool | None = None
        with killed_at(fuse):
            try:
                done = run.table.commit(run.files, run.offsets, schema=run.schema, quarantined=run.quarantined)
            except StalePlan:
                assert not fits
        now = {partition: next_offset(self.open(), partition) for partition in self.next}
        if now != self.next:
            assert fits
            assert done in (True, None)
            self.next.update({partition: end for (_, partition), (_start, end) in run.offsets.items()})
            self.bad |= run.bad
        else:
            assert done in (False, None)
            assert fuse is not None or not fits
        assert now == self.next
        if not is_kept:
            self.runs.remove(run)

    @rule(fuse=FUSES)
    def compact(self, fuse: Fuse | None) -> None:
        with killed_at(fuse):
            self.open().compact(before=LANDED + timedelta(hours=1))

    @rule(fuse=FUSES)
    def widen(self, fuse: Fuse | None) -> None:
        with killed_at(fuse):
            assert self.open().widen([("total",)], run=in_this_process, bytes_max=2**60) == {}

    @precondition(lambda self: not self.runs)
    @rule()
    def vacuum(self) -> None:
        self.open().vacuum(grace=timedelta(0))

    @invariant()
    def every_offset_is_there_once(self) -> None:
        next_offset(self.open())
        count = delta_rows if self.FORMAT == "delta" else files_rows
        if not any(self.next.values()):
            return
        landed = Counter((partition, offset) for partition, end in self.next.items() for offset in range(end))
        good = count(self.storage)
        bad = count(self.storage.suffixed("__quarantine")) if self.bad else Counter()
        assert bad == Counter(self.bad)
        assert good + bad == landed


class LandingAsParquet(Landing):
    """The same with plain Parquet files."""

    FORMAT = "parquet"


_SHORT = settings(
    max_examples=6,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TestLanding = Landing.TestCase
TestLanding.settings = _SHORT
TestLandingAsParquet = LandingAsParquet.TestCase
TestLandingAsParquet.settings = _SHORT


@pytest.mark.trial
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [Landing, LandingAsParquet])
def test_many_runs_that_die_anywhere(machine: type[Landing]) -> None:
    case = type("Long", (machine.TestCase,), {"settings": settings(_SHORT, max_examples=60, stateful_step_count=25)})
    case("runTest").runTest()
