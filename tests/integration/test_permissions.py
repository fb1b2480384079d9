"""Every API with each missing permission gets the response of Apache Kafka; private requests need permission, too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from conformance import permission_table
from kio.schema.errors import ErrorCode

from millstream.broker.security.guards import AUTHORIZE_THEMSELVES, guarded_keys
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.embedded import EmbeddedBroker
from millstream.protocol.private.publish_once import publish_once
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.security import declare_security

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
