"""Which etcd `cluster up` starts, and the warning about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli.cluster_up import etcd_warning, find_etcd
from millstream.cli.local_process import LocalServerFailed


def etcd(folder: Path, version: str) -> Path:
    program = folder / "etcd"
    program.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.5"])
def test_a_version_that_may_lose_data_is_warned_about(tmp_path: Path, version: str) -> None:
    warning = etcd_warning(etcd(tmp_path, version))
    assert warning is not None
    assert f"etcd {version}" in warning
    assert "etcd 3.5.6 or later on the PATH, or pass it with --etcd-binary" in warning


@pytest.mark.parametrize("version", ["3.4.36", "3.5.6", "3.5.21", "3.6.0", "4.0.0"])
def test_other_versions_get_no_warning(tmp_path: Path, version: str) -> None:
    assert etcd_warning(etcd(tmp_path, version)) is None


@pytest.mark.parametrize("version", ["", "soon"])
def test_a_program_that_reports_no_version_is_not_started(tmp_path: Path, version: str) -> None:
    with pytest.raises(LocalServerFailed, match="is not etcd"):
        etcd_warning(etcd(tmp_path, version))


def test_the_given_path_precedes_the_search_path_and_that_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert etcd_warning(find_etcd()) is not None
    (tmp_path / "path").mkdir()
    (tmp_path / "given").mkdir()
    on_path, given = etcd(tmp_path / "path", "3.5.21"), etcd(tmp_path / "given", "3.6.0")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_etcd() == on_path
    assert find_etcd(str(given)) == given
    with pytest.raises(LocalServerFailed, match="--etcd-binary"):
        find_etcd(str(tmp_path / "nothing"))
