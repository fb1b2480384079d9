"""Checks of the SDK's arguments, with errors that name the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millstream.core.errors import InvalidRequest


def check_integer(name: str, value: object, least: int = 0, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require an integer; neither a string of digits nor True is one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_number(name: str, value: object, least: float = 0.0, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise error(f"{name} must be a number of at least {least:g}, not {value!r}")


def check_pair(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require a minimum and a maximum, in seconds."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise error(f"{name} must be a number of seconds, or a pair of minimum and maximum, not {value!r}")
    for number in value:
        check_number(name, number, error=error)


def check_text(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require a string."""
    if not isinstance(value, str):
        raise error(f"{name} must be a string, not {value!r}")


def check_bool(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require True or False; a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, not {value!r}")
