"""A SELECT statement as far as it can be read without Spark: that it is one, that it is closed, and what it reads.

Spark's own parser has the last word when the pipeline runs. What is refused here, Spark refuses as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.core.errors import InvalidSetting
from millstream.core.sql_token import Kind, Token, sql_tokens
from millstream.core.text_location import setting_error_at

ABOUT: Final = "`sql`"

_BEGINS: Final = ("SELECT", "WITH", "FROM", "TABLE", "VALUES", "MAP", "REDUCE")
_CLAUSES: Final = (
    *("WHERE", "GROUP", "HAVING", "ORDER", "SELECT", "UNION", "EXCEPT", "MINUS", "INTERSECT", "WINDOW", "LIMIT"),
    *("OFFSET", "CLUSTER", "DISTRIBUTE", "SORT", "LATERAL", "PIVOT", "UNPIVOT", "QUALIFY"),
)
"""What ends the list of a FROM clause."""
_WITH_FROM: Final = ("EXTRACT", "TRIM", "SUBSTRING", "SUBSTR", "OVERLAY")
"""Functions that have a FROM among their arguments."""
_UNCLEAR: Final = ("STREAM", "IDENTIFIER", "VALUES")
"""Words behind which a topic may stand, or rows, or which are the name of one."""
_OPENING: Final = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class SelectStatement:
    """A statement, without the semicolon that may end it."""

    text: str
    reads: tuple[str, ...]
    """What stands where topics and tables do, by name; names that the statement gives to parts of itself are not."""
    is_clear: bool
    """Whether that is all of it, as far as it can be told here."""


def read_select(text: str) -> SelectStatement:
    """Read a statement; raise `InvalidSetting`, which shows the place if there is one, for what cannot be run."""
    tokens = sql_tokens(ABOUT, text)
    ends_at = _check_one(tokens, text)
    tokens = [token for token in tokens if token.start < ends_at and token.kind is not Kind.END]
    if not tokens:
        raise InvalidSetting(f"{ABOUT} is empty: give a SELECT statement")
    if not (tokens[0].says(*_BEGINS) or tokens[0].marks("(")):
        raise setting_error_at(
            ABOUT, text, tokens[0].start, tokens[0].end, "a statement of a transform is a SELECT and nothing else"
        )
    _check_brackets(tokens, text)
    own = {name.lower() for name in _own_names(tokens)}
    found = dict.fromkeys(_Relations(tokens, text).found())
    reads = tuple(name for name in found if name.lower() not in own)
    unclear = any(token.says(*_UNCLEAR) for token in tokens)
    return SelectStatement(text[:ends_at].rstrip(), reads, not unclear)


def _check_one(tokens: Sequence[Token], text: str) -> int:
    """Where the statement ends; raise if another one follows."""
    ends_at = len(text)
    for token in tokens:
        if token.marks(";"):
            ends_at = min(ends_at, token.start)
        elif ends_at < len(text) and token.kind is not Kind.END:
            raise setting_error_at(ABOUT, text, token.start, token.end, "a second statement begins here; give one only")
    return ends_at


def _check_brackets(tokens: Sequence[Token], text: str) -> None:
    opened: list[Token] = []
    for token in tokens:
        if token.marks(*_OPENING):
            opened.append(token)
        elif token.marks(*_OPENING.values()) and (not opened or _OPENING[opened.pop().text] != token.text):
            raise setting_error_at(ABOUT, text, token.start, token.end, f"nothing is closed by this {token.text!r}")
    if opened:
        token = opened[-1]
        raise setting_error_at(ABOUT, text, token.start, token.end, f"this {token.text!r} is not closed")


def _own_names(tokens: Sequence[Token]) -> Iterator[str]:
    """The names that WITH gives to queries: NAME AS (…) and NAME (columns) AS (…)."""
    openers: list[int] = []
    partner: dict[int, int] = {}
    for at, token in enumerate(tokens):
        if token.marks("("):
            openers.append(at)
        elif token.marks(")"):
            partner[at] = openers.pop()
        elif token.says("AS") and at and tokens[at + 1 : at + 2] and tokens[at + 1].marks("("):
            named = partner.get(at - 1, at) - 1
            if named >= 0 and tokens[named].kind in (Kind.WORD, Kind.NAME):
                yield tokens[named].text


class _Relations:
    """Finds the names that stand behind FROM, JOIN and TABLE."""

    def __init__(self, tokens: Sequence[Token], text: str) -> None:
        self._tokens = tokens
        self._text = text

    def found(self) -> Iterator[str]:
        """The names, in their order."""
        # For each bracket that is open, and for what is around all: whether a comma is followed by another relation.
        lists = [False]
        is_due = False
        for at, token in enumerate(self._tokens):
            if token.marks("("):
                # In brackets may stand a list of relations as well as a query.
                lists.append(is_due)
                continue
            if token.marks(")"):
                lists.pop()
            elif token.marks(","):
                is_due = lists[-1]
                continue
            elif self._is_from(at) or token.says("JOIN"):
                lists[-1] = is_due = True
                continue
            elif token.says("TABLE") and self._is_name(at + 1):
                is_due = True
                continue
            elif token.says("LATERAL") and is_due:
                continue
            elif token.says(*_CLAUSES, "VALUES") and not self._is_part(at):
                lists[-1] = False
            elif is_due:
                yield from self._relation(at)
            is_due = False

    def _relation(self, at: int) -> Iterator[str]:
        token, after = self._tokens[at], self._after(at)
        if token.kind is Kind.TEXT:
            raise setting_error_at(
                ABOUT, self._text, token.start, token.end, "names stand in backquotes, not in quotes"
            )
        if token.kind is Kind.MARK or after.marks("("):
            # No name, or a function that gives rows.
            return
        if after.marks(".", "-") and after.start == token.end:
            joined = self._joined(at)
            raise setting_error_at(
                ABOUT,
                self._text,
                token.start,
                token.start + len(joined),
                f"write `{joined}` in backquotes if that is the name of a topic or a table",
            )
        if token.kind is Kind.WORD and not token.text.isascii():
            raise setting_error_at(ABOUT, self._text, token.start, token.end, f"write `{token.text}` in backquotes")
        yield token.text

    def _joined(self, at: int) -> str:
        """A name that has dots and hyphens in it."""
        end = at + 1
        while end < len(self._tokens) and self._tokens[end].start == self._tokens[end - 1].end:
            if not (self._is_name(end) or self._tokens[end].marks(".", "-")):
                break
            end += 1
        return "".join(token.text for token in self._tokens[at:end])

    def _is_from(self, at: int) -> bool:
        """Whether this is a FROM that relations follow."""
        if not self._tokens[at].says("FROM") or self._is_part(at):
            return False
        if at >= 2 and self._tokens[at - 1].says("DISTINCT") and self._tokens[at - 2].says("IS", "NOT"):
            return False
        function = self._function_around(at)
        return function is None or not function.says(*_WITH_FROM)

    def _function_around(self, at: int) -> Token | None:
        """What stands before the bracket in which a token is."""
        depth = 0
        for before in range(at - 1, -1, -1):
            if self._tokens[before].marks(")"):
                depth += 1
            elif self._tokens[before].marks("("):
                if not depth:
                    return self._tokens[before - 1] if before else None
                depth -= 1
        return None

    def _is_part(self, at: int) -> bool:
        """Whether a word is a field of something, and no keyword."""
        return at > 0 and self._tokens[at - 1].marks(".")

    def _is_name(self, at: int) -> bool:
        return at < len(self._tokens) and self._tokens[at].kind in (Kind.WORD, Kind.NAME)

    def _after(self, at: int) -> Token:
        return self._tokens[at + 1] if at + 1 < len(self._tokens) else Token(Kind.END, "", -1, -1)
