"""Authentication and access rules with real clients, unmodified, against a real server process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from conformance.question import Broker, frame_of, read_plain_response, receive_frame
from conformance.questions.asking import batch
from kafka import KafkaConsumer, KafkaProducer
from kafka.net.sasl.oauth import AbstractTokenProvider as KafkaPythonTokens

import millstream
from millstream.broker.net.connection import Connection
from millstream.broker.security.gate import Gate, Session
from millstream.client.admin.security import create_token
from millstream.core.errors import AuthenticationFailed, MillstreamError
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.embedded import EmbeddedBroker
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials, client_tls
from millstream.protocol.wire.replica_fetch import ReplicaFetch, ReplicaPosition, write_replica_fetch
from millstream_testing.command import CommandLine, call_command
from millstream_testing.security import ADMIN, ALICE, MALLORY, Locked, declare_security, locked_server
from millstream_testing.server import Server
from millstream_testing.waiting import until

WAIT_S = 60.0
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    with locked_server(tmp_path_factory.mktemp("locked")) as locked:
        yield locked


def confluent(locked: Locked, who: tuple[str, str], mechanism: str = "SCRAM-SHA-512", **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": locked.server.kafka,
        "log_level": 0,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(locked.certificates.ca),
        "sasl.mechanism": mechanism,
        "sasl.username": who[0],
        "sasl.password": who[1],
        **more,
    }


def send(settings: dict[str, Any], topic: str, value: bytes) -> KafkaError | None:
    """Produce one message; return the error of the broker."""
    errors: list[KafkaError | None] = []
    producer = Producer({**settings, "message.timeout.ms": 20_000})
    producer.produce(topic, value, on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    return errors[0]


def first(settings: dict[str, Any], topic: str, group: str) -> bytes:
    consumer = Consumer({**settings, "group.id": group})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < deadline
            message = consumer.poll(1.0)
            if message is not None:
                if message.error() is not None:
                    raise KafkaException(message.error())
                return message.value() or b""
    finally:
        consumer.close()


# -- clients and mechanisms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confluent_kafka_with_passwords(locked: Locked, mechanism: str) -> None:
    topic = f"alice-confluent-{mechanism}"
    settings = confluent(locked, ALICE, mechanism)
    assert send(settings, topic, b"x") is None
    assert first(settings, topic, "alice-group") == b"x"


def test_confluent_kafka_with_tokens(locked: Locked) -> None:
    def token(_config: str) -> tuple[str, float]:
        return locked.issuer.token("alice"), time.time() + 300

    settings = confluent(locked, ALICE, "OAUTHBEARER", oauth_cb=token)
    del settings["sasl.username"], settings["sasl.password"]
    assert send(settings, "alice-tokens", b"x") is None


def test_confluent_kafka_with_a_certificate(locked: Locked, certificate: tuple[str, str]) -> None:
    settings = {
        "bootstrap.servers": locked.server.kafka,
        "log_level": 0,
        "security.protocol": "SSL",
        "ssl.ca.location": str(locked.certificates.ca),
        "ssl.certificate.location": certificate[0],
        "ssl.key.location": certificate[1],
    }
    assert send(settings, "alice-certificate", b"x") is None
    error = send(settings, "another", b"x")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture(scope="module")
def certificate(locked: Locked) -> tuple[str, str]:
    certificate, key = locked.certificates.client("alice")
    return str(certificate), str(key)


def test_sasl_takes_precedence_over_a_certificate(locked: Locked, certificate: tuple[str, str]) -> None:
    shown = {"ssl.certificate.location": certificate[0], "ssl.key.location": certificate[1]}
    for mechanism in MECHANISMS:
        assert send(confluent(locked, ADMIN, mechanism, **shown), "of-admin", b"x") is None
    error = send(confluent(locked, MALLORY, **shown), "alice-certificate", b"x")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


async def test_aiokafka_with_a_certificate(locked: Locked, certificate: tuple[str, str]) -> None:
    context = ssl.create_default_context(cafile=str(locked.certificates.ca))
    context.load_cert_chain(*certificate)
    settings = {"bootstrap_servers": locked.server.kafka, "security_protocol": "SSL", "ssl_context": context}
    async with AIOKafkaProducer(**settings) as producer:
        await producer.send_and_wait("alice-aiokafka-certificate", b"x")


def test_kafka_python_with_a_certificate(locked: Locked, certificate: tuple[str, str]) -> None:
    producer = KafkaProducer(
        bootstrap_servers=locked.server.kafka,
        security_protocol="SSL",
        ssl_cafile=str(locked.certificates.ca),
        ssl_certfile=certificate[0],
        ssl_keyfile=certificate[1],
    )
    producer.send("alice-kafka-python-certificate", b"x").get(WAIT_S)
    producer.close()


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "OAUTHBEARER"])
async def test_aiokafka(locked: Locked, mechanism: str) -> None:
    class Tokens(AbstractTokenProvider):  # type: ignore[misc]
        async def token(self) -> str:
            return locked.issuer.token("alice")

    settings: dict[str, Any] = {
        "bootstrap_servers": locked.server.kafka,
        "security_protocol": "SASL_SSL",
        "ssl_context": ssl.create_default_context(cafile=str(locked.certificates.ca)),
        "sasl_mechanism": mechanism,
        "sasl_plain_username": ALICE[0],
        "sasl_plain_password": ALICE[1],
        "sasl_oauth_token_provider": Tokens() if mechanism == "OAUTHBEARER" else None,
    }
    topic = f"alice-aiokafka-{mechanism}"
    async with AIOKafkaProducer(**settings) as producer:
        await producer.send_and_wait(topic, b"x")
    async with AIOKafkaConsumer(
        topic, group_id=f"alice-{mechanism}", auto_offset_reset="earliest", **settings
    ) as consumer:
        async with asyncio.timeout(WAIT_S):
            message = await consumer.getone()
    assert message.value == b"x"


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "OAUTHBEARER"])
def test_kafka_python(locked: Locked, mechanism: str) -> None:
    class Tokens(KafkaPythonTokens):  # type: ignore[misc]
        def token(self) -> str:
            return locked.issuer.token("alice")

    settings: dict[str, Any] = {
        "bootstrap_servers": locked.server.kafka,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(locked.certificates.ca),
        "sasl_mechanism": mechanism,
    }
    if mechanism == "OAUTHBEARER":
        settings["sasl_oauth_token_provider"] = Tokens()
    else:
        settings |= {"sasl_plain_username": ALICE[0], "sasl_plain_password": ALICE[1]}
    topic = f"alice-kafka-python-{mechanism}"
    producer = KafkaProducer(**settings)
    producer.send(topic, b"x").get(WAIT_S)
    producer.close()
    consumer = KafkaConsumer(topic, auto_offset_reset="earliest", consumer_timeout_ms=int(WAIT_S * 1000), **settings)
    assert next(consumer).value == b"x"
    consumer.close()


def run_cli(locked: Locked, who: tuple[str, str], *arguments: str, exit_code: int = 0) -> Any:
    """Run a command in its own process with a password or, without a user, a token; return its output."""
    variables = ("MILLSTREAM_USER", "MILLSTREAM_PASSWORD" if who[0] else "MILLSTREAM_TOKEN")
    done = subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", *arguments, "--json", "--brokers", locked.server.kafka],
        env=os.environ | {"MILLSTREAM_TLS_CA": str(locked.certificates.ca)} | dict(zip(variables, who, strict=True)),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    return json.loads(done.stdout or "null")


async def test_a_user_with_a_name_in_another_script(locked: Locked, tmp_path: Path) -> None:
    who = ("Jürgen-王芳", "pässwörd-秘密")
    (tmp_path / "password").write_text(who[1], encoding="utf-8")
    made = ("user", "create", who[0], "--password-file", str(tmp_path / "password"))
    assert (await asyncio.to_thread(run_cli, locked, ADMIN, *made))["user"] == who[0]
    for resource in ("topic:script-", "group:script-"):
        await asyncio.to_thread(run_cli, locked, ADMIN, "acl", "allow", f"User:{who[0]}", "all", resource, "--prefixed")
    for mechanism in MECHANISMS:
        settings = confluent(locked, who, mechanism)
        assert await asyncio.to_thread(send, settings, "script-confluent", b"x") is None
        named = {"sasl_mechanism": mechanism, "sasl_plain_username": who[0], "sasl_plain_password": who[1]}
        common = {"bootstrap_servers": locked.server.kafka, "security_protocol": "SASL_SSL", **named}
        tls = ssl.create_default_context(cafile=str(locked.certificates.ca))
        async with AIOKafkaProducer(**common, ssl_context=tls) as producer:
            await producer.send_and_wait("script-aiokafka", b"x")
        kafka_python = KafkaProducer(**common, ssl_cafile=str(locked.certificates.ca))
        await asyncio.to_thread(lambda sender: sender.send("script-kafka-python", b"x").get(WAIT_S), kafka_python)
        kafka_python.close()
    assert await asyncio.to_thread(first, settings, "script-confluent", "script-group") == b"x"
    ca = locked.certificates.ca
    async with millstream.connect(locked.server.kafka, tls=ca, user=who[0], password=who[1]) as ms:
        await ms.publish("script-sdk", {"n": 1})
    topics = await asyncio.to_thread(run_cli, locked, who, "topic", "list")
    assert {topic["topic"] for topic in topics["topics"]} >= {
        "script-confluent",
        "script-aiokafka",
        "script-kafka-python",
        "script-sdk",
    }
    admin = AdminClient(confluent(locked, ADMIN))
    described: Any = admin.describe_user_scram_credentials([who[0]])
    assert len(described[who[0]].result(WAIT_S).scram_credential_infos) == 2


async def test_an_api_token_acts_as_its_owner_within_its_scope_until_revoked(locked: Locked) -> None:
    allowed = ("--allow", "write,create", "topic:alice-token*", "--allow", "all", "topic:another")
    made = await asyncio.to_thread(run_cli, locked, ALICE, "token", "create", "--expires", "2h", *allowed)
    settings = confluent(locked, (made["id"], made["secret"]), "PLAIN")
    assert await asyncio.to_thread(send, settings, "alice-token-topic", b"x") is None
    for topic in ("alice-elsewhere", "another"):
        error = await asyncio.to_thread(send, settings, topic, b"x")
        assert error is not None
        assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    result = await asyncio.to_thread(run_cli, locked, ALICE, "token", "list")
    assert [token["owner"] for token in result["tokens"] if token["id"] == made["id"]] == ["User:alice"]
    assert made["secret"] not in json.dumps(result)
    assert (await asyncio.to_thread(run_cli, locked, MALLORY, "token", "list"))["tokens"] == []
    await asyncio.to_thread(run_cli, locked, MALLORY, "token", "revoke", made["id"], exit_code=3)

    def by_token(text: str) -> Credentials:
        return Credentials(tls=client_tls(locked.certificates.ca), token=lambda: text)

    async with Client.connect(locked.server.kafka, credentials=by_token(made["token"])) as client:
        channel = await (await client.pool_for(None)).shared()
        assert channel.is_open
        child = await create_token(client)
        assert child.expires_ms <= made["expires_ms"]
        with pytest.raises(MillstreamError, match="may not alter the cluster"):
            await create_token(client, owner="User:admin")
        await asyncio.to_thread(run_cli, locked, ADMIN, "token", "revoke", made["id"])
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(channel._lost)
    for text in (made["token"], child.token):
        with pytest.raises(AuthenticationFailed):
            async with Client.connect(locked.server.kafka, credentials=by_token(text)):
                pass


def test_a_token_revokes_itself(locked: Locked) -> None:
    made = run_cli(locked, ALICE, "token", "create")
    by_itself = ("", made["token"])
    assert run_cli(locked, by_itself, "token", "revoke", made["id"]) == {"id": made["id"], "revoked": True}
    run_cli(locked, by_itself, "token", "list", exit_code=2)


async def test_the_sdk_and_a_subscription(locked: Locked) -> None:
    ca = locked.certificates.ca
    got: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    async with millstream.connect(locked.server.kafka, tls=ca, user=ALICE[0], password=ALICE[1]) as ms:
        await ms.publish("alice-sdk", {"n": 1})

        async def handle(message: Any) -> None:
            if not got.done():
                got.set_result(message.value)

        await ms.subscribe("alice-sdk", handle, name="alice-worker", start="earliest")
        async with asyncio.timeout(WAIT_S):
            await got
    async with millstream.connect(locked.server.kafka, tls=ca, token=lambda: locked.issuer.token("alice")) as ms:
        await ms.publish("alice-sdk", {"n": 2})
    async with Client.connect(
        locked.server.kafka, credentials=Credentials(tls=client_tls(ca), user=ALICE[0], password=ALICE[1])
    ) as client:
        token = (await create_token(client)).token
    async with millstream.connect(locked.server.kafka, tls=ca, token=token) as ms:
        await ms.publish("alice-sdk", {"n": 2})
    async with millstream.connect(locked.server.kafka, tls=ca, user=MALLORY[0], password=MALLORY[1]) as ms:
        with pytest.raises(MillstreamError, match="alice-sdk"):
            await ms.publish("alice-sdk", {"n": 3})
        with pytest.raises(MillstreamError):
            await ms.subscribe("alice-sdk", handle, name="alice-worker")


def test_responses_contain_the_address_of_the_listener_used(locked: Locked) -> None:
    async def addresses(brokers: str, credentials: Credentials) -> set[str]:
        async with Client.connect(brokers, credentials=credentials) as client:
            return {f"{node.host}:{node.port}" for node in (await client.metadata()).nodes.values()}

    user, password = ALICE
    tls = client_tls(locked.certificates.ca)
    reported = asyncio.run(addresses(locked.server.kafka, Credentials(tls=tls, user=user, password=password)))
    assert reported == {locked.server.kafka}
    reported = asyncio.run(addresses(locked.clear, Credentials(user=user, password=password)))
    assert reported == {locked.clear}


# -- refusals -------------------------------------------------------------------------------------------------------


def test_requests_without_an_allow_rule_are_denied_and_hidden(locked: Locked) -> None:
    assert send(confluent(locked, ADMIN), "alice-secret", b"x") is None
    error = send(confluent(locked, MALLORY), "alice-secret", b"x")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    with pytest.raises(KafkaException) as caught:
        first(confluent(locked, MALLORY), "alice-secret", "mallory")
    denied = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)
    assert caught.value.args[0].code() in denied
    admin = AdminClient(confluent(locked, MALLORY))
    assert "alice-secret" not in admin.list_topics(timeout=WAIT_S).topics
    assert "alice-secret" in AdminClient(confluent(locked, ALICE)).list_topics(timeout=WAIT_S).topics


def test_rules_are_managed_by_an_admin_client_and_apply_at_once(locked: Locked) -> None:
    binding = AclBinding(
        ResourceType.TOPIC,
        "shared",
        ResourcePatternType.LITERAL,
        "User:mallory",
        "*",
        AclOperation.WRITE,
        AclPermissionType.ALLOW,
    )
    admin = AdminClient(confluent(locked, ADMIN))
    assert send(confluent(locked, ADMIN), "shared", b"x") is None
    assert send(confluent(locked, MALLORY), "shared", b"x") is not None
    for created in admin.create_acls([binding]).values():
        created.result(WAIT_S)
    assert send(confluent(locked, MALLORY), "shared", b"x") is None
    everything = AclBindingFilter(
        ResourceType.TOPIC,
        "shared",
        ResourcePatternType.LITERAL,
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    assert admin.describe_acls(everything).result(WAIT_S) == [binding]
    for deleted in admin.delete_acls([everything]).values():
        assert deleted.result(WAIT_S) == [binding]
    assert send(confluent(locked, MALLORY), "shared", b"x") is not None
    alice = AdminClient(confluent(locked, ALICE))
    refused = alice.create_acls([binding])
    with pytest.raises(KafkaException) as caught:
        refused[binding].result(WAIT_S)
    assert caught.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED


async def test_users_are_managed_by_an_admin_client_and_lose_their_connections(locked: Locked) -> None:
    admin = AdminClient(confluent(locked, ADMIN))
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)
    upsertion = UserScramCredentialUpsertion("carol", info, b"carol-password")
    for changed in admin.alter_user_scram_credentials([upsertion]).values():
        changed.result(WAIT_S)
    asked: Any = admin.describe_user_scram_credentials(["carol"])
    described = asked["carol"].result(WAIT_S)
    assert [info.mechanism for info in described.scram_credential_infos] == [ScramMechanism.SCRAM_SHA_512]
    who = Credentials(tls=client_tls(locked.certificates.ca), user="carol", password="carol-password")
    async with Client.connect(locked.server.kafka, credentials=who) as client:
        channel = await (await client.pool_for(None)).shared()
        assert channel.is_open
        deletion = UserScramCredentialDeletion("carol", ScramMechanism.SCRAM_SHA_512)
        for changed in admin.alter_user_scram_credentials([deletion]).values():
            await asyncio.to_thread(changed.result, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(channel._lost)
    with pytest.raises(AuthenticationFailed):
        async with Client.connect(locked.server.kafka, credentials=who):
            pass


def test_the_user_who_changes_their_own_password_gets_a_response(locked: Locked) -> None:
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)

    def set_password(signed_in: tuple[str, str], password: str) -> None:
        admin = AdminClient(confluent(locked, signed_in))
        upsertion = UserScramCredentialUpsertion("dora", info, password.encode())
        for changed in admin.alter_user_scram_credentials([upsertion]).values():
            changed.result(WAIT_S)

    set_password(ADMIN, "dora-password")
    set_password(("dora", "dora-password"), "another-password")
    set_password(("dora", "another-password"), "dora-password")


async def test_publishing_without_a_credential_is_refused_at_once(locked: Locked) -> None:
    # Using up the timeout would fail the test.
    async with millstream.connect(locked.server.kafka, tls=locked.certificates.ca, publish_timeout=3600) as ms:
        with pytest.raises(AuthenticationFailed, match=r"requires authentication.*\(user= and password=, or token=\)"):
            await ms.publish("orders", 1)


def test_a_command_explains_how_to_authenticate(locked: Locked, tmp_path: Path) -> None:
    millstream = CommandLine(locked.server.kafka)
    (tmp_path / "word").write_text("not the password")
    tls = ("--tls-ca", locked.certificates.ca)
    wrong = (*tls, "--user", "alice", "--password-file", tmp_path / "word")
    soon = ("topic", "list", "--timeout", 2)
    assert "if it uses TLS, pass the authority of its certificate with --tls-ca" in millstream(*soon).err
    assert "if it requires authentication, pass a user" in millstream(*soon, *tls).err
    assert "authentication failed" in millstream("topic", "list", *wrong).err
    result = millstream("doctor", *wrong)
    assert (result.code, "check --user, --password-file" in result.out) == (2, True)


def test_a_wrong_password_is_an_authentication_error(locked: Locked) -> None:
    failures: list[KafkaError] = []
    settings = confluent(locked, ("alice", "not her password"), error_cb=failures.append)
    producer = Producer(settings)
    deadline = time.monotonic() + WAIT_S
    while not any(error.code() == KafkaError._AUTHENTICATION for error in failures):
        assert time.monotonic() < deadline
        producer.poll(0.2)


@pytest.mark.parametrize(
    "credentials",
    [
        lambda locked: Credentials(tls=client_tls(locked.certificates.ca)),
        lambda locked: Credentials(tls=client_tls(locked.certificates.ca), user="nobody", password="nobody-password"),
        lambda locked: Credentials(tls=client_tls(locked.certificates.ca), token=lambda: "no.such.token"),
        lambda locked: Credentials(tls=client_tls(locked.certificates.ca), user="__node", password="x"),
        lambda locked: Credentials(tls=client_tls(), user=ALICE[0], password=ALICE[1]),
        lambda _locked: Credentials(user=ALICE[0], password=ALICE[1]),
    ],
    ids=["nobody", "unknown", "token", "node", "untrusted", "in clear"],
)
async def test_unknown_clients_are_refused(locked: Locked, credentials: Callable[[Locked], Credentials]) -> None:
    with pytest.raises(MillstreamError):
        async with Client.connect(locked.server.kafka, timeout_s=3, credentials=credentials(locked)) as client:
            await client.metadata()


# -- on the wire ----------------------------------------------------------------------------------------------------


def send_plain_text(address: str, *frames: bytes) -> bytes:
    """Send frames in plain text and read until the broker disconnects."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        response = b""
        # It may disconnect before it has read everything; the end is a reset then.
        with suppress(ConnectionError):
            connection.sendall(b"".join(struct.pack(">i", len(frame)) + frame for frame in frames))
            while piece := connection.recv(65536):
                response += piece
        return response


def request(key: int, version: int, body: bytes = b"") -> bytes:
    return struct.pack(">hhih", key, version, 1, 1) + b"c" + body


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([request(3, 1, struct.pack(">i", -1))], id="metadata"),
        pytest.param([request(17, 1, b"\0\x05PLAIN"), request(3, 1, struct.pack(">i", -1))], id="in between"),
        pytest.param([request(32000, 0)], id="private"),
    ],
)
def test_requests_before_authentication_close_the_connection(locked: Locked, frames: list[bytes]) -> None:
    response = send_plain_text(locked.clear, *frames)
    assert b"alice" not in response
    assert len(response) < 200


def test_a_large_frame_before_authentication_closes_the_connection(locked: Locked) -> None:
    host, port = locked.clear.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(struct.pack(">i", 1024 * 1024))
        assert connection.recv(1) == b""


def test_many_requests_before_authentication_close_the_connection(locked: Locked) -> None:
    response = send_plain_text(locked.clear, *[request(17, 1, b"\0\x05PLAIN")] * 40)
    assert response.count(b"SCRAM-SHA-256") <= 16


def test_bare_tokens_after_the_first_version_of_the_handshake(locked: Locked) -> None:
    host, port = locked.clear.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        handshake = request(17, 0, b"\0\x05PLAIN")
        connection.sendall(struct.pack(">i", len(handshake)) + handshake)
        (size,) = struct.unpack(">i", connection.recv(4))
        assert connection.recv(size)[4:6] == b"\0\0"
        token = b"\0alice\0alice-password"
        connection.sendall(struct.pack(">i", len(token)) + token)
        assert connection.recv(4) == struct.pack(">i", 0)
        versions = request(18, 0)
        connection.sendall(struct.pack(">i", len(versions)) + versions)
        assert len(connection.recv(4)) == 4


def plain(user: str, password: str) -> bytes:
    message = f"\0{user}\0{password}".encode()
    return request(36, 1, struct.pack(">i", len(message)) + message)


def test_no_other_request_is_served_during_and_after_a_failed_reauthentication(tmp_path: Path) -> None:
    declare_security(tmp_path / "data", dict((ADMIN, ALICE)))
    settings = {"auth": "required", "super-users": "admin", "session-max-ms": 600_000}
    handshake, metadata = request(17, 1, b"\0\x05PLAIN"), request(3, 1, struct.pack(">i", -1))
    with Server(tmp_path / "data", settings=settings) as server:
        port = struct.pack(">i", int(server.kafka.rsplit(":", 1)[1]))

        def codes(*frames: bytes) -> list[int]:
            """Return the error codes of the responses, -1 for that of Metadata."""
            response, found_codes = send_plain_text(server.kafka, handshake, plain(*ADMIN), *frames), []
            while response:
                (size,) = struct.unpack_from(">i", response)
                body, response = response[8 : 4 + size], response[4 + size :]
                found_codes.append(-1 if port in body else struct.unpack_from(">h", body)[0])
            return found_codes

        # The last request closes the connection.
        assert codes(metadata, request(32767, 0)) == [0, 0, -1]
        assert codes(handshake, metadata) == [0, 0, 0]
        for someone in (("admin", "not the password"), ALICE):
            assert codes(handshake, plain(*someone), metadata) == [0, 0, 0, 58]


@pytest.mark.parametrize("signs_in_again", [True, False])
def test_a_request_in_progress_outlives_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signs_in_again: bool
) -> None:
    sessions: list[Session] = []
    open_session = Gate._open_session

    def opened(gate: Gate, connection: Connection) -> Session:
        sessions.append(open_session(gate, connection))
        return sessions[-1]

    monkeypatch.setattr(Gate, "_open_session", opened)
    declare_security(tmp_path / "data", dict((ADMIN,)))
    settings = {"auth": "required", "super-users": "admin", "session-max-ms": 600_000}
    topic = {"name": "orders", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    created = frame_of(19, 5, {"topics": [topic], "timeout": 30_000})
    data = [{"name": "orders", "partition_data": [{"index": 0, "records": batch()}]}]
    produced = frame_of(0, 9, {"acks": -1, "timeout": 30_000, "topic_data": data})
    requested_topics = [
        {"topic": "orders", "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]}
    ]
    fetched = {
        "max_wait": 60_000,
        "min_bytes": 1,
        "session_epoch": -1,
        "forgotten_topics_data": [],
        "topics": requested_topics,
    }
    word = "\0".join(("", *ADMIN)).encode()
    signed_in = frame_of(17, 1, {"mechanism": "PLAIN"}), frame_of(36, 1, {"auth_bytes": word})
    node = EmbeddedBroker(tmp_path / "data", kafka="127.0.0.1:0", http="", settings=settings)
    node.start_and_wait()
    try:
        broker = Broker(node.kafka_address)
        with broker.connected() as waiting, broker.connected() as other:
            for frame in (*signed_in, created):
                other.sendall(frame)
                receive_frame(other)
            for frame in signed_in:
                waiting.sendall(frame)
                receive_frame(waiting)
            waiting.sendall(frame_of(1, 12, fetched))
            connection = sessions[-1]._connection

            async def end_session() -> None:
                await until(lambda: connection._is_waiting)
                sessions[-1]._expire()

            asyncio.run_coroutine_threadsafe(end_session(), connection._loop).result(WAIT_S)
            other.sendall(produced)
            receive_frame(other)
            response = read_plain_response(1, 12, receive_frame(waiting))
            assert response["responses"][0]["partitions"][0]["records"]
            for frame in (*(signed_in if signs_in_again else ()), frame_of(3, 1, {"topics": []})):
                waiting.sendall(frame)
                if signs_in_again:
                    receive_frame(waiting)
                else:
                    assert not waiting.recv(1), "no other request is served"
    finally:
        node.stop_and_wait()


def test_a_client_that_is_not_a_node_may_not_follow_a_partition(locked: Locked) -> None:
    # Its own topic, in the name of node 1.
    old = struct.pack(">iiiibi", 1, 0, 0, 1000, 0, 1) + b"\0\x07alice-x" + struct.pack(">iiqi", 1, 0, 0, 1000)
    position = ReplicaPosition(Offset(0), Epoch(-1), Epoch(0), Offset(0), 1000)
    topic = UUID(int=7)
    new = write_replica_fetch(ReplicaFetch(NodeId(1), 1, 0, 1000, {(topic, PartitionIndex(0)): position}))
    fetches = request(1, 4, old), request(1, 17, b"\0" + new)
    # The last request closes the connection.
    response = send_plain_text(locked.clear, request(17, 1, b"\0\x05PLAIN"), plain(*ALICE), *fetches, request(32767, 0))
    denied = struct.pack(">ihq", 0, KafkaError.TOPIC_AUTHORIZATION_FAILED, -1)
    assert b"\0\x07alice-x" + struct.pack(">i", 1) + denied in response
    assert topic.bytes + b"\x02" + denied in response


# -- certificates change --------------------------------------------------------------------------------------------


async def test_a_renewed_certificate_is_used_and_no_connection_is_dropped(locked: Locked) -> None:
    host, port = locked.server.kafka.rsplit(":", 1)

    def serial() -> str:
        context = ssl.create_default_context(cafile=str(locked.certificates.ca))
        with (
            socket.create_connection((host, int(port)), timeout=WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            shown: Any = connection.getpeercert()
            return str(shown["serialNumber"])

    who = Credentials(tls=client_tls(locked.certificates.ca), user=ALICE[0], password=ALICE[1])
    async with Client.connect(locked.server.kafka, credentials=who) as client:
        channel = await (await client.pool_for(None)).shared()
        before = await asyncio.to_thread(serial)
        locked.certificates.renew_node()
        assert await asyncio.to_thread(serial) != before
        await client.metadata()
        assert channel is await (await client.pool_for(None)).shared()


async def test_a_session_is_renewed_over_another_connection(tmp_path: Path) -> None:
    declare_security(tmp_path / "data", dict((ADMIN,)))
    settings = {"auth": "required", "super-users": "admin", "session-max-ms": 1000}
    with Server(tmp_path / "data", settings=settings) as server:
        who = Credentials(user=ADMIN[0], password=ADMIN[1])
        async with Client.connect(server.kafka, credentials=who) as client:
            channel = await (await client.pool_for(None)).shared()
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(channel._lost)
            assert await client.metadata()


async def test_a_profile_signs_in(locked: Locked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles.toml").write_text(
        f"""
        [locked]
        brokers = "{locked.server.kafka}"
        tls-ca = "{locked.certificates.ca}"
        user = "{ALICE[0]}"
        password = "{ALICE[1]}"

        [wrong]
        brokers = "{locked.server.kafka}"
        tls-ca = "{locked.certificates.ca}"
        user = "{ALICE[0]}"
        password = "another-password"
        """
    )
    (tmp_path / "profiles.toml").chmod(0o600)
    monkeypatch.setenv("MILLSTREAM_PROFILES", str(tmp_path / "profiles.toml"))
    async with millstream.connect(profile="locked") as ms:
        await ms.publish("alice-by-profile", b"one", key="k")
    result = await asyncio.to_thread(call_command, ["topic", "list", "--json", "--profile", "locked"])
    assert "alice-by-profile" in {topic["topic"] for topic in result.document["topics"]}
    monkeypatch.setenv("MILLSTREAM_PROFILE", "wrong")
    refused = await asyncio.to_thread(call_command, ["topic", "list"])
    assert refused.code != 0
    assert "another-password" not in refused.err
