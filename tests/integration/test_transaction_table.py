"""Every state of a transactional id with every transactional request gets the response of Apache Kafka."""

from __future__ import annotations

from pathlib import Path

from conformance.transaction_table import RECORDED, millstream_responses


def test_responses_are_those_of_kafka(tmp_path: Path) -> None:
    responses, expected = millstream_responses(tmp_path / "data"), RECORDED.recorded()
    differing = RECORDED.differences(expected, responses)
    assert not differing, "\n".join(differing)
    # The intended differences still exist; otherwise they need no exception.
    assert all(responses[pair] != expected[pair] for pair in RECORDED.accepted)
