"""What a data folder remembers of the node that ran on it last, to tell whether its log may have a hole.

Under `flush=os` a machine that goes down takes along what was not written back, while a process that is killed takes
nothing along. The folder therefore holds the boot id of the machine, and the incarnations under which it was last let
into the cluster, so that an empty folder or an old copy is noticed too.
"""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.log.files import Files
from millstream.log.state import read_whole, replace_file

FILE_NAME: Final = "last-run"
_KEPT: Final = 16
"""Several, since a node may register more than once before it is let in."""


class _Content(msgspec.Struct, kw_only=True):
    boot_id: str
    incarnations: list[str]


class LastRun:
    """The file that one run leaves for the next."""

    def __init__(self, files: Files, folder: str, *, boot_id: str) -> None:
        self._files = files
        self._folder = folder
        self._boot_id = boot_id
        self._found = self._read()
        self._incarnations = self._found.incarnations if self._found is not None else []

    def was(self, incarnation: str) -> bool:
        """Whether it was on this folder that a node ran under this incarnation."""
        return incarnation in self._incarnations

    def is_unclean(self, admitted: str | None, *, stopped_clean: bool) -> bool:
        """Whether the log may lack what this node had told others it has.

        `admitted` is the incarnation that the cluster last let in under this node's id.
        """
        if admitted is None:
            return False
        if not self.was(admitted):
            return True
        # A machine that does not tell its boot id may have started anew.
        same_boot = self._found is not None and self._found.boot_id == self._boot_id != ""
        return not stopped_clean and not same_boot

    def begin(self, incarnation: str) -> None:
        """Note, for good, under which incarnation the node is about to register."""
        self._incarnations = [*self._incarnations, incarnation][-_KEPT:]
        content = _Content(boot_id=self._boot_id, incarnations=self._incarnations)
        replace_file(self._files, self._folder, FILE_NAME, msgspec.json.encode(content))

    def _read(self) -> _Content | None:
        try:
            return msgspec.json.decode(read_whole(self._files, f"{self._folder}/{FILE_NAME}"), type=_Content)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def boot_id_of_machine() -> str:
    """A number that is another one each time the machine starts; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
