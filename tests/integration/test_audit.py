"""The audit log as seen by its readers: written by a locked broker, read with a Kafka client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from millstream.client.admin.pipelines import PipelineClient
from millstream.core import acl
from millstream.core.errors import AuthenticationFailed
from millstream.embedded import EmbeddedBroker
from millstream.protocol.private.browse_messages import AuditReadingRequest
from millstream.protocol.private.message import request_private
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.security import declare_security
from millstream_testing.waiting import wait_until

WAIT_S: Final = 60.0
USERS: Final = {name: f"{name}-password" for name in ("admin", "auditor", "everything", "mallory")}
AUDIT: Final = "__audit"
DENIED: Final = KafkaError.TOPIC_AUTHORIZATION_FAILED
Event = dict[str, Any]


def rule(principal: str, name: str, operation: acl.Operation) -> acl.Acl:
    return acl.Acl(
        resource_type=acl.ResourceType.TOPIC, resource_name=name, principal=f"User:{principal}", operation=operation
    )


def audited(data: Path, **more: Any) -> EmbeddedBroker:
    """A broker on a new folder whose auditor may read the log."""
    rules = {rule("auditor", AUDIT, acl.Operation.READ), rule("everything", "*", acl.Operation.ALL)}
    # Consumers look up the coordinator of their group, although they use none.
    rules.add(
        acl.Acl(
            resource_type=acl.ResourceType.GROUP,
            resource_name="unused",
            principal=acl.EVERYONE,
            operation=acl.Operation.READ,
        )
    )
    declare_security(data, USERS, frozenset(rules))
    return EmbeddedBroker(data, settings={"auth": "required", "super-users": "admin"}, **more)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    started = audited(tmp_path_factory.mktemp("audited") / "data", http="127.0.0.1:0")
    started.start_and_wait()
    yield started
    started.stop_and_wait()


def settings_of(broker: EmbeddedBroker, user: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.kafka_address,
        "log_level": 0,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": user,
        "sasl.password": USERS[user],
    }


def read_audit(broker: EmbeddedBroker, matches: Callable[[Event], bool]) -> Event:
    """Read from the beginning until an event is found."""
    consumer = Consumer({**settings_of(broker, "auditor"), "group.id": "unused"})
    consumer.assign([TopicPartition(AUDIT, 0, OFFSET_BEGINNING)])
    deadline, seen = time.monotonic() + WAIT_S, []
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if message.error() is not None:
                raise KafkaException(message.error())
            event: Event = json.loads(message.value() or b"")
            if matches(event):
                return event
            seen.append(event.get("message"))
        raise AssertionError(f"not among {seen}")
    finally:
        consumer.close()


def changed(kind: str, name: str, activity: int) -> Callable[[Event], bool]:
    def is_wanted(event: Event) -> bool:
        entity = event.get("entity", {})
        return (entity.get("type"), entity.get("name"), event["activity_id"]) == (kind, name, activity)

    return is_wanted


def credentials(user: str, password: str = "") -> Credentials:
    return Credentials(user=user, password=password or USERS[user])


async def test_logins_are_recorded(broker: EmbeddedBroker) -> None:
    with pytest.raises(AuthenticationFailed):
        async with Client.connect(broker.kafka_address, credentials=credentials("mallory", "wrong")) as client:
            await client.metadata([])
    async with Client.connect(broker.kafka_address, credentials=credentials("mallory")) as client:
        await client.metadata([])
    failed = read_audit(broker, lambda event: event["class_uid"] == 3002 and event["status_id"] == 2)
    assert (failed["type_uid"], failed["user"]["name"], failed["src_endpoint"]["ip"]) == (
        300201,
        "mallory",
        "127.0.0.1",
    )
    assert failed["count"] >= 1
    assert "wrong" not in json.dumps({**failed, "status_detail": ""})
    signed_in = read_audit(
        broker, lambda event: event["class_uid"] == 3002 and event.get("user", {}).get("uid") == "User:mallory"
    )
    assert (signed_in["status_id"], signed_in["auth_protocol"]) == (1, "SCRAM-SHA-512")
    assert signed_in["metadata"]["version"]
    assert signed_in["metadata"]["product"]["name"] == "Millstream"


async def test_denials_are_recorded_with_counts(broker: EmbeddedBroker) -> None:
    async with Client.connect(broker.kafka_address, credentials=credentials("mallory")) as client:
        for _ in range(3):
            await client.metadata(["audit-secret"])
    denied = read_audit(
        broker,
        lambda event: event["class_uid"] == 6003 and event["resources"] == [{"type": "topic", "name": "audit-secret"}],
    )
    assert denied["actor"]["user"]["uid"] == "User:mallory"
    assert denied["api"] == {"operation": "describe"}
    assert (denied["status_id"], denied["count"] >= 1) == (2, True)


def test_changes_are_recorded(broker: EmbeddedBroker) -> None:
    admin = AdminClient(settings_of(broker, "admin"))
    admin.create_topics([NewTopic("audited", 1, config={"retention.ms": "1000"})])["audited"].result(WAIT_S)
    created = read_audit(broker, changed("topic", "audited", 1))
    assert created["class_uid"] == 3004
    assert created["actor"]["user"]["uid"] == "User:admin"
    assert created["entity"]["data"] == {"retention.ms": "1000"}
    entry = ConfigEntry("retention.ms", "2000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, "audited", incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(WAIT_S)
    read_audit(broker, changed("topic", "audited", 3))
    admin.delete_topics(["audited"])["audited"].result(WAIT_S)
    read_audit(broker, changed("topic", "audited", 4))

    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    for _ in range(2):
        upsertion = UserScramCredentialUpsertion("audit-bob", credential, b"bob-password")
        admin.alter_user_scram_credentials([upsertion])["audit-bob"].result(WAIT_S)
    for activity in (1, 3):
        account = read_audit(
            broker,
            lambda event: event["class_uid"] == 3001 and event["activity_id"] == activity,  # noqa: B023
        )
        assert account["user"]["uid"] == "User:audit-bob"
        assert "bob-password" not in json.dumps(account)

    binding = AclBinding(
        ResourceType.TOPIC,
        "audited",
        ResourcePatternType.LITERAL,
        "User:audit-bob",
        "*",
        AclOperation.READ,
        AclPermissionType.DENY,
    )
    admin.create_acls([binding])[binding].result(WAIT_S)
    attached = read_audit(broker, lambda event: event["type_uid"] == 300107)
    assert attached["policy"]["name"] == "deny User:audit-bob read topic:audited"
    selected = AclBindingFilter(
        ResourceType.TOPIC,
        "audited",
        ResourcePatternType.LITERAL,
        "User:audit-bob",
        "*",
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    admin.delete_acls([selected])[selected].result(WAIT_S)
    read_audit(broker, lambda event: event["type_uid"] == 300108)


async def test_changes_of_subscriptions_and_pipelines_hide_their_settings(broker: EmbeddedBroker) -> None:
    async with Client.connect(broker.kafka_address, credentials=credentials("admin")) as client:
        await client.metadata(["audit-orders"], create=True)
        await SubscriptionClient(client).create(
            "audit-billing", ["audit-orders"], {"millstream.filter": "payload.secret = 1"}
        )
        made = await PipelineClient(client).create("audit-land", "land", {"topics": AUDIT}, is_enabled=False)
        assert made.notes == [], "the log is a topic that can be landed"
    read_audit(broker, changed("topic", "audit-orders", 1))
    subscription = read_audit(broker, changed("subscription", "audit-billing", 1))
    assert subscription["entity"]["data"] == {"topics": ["audit-orders"], "settings": ["millstream.filter"]}
    pipeline = read_audit(broker, changed("pipeline", "audit-land", 1))
    assert pipeline["entity"]["data"]["settings"] == ["topics"]


async def test_no_client_can_stop_the_log_with_long_texts(broker: EmbeddedBroker) -> None:
    async with Client.connect(broker.kafka_address, credentials=credentials("everything")) as client:
        await client.metadata(["long"], create=True)
        request = AuditReadingRequest(topic="long", how="x" * 2_000_000)
        await asyncio.gather(*(request_private(client, None, request) for _ in range(100)))
        await request_private(client, None, AuditReadingRequest(topic="long", how="short"))
    read_audit(broker, lambda event: event.get("entity", {}).get("data") == {"how": "short"})


def test_http_events_name_the_caller_and_not_the_gateway(broker: EmbeddedBroker) -> None:
    url = f"http://{broker.http_address}"
    wait_until(lambda: httpx.get(f"{url}/readyz", timeout=WAIT_S).status_code == 200)
    refused = httpx.get(f"{url}/v1/topics", auth=("mallory", "guessed"), timeout=WAIT_S)
    assert refused.status_code == 401
    made = httpx.post(f"{url}/v1/topics", json={"topic": "audit-http"}, auth=("admin", USERS["admin"]), timeout=WAIT_S)
    assert made.status_code in (200, 201), made.text
    created = read_audit(broker, changed("topic", "audit-http", 1))
    assert (created["actor"]["user"]["uid"], created["src_endpoint"]["ip"]) == ("User:admin", "127.0.0.1")
    for status, user in ((1, "admin"), (2, "mallory")):
        signed_in = read_audit(
            broker,
            lambda event: event.get("service", {}).get("name") == "http" and event["status_id"] == status,  # noqa: B023
        )
        assert signed_in["user"]["name"] == user


def test_a_wildcard_does_not_match_the_audit_log(broker: EmbeddedBroker) -> None:
    def error_of(user: str) -> int | None:
        error = AdminClient(settings_of(broker, user)).list_topics(AUDIT, WAIT_S).topics[AUDIT].error
        return None if error is None else error.code()

    # The log is created with its first event.
    wait_until(lambda: error_of("auditor") is None)
    assert [error_of(user) for user in ("mallory", "everything")] == [DENIED, DENIED]


def test_the_log_is_append_only_even_for_super_users(broker: EmbeddedBroker) -> None:
    errors: list[KafkaError | None] = []
    producer = Producer({**settings_of(broker, "admin"), "message.timeout.ms": 20_000})
    producer.produce(AUDIT, b"forged", on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    assert errors[0] is not None
    assert errors[0].code() == KafkaError.TOPIC_EXCEPTION
    admin = AdminClient(settings_of(broker, "admin"))
    entry = ConfigEntry("retention.ms", "1", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, AUDIT, incremental_configs=[entry])
    last = TopicPartition(AUDIT, 0, 1)
    attempts = (
        admin.delete_topics([AUDIT])[AUDIT],
        admin.incremental_alter_configs([resource])[resource],
        admin.delete_records([last])[last],
    )
    for attempt in attempts:
        with pytest.raises(KafkaException):
            attempt.result(WAIT_S)


async def test_aggregated_events_are_written_when_a_node_stops(tmp_path: Path) -> None:
    broker = audited(tmp_path / "data")
    await broker.start()
    counts: list[int] = []

    def is_last(event: Event, total: int) -> bool:
        if event.get("resources") == [{"type": "topic", "name": "audit-last"}]:
            counts.append(event["count"])
        return sum(counts) == total

    async with Client.connect(broker.kafka_address, credentials=credentials("mallory")) as client:
        await client.metadata(["audit-last"])
        await asyncio.to_thread(read_audit, broker, lambda event: is_last(event, 1))
        # Within the same minute, so it would otherwise be written later.
        await client.metadata(["audit-last"])
    await broker.stop()
    again = EmbeddedBroker(tmp_path / "data", settings={"auth": "required", "super-users": "admin"})
    await again.start()
    counts.clear()
    try:
        await asyncio.to_thread(read_audit, again, lambda event: is_last(event, 2))
    finally:
        await again.stop()
