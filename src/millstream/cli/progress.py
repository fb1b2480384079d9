"""A progress bar for work that takes long; short work and output that nobody watches get none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

SHOWN_AFTER_S = 0.5


class Progress:
    """Counts bytes against a total, if there is one. The bar shows on stderr, and only when that is a terminal."""

    def __init__(self, label: str, *, total_bytes: int | None = None, wanted: bool = True) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._wanted = wanted and sys.stderr.isatty()
        self._started = time.monotonic()
        self._done_bytes = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, size_bytes: int, note: str = "") -> None:
        """Say that more is done; `note` stands behind the bar."""
        self._done_bytes += size_bytes
        if self._bar is None and self._wanted and time.monotonic() - self._started >= SHOWN_AFTER_S:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done_bytes, note=note)

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=self._total_bytes, note="")
        self._bar.start()
