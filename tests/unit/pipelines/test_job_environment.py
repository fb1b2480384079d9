"""The requirements of a job become a lock file; pip's folder is managed off the event loop."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from millstream.core.errors import InvalidSetting
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
        package = {
            "metadata": {"name": "Some.Package", "version": "1.2"},
            "download_info": {"archive_info": {"hashes": {"sha256": "ab12"}}},
        }
        report = Path(arguments[arguments.index("--report") + 1])
        report.write_text(json.dumps({"install": [package]}), encoding="utf-8")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", make_noted)
    monkeypatch.setattr(shutil, "rmtree", remove_noted)
    monkeypatch.setattr(job_environment, "_pip", pip)
    (tmp_path / f"{PREFIX}left").mkdir()
    assert await job_environment.resolve("some-package>=1\n") == "some-package==1.2 --hash=sha256:ab12\n"
    assert list(tmp_path.iterdir()) == []
    assert len(threads) == 3
    assert threading.current_thread() not in threads


def make_wheel(folder: Path, name: str, number: str, *needed: str) -> None:
    about = f"{name}-{number}.dist-info"
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in needed)
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{requires}")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize(
    ("requirement", "named"),
    [("msgspec==0.0.1", "requirements name msgspec==0.0.1"), ("needy", "needy 1.0 depends on msgspec<0.0.2")],
)
async def test_a_conflict_names_both_requirements(tmp_path: Path, requirement: str, named: str) -> None:
    make_wheel(tmp_path, "msgspec", "0.0.1")
    make_wheel(tmp_path, "msgspec", version("msgspec"))
    make_wheel(tmp_path, "needy", "1.0", "msgspec<0.0.2")
    with pytest.raises(InvalidSetting) as refused:
        await job_environment.resolve(f"--no-index\n--find-links {tmp_path}\n{requirement}\n")
    note = f"Millstream on this node uses msgspec=={version('msgspec')}, which jobs share"
    assert str(refused.value) == f"the requirements conflict: {named}, and {note}"
