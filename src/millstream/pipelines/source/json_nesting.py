"""The nesting depth of JSON texts, checked before parsing: parsers recurse for every level.

Arrow's compiled parser overflows its stack on a payload of a hundred thousand brackets, which ends the process;
Python's gives up at a depth that depends on the caller.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NESTING_MAX: Final = 200
"""The most levels of objects and arrays."""

_STRINGS: Final = r'(?s)"(?:[^"\\]|\\.)*"'
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def is_text_too_deep(text: str) -> bool:
    """Whether a text is nested too deeply to be parsed."""
    return text.count("{") + text.count("[") > NESTING_MAX and is_too_deep(pa.array([text], pa.string()))


def is_too_deep(texts: pa.Array) -> bool:
    """Whether any of the texts is nested too deeply to be parsed."""
    opened = pc.add(pc.count_substring(texts, "{"), pc.count_substring(texts, "["))
    # Hardly any text has enough brackets to need a closer look.
    many = texts.filter(pc.greater(opened, NESTING_MAX))
    if not len(many):
        return False
    # Brackets within strings do not count.
    return any(_depth(text) > NESTING_MAX for text in pc.replace_substring_regex(many, _STRINGS, ""))


def _depth(text: pa.StringScalar) -> int:
    """Return the depth of a text without strings; exact as far as a parser gets."""
    steps = _STEPS[np.frombuffer(text.as_buffer(), np.uint8)]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))
