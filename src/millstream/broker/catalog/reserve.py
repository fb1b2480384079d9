"""Space kept back on the disk, so that on a full one the catalog can still record what frees space."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 512 * 1024
"""Far more than the pages that deleting a topic or lowering its retention writes."""


class Reserve:
    """A file that only takes up room. Giving it up makes room for a change that matters."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def fill(self) -> None:
        """Take the room, if it is not taken and the disk has it."""
        if self._path is None or self._path.exists():
            return
        # A disk without room for the reserve is no reason to stop; the next change tries again.
        with suppress(OSError):
            try:
                self._path.touch(mode=0o600, exist_ok=False)
                with self._path.open("r+b") as file:
                    file.write(bytes(RESERVE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                self._path.unlink(missing_ok=True)
                raise

    def give_up(self) -> bool:
        """Free the room; False when there is none to free."""
        if self._path is None:
            return False
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
