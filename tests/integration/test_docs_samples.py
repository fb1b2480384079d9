"""The samples of README.md and of every page under docs/ are run as they are written, against a real node.

`millstream_testing.page` describes how a fence marks a sample that is not run, and why, or how it is used.
"""

from __future__ import annotations

import ast
import asyncio
import datetime
import inspect
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import deltalake
import pyarrow as pa
import pytest

import millstream
from millstream.cli.local_process import ReservedPort
from millstream.pipelines.lake.columns import QUARANTINE, RAW, extended
from millstream.pipelines.lake.table import open_table
from millstream.protocol.filter.filter import compile_filter
from millstream_testing.command import TIMEOUT_VARIABLE, call_command
from millstream_testing.lake_rows import TOPIC, land, rows, write
from millstream_testing.page import Sample, samples_of
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = ROOT / "docs" / "guides"
PRODUCTION, RESTORE, UPGRADE = (GUIDES / f"{name}.md" for name in ("production", "restore", "upgrade"))
PAGES = sorted(set((ROOT / "docs").rglob("*.md")) - {PRODUCTION})
DEFAULT_KAFKA, DEFAULT_HTTP, DEFAULT_WEBHOOK = "127.0.0.1:9092", "127.0.0.1:8080", "8090"
SECOND_KAFKA, SECOND_HTTP = "127.0.0.1:9192", "127.0.0.1:8180"
COMMAND_S_MAX = 240.0
NODE = {"group-initial-delay-ms": 100, "push-private-addresses": "true", "pipelines-enabled": "false"}
# `pipeline run` handles signals, which only the main thread of a process can.
PLAIN = re.compile(r"""millstream (?!pipeline run )(?:[^|<>$&;"'#]|"[^"$`]*"|'[^']*')*(?:#.*)?""")

# The prerequisites of each page.
BEFORE = {
    "embedded.md": "async def bill(message): ...",
    "tracing.md": "order = {'order_id': 1}",
    "spark.md": "frame = spark.createDataFrame([('customer-7', 'one')], 'key string, value string')",
}
SPARK_TOPICS = """
millstream topic create orders --partitions 2
millstream topic create shouted
millstream topic create prices
millstream pipeline create land land-orders --topic orders
printf '{"order_id": 1, "total": 1500}\\n{"order_id": 2, "total": 20}\\n' | millstream publish orders --header region=eu
"""

# A reader types more slowly than this happens; a test has to wait until the programs beside it have said so.
WAITS_FOR = {
    "millstream publish": ("billed 1", "shipped 1 to Ghent", '"order_id": 1'),
    "printf": ("shipped 2 to Lyon", '"order_id": 3'),
    "millstream dlq redrive": ("shipped 3 to nowhere",),
    "curl -s http://127.0.0.1:8080/v1": ("billed 4", "shipped 4 to Oslo"),
}
SAYS = {
    "millstream topic create": "Created topic orders with 3 partitions.",
    "millstream subscription create billing": "Created subscription billing on orders.",
    "millstream dlq show": "KeyError",
    "millstream dlq redrive": "Redrove 1 letter in shipping.",
    "millstream tail orders": "customer-9",
    "python analysis.py": "b'customer-9'",
    "millstream group describe": "analysis  (Empty, 0 members, 0 messages behind)",
    "millstream group reset": "Moved group analysis in 3 partitions.",
    # On a machine that is busy it also says so.
    "millstream doctor": "",
}


SHOWN = {
    "from-kafka.md": ("copied 3 messages of orders",),
    "http.md": ('"duplicate":true', '"failed":0', '"millstream.filter":"payload.total > 1000"'),
    "lake.md": ("b'value-0-19'", "count_star()", "20"),
    "landing.md": ("made up",),
    "mirroring.md": ("(running, from 127.0.0.1:", "stray", "three\n", "four"),
    "stuck.md": ("LEASED", "orders/0@0", "Moved group reports", "No transactions"),
    "subscriptions.md": ('"total": 300',),
}
SAID_BESIDE = {
    "from-celery.md": ("about Welcome", "about How is it going?"),
    "from-rabbitmq.md": ("billed 1", "billed 3"),
}


class Reader:
    """A reader of a page: runs one sample after another, with programs in terminals beside it."""

    def __init__(self, folder: Path, kafka: str, http: str) -> None:
        self.folder = folder
        self._beside: dict[str, subprocess.Popen[bytes]] = {}
        self._output = folder / "beside.txt"
        self._output.touch()
        self._held = [ReservedPort() for _ in range(3)]
        webhook, second_kafka, second_http = self._held
        self._names: dict[str, Any] = {}
        self.begin()
        self._instead = {
            DEFAULT_KAFKA: kafka,
            "localhost:9092": kafka,
            "kafka.example:9092": kafka,
            DEFAULT_HTTP: http,
            DEFAULT_WEBHOOK: str(webhook.number),
            SECOND_KAFKA: second_kafka.address,
            SECOND_HTTP: second_http.address,
            "/lake": str(folder / "lake"),
            "postgresql://app@db/shop": f"sqlite:///{folder}/shop.db",
            # Java has its own current folder.
            **{f'"{name}"': f'"{folder / name}"' for name in ("orders-table", "orders-checkpoint", "shout-checkpoint")},
            # Samples for Spark omit the address of the broker.
            'format("millstream")': f'format("millstream").option("kafka.bootstrap.servers", "{kafka}")',
            # Newer versions of curl know a short word for JSON; a stream is listened to for no longer than it takes.
            "--json '": "-H content-type:application/json -d '",
            '--json "': '-H content-type:application/json -d "',
            "--max-time 5": "--max-time 1",
            "curl -s": "curl -f -S -s",
        }
        commands = folder / "bin"
        commands.mkdir()
        for name, words in (("millstream", "-m millstream.cli.main "), ("python", "")):
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            script.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._beside.values():
            # A node also stops its child processes.
            process.terminate()
        for process in self._beside.values():
            process.wait(COMMAND_S_MAX)

    def save(self, name: str, text: str) -> None:
        (self.folder / name).write_text(self._here(text))

    def start_beside(self, command: str) -> None:
        """Start a program; if it already runs, end it first with Ctrl-C, as the page says."""
        if command in self._beside:
            self._beside[command].send_signal(signal.SIGINT)
            assert self._beside[command].wait(COMMAND_S_MAX) == 0
        with self._output.open("ab") as output:
            self._beside[command] = subprocess.Popen(
                ["sh", "-c", f"exec {self._here(command)}"],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=output,
            )
        if "webhook" in command:
            self._wait_until_listening(self._beside[command], f"127.0.0.1:{self._instead[DEFAULT_WEBHOOK]}")
        elif "serve" in command:
            self._wait_until_listening(self._beside[command], self._instead[SECOND_KAFKA])

    def run(self, script: str) -> str:
        """Run a script; commands that need no shell run in this process, which is faster."""
        commands = filter(None, re.sub(r"\\\n\s*", " ", script).splitlines())
        parts = groupby(commands, lambda command: PLAIN.fullmatch(command) is not None)
        return "".join(
            "".join(map(self.call, some)) if is_plain else self.run_script(self._here("\n".join(some)))
            for is_plain, some in parts
        )

    def run_script(self, script: str) -> str:
        """Run a script in a shell that stops at the first error."""
        ended = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert ended.returncode == 0, f"{script}\n{ended.stdout}\n{ended.stderr}\n{self._output.read_text()}"
        return ended.stdout

    def call(self, command: str) -> str:
        """Run one command in this process."""
        ended = call_command(shlex.split(self._here(command), comments=True)[1:])
        assert ended.code == 0, f"{command}\n{ended.out}\n{ended.err}\n{self._output.read_text()}"
        return ended.out

    async def execute(self, sample: Sample) -> None:
        """Run a Python sample, which may await, with the names defined by earlier samples."""
        text = self._here(sample.text)
        code = compile(text, str(sample), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if "asyncio.run(" in text:
            # Its own program, with its own loop.
            await asyncio.to_thread(exec, code, dict(self._names))
        elif inspect.iscoroutine(running := eval(code, self._names)):
            await running

    def run_until(self, command: str, expected: str) -> str:
        """Run a command, and repeat it until its expected output has appeared."""
        deadline = time.monotonic() + COMMAND_S_MAX
        while expected not in (output := self.run(command)):
            assert time.monotonic() < deadline, f"{command}: {output}\n{self._output.read_text()}"
        return output

    def _wait_until_listening(self, process: subprocess.Popen[bytes], where: str) -> None:
        """Wait for a program to listen: early pushes would be retried only later."""
        host, _, port = where.rpartition(":")
        address = (host, int(port))
        deadline = time.monotonic() + COMMAND_S_MAX
        while True:
            try:
                socket.create_connection(address, COMMAND_S_MAX).close()
            except OSError:
                assert process.poll() is None, self._output.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self._output.read_text())

    def _here(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self._instead)), lambda found: self._instead[found[0]], text)

    async def prepare(self, page: str) -> None:
        """Set up the prerequisites of a page."""
        if page in BEFORE:
            await self.execute(Sample(Path(page), 0, "python", "", BEFORE[page]))

    def begin(self, **names: Any) -> dict[str, Any]:
        """Forget the names that samples have defined, except these."""
        self._names = {"asyncio": asyncio, "millstream": millstream, "__name__": "page", **names}
        return self._names

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Provide a connection under the name that pages use."""
        async with millstream.connect(os.environ["MILLSTREAM_BROKERS"]) as self._names["ms"]:
            yield


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """A reader in an empty folder, with an empty broker.

    Where a page needs no gateway the broker runs in this process, which starts much faster.
    """
    folder = tmp_path / "reader"
    folder.mkdir()
    page = request.node.callspec.params["page"] if hasattr(request.node, "callspec") else README
    with ExitStack() as stack:
        if page != README and DEFAULT_HTTP not in page.read_text(encoding="utf-8"):
            kafka, http = stack.enter_context(millstream.Sandbox(pipelines_enabled=False)).address, ""
        else:
            server = stack.enter_context(Server(tmp_path / "data", settings=NODE))
            kafka, http = server.kafka, server.http
        monkeypatch.chdir(folder)
        monkeypatch.setenv("MILLSTREAM_BROKERS", kafka)
        monkeypatch.setenv(TIMEOUT_VARIABLE, str(COMMAND_S_MAX / 2))
        yield stack.enter_context(Reader(folder, kafka, http))


class GuidedServer(Server):
    """A node started as a guide says: by its settings file alone."""

    config = Path()

    def command(self) -> list[str]:
        return [sys.executable, "-m", "millstream.cli.main", "serve", "--json", "--config", str(self.config)]


@pytest.mark.timeout(300)
def test_the_production_guide_works_as_written(tmp_path: Path) -> None:
    """Everything except steps that need root or systemd, with folders and addresses of this test."""
    folder = tmp_path / "machine"
    folder.mkdir()
    server = GuidedServer(folder / "data")
    server.config = folder / "millstream.toml"
    kafka_port, http_port = (address.rpartition(":")[2] for address in (server.kafka, server.http))
    here = {
        ":9092": f":{kafka_port}",
        ":8080": f":{http_port}",
        "10.0.0.5": "127.0.0.1",
        "broker.internal": "localhost",
        "/etc/millstream": str(folder),
        "/var/lib/millstream/data": str(server.data),
        "-o millstream -g millstream ": "",
        "runuser -u millstream -- ": "",
        "curl -s": "curl -f -S -s",
    }
    before, after = "", ""
    with Reader(folder, server.kafka, server.http) as reader:
        for sample in samples_of(PRODUCTION):
            text = re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], sample.text)
            if sample.file is not None:
                (folder / sample.file).write_text(text)
            elif "systemctl" in text:
                before, after = after, ""
            elif sample.is_run:
                after += text
        assert "user create admin" in before
        reader.run_script(before)
        with server:
            output = reader.run_script(after)
    for words in ("No problems found.", '"ready"', "Created topic smoke-test", "hello", "millstream_log_free_bytes"):
        assert words in output


@pytest.mark.timeout(300)
def test_the_guides_of_backup_restore_and_upgrade_work_as_written(tmp_path: Path) -> None:
    """With folders of this test, and a node that is stopped and started where the guides say so."""
    server = Server(tmp_path / "millstream" / "data", settings=NODE)
    (tmp_path / "backup").mkdir()
    here = {
        "/var/lib/millstream": str(server.data.parent),
        "/backup/": f"{tmp_path}/backup/",
        "/tmp/check": str(tmp_path / "check"),
        "/opt/millstream": str(tmp_path / "version"),
        "$(date +%F)": "2026-11-16",
        "chown -R millstream: ": ": ",
    }
    with server, Reader(tmp_path, server.kafka, server.http) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_BROKERS", server.kafka)
        patch.setenv(TIMEOUT_VARIABLE, str(COMMAND_S_MAX / 2))

        def follow(guide: Path, start: str) -> str:
            """Run the sample that starts with these words."""
            (sample,) = (sample for sample in samples_of(guide) if sample.text.startswith(start))
            text = re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], sample.text)
            output = ""
            for line in text.splitlines():
                if line.startswith("systemctl stop"):
                    assert server.stop() == 0
                elif line.startswith("systemctl start"):
                    server.start()
                else:
                    output += reader.run(line)
            return output

        reader.run(
            "millstream topic create kept\nmillstream subscription create work --topic kept\nmillstream publish kept 1"
        )
        follow(RESTORE, "systemctl stop millstream\ntar ")
        assert "No problems found." in follow(RESTORE, "mkdir /tmp/check")
        # After the backup, a message is accepted, another published, and a topic deleted by mistake.
        reader.run(
            "millstream subscription pull work --accept\nmillstream publish kept 2\nmillstream topic delete kept --yes"
        )
        assert "No problems found." in follow(RESTORE, "systemctl stop millstream\nmv ")
        assert reader.run("millstream tail kept --from start -n 1").split()[-1] == "1"
        assert len(reader.run("millstream subscription pull work --json").splitlines()) == 1, "it is delivered again"
        follow(UPGRADE, "systemctl stop millstream")


def has_samples(page: Path, use: str = "") -> bool:
    return any(sample.is_run and (sample.use == "spark") == (use == "spark") for sample in samples_of(page))


def test_every_guide_for_one_node_is_followed() -> None:
    followed = {page.stem for page in PAGES if has_samples(page)} | {PRODUCTION.stem}
    assert {"stuck", "from-kafka", "from-rabbitmq", "from-celery", "restore", "upgrade", "production"} <= followed


@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", [page for page in PAGES if has_samples(page)], ids=lambda page: page.name)
async def test_samples_run(page: Path, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    make_lake(reader.folder / "lake")
    await reader.prepare(page.name)
    output = ""
    async with reader.connected():
        for sample in samples_of(page):
            if not sample.is_run or sample.use == "spark":
                continue
            if sample.file is not None:
                reader.save(sample.file, sample.text)
            elif sample.use == "beside":
                reader.start_beside(sample.text.strip())
            elif sample.language == "sh":
                output += await asyncio.to_thread(reader.run, sample.text)
            elif sample.language == "python":
                await reader.execute(sample)
            else:
                await asyncio.to_thread(check_sql, sample, reader)
    for words in SAID_BESIDE.get(page.name, ()):
        await asyncio.to_thread(reader.wait_for, words)
    output += capsys.readouterr().out
    for words in SHOWN.get(page.name, ()):
        assert words in output


@pytest.mark.timeout(900)
def test_samples_run_in_spark(spark: SparkSession, reader: Reader) -> None:
    from pyspark.sql import DataFrame

    make_lake(reader.folder / "lake")
    reader.run(SPARK_TOPICS)
    for page in (page for page in PAGES if has_samples(page, "spark")):
        names = reader.begin(spark=spark)
        asyncio.run(reader.prepare(page.name))
        for sample in (sample for sample in samples_of(page) if sample.use == "spark"):
            before = list(names.values())
            asyncio.run(reader.execute(sample))
            for frame in [value for value in names.values() if isinstance(value, DataFrame)]:
                # Nothing is read until it is requested, as some samples do.
                if ".show()" not in sample.text and not any(frame is other for other in before):
                    frame.count()
            for query in spark.streams.active:
                query.processAllAvailable()
                query.stop()


def make_lake(lake: Path) -> None:
    """Create tables under the names that pages use."""
    wider = extended(RAW, pa.schema([("amount", pa.int64())]))
    for name, kind in (("orders", "delta"), ("events", "parquet")):
        table = open_table(str(lake / name), format=kind)
        assert land(table, 0, 0, 18)
        more = write(table, [rows(0, [18, 19], wider, amount=[1, 2])], wider)
        assert table.commit(more, {(TOPIC, 0): (18, 20)}, schema=wider)
    customers = pa.table({"customer_id": [1, 2], "name": ["Ada L.", "Grace"]})
    deltalake.write_deltalake(str(lake / "customers"), customers)
    happened = datetime.datetime(2026, 11, 15, 21, tzinfo=datetime.UTC)
    visits = pa.table({"offset": [0], "created_at": [happened], "event_day": [happened.date()]})
    deltalake.write_deltalake(str(lake / "visits"), visits, partition_by=["event_day"])
    quarantine = rows(0, range(3), QUARANTINE, headers=[None, [], [{"key": "h", "value": b"1"}]])
    deltalake.write_deltalake(str(lake / "orders__quarantine"), pa.Table.from_batches([quarantine]))


def check_sql(sample: Sample, reader: Reader) -> None:
    """Compile a filter, or declare a statement as a pipeline."""
    statements = re.split(r"\n(?=\S)", sample.text.strip())
    for number, statement in enumerate(statements):
        if sample.page.name == "filters.md":
            compile_filter(statement)
        else:
            table = "--table customers=/lake/customers"
            name = f"sample-{sample.line}-{number}"
            words = f"--sql {shlex.quote(statement)} {table if 'customers' in statement else ''} --into {name}"
            reader.call(f"millstream pipeline create transform {name} {words} --stopped")


@pytest.mark.timeout(500)
def test_the_tour_works_as_written(reader: Reader) -> None:
    for sample in samples_of(README):
        for command in sample.text.splitlines() if sample.is_run and sample.file is None else ():
            if sample.use == "beside":
                reader.start_beside(command)
            else:
                take(reader, command)
        if sample.file is not None:
            reader.save(sample.file, sample.text)


def take(reader: Reader, command: str) -> None:
    output = next((words for start, words in SAYS.items() if command.startswith(start)), "")
    if "dlq show" in command:
        reader.run_until(command, output)
    else:
        assert output in reader.run(command)
    for start, expected in WAITS_FOR.items():
        if command.startswith(start):
            for words in expected:
                reader.wait_for(words)


def test_the_tour_starts_a_node_and_shows_every_kind_of_command() -> None:
    commands = "\n".join(sample.text for sample in samples_of(README))
    for command in (
        "serve",
        "topic create",
        "publish",
        "tail",
        "group describe",
        "group reset",
        "dlq redrive",
        "doctor",
    ):
        assert f"millstream {command}" in commands
    for words in ("confluent_kafka", "millstream.connect", "--push", "/v1/topics"):
        assert words in commands
    for start in (*SAYS, *WAITS_FOR):
        assert f"\n{start}" in commands, start
