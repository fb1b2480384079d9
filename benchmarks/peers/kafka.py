"""Apache Kafka as a peer: KRaft nodes on loopback, fetched by Maven, started and stopped like our own server.

    with kafka(folder / "data", "always") as server:       # or "os"; nodes=3 for a cluster
        Producer({"bootstrap.servers": server.kafka})

    python -m benchmarks.peers.kafka --check                # start it, 1,000 messages in and out, stop it

`always` makes Kafka sync each append before it responds (`log.flush.interval.messages=1`), as `flush=always` does;
`os` is Kafka's default, which leaves it to the system. Topics may set their own `flush.messages` and `flush.ms`, for
which Kafka looks every second. Files of deleted topics go at once instead of after a minute. The rest is what Kafka's
own start script and sample configuration set. The jars are kept in a cache folder of the user; with KAFKA_HOME set,
that installation is used.

The process that `Server` starts is this module; each node is its child, in the same process group, so that none can
outlive the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path

import psutil
from benchmarks.subject import PeerUnavailable

from millstream_testing.server import Server

PARTITIONS = 4
READY_S_MAX = 50.0
FETCH_S_MAX = 600.0
CHECK_MESSAGES = 1000
_POM = Path(__file__).with_name("kafka.pom.xml")
_JAR = re.compile(r"kafka_2\.13-([\d.]+)\.jar")
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.7.1:copy-dependencies"
_FLUSH = {"always": "log.flush.interval.messages=1\n", "os": ""}
_JVM = (
    *("-Xmx1g", "-Xms1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true"),
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
_PROPERTIES = """\
process.roles=broker,controller
node.id={node}
listeners=PLAINTEXT://{address},CONTROLLER://{controller}{internal}{listener}
advertised.listeners=PLAINTEXT://{address}{relay}{listener}
controller.listener.names=CONTROLLER
{quorum}
log.dirs={logs}
num.partitions={partitions}
log.flush.scheduler.interval.ms=1000
log.initial.task.delay.ms=0
log.segment.delete.delay.ms=100
num.network.threads=3
num.io.threads=8
offsets.topic.replication.factor={nodes}
transaction.state.log.replication.factor={nodes}
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor={nodes}
share.coordinator.state.topic.min.isr=1
group.share.min.record.lock.duration.ms=1000
group.initial.rebalance.delay.ms=0
group.consumer.assignment.interval.ms=0
group.consumer.assignor.offload.enable=false
{flush}"""
_INTERNAL = """\
inter.broker.listener.name=INTERNAL
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,INTERNAL:PLAINTEXT
"""


class KafkaServer(Server):
    """Apache Kafka as a process, with the interface of a `Server`."""

    def command(self) -> Sequence[str]:
        """This module, which starts Java and prints the address when Kafka responds."""
        flags = [part for name, value in self.settings.items() for part in (f"--{name}", str(value))]
        serve = [sys.executable, "-m", "benchmarks.peers.kafka", "--data", str(self.data), "--kafka", self.kafka]
        return [*serve, *flags]

    @property
    def pid(self) -> int:
        """The process id of Kafka itself, for its CPU seconds and memory; of several nodes, that of their parent."""
        parent = psutil.Process(self._running().pid)
        nodes = parent.children()
        return int(nodes[0].pid if len(nodes) == 1 else parent.pid)

    def _folder(self) -> Path:
        return Path(__file__).resolve().parent.parent.parent


def kafka(
    data: Path,
    flush: str,
    *,
    partitions: int = PARTITIONS,
    nodes: int = 1,
    internal: str = "",
    relay: str = "",
    listener: str = "",
    properties: str = "",
) -> KafkaServer:
    """Return a server on this folder that is not started yet; its jars are fetched if necessary.

    With `internal` it listens there for brokers too, itself among them, which it has connect to `relay`. `listener` is
    one more address for clients, as in `SASL_SSL://127.0.0.1:9093`, and `properties` are more lines of its settings.
    """
    fetch()
    settings: dict[str, object] = {"flush": flush, "partitions": partitions, "internal": internal, "relay": relay}
    settings |= {"listener": listener, "nodes": nodes}
    if properties:
        file = data.with_name(data.name + ".properties")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(properties, encoding="utf-8")
        settings["properties"] = file
    return KafkaServer(data, settings={name: value for name, value in settings.items() if value})


# -- the jars -----------------------------------------------------------------------------------------------------


def fetch(pom: Path = _POM) -> Path:
    """Return the folder with Kafka's jars: that of KAFKA_HOME, or one with fetched jars."""
    if shutil.which("java") is None:
        raise PeerUnavailable("Java is not on the PATH")
    if home := os.environ.get("KAFKA_HOME"):
        return Path(home) / "libs"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream-bench"
    # Named after what the file asks for, so that another version of it is fetched again.
    jars = cache / f"kafka-{zlib.crc32(pom.read_bytes()):08x}"
    if not jars.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _copy_jars(pom, Path(folder) / "jars")
            # Another benchmark may have been quicker, which is just as good.
            if not jars.exists():
                (Path(folder) / "jars").rename(jars)
    return jars


def version_of(jars: Path) -> str:
    """Return the version of Kafka in a folder of jars."""
    return next((match[1] for jar in jars.iterdir() if (match := _JAR.fullmatch(jar.name))), "of unknown version")


def _copy_jars(pom: Path, into: Path) -> None:
    if shutil.which("mvn") is None:
        raise PeerUnavailable("Maven (mvn) is not on the PATH, and KAFKA_HOME is not set")
    command = ["mvn", "-q", "-B", "-f", str(pom), _COPY, "-DincludeScope=runtime", f"-DoutputDirectory={into}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=FETCH_S_MAX)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"Maven did not fetch Apache Kafka within {FETCH_S_MAX:g} s") from None
    if done.returncode != 0 or not into.exists():
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        raise PeerUnavailable(f"Maven could not fetch Apache Kafka: {' '.join(errors[:1])[:300]}")


# -- the node -----------------------------------------------------------------------------------------------------


def serve(arguments: argparse.Namespace) -> int:
    """Format the storage, start Kafka, print its addresses once it responds, and stop it on SIGTERM."""
    java = ["java", *_JVM, "-cp", f"{fetch()}/*"]
    count: int = arguments.nodes
    folders = [arguments.data] if count == 1 else [arguments.data / f"node-{at + 1}" for at in range(count)]
    files = [folder / "server.properties" for folder in folders]
    if not files[-1].exists():
        _write_properties(arguments, files)
        _format(java, files)
    addresses = [_advertised(file) for file in files]
    # Asked to stop before there is anything to stop, the process simply ends, and takes its group along.
    commands = [[*java, "kafka.Kafka", str(file)] for file in files]
    nodes = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) for command in commands]

    def stop(*_: object) -> None:
        for node in nodes:
            node.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for address, node in zip(addresses, nodes, strict=True):
        _wait_until_ready(address, node)
    print(json.dumps({"kafka": ",".join(addresses)}), flush=True)
    codes = [node.wait() for node in nodes]
    # Java ends with this code because of the signal.
    return max(0 if code == 128 + signal.SIGTERM else code for code in codes)


def _write_properties(arguments: argparse.Namespace, files: Sequence[Path]) -> None:
    controllers = [free_address() for _ in files]
    voters = ",".join(f"{at + 1}@{address}" for at, address in enumerate(controllers))
    for at, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        text = _PROPERTIES.format(
            node=at + 1,
            nodes=len(files),
            address=free_address() if len(files) > 1 or arguments.kafka.endswith(":0") else arguments.kafka,
            controller=controllers[at],
            quorum=f"controller.quorum.voters={voters}"
            if len(files) > 1
            else f"controller.quorum.bootstrap.servers={controllers[at]}",
            logs=file.parent / "logs",
            partitions=arguments.partitions,
            internal=f",INTERNAL://{arguments.internal}" if arguments.internal else "",
            relay=f",INTERNAL://{arguments.relay}" if arguments.internal else "",
            listener=f",{arguments.listener}" if arguments.listener else "",
            flush=_FLUSH[arguments.flush] + (_INTERNAL if arguments.internal else ""),
        )
        if arguments.properties is not None:
            text += arguments.properties.read_text(encoding="utf-8")
        file.write_text(text, encoding="utf-8")


def _advertised(properties: Path) -> str:
    """Return the address of the node, which it keeps after a restart."""
    match = re.search(
        r"^advertised\.listeners=PLAINTEXT://([^,\s]+)", properties.read_text(encoding="utf-8"), re.MULTILINE
    )
    if match is None:
        raise SystemExit(f"{properties} names no address")
    return match[1]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def _format(java: Sequence[str], files: Sequence[Path]) -> None:
    cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    for file in files:
        tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", f"--config={file}"]
        tool += ["--standalone"] if len(files) == 1 else []
        subprocess.run([*java, *tool], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _wait_until_ready(address: str, node: subprocess.Popen[bytes]) -> None:
    """Request a producer id until one is assigned: then the node is in the cluster and its coordinators work."""
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline and node.poll() is None:
        if _gives_producer_ids(address):
            return
        time.sleep(0.1)
    node.kill()
    raise SystemExit(f"Apache Kafka was not ready within {READY_S_MAX:g} s (exit code {node.wait()})")


def _gives_producer_ids(address: str) -> bool:
    host, _, port = address.rpartition(":")
    # InitProducerId (key 22) in version 0: no client id, no transactional id, its timeout.
    request = struct.pack(">hhihhi", 22, 0, 1, -1, -1, 60_000)
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            response = connection.recv(1024)
    except OSError:
        return False
    _size, _correlation, _throttle, error = struct.unpack_from(">iiih", response.ljust(14, b"\xff"))
    return bool(error == 0)


# -- the check ----------------------------------------------------------------------------------------------------


def check() -> int:
    """Start Kafka with each flush policy, send messages through it, stop it, and print the result."""
    try:
        print(f"Apache Kafka {version_of(fetch())}", flush=True)
    except PeerUnavailable as reason:
        print(f"skipped: {reason}")
        return 0
    for flush in _FLUSH:
        with (
            tempfile.TemporaryDirectory(prefix="millstream-peer-") as folder,
            kafka(Path(folder) / "d", flush) as server,
        ):
            print(f"flush={flush}: ready at {server.kafka} after {server.start_s:.1f} s", flush=True)
            _produce(server.kafka)
            count = _consume(server.kafka)
            code = server.stop()
            print(f"flush={flush}: {count:,} messages came back; stopped with exit code {code}", flush=True)
            if count != CHECK_MESSAGES or code != 0:
                return 1
    return 0


def _produce(address: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    for number in range(CHECK_MESSAGES):
        producer.produce("check", str(number).encode(), partition=0)
    remaining = producer.flush(30)
    if remaining:
        raise SystemExit(f"{remaining} messages were not acknowledged")


def _consume(address: str) -> int:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": address, "group.id": "check", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("check", 0, 0)])
    values = [message.value() for message in consumer.consume(CHECK_MESSAGES, timeout=30)]
    consumer.close()
    return len(set(values)) if values == [str(number).encode() for number in range(CHECK_MESSAGES)] else -1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.kafka", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="start it, send messages through it, stop it")
    parser.add_argument("--data", type=Path, help="the folder of a node to start")
    parser.add_argument("--kafka", default="127.0.0.1:0", help="HOST:PORT to listen on; port 0 picks a free one")
    parser.add_argument("--flush", choices=tuple(_FLUSH), default="os")
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="partitions of a topic created by its use")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes form the cluster")
    parser.add_argument("--internal", default="", help="HOST:PORT to listen on for brokers")
    parser.add_argument("--relay", default="", help="HOST:PORT that brokers connect to instead of it")
    parser.add_argument("--listener", default="", help="PROTOCOL://HOST:PORT to listen on for clients too")
    parser.add_argument("--properties", type=Path, help="a file with more settings")
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    if arguments.data is None:
        parser.error("say --check, or give a folder with --data")
    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
