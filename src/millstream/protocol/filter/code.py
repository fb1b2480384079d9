"""From the tree of a filter to a Python function over columns.

The function is built from nodes of Python's own syntax tree, never from text; its names are generated here, and values
of the filter are constants. NULL does not occur in conditions: an expression is compiled to a test whether it is TRUE,
or whether it is FALSE, and NOT turns one into the other. AND and OR of SQL are then those of Python. Only where a
boolean is itself a value, as in `(a > 1) IS NULL`, the three-valued operations are called.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from millstream.protocol.filter import operation, value
from millstream.protocol.filter.node import (
    COALESCE,
    FUNCTIONS,
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
    kind_of,
)
from millstream.protocol.filter.operation import FROM_TEXT, Truth
from millstream.protocol.filter.value import NUMBERS, compile_like


class Choices:
    """Literals of one kind, and possibly NULL."""

    def __init__(self, values: Sequence[Any]) -> None:
        present = [value for value in values if value is not None]
        self.has_null = len(present) < len(values)
        self.values = frozenset(present)
        kinds = {value.__class__ for value in present}
        # Text is compared with numbers as in Spark: as a double if any of them is one.
        self._kind = float if float in kinds else next(iter(kinds), None)
        self._taken: dict[type, tuple[frozenset[Any], bool]] = {}
        if self._kind is str:
            for kind, take in FROM_TEXT.items():
                taken = [take(value) for value in present]
                self._taken[kind] = frozenset(taken) - {None}, None in taken

    def contain(self, value: Any) -> Truth:
        """Return whether one of them equals a value, as in SQL: NULL if that is unknown."""
        if value is None:
            return None
        kind = value.__class__
        choices, unsure = self.values, self.has_null
        if kind is str and self._kind is not str:
            value = None if self._kind is None else FROM_TEXT[self._kind](value)
        elif kind is not str and self._kind is str:
            choices, unknown = self._taken.get(kind, (frozenset(), True))
            unsure = unsure or unknown
        elif kind is not self._kind and not (kind in NUMBERS and self._kind in NUMBERS):
            return None
        if value is None:
            return None
        if choices and kind in _HASHED and value in choices:
            return True
        return None if unsure else False


_HASHED = frozenset({str, int, float, bool})

Source = Column | Header | Payload
"""The parts of a message that a filter reads."""

OF_BATCH = ("topic", "partition")
"""Columns with one value for a whole batch."""

NEGATED = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", "<=": ">", ">": "<="}

_COMPARE: dict[str, Callable[[], ast.cmpop]] = {
    "=": ast.Eq,
    "<>": ast.NotEq,
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    ">=": ast.GtE,
}

_CASTS: dict[str, Callable[[Any], Any]] = {
    "STRING": value.text_of,
    "BIGINT": value.as_bigint,
    "INT": value.as_int,
    "DOUBLE": value.as_double,
    "BOOLEAN": value.as_boolean,
    "TIMESTAMP": value.as_timestamp,
}

_MOMENT_CASTS: dict[str, Callable[[Any], Any]] = {"BIGINT": value.seconds, "DOUBLE": value.fractional_seconds}

_CALLS: dict[str, Callable[..., Any]] = {name: getattr(operation, name) for name in (*FUNCTIONS, COALESCE)}

_JUNCTIONS = {"AND": operation.conjunction, "OR": operation.disjunction}

Run = Callable[..., Any]


class Program:
    """A filter as a function of columns, and of values that hold for the whole batch."""

    def __init__(self, node: Node) -> None:
        coder = _Coder()
        truth = coder.truth(node, True)
        self.columns: tuple[Source, ...] = tuple(
            source for source in coder.sources if not (isinstance(source, Column) and source.name in OF_BATCH)
        )
        self.of_batch: tuple[Column, ...] = tuple(
            source for source in coder.sources if isinstance(source, Column) and source.name in OF_BATCH
        )
        self.run: Run = _function(truth, coder, self.columns, self.of_batch)
        """Called with all columns and then the values of the batch; returns a list of booleans, or one if no column is
        read."""


def _function(
    truth: ast.expr, coder: _Coder, columns: tuple[Source, ...], of_batch: tuple[Column, ...]
) -> Callable[..., Any]:
    rows = [coder.sources[source] for source in columns]
    parameters = [f"all_{name}" for name in rows] + [coder.sources[source] for source in of_batch]
    body: ast.expr = truth
    if rows:
        body = ast.ListComp(truth, [_comprehension(rows)])
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in parameters], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
    namespace: dict[str, Any] = {**coder.constants, "zip": zip, "__builtins__": {}}
    run: Run = eval(compile(expression, "<filter>", "eval"), namespace)
    return run


def _comprehension(rows: list[str]) -> ast.comprehension:
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in rows]
    columns: list[ast.expr] = [_name(f"all_{name}") for name in rows]
    if len(rows) == 1:
        return ast.comprehension(targets[0], columns[0], [], 0)
    return ast.comprehension(ast.Tuple(targets, ast.Store()), _call_name("zip", *columns), [], 0)


class _Coder:
    """Compiles nodes to Python expressions, and records what they read and call."""

    def __init__(self) -> None:
        self.sources: dict[Source, str] = {}
        self.constants: dict[str, Any] = {}
        self._made = 0

    def truth(self, node: Node, expected: bool) -> ast.expr:
        """Return a condition that holds if the node is TRUE, or FALSE if `expected` is false."""
        match node:
            case Not():
                return self.truth(node.operand, not expected)
            case Junction():
                joined = ast.And() if (node.operator == "AND") == expected else ast.Or()
                return ast.BoolOp(joined, [self.truth(part, expected) for part in node.parts])
            case Comparison():
                symbol = node.operator if expected else NEGATED[node.operator]
                return self._comparison(symbol, node.left, node.right)
            case Between():
                return self._between(node, expected)
            case Membership():
                return self._membership(node, expected)
            case Like():
                return self._like(node, expected)
            case IsNull():
                return _is_none(self.value(node.operand), expected)
            case IsTruth():
                condition = self.truth(node.operand, node.truth)
                return condition if expected else ast.UnaryOp(ast.Not(), condition)
            case Literal():
                return ast.Constant(node.value is expected)
            case _:
                return _is(self.value(node), expected)

    def value(self, node: Node) -> ast.expr:
        match node:
            case Literal():
                return ast.Constant(node.value)
            case Column() | Header() | Payload():
                return _name(self.sources.setdefault(node, f"v{len(self.sources)}"))
            case Arithmetic():
                return self._call(operation.arithmetic(node.operator), node.left, node.right)
            case Negative():
                return self._call(operation.negative, node.operand)
            case Call():
                return self._call(_CALLS[node.function], *node.arguments)
            case Cast():
                casts = _CASTS
                if kind_of(node.operand) is Kind.TIMESTAMP:
                    if node.target == "TIMESTAMP":
                        return self.value(node.operand)
                    casts = _MOMENT_CASTS
                return self._call(casts[node.target], node.operand)
            case _:
                return self._truth_value(node)

    def _truth_value(self, node: Node) -> ast.expr:
        """Return TRUE, FALSE or NULL as a value."""
        match node:
            case Not():
                return self._call(operation.negation, node.operand)
            case Junction():
                return self._call(_JUNCTIONS[node.operator], *node.parts)
            case Comparison():
                left, right, plain = self._pair(node.left, node.right)
                make = operation.plain_comparison if plain else operation.comparison
                return _call(self._constant(make(node.operator)), left, right)
            case Between():
                return self._between_value(node)
            case Membership():
                return _call(self._constant(_choices(node).contain), self.value(node.operand))
            case Like():
                matches = self._constant(compile_like(node.pattern, node.escape))
                return _call(self._constant(operation.like), self.value(node.operand), matches)
            case IsTruth():
                return _call(self._constant(operation.is_truth), self.value(node.operand), ast.Constant(node.truth))
            case _:
                operand: Node = node.operand  # type: ignore[union-attr]
                return self._call(operation.is_null, operand)

    def _between_value(self, node: Between) -> ast.expr:
        nodes = (node.operand, node.low, node.high)
        moments = Kind.TIMESTAMP in map(kind_of, nodes)
        plain = [moments or _have_same_kind(node.operand, bound) for bound in (node.low, node.high)]
        makers = [operation.plain_comparison if alike else operation.comparison for alike in plain]
        compare = self._constant((makers[0](">="), makers[1]("<=")))
        values = [self._moment(node) if moments else self.value(node) for node in nodes]
        return _call(self._constant(operation.between), *values, compare)

    def _pair(self, left: Node, right: Node) -> tuple[ast.expr, ast.expr, bool]:
        """Return both values, and whether they are certain to be of one kind, or NULL."""
        if Kind.TIMESTAMP in (kind_of(left), kind_of(right)):
            return self._moment(left), self._moment(right), True
        return self.value(left), self.value(right), _have_same_kind(left, right)

    def _moment(self, node: Node) -> ast.expr:
        if kind_of(node) in (Kind.TIMESTAMP, Kind.NULL):
            return self.value(node)
        if isinstance(node, Literal):
            return ast.Constant(value.moment(node.value))
        return self._call(value.moment, node)

    def _comparison(self, symbol: str, left: Node, right: Node) -> ast.expr:
        if Kind.NULL in (kind_of(left), kind_of(right)):
            return ast.Constant(False)
        left_value, right_value, alike = self._pair(left, right)
        if alike:
            return self._plain(symbol, left_value, right_value)
        return self._compare_any_kinds(symbol, (left, left_value), (right, right_value))

    def _compare_any_kinds(self, symbol: str, left: tuple[Node, ast.expr], right: tuple[Node, ast.expr]) -> ast.expr:
        """Compare values whose kinds may differ."""
        (left_node, left_value), (right_node, right_value) = left, right
        if isinstance(right_node, Literal) and kind_of(left_node) is Kind.ANY:
            return self._with_literal(symbol, left_value, right_node, turned=False)
        if isinstance(left_node, Literal) and kind_of(right_node) is Kind.ANY:
            return self._with_literal(symbol, right_value, left_node, turned=True)
        return _is(_call(self._constant(operation.comparison(symbol)), left_value, right_value), True)

    def _plain(self, symbol: str, left: ast.expr, right: ast.expr) -> ast.expr:
        """Compare values of one kind: Python does so like SQL, unless one is NULL."""
        constants = isinstance(left, ast.Constant) + isinstance(right, ast.Constant)
        if symbol == "=" and constants == 1:
            return _compare(left, symbol, right)
        tests = []
        if not isinstance(left, ast.Constant):
            first, left = self._bound(left)
            tests.append(_is_none(first, False))
        if not isinstance(right, ast.Constant):
            first, right = self._bound(right)
            tests.append(_is_none(first, False))
        return (
            ast.BoolOp(ast.And(), [*tests, _compare(left, symbol, right)]) if tests else _compare(left, symbol, right)
        )

    def _with_literal(self, symbol: str, operand: ast.expr, literal: Literal, *, turned: bool) -> ast.expr:
        """Compare a field of the payload with a literal: directly if the field has the literal's kind, in general
        otherwise.
        """
        first, again = self._bound(operand)
        constant = ast.Constant(literal.value)
        left, right = (constant, again) if turned else (again, constant)
        compared = _is(_call(self._constant(operation.comparison(symbol)), left, right), True)
        return ast.IfExp(
            self._has_kind(first, literal.kind),
            _compare(left, symbol, right),
            ast.BoolOp(ast.And(), [_is_none(again, False), compared]),
        )

    def _between(self, node: Between, expected: bool) -> ast.expr:
        moments = Kind.TIMESTAMP in map(kind_of, (node.operand, node.low, node.high))
        first, again = self._bound(self._moment(node.operand) if moments else self.value(node.operand))
        parts: list[ast.expr] = []
        for symbol, limit in ((">=", node.low), ("<=", node.high)):
            symbol = symbol if expected else NEGATED[symbol]
            if Kind.NULL in (kind_of(node.operand), kind_of(limit)):
                parts.append(ast.Constant(False))
            elif moments or _have_same_kind(node.operand, limit):
                parts.append(self._plain(symbol, again, self._moment(limit) if moments else self.value(limit)))
            else:
                parts.append(self._compare_any_kinds(symbol, (node.operand, again), (limit, self.value(limit))))
        both = ast.BoolOp(ast.And() if expected else ast.Or(), parts)
        # Binds the name before either part needs it; the test itself always holds.
        binding = ast.Compare(first, [ast.IsNot()], [ast.Constant(...)])
        return both if first is again else ast.BoolOp(ast.And(), [binding, both])

    def _membership(self, node: Membership, expected: bool) -> ast.expr:
        choices = _choices(node)
        if not expected and choices.has_null:
            return ast.Constant(False)
        kind = kind_of(node.operand)
        kinds = {choice.kind for choice in node.choices if choice.kind is not Kind.NULL}
        first, again = self._bound(self.value(node.operand))
        known = self._constant(choices.values)
        comparison = ast.Compare(again, [ast.In() if expected else ast.NotIn()], [known])
        if kinds == {kind}:
            return ast.BoolOp(ast.And(), [_is_none(first, False), comparison])
        held = _is(_call(self._constant(choices.contain), again), expected)
        if kind is Kind.ANY and len(kinds) == 1:
            return ast.IfExp(
                self._has_kind(first, kinds.pop()), comparison, ast.BoolOp(ast.And(), [_is_none(again, False), held])
            )
        return ast.BoolOp(ast.And(), [_is_none(first, False), held])

    def _like(self, node: Like, expected: bool) -> ast.expr:
        first, again = self._bound(self.value(node.operand))
        matches = self._constant(compile_like(node.pattern, node.escape))
        matched: ast.expr = _call(matches, again)
        if not expected:
            matched = ast.UnaryOp(ast.Not(), matched)
        if kind_of(node.operand) is Kind.TEXT:
            return ast.BoolOp(ast.And(), [_is_none(first, False), matched])
        other = _is(_call(self._constant(operation.like), again, matches), expected)
        return ast.IfExp(self._has_kind(first, Kind.TEXT), matched, other)

    def _has_kind(self, operand: ast.expr, kind: Kind) -> ast.expr:
        """Return whether a value is of a literal's kind."""
        type_of = ast.Attribute(operand, "__class__", ast.Load())
        if kind is Kind.NUMBER:
            return ast.Compare(type_of, [ast.In()], [self._constant(value.NUMBERS)])
        return ast.Compare(type_of, [ast.Is()], [self._constant(str if kind is Kind.TEXT else bool)])

    def _bound(self, expression: ast.expr) -> tuple[ast.expr, ast.expr]:
        """Return an expression for the first use and one for later ones, so that it is evaluated once."""
        if isinstance(expression, ast.Name | ast.Constant):
            return expression, expression
        self._made += 1
        name = f"t{self._made}"
        return ast.NamedExpr(ast.Name(name, ast.Store()), expression), _name(name)

    def _call(self, function: Callable[..., Any], *arguments: Node) -> ast.expr:
        return _call(self._constant(function), *(self.value(argument) for argument in arguments))

    def _constant(self, instance: object) -> ast.expr:
        self._made += 1
        name = f"k{self._made}"
        self.constants[name] = instance
        return _name(name)


def _have_same_kind(left: Node, right: Node) -> bool:
    """Return whether two nodes are certain to be of one kind."""
    kind = kind_of(left)
    return kind is kind_of(right) and kind is not Kind.ANY


def _choices(node: Membership) -> Choices:
    return Choices([choice.value for choice in node.choices])


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call(function: ast.expr, *arguments: ast.expr) -> ast.expr:
    return ast.Call(function, list(arguments), [])


def _call_name(name: str, *arguments: ast.expr) -> ast.expr:
    return _call(_name(name), *arguments)


def _compare(left: ast.expr, symbol: str, right: ast.expr) -> ast.expr:
    return ast.Compare(left, [_COMPARE[symbol]()], [right])


def _is(operand: ast.expr, expected: bool) -> ast.expr:
    if isinstance(operand, ast.Constant):
        return ast.Constant(operand.value is expected)
    return ast.Compare(operand, [ast.Is()], [ast.Constant(expected)])


def _is_none(operand: ast.expr, expected: bool) -> ast.expr:
    if isinstance(operand, ast.Constant):
        return ast.Constant((operand.value is None) == expected)
    return ast.Compare(operand, [ast.Is() if expected else ast.IsNot()], [ast.Constant(None)])
