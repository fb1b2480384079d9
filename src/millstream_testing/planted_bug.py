"""Bugs that are planted to show that a simulation finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A replacement of code, and the kinds of faults that expose it soon."""

    name: str
    patches: tuple[tuple[object, str, Any], ...]
    faults: tuple[str, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Apply the bug within the context."""
        with ExitStack() as stack:
            for target, attribute, wrong in self.patches:
                stack.enter_context(mock.patch.object(target, attribute, wrong))
            yield
