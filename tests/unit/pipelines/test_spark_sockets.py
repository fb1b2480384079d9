"""Spark's temporary files are removed with the process that has the session, or by the next one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.core import scratch
from millstream.core.scratch import PREFIX, remove_left_behind, temporary_folder, temporary_folder_async
from millstream.pipelines.runtime import spark_session


def test_local_sockets_are_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert all(Path(settings["spark.local.dir"]).is_dir() for settings in given)
    assert [Path(folder).is_dir() for folder in folders[:2] if folder] == [True, True]
    spark_session.remove_scratch()
    assert [Path(folder).is_dir() for folder in folders[:2] if folder] == [False, False]


def test_a_folder_with_a_long_name_has_no_sockets() -> None:
    folder = "/tmp/" + "deep" * 20
    settings = spark_session._in_scratch("", folder)
    assert settings["spark.python.unix.domain.socket.enabled"] == "false"
    assert settings["spark.local.dir"] == folder


def test_leftovers_of_a_killed_process_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{PREFIX}left"
    folder.joinpath("blockmgr").mkdir(parents=True)
    mine = Path(spark_session.make_scratch())
    assert not folder.exists()
    # The folder of a live process is kept.
    other = Path(spark_session.make_scratch())
    assert mine.is_dir()
    assert other.is_dir()
    spark_session.remove_scratch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_java_writes_to_during_its_removal_is_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, late = shutil.rmtree, ["first", "second"]

    def remove_while_written_to(folder: str, *, ignore_errors: bool) -> None:
        remove(folder, ignore_errors=ignore_errors)
        if late:
            Path(folder, late.pop()).mkdir(parents=True)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}left").mkdir()
    monkeypatch.setattr(shutil, "rmtree", remove_while_written_to)
    remove_left_behind(patience_s=5.0)
    assert (late, list(tmp_path.iterdir())) == ([], [])


def test_an_irremovable_leftover_is_tried_once_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, tried = shutil.rmtree, []

    def remove_some(folder: str, *, ignore_errors: bool) -> None:
        tried.append(Path(folder).name)
        if "stays" not in Path(folder).name:
            remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "rmtree", remove_some)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(scratch, "REMOVED_MAX", 2)
    stays = {f"{PREFIX}stays-{number}" for number in range(5)}
    for name in (*stays, *(f"{PREFIX}goes-{number}" for number in range(3))):
        (tmp_path / name).mkdir()
    with temporary_folder() as held:
        assert sum("goes" in path.name for path in tmp_path.iterdir()) == 1
        remove_left_behind()
        assert {path.name for path in tmp_path.iterdir()} == {*stays, Path(held).name}
        tried.clear()
        remove_left_behind()
        assert sorted(tried) == sorted(stays)


async def test_on_an_event_loop_folders_are_created_and_removed_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, remove, threads = tempfile.mkdtemp, shutil.rmtree, []

    def make_noted(*, prefix: str) -> str:
        threads.append(threading.current_thread())
        return make(prefix=prefix)

    def remove_noted(folder: str, *, ignore_errors: bool) -> None:
        threads.append(threading.current_thread())
        remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", make_noted)
    monkeypatch.setattr(shutil, "rmtree", remove_noted)
    (tmp_path / f"{PREFIX}left").mkdir()
    async with temporary_folder_async() as folder:
        assert list(tmp_path.iterdir()) == [Path(folder)]
        assert Path(folder).stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []
    assert len(threads) == 3
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_task_cancelled_while_its_folder_is_created_leaves_none(
    cancellations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, remove = tempfile.mkdtemp, shutil.rmtree
    began, may_go_on, removed = threading.Event(), threading.Event(), threading.Event()

    def make_late(*, prefix: str) -> str:
        began.set()
        may_go_on.wait(10)
        return make(prefix=prefix)

    def remove_noted(folder: str, *, ignore_errors: bool) -> None:
        remove(folder, ignore_errors=ignore_errors)
        removed.set()

    async def use() -> None:
        async with temporary_folder_async():
            pytest.fail("it was cancelled before")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", make_late)
    monkeypatch.setattr(shutil, "rmtree", remove_noted)
    using = asyncio.create_task(use())
    assert await asyncio.to_thread(began.wait, 10)
    for _ in range(cancellations):
        using.cancel()
        await asyncio.sleep(0.01)
    assert using.done() == (cancellations == 2)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert await asyncio.to_thread(removed.wait, 10)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_command_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import os", "from millstream.core.scratch import temporary_folder", "with temporary_folder() as made:"]
    lines += ["    open(f'{made}/token', 'x').close()", "    os.kill(os.getpid(), 9)"]
    killed = subprocess.run([sys.executable, "-c", "\n".join(lines)], env={"TMPDIR": str(tmp_path)}, check=False)
    assert killed.returncode == -9
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unrelated = tmp_path / "millstream-demo"
    unrelated.mkdir()
    with temporary_folder() as folder:
        assert not path.exists()
        assert Path(folder).stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir()
    remove_left_behind()
    assert sorted(tmp_path.iterdir()) == [unrelated, theirs]


def test_a_failed_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Any:
        raise OSError("no Java")

    monkeypatch.setattr(spark_session, "session", failing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    with pytest.raises(spark_session.SparkFailed, match="no Java"):
        spark_session.open_session("", memory="1g", settings={}, log=str(tmp_path / "spark.log"))
    assert list((tmp_path / "temp").iterdir()) == []
