"""Widens long columns to double: every file is rewritten, and one commit replaces them all.

Delta has no such type change that today's readers understand. The table's files are therefore written with the column
under its new type and replace all others, together with the new schema, by one commit for exactly the version in which
these were seen. Files landed or compacted meanwhile make it come too late: then only the new files are written, and it
is tried again.
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
        """The rewritten files, by the path of the original."""

    def widen(self, places: Sequence[Place]) -> dict[Place, str]:
        """Make long paths double; return the reasons for those that stay long."""
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
            f"its table has {size / _GIB:.1f} GiB, and the limit is {self._bytes_max / _GIB:.1f} GiB: "
            "raise widen.max.bytes of the pipeline to widen it"
        )

    def _inexact(self, files: Sequence[ActiveFile], places: Sequence[Place]) -> dict[Place, str]:
        """Return the paths with numbers that doubles cannot hold, with the reasons."""
        look = Look(source=self._source, places=tuple(places))
        refused: dict[Place, str] = {}
        for found in self._run(look, files).values() if files else ():
            for place, number in zip(places, numbers_found(found), strict=True):
                if number is not None:
                    refused[place] = f"it has {number}, which doubles cannot hold exactly"
        return refused

    def _replace(self, places: Sequence[Place]) -> None:
        for _attempt in range(ATTEMPTS_MAX):
            table = self._log.refresh()
            if table is None or not self._is_wanted(table, places):
                # Another run did it, or deleted the table.
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
        raise Conflict(f"columns of {self._log.storage.url} could not be widened: other writers keep committing")

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
            # Files of an earlier attempt were refused, and this one is not tried.
            self._discard(kept=self._log.paths())
            raise
        self._written.update({path: from_json(result) for path, result in done.items()})

    def _discard(self, kept: Sequence[str]) -> None:
        """Delete written files that are not part of the table: the commit that named them was refused."""
        held = set(kept)
        for files in self._written.values():
            for file in files:
                if file.path not in held:
                    self._log.storage.delete(file.path)
        self._written = {}
