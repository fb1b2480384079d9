"""One condition of a route, compiled, and what most messages can be told apart by before it is evaluated.

A condition that holds only where some field has one of some values, such as `payload.region = 'eu' AND …`, is looked
at only for messages that have one. With a thousand rules that name a thousand values, a message is then compared with
few of them. A condition that sets bounds to a number is looked at only for messages that lie within them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millstream.pipelines.jobs.route.span import Span, span_of
from millstream.protocol.filter.canonical import canonical_text
from millstream.protocol.filter.code import Program
from millstream.protocol.filter.filter import Filter
from millstream.protocol.filter.node import (
    Column,
    Comparison,
    Header,
    Junction,
    Kind,
    Literal,
    Membership,
    Node,
    Payload,
    Value,
)
from millstream.protocol.filter.translation import translate
from millstream.protocol.filter.uses import Uses

Source = Column | Header | Payload


@dataclass(frozen=True, slots=True)
class Handle:
    """A field that has one of some values wherever the condition holds.

    Values of another kind than these may be taken for them, so for messages that have such a value the condition is
    evaluated.
    """

    source: Source
    kind: Kind
    values: tuple[Value, ...]
    is_all: bool
    """Whether the condition says nothing else."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition, and its handle if it has one."""

    filter: Filter
    handle: Handle | Span | None


def compile_condition(text: str) -> Condition:
    """Compile a condition; raise `FilterError`, which points at the place."""
    node = translate(text)
    program = Program(node)
    compiled = Filter(text, canonical_text(node), Uses.of((*program.columns, *program.of_batch)), program)
    return Condition(compiled, _handle(node))


def _handle(node: Node) -> Handle | Span | None:
    parts = node.parts if isinstance(node, Junction) and node.operator == "AND" else (node,)
    found = [handle for part in parts for handle in _handles(part, is_all=len(parts) == 1)]
    # Texts tell messages apart better than numbers, as a rule.
    found.sort(key=lambda handle: handle.kind is not Kind.TEXT)
    return found[0] if found else span_of(parts)


def _handles(part: Node, *, is_all: bool) -> Iterator[Handle]:
    match part:
        case Comparison(operator="=", left=Column() | Header() | Payload() as source, right=Literal() as literal):
            choices: tuple[Literal, ...] = (literal,)
        case Comparison(operator="=", left=Literal() as literal, right=Column() | Header() | Payload() as source):
            choices = (literal,)
        case Membership(operand=Column() | Header() | Payload() as source, choices=choices):
            pass
        case _:
            return
    kinds = {choice.kind for choice in choices}
    if len(kinds) == 1 and _fits(source, kind := kinds.pop()):
        yield Handle(source, kind, tuple(choice.value for choice in choices), is_all)


def _fits(source: Source, kind: Kind) -> bool:
    """Whether values can be looked up: texts everywhere that there are texts, numbers only where they are numbers."""
    if isinstance(source, Column) and source.name != "key":
        return False
    return kind is Kind.TEXT or (kind is Kind.NUMBER and isinstance(source, Payload))
