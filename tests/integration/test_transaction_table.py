"""Every state of a transactional id × every transactional request, answered as Apache Kafka answers."""

from __future__ import annotations

from pathlib import Path

from conformance.transaction_table import ACCEPTED, differences, millstream_answers, recorded


def test_answers_are_those_of_kafka(tmp_path: Path) -> None:
    answers, expected = millstream_answers(tmp_path / "data"), recorded()
    differing = differences(expected, answers)
    assert not differing, "\n".join(differing)
    # What differs on purpose still does; else there is nothing to accept.
    assert all(answers[pair] != expected[pair] for pair in ACCEPTED)
