"""Spark's record of a stream's batches: the end offsets of each batch, written before it starts."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from millstream.core.errors import CorruptState
from millstream.pipelines.jobs.group_offsets import Offsets

Ends = dict[str, dict[int, int]]

_VERSION: Final = "v1"
_NO_OFFSET: Final = "-"


class StreamCheckpoint:
    """The folder in which Spark keeps the state and progress of a stream."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ends(self, number: int) -> Ends:
        """Return the end offsets of a batch; empty if the record is gone."""
        path = self.folder / "offsets" / str(number)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        if len(lines) < 2 or lines[0] != _VERSION:
            raise CorruptState(f"{path} has an unknown format")
        ends: Ends = {}
        for line in lines[2:]:
            for topic, numbers in ({} if line == _NO_OFFSET else read_offsets(line)).items():
                known = ends.setdefault(topic, {})
                for partition, offset in numbers.items():
                    # A topic that a statement reads twice may have two positions: the smaller one is done.
                    known[partition] = min(offset, known.get(partition, offset))
        return ends

    def is_at(self, committed: Offsets) -> bool:
        """Whether the stream ended there: with its last batch, or the one before if the last is not committed."""
        last = self._last()
        return any(_agree(self.ends(number), committed) for number in (last, last - 1))

    def query_id(self) -> str:
        """Return Spark's id of the stream; empty if there is none yet."""
        try:
            return str(json.loads((self.folder / "metadata").read_text(encoding="utf-8"))["id"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            raise CorruptState(f"{self.folder / 'metadata'} has an unknown format") from None

    def archive_unless_at(self, committed: Offsets, *, last_batch: int = -1) -> bool:
        """Archive the checkpoint if the stream did not end where the pipeline did; return whether that is so.

        Another statement has continued since, the group was reset, or the folder is an old copy: its state does not
        belong to the messages that come next. A checkpoint with fewer batches than were committed is such a copy even
        if it ends at the same offsets, since some batches only advance time; Spark would reuse their numbers for other
        batches.
        """
        if self._last() < 0 or (self._last() >= last_batch and self._is_whole() and self.is_at(committed)):
            return False
        before = self.folder.with_name(f"{self.folder.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        self.folder.rename(before)
        return True

    def _is_whole(self) -> bool:
        """Whether the last file is complete; a power failure may have left half of it."""
        try:
            self.ends(self._last())
        except CorruptState:
            return False
        return True

    def _last(self) -> int:
        """Return the number of the last batch that was started; -1 if there is none."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [one.name for one in (self.folder / "offsets").iterdir()]
        return max((int(name) for name in names if name.isdigit()), default=-1)


def read_offsets(text: Any) -> Ends:
    """Parse the offsets of a source by topic and partition; raise `CorruptState` if they are malformed."""
    try:
        document = json.loads(text) if isinstance(text, str) else text
        return {topic: {int(number): int(offset) for number, offset in ns.items()} for topic, ns in document.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptState(f"offsets of a stream cannot be read: {error}") from None


def _agree(ends: Ends, committed: Offsets) -> bool:
    return bool(ends) and all(
        committed.get(topic, {}).get(number) == offset
        for topic, numbers in ends.items()
        for number, offset in numbers.items()
    )
