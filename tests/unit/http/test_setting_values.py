"""Settings in JSON bodies."""

from __future__ import annotations

import pytest

from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import changes_of, texts_of


def test_numbers_and_booleans_are_converted_to_setting_texts() -> None:
    values = {"every.ms": 1000, "max": 1e3, "share": 0.5, "compact": False, "format": "delta"}
    assert texts_of(values) == {
        "every.ms": "1000",
        "max": "1000",
        "share": "0.5",
        "compact": "false",
        "format": "delta",
    }
    assert changes_of({"compact": True, "lake": None}) == {"compact": "true", "lake": None}


@pytest.mark.parametrize(("value", "kind"), [([1], "a list"), ({}, "an object"), (None, "null")])
def test_an_invalid_value_is_named(value: object, kind: str) -> None:
    with pytest.raises(Refused, match=f"the setting 'every.ms' must be a string, a number, true or false, not {kind}"):
        texts_of({"every.ms": value})
