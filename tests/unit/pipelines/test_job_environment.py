"""The requirements of a job become a lock, without work on the event loop for the folder that pip needs."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream.core.scratch import PREFIX
from millstream.pipelines.runtime import job_environment


async def test_the_folder_of_a_resolution_is_created_and_removed_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, remove, threads = tempfile.mkdtemp, shutil.rmtree, []

    def make_noted(*, prefix: str) -> str:
        threads.append(threading.current_thread())
        return make(prefix=prefix)

    def remove_noted(folder: str, *, ignore_errors: bool) -> None:
        threads.append(threading.current_thread())
        remove(folder, ignore_errors=ignore_errors)

    async def pip(arguments: Sequence[str]) -> None:
        found = {
            "metadata": {"name": "Some.Package", "version": "1.2"},
            "download_info": {"archive_info": {"hashes": {"sha256": "ab12"}}},
        }
        report = Path(arguments[arguments.index("--report") + 1])
        report.write_text(json.dumps({"install": [found]}), encoding="utf-8")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", make_noted)
    monkeypatch.setattr(shutil, "rmtree", remove_noted)
    monkeypatch.setattr(job_environment, "_pip", pip)
    (tmp_path / f"{PREFIX}left").mkdir()
    assert await job_environment.resolve("some-package>=1\n") == "some-package==1.2 --hash=sha256:ab12\n"
    assert list(tmp_path.iterdir()) == []
    assert len(threads) == 3
    assert threading.current_thread() not in threads
