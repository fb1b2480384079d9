"""The results so far, by line and server, and the numbers derived from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.subject import Measured, Numbers, in_order


@dataclass(slots=True)
class Line:
    """One line in one direction: the rounds of each server, in the order in which they were measured."""

    case: Case
    direction: str
    rounds: dict[str, list[Numbers]] = field(default_factory=dict)
    durability: dict[str, str] = field(default_factory=dict)

    def value(self, subject: str, number: str) -> float | None:
        """Return the median of one number over the rounds; None if it was not measured."""
        values = [measured[number] for measured in self.rounds.get(subject, []) if number in measured]
        return median(values) if values else None

    def peak(self, subject: str, number: str) -> float | None:
        """Return the maximum of one number over the rounds."""
        return max((measured[number] for measured in self.rounds.get(subject, []) if number in measured), default=None)

    def ratio(self, number: str, subject: str, other: str) -> float | None:
        """Return the ratio of one number to that of another server, as the median over the rounds.

        The machine may be faster in one round than in another, but the servers of a round are measured close together.
        If a server missed a round, the medians are compared.
        """
        mine, theirs = self.value(subject, number), self.value(other, number)
        if mine is None or not theirs:
            return None
        pairs = [
            (ours[number], theirs[number])
            for ours, theirs in zip(self.rounds[subject], self.rounds[other], strict=False)
        ]
        if len(self.rounds[subject]) != len(self.rounds[other]) or not all(two for _, two in pairs):
            return mine / theirs
        return median(numerator / denominator for numerator, denominator in pairs)


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    """Replace infinite values with None, since JSON cannot represent them."""
    return {number: None if value in (None, math.inf) else value for number, value in numbers.items()}


class Results:
    """Every line of a run."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Line] = {}
        self.failures: list[str] = []

    def add(self, case: Case, subject: str, durability: str, measured: Measured) -> None:
        for direction, numbers in measured.items():
            line = self._lines.setdefault((case.name, direction), Line(case, direction))
            line.rounds.setdefault(subject, []).append(numbers)
            line.durability[subject] = durability

    def lines(self, *directions: str) -> Iterator[Line]:
        """Yield the lines in some directions, or all of them."""
        return (line for line in self._lines.values() if not directions or line.direction in directions)

    def subjects(self, *directions: str) -> list[str]:
        """Return the servers of these lines, in display order."""
        return in_order(name for line in self.lines(*directions) for name in line.rounds)

    def extreme(self, pick: Callable[[Line], float | None], *directions: str, least: bool) -> tuple[float, Line] | None:
        """Return the minimum or maximum of a number over lines, and its line."""
        values = [(value, line) for line in self.lines(*directions) if (value := pick(line)) is not None]
        choose = min if least else max
        return choose(values, key=lambda pair: pair[0]) if values else None

    def as_json(self) -> list[dict[str, Any]]:
        """Return all results, raw and as medians."""
        return [
            {
                "line": line.case.name,
                "direction": line.direction,
                "case": asdict(line.case),
                "subjects": {
                    name: {
                        "durability": line.durability[name],
                        "median": _finite({number: line.value(name, number) for number in rounds[0]}),
                        "rounds": [_finite(numbers) for numbers in rounds],
                    }
                    for name, rounds in line.rounds.items()
                },
            }
            for line in self.lines()
        ]

    @classmethod
    def from_json(cls, lines: list[dict[str, Any]]) -> Results:
        """Load the results of another run."""
        results = cls()
        for line in lines:
            for name, rounds_of_subject in line["subjects"].items():
                for written in rounds_of_subject["rounds"]:
                    numbers = {number: math.inf if value is None else value for number, value in written.items()}
                    results.add(
                        Case(**line["case"]), name, rounds_of_subject["durability"], {line["direction"]: numbers}
                    )
        return results
