"""The text of a filter as the syntax tree of sqlglot, in Spark's dialect.

That parser knows far more than the filter language has. So its input is bounded first, and words and signs that no
filter has are refused before it sees them; what is left is checked node by node in `translation`.
"""

from __future__ import annotations

from sqlglot import Token, TokenType, exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError

from millstream.core.errors import FilterError
from millstream.protocol.filter.place import refusal

TEXT_BYTES_MAX = 8 * 1024
DEPTH_MAX = 32
"""Parentheses, brackets and operators within each other."""

_OPENING = frozenset({TokenType.L_PAREN, TokenType.L_BRACKET})
_CLOSING = frozenset({TokenType.R_PAREN, TokenType.R_BRACKET})
_ALLOWED = _OPENING | _CLOSING | {
    TokenType.VAR, TokenType.IDENTIFIER, TokenType.STRING, TokenType.NUMBER, TokenType.DOT, TokenType.COMMA,
    TokenType.EQ, TokenType.NEQ, TokenType.LT, TokenType.LTE, TokenType.GT, TokenType.GTE,
    TokenType.PLUS, TokenType.DASH, TokenType.STAR, TokenType.SLASH, TokenType.MOD, TokenType.DCOLON,
    TokenType.AND, TokenType.OR, TokenType.NOT, TokenType.IN, TokenType.LIKE, TokenType.ESCAPE, TokenType.BETWEEN,
    TokenType.IS, TokenType.NULL, TokenType.TRUE, TokenType.FALSE, TokenType.ALIAS,
    TokenType.TIMESTAMP, TokenType.TIMESTAMPTZ, TokenType.PARTITION, TokenType.OFFSET,
}  # fmt: skip
_BEFORE_ANY_NAME = frozenset({TokenType.DOT, TokenType.ALIAS, TokenType.DCOLON})
"""Behind these stands the name of a field or of a type, whatever it means elsewhere."""

FIELD_MARK = "."
"""Begins every name behind a dot in the tree."""

_QUOTES = "'\"`"


def parse(text: str) -> exp.Expression:
    """The tree of one condition; raises `FilterError`."""
    _check_size(text)
    found = _tokens(text)
    _check_tokens(text, found)
    try:
        (tree,) = Spark().parser().parse_into(exp.Condition, _with_field_names(found), text)
    except ParseError as error:
        raise _syntax_error(text, found, error) from None
    except RecursionError:
        raise refusal(text, 0, len(text), f"at most {DEPTH_MAX} operators stand within each other") from None
    except Exception as error:
        # The parser fails in ways of its own on text that it does not expect; none of them is ours to tell apart.
        raise refusal(text, 0, len(text), f"this cannot be read as a condition ({type(error).__name__})") from error
    if not isinstance(tree, exp.Expression):
        raise refusal(text, 0, len(text), "this cannot be read as a condition")
    return tree


def _check_size(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise refusal(text, error.start, error.end, "this character cannot be written as UTF-8") from None
    if size > TEXT_BYTES_MAX:
        raise refusal(text, 0, 1, f"a filter has at most {TEXT_BYTES_MAX} bytes, not {size}")
    if not text.strip():
        raise refusal(text, 0, 1, "a filter is a condition such as payload.total > 1000, this one is empty")


def _tokens(text: str) -> list[Token]:
    try:
        return Spark().tokenize(text)
    except TokenError:
        start = _open_quote(text)
        if start is None:
            raise refusal(text, 0, len(text), "this cannot be read as SQL") from None
        raise refusal(text, start, len(text), "what is opened here is not closed") from None
    except Exception as error:
        raise refusal(text, 0, len(text), f"this cannot be read as SQL ({type(error).__name__})") from error


def _open_quote(text: str) -> int | None:
    """Where a quote is opened that is never closed."""
    start, quote, escaped = None, "", False
    for at, character in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\" and quote != "`"
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            start, quote = at, character
    return start if quote else None


def _check_tokens(text: str, found: list[Token]) -> None:
    depth, before = 0, TokenType.AND
    for token in found:
        kind = token.token_type
        named = before in _BEFORE_ANY_NAME
        if kind not in _ALLOWED and not named:
            raise refusal(text, token.start, token.end + 1, f"{token.text!r} is not part of the filter language")
        if kind is TokenType.NOT and token.text == "!":
            raise refusal(text, token.start, token.end + 1, "write NOT instead of !")
        if before is TokenType.STRING is kind:
            raise refusal(text, token.start, token.end + 1, "a text follows a text; write \\' for a quote within one")
        depth += (kind in _OPENING) - (kind in _CLOSING)
        if depth > DEPTH_MAX:
            raise refusal(text, token.start, token.end + 1, f"at most {DEPTH_MAX} parentheses stand within each other")
        before = kind


def _with_field_names(found: list[Token]) -> list[Token]:
    """Have the parser take what stands behind a dot for a name, even if it is a word of SQL such as `list`.

    The mark is needed beside the type of a name: `a.list[0]` is the making of a list to the parser, quoted or not.
    """
    named: list[Token] = []
    for token in found:
        kind, text = token.token_type, token.text
        if named and named[-1].token_type is TokenType.DOT and (text.isidentifier() or kind is TokenType.IDENTIFIER):
            kind, text = TokenType.IDENTIFIER, FIELD_MARK + text
        named.append(Token(kind, text, line=token.line, col=token.col, start=token.start, end=token.end))
    return named


def _syntax_error(text: str, found: list[Token], error: ParseError) -> FilterError:
    told = error.errors[0] if error.errors else {}
    where = (told.get("line"), told.get("col"))
    token = next((token for token in found if (token.line, token.col) == where), found[-1])
    description = str(told.get("description") or "")
    reason = "this was not expected here"
    if description.startswith("Required keyword"):
        reason = "something is missing before or after this"
    elif description.startswith("Expected ]"):
        reason = "a closing ] is missing after this"
    elif description.startswith("Expecting )"):
        reason = "a closing ) is missing after this"
    return refusal(text, token.start, token.end + 1, reason)
