"""What the annotations of kio's message classes say about a field."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin


def unwrapped(field_type: Any) -> tuple[Any, bool]:
    """Split `X | None` into `(X, True)`, and leave `X` as `(X, False)`."""
    if get_origin(field_type) is UnionType:
        return next(part for part in get_args(field_type) if part is not NoneType), True
    return field_type, False


def item_of(kind: Any) -> Any:
    """The type of the items of an array, or None when it is no array."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def is_entity(kind: Any) -> bool:
    """Whether a type is a message nested in another."""
    return is_dataclass(kind)
