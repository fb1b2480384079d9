"""Pipelines and push act with the current permissions of their owner, the user who changed them last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)
from confluent_kafka.admin import ResourceType as Kind  # type: ignore[attr-defined]
from kio.schema.alter_share_group_offsets.v0.request import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32, i64

from millstream.client.admin.pipelines import PipelineClient
from millstream.client.admin.security import add_acls, delete_user, list_tokens, put_user, remove_acls
from millstream.core.acl import Acl, AclFilter, Operation, ResourceType
from millstream.core.errors import NotAuthorized
from millstream.core.pipeline import PipelineKind, Rule
from millstream.core.push import URL
from millstream.core.subscription import DEAD_LETTER_TOPIC, START, Verb
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.security import declare_security, owner_rules
from millstream_testing.server import Server
from millstream_testing.waiting import until_result
from millstream_testing.webhook import Webhook

WAIT_S = 240.0
# Spark's first steps take long on a slow machine.
pytestmark = pytest.mark.timeout(600)
PASSWORD = "a-long-password"


class Locked(NamedTuple):
    server: Server

    @asynccontextmanager
    async def connected(self, user: str) -> AsyncIterator[Client]:
        credentials = Credentials(user=user, password=PASSWORD)
        async with Client.connect(self.server.kafka, credentials=credentials) as client:
            yield client


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("owners")
    declare_security(folder / "data", {"admin": PASSWORD})
    settings = {
        "auth": "required",
        "super-users": "admin",
        "push-private-addresses": "true",
        "pipelines-master": "local[1]",
        "group-initial-delay-ms": 100,
    }
    with Server(folder / "data", settings=settings) as server:
        yield Locked(server)


async def publish(client: Client, topic: str, value: bytes) -> None:
    await client.produce(topic, 0, encode_batch([NewRecord(None, value)]))


async def test_a_pipeline_runs_as_its_owner_and_is_parked_when_the_owner_is_deleted(locked: Locked) -> None:
    async with locked.connected("admin") as admin:
        await put_user(admin, "olga", PASSWORD)
        await add_acls(admin, owner_rules("olga", "olga"))
        await admin.metadata(["olga-in"], create=True)
        await publish(admin, "olga-in", b"{}")
        async with locked.connected("olga") as olga:
            rule = Rule(name="all", topic="olga-in", targets=("olga-out",))
            await PipelineClient(olga).create("olga-route", PipelineKind.ROUTE, {}, rules=[rule])
            await PipelineClient(olga).create("olga-land", PipelineKind.LAND, {"topics": "olga-in"})

        async def described(name: str = "olga-route") -> dict[str, Any]:
            return (await PipelineClient(admin).describe([name]))[0]

        async def have_run() -> bool:
            statuses = [await described(name) for name in ("olga-route", "olga-land")]
            assert not any(status["parked"] for status in statuses), statuses
            return all(status["report"] and status["report"]["rows"] for status in statuses)

        await until_result(have_run)
        assert (await described())["owner"] == "User:olga"
        assert {token.owner for token in await list_tokens(admin)} == {"User:olga"}
        await delete_user(admin, "olga")
        parked = await until_result(lambda: _parked(described))
        assert "its owner User:olga was deleted" in parked
        assert not await list_tokens(admin), "a deleted user's tokens are revoked"
        await put_user(admin, "olga", "another-password")
        assert (await described())["parked"], "another user of the same name does not start it"
        await PipelineClient(admin).start("olga-route")
        assert (await described())["owner"] == "User:admin"


async def _parked(described: Any) -> str:
    return str((await described())["parked"])


async def test_push_is_parked_while_its_owner_may_not_read(locked: Locked) -> None:
    reads = Acl(
        resource_type=ResourceType.TOPIC, resource_name="petra-in", principal="User:petra", operation=Operation.READ
    )
    group = Acl(
        resource_type=ResourceType.GROUP, resource_name="petra-hook", principal="User:petra", operation=Operation.ALL
    )
    async with locked.connected("admin") as admin, Webhook() as hook:
        await put_user(admin, "petra", PASSWORD)
        await add_acls(admin, [group])
        await admin.metadata(["petra-in"], create=True)
        await SubscriptionClient(admin).create("petra-hook", ["petra-in"], {START: "earliest"})
        async with locked.connected("petra") as petra:
            with pytest.raises(NotAuthorized, match="every topic of the subscription"):
                await SubscriptionClient(petra).alter("petra-hook", {URL: hook.url})
            await add_acls(admin, [reads])
            await SubscriptionClient(petra).alter("petra-hook", {URL: hook.url})
        await publish(admin, "petra-in", b"1")
        await hook.until(lambda: len(hook.requests) >= 1, wait_s=WAIT_S)

        async def state() -> Any:
            (described,) = await SubscriptionClient(admin).describe(["petra-hook"])
            assert described["owner"] == "User:petra"
            return described["push"] and described["push"][0]

        await remove_acls(admin, [AclFilter(principal="User:petra", resource_type=ResourceType.TOPIC)])

        async def is_parked() -> bool:
            found_state = await state()
            return bool(found_state) and found_state["state"] == "parked"

        await until_result(is_parked)
        assert "User:petra may not read topic 'petra-in'" in (await state())["last_error"]
        await publish(admin, "petra-in", b"2")
        assert len(hook.requests) == 1
        await add_acls(admin, [reads])
        await hook.until(lambda: len(hook.requests) >= 2, wait_s=WAIT_S)


async def use_share_group(admin: Client, group: str, topic: str) -> None:
    """Let the consumers of another user use a share group for a topic that its owner may not read."""
    await admin.metadata([topic], create=True)
    place = AlterShareGroupOffsetsRequestPartition(partition_index=i32(0), start_offset=i64(0))
    moved = AlterShareGroupOffsetsRequestTopic(topic_name=TopicName(topic), partitions=(place,))
    await admin.send(None, AlterShareGroupOffsetsRequest(group_id=GroupId(group), topics=(moved,)))
    await publish(admin, topic, b"secret")


async def test_a_share_group_is_not_pushed_since_its_topics_are_those_of_others(locked: Locked) -> None:
    group = "sonja-shared"
    reads = Acl(resource_type=ResourceType.GROUP, resource_name=group, principal="User:sonja", operation=Operation.READ)
    async with locked.connected("admin") as admin, Webhook() as hook:
        await put_user(admin, "sonja", PASSWORD)
        await add_acls(admin, [reads])
        async with locked.connected("sonja") as sonja:
            await SubscriptionClient(sonja).create(group, [], {URL: hook.url})
        await use_share_group(admin, group, "sonja-hidden")

        async def pushed() -> Any:
            (described,) = await SubscriptionClient(admin).describe([group])
            return described["push"]

        (state,) = await until_result(pushed)
        assert (state["state"], not hook.requests) == ("parked", True)
        assert "it is a share group" in state["last_error"]


async def test_a_share_group_writes_no_letters_with_messages_that_its_owner_may_not_read(locked: Locked) -> None:
    group, hidden, letters = "tina-shared", "tina-hidden", "tina-letters"
    rules = [
        Acl(resource_type=kind, resource_name=name, principal="User:tina", operation=operation)
        for kind, name, operation in (
            (ResourceType.GROUP, group, Operation.READ),
            (ResourceType.TOPIC, letters, Operation.ALL),
        )
    ]
    async with locked.connected("admin") as admin:
        subscriptions = SubscriptionClient(admin)
        await put_user(admin, "tina", PASSWORD)
        await add_acls(admin, rules)
        async with locked.connected("tina") as tina:
            await SubscriptionClient(tina).create(group, [], {DEAD_LETTER_TOPIC: letters})
        await use_share_group(admin, group, hidden)
        received = await subscriptions.receive(group, "w", max_records=1, wait_ms=60_000)
        await subscriptions.settle(group, "w", received, Verb.REJECT)

        async def is_decided() -> Any:
            (described,) = await subscriptions.describe([group])
            return [queue for queue in described["queues"] if queue["refused_letters"] or queue["dead_lettered"]]

        (queue,) = await until_result(is_decided)
        assert (queue["refused_letters"], queue["dead_lettered"]) == (1, 0)
        assert f"User:tina may not read topic {hidden!r}" in queue["letter_refusal"]
        # The user who changes the group is its owner from then on.
        await subscriptions.alter(group, {DEAD_LETTER_TOPIC: letters})
        await publish(admin, hidden, b"another")
        received = await subscriptions.receive(group, "w", max_records=1, wait_ms=60_000)
        await subscriptions.settle(group, "w", received, Verb.REJECT)

        async def is_written() -> bool:
            return any(queue["dead_lettered"] for queue in await is_decided())

        await until_result(is_written)


async def test_push_of_a_deleted_user_is_not_resumed_for_a_new_user_of_that_name(locked: Locked) -> None:
    rules = [
        Acl(resource_type=kind, resource_name=name, principal="User:rita", operation=Operation.ALL)
        for kind, name in ((ResourceType.TOPIC, "rita-in"), (ResourceType.GROUP, "rita-hook"))
    ]
    async with locked.connected("admin") as admin, Webhook() as hook:
        await put_user(admin, "rita", PASSWORD)
        await add_acls(admin, rules)
        await admin.metadata(["rita-in"], create=True)
        async with locked.connected("rita") as rita:
            await SubscriptionClient(rita).create("rita-hook", ["rita-in"], {START: "earliest", URL: hook.url})
        await publish(admin, "rita-in", b"1")
        await hook.until(lambda: len(hook.requests) >= 1, wait_s=WAIT_S)

        async def described() -> Any:
            return (await SubscriptionClient(admin).describe(["rita-hook"]))[0]

        async def is_parked() -> bool:
            return [pusher["state"] for pusher in (await described())["push"] or ()] == ["parked"]

        await delete_user(admin, "rita")
        await put_user(admin, "rita", PASSWORD)
        await until_result(is_parked)
        document = await described()
        assert document["owner"] == "User:rita (deleted)"
        assert document["push"][0]["last_error"].startswith("its owner User:rita was deleted;")
        async with locked.connected("rita") as rita:
            await SubscriptionClient(rita).alter("rita-hook", {URL: hook.url})
        assert (await described())["owner"] == "User:rita"
        await publish(admin, "rita-in", b"2")
        await hook.until(lambda: len(hook.requests) >= 2, wait_s=WAIT_S)


async def test_an_endpoint_is_not_set_through_the_configuration_of_a_group_either(locked: Locked) -> None:
    alters = Acl(
        resource_type=ResourceType.GROUP,
        resource_name="quinn-hook",
        principal="User:quinn",
        operation=Operation.ALL,
    )
    async with locked.connected("admin") as admin:
        await put_user(admin, "quinn", PASSWORD)
        await add_acls(admin, [alters])
        await admin.metadata(["quinn-in"], create=True)
        await SubscriptionClient(admin).create("quinn-hook", ["quinn-in"], {})
    client = AdminClient(
        {
            "bootstrap.servers": locked.server.kafka,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "quinn",
            "sasl.password": PASSWORD,
            "log_level": 0,
        }
    )
    entry = ConfigEntry(URL, "http://127.0.0.1:9/", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(Kind.GROUP, "quinn-hook", incremental_configs=[entry])
    (changed,) = client.incremental_alter_configs([resource]).values()
    with pytest.raises(KafkaException, match="every topic of the subscription"):
        await asyncio.to_thread(changed.result, WAIT_S)
