"""The sockets of Spark's Python workers go when the process that has the session does."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.pipelines import spark_session


def test_sockets_on_this_machine_are_in_a_folder_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, str]] = []

    def made(_name: str, *, master: str | None, settings: Mapping[str, str]) -> Any:
        given.append(settings)
        return SimpleNamespace(master=master)

    monkeypatch.setattr(spark_session, "session", made)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    for master in ("", "local[2]", "spark://127.0.0.1:7077"):
        spark_session.open_session(master, memory="1g", settings={}, log=str(tmp_path / "spark.log"))
    folders = [settings.get("spark.python.unix.domain.socket.dir") for settings in given]
    assert folders[2] is None
    assert [Path(folder).is_dir() for folder in folders[:2] if folder] == [True, True]
    spark_session._remove_folders()
    assert [Path(folder).is_dir() for folder in folders[:2] if folder] == [False, False]


def test_a_folder_with_a_long_name_has_no_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert spark_session._sockets_in_a_folder("") == {"spark.python.unix.domain.socket.enabled": "false"}
    assert list(deep.iterdir()) == []


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Any:
        raise OSError("no Java")

    monkeypatch.setattr(spark_session, "session", failing)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with pytest.raises(spark_session.SparkFailed, match="no Java"):
        spark_session.open_session("", memory="1g", settings={}, log=str(tmp_path / "spark.log"))
    assert spark_session._folders == []
