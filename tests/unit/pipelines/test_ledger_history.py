"""The history of a message, completed from the ledger's table."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from millstream.pipelines.jobs.ledger.history import _completed, _deleted_subscription

_EMPTY: dict[str, Any] = dict.fromkeys(
    ("attempt", "worker", "until", "reason", "leader_epoch", "letter_topic", "letter_partition", "letter_offset")
)


def _life(*events: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    moment = datetime(2026, 11, 16, tzinfo=UTC)
    row = {**_EMPTY, "subscription": "billing", "timestamp": moment, "offset": 0, "end_offset": 1}
    return [{**row, "kind": kind, "sequence": number, **facts} for number, (kind, facts) in enumerate(events)]


_ACCEPTED = ("accepted", {"worker": "one", "attempt": 1})
_FORWARD = ("sought", {"offset": 4, "end_offset": 1})
_BACK = ("sought", {"offset": 0, "end_offset": 4})
_REJECTED = ("rejecting", {"worker": "one", "reason": "not an order"})
_LETTER = ("dead_lettered", {"letter_topic": "dead", "letter_partition": 0, "letter_offset": 7})


@pytest.mark.parametrize(
    ("events", "state", "worker"),
    [
        ([_ACCEPTED, _FORWARD], "accepted", "one"),
        ([_ACCEPTED, ("deleted", {})], "accepted", "one"),
        ([_REJECTED, _LETTER, _FORWARD], "dead-lettered", "one"),
        ([_ACCEPTED, _BACK, _FORWARD], "skipped", ""),
        ([_REJECTED, _LETTER, ("revived", {}), _FORWARD], "skipped", ""),
    ],
)
def test_a_seek_past_a_message_does_not_change_its_outcome(
    events: list[tuple[str, dict[str, Any]]], state: str, worker: str
) -> None:
    life = _life(*events)
    completion = _completed(_deleted_subscription("1", life), life, 0)
    assert (completion["state"], completion["worker"]) == (state, worker)
    assert (completion["dead_letter"] is not None) == (state == "dead-lettered")


def test_an_outcome_forgotten_by_the_broker_is_corrected() -> None:
    life = _life(_ACCEPTED, _FORWARD)
    live = {
        **_deleted_subscription("1", life),
        "state": "skipped",
        "ended_ms": 5,
        "reason": "the subscription was moved to offset 4",
    }
    completion = _completed(live, life, 0)
    assert (completion["state"], completion["reason"]) == ("accepted", "")
