"""The page for readers of the lake: its recipes run as they stand there, and it names every column."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.lake.columns import QUARANTINE, RAW, extended
from millstream.lake.opening import open_table
from millstream.testing.lake_rows import TOPIC, land, rows, write

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "lake.md").read_text(encoding="utf-8")
WIDER = extended(RAW, pa.schema([("amount", pa.int64())]))
RECIPES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables, under the names that the page has."""
    folder = tmp_path_factory.mktemp("lake")
    for name, format in (("orders", "delta"), ("events", "parquet")):
        table = open_table(str(folder / name), format=format)
        assert land(table, 0, 0, 18)
        more = write(table, [rows(0, [18, 19], WIDER, amount=[1, 2])], WIDER)
        assert table.commit(more, {(TOPIC, 0): (18, 20)}, schema=WIDER)
    return folder


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipes_run_as_they_stand_there(lake: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(RECIPES[number].replace("/lake/", f"{lake}/"), f"recipe {number}", "exec"), {})
    assert re.search(r"\b(19|20)\b", capsys.readouterr().out)


def test_every_column_is_named() -> None:
    table, quarantine = PAGE.split("## Layout", 1)[1].split("## Reading", 1)[0].split("The quarantine has", 1)
    assert set(RAW.names) <= set(re.findall(r"`(\w+)`", table))
    assert re.findall(r"`(\w+)`", quarantine.split(".", 1)[0]) == QUARANTINE.names
