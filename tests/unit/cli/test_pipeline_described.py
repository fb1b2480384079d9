"""What `pipeline describe` shows of a pipeline that failed."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.cli.pipeline import describe


def test_an_error_of_several_lines_points_at_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = {
        "pipeline_id": "1",
        "group": "pipeline-broken",
        "kind": "transform",
        "state": "parked",
        "parked": "a column is unknown\nline 1, column 8:\n  SELECT totl\n         ^\x1b[2J",
        "report": None,
        "settings": {},
        "overrides": {},
    }
    monkeypatch.setattr("millstream.cli.pipeline.ask_pipelines", lambda *_: [told])
    describe("broken")
    assert capsys.readouterr().out.splitlines()[3:7] == [
        "parked      a column is unknown",
        "            line 1, column 8:",
        "              SELECT totl",
        "                     ^\\x1b[2J",
    ]
