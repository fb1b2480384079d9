"""The output of `pipeline describe` for a failed pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.cli.pipeline import describe


def test_an_error_of_several_lines_shows_its_location(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: dict[str, Any] = {
        "pipeline_id": "1",
        "group": "pipeline-broken",
        "kind": "transform",
        "state": "parked",
        "parked": "a column is unknown\nline 1, column 8:\n  SELECT totl\n         ^\x1b[2J",
        "tables": [],
        "report": None,
        "owner": None,
        "settings": {},
        "overrides": {},
        "notes": [],
    }
    monkeypatch.setattr("millstream.cli.pipeline.call_broker", lambda *_: reported)
    describe("broken")
    assert capsys.readouterr().out.splitlines()[3:7] == [
        "parked      a column is unknown",
        "            line 1, column 8:",
        "              SELECT totl",
        "                     ^\\x1b[2J",
    ]


def test_numbers_are_aligned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "node": 1,
        "rows": 15,
        "batches": 1,
        "rows_per_s": 3.0,
        "lag": 0,
        "restarts": 0,
        "counts": {"files": 1, "quarantined": 15},
        "last_error": "",
    }
    table = {"topic": "orders", "location": "/lake/orders", "read": "deltalake.DeltaTable('/lake/orders').to_pandas()"}
    reported: dict[str, Any] = {
        "pipeline_id": "1",
        "group": "pipeline-p",
        "kind": "land",
        "state": "running",
        "parked": "",
        "tables": [table] * 21,
        "report": report,
        "owner": None,
        "settings": {},
        "overrides": {},
        "notes": [],
    }
    monkeypatch.setattr("millstream.cli.pipeline.call_broker", lambda *_: reported)
    describe("p")
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "tables       /lake/orders"
    assert lines[23] == "             and 1 more"
    assert lines[24] == "read by      deltalake.DeltaTable('/lake/orders').to_pandas()"
    assert "rows         15 in 1 batch, 3 a second" in lines
    assert "quarantined  15" in lines
