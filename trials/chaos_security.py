"""`make chaos-security`: three nodes move from plain text to SASL over TLS, then renew certificates, all under load.

python -m trials.chaos_security [--rotations N] [--keep FOLDER]

The nodes are restarted one by one, three times, as docs/security.md describes, while producers write and move from one
listener to the other. Then every node gets a new certificate each second. At the end every acknowledged message must be
stored once, and during the rotation no connection may have been lost: neither of the producers, nor of an idle client,
nor between nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition
from trials.command_line import print_line

from millstream.broker.catalog.catalog import Catalog
from millstream.cli.local_process import ReservedPort
from millstream.client.admin.topics import create_topic
from millstream.core.credential import SecurityChange, new_credentials
from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import NO_CREDENTIALS, Credentials, NodeName, client_tls
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.security import ADMIN, Certificates
from millstream_testing.server import Server

CLUSTER, TOPIC, PARTITIONS, NODES = "moving", "orders", 6, (1, 2, 3)
_LOGGED_CHARS = 3000
WAIT_S = 120.0
PAUSE_S = 0.002
SETTLE_S = 2.0
"""The pause between two changes."""
STAGES = ("both listeners", "TLS between nodes", "TLS only")


class NumberedProducer:
    """A producer that writes numbered messages until it is stopped."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name = name
        self._stopping = threading.Event()
        self.acknowledged: set[str] = set()
        self.errors: list[str] = []
        self._producer = Producer(
            {
                **settings,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": 300_000,
                "error_cb": lambda error: self.errors.append(str(error)),
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop writing, and wait for messages in flight."""
        self._stopping.set()
        self._thread.join()
        if remaining := self._producer.flush(WAIT_S):
            self.errors.append(f"{remaining} messages were not acknowledged within {WAIT_S:g} s")

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                self._producer.produce(TOPIC, f"{self._name}-{number}", on_delivery=self._delivered)
            except BufferError:
                number -= 1
            self._producer.poll(PAUSE_S)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(f"not delivered: {error}")
        else:
            self.acknowledged.add((message.value() or b"").decode())


class Trial:
    """The cluster, its clients, and the findings."""

    def __init__(self, folder: Path, etcd: str, catalog: str) -> None:
        self._folder = folder
        self._certificates = Certificates(folder / "certs")
        self._secure = {number: ReservedPort() for number in NODES}
        self.findings: list[str] = []
        self.producers: list[NumberedProducer] = []
        for number in NODES:
            self.renew_certificate(number)
        shared = {"cluster": CLUSTER, "etcd": etcd, "catalog": catalog, "pipelines-enabled": "false"}
        self.nodes = {
            number: Server(folder / f"node-{number}", settings={"node-id": number, "rack": f"rack-{number}", **shared})
            for number in NODES
        }
        declared = Catalog.open_shared(catalog)
        declared.change_security(SecurityChange(put_credentials=new_credentials(*ADMIN)))
        declared.close()

    # -- changes --------------------------------------------------------------------------------------------------

    def renew_certificate(self, number: int) -> None:
        """Give a node a new certificate, one file after the other, as renewal tools do."""
        name = NodeName(cluster=CLUSTER, node_id=NodeId(number))
        certificate, key = self._certificates.sign(f"node {number}", hosts=("127.0.0.1",), uri=name.uri)
        certificate.replace(self._file(number, "pem"))
        key.replace(self._file(number, "key"))

    def _file(self, number: int, kind: str) -> Path:
        return self._certificates.folder / f"moving-{number}.{kind}"

    def settings_of(self, number: int, stage: int) -> dict[str, object]:
        """Return the settings that a stage adds to a node."""
        files = {
            "tls-cert": self._file(number, "pem"),
            "tls-key": self._file(number, "key"),
            "tls-client-ca": self._certificates.ca,
        }
        lines = ["[[listeners]]", 'name = "secure"', f'address = "{self._secure[number].address}"', 'auth = "required"']
        lines += [f'{name} = "{path}"' for name, path in files.items()]
        config = self._folder / f"node-{number}.toml"
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        super_users = "User:admin" if stage == 2 else "User:ANONYMOUS;User:admin"
        options: dict[str, object] = {"config": config, "super-users": super_users}
        if stage >= 1:
            options["node-listener"] = "secure"
        return options | ({"auth": "required", **files} if stage == 2 else {})

    async def move_to(self, stage: int) -> None:
        """Restart every node with new settings, each after all replicas are in sync."""
        for number, node in self.nodes.items():
            node.settings |= self.settings_of(number, stage)
            await asyncio.to_thread(node.restart)
            await self.wait_until_in_sync(secure=stage > 0)
        print_line(f"{STAGES[stage]}: {self.count()} messages so far")

    # -- clients --------------------------------------------------------------------------------------------------

    def client_settings(self, *, secure: bool) -> dict[str, Any]:
        """Return the connection settings of confluent-kafka."""
        if not secure:
            return {"bootstrap.servers": ",".join(node.kafka for node in self.nodes.values()), "log_level": 0}
        return {
            "bootstrap.servers": self.secure_addresses,
            "log_level": 0,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self._certificates.ca),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": ADMIN[0],
            "sasl.password": ADMIN[1],
        }

    @property
    def secure_addresses(self) -> str:
        """The addresses of the TLS listeners."""
        return ",".join(port.address for port in self._secure.values())

    def connect(self, *, secure: bool, number: int = 0) -> Any:
        """Connect with Millstream's own client, through one node if it is named."""
        tls = client_tls(self._certificates.ca)
        credentials = Credentials(tls=tls, user=ADMIN[0], password=ADMIN[1]) if secure else NO_CREDENTIALS
        plain = ",".join(node.kafka for node in self.nodes.values())
        addresses = self.secure_addresses if secure else plain
        first = self._secure[number].address if number else addresses
        return Client.connect(first, timeout_s=WAIT_S, credentials=credentials)

    def start_producers(self, *, secure: bool) -> list[NumberedProducer]:
        name = "secure" if secure else "plain"
        started = [NumberedProducer(f"{name}-{at}", self.client_settings(secure=secure)) for at in range(2)]
        self.producers += started
        return started

    def count(self) -> int:
        """Return the number of acknowledged messages."""
        return sum(len(producer.acknowledged) for producer in self.producers)

    async def wait_until_in_sync(self, *, secure: bool) -> None:
        """Wait until every partition has all its replicas in sync."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                async with self.connect(secure=secure) as client:
                    partitions = (await client.metadata([TOPIC])).topics[TOPIC].partitions.values()
                    if all(len(partition.in_sync) == len(NODES) for partition in partitions):
                        return
            except MillstreamError as error:
                reason = str(error)
            else:
                reason = "replicas are behind"
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in sync within {WAIT_S:g} s: {reason}")
            await asyncio.sleep(0.2)

    # -- the trial ------------------------------------------------------------------------------------------------

    async def run(self, rotations: int) -> None:
        """Move to TLS, rotate certificates and check the results."""
        for node in self.nodes.values():
            await asyncio.to_thread(node.start)
        async with self.connect(secure=False) as client:
            await create_topic(client, TOPIC, partitions=PARTITIONS, replication=len(NODES), settings={})
        plain = self.start_producers(secure=False)
        await asyncio.sleep(SETTLE_S)
        await self.move_to(0)
        self.start_producers(secure=True)
        await asyncio.sleep(SETTLE_S)
        for producer in plain:
            await asyncio.to_thread(producer.stop)
        await self.move_to(1)
        await self.move_to(2)
        await asyncio.sleep(SETTLE_S)
        await self.rotate(rotations)
        for producer in self.producers[len(plain) :]:
            await asyncio.to_thread(producer.stop)
        await self.wait_until_in_sync(secure=True)
        await asyncio.to_thread(self.check)

    async def rotate(self, rotations: int) -> None:
        """Give every node a new certificate, once a second."""
        logs = {number: node.log.stat().st_size for number, node in self.nodes.items()}
        for producer in self.producers:
            producer.errors.clear()
        before = self.count()
        async with self.connect(secure=True) as idle:
            channel = await (await idle.pool_for(None)).shared()
            for _ in range(rotations):
                for number in NODES:
                    await asyncio.to_thread(self.renew_certificate, number)
                for number in NODES:
                    async with self.connect(secure=True, number=number) as another:
                        await another.metadata([TOPIC])
                await asyncio.sleep(1)
            if not channel.is_open:
                self.findings.append("a client that did nothing lost its connection")
        self.findings += [f"during the rotation: {error}" for producer in self.producers for error in producer.errors]
        for number, node in self.nodes.items():
            text = node.log.read_bytes()[logs[number] :].decode(errors="replace")
            lines = [line for line in text.splitlines() if "connection closed" in line or "out of sync" in line]
            self.findings += [f"node {number} during the rotation: {line}" for line in lines]
            if "certificate changed" not in text:
                self.findings.append(f"node {number} has used no other certificate")
        print_line(f"{rotations} rotations of {len(NODES)} certificates, {self.count() - before} messages meanwhile")

    def check(self) -> None:
        """Read everything and compare it with what was acknowledged."""
        consumer = Consumer({**self.client_settings(secure=True), "group.id": "judge", "enable.partition.eof": True})
        consumer.assign([TopicPartition(TOPIC, index, OFFSET_BEGINNING) for index in range(PARTITIONS)])
        counts: Counter[str] = Counter()
        ended: set[int | None] = set()
        deadline = time.monotonic() + WAIT_S
        while len(ended) < PARTITIONS and time.monotonic() < deadline:
            for message in consumer.consume(1000, timeout=1.0):
                if (error := message.error()) is None:
                    counts[(message.value() or b"").decode()] += 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
        consumer.close()
        acknowledged = set().union(*(producer.acknowledged for producer in self.producers))
        self.findings += [f"lost: {value}" for value in sorted(acknowledged - counts.keys())]
        self.findings += [f"stored {times} times: {value}" for value, times in counts.items() if times > 1]
        self.findings += [
            error for producer in self.producers for error in producer.errors if error.startswith("not delivered")
        ]
        if len(ended) < PARTITIONS:
            self.findings.append("the topic could not be read to its end")
        for number, node in self.nodes.items():
            before, found_error, rest = node.log.read_text(errors="replace").partition("Traceback")
            if found_error:
                # The log is removed with the folder of the trial.
                where = before.rpartition("\n")[0][-_LOGGED_CHARS:]
                self.findings.append(f"node {number} has logged an unexpected error: {where}\n{rest[:_LOGGED_CHARS]}")


def main() -> int:
    """Run the trial and print the outcome; return 1 if there was a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=60, help="the number of rotations, one per second")
    parser.add_argument("--keep", type=Path, help="keep the data and the logs in this folder")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-security-")))
        if options.keep is not None:
            folder = options.keep
            folder.mkdir(parents=True, exist_ok=True)
        etcd, postgres = stack.enter_context(EtcdServer()), stack.enter_context(PostgresServer())
        trial = Trial(folder, etcd.url, postgres.new_database())
        for node in trial.nodes.values():
            stack.callback(node.kill)
        asyncio.run(trial.run(options.rotations))
    for line in trial.findings[:50]:
        print_line(line)
    print_line(f"{trial.count():,} messages acknowledged: {len(trial.findings)} findings")
    return 1 if trial.findings else 0


if __name__ == "__main__":
    sys.exit(main())
