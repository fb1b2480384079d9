"""A locked cluster: nodes authenticate each other by certificates, and declarations apply on all nodes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import httpx
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kio.schema.errors import ErrorCode

import millstream
from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.sealing import SecretKey, read_keys, write_keys
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.security.assertion import Assertions
from millstream.broker.security.sasl import AuthenticatedClient
from millstream.broker.security.state import SecurityState
from millstream.cli import certs
from millstream.client.admin.security import (
    add_acls,
    create_token,
    delete_user,
    list_secrets,
    list_tokens,
    put_user,
    revoke_token,
)
from millstream.core import push
from millstream.core.acl import Acl, Operation, PatternType, ResourceType
from millstream.core.credential import SecurityChange, new_credentials
from millstream.core.errors import AuthenticationFailed, BrokerUnreachable, MillstreamError
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.pipelines.source.access import connection_access
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.security_messages import AuthenticateRequest, AuthenticateResponse
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.channel import Channel
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import ASSERTION, Credentials, client_tls, node_by_certificate
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    VERSION,
    ReplicaFetch,
    ReplicaPosition,
    read_replica_responses,
    write_replica_fetch,
)
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server
from millstream_testing.waiting import until_result

WAIT_S = 60.0
CLUSTER = "locked"
ADMIN, ALICE = ("admin", "admin-password"), ("alice", "alice-password")


class Locked(NamedTuple):
    nodes: list[Server]
    certificates: Path

    @property
    def ca(self) -> Path:
        return self.certificates / "ca.pem"

    @property
    def node_files(self) -> dict[str, Path]:
        return {"certificate": self.certificates / "node.pem", "key": self.certificates / "node.key"}

    def credentials(self, who: tuple[str, str]) -> Credentials:
        return Credentials(tls=client_tls(self.ca), user=who[0], password=who[1])


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("cluster")
    url = postgres.new_database()
    catalog = Catalog.open_shared(url)
    catalog.change_security(SecurityChange(put_credentials=new_credentials(*ADMIN)))
    catalog.close()
    nodes = []
    for number in (1, 2):
        certs.init(folder / "certs", ["127.0.0.1"], CLUSTER, number, as_json=True)
        stem = folder / "certs" / ("node" if number == 1 else f"node-{number}")
        settings = {
            "node-id": number,
            "cluster": CLUSTER,
            "etcd": etcd.url,
            "catalog": url,
            "auth": "required",
            "super-users": "admin",
            "tls-cert": f"{stem}.pem",
            "tls-key": f"{stem}.key",
            "tls-client-ca": folder / "certs" / "ca.pem",
            "pipelines-enabled": "false",
            "group-initial-delay-ms": 100,
            "rack": f"rack-{number}",
            "secrets-key-file": folder / f"keys-{number}",
        }
        write_keys(folder / f"keys-{number}", [SecretKey.new()])
        nodes.append(Server(folder / f"node-{number}", settings=settings))
    try:
        for node in nodes:
            node.start()
        yield Locked(nodes, folder / "certs")
    finally:
        for node in nodes:
            node.kill()


async def test_nodes_replicate_and_work_together(locked: Locked) -> None:
    admin = locked.credentials(ADMIN)
    async with Client.connect(locked.nodes[0].kafka, credentials=admin) as client:
        await client.metadata(["orders"], create=True)

        async def in_sync() -> bool:
            described = (await client.metadata(["orders"])).topics["orders"].partitions.values()
            return all(len(partition.in_sync) == 2 for partition in described)

        await until_result(in_sync)
        nodes = (await client.metadata()).nodes.values()
        assert {f"{node.host}:{node.port}" for node in nodes} == {node.kafka for node in locked.nodes}
    handled: asyncio.Queue[Any] = asyncio.Queue()
    connection = millstream.connect(locked.nodes[1].kafka, tls=locked.ca, user=ADMIN[0], password=ADMIN[1])
    async with connection as ms:
        await ms.publish("orders", {"n": 1})
        await ms.subscribe("orders", handled.put, name="worker", start="earliest")
        async with asyncio.timeout(WAIT_S):
            assert (await handled.get()).value == b'{"n":1}'


async def test_a_token_created_on_one_node_is_valid_on_the_other_at_once(locked: Locked) -> None:
    stem = locked.certificates / "node"
    of_node = node_by_certificate(f"{stem}.pem", f"{stem}.key", str(locked.ca), CLUSTER)
    async with Client.connect(locked.nodes[0].kafka, credentials=of_node) as node:
        made = await create_token(node, owner="User:admin")
    # As the tasks of a pipeline connect: to any node, but not as a node.
    access = replace(connection_access(of_node), token=made.token)
    assert access.cluster == CLUSTER
    async with Client.connect(locked.nodes[1].kafka, credentials=access.credentials()) as client:
        assert [token.token_id for token in await list_tokens(client)] == [made.token_id]
    async with Client.connect(locked.nodes[1].kafka, credentials=locked.credentials(ADMIN)) as admin:
        await revoke_token(admin, made.token_id)
    for node_of in locked.nodes:

        async def is_refused(server: Server = node_of) -> bool:
            try:
                async with Client.connect(server.kafka, credentials=access.credentials()):
                    return False
            except AuthenticationFailed:
                return True

        await until_result(is_refused)


async def test_declarations_on_one_node_apply_on_the_other(locked: Locked) -> None:
    rule = Acl(
        resource_type=ResourceType.TOPIC,
        resource_name="alice",
        pattern=PatternType.PREFIXED,
        principal="User:alice",
        operation=Operation.ALL,
    )

    async def publishes() -> bool:
        connection = millstream.connect(
            locked.nodes[1].kafka, tls=locked.ca, user=ALICE[0], password=ALICE[1], connect_timeout=2.0
        )
        try:
            async with connection as ms:
                await ms.publish("alice-orders", {"n": 1})
        except MillstreamError:
            return False
        return True

    async with Client.connect(locked.nodes[0].kafka, credentials=locked.credentials(ADMIN)) as client:
        await put_user(client, *ALICE)
        assert not await publishes()
        await add_acls(client, [rule])
        await until_result(publishes)
        await delete_user(client, ALICE[0])

        async def is_out() -> bool:
            return not await publishes()

        await until_result(is_out)


def open_with(
    locked: Locked, node: Server, assertion: str, *, certificate: Path | None = None, key: Path | None = None
) -> Any:
    """Connect to a node as a gateway does that acts for a caller."""
    host, port = node.kafka.rsplit(":", 1)
    tls = client_tls(locked.ca, certificate=certificate, key=key)
    credentials = Credentials(tls=tls, token=lambda: assertion, mechanism=ASSERTION)
    return Channel.open(host, int(port), client_id="x", timeout_s=WAIT_S, credentials=credentials)


async def test_a_gateway_acts_for_its_caller_at_every_node(locked: Locked) -> None:
    topic, name = "http-orders", "http-workers"
    rules = [
        Acl(
            resource_type=kind,
            resource_name=name,
            pattern=PatternType.LITERAL,
            principal="User:carol",
            operation=operation,
        )
        for kind, name, operation in (
            (ResourceType.TOPIC, topic, Operation.WRITE),
            (ResourceType.TOPIC, topic, Operation.READ),
            (ResourceType.GROUP, name, Operation.ALL),
        )
    ]
    carol = ("carol", "carol-password")
    async with Client.connect(locked.nodes[0].kafka, credentials=locked.credentials(ADMIN)) as client:
        await put_user(client, *carol)
        await add_acls(client, rules)
    tls = client_tls(locked.ca)
    async with httpx.AsyncClient(verify=tls, timeout=WAIT_S, auth=carol) as http:
        first, second = (f"https://{node.http}/v1" for node in locked.nodes)
        created = await http.post(f"{first}/topics", auth=ADMIN, json={"topic": topic, "partitions": 4})
        assert created.status_code == 201, created.text

        async def is_known() -> bool:
            responses = [await http.get(f"{url}/topics/{topic}/partitions/0/messages/0") for url in (first, second)]
            assert {response.status_code for response in responses} <= {401, 404, 503}
            return all(response.status_code == 404 for response in responses)

        await until_result(is_known)
        for partition in range(4):
            for url in (first, second):
                headers = {"message-partition": str(partition)}
                stored = await http.post(f"{url}/topics/{topic}/messages", content=b"x", headers=headers)
                assert stored.status_code == 201, stored.text
        made = await http.post(f"{first}/subscriptions", json={"name": name, "topics": [topic], "start": "start"})
        assert made.status_code == 201, made.text
        count = 0
        async with asyncio.timeout(WAIT_S):
            while count < 8:
                pulled = await http.post(f"{second}/subscriptions/{name}/messages:pull", json={"wait_ms": 1000})
                assert pulled.status_code == 200, pulled.text
                leases = [message["lease"] for message in pulled.json()["messages"]]
                settled = await http.post(f"{first}/subscriptions/{name}/messages:settle", json={"accept": leases})
                assert settled.json()["failed"] == 0, "a lease of one gateway is settled through any other"
                count += len(leases)
        refused = await http.post(f"{first}/topics/orders/messages", content=b"x")
        assert refused.status_code == 403


async def test_assertions_not_signed_by_a_node_are_refused(locked: Locked, tmp_path: Path) -> None:
    async with Client.connect(locked.nodes[0].kafka, credentials=locked.credentials(ADMIN)) as client:
        cluster_id = (await client.metadata([])).cluster_id
    assert cluster_id
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ())
    admin = AuthenticatedClient(principal="User:admin")
    forged = [
        Assertions(state, of, NodeId(number), Ed25519PrivateKey.generate()).sign(admin, "127.0.0.1")
        for of in (cluster_id, "another-cluster")
        for number in (1, 2, 3)
    ]
    catalog.close()
    for text in (*forged, "", "x" * 10_000):
        for node in locked.nodes:
            with pytest.raises(AuthenticationFailed):
                await open_with(locked, node, text, **locked.node_files)


async def test_only_nodes_may_authenticate_callers(locked: Locked) -> None:
    frame = encode(AuthenticateRequest(scheme="basic", host="10.9.9.9", user=ADMIN[0], secret=ADMIN[1]))
    folder = locked.certificates
    node = node_by_certificate(str(folder / "node.pem"), str(folder / "node.key"), str(locked.ca), CLUSTER)
    async with Client.connect(locked.nodes[0].kafka, credentials=locked.credentials(ADMIN)) as admin:
        await put_user(admin, "dave", "dave-password")
    async with Client.connect(locked.nodes[0].kafka, credentials=node) as client:
        response = decode(await client.private(None, AuthenticateRequest.KEY, frame), AuthenticateResponse)
        assert response.principal == "User:admin"
    for target in locked.nodes:
        # Signed by the first, accepted by both.
        channel = await open_with(locked, target, response.assertion, **locked.node_files)
        await channel.close()
        with pytest.raises(AuthenticationFailed, match=ASSERTION):
            # Only nodes accept it: with write access to etcd, the verifying key could have been replaced.
            await open_with(locked, target, response.assertion)
    dave = locked.credentials(("dave", "dave-password"))
    async with Client.connect(locked.nodes[0].kafka, credentials=dave) as client:
        refused = decode(await client.private(None, AuthenticateRequest.KEY, frame), AuthenticateResponse)
    assert (refused.error, refused.assertion) == (31, "")


@pytest.mark.parametrize("who", ["client", "another node", "another cluster"])
async def test_a_client_certificate_of_the_same_authority_cannot_act_as_a_follower(locked: Locked, who: str) -> None:
    folder = locked.certificates
    if who == "client":
        certs.client("eve", folder, as_json=True)
        tls = client_tls(locked.ca, certificate=folder / "eve.pem", key=folder / "eve.key")
        credentials = Credentials(tls=tls)
    elif who == "another node":
        credentials = node_by_certificate(str(folder / "node.pem"), str(folder / "node.key"), str(locked.ca), CLUSTER)
    else:
        certs.init(folder, ["127.0.0.1"], "elsewhere", 3, as_json=True)
        tls = client_tls(locked.ca, certificate=folder / "node-3.pem", key=folder / "node-3.key")
        credentials = Credentials(tls=tls)
    position = ReplicaPosition(Offset(0), Epoch(-1), Epoch(0), Offset(0), 1000)
    fetch = ReplicaFetch(NodeId(2), 1, 0, 1000, {(UUID(int=1), PartitionIndex(0)): position})
    host, port = locked.nodes[0].kafka.rsplit(":", 1)

    async def ask() -> list[int]:
        channel = await Channel.open(host, int(port), client_id="x", timeout_s=WAIT_S, credentials=credentials)
        try:
            response = await channel.exchange(FETCH_KEY, VERSION, [write_replica_fetch(fetch)], timeout_s=WAIT_S)
            return [partition.code for partition in read_replica_responses(response).partitions.values()]
        finally:
            await channel.close()

    if who == "client":
        assert await ask() == [ErrorCode.topic_authorization_failed]
    else:
        with pytest.raises(BrokerUnreachable):
            await ask()


async def test_each_node_writes_to_the_audit_log(locked: Locked) -> None:
    """Its one partition is led by one of them; the other sends its events there."""
    for node in locked.nodes:
        async with Client.connect(node.kafka, credentials=locked.credentials(ADMIN)) as client:
            await client.metadata([])

    def read() -> set[str]:
        settings = {
            "bootstrap.servers": locked.nodes[0].kafka,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(locked.ca),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": ADMIN[0],
            "sasl.password": ADMIN[1],
            "group.id": "audit",
        }
        consumer, writers = Consumer(settings), set[str]()
        consumer.assign([TopicPartition("__audit", 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + WAIT_S
        while len(writers) < len(locked.nodes):
            assert time.monotonic() < deadline, writers
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                writers.add(json.loads(message.value() or b"")["metadata"]["log_provider"])
        consumer.close()
        return writers

    assert await asyncio.to_thread(read) == {"node 1", "node 2"}


async def test_a_node_opens_secrets_of_others_once_it_has_their_key(locked: Locked) -> None:
    first, second = locked.nodes
    keys = [Path(str(node.settings["secrets-key-file"])) for node in locked.nodes]
    (key,) = read_keys(keys[0])
    async with Client.connect(first.kafka, credentials=locked.credentials(ADMIN)) as client:
        settings = {push.URL: "https://example.com/hook", push.SECRET: "a-signing-secret-of-the-test"}
        await SubscriptionClient(client).create("sealed-here", ["sealed-here"], settings)
        (here,) = (await list_secrets(client)).secrets
        assert (here.name, here.setting, here.key, here.problem) == ("sealed-here", push.SECRET, key.key_id, "")
    async with Client.connect(second.kafka, credentials=locked.credentials(ADMIN)) as client:
        (there,) = (await list_secrets(client)).secrets
        assert key.key_id in there.problem
        assert str(keys[1]) in there.problem
        assert "a-signing-secret" not in there.problem

        async def is_parked() -> bool:
            described = await SubscriptionClient(client).describe(["sealed-here"])
            return {
                state["state"] for subscription in described for state in subscription["push"] if state["node"] == 2
            } == {"parked"}

        await until_result(is_parked)
        write_keys(keys[1], [*read_keys(keys[1]), key], replace=True)

        async def is_pushed() -> bool:
            return not await is_parked()

        await until_result(is_pushed)
        assert [secret.problem for secret in (await list_secrets(client)).secrets] == [""]
        await SubscriptionClient(client).delete("sealed-here", force=True)


async def test_clients_avoid_a_node_that_starts_without_knowing_them(locked: Locked) -> None:
    node = locked.nodes[1]
    right = node.settings["catalog"]
    assert node.stop() == 0
    node.settings["catalog"] = "postgresql://nobody@127.0.0.1:1/none"
    try:
        node.start()
        async with httpx.AsyncClient(verify=client_tls(locked.ca), base_url=f"https://{node.http}") as http:
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/v1/topics", auth=ADMIN)).status_code == 504
        with pytest.raises(BrokerUnreachable):
            async with Client.connect(node.kafka, credentials=locked.credentials(ADMIN), timeout_s=3):
                pass
        other = f"{node.kafka},{locked.nodes[0].kafka}"
        async with Client.connect(other, credentials=locked.credentials(ADMIN), timeout_s=WAIT_S):
            pass
    finally:
        node.kill()
        node.settings["catalog"] = right
        node.start()
