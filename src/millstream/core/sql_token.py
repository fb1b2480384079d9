"""The words, names and marks of a text in Spark's SQL, which a node reads that may have no Spark."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final, NamedTuple

from millstream.core.text_location import setting_error_at

_TOKEN: Final = re.compile(
    r"(?P<blank>\s+|--[^\n]*)"
    r"|(?P<comment>/\*)"
    r"|(?P<raw>[rR](?:'[^']*'|\"[^\"]*\"))"
    r"|(?P<word>\w+)"
    r"|`(?P<name>(?:[^`]|``)+)`"
    r"|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\")"
    r"|(?P<open>['\"`])"
    r"|(?P<mark>.)",
    re.DOTALL,
)
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")


class Kind(Enum):
    """What a token is."""

    WORD = auto()
    """A keyword, a number, or a name as it is."""
    NAME = auto()
    """A name in backquotes, which are taken off."""
    TEXT = auto()
    """A text in quotes, with them."""
    MARK = auto()
    """Any other character."""
    END = auto()
    """Behind everything else."""


class Token(NamedTuple):
    """A token, and where it stands."""

    kind: Kind
    text: str
    start: int
    end: int

    def says(self, *words: str) -> bool:
        """Whether it is one of these keywords, which are given in capital letters."""
        return self.kind is Kind.WORD and self.text.upper() in words

    def marks(self, *characters: str) -> bool:
        """Whether it is one of these characters."""
        return self.kind is Kind.MARK and self.text in characters


def sql_tokens(about: str, text: str) -> list[Token]:
    """What a text is made of, and its end; raise `InvalidSetting` for a quote or a comment that is not closed."""
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup == "open":
            raise setting_error_at(about, text, at, at + 1, "this quote is not closed")
        at = found.end()
        if found.lastgroup == "comment":
            at = _comment_end(about, text, found.start())
        elif found.lastgroup != "blank":
            tokens.append(_token(found))
    return [*tokens, Token(Kind.END, "", len(text.rstrip()), len(text))]


def _token(found: re.Match[str]) -> Token:
    group = found.lastgroup
    if group == "name":
        return Token(Kind.NAME, found["name"].replace("``", "`"), *found.span())
    kind = {"word": Kind.WORD, "mark": Kind.MARK}.get(group or "", Kind.TEXT)
    return Token(kind, found[0], *found.span())


def _comment_end(about: str, text: str, start: int) -> int:
    """Where a comment ends that begins here; comments may stand in comments."""
    depth, at = 0, start
    while True:
        edge = _COMMENT_EDGE.search(text, at)
        if edge is None:
            raise setting_error_at(about, text, start, start + 2, "this comment is not closed")
        depth += 1 if edge[0] == "/*" else -1
        at = edge.end()
        if not depth:
            return at
