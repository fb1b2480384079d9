"""What Spark writes down about a stream before each of its batches: where the batch ends in every topic."""

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
    """The folder in which Spark keeps the state and the progress of a stream."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ends(self, number: int) -> Ends:
        """Where a batch ends, which Spark has written before it began with it; nowhere if that is gone."""
        path = self.folder / "offsets" / str(number)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        if len(lines) < 2 or lines[0] != _VERSION:
            raise CorruptState(f"{path} has a form that is not known here")
        ends: Ends = {}
        for line in lines[2:]:
            for topic, numbers in ({} if line == _NO_OFFSET else read_offsets(line)).items():
                known = ends.setdefault(topic, {})
                for partition, offset in numbers.items():
                    # A topic that a statement reads twice may be read up to two places: what is before both is done.
                    known[partition] = min(offset, known.get(partition, offset))
        return ends

    def is_at(self, committed: Offsets) -> bool:
        """Whether the stream ended there: with its last batch, or with the one before if the last is not committed."""
        last = self._last()
        return any(_agree(self.ends(number), committed) for number in (last, last - 1))

    def query_id(self) -> str:
        """What Spark knows the stream by; empty if there is none yet."""
        try:
            return str(json.loads((self.folder / "metadata").read_text(encoding="utf-8"))["id"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            raise CorruptState(f"{self.folder / 'metadata'} has a form that is not known here") from None

    def archive_unless_at(self, committed: Offsets, *, last_batch: int = -1) -> bool:
        """Have the stream begin anew if it did not end where the pipeline did; whether that is so.

        Another statement has gone on since, somebody has moved the pipeline, or the folder is an old copy: whatever it
        remembers are not the messages before those that come next. One that knows less batches than were committed is
        such a copy, although it may end at the same place: some batches only have time pass. Spark would give their
        numbers to others, which would be taken for those.
        """
        if self._last() < 0 or (self._last() >= last_batch and self._is_whole() and self.is_at(committed)):
            return False
        before = self.folder.with_name(f"{self.folder.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        self.folder.rename(before)
        return True

    def _is_whole(self) -> bool:
        """Whether the last file can be read: a machine that lost its power may have left half of it."""
        try:
            self.ends(self._last())
        except CorruptState:
            return False
        return True

    def _last(self) -> int:
        """The last batch that was begun; -1 if there is none."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [one.name for one in (self.folder / "offsets").iterdir()]
        return max((int(name) for name in names if name.isdigit()), default=-1)


def read_offsets(text: Any) -> Ends:
    """Offsets of a source as Spark has them, by topic and partition; `CorruptState` if they are nothing of the kind."""
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
