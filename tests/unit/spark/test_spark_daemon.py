"""The output of Spark's Python workers when Spark has disconnected."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed")

from millstream.pipelines.source.session import _SETTINGS
from millstream.spark import daemon

IMPORTING = "import millstream.pipelines.source.spark_errors"
FAILING = "raise ValueError('a defect')"


def output_of(module: str, folder: Path, *, code: str) -> str:
    """Start a daemon whose workers run the code, disconnect from one, and return the output."""
    worker = "def main(infile, outfile):\n    infile.read()\n    outfile.write(b'too late')\n"
    (folder / "disconnected.py").write_text(f"{worker}    {code}\n", encoding="utf-8")
    # The daemon imports workers only from PySpark, so they are put beside its own.
    start = (
        f"import pyspark, runpy, sys; pyspark.__path__.append({str(folder)!r}); "
        "sys.argv = ['daemon', 'pyspark.disconnected']; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    with (
        tempfile.TemporaryDirectory() as sockets,  # The path of a socket must be short.
        subprocess.Popen(
            [sys.executable, "-c", start],
            env={
                **os.environ,
                "PYTHON_UNIX_DOMAIN_ENABLED": "true",
                "PYTHON_WORKER_FACTORY_SOCK_DIR": sockets,
                "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        path = process.stdout.read(*struct.unpack("!i", process.stdout.read(4)))
        with socket.socket(socket.AF_UNIX) as spark:
            spark.connect(path)
            forked = os.pidfd_open(*struct.unpack("!i", spark.recv(4, socket.MSG_WAITALL)))
        select.select([forked], [], [])
        os.close(forked)
        process.stdin.close()
        return process.stderr.read().decode()


def test_a_worker_ends_silently_when_spark_has_disconnected(tmp_path: Path) -> None:
    assert output_of(daemon.__name__, tmp_path, code="pass") == ""


def test_a_worker_of_pyspark_ends_silently_once_it_has_imported_the_source(tmp_path: Path) -> None:
    assert output_of("pyspark.daemon", tmp_path, code=IMPORTING) == ""
    assert "BrokenPipeError" in output_of("pyspark.daemon", tmp_path, code="pass")


@pytest.mark.parametrize("module", [daemon.__name__, "pyspark.daemon"])
def test_a_worker_reports_any_other_failure(tmp_path: Path, module: str) -> None:
    assert "ValueError: a defect" in output_of(module, tmp_path, code=f"{IMPORTING}; outfile.raw.close(); {FAILING}")


def test_sessions_use_the_daemon() -> None:
    assert _SETTINGS["spark.python.daemon.module"] == daemon.__name__
