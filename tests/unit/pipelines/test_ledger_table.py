"""A damaged log of the ledger's table is named, commit by commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.pipelines.jobs.ledger.table import DamagedLedger, LedgerTable, ledger_storage

COMMITS = 4


@pytest.mark.parametrize(
    ("version", "is_cut", "kind"),
    [(0, False, "missing"), (2, False, "missing"), (2, True, "broken"), (COMMITS, True, "broken")],
)
def test_a_missing_or_truncated_commit_is_named(tmp_path: Path, version: int, is_cut: bool, kind: str) -> None:
    storage = ledger_storage(str(tmp_path))
    table = LedgerTable(storage)
    for number in range(COMMITS):
        assert table.commit([], {("1", 0): (number, number + 1)})
    assert table.verify() == []
    commit = tmp_path / "__ledger" / "_delta_log" / f"{version:020}.json"
    if is_cut:
        commit.write_bytes(commit.read_bytes()[:-20])
    else:
        commit.unlink()
    with pytest.raises(DamagedLedger, match=f"{version:020}.json: the commit") as caught:
        LedgerTable(storage).verify()
    assert [(damage.kind, Path(damage.path).name) for damage in caught.value.damage] == [(kind, commit.name)]
