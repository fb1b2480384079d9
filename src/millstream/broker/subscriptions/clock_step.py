"""What follows for a queue when the time of day is put back: what was to last for a while lasts no longer for that.

A clock that ran ahead may have given leases that end hours from now. A step forward needs nothing: it looks as if time
had passed, and leases end early.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millstream.broker.subscriptions.delta import Delta, DeltaKind
from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.message_state import LEASED

CLOCK_STEP_MS: Final = 1000
"""Clocks that are put back by less are left alone: everything ends late by no more than this."""


def put_back(fold: Fold, by_ms: int, now_ms: int) -> Iterator[Delta]:
    """Have leases and waits for a retry end as much earlier; a message that has a time of its own waits for it."""
    for run in fold.waiting_runs(0, fold.window.end):
        due_ms = run.due_ms - by_ms
        if run.state == LEASED:
            worker = fold.workers.texts[run.holder]
            yield Delta(DeltaKind.EXTENDED, run.first, run.last, run.attempt, due_ms, worker, now_ms)
        elif run.attempt:
            yield Delta(DeltaKind.PARKED, run.first, run.last, run.attempt, due_ms, "", now_ms)
