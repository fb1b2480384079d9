"""A node whose etcd and PostgreSQL require TLS, certificates and passwords, which are rotated while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from aetcd import rpc
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.core.clock import SystemClock
from millstream_testing.command import CommandLine, call_command
from millstream_testing.etcd_server import EncryptedEtcdServer
from millstream_testing.postgres_server import EncryptedPostgresServer
from millstream_testing.security import Certificates
from millstream_testing.server import Server

WAIT_S = 60.0
CLUSTER = "behind-tls"
ETCD_WORD, ROOT_WORD, CATALOG_WORD = "a-password-of-etcd", "a-password-of-root", "a-password-of-postgres"


class Stores(NamedTuple):
    etcd: EncryptedEtcdServer
    postgres: EncryptedPostgresServer
    catalog: str
    """The URL of the catalog, without a password."""
    folder: Path

    def settings(self) -> dict[str, object]:
        return {
            "cluster": CLUSTER,
            "etcd": self.etcd.url,
            "etcd-ca": self.etcd.ca,
            "etcd-certificate": self.etcd.certificate,
            "etcd-key": self.etcd.key,
            "etcd-user": "millstream",
            "etcd-password-file": self.folder / "etcd-password",
            "catalog": self.catalog,
            "catalog-password-file": self.folder / "catalog-password",
            "pipelines-enabled": "false",
        }

    def write(self, name: str, word: str) -> None:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(f"{word}\n")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("stores")
    certificates = Certificates(folder / "certs")
    with EncryptedEtcdServer() as etcd, EncryptedPostgresServer(certificates) as postgres:
        asyncio.run(_lock(etcd))
        url = urlsplit(postgres.new_database())
        catalog = url._replace(netloc=f"keeper@{url.hostname}:{url.port}").geturl()
        made = Stores(etcd, postgres, catalog, folder)
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE keeper LOGIN PASSWORD '{CATALOG_WORD}'".encode())
            connection.execute(f'ALTER DATABASE "{url.path.strip("/")}" OWNER TO keeper'.encode())
        made.write("etcd-password", ETCD_WORD)
        made.write("catalog-password", CATALOG_WORD)
        yield made


async def _lock(server: EncryptedEtcdServer) -> None:
    """Enable authentication in etcd, and restrict the user of the nodes to the keys of their cluster."""
    address = EtcdAddress.parse(server.url, ca=server.ca, certificate=server.certificate, key=server.key)
    store = EtcdStore(address, CLUSTER, SystemClock())

    async def ask(name: str, request: Any) -> None:
        await store._members.send(lambda member: getattr(member.logins, name), request, repeatable=False)

    for user, word in (("root", ROOT_WORD), ("millstream", ETCD_WORD)):
        await ask("UserAdd", rpc.AuthUserAddRequest(name=user, password=word))
        await ask("RoleAdd", rpc.AuthRoleAddRequest(name=user))
        await ask("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role=user))
    keys = rpc.Permission(permType=rpc.Permission.READWRITE, key=b"/millstream/", range_end=b"/millstream0")
    await ask("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="millstream", perm=keys))
    await ask("AuthEnable", rpc.AuthEnableRequest())
    await store.close()


@pytest.fixture(scope="module")
def node(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("node") / "data", settings=stores.settings()) as server:
        yield server


def create_topic(server: Server, name: str) -> None:
    """Create a topic; retry if the connection has just been cut."""
    admin, deadline = AdminClient({"bootstrap.servers": server.kafka}), time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        (made,) = admin.create_topics([NewTopic(name, 1, 1)], request_timeout=WAIT_S).values()
        error = made.exception(WAIT_S)
        if error is None or error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return
    raise AssertionError(f"the topic {name} could not be created")


def test_passwords_are_reloaded_and_never_shown(stores: Stores, node: Server) -> None:
    create_topic(node, "before")
    with psycopg.connect(stores.postgres.url, autocommit=True) as connection:
        changed = CATALOG_WORD + "-changed"
        connection.execute(f"ALTER ROLE keeper PASSWORD '{changed}'".encode())
        stores.write("catalog-password", changed)
        gone = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'keeper'"
        assert connection.execute(gone.encode()).fetchall()
    create_topic(node, "after")
    topics = CommandLine(node.kafka)("topic", "list", "--json").document["topics"]
    assert {"before", "after"} <= {topic["topic"] for topic in topics}
    main = psutil.Process(node.pid)
    seen = " ".join(part for process in (main, *main.children(recursive=True)) for part in process.cmdline())
    resource = ConfigResource(ConfigResource.Type.BROKER, "1")
    admin = AdminClient({"bootstrap.servers": node.kafka})
    (described,) = admin.describe_configs([resource]).values()
    seen += str({name: entry.value for name, entry in described.result(WAIT_S).items()})
    seen += str(CommandLine(node.kafka)("cluster", "status", "--json")) + node.log.read_text()
    assert stores.catalog in seen
    assert not [word for word in (ETCD_WORD, ROOT_WORD, CATALOG_WORD) if word in seen]


def test_a_cluster_without_a_key_refuses_secrets(node: Server, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("a-signing-secret-of-the-test")
    command = CommandLine(node.kafka)
    create = ("subscription", "create", "unsealed", "--topic", "before", "--push", "https://example.com")
    refused = command(*create, "--push-secret", f"@{tmp_path}/word")
    assert refused.code == 2
    assert "--secrets-key-file" in refused.err
    assert command(*create).code == 0
    refused = command("subscription", "update", "unsealed", "--push-secret", f"@{tmp_path}/word")
    assert refused.code == 2
    assert "millstream secrets init" in refused.err
    assert command("secrets", "list", "--json").document == {"newest": "", "resealed": 0, "secrets": []}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("catalog-password-file", "none", "No such file"),
        ("catalog-password-file", "exposed", "chmod 600"),
        ("etcd-password-file", "exposed", "chmod 600"),
        ("etcd-user", "", "--etcd-user"),
        ("catalog", "postgresql://millstream:pass-of-url@host:port/db", "--catalog"),
        ("etcd", "millstream:pass-of-url@host:1", "addresses"),
    ],
)
def test_an_invalid_configuration_is_refused_at_once_without_revealing_passwords(
    stores: Stores, tmp_path: Path, name: str, value: str, reason: str
) -> None:
    (tmp_path / "exposed").write_text(ETCD_WORD)
    (tmp_path / "exposed").chmod(0o644)
    argument = str(tmp_path / value) if name.endswith("-file") else value
    settings = stores.settings() | {"data": tmp_path / "data", "kafka": "127.0.0.1:0", "http": "", name: argument}
    refused = call_command(["serve", *(f"--{key}={setting}" for key, setting in settings.items())])
    assert refused.code == 2, refused.err
    assert reason in refused.err
    assert "pass-of-url" not in refused.err + refused.out


def test_the_first_users_are_created_through_tls(
    stores: Stores, node: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "word").write_text("password-of-admin")
    file = stores.folder / "catalog-password"
    create = ("user", "create", "--password-file", str(tmp_path / "word"), "--catalog", stores.catalog)
    made = call_command([*create, "admin", "--catalog-password-file", str(file)])
    assert made.code == 0, made.err
    # The file used by other clients of PostgreSQL.
    passwords = tmp_path / "pgpass"
    passwords.touch(mode=0o600)
    passwords.write_text(f"*:*:*:*:{file.read_text()}")
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    made = call_command([*create, "second"])
    assert made.code == 0, made.err
    monkeypatch.delenv("PGPASSFILE")
    assert call_command([*create, "third"]).code != 0
