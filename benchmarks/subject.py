"""The interface of a server under measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from benchmarks.cases import Case
from benchmarks.target import Numbers

Measured = dict[str, Numbers]
"""The results of one measurement by direction, such as "produce" and "consume"."""

PRODUCED, CONSUMED = "produce", "consume"


class Subject(ABC):
    """A server that is started once and measured in many lines."""

    name: str
    version: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop what was started."""
        return

    @abstractmethod
    def offers(self, case: Case) -> bool:
        """Whether this server can be measured in this line with the same durability."""

    @abstractmethod
    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure one line once, for about this many seconds in each direction."""

    def durability(self, case: Case) -> str:
        """Describe the durability of an acknowledgement."""
        return case.durability
