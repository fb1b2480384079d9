"""The Spark session of pipelines: shared fairly by all of them, and silent except for its own log.

Spark's temporary files (blocks, sockets, libraries) go to a scratch folder that belongs to the process: Spark leaves
them behind when it is killed.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from millstream.core.config import NO_CONNECT, SPARK_CONNECT
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.scratch import LockedFolder, create_locked_folder
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.source.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_held: list[LockedFolder] = []


def make_scratch() -> str:
    """Create this process's scratch folder, which exists until `remove_scratch` or the end of the process."""
    folder = create_locked_folder()
    _held.append(folder)
    # Registered before Spark's own handler, so it runs after Java has ended.
    atexit.register(remove_scratch)
    return folder.path


def scratch_folder() -> str:
    """Return this process's scratch folder, which only its user can read."""
    return _held[0].path


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Redirect the temporary files of libraries to a folder: a process that exits at once leaves them behind."""
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def remove_scratch() -> None:
    while _held:
        _held.pop().remove()


DIED: Final = 70
"""The exit code of a driver whose Java has died."""

_CLOSE_S: Final = 4.0
_FOLDER_BYTES_MAX: Final = 60
"""Spark names a socket by a UUID with a few characters around it."""
_LOG_TAIL: Final = 1000
_NO_EXTERNAL_XML: Final = "-Djavax.xml.accessExternalDTD= -Djavax.xml.accessExternalSchema="
"""Otherwise XML in a message could make Java open a file or an address."""
_JAVA_OPTIONS: Final = f"-XX:+ExitOnOutOfMemoryError {_NO_EXTERNAL_XML}"
"""A Java process without memory would fail one pipeline after the other; the broker starts another driver."""
SUBSTITUTION: Final = "spark.sql.variable.substitute"
_SETTINGS: Final = {
    # Spark parses a statement with the settings of the first session.
    SUBSTITUTION: "false",
    "spark.executor.defaultJavaOptions": _NO_EXTERNAL_XML,
    "spark.scheduler.mode": "FAIR",
    # A cancelled task that runs on keeps its slot; on workers its executor is replaced.
    "spark.task.reaper.enabled": "true",
    "spark.task.reaper.killTimeout": "60s",
}
_LOGGING_FILE: Final = "log4j2.properties"
_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
appender.console.name = console
appender.console.type = Console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
"""Java logs errors only. The setting `spark.log.level` comes too late for the warnings of the start, and the class that
serves Python sets a level of its own unless it is given one."""
_closing = threading.Event()


def open_session(
    master: str,
    *,
    memory: str,
    settings: Mapping[str, str],
    log: str | None,
    ends_with_java: bool = False,
    name: str = "millstream-pipelines",
) -> SparkSession:
    """Start Spark; without a master it runs in this process, on all cores but one.

    Java's output goes to the file `log`; that of the previous run is kept next to it. Without one it goes to the output
    of this process. With `ends_with_java` the process ends when Java does.
    """
    if master.startswith(SPARK_CONNECT):
        raise InvalidRequest(NO_CONNECT)
    scratch = make_scratch()
    chosen = {**_SETTINGS, **_in_scratch(master, scratch), "spark.driver.memory": memory, **settings}
    try:
        with open(os.path.join(scratch, _LOGGING_FILE), "w", encoding="utf-8") as file:
            file.write(_LOGGING)
        with nullcontext() if log is None else _written_to(log), temporary_files_in(scratch):
            spark = session(name, master=master or None, settings=chosen)
    except MillstreamError:
        remove_scratch()
        raise
    except Exception as error:
        remove_scratch()
        ending = "" if log is None else f"; {log} ends with: {_tail(log)}"
        raise SparkFailed(f"Spark did not start: {reason_of(error)}{ending}") from error
    if ends_with_java:
        threading.Thread(target=_end_with, args=(_java_of(spark),), name="watch Java", daemon=True).start()
    return spark


class SparkFailed(MillstreamError):
    """Spark could not be started."""


def close_session(spark: SparkSession) -> None:
    """Stop Spark; Java ends when its standard input is closed, within a time limit."""
    _closing.set()
    java = _java_of(spark)
    # From here on Spark's threads would complain that Java is gone.
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    java.stdin.close()
    try:
        java.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        java.kill()
        java.wait()
    remove_scratch()


def kill_java(spark: SparkSession) -> None:
    _java_of(spark).kill()


def _in_scratch(master: str, folder: str) -> dict[str, str]:
    """Return settings that put all temporary files into a folder, since Spark leaves them behind when it is killed."""
    java = f'{_JAVA_OPTIONS} "-Djava.io.tmpdir={folder}" "-Dlog4j2.configurationFile={folder}/{_LOGGING_FILE}"'
    settings = {"spark.local.dir": folder, "spark.driver.extraJavaOptions": java}
    if master.partition("[")[0] not in ("", "local"):
        return settings
    if len(os.fsencode(folder)) > _FOLDER_BYTES_MAX:
        # The path of a socket has at most 107 bytes; loopback works too.
        return {**settings, "spark.python.unix.domain.socket.enabled": "false"}
    return {**settings, "spark.python.unix.domain.socket.dir": folder}


@contextmanager
def _written_to(log: str) -> Iterator[None]:
    """Redirect the output of child processes to a file."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with suppress(FileNotFoundError):
        os.replace(log, f"{log}.1")
    descriptors = {stream.fileno(): os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for number in descriptors:
            os.dup2(opened, number)
        yield
    finally:
        for number, before in descriptors.items():
            os.dup2(before, number)
            os.close(before)
        os.close(opened)


def _tail(log: str) -> str:
    with suppress(OSError), open(log, encoding="utf-8", errors="replace") as file:
        return file.read()[-_LOG_TAIL:].strip()
    return ""


def _java_of(spark: SparkSession) -> Any:
    context: Any = spark.sparkContext
    return context._gateway.proc


def _end_with(java: Any) -> None:
    java.wait()
    if not _closing.is_set():
        remove_scratch()
        os._exit(DIED)


HOW: Final = "install them with `make spark`, or with pip install '.[spark]' in a clone"
"""How to install them."""
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "deltalake")
_PACKAGES_WITHOUT_SPARK: Final = ("pyspark", "pyarrow", "deltalake")
"""Packages that read topics and tables in one process; the types of pyspark need neither Java nor pandas."""


def missing_packages(*, starts_spark: bool = True) -> str:
    """Return a sentence that says which packages to install to run pipelines; empty if none is missing."""
    importlib.invalidate_caches()  # it may have been installed since this process was started
    needed = _PACKAGES if starts_spark else _PACKAGES_WITHOUT_SPARK
    missing = [name for name in needed if find_spec(name) is None]
    if not missing:
        return ""
    reason = "pipelines run on Spark" if starts_spark else "this starts no Spark, but uses its Python packages"
    return f"{reason}, and packages are missing ({', '.join(missing)}); {HOW}"
