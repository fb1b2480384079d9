"""Settings in JSON bodies: strings, and numbers and booleans written as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from millstream.gateway.api.problem import invalid

_KINDS: Final = ("string", "number", "boolean")

GivenSettings = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"additionalProperties": {"type": list(_KINDS)}}),
]
ChangedSettings = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"additionalProperties": {"type": [*_KINDS, "null"]}}),
]


def texts_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Convert settings to text; raise `Refused` that names the one that does not fit."""
    return {name: _text(name, value, "a string, a number, true or false") for name, value in given.items()}


def changes_of(given: Mapping[str, Any]) -> dict[str, str | None]:
    """Convert changes of settings; null resets one to its default."""
    kinds = "a string, a number, true, false or null"
    return {name: None if value is None else _text(name, value, kinds) for name, value in given.items()}


def _text(name: str, value: Any, kinds: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float):
        return str(value)
    kind = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "null"
    raise invalid(f"the setting {name!r} must be {kinds}, not {kind}")
