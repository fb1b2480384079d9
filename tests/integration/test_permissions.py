"""Every API with each missing permission gets the response of Apache Kafka; private requests need permission, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from conformance import permission_table
from kio.schema.errors import ErrorCode

from millstream.broker.security.guards import AUTHORIZE_THEMSELVES, guarded_keys
from millstream.client.admin.security import add_acls, remove_acls
from millstream.core.acl import Acl, AclFilter, Operation, ResourceType
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.core.subscription import DELIVERY
from millstream.embedded import EmbeddedBroker
from millstream.protocol.private.publish_once import publish_once
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.security import declare_security
from millstream_testing.waiting import until_result

CLUSTER_DENIED = ErrorCode.cluster_authorization_failed
ADMIN = Credentials(user="admin", password="admin-password")
UNAUTHORIZED = Credentials(user="unauthorized", password="unauthorized-password")
OPEN: Final = frozenset({17, 18, 36})
"""SaslHandshake, ApiVersions and SaslAuthenticate are for everybody."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    data: Path = tmp_path_factory.mktemp("locked") / "data"
    declare_security(data, {"admin": "admin-password", "unauthorized": "unauthorized-password"})
    settings = {"auth": "required", "super-users": "admin"}
    started = EmbeddedBroker(data, kafka="127.0.0.1:0", http="", settings=settings)
    started.start_and_wait()
    yield started
    started.stop_and_wait()


@pytest.fixture
async def admin(broker: EmbeddedBroker) -> AsyncIterator[Client]:
    async with Client.connect(broker.kafka_address, credentials=ADMIN) as client:
        await client.metadata(["t"], create=True)
        yield client


@pytest.fixture
async def unauthorized(broker: EmbeddedBroker, admin: Client) -> AsyncIterator[Client]:
    async with Client.connect(broker.kafka_address, credentials=UNAUTHORIZED) as client:
        yield client


def test_every_api_is_covered() -> None:
    asked = {int(question.key) for question in permission_table.QUESTIONS}
    assert asked == (guarded_keys() | AUTHORIZE_THEMSELVES) - OPEN


def test_denied_requests_get_the_responses_of_kafka(tmp_path: Path) -> None:
    # Users without one permission, with all, or with none; `make compare` also checks users with a single one.
    users = [user for user in permission_table.USERS if not user.startswith("only-")]
    responses = permission_table.millstream_responses(tmp_path / "data", users)
    recorded = permission_table.recorded()
    expected = {name: {user: by_user[user] for user in users} for name, by_user in recorded.items()}
    differing = permission_table.differences(expected, responses)
    assert not differing, "\n".join(differing)
    # The intended differences still exist; otherwise they need no exception.
    accepted = {*permission_table.ACCEPTED, *permission_table.OTHERWISE}
    assert not [name for name in sorted(accepted) if responses[name] == expected[name]]


async def test_private_requests_are_denied_without_permission(unauthorized: Client, admin: Client) -> None:
    await SubscriptionClient(admin).create("g", ["t"], {})
    subscriptions = SubscriptionClient(unauthorized)
    with pytest.raises(NotAuthorized):
        await subscriptions.create("g2", ["t"], {})
    with pytest.raises(NotAuthorized):
        await subscriptions.delete("g")
    assert await subscriptions.describe() == []
    with pytest.raises(NotAuthorized):
        await subscriptions.describe(["g"])
    with pytest.raises(MillstreamError):
        await publish_once(unauthorized, "t", 0, [NewRecord(None, b"x")])
    for key in (32000, 32001):
        response = msgspec.msgpack.decode(bytes(await unauthorized.private(None, key, b"")))
        assert response["error"] == int(CLUSTER_DENIED)
        assert set(response) == {"error", "message"}
    assert not msgspec.msgpack.decode(bytes(await admin.private(None, 32001, b"")))["error"]


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
async def test_a_worker_that_waits_gets_nothing_after_its_permission_is_removed(
    unauthorized: Client, admin: Client, delivery: str
) -> None:
    name, subscriptions = f"waiting-{delivery}", SubscriptionClient(admin)
    kinds = (ResourceType.TOPIC, ResourceType.GROUP)
    rules = [
        Acl(principal="User:unauthorized", resource_type=kind, resource_name=name, operation=Operation.READ)
        for kind in kinds
    ]
    await admin.metadata([name], create=True)
    await subscriptions.create(name, [name], {DELIVERY: delivery})
    await add_acls(admin, rules)
    worker = SubscriptionClient(unauthorized)
    # The first request opens the queue.
    assert await worker.receive(name, "w", max_records=1) == []
    waiting = asyncio.create_task(worker.receive(name, "w", max_records=1, wait_ms=120_000))

    async def is_waiting() -> bool:
        (described,) = await subscriptions.describe([name])
        return bool(sum(queue["waiting_workers"] for queue in described["queues"]))

    await until_result(is_waiting)
    await remove_acls(admin, [AclFilter(resource_type=ResourceType.TOPIC, resource_name=name)])
    await admin.produce(name, 0, encode_batch([NewRecord(None, b"x")]))
    with pytest.raises(NotAuthorized):
        await waiting
    (message,) = await subscriptions.receive(name, "w", max_records=1, wait_ms=120_000)
    assert message.attempt == 1, "it was not delivered"
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])
