"""Explains in JSON's terms why a JSON document or the parameters of a request are invalid.

msgspec's own messages name Python types, and paths such as `$.max`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_PLACE: Final = re.compile(r"(?P<problem>.*?)(?: - at `(?:key in )?\$\.?(?P<place>.*?)`)?", re.DOTALL)
_FIELD: Final = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_EXPECTED: Final = re.compile(r"Expected `(?P<kinds>[a-z| ]+)`(?:, got `(?P<given>\w+)`| (?P<bound>.+))?", re.DOTALL)
_BOUND: Final = re.compile(r"(?P<length>of length )?(?P<order>[<>]=?) (?P<number>\S+)")
_KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}
_ORDERS: Final = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}


def plain_problem(error: Exception, *, is_text: bool = False, fields: Sequence[str] = ()) -> str:
    """Return the problem and its field; `is_text` if every value was given as text, as in a query string.

    `fields` are those of the whole object, for someone who named another one.
    """
    match = _PLACE.fullmatch(str(error))
    if match is None:
        return str(error)
    problem, place = match["problem"], match["place"] or ""
    if field := _FIELD.fullmatch(problem):
        name = f"{place}.{field[2]}" if place else field[2]
        noun = "parameter" if is_text else "field"
        if field[1].startswith("missing"):
            return f"the {noun} `{name}` is missing"
        known = "" if place or not fields else f"; the {noun}s are {', '.join(f'`{field}`' for field in fields)}"
        return f"there is no {noun} `{name}`{known}"
    what = f"`{place}`" if place else "it"
    if expected := _EXPECTED.fullmatch(problem):
        return f"{what} must be {_expectation(expected, is_text=is_text)}"
    if problem.startswith("Invalid enum value "):
        return f"{what} cannot be {problem.removeprefix('Invalid enum value ')}"
    return f"{what}: {problem}" if place else problem


def _expectation(expected: re.Match[str], *, is_text: bool) -> str:
    kinds = " or ".join(
        _KINDS.get(kind, kind) for kind in expected["kinds"].split(" | ") if not (is_text and kind == "null")
    )
    if expected["given"] and not is_text:
        return f"{kinds}, not {_KINDS.get(expected['given'], expected['given'])}"
    if bound := _BOUND.fullmatch(expected["bound"] or ""):
        unit = "" if not bound["length"] else " item" if expected["kinds"] == "array" else " character"
        unit += "s" if unit and bound["number"] != "1" else ""
        joined = "with" if unit else "of"
        return f"{kinds} {joined} {_ORDERS[bound['order']]} {bound['number']}{unit}"
    return f"{kinds} {expected['bound']}" if expected["bound"] else kinds
