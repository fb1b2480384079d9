"""`format("millstream")` through a real Spark Connect server: the client needs neither Java nor the data source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.cli.local_process import ReservedPort
from millstream_testing.command import CommandLine
from millstream_testing.committed_messages import committed_messages
from millstream_testing.server import Server
from millstream_testing.spark_cluster import WAIT_S, environment, running, wait_until

pytestmark = [pytest.mark.trial, pytest.mark.timeout(1800)]

CLIENT = """
import json
import sys

from millstream.spark.session import session

remote, brokers, topic, folder = sys.argv[1:]
reading = {"kafka.bootstrap.servers": brokers, "startingOffsets": "earliest", "subscribe": topic}
writing = {"kafka.bootstrap.servers": brokers}
spark = session(master=remote, settings={"spark.sql.shuffle.partitions": "2"})

rows = spark.range(100).selectExpr("cast(id as string) as key", "cast(id as string) as value")
rows.write.format("millstream").options(**writing, topic=topic).mode("append").save()
read = spark.read.format("millstream").options(**reading).load()
found = sorted(int(row.value) for row in read.selectExpr("cast(value as string) as value").collect())

for _ in range(2):
    # The second one continues after the first, and finds nothing.
    stream = spark.readStream.format("millstream").options(**reading).load()
    writer = stream.select("key", "value").writeStream.format("millstream").options(**writing, topic=f"{topic}-copy")
    query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    query.awaitTermination()

spark.sql(
    f"CREATE TABLE orders USING millstream OPTIONS (subscribe '{topic}-sql', `kafka.bootstrap.servers` '{brokers}', "
    "columns 'key string, value string')"
)
spark.sql("INSERT INTO orders VALUES ('a', 'first'), ('b', 'second')")
listed = sorted(row.value for row in spark.sql("SELECT value FROM orders").collect())
print(json.dumps({"found": found, "listed": listed, "kind": type(spark).__module__}))
"""


@pytest.fixture
def client_packages(tmp_path: Path) -> str:
    """A folder with the packages that the client needs and Millstream does not."""
    folder = str(tmp_path / "packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    if subprocess.run([*command, "grpcio-status", "zstandard"], check=False).returncode:
        pytest.skip("the packages of a Spark Connect client cannot be installed")
    return folder


@pytest.fixture
def connect_server(tmp_path: Path) -> Iterator[str]:
    variables = environment()
    held = ReservedPort()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(held.number),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.ui.enabled": "false",
    }
    submit = [str(Path(variables["SPARK_HOME"], "bin", "spark-submit")), "--master", "local[2]"]
    flags = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = tmp_path / "server.log"
    with running([*submit, *flags, *server], log, variables | {"SPARK_LOCAL_IP": "127.0.0.1"}) as process:
        wait_until(lambda: "Spark Connect server started" in log.read_text(errors="replace"), process, log)
        yield f"sc://{held.address}"


def test_rows_streams_and_tables_work_through_a_connect_server(
    server: Server, topic: str, tmp_path: Path, client_packages: str, connect_server: str
) -> None:
    millstream = CommandLine(server.kafka)
    for name in (topic, f"{topic}-copy", f"{topic}-sql"):
        assert millstream("topic", "create", name, "--partitions", "2").code == 0
    script = tmp_path / "client.py"
    script.write_text(CLIENT, encoding="utf-8")
    # No Java is found there: the client needs none.
    environment = {**os.environ, "PYTHONPATH": client_packages, "JAVA_HOME": "/nowhere", "PATH": "/nowhere"}
    ran = subprocess.run(
        [sys.executable, str(script), connect_server, server.kafka, topic, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["found"] == list(range(100))
    assert report["listed"] == ["first", "second"]
    assert report["kind"] == "pyspark.sql.connect.session"
    assert sorted(map(int, committed_messages(server.kafka, f"{topic}-copy"))) == list(range(100))
