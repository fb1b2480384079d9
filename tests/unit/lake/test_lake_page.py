"""The documentation of the lake names every column."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.pipelines.lake.columns import QUARANTINE, RAW

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "lake.md").read_text(encoding="utf-8")


def test_every_column_is_named() -> None:
    table, quarantine = PAGE.split("## Layout", 1)[1].split("## Reading", 1)[0].split("The quarantine has", 1)
    assert set(RAW.names) <= set(re.findall(r"`(\w+)`", table))
    assert re.findall(r"`(\w+)`", quarantine.split(".", 1)[0]) == QUARANTINE.names
