"""Output of commands: one JSON document per line for programs, aligned columns for people.

Tables are printed here rather than with rich, whose import takes longer than most commands run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class OutputClosed(Exception):
    """The reader of our output is gone, like `head` once it has enough."""


def print_json(document: Any) -> None:
    print_line(as_json_text(document))


def print_result(document: Any, text: str, *, as_json: bool) -> None:
    """Print the result of a command, for a program or for a person."""
    if as_json:
        print_json(document)
    else:
        print_line(text)


def print_with_notes(document: dict[str, Any], text: str, notes: Sequence[str], *, as_json: bool) -> None:
    """Print the result of a command with notes: in the document for a program, on stderr for a person."""
    print_result({**document, "notes": list(notes)}, text, as_json=as_json)
    for note in notes if not as_json else ():
        print_note(note)


def as_json_text(document: Any) -> str:
    """Return a document as one line, without a line end."""
    return json.dumps(document, ensure_ascii=False)


def print_line(text: str = "") -> None:
    # Text from elsewhere may contain half a surrogate pair, which UTF-8 cannot encode.
    print_bytes(text.encode(errors="backslashreplace") + b"\n")


def print_bytes(data: bytes) -> None:
    """Print bytes unchanged, at once."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def print_settings(settings: Mapping[str, str], overridden: Collection[str]) -> None:
    """Print settings, one line each, and mark defaults."""
    for name, value in sorted(settings.items()):
        mark = "" if name in overridden else "  (default)"
        print_line(f"  {name} = {one_line(value) or '-'}{mark}")


def print_note(text: str) -> None:
    """Print a note on stderr, so that it never ends up in a pipe."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in aligned columns; numbers are right-aligned, None is a dash. Keys may serve as the header."""
    header = [name.upper().replace("_", "-") for name in header]
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(header, *texts, strict=True)]
    to_right = [_is_numeric([row[at] for row in rows]) for at in range(len(header))]
    for row in [header, *texts]:
        cells = (_padded(*cell) for cell in zip(row, widths, to_right, strict=True))
        print_line("  ".join(cells).rstrip())


def _padded(text: str, width: int, to_right: bool) -> str:
    padding = " " * (width - _width(text))
    return padding + text if to_right else text + padding


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes; East Asian characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def print_list(
    document: Any, header: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str, as_json: bool
) -> None:
    """Print a list: a document for a program, a table for a person, or the sentence `empty`."""
    if as_json:
        print_json(document)
    elif rows:
        print_table(header, rows)
    else:
        print_line(empty)


def one_line(text: str) -> str:
    """Escape unprintable characters of a name, which could break the line or change the reader's terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def local_time(timestamp_ms: int) -> str:
    """Return a time in the local zone; every command shows times to people like this."""
    from millstream.client.admin.messages import datetime_of

    moment = datetime_of(timestamp_ms)
    if moment is None:
        return "no time"
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}.{timestamp_ms % 1000:03d}"


def counted(number: int, noun: str) -> str:
    """`1 message`, `2,000 messages`, `3 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def sized(size_bytes: float) -> str:
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
    """Shows progress on stderr if that is a terminal, in bytes, out of a total if there is one."""

    def __init__(self, label: str, *, total_bytes: int | None = None, enabled: bool = True) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._enabled = enabled and sys.stderr.isatty()
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
        self._done_bytes += size_bytes
        if self._bar is None and self._enabled and time.monotonic() - self._started >= SHOWN_AFTER_S:
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
