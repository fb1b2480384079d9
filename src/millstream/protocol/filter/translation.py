"""Translates sqlglot's syntax tree to a filter's tree: what is not listed here is not part of the language.

Kinds are checked where they are known, so that a filter that can never match is rejected when it is declared.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import Token, TokenType, exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError

from millstream.core.errors import FilterError
from millstream.core.setting import suggestion
from millstream.core.sql import locate
from millstream.protocol.filter import value
from millstream.protocol.filter.node import (
    CASTS,
    COALESCE,
    COLUMNS,
    FUNCTIONS,
    HEADERS,
    PAYLOAD,
    Arithmetic,
    Between,
    Call,
    Cast,
    Column,
    Comparison,
    Header,
    IsNull,
    IsTruth,
    Junction,
    Kind,
    Like,
    Literal,
    Membership,
    Negative,
    Node,
    Not,
    Payload,
    Step,
    Value,
    common_kind,
    kind_of,
)
from millstream.protocol.filter.value import ESCAPE, InvalidPattern, compile_like


def refusal(text: str, start: int, end: int, reason: str) -> FilterError:
    """Build the error for the text from `start` up to `end`, exclusive."""
    place = locate(text, start, end)
    message = f"filter, line {place.line}, column {place.column}: {reason}\n{place.excerpt}"
    return FilterError(message, line=place.line, column=place.column, reason=reason)


TEXT_BYTES_MAX = 8 * 1024

DEPTH_MAX = 32
"""The maximum nesting of parentheses, brackets and operators."""

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
"""Tokens that are followed by the name of a field or of a type, even if the name is a keyword elsewhere."""

FIELD_MARK = "."
"""The prefix of every name after a dot in the tree."""

_QUOTES = "'\"`"


def parse(text: str) -> exp.Expression:
    """Parse one condition; raises `FilterError`."""
    _check_size(text)
    tokens = _tokens(text)
    _check_tokens(text, tokens)
    try:
        (tree,) = Spark().parser().parse_into(exp.Condition, _with_field_names(tokens), text)
    except ParseError as error:
        raise _syntax_error(text, tokens, error) from None
    except RecursionError:
        raise refusal(text, 0, len(text), f"operators are nested more than {DEPTH_MAX} deep") from None
    except Exception as error:
        # The parser fails in various ways on unexpected text.
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
        raise refusal(text, 0, 1, "a filter is a condition such as payload.total > 1000; this one is empty")


def _tokens(text: str) -> list[Token]:
    try:
        return Spark().tokenize(text)
    except TokenError:
        start = _open_quote(text)
        if start is None:
            raise refusal(text, 0, len(text), "this cannot be read as SQL") from None
        raise refusal(text, start, len(text), "this is not closed") from None
    except Exception as error:
        raise refusal(text, 0, len(text), f"this cannot be read as SQL ({type(error).__name__})") from error


def _open_quote(text: str) -> int | None:
    """Return the position of a quote that is never closed."""
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


def _check_tokens(text: str, tokens: list[Token]) -> None:
    depth, before = 0, TokenType.AND
    for token in tokens:
        kind = token.token_type
        named = before in _BEFORE_ANY_NAME
        if kind not in _ALLOWED and not named:
            raise refusal(text, token.start, token.end + 1, f"{token.text!r} is not part of the filter language")
        if kind is TokenType.NOT and token.text == "!":
            raise refusal(text, token.start, token.end + 1, "write NOT instead of !")
        if before is TokenType.STRING is kind:
            raise refusal(
                text, token.start, token.end + 1, "a string follows a string; write \\' for a quote within one"
            )
        depth += (kind in _OPENING) - (kind in _CLOSING)
        if depth > DEPTH_MAX:
            raise refusal(text, token.start, token.end + 1, f"parentheses are nested more than {DEPTH_MAX} deep")
        before = kind


def _with_field_names(tokens: list[Token]) -> list[Token]:
    """Make the parser treat what follows a dot as a name, even if it is a SQL keyword such as `list`.

    The prefix is needed besides the token type: to the parser `a.list[0]` constructs a list, quoted or not.
    """
    named: list[Token] = []
    for token in tokens:
        kind, text = token.token_type, token.text
        if named and named[-1].token_type is TokenType.DOT and (text.isidentifier() or kind is TokenType.IDENTIFIER):
            kind, text = TokenType.IDENTIFIER, FIELD_MARK + text
        named.append(Token(kind, text, line=token.line, col=token.col, start=token.start, end=token.end))
    return named


def _syntax_error(text: str, tokens: list[Token], error: ParseError) -> FilterError:
    details = error.errors[0] if error.errors else {}
    where = (details.get("line"), details.get("col"))
    token = next((token for token in tokens if (token.line, token.col) == where), tokens[-1])
    description = str(details.get("description") or "")
    reason = "this was not expected here"
    if description.startswith("Required keyword"):
        reason = "something is missing before or after this"
    elif description.startswith("Expected ]"):
        reason = "a closing ] is missing after this"
    elif description.startswith("Expecting )"):
        reason = "a closing ) is missing after this"
    return refusal(text, token.start, token.end + 1, reason)


NODES_MAX = 256
"""The maximum number of operators, functions and operands; literals of IN are not counted."""

DIGITS_MAX = 38
"""The maximum number of digits of an integer, as in Spark."""

STEPS_MAX = 16
"""The maximum length of a path to a payload field."""

_COMPARISONS: dict[type[exp.Expression], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}

_ARITHMETIC: dict[type[exp.Expression], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}

_TARGETS = {
    exp.DType.TEXT: "STRING",
    exp.DType.BIGINT: "BIGINT",
    exp.DType.INT: "INT",
    exp.DType.DOUBLE: "DOUBLE",
    exp.DType.BOOLEAN: "BOOLEAN",
    exp.DType.TIMESTAMP: "TIMESTAMP",
    exp.DType.TIMESTAMPTZ: "TIMESTAMP",
}

_NUMBER_CASTS: dict[str, Callable[[object], Value]] = {
    "BIGINT": value.as_bigint,
    "INT": value.as_int,
    "DOUBLE": value.as_double,
}
"""Casts that are evaluated at once, since `5L` and `1.5D` are casts to the parser."""

_PREDICATES = (*_COMPARISONS, exp.Between, exp.In, exp.Like, exp.Escape, exp.Is, exp.Not)

_ARGUMENTS: dict[type[exp.Expression], frozenset[str]] = {
    exp.Like: frozenset({"this", "expression", "negate"}),
    exp.In: frozenset({"this", "expressions"}),
    exp.Between: frozenset({"this", "low", "high"}),
    exp.Bracket: frozenset({"this", "expressions"}),
    exp.Div: frozenset({"this", "expression", "typed", "safe"}),
    exp.Cast: frozenset({"this", "to"}),
    exp.TryCast: frozenset({"this", "to", "safe"}),
}
"""The arguments that a node of the parser may have; others may have `this`, `expression` and `expressions`."""

_PLAIN_ARGUMENTS = frozenset({"this", "expression", "expressions"})

_UNLIKE = (
    {Kind.NUMBER, Kind.BOOLEAN},
    {Kind.NUMBER, Kind.TIMESTAMP},
    {Kind.BOOLEAN, Kind.TIMESTAMP},
)


def translate(text: str, *, bare_fields: bool = False) -> Node:
    """Translate a filter; raises `FilterError`. With `bare_fields`, other names than columns are payload fields."""
    tree = parse(text)
    translator = _Translator(text, bare_fields=bare_fields)
    node = translator.condition(tree, 0)
    if kind_of(node) is Kind.NULL:
        raise translator.refusal(tree, "a condition is missing: NULL matches no message")
    return node


class _Translator:
    """Translates one tree, counting its nodes and pointing at errors."""

    def __init__(self, text: str, *, bare_fields: bool = False) -> None:
        self._bare_fields = bare_fields
        self._text = text
        self._nodes = 0

    def refusal(self, tree: exp.Expression, reason: str) -> FilterError:
        """Build the error that points at a node, or at the nearest one around it with a known location."""
        around: exp.Expr | None = tree
        while around is not None:
            places = [node.meta for node in around.walk() if "start" in node.meta]
            if places:
                start = min(int(place["start"]) for place in places)
                return refusal(self._text, start, max(int(place["end"]) for place in places) + 1, reason)
            around = around.parent
        return refusal(self._text, 0, len(self._text), reason)

    def condition(self, tree: exp.Expression, depth: int) -> Node:
        """Translate a node that is TRUE, FALSE or NULL."""
        node = self._node(tree, depth)
        if kind_of(node) not in (Kind.BOOLEAN, Kind.ANY, Kind.NULL):
            raise self.refusal(tree, f"a condition is needed here, but this is {kind_of(node)}")
        return node

    def _node(self, tree: exp.Expression, depth: int) -> Node:
        while isinstance(tree, exp.Paren):
            tree = tree.this
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise self.refusal(tree, f"a filter has at most {NODES_MAX} operators and operands")
        if depth > DEPTH_MAX:
            raise self.refusal(tree, f"operators are nested more than {DEPTH_MAX} deep")
        self._check_arguments(tree)
        kind = type(tree)
        if kind in _COMPARISONS:
            return self._comparison(tree, depth)
        if kind in _ARITHMETIC:
            return self._arithmetic(tree, depth)
        translate_kind = _KINDS.get(kind)
        if translate_kind is not None:
            return translate_kind(self, tree, depth)
        if isinstance(tree, exp.Func):
            return self._call(tree, depth)
        raise self.refusal(tree, "this operation is not part of the filter language")

    def _check_arguments(self, tree: exp.Expression) -> None:
        if isinstance(tree, exp.Column | exp.Func) and not isinstance(tree, exp.Cast):
            return
        allowed = _ARGUMENTS.get(type(tree), _PLAIN_ARGUMENTS)
        if any(set_to and name not in allowed for name, set_to in tree.args.items() if name != "is_string"):
            raise self.refusal(tree, "this form is not part of the filter language")

    def _operand(self, tree: exp.Expression, depth: int) -> Node:
        if (isinstance(tree, _PREDICATES) and not isinstance(tree, exp.Not)) or isinstance(tree, exp.Connector):
            raise self.refusal(tree, "put parentheses around this")
        return self._node(tree, depth + 1)

    def _junction(self, tree: exp.Expression, depth: int) -> Node:
        operator = "AND" if isinstance(tree, exp.And) else "OR"
        parts = [self.condition(part, depth + 1) for part in _flat(tree, type(tree))]
        return Junction(operator, tuple(parts))

    def _not(self, tree: exp.Expression, depth: int) -> Node:
        return Not(self.condition(tree.this, depth + 1))

    def _comparison(self, tree: exp.Expression, depth: int) -> Node:
        left, right = self._operand(tree.this, depth), self._operand(tree.expression, depth)
        self._check_pair(tree, left, right)
        if type(tree) not in (exp.EQ, exp.NEQ):
            self._check_order(tree, left, right)
        return Comparison(_COMPARISONS[type(tree)], left, right)

    def _check_order(self, tree: exp.Expression, left: Node, right: Node) -> None:
        """Reject ordering a payload field against text: the field is usually a number, and then never matches."""
        for field, literal in ((left, right), (right, left)):
            text = literal.value if isinstance(literal, Literal) else None
            if not isinstance(field, Payload) or not isinstance(text, str):
                continue
            if value.double(text) is None and value.moment(text) is None:
                raise self.refusal(
                    tree,
                    f"{text!r} is text, and a number cannot be compared with it; to compare texts, write "
                    "CAST(… AS STRING)",
                )

    def _check_pair(self, tree: exp.Expression, left: Node, right: Node) -> None:
        kinds = kind_of(left), kind_of(right)
        if set(kinds) in _UNLIKE:
            raise self.refusal(tree, f"{kinds[0]} cannot be compared with {kinds[1]}")
        for literal, kind in ((left, kinds[1]), (right, kinds[0])):
            if isinstance(literal, Literal) and isinstance(literal.value, str):
                self._check_text(tree, literal.value, kind)

    def _check_text(self, tree: exp.Expression, text: str, kind: Kind) -> None:
        """Require that a text literal compared with another kind can be converted to it."""
        takes: dict[Kind, Callable[[str], object]] = {
            Kind.NUMBER: value.double,
            Kind.BOOLEAN: value.boolean,
            Kind.TIMESTAMP: value.moment,
        }
        if kind in takes and takes[kind](text) is None:
            raise self.refusal(tree, f"{text!r} cannot be read as {kind}")

    def _between(self, tree: exp.Expression, depth: int) -> Node:
        operand, low, high = (self._operand(tree.args[name], depth) for name in ("this", "low", "high"))
        for bound in (low, high):
            self._check_pair(tree, operand, bound)
        bounds = {kind_of(low), kind_of(high)}
        if Kind.TIMESTAMP in bounds and kind_of(operand) is not Kind.TIMESTAMP and len(bounds) > 1:
            raise self.refusal(tree, "one bound is a timestamp, so the other must be one too")
        self._check_pair(tree, low, high)
        return Between(operand, low, high)

    def _membership(self, tree: exp.Expression, depth: int) -> Node:
        operand = self._operand(tree.this, depth)
        if not tree.expressions:
            raise self.refusal(tree, "IN needs a list of literals")
        choices = tuple(self._choice(choice, operand) for choice in tree.expressions)
        for choice, place in zip(choices, tree.expressions, strict=True):
            self._check_pair(place, operand, choice)
        if common_kind([choice.kind for choice in choices]) is Kind.ANY:
            raise self.refusal(tree, "the list of IN must have literals of one type")
        if kind_of(operand) is Kind.ANY and any(choice.kind is Kind.TIMESTAMP for choice in choices):
            raise self.refusal(tree, "write CAST(… AS TIMESTAMP) IN (…) to look for timestamps")
        return Membership(operand, choices)

    def _choice(self, tree: exp.Expression, operand: Node) -> Literal:
        self._nodes -= 1
        node = self._node(tree, 0)
        if not isinstance(node, Literal):
            raise self.refusal(tree, "the list of IN must contain only literals")
        if kind_of(operand) is Kind.TIMESTAMP and isinstance(node.value, str):
            self._check_text(tree, node.value, Kind.TIMESTAMP)
            return Literal(value.moment(node.value), Kind.TIMESTAMP)
        return node

    def _like(self, tree: exp.Expression, depth: int) -> Node:
        escape, like = ESCAPE, tree
        if isinstance(tree, exp.Escape):
            like = tree.this
            if not isinstance(like, exp.Like):
                raise self.refusal(tree, "ESCAPE belongs to LIKE")
            self._check_arguments(like)
            escape = self._text_of(tree.expression, "ESCAPE takes one character in quotes")
        if len(escape) != 1 or escape in "%_":
            raise self.refusal(tree.expression, "ESCAPE takes one character in quotes, and neither % nor _")
        operand = self._operand(like.this, depth)
        if kind_of(operand) is Kind.TIMESTAMP:
            raise self.refusal(tree, "LIKE needs text, but this is a timestamp")
        pattern = self._text_of(like.expression, "the pattern of LIKE is a text in quotes")
        try:
            compile_like(pattern, escape)
        except InvalidPattern as error:
            raise self.refusal(like.expression, str(error)) from None
        node = Like(operand, pattern, escape)
        return Not(node) if like.args.get("negate") else node

    def _text_of(self, tree: exp.Expression, reason: str) -> str:
        if not isinstance(tree, exp.Literal) or not tree.is_string:
            raise self.refusal(tree, reason)
        return str(tree.this)

    def _is(self, tree: exp.Expression, depth: int) -> Node:
        operand = self._operand(tree.this, depth)
        if isinstance(tree.expression, exp.Null):
            return IsNull(operand)
        if not isinstance(tree.expression, exp.Boolean):
            raise self.refusal(tree, "IS is followed by NULL, TRUE or FALSE")
        if kind_of(operand) not in (Kind.BOOLEAN, Kind.ANY, Kind.NULL):
            raise self.refusal(tree, f"a condition is needed before IS, but this is {kind_of(operand)}")
        return IsTruth(operand, bool(tree.expression.this))

    def _arithmetic(self, tree: exp.Expression, depth: int) -> Node:
        operator = _ARITHMETIC[type(tree)]
        left, right = self._operand(tree.this, depth), self._operand(tree.expression, depth)
        for node, place in ((left, tree.this), (right, tree.expression)):
            self._check_number(node, place, operator)
        if kind_of(left) is Kind.TEXT is kind_of(right):
            raise self.refusal(tree, f"{operator} needs numbers, but both operands are text")
        return Arithmetic(operator, left, right)

    def _check_number(self, node: Node, place: exp.Expression, operator: str) -> None:
        if kind_of(node) in (Kind.BOOLEAN, Kind.TIMESTAMP):
            raise self.refusal(place, f"{operator} needs numbers, but this is {kind_of(node)}")
        if isinstance(node, Literal) and isinstance(node.value, str):
            self._check_text(place, node.value, Kind.NUMBER)

    def _negative(self, tree: exp.Expression, depth: int) -> Node:
        operand = self._operand(tree.this, depth)
        self._check_number(operand, tree.this, "-")
        if isinstance(operand, Literal) and isinstance(operand.value, int | float):
            return Literal(-operand.value, Kind.NUMBER)
        return Negative(operand)

    def _literal(self, tree: exp.Expression, depth: int) -> Node:
        text = str(tree.this)
        if tree.is_string:
            return Literal(text, Kind.TEXT)
        if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX:
            return Literal(int(text), Kind.NUMBER)
        number = None if text.isdigit() else value.double(text)
        if number is None:
            raise self.refusal(tree, f"{text!r} is not a number that a filter can have")
        return Literal(number, Kind.NUMBER)

    def _boolean(self, tree: exp.Expression, depth: int) -> Node:
        return Literal(bool(tree.this), Kind.BOOLEAN)

    def _null(self, tree: exp.Expression, depth: int) -> Node:
        return Literal(None, Kind.NULL)

    def _cast(self, tree: exp.Expression, depth: int) -> Node:
        target = _TARGETS.get(tree.args["to"].this)
        if target is None or tree.args["to"].expressions:
            known = ", ".join(CASTS)
            raise self.refusal(
                tree, f"a cast to {tree.args['to'].sql('spark')} is not supported; the types are {known}"
            )
        operand = self._operand(tree.this, depth)
        if kind_of(operand) is Kind.TIMESTAMP and target not in ("BIGINT", "DOUBLE", "TIMESTAMP"):
            raise self.refusal(tree, f"a timestamp cannot be cast to {target}")
        if kind_of(operand) is Kind.BOOLEAN and target == "TIMESTAMP":
            raise self.refusal(tree, "a boolean cannot be cast to TIMESTAMP")
        if target == "TIMESTAMP" and isinstance(operand, Literal) and isinstance(operand.value, str):
            self._check_text(tree, operand.value, Kind.TIMESTAMP)
            return Literal(value.moment(operand.value), Kind.TIMESTAMP)
        if isinstance(operand, Literal) and operand.kind is Kind.NUMBER and target in _NUMBER_CASTS:
            number = _NUMBER_CASTS[target](operand.value)
            return Literal(number, Kind.NULL if number is None else Kind.NUMBER)
        return Cast(operand, target)

    def _call(self, tree: exp.Expression, depth: int) -> Node:
        name = self._function_name(tree)
        arguments = [argument for argument in _arguments(tree) if isinstance(argument, exp.Expression)]
        if name == COALESCE:
            return self._coalesce(tree, [self._argument(argument, depth) for argument in arguments])
        if name not in FUNCTIONS:
            raise self.refusal(tree, f"the function {name!r} is unknown{suggestion(name, [*FUNCTIONS, COALESCE])}")
        count = FUNCTIONS[name][1]
        if len(arguments) != count:
            raise self.refusal(tree, f"{name} takes {count} argument{'s' if count > 1 else ''}, not {len(arguments)}")
        nodes = tuple(self._argument(argument, depth) for argument in arguments)
        if any(kind_of(node) is Kind.TIMESTAMP for node in nodes):
            raise self.refusal(tree, f"{name} needs text, but this is a timestamp")
        return Call(name, nodes)

    def _argument(self, tree: exp.Expression, depth: int) -> Node:
        """Translate an argument; the function's parentheses already surround it."""
        return self._node(tree, depth + 1)

    def _function_name(self, tree: exp.Expression) -> str:
        """Return the name as written: the parser has one node for several names."""
        if "start" in tree.meta:
            return self._text[int(tree.meta["start"]) : int(tree.meta["end"]) + 1].lower()
        return str(tree.this if isinstance(tree, exp.Anonymous) else tree.key).lower()

    def _coalesce(self, tree: exp.Expression, nodes: list[Node]) -> Node:
        kinds = {kind_of(node) for node in nodes} - {Kind.NULL}
        if not nodes or len(kinds - {Kind.ANY}) > 1 or (Kind.TIMESTAMP in kinds and Kind.ANY in kinds):
            raise self.refusal(tree, "all arguments of coalesce must have the same type")
        return Call(COALESCE, tuple(nodes))

    def _field(self, tree: exp.Expression, depth: int) -> Node:
        """Translate a column, a header or a payload field."""
        steps = self._steps(tree)
        name, place = str(steps[0][0]), steps[0][1]
        quoted = isinstance(place, exp.Identifier) and place.args.get("quoted")
        root = name if quoted else name.lower()
        path = tuple(step for step, _ in steps[1:])
        if root == PAYLOAD:
            if len(path) > STEPS_MAX:
                raise self.refusal(tree, f"a field is at most {STEPS_MAX} levels deep in the payload")
            return Payload(path)
        if root == HEADERS:
            if len(path) != 1 or not isinstance(path[0], str):
                raise self.refusal(tree, "name one header, such as headers['region']")
            return Header(path[0])
        if root not in COLUMNS and self._bare_fields and len(path) < STEPS_MAX:
            return Payload((name, *path))
        if root not in COLUMNS:
            raise self.refusal(place, self._unknown(name))
        if path:
            raise self.refusal(tree, f"{root} has no fields")
        return Column(root, COLUMNS[root])

    def _unknown(self, name: str) -> str:
        close = suggestion(name, [*COLUMNS, HEADERS, PAYLOAD])
        return f"the column {name!r} is unknown{close or f'; a field of the payload is written payload.{name}'}"

    def _steps(self, tree: exp.Expression) -> list[tuple[Step, exp.Expression]]:
        """Yield the names and positions of a path, outermost first, each with its location."""
        steps: list[tuple[Step, exp.Expression]] = []
        while not isinstance(tree, exp.Column):
            self._check_arguments(tree)
            if isinstance(tree, exp.Dot):
                steps.append((self._name(tree.expression), tree.expression))
            elif isinstance(tree, exp.Bracket) and len(tree.expressions) == 1:
                steps.append((self._subscript(tree.expressions[0]), tree.expressions[0]))
            else:
                raise self.refusal(tree, "only columns, headers and the payload have fields")
            tree = tree.this
        names = [part for part in (tree.args.get(name) for name in ("this", "table", "db", "catalog")) if part]
        if any(name not in ("this", "table", "db", "catalog") for name, set_to in tree.args.items() if set_to):
            raise self.refusal(tree, "this form is not part of the filter language")
        steps += [(self._name(part), part) for part in names[:-1]]
        steps.append((str(names[-1].this), names[-1]))
        return steps[::-1]

    def _name(self, tree: exp.Expression) -> str:
        if not isinstance(tree, exp.Identifier):
            raise self.refusal(tree, "the name of a field is needed here")
        return str(tree.this).removeprefix(FIELD_MARK)

    def _subscript(self, tree: exp.Expression) -> Step:
        if isinstance(tree, exp.Literal) and tree.is_string:
            return str(tree.this)
        if isinstance(tree, exp.Literal) and str(tree.this).isdigit() and len(str(tree.this)) < 10:
            return int(str(tree.this))
        raise self.refusal(tree, "brackets take a name in quotes, or a position from 0 on")


_KINDS: dict[type[exp.Expression], Callable[[_Translator, exp.Expression, int], Node]] = {
    exp.And: _Translator._junction,
    exp.Or: _Translator._junction,
    exp.Not: _Translator._not,
    exp.Between: _Translator._between,
    exp.In: _Translator._membership,
    exp.Like: _Translator._like,
    exp.Escape: _Translator._like,
    exp.Is: _Translator._is,
    exp.Neg: _Translator._negative,
    exp.Literal: _Translator._literal,
    exp.Boolean: _Translator._boolean,
    exp.Null: _Translator._null,
    exp.Cast: _Translator._cast,
    exp.TryCast: _Translator._cast,
    exp.Column: _Translator._field,
    exp.Dot: _Translator._field,
    exp.Bracket: _Translator._field,
}


def _flat(tree: exp.Expression, kind: type[exp.Expression]) -> list[exp.Expression]:
    """Yield the parts of a chain of ANDs or ORs, from left to right."""
    parts: list[exp.Expression] = []
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        while isinstance(part, exp.Paren):
            part = part.this
        if type(part) is kind:
            waiting += [part.expression, part.this]
        else:
            parts.append(part)
    return parts


def _arguments(tree: exp.Expression) -> list[object]:
    listed: list[object] = []
    for name, argument in tree.args.items():
        if isinstance(tree, exp.Anonymous) and name == "this":
            continue
        listed += argument if isinstance(argument, list) else [argument]
    return [argument for argument in listed if argument is not None]
