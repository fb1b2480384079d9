"""A run overtaken between its commit and its quarantine refers to its own commit, not to the latest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable
from millstream_testing.lake_rows import TOPIC, delta_rows, once, rows, write, write_quarantine


def test_an_intermediate_commit_hides_no_quarantined_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.at(str(tmp_path / "orders"))
    mine, other = LakeTable(storage), LakeTable(storage)
    commit = DeltaLog.commit

    def overtaken(log: DeltaLog, *arguments: Any, **named: Any) -> bool:
        done = commit(log, *arguments, **named)
        if log is mine.log:
            # As compactions commit: without any reference to the quarantine.
            other.log.refresh()
            assert commit(other.log, [], {})
        return done

    monkeypatch.setattr(DeltaLog, "commit", overtaken)
    files, refused = write(mine, [rows(0, range(10))]), write_quarantine(mine, 0, range(10, 15))
    assert mine.commit(files, {(TOPIC, 0): (0, 15)}, schema=RAW, quarantined=refused)
    assert delta_rows(storage.suffixed(QUARANTINE_SUFFIX)) == once(0, range(10, 15))
