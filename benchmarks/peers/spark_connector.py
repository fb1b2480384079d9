"""Spark's own connector to Kafka as a peer: jars for the JVM, fetched by Maven and kept in a cache folder of the user.

The newest version that is published is taken, whatever the version of Spark is that it is used in; the table names it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Final

from benchmarks.subject import PeerUnavailable

FETCH_S_MAX: Final = 600.0
_POM: Final = Path(__file__).with_name("spark_connector.pom.xml")
_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.7.1:copy-dependencies"
_NEEDED: Final = re.compile(r"(spark-|kafka-clients-|commons-pool2-).*\.jar")
"""The others are part of Spark."""

_CONNECTOR: Final = re.compile(r"spark-sql-kafka-0-10_2\.13-([\d.]+)\.jar")


def fetch() -> list[Path]:
    """The jars that a session needs besides its own; raises `PeerUnavailable` if they cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream-bench"
    jars = cache / f"spark-connector-{zlib.crc32(_POM.read_bytes()):08x}"
    if not jars.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _copy_jars(Path(folder) / "jars")
            if not jars.exists():
                (Path(folder) / "jars").rename(jars)
    return sorted(jar for jar in jars.iterdir() if _NEEDED.fullmatch(jar.name))


def version_of(jars: list[Path]) -> str:
    return next((match[1] for jar in jars if (match := _CONNECTOR.fullmatch(jar.name))), "of unknown version")


def _copy_jars(into: Path) -> None:
    if shutil.which("mvn") is None:
        raise PeerUnavailable("Maven (mvn) is not on the PATH")
    command = ["mvn", "-q", "-B", "-f", str(_POM), _COPY, "-DincludeScope=runtime", f"-DoutputDirectory={into}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=FETCH_S_MAX)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"Maven did not fetch Spark's connector within {FETCH_S_MAX:g} s") from None
    if done.returncode != 0 or not into.exists():
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        raise PeerUnavailable(f"Maven could not fetch Spark's connector: {' '.join(errors[:1])[:300]}")
