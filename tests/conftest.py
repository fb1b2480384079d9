"""Shared fixtures: real server processes, started only when a test first needs one."""

from __future__ import annotations

import ast
import faulthandler
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

StartServer = Callable[..., Server]

_ERROR_CHARS_MAX = 2000
HANG_S = 100.0
TEARDOWN_S = 300.0
_PARSED_MAX = 20
PROCESSES_SHARE = 0.8
"""The tests that start processes are among this fraction of the files, from the first on."""
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 << 30
_internal_errors: list[str] = []
Server.forked = True

# Nodes sync what they write before they acknowledge it, and a run waits for tens of thousands of syncs. Files in memory
# need none, and survive the kill of a process like those on a disk.
if (
    MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    and "TMPDIR" not in os.environ
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# Groups wait for more members before the first assignment; tests have all of theirs at once. Tests that need a Spark
# driver ask for one: it starts slowly, and tests that only list pipelines do not need it. Tests write records with old
# timestamps, so retention is off unless a test is about it. Short session timeouts are allowed, so that a dead member
# is detected soon.
QUICK = {
    "group-initial-delay-ms": 100,
    "group-session-min-ms": 1000,
    "pipelines-enabled": "false",
    "retention-check-ms": 3_600_000,
}

# Background processes ignore Ctrl-C by default, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The duration of an example is not checked. `make test` runs the same few examples every time, so that its result
# depends only on the change under test; `make trials` searches for new ones.
for profile, is_fixed, examples in (("fixed", True, 40), ("exploring", False, 200)):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        derandomize=is_fixed,
        max_examples=examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("fixed")


# Tests that use the Spark session, which starts slowly and needs long to warm up.
SPARK = re.compile(
    r"/test_(filter_spark|landing|landing_upsert|own_jobs|spark_beyond_retention|spark_on_kafka|spark_security"
    r"|spark_source|topic_pipelines|typed_tables)\.py|_in_spark$"
)


class SparkInOneProcess(LoadFileScheduling):  # type: ignore[misc]
    """Run all Spark tests in one process, and every other file in any process."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if SPARK.search(nodeid) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # The order of the collection is the order of the files.
    return SparkInOneProcess(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the tests that start processes, and often wait for them, with the others, which compute; end with the latter,
    so that no worker is left with a long one.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) and not SPARK.search(item.nodeid):
            raise pytest.UsageError(
                f"{item.nodeid} would start a Spark session of its own: name its file in SPARK in tests/conftest.py, "
                "or let its own name end with _in_spark"
            )
    places: dict[Path, float] = {}
    for starts_processes, share in ((True, PROCESSES_SHARE), (False, 1.0)):
        paths = dict.fromkeys(item.path for item in items if ("integration" in item.path.parts) is starts_processes)
        places |= {path: share * at / len(paths) for at, path in enumerate(paths)}
    items.sort(key=lambda item: (SPARK.search(item.nodeid) is None, places[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Make every report serializable: xdist aborts the whole run on a lone surrogate."""
    return _in_unicode((yield))


def _in_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(item) for key, item in value.items()}
    return type(value)(map(_in_unicode, value)) if isinstance(value, list | tuple) else value


def _parse_again(parse: Callable[..., ast.AST], *arguments: Any, **options: Any) -> ast.AST:
    """Parse as `ast.parse` does, and retry.

    Before Python 3.11.8 it fails if another thread or a finalizer parses concurrently. Both pytest and tracebacks in
    logs parse source, so reporting a failure could abort the run.
    """
    for _ in range(_PARSED_MAX):
        with suppress(SystemError):
            return parse(*arguments, **options)
    return parse(*arguments, **options)


ast.parse = partial(_parse_again, ast.parse)  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """End the process of a test that its timeout does not end, since it waits in a library's own code or joins a
    thread.
    """
    _end_process_after(settings.timeout + HANG_S, item)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch the fixtures of a failed test as well: from here on, it has no timeout any more."""
    if isinstance(node, pytest.Item):
        _end_process_after(TEARDOWN_S, node)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer() -> Generator[None, Any, Any]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


def _end_process_after(seconds: float, item: pytest.Item) -> None:
    """Print the stacks of all threads and end the process, unless the test ends before."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])


def pytest_internalerror(excrepr: object) -> None:
    _internal_errors.append(str(excrepr))


def pytest_unconfigure() -> None:
    """Repeat the internal error at the end: pytest prints it where it happened, far above."""
    for error in _internal_errors:
        sys.stderr.write(f"\n{error[-_ERROR_CHARS_MAX:]}\n")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep the garbage collector from scanning all imported modules repeatedly, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep per-user state of nodes, such as the secrets key, out of the home of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # Optimising compilation takes half the time of a short run; the drivers of servers inherit this.
        patch.setenv("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One running server for all tests of a process; each test uses its own topics and groups."""
    with Server(tmp_path_factory.mktemp("server") / "data", settings=QUICK) as started:
        yield started


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """One running etcd for all tests; each test uses its own cluster name."""
    with EtcdServer() as started:
        yield started


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One running PostgreSQL for all tests; each test uses its own database."""
    with PostgresServer() as started:
        yield started


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One Spark for all tests of this process, since it takes long to start; do not stop it or change its settings."""
    from millstream.spark.session import session

    settings = {
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.session.timeZone": "UTC",
        # Its Python processes may need longer to connect than the default of 15 seconds while other tests run.
        "spark.python.authenticate.socketTimeout": "120s",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    started = session("millstream-tests", master="local[2]", settings=settings)
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that no other test uses."""
    name = re.sub("[^a-zA-Z0-9]+", "-", request.node.name).strip("-")[:100]
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers for one test, with its own settings; they end with the test."""
    with ExitStack() as stack:

        def start(name: str = "data", *, forked: bool = True, **settings: object) -> Server:
            flags = QUICK | {key.replace("_", "-"): value for key, value in settings.items()}
            server = Server(tmp_path / name, settings=flags)
            server.forked = forked
            return stack.enter_context(server)

        yield start
