"""A standalone Spark cluster from the pip package, a master and workers on separate hosts, for trials."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from millstream.cli.local_process import ReservedPort
from millstream.pipelines.source.session import use_fitting_java

# Only ends a hang: on a busy machine a cluster takes minutes to start.
WAIT_S: Final = 1800.0
_WORKERS: Final = ("127.0.0.2", "127.0.0.3")


class ProcessFailed(Exception):
    """A process ended before it was ready; the message has the end of its log."""


def environment() -> dict[str, str]:
    """Return where Spark and its Java are, for processes of a cluster."""
    import pyspark

    found = dict(os.environ)
    use_fitting_java(found)
    home = str(Path(pyspark.__file__).parent)
    return {"JAVA_HOME": found["JAVA_HOME"], "SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable}


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its children, which is killed in the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            process_group=0,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(WAIT_S)


def wait_until(what: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for something while a process runs; raise `ProcessFailed` with the end of its log if it ends before."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ProcessFailed(f"exit code {process.poll()}: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)


@contextmanager
def spark_cluster(folder: Path) -> Iterator[str]:
    """Run a master and two workers with a core each; yield the address of the master."""
    found = environment()
    spark_class = str(Path(found["SPARK_HOME"], "bin", "spark-class"))
    held = ReservedPort()
    master = f"spark://{held.address}"
    with ExitStack() as stack:
        command = [spark_class, "org.apache.spark.deploy.master.Master", "--webui-port", "0"]
        command += ["--host", "127.0.0.1", "--port", str(held.number)]
        log = folder / "master.log"
        started = stack.enter_context(running(command, log, found | {"SPARK_LOCAL_IP": "127.0.0.1"}))
        wait_until(_says(log, "I have been elected leader"), started, log)
        for host in _WORKERS:
            command = [spark_class, "org.apache.spark.deploy.worker.Worker", "--host", host, "--webui-port", "0"]
            command += ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / host), master]
            log = folder / f"{host}.log"
            started = stack.enter_context(running(command, log, found | {"SPARK_LOCAL_IP": host}))
            wait_until(_says(log, "Successfully registered with master"), started, log)
        yield master


def _says(log: Path, what: str) -> Callable[[], bool]:
    return lambda: what in log.read_text(errors="replace")
