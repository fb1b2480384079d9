"""What makes a schema invalid, or incompatible with another."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

DEPTH_MAX: Final = 200
"""How deep a schema may be nested."""


class InvalidSchema(Exception):
    """The text is not a schema of its type."""


class Difference(NamedTuple):
    """One reason why a reader's schema cannot read what a writer's schema wrote.

    In the description, `{reader}` and `{writer}` stand for "new" and "old", whichever each of them is.
    """

    kind: str
    description: str
    detail: str = ""

    def render(self, *, reader_is_new: bool) -> str:
        """Write the reason as clients see it."""
        reader, writer = ("new", "old") if reader_is_new else ("old", "new")
        text = self.description.replace("{reader}", reader).replace("{writer}", writer)
        if self.detail:
            return f"{{errorType:'{self.kind}', description:'{text}', additionalInfo:'{self.detail}'}}"
        return f'{{errorType:"{self.kind}", description:"{text}"}}'


def read_json(text: str) -> Any:
    """Decode JSON, or raise `InvalidSchema`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSchema(f"the schema is not JSON: {error}") from error


def write_json(value: Any, *, is_sorted: bool = False) -> str:
    """Encode JSON compactly."""
    return msgspec.json.encode(value, order="sorted" if is_sorted else None).decode()
