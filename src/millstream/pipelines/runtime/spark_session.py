"""The Spark session of pipelines: shared fairly by all of them, and silent beside its own log."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from millstream.core.errors import MillstreamError
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.runtime.scratch import make_scratch, remove_scratch, temporary_files_in
from millstream.pipelines.source.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DIED: Final = 70
"""The exit code of a driver whose Java has died."""

_CLOSE_S: Final = 4.0
_FOLDER_BYTES_MAX: Final = 60
"""Spark names a socket by a UUID, with a few characters around it."""
_LOG_TAIL: Final = 1000
_JAVA_OPTIONS: Final = "-XX:+ExitOnOutOfMemoryError"
"""Half dead it would fail one pipeline after the other; whoever started the driver starts another one."""
_SETTINGS: Final = {
    "spark.scheduler.mode": "FAIR",
    "spark.log.level": "ERROR",
    # A task that goes on after it was cancelled keeps a place; on workers its executor is replaced.
    "spark.task.reaper.enabled": "true",
    "spark.task.reaper.killTimeout": "60s",
}
_closing = threading.Event()


def open_session(
    master: str, *, memory: str, settings: Mapping[str, str], log: str, ends_with_java: bool = False
) -> SparkSession:
    """Start Spark; without a master it runs in this process, on all cores of the machine but one.

    What Java writes goes to the file `log`; that of the run before is kept beside it. A process that lives for the
    session ends with its Java.
    """
    scratch = make_scratch()
    chosen = {**_SETTINGS, **_in_scratch(master, scratch), "spark.driver.memory": memory, **settings}
    try:
        with _written_to(log), temporary_files_in(scratch):
            spark = session("millstream-pipelines", master=master or None, settings=chosen)
    except MillstreamError:
        remove_scratch()
        raise
    except Exception as error:
        remove_scratch()
        raise SparkFailed(f"Spark did not start: {reason_of(error)}; {log} ends with: {_tail(log)}") from error
    if ends_with_java:
        threading.Thread(target=_end_with, args=(_java_of(spark),), name="watch Java", daemon=True).start()
    return spark


class SparkFailed(MillstreamError):
    """Spark could not be started."""


def close_session(spark: SparkSession) -> None:
    """End Spark; Java stops by itself when its standard input ends, and has not long to do so."""
    _closing.set()
    java = _java_of(spark)
    # From here on Spark's own threads would complain that Java is gone.
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    java.stdin.close()
    try:
        java.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        java.kill()
    remove_scratch()


def kill_java(spark: SparkSession) -> None:
    """End Spark at once, whatever it does: who waits for it fails."""
    _java_of(spark).kill()


def _in_scratch(master: str, folder: str) -> dict[str, str]:
    """Have everything that Spark writes on the side be in a folder, since it leaves it behind when it is killed."""
    settings = {
        "spark.local.dir": folder,
        "spark.driver.extraJavaOptions": f'{_JAVA_OPTIONS} "-Djava.io.tmpdir={folder}"',
    }
    if master.partition("[")[0] not in ("", "local"):
        return settings
    if len(os.fsencode(folder)) > _FOLDER_BYTES_MAX:
        # The path of a socket may have 107 bytes; over loopback it goes too.
        return {**settings, "spark.python.unix.domain.socket.enabled": "false"}
    return {**settings, "spark.python.unix.domain.socket.dir": folder}


@contextmanager
def _written_to(log: str) -> Iterator[None]:
    """Have what processes that are started meanwhile write go to a file."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with suppress(FileNotFoundError):
        os.replace(log, f"{log}.1")
    kept = {stream.fileno(): os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for number in kept:
            os.dup2(opened, number)
        yield
    finally:
        for number, before in kept.items():
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
