"""Spark SQL, read by sqlglot on nodes that may have no Spark: tokens, and the relations that a SELECT statement reads.

Spark's parser decides when a pipeline runs. A statement that is refused here is refused by Spark as well, and
one that sqlglot cannot parse is left to Spark (`SelectStatement.is_complete`). sqlglot is imported on first use: most
processes read no SQL.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from millstream.core.errors import InvalidSetting

if TYPE_CHECKING:
    import sqlglot
    from sqlglot import exp


_SHOWN_BEFORE: Final = 50
_SHOWN_MAX: Final = 100


class Place(NamedTuple):
    """Line and column, both counted from 1, and the line with marks below the location."""

    line: int
    column: int
    excerpt: str


def locate(text: str, start: int, end: int) -> Place:
    """Return the location of `start` up to `end`, exclusive."""
    start = min(max(start, 0), len(text))
    line_at = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    shown_at = max(line_at, start - _SHOWN_BEFORE)
    shown = _printable(text[shown_at : min(line_end, shown_at + _SHOWN_MAX)])
    width = max(1, min(end, line_end, shown_at + _SHOWN_MAX) - start)
    marks = " " * (start - shown_at) + "^" * width
    return Place(text.count("\n", 0, start) + 1, start - line_at + 1, f"  {shown}\n  {marks}")


def setting_error_at(about: str, text: str, start: int, end: int, reason: str) -> InvalidSetting:
    """Build the error for a setting whose text is invalid at a location."""
    place = locate(text, start, end)
    return InvalidSetting(f"{about}, line {place.line}, column {place.column}: {reason}\n{place.excerpt}")


def _printable(text: str) -> str:
    """Replace each unprintable character by one space, so that the marks stay aligned."""
    return "".join(character if character.isprintable() else " " for character in text)


ABOUT: Final = "`sql`"

LENGTH_MAX: Final = 16 * 1024
"""The characters of a statement: nodes read it on their event loops, so reading must be short."""
TOKENS_MAX: Final = 3000
"""The words and signs of a statement, for the same reason; parsing takes about 30 µs for each."""

_BEGINS: Final = ("SELECT", "WITH", "FROM", "TABLE", "VALUES", "MAP", "REDUCE")
_OPENING: Final = {"(": ")", "[": "]", "{": "}"}
_UNCLOSED: Final = re.compile(
    r"--[^\n]*|[rR](?:'[^']*'|\"[^\"]*\")|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`"
    r"|(?P<comment>/\*)|(?P<quote>['\"`])",
    re.DOTALL,
)
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")


_CALLS_JAVA: Final = "calls Java in the driver"
_OPENS_FILES: Final = "can open any file or address"
FORBIDDEN: Final = {
    **dict.fromkeys(("reflect", "java_method", "try_reflect"), _CALLS_JAVA),
    **dict.fromkeys(("from_xml", "schema_of_xml"), _OPENS_FILES),
    **dict.fromkeys(("from_avro", "schema_of_avro", "from_protobuf", "to_protobuf"), _OPENS_FILES),
}
"""Functions with which a statement could run arbitrary code in the driver, or reach what only the node may: options
of theirs name a schema by its location. Each has the reason.
"""


class Kind(Enum):
    WORD = auto()
    """A keyword, a number or an unquoted name."""
    NAME = auto()
    """A name in backquotes, without them."""
    TEXT = auto()
    """A string literal."""
    MARK = auto()
    """Any other sign."""
    END = auto()
    """The end of the text."""


class Token(NamedTuple):
    """A token and its place in the text; `end` is exclusive."""

    kind: Kind
    text: str
    start: int
    end: int

    def is_keyword(self, *words: str) -> bool:
        """Return whether this is one of the given keywords, given in capital letters."""
        return self.kind is Kind.WORD and self.text.upper() in words

    def is_sign(self, *signs: str) -> bool:
        return self.kind is Kind.MARK and self.text in signs


@dataclass(frozen=True, slots=True)
class SelectStatement:
    """A statement without the semicolon that may end it."""

    text: str
    reads: tuple[str, ...]
    """The topics and tables that it reads, in order; not the names that WITH gives to queries."""
    is_complete: bool
    """Whether `reads` is complete."""
    endless: tuple[tuple[str, str, frozenset[str]], ...] = ()
    """Operations that need all messages at once, and so never end over a topic, each with what to use instead and the
    names that it reads.
    """


def check_calls(text: str, own: Collection[str]) -> None:
    """Raise `InvalidSetting` if a statement calls a forbidden function, unless it is one of the user's own."""
    calls = [
        (token, name)
        for token, after in pairwise(_statement_tokens(text)[1])
        if token.kind in (Kind.WORD, Kind.NAME)
        and after.is_sign("(")
        and (name := token.text.lower()) in FORBIDDEN
        and name not in own
    ]
    queries = _query_names(text) if calls else set()
    for token, name in calls:
        if token.start not in queries:
            reason = f"{name} is forbidden, since it {FORBIDDEN[name]}; use a Python function (--udf) or a job"
            raise setting_error_at(ABOUT, text, token.start, token.end, reason)


def _query_names(text: str) -> set[int]:
    """Return the positions at which WITH names a query; columns in brackets may follow."""
    from sqlglot import exp

    tree = _parse(_tokenize(ABOUT, text), text)
    names = [named.args["alias"].this for named in tree.find_all(exp.CTE)] if tree is not None else []
    return {int(name.meta["start"]) for name in names if "start" in name.meta}


def sql_tokens(about: str, text: str) -> list[Token]:
    """Split a text into tokens, the last of kind END; raise `InvalidSetting` for an unclosed quote or comment."""
    return [_token(text, token) for token in _tokenize(about, text)] + [
        Token(Kind.END, "", len(text.rstrip()), len(text))
    ]


def _statement_tokens(text: str) -> tuple[list[sqlglot.Token], list[Token]]:
    """Split a statement into tokens, in both forms; raise `InvalidSetting` for one that is too long to parse."""
    if len(text) > LENGTH_MAX:
        raise InvalidSetting(f"{ABOUT} has at most {LENGTH_MAX} characters, not {len(text)}")
    raw = _tokenize(ABOUT, text)
    if len(raw) > TOKENS_MAX:
        raise InvalidSetting(
            f"{ABOUT} has at most {TOKENS_MAX} words and signs, not {len(raw)}; use several transforms, or a job"
        )
    return raw, [_token(text, token) for token in raw]


@lru_cache(maxsize=1024)
def read_select(text: str) -> SelectStatement:
    """Read a statement; raise `InvalidSetting`, with the position if known, for statements that cannot be run."""
    raw, tokens = _statement_tokens(text)
    ends_at = _check_single(tokens, text)
    tokens = [token for token in tokens if token.start < ends_at]
    if not tokens:
        raise InvalidSetting(f"{ABOUT} is empty: write a SELECT statement")
    first = tokens[0]
    if not (first.is_keyword(*_BEGINS) or first.is_sign("(")):
        raise setting_error_at(ABOUT, text, first.start, first.end, "a transform's statement must be a single SELECT")
    _check_brackets(tokens, text)
    _check_hyphens(tokens, text)
    tree = _parse(raw[: len(tokens)], text)
    reads = () if tree is None else tuple(dict.fromkeys(_relations(tree, text)))
    is_complete = tree is not None and not any(token.is_keyword("STREAM", "IDENTIFIER") for token in tokens)
    endless = () if tree is None else tuple(dict.fromkeys(_endless(tree)))
    return SelectStatement(text[:ends_at].rstrip(), reads, is_complete, endless)


def _tokenize(about: str, text: str) -> list[sqlglot.Token]:
    from sqlglot.dialects.spark import Spark

    try:
        return Spark().tokenize(text)
    except Exception:
        # sqlglot says neither where a quote is opened nor that this is the reason.
        start, noun = _find_unclosed(text)
        raise setting_error_at(about, text, start, start + 1, f"this {noun} is not closed") from None


def _find_unclosed(text: str) -> tuple[int, str]:
    at = 0
    while match := _UNCLOSED.search(text, at):
        if match["quote"]:
            return match.start(), "quote"
        at = match.end()
        if match["comment"]:
            # Comments nest.
            depth = 1
            while depth:
                edge = _COMMENT_EDGE.search(text, at)
                if edge is None:
                    return match.start(), "comment"
                depth += 1 if edge[0] == "/*" else -1
                at = edge.end()
    return 0, "text"


def _token(text: str, raw: sqlglot.Token) -> Token:
    from sqlglot import TokenType

    start, end = raw.start, raw.end + 1
    if raw.token_type is TokenType.IDENTIFIER:
        return Token(Kind.NAME, raw.text, start, end)
    written = text[start:end]
    if written[-1:] in ("'", '"'):
        return Token(Kind.TEXT, written, start, end)
    is_word = written[:1].isalnum() or written[:1] == "_"
    return Token(Kind.WORD if is_word else Kind.MARK, written, start, end)


def _check_single(tokens: Sequence[Token], text: str) -> int:
    """Return the end of the statement; raise if another one follows."""
    ends_at = len(text)
    for token in tokens:
        if token.is_sign(";"):
            ends_at = min(ends_at, token.start)
        elif ends_at < len(text):
            raise setting_error_at(
                ABOUT, text, token.start, token.end, "a second statement starts here; only one is allowed"
            )
    return ends_at


def _check_brackets(tokens: Sequence[Token], text: str) -> None:
    opened: list[Token] = []
    for token in tokens:
        if token.is_sign(*_OPENING):
            opened.append(token)
        elif token.is_sign(*_OPENING.values()) and (not opened or _OPENING[opened.pop().text] != token.text):
            raise setting_error_at(ABOUT, text, token.start, token.end, f"nothing is closed by this {token.text!r}")
    if opened:
        token = opened[-1]
        raise setting_error_at(ABOUT, text, token.start, token.end, f"this {token.text!r} is not closed")


def _check_hyphens(tokens: Sequence[Token], text: str) -> None:
    """Refuse `FROM orders-eu`: a common form of topic names, which SQL parses as a subtraction."""
    for before, name, hyphen in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if before.is_keyword("FROM", "JOIN") and hyphen.is_sign("-") and hyphen.start == name.end:
            end = re.compile(r"[\w.-]+").match(text, name.start)
            raise _needs_backquotes(text, name.start, name.end if end is None else end.end())


def _needs_backquotes(text: str, start: int, end: int) -> InvalidSetting:
    reason = f"write `{text[start:end]}` in backquotes if that is the name of a topic or a table"
    return setting_error_at(ABOUT, text, start, end, reason)


def _parse(raw: Sequence[sqlglot.Token], text: str) -> exp.Query | None:
    """Parse one statement; None if sqlglot does not know its grammar."""
    from sqlglot import exp
    from sqlglot.dialects.spark import Spark

    try:
        tree = Spark().parser().parse(list(_adapted(raw)), text)[0]
    except Exception:
        # On unexpected text it also raises other errors, such as `RecursionError`.
        return None
    return tree if isinstance(tree, exp.Query) else None


def _adapted(raw: Sequence[sqlglot.Token]) -> Iterator[sqlglot.Token]:
    """Yield the tokens in the form that sqlglot parses: it knows neither the function `window` nor `TABLE name`."""
    from sqlglot import Token as SqlToken
    from sqlglot import TokenType

    before = None
    for at, token in enumerate(raw):
        kind = token.token_type
        after = raw[at + 1].token_type if at + 1 < len(raw) else None
        if kind is TokenType.WINDOW and after in (TokenType.L_PAREN, TokenType.DOT):
            yield SqlToken(TokenType.VAR, token.text, line=token.line, col=token.col, start=token.start, end=token.end)
        elif (
            kind is TokenType.TABLE
            and after in (TokenType.VAR, TokenType.IDENTIFIER)
            and before in (None, TokenType.L_PAREN, TokenType.UNION, TokenType.ALL, TokenType.EXCEPT)
        ):
            for added, word in ((TokenType.SELECT, "SELECT"), (TokenType.STAR, "*"), (TokenType.FROM, "FROM")):
                yield SqlToken(added, word, line=token.line, col=token.col, start=token.start, end=token.end)
        else:
            yield token
        before = kind


def _endless(tree: exp.Query) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield the operations that need all rows at once, with the alternatives and the names that they read."""
    from sqlglot import exp

    own = frozenset(named.alias.lower() for named in tree.find_all(exp.CTE))
    kinds = {"OVER": exp.Window, "ORDER BY": exp.Order, "EXCEPT": exp.Except, "INTERSECT": exp.Intersect}
    read: dict[int, frozenset[str]] = {}

    def names_read(node: exp.Expr) -> frozenset[str]:
        query = node if isinstance(node, exp.Query) else node.find_ancestor(exp.Query)
        if id(query) not in read:
            read[id(query)] = _names_read(query, own)
        return read[id(query)]

    for what, kind in kinds.items():
        for node in tree.find_all(kind):
            if not (kind is exp.Order and node.find_ancestor(exp.Window, exp.AggFunc, exp.WithinGroup)):
                instead = "aggregate with GROUP BY window(…), or use a job" if kind is exp.Window else "use a job"
                yield what, instead, names_read(node)
    for count in tree.find_all(exp.AggFunc):
        if isinstance(count.this, exp.Distinct):
            instead = "use a job"
            if isinstance(count, exp.Count):
                instead = "use approx_count_distinct(…), size(collect_set(…)) if there are few values, or a job"
            yield f"{count.sql_name().lower()}(DISTINCT …)", instead, names_read(count)


def _names_read(query: exp.Expr | None, own: frozenset[str]) -> frozenset[str]:
    """Return the names of topics and tables in a query; none if one of the names is a query's own, given by WITH."""
    from sqlglot import exp

    names = frozenset() if query is None else frozenset(table.name for table in query.find_all(exp.Table))
    return frozenset() if any(name.lower() in own for name in names) else names


def _relations(tree: exp.Query, text: str) -> Iterator[str]:
    """Yield the names of topics and tables, in the order of the text."""
    from sqlglot import exp

    own = {named.alias.lower() for named in tree.find_all(exp.CTE)}
    relations: list[tuple[int, int, exp.Identifier]] = []
    for table in tree.find_all(exp.Table):
        parts = [part for part in table.parts if isinstance(part, exp.Identifier) and "start" in part.meta]
        if parts and table.find_ancestor(exp.Hint) is None:
            relations.append((int(parts[0].meta["start"]), int(parts[-1].meta["end"]) + 1, parts[-1]))
            if len(parts) > 1:
                raise _needs_backquotes(text, *relations[-1][:2])
    for start, end, name in sorted(relations, key=lambda relation: relation[:2]):
        if text[start] in "'\"":
            raise setting_error_at(ABOUT, text, start, end, "names are written in backquotes, not in quotes")
        if text[start] != "`" and not name.name.isascii():
            raise _needs_backquotes(text, start, end)
        if name.name.lower() not in own:
            yield name.name
