"""The history of one message from the ledger's table, for traces of deliveries that the broker no longer has.

`python -m millstream.pipelines.jobs.ledger.history LAKE` completes the trace on standard input, for processes that
should not load the table libraries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, Final

import pyarrow.dataset as ds

from millstream.pipelines.jobs.ledger.table import LedgerTable, ledger_storage

_ENDS: Final = {
    "accepted": "accepted",
    "dead_lettered": "dead-lettered",
    "dropped": "dropped",
    "filtered": "filtered",
    "absent": "absent",
    "retention_cut": "expired",
    "sought": "skipped",
    "deleted": "skipped",
}
_PASSING: Final = frozenset({"sought", "retention_cut", "deleted"})
"""Events that end a message only if no earlier event did."""
_SHOWN: Final = frozenset({*_ENDS, "acquired", "released", "expired", "extended", "rejecting", "revived", "parked"})
_COLUMNS: Final = (
    *("subscription", "subscription_id", "kind", "offset", "end_offset", "timestamp", "attempt", "worker", "until"),
    *("reason", "leader_epoch", "sequence", "row", "state_offset", "published"),
    *("letter_topic", "letter_partition", "letter_offset"),
)
Trace = dict[str, Any]


def add_history(document: Trace, lake: str, *, adds_deleted: bool = True) -> Trace:
    """Complete a trace with the events of the table; with `adds_deleted`, deleted subscriptions are added."""
    table = LedgerTable(ledger_storage(lake))
    rows = _rows(table, document["topic_id"], document["partition"], document["offset"])
    lives: dict[str, list[Trace]] = {}
    for row in rows:
        lives.setdefault(row["subscription_id"], []).append(row)
    live = {subscription["subscription_id"]: subscription for subscription in document["subscriptions"]}
    offset = document["offset"]
    traces = [
        _completed(subscription, lives.get(subscription["subscription_id"], ()), offset)
        for subscription in live.values()
    ]
    for subscription_id, life in lives.items():
        if adds_deleted and subscription_id not in live and any(row["subscription"] for row in life):
            traces.append(_completed(_deleted_subscription(subscription_id, life), life, offset))
    published = [row["published"] for row in rows if row["kind"] == "scanned" and row["published"] is not None]
    if document["published_ms"] is None and published:
        document = {**document, "published_ms": _ms(published[-1]), "published": published[-1].isoformat()}
    return {**document, "subscriptions": sorted(traces, key=lambda trace: str(trace["subscription"]))}


def _rows(table: LedgerTable, topic_id: str, partition: int, offset: int) -> list[Trace]:
    """Return the events about a message, in order; moves of a queue are about all its messages."""
    about = (ds.field("offset") <= offset) & (ds.field("end_offset") > offset)
    moves = ds.field("kind").isin(["sought", "deleted"])
    condition = (ds.field("topic_id") == topic_id) & (ds.field("partition") == partition) & (about | moves)
    rows = [row for batch in table.events(condition, _COLUMNS) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["state_offset"], row["row"] or 0))


def _deleted_subscription(subscription_id: str, life: Iterable[Trace]) -> Trace:
    name = next(row["subscription"] for row in life if row["subscription"])
    return {
        "subscription": name,
        "subscription_id": subscription_id,
        "state": "done",
        "is_final": True,
        "attempts": 0,
        "worker": "",
        "client_id": "",
        "address": "",
        "until_ms": 0,
        "first_delivery_ms": 0,
        "ended_ms": 0,
        "reason": "",
        "dead_letter": None,
        "ledger": True,
        "events": [],
        "is_complete": False,
        "unknown": "the subscription was deleted",
    }


def _end_of(rows: list[Trace], offset: int) -> Trace | None:
    passed: Trace | None = None
    for row in reversed(rows):
        if row["kind"] == "revived" or (row["kind"] == "sought" and row["offset"] <= offset):
            # What was before no longer applies.
            break
        if row["kind"] in _PASSING:
            passed = row
        elif row["kind"] in _ENDS:
            return row
    return passed


def _completed(live: Trace, rows: Iterable[Trace], offset: int) -> Trace:
    """Put the events of the table before those that the broker remembers."""
    shown = [row for row in rows if row["kind"] in _SHOWN]
    if not shown:
        return live
    last = max((row["sequence"] or 0 for row in shown), default=-1)
    newer = [event for event in live["events"] if event["sequence"] > last]
    events = [_event(row) for row in shown] + newer
    done = {**live, "events": events}
    deliveries = [event for event in events if event["kind"] == "acquired"]
    if deliveries and not live["first_delivery_ms"]:
        done["first_delivery_ms"] = deliveries[0]["time_ms"]
    if not live["is_final"]:
        is_complete = live["attempts"] <= len(deliveries)
        return {**done, "is_complete": is_complete, "unknown": "" if is_complete else live["unknown"]}
    end = _end_of(shown, offset)
    # A broker that has forgotten the end knows only that the subscription was moved past the message later.
    is_passed = live["state"] in ("skipped", "expired") and all(event["kind"] in _PASSING for event in newer)
    if end is None or (live["ended_ms"] and (not is_passed or end["kind"] in _PASSING)):
        return {**done, "is_complete": True, "unknown": "" if live["ended_ms"] else live["unknown"]}
    letter = None
    if end["kind"] == "dead_lettered" and end["letter_topic"]:
        letter = {"topic": end["letter_topic"], "partition": end["letter_partition"], "offset": end["letter_offset"]}
    rejected: Trace = {"worker": "", "reason": ""}
    if end["kind"] in ("dead_lettered", "dropped"):
        rejected = next((row for row in reversed(shown) if row["kind"] == "rejecting"), rejected)
    return {
        **done,
        "state": _ENDS[end["kind"]],
        "attempts": end["attempt"] or 0,
        "worker": end["worker"] or rejected["worker"] or "",
        "ended_ms": _ms(end["timestamp"]),
        "reason": end["reason"] or rejected["reason"] or "",
        "dead_letter": letter,
        "is_complete": True,
        "unknown": "",
    }


def _event(row: Trace) -> Trace:
    return {
        "kind": row["kind"],
        "time_ms": _ms(row["timestamp"]),
        "attempt": row["attempt"] or 0,
        "worker": row["worker"] or "",
        "until_ms": 0 if row["until"] is None else _ms(row["until"]),
        "reason": row["reason"] or "",
        "leader_epoch": row["leader_epoch"] or 0,
        "sequence": row["sequence"] or 0,
    }


def _ms(moment: Any) -> int:
    return int(moment.timestamp() * 1000)


if __name__ == "__main__":
    # The caller sees only the subscriptions that it may describe.
    completed = add_history(json.load(sys.stdin), sys.argv[1], adds_deleted=False)
    json.dump(completed, sys.stdout)
