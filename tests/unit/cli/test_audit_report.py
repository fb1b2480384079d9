"""What `millstream audit` prints for people."""

from __future__ import annotations

import pytest

from millstream.cli.audit import _print_report
from millstream.pipelines.jobs.ledger.audit import COUNTS, AuditReport


def test_deleted_subscriptions_of_a_name_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"subscription": "billing", "topic": "orders", **dict.fromkeys(COUNTS, 0)}
    report = AuditReport(rows=[{**row, "deleted": True}, {**row, "deleted": False}])
    _print_report(report, [], 0, adds_up=True)
    _head, deleted, live, *_ = capsys.readouterr().out.splitlines()
    assert deleted.startswith("billing (deleted)  orders")
    assert live.startswith("billing            orders")
