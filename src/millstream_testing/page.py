"""The samples of a documentation page: its fenced blocks of shell, Python and SQL, and what the fence says of each.

A fence is the language and, after it, how the sample is used; without more words it is run in the order of the page:

    ```python                     run, with the names that the samples before it have left
    ```python spark               run in a Spark session, which the name `spark` refers to
    ```python file=shop.py        saved under this name, for the commands that follow; a file of settings (toml) too
    ```sh                         run by a shell that stops at the first error
    ```sh beside                  programs that go on while the samples after it are run
    ```sh no-run: needs a cluster not run, for this reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BLOCK: Final = re.compile(r"^```(sh|python|sql|toml(?= file=))\b(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_USE: Final = re.compile(r"(?: (spark|beside|file=[\w.-]+|no-run: \S.*))?")


@dataclass(frozen=True, slots=True)
class Sample:
    """A fenced block."""

    page: Path
    line: int
    language: str
    use: str
    """The words after the language."""
    text: str

    @property
    def is_run(self) -> bool:
        return not self.use.startswith("no-run:")

    @property
    def file(self) -> str | None:
        """The name of the file that it is saved as, if any."""
        return self.use.removeprefix("file=") if self.use.startswith("file=") else None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def samples_of(page: Path) -> Iterator[Sample]:
    """Return the samples of a page in order; raise for a fence with unknown words."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        use = _USE.fullmatch(found[2])
        line = text.count("\n", 0, found.start()) + 1
        if use is None:
            raise ValueError(f"{page.name}:{line}: a fence cannot say {found[2]!r}; see {__name__}")
        yield Sample(page, line, found[1], use[1] or "", found[3])
