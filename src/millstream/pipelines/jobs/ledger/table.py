"""The ledger's table: events in Delta Lake, each landed once, and sealed commit by commit.

A commit carries, besides the next offset of each partition of `__subscriptions`, a seal: the digest of every file that
it adds, the offsets that it lands, and the seal before it. Changing, adding or removing a file or a commit later
breaks the chain, unless all later seals are recomputed; the last seal is reported by every audit, so that it can be
kept elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import deltalake
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from millstream.core.errors import CorruptState
from millstream.pipelines.jobs.ledger.events import EVENTS
from millstream.pipelines.lake.delta_log import COMMITS_KEPT, DeltaLog
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, TopicPartition
from millstream.pipelines.lake.table_file import WrittenFile
from millstream.pipelines.lake.task_writer import RowWriter

NAME: Final = "__ledger"
"""The folder of the table in a lake."""
SEAL: Final = "millstream.ledger.seal"
FIRST_SEAL: Final = ""
AUDITED: Final = "audited_seconds"
"""When the pipeline last audited, in seconds since 1970."""
FAULTS: Final = "audit_faults"
AUDIT_LEVELS: Final = (AUDITED, "audit_lost", "audit_duplicated", "audit_expired", FAULTS)
"""The results of the last audit; each is an application version of the table."""
_LEVEL: Final = "millstream/{}"
_LOG: Final = "_delta_log"
_CHUNK_BYTES: Final = 1 << 20


class Seal(NamedTuple):
    previous: str
    files: dict[str, str]
    """The digest of each file that is added, by path."""
    offsets: dict[str, list[int]]
    """The range of each partition that is landed, by topic id and partition."""

    @property
    def digest(self) -> str:
        """Return the digest over everything, which the next seal contains."""
        text = json.dumps([self.previous, sorted(self.files.items()), sorted(self.offsets.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({**self._asdict(), "digest": self.digest})


class Damage(NamedTuple):
    """A place where the table is not as it was sealed."""

    kind: str
    """changed, missing, unreadable, added, unsealed, broken or gap."""
    path: str
    problem: str


class DamagedLedger(CorruptState):
    """The log of the table is so damaged that the table cannot be opened."""

    def __init__(self, damage: list[Damage]) -> None:
        more = f", and {len(damage) - 1:,} more" if len(damage) > 1 else ""
        super().__init__(f"the ledger's table is damaged: {damage[0].path}: {damage[0].problem}{more}")
        self.damage = damage


def ledger_storage(lake: str, options: Mapping[str, str] | None = None) -> Storage:
    return Storage.at(f"{lake.rstrip('/')}/{NAME}", options)


class LedgerTable:
    """Lands and reads events; belongs to one thread."""

    def __init__(self, storage: Storage, left_out: Collection[str] = ()) -> None:
        """Open a table; the given files are not read."""
        self.storage = storage
        self._left_out = left_out
        self._delta = LakeTable(storage, DeltaLog(storage, configuration=COMMITS_KEPT))

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the next offset of each partition of `__subscriptions` that has landed."""
        self._refresh()
        return self._delta.next_offsets(partitions)

    def writer(self, topic_id: str, attempt: str) -> RowWriter:
        return self._delta.writer(EVENTS, topic_id, attempt=attempt)

    def commit(self, files: Sequence[WrittenFile], offsets: Mapping[TopicPartition, tuple[int, int]]) -> bool:
        """Add files, advance and seal atomically; False if another run has landed the same."""
        digests = {file.path: self.digest(file.path) for file in files}
        spans = {f"{topic_id}/{number}": list(span) for (topic_id, number), span in offsets.items()}

        def sealed(table: deltalake.DeltaTable) -> Mapping[str, str]:
            return {SEAL: Seal(self._last_seal(table.version()), digests, spans).to_json()}

        self._delta.sealed = sealed
        return self._delta.commit(files, offsets, schema=EVENTS)

    def _refresh(self) -> deltalake.DeltaTable | None:
        """Return the table, None before it exists; if its log is damaged, raise `DamagedLedger`."""
        try:
            table = self._delta.log.refresh()
        except Exception as error:
            damage = self._verify_chain(self._last_commit())[0]
            if not damage:
                raise
            raise DamagedLedger(damage) from error
        if table is None and (last := self._last_commit()) >= 0:
            raise DamagedLedger(self._verify_chain(last)[0] or [Damage("broken", _LOG, "it cannot be read")])
        return table

    def _last_commit(self) -> int:
        """Return the version of the last commit that is stored; -1 if none is."""
        stored = self.storage.files().get_file_info(pyarrow.fs.FileSelector(_LOG, allow_not_found=True))
        names = [file.base_name.removesuffix(".json") for file in stored if file.base_name.endswith(".json")]
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def discard(self, files: Iterable[WrittenFile]) -> None:
        """Delete files for which no commit was tried."""
        self._delta.discard(files)

    def last_audit(self) -> dict[str, int]:
        """Return the time and the findings of the last audit, by name; empty if there was none."""
        table = self._refresh()
        levels = (
            {} if table is None else {name: table.transaction_version(_LEVEL.format(name)) for name in AUDIT_LEVELS}
        )
        return {name: value for name, value in levels.items() if value is not None}

    def record_audit(self, levels: Mapping[str, int]) -> None:
        """Record an audit; if the commit comes too late, the next audit records its own."""
        table = self._refresh()
        if table is not None:
            seal = Seal(self._last_seal(table.version()), {}, {})
            versions = {_LEVEL.format(name): levels[name] for name in AUDIT_LEVELS}
            self._delta.log.commit([], versions, metadata={SEAL: seal.to_json()})

    # -- reading ------------------------------------------------------------------------------------------------

    def dataset(self) -> ds.Dataset | None:
        """Return the events as a dataset; None before the first have landed."""
        table = self._refresh()
        if table is None:
            return None
        files: ds.FileSystemDataset = table.to_pyarrow_dataset(filesystem=self.storage.files())
        if not self._left_out:
            return files
        fragments = [fragment for fragment in files.get_fragments() if fragment.path not in self._left_out]
        return ds.FileSystemDataset(fragments, files.schema, files.format, files.filesystem)

    def size_bytes(self) -> int:
        table = self._refresh()
        if table is None:
            return 0
        return sum(pa.table(table.get_add_actions(flatten=True)).column("size_bytes").to_pylist())

    def events(
        self, filter: ds.Expression | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield events in no particular order."""
        dataset = self.dataset()
        if dataset is not None:
            yield from dataset.to_batches(filter=filter, columns=None if columns is None else list(columns))

    # -- seals --------------------------------------------------------------------------------------------------

    def digest(self, path: str) -> str:
        digest = hashlib.sha256()
        with self.storage.files().open_input_stream(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def last_seal(self) -> str:
        """Return the last seal; empty before the first commit."""
        table = self._refresh()
        return FIRST_SEAL if table is None else self._last_seal(table.version())

    def _last_seal(self, version: int) -> str:
        while version >= 0:
            seal = self._delta.log.commit_info(version).get(SEAL)
            if seal is not None:
                return str(json.loads(seal)["digest"])
            version -= 1
        return FIRST_SEAL

    def verify(self) -> list[Damage]:
        """Compare files and commits with their seals; return the differences."""
        table = self._refresh()
        if table is None:
            return []
        damage, known = self._verify_chain(table.version())
        active = set(self._delta.log.paths())
        for path in sorted(active):
            if path not in known:
                damage.append(Damage("added", path, "it belongs to the table, but no commit has sealed it"))
                continue
            try:
                digest = self.digest(path)
            except FileNotFoundError:
                damage.append(Damage("missing", path, "the file is gone"))
                continue
            except OSError as error:
                if error.errno is None:
                    # The store cannot be reached, which says nothing about the file.
                    raise
                damage.append(Damage("unreadable", path, f"the file cannot be read: {os.strerror(error.errno)}"))
                continue
            if digest != known[path]:
                damage.append(Damage("changed", path, "its content is not what was landed"))
        for path in sorted(known.keys() - active):
            damage.append(Damage("missing", path, "it was landed, but the table no longer has it"))
        return damage

    def _verify_chain(self, last_version: int) -> tuple[list[Damage], dict[str, str]]:
        damage: list[Damage] = []
        known: dict[str, str] = {}
        reached: dict[str, int] = {}
        previous: str | None = FIRST_SEAL
        for version in range(last_version + 1):
            path = f"{_LOG}/{version:020}.json"
            try:
                actions = self._actions(path)
            except (FileNotFoundError, ValueError) as error:
                is_gone = isinstance(error, FileNotFoundError)
                kind, problem = ("missing", "is gone") if is_gone else ("broken", "cannot be read")
                damage.append(Damage(kind, path, f"the commit {problem}"))
                # What follows it cannot be compared with it.
                previous, reached = None, {}
                continue
            added = {str(action["add"]["path"]) for action in actions if "add" in action}
            text = next((action["commitInfo"].get(SEAL) for action in actions if "commitInfo" in action), None)
            if text is None:
                if added:
                    damage.append(Damage("unsealed", path, "it adds files, but has no seal"))
                continue
            try:
                seal, digest = _read_seal(text)
            except CorruptState as error:
                damage.append(Damage("broken", path, str(error)))
                continue
            follows = previous is None or seal.previous == previous
            if seal.digest != digest or not follows or added != set(seal.files):
                damage.append(Damage("broken", path, "the seal does not match the commit, or the one before it"))
            for partition, (start, end) in seal.offsets.items():
                if reached.get(partition, start) != start:
                    damage.append(Damage("gap", path, f"{partition} continues at {start}, not at {reached[partition]}"))
                reached[partition] = end
            known |= seal.files
            previous = digest
        return damage, known

    def _actions(self, path: str) -> list[dict[str, Any]]:
        with self.storage.files().open_input_stream(path) as stream:
            return [json.loads(line) for line in stream.read().splitlines() if line.strip()]


def _read_seal(text: str) -> tuple[Seal, str]:
    try:
        document = json.loads(text)
        return Seal(document["previous"], document["files"], document["offsets"]), document["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptState(f"the seal cannot be read: {error}") from error
