"""What long work is at: a line that moves on a terminal, lines below each other elsewhere; both on stderr."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, Final, Self, TextIO

from millstream.cli.output import one_line

MOVES_TOLD_S: Final = 10.0
"""Where nobody watches, how far it is is told so often at most."""


class Stages:
    """Tells of one piece of work, by its name, while it is entered."""

    def __init__(self, name: str) -> None:
        self._name = one_line(name)
        self._file: TextIO | None = None
        self._shown: Any = None
        self._task: Any = None
        self._told_at = 0.0

    def __enter__(self) -> Self:
        # A handle of its own: while Java is started, what goes to the usual one is written to a log.
        self._file = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
        if self._file.isatty():
            self._show(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def tell(self, stage: str) -> None:
        """A stage begins."""
        self._told_at = time.monotonic()
        if self._shown is not None:
            self._shown.update(self._task, note=stage)
        elif self._file is not None:
            self._file.write(f"{self._name}: {stage}\n")
            self._file.flush()

    def move(self, note: str, *, is_news: bool = True) -> None:
        """The stage has got on; what is no news only changes the line that moves."""
        if self._shown is not None or (is_news and time.monotonic() - self._told_at >= MOVES_TOLD_S):
            self.tell(note)

    def end(self) -> None:
        """Say nothing more."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _show(self, file: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._shown = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeElapsedColumn(),
            console=Console(file=file),
            transient=True,
        )
        self._task = self._shown.add_task(self._name, note="")
        self._shown.start()
