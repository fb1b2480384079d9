"""What commands print: one JSON document per line for programs, aligned columns for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class OutputClosed(Exception):
    """Whoever read our output has gone, as `head` does once it has enough."""


def print_json(document: Any) -> None:
    """Print one document on one line."""
    print_line(as_json_text(document))


def print_answer(document: Any, text: str, *, as_json: bool) -> None:
    """Say what was done, to a program or to a person."""
    if as_json:
        print_json(document)
    else:
        print_line(text)


def print_noted(document: dict[str, Any], text: str, notes: Sequence[str], *, as_json: bool) -> None:
    """Say what was done and what is to be known of it; a program finds that in the answer, a person beside it."""
    print_answer({**document, "notes": list(notes)}, text, as_json=as_json)
    for note in notes if not as_json else ():
        print_note(note)


def as_json_text(document: Any) -> str:
    """One document as one line, without its end."""
    return json.dumps(document, ensure_ascii=False)


def print_line(text: str = "") -> None:
    """Print one line for a person to read."""
    # Text that came from elsewhere may hold half a surrogate pair, which UTF-8 cannot say.
    print_bytes(text.encode(errors="backslashreplace") + b"\n")


def print_bytes(data: bytes) -> None:
    """Print bytes as they are, at once."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def print_settings(settings: Mapping[str, str], given: Collection[str]) -> None:
    """Print settings, one line each, and which of them nobody gave."""
    for name, value in sorted(settings.items()):
        mark = "" if name in given else "  (default)"
        print_line(f"  {name} = {one_line(value) or '-'}{mark}")


def print_note(text: str) -> None:
    """Tell a person something beside the answer, on stderr, so that it never ends up in a pipe."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: str = "") -> None:
    """Print rows in aligned columns; numbers stand on the right, None shows as a dash."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [
        max(len(name), *(len(row[at]) for row in texts)) if texts else len(name) for at, name in enumerate(header)
    ]
    to_right = [_is_numeric([row[at] for row in rows]) for at in range(len(header))]
    for row in [[name.upper() for name in header], *texts]:
        cells = (
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(row, widths, to_right, strict=True)
        )
        print_line(indent + "  ".join(cells).rstrip())


def one_line(text: str) -> str:
    """A name from elsewhere, which must not be able to break its line or change the terminal of whoever reads it."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def counted(number: int, noun: str) -> str:
    """`1 message`, `2,000 messages`, `3 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def sized(size_bytes: float) -> str:
    """A number of bytes as a person says it."""
    for unit in _UNITS:
        if size_bytes < 1024 or unit == _UNITS[-1]:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable: the last unit takes everything")


def _is_numeric(column: Sequence[Any]) -> bool:
    return any(value is not None for value in column) and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return one_line(str(value))


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
