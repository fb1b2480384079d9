"""The log of a Delta table, in which a commit is accepted only if no other came since the log was read.

By default the library rebases a commit over others that it considers harmless, without comparing application versions.
That is disabled here: every commit is for exactly the version after the one that was read, and a run that is late reads
and decides again. The creation of one file, which must not exist yet, decides who is late, on disks as in object
stores.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import deltalake
import pyarrow as pa
import pyarrow.fs
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from millstream.pipelines.lake.columns import added_columns, partition_columns
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table_file import BOUNDED, WrittenFile

CONFIGURATION: Final[Mapping[str, str]] = {
    # Checkpoints keep opening a table fast; old commits are deleted once a checkpoint covers them.
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.dataSkippingStatsColumns": ",".join(BOUNDED),
}

EVENT_TIME: Final = "millstream.partitionBy"
"""The property of a table that says by which event time it is partitioned."""

FIXED: Final = "millstream.fixedTypes"
"""The property of a table that lists the fields whose columns never become double, with the reasons."""

COMMITS_KEPT: Final[Mapping[str, str]] = {**CONFIGURATION, "delta.logRetentionDuration": "interval 36500 days"}
"""The configuration of tables whose commits are kept as evidence."""


class DeltaLog:
    """A table as it was last read."""

    def __init__(
        self,
        storage: Storage,
        *,
        partition_by: Sequence[str] | None = None,
        configuration: Mapping[str, str] = CONFIGURATION,
    ) -> None:
        """Open a log, which may not exist yet.

        Partition columns and configuration are for a table that is created; by default it has those of its schema.
        """
        self.storage = storage
        self._partition_by = partition_by
        self._configuration = dict(configuration)
        self._table: deltalake.DeltaTable | None = None
        self._files = storage.files()

    @property
    def loaded(self) -> deltalake.DeltaTable | None:
        """Return the table as it was last read; None if it did not exist."""
        return self._table

    def configure(self, name: str, value: str | None) -> None:
        """Set or remove a property of a table that is created."""
        self._configuration.pop(name, None)
        if value is not None:
            self._configuration[name] = value

    def refresh(self) -> deltalake.DeltaTable | None:
        """Read new commits; return the table, or None while it does not exist."""
        if self._table is not None and self._exists(self._table.version()):
            self._table.update_incremental()
            return self._table
        try:
            self._table = deltalake.DeltaTable(self.storage.url, storage_options=dict(self.storage.options))
        except TableNotFoundError:
            self._table = None
        return self._table

    def _exists(self, version: int) -> bool:
        """Whether a commit still exists: after the table was deleted, a new one is created instead of continuing the
        old.
        """
        return bool(self._files.get_file_info(_commit_path(version)).type == pyarrow.fs.FileType.File)

    def schema(self) -> pa.Schema | None:
        """Return the table's current columns."""
        table = self.refresh()
        return None if table is None else schema_of(table)

    def require(self, schema: pa.Schema) -> deltalake.DeltaTable:
        """Return the table with all columns of a schema, creating it or adding the missing ones."""
        while True:
            table = self.refresh()
            if table is None:
                self._create(schema)
                continue
            missing = added_columns(schema_of(table), schema)
            if not missing:
                return table
            self._add_columns(table, missing)

    def _create(self, schema: pa.Schema) -> None:
        partition_by = partition_columns(schema) if self._partition_by is None else self._partition_by
        try:
            deltalake.DeltaTable.create(
                self.storage.url,
                schema=schema,
                mode="error",
                partition_by=list(partition_by),
                configuration=self._configuration,
                storage_options=dict(self.storage.options),
                raise_if_key_not_exists=False,
                # A retry would replace the columns of a table that another run has created at the same time.
                commit_properties=deltalake.CommitProperties(max_commit_retries=0),
            )
        except DeltaError:
            # Another run may have created it.
            if self.refresh() is None:
                raise

    def _add_columns(self, table: deltalake.DeltaTable, missing: list[pa.Field]) -> None:
        version = table.version()
        fields = deltalake.Schema.from_arrow(pa.schema(missing)).fields
        try:
            table.alter.add_columns(fields, commit_properties=deltalake.CommitProperties(max_commit_retries=0))
        except CommitFailedError:
            self._check_moved(version)

    def commit(
        self,
        actions: Sequence[AddAction | RemoveAction],
        versions: Mapping[str, int],
        *,
        metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Commit the version after the one that was read, with application versions; False if it is too late."""
        table = self._table
        if table is None:
            raise ValueError(f"no table exists at {self.storage.url}")
        properties = deltalake.CommitProperties(
            custom_metadata=metadata,
            max_commit_retries=0,
            app_transactions=[deltalake.Transaction(name, number) for name, number in versions.items()],
        )
        return self._write(table, actions, "append", table.schema(), properties)

    def replace_all(self, files: Iterable[WrittenFile], schema: pa.Schema) -> bool:
        """Replace all files that the table had when it was read, under other columns; False if it is too late.

        It is one commit, for exactly that version: the library removes only the files that the handle knows.
        """
        table = self._table
        if table is None:
            raise ValueError(f"no table exists at {self.storage.url}")
        properties = deltalake.CommitProperties(max_commit_retries=0)
        return self._write(table, added(files), "overwrite", deltalake.Schema.from_arrow(schema), properties)

    def _write(
        self,
        table: deltalake.DeltaTable,
        actions: Sequence[AddAction | RemoveAction],
        mode: str,
        schema: deltalake.Schema,
        properties: deltalake.CommitProperties,
    ) -> bool:
        version = table.version()
        partition_by = table.metadata().partition_columns
        try:
            table.create_write_transaction(list(actions), mode, schema, partition_by, commit_properties=properties)
        except CommitFailedError:
            self._check_moved(version)
            return False
        self.storage.sync(_commit_path(version + 1))
        table.update_incremental()
        return True

    def _check_moved(self, version: int) -> None:
        """Raise the error being handled, unless another commit came first."""
        table = self.refresh()
        if table is None or table.version() <= version:
            raise

    def vacuum(self, grace: timedelta) -> int:
        """Delete unreferenced files older than the grace period, in whole hours; return how many."""
        table = self.refresh()
        if table is None:
            return 0
        hours = math.ceil(grace / timedelta(hours=1))
        deleted = table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True)
        return len(deleted)

    def commit_info(self, version: int) -> dict[str, Any]:
        """Return the metadata of a commit, from its own file.

        The library counts the history from its end, which another commit may have moved since the table was read.
        """
        try:
            with self._files.open_input_stream(_commit_path(version)) as stream:
                lines = stream.read().splitlines()
        except FileNotFoundError:
            return {}
        actions = [json.loads(line) for line in lines if line.strip()]
        return next((dict(action["commitInfo"]) for action in actions if "commitInfo" in action), {})

    def holds(self, files: Iterable[WrittenFile]) -> bool:
        """Whether the table has any of these files."""
        return bool({file.path for file in files} & set(self.paths()))

    def paths(self) -> list[str]:
        """Return the files of the table as last read."""
        if self._table is None:
            return []
        return [str(path) for path in pa.table(self._table.get_add_actions()).column("path").to_pylist()]


def _commit_path(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


def schema_of(table: deltalake.DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def added(files: Iterable[WrittenFile], *, data_change: bool = True) -> list[AddAction]:
    now = int(time.time() * 1000)
    return [AddAction(file.path, file.bytes, file.partition_values, now, data_change, file.stats) for file in files]
