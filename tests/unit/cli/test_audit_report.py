"""The human-readable output of `millstream audit`."""

from __future__ import annotations

import pytest

from millstream.cli.audit import _print_report
from millstream.pipelines.jobs.ledger.audit import COUNTS, AuditReport
from millstream.pipelines.jobs.ledger.table import Damage


def test_deleted_subscriptions_of_the_same_name_are_distinguished(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"subscription": "billing", "topic": "orders", **dict.fromkeys(COUNTS, 0)}
    report = AuditReport(rows=[{**row, "deleted": True}, {**row, "deleted": False}])
    _print_report(report, [], 0, adds_up=True)
    _head, deleted, live, *_ = capsys.readouterr().out.splitlines()
    assert deleted.startswith("billing (deleted)  orders")
    assert live.startswith("billing            orders")


def test_damage_to_the_table_alone_is_not_reported_as_a_wrong_count(capsys: pytest.CaptureFixture[str]) -> None:
    damage = [Damage("missing", "a.parquet", "the file is gone")]
    _print_report(AuditReport(damage=damage), [], 0, adds_up=False)
    named, verdict = capsys.readouterr().out.splitlines()
    assert named == "ledger table, missing: a.parquet: the file is gone"
    assert verdict.startswith("The ledger's table is damaged; its damaged files do not count")
    _print_report(AuditReport(damage=damage, is_counted=False), [], 0, adds_up=False)
    assert "the counts are unknown" in capsys.readouterr().out
