"""Columns of whole numbers become columns of doubles: every file is written anew, and one commit changes all of it.

Delta knows no such change of a type that readers of today understand. So the files of the table are written with the
column under its new type and take the place of all that there were, together with the new columns, by one commit for
exactly the version in which these were seen. What is landed or compacted meanwhile makes it come too late: then only
what is new is written, and it is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import deltalake
import pyarrow as pa

from millstream.core.errors import Conflict
from millstream.pipelines.lake.active_files import ActiveFile, active_files
from millstream.pipelines.lake.column_path import Place, narrower, retyped
from millstream.pipelines.lake.delta_log import DeltaLog, schema_of
from millstream.pipelines.lake.rewriting import Files, Look, Rewrite, Run, numbers_found
from millstream.pipelines.lake.written_file import Written, from_json

ATTEMPTS_MAX: Final = 20
_GIB: Final = 1024**3


class Widening:
    """One change of a table."""

    def __init__(self, log: DeltaLog, source: Files, *, run: Run, bytes_max: int, may_be_deleted: bool = False) -> None:
        self._log = log
        self._source = source
        self._run = run
        self._bytes_max = bytes_max
        self._may_be_deleted = may_be_deleted
        self._written: dict[str, list[Written]] = {}
        """By the path of each file that was written anew, what has its rows."""

    def widen(self, places: Sequence[Place]) -> dict[Place, str]:
        """Have places double that are long; for those that stay as they are, why."""
        table = self._log.refresh()
        if table is None:
            return {}
        files = list(active_files(table))
        size = sum(file.bytes for file in files)
        if size > self._bytes_max:
            return dict.fromkeys(places, self._too_large(size))
        refused = self._inexact(files, places)
        wanted = [place for place in places if place not in refused]
        if wanted:
            self._replace(wanted)
        return refused

    def _too_large(self, size: int) -> str:
        return (
            f"its table has {size / _GIB:.1f} GiB, and is rewritten up to {self._bytes_max / _GIB:.1f} GiB only: "
            "raise widen.max.bytes of the pipeline to have it done"
        )

    def _inexact(self, files: Sequence[ActiveFile], places: Sequence[Place]) -> dict[Place, str]:
        """The places that have numbers which would not be the same as doubles, and why they stay as they are."""
        look = Look(source=self._source, places=tuple(places))
        refused: dict[Place, str] = {}
        for found in self._run(look, files).values() if files else ():
            for place, number in zip(places, numbers_found(found), strict=True):
                if number is not None:
                    refused[place] = f"it has {number}, which is beyond what doubles hold exactly"
        return refused

    def _replace(self, places: Sequence[Place]) -> None:
        for _attempt in range(ATTEMPTS_MAX):
            table = self._log.refresh()
            if table is None or not self._is_wanted(table, places):
                # Somebody else did it, or deleted the table.
                self._discard(kept=self._log.paths())
                return
            files = list(active_files(table))
            schema = retyped(schema_of(table), places, pa.float64())
            self._rewrite([file for file in files if file.path not in self._written], schema)
            present = [new for file in files for new in self._written[file.path]]
            if self._log.replace_all(present, schema):
                self._discard(kept=[file.path for file in present])
                return
        self._log.refresh()
        self._discard(kept=self._log.paths())
        raise Conflict(f"others commit to {self._log.storage.url} all the time: its columns could not be widened")

    def _is_wanted(self, table: deltalake.DeltaTable, places: Sequence[Place]) -> bool:
        schema = schema_of(table)
        return any(narrower(schema, retyped(schema, places, pa.float64())))

    def _rewrite(self, files: Sequence[ActiveFile], schema: pa.Schema) -> None:
        rewrite = Rewrite(
            source=self._source, storage=self._log.storage, schema=schema, may_be_deleted=self._may_be_deleted
        )
        try:
            done = self._run(rewrite, files) if files else {}
        except BaseException:
            # What was written for an earlier attempt was refused, and this one is not tried.
            self._discard(kept=self._log.paths())
            raise
        self._written.update({path: from_json(result) for path, result in done.items()})

    def _discard(self, kept: Sequence[str]) -> None:
        """Delete what was written and is no part of the table: the commit that named it was refused."""
        held = set(kept)
        for files in self._written.values():
            for file in files:
                if file.path not in held:
                    self._log.storage.delete(file.path)
        self._written = {}
