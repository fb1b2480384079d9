"""HTTP on a locked node: authentication, authorization and attacks, with a real server process."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import ssl
import time
import unicodedata
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from kio.schema.incremental_alter_configs.v1.request import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from kio.static.primitive import i8

from millstream.broker.catalog.catalog import Catalog
from millstream.cli.local_process import ReservedPort
from millstream.client.admin.security import add_acls, delete_user, put_user
from millstream.core import acl
from millstream.core.credential import SecurityChange, new_token
from millstream.gateway.app import ROUTES
from millstream.gateway.registry import app as registry_app
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials, client_tls
from millstream_testing.security import AUDIENCE, ISSUER, Certificates, Issuer, declare_security
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 60.0
ADMIN, ALICE, BOB, EVE = (
    ("admin", "admin-password"),
    ("alice", "alice-password"),
    ("bob", "bob-password"),
    ("eve", "eve-password"),
)
MESSAGE = {"content-type": "application/json"}


def rule(principal: str, kind: acl.ResourceType, prefix: str, operation: acl.Operation, host: str = "*") -> acl.Acl:
    return acl.Acl(
        resource_type=kind,
        resource_name=prefix,
        pattern=acl.PatternType.PREFIXED,
        principal=principal,
        operation=operation,
        host=host,
    )


class Locked(NamedTuple):
    server: Server
    certificates: Certificates
    issuer: Issuer
    token: str
    """An API token of alice with which topics of `alice-narrow` can be written."""
    registry: str
    """Where the schema registry has its own port."""

    @property
    def url(self) -> str:
        return f"https://{self.server.http}"

    def client(self, who: tuple[str, str] | str | None = None, **more: Any) -> httpx.Client:
        """A client with a user and a password, a bearer token, or no credential."""
        if isinstance(who, str):
            more["headers"] = {"authorization": f"Bearer {who}", **more.get("headers", {})}
        elif who is not None:
            more["auth"] = who
        return httpx.Client(base_url=self.url, verify=client_tls(self.certificates.ca), timeout=WAIT_S, **more)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """A node with TLS and authentication; alice and bob may use names that begin with theirs and with `shared`."""
    folder = tmp_path_factory.mktemp("locked-http")
    certificates, issuer = Certificates(folder / "certs"), Issuer(folder / "jwks.json")
    everything, topic, group = acl.Operation.ALL, acl.ResourceType.TOPIC, acl.ResourceType.GROUP
    rules = [
        rule(principal, kind, prefix, everything)
        for principal, name in (("User:alice", "alice"), ("User:bob", "bob"), ("User:oauth:alice", "alice"))
        for kind in (topic, group)
        for prefix in (name, "shared")
    ]
    rules.append(rule("User:eve", topic, "elsewhere", everything, host="203.0.113.9"))
    rules.append(rule("User:eve", topic, "configured", acl.Operation.ALTER_CONFIGS))
    rules += [
        rule("User:eve", group, prefix, operation)
        for prefix, operation in (
            ("seen-", acl.Operation.DESCRIBE),
            ("seen-read", acl.Operation.READ),
            ("seen-altered", acl.Operation.ALTER_CONFIGS),
        )
    ]
    rules.append(rule("User:bob", topic, "traced", acl.Operation.READ))
    rules.append(rule("User:bob", group, "traced", acl.Operation.DESCRIBE))
    declare_security(folder / "data", dict((ADMIN, ALICE, BOB, EVE)), frozenset(rules))
    now_ms = int(time.time() * 1000)
    narrow = rule("User:*", topic, "alice-narrow", acl.Operation.WRITE)
    token, text = new_token("User:alice", scope=[narrow], created_ms=now_ms, expires_ms=now_ms + 3_600_000)
    catalog = Catalog.open_folder(folder / "data")
    catalog.change_security(SecurityChange(put_tokens=(token,)))
    catalog.close()
    settings = {
        "auth": "required",
        "tls-cert": certificates.node,
        "tls-key": certificates.node_key,
        "super-users": "admin",
        "oauth-jwks": issuer.jwks,
        "oauth-issuer": ISSUER,
        "oauth-audience": AUDIENCE,
    }
    port = ReservedPort()
    with Server(folder / "data", settings={**settings, "registry": port.address}) as server:
        found = Locked(server, certificates, issuer, text, port.address)
        with found.client() as nobody:
            wait_until(lambda: nobody.get("/readyz").status_code == 200)
        yield found


@pytest.fixture
async def admin(locked: Locked) -> AsyncIterator[Client]:
    credentials = Credentials(tls=client_tls(locked.certificates.ca), user=ADMIN[0], password=ADMIN[1])
    async with Client.connect(locked.server.kafka, credentials=credentials) as client:
        yield client


def publish(client: httpx.Client, topic: str, value: Any = 1) -> httpx.Response:
    return client.post(f"/v1/topics/{topic}/messages", json=value)


def pulled(client: httpx.Client, subscription: str) -> list[dict[str, Any]]:
    pull_request = {"max": 10, "wait_ms": 20_000, "worker": "one"}
    response = client.post(f"/v1/subscriptions/{subscription}/messages:pull", json=pull_request)
    assert response.status_code == 200, response.text
    messages: list[dict[str, Any]] = response.json()["messages"]
    return messages


async def test_a_user_with_a_name_in_another_script(locked: Locked, admin: Client) -> None:
    who = ("Jürgen-王芳", "pässwörd-秘密")
    await put_user(admin, *who)
    allowed = rule(f"User:{who[0]}", acl.ResourceType.TOPIC, "script", acl.Operation.ALL)
    also = rule(f"User:{who[0]}", acl.ResourceType.GROUP, "script", acl.Operation.ALL)
    await add_acls(admin, [allowed, also])

    def receive() -> None:
        with locked.client(who) as client:
            assert publish(client, "script-t", {"n": 1}).status_code == 201
            made = client.post("/v1/subscriptions", json={"name": "script-s", "topics": ["script-t"], "start": "start"})
            assert made.status_code == 201, made.text
            (message,) = pulled(client, "script-s")
            assert settle(client, "script-s", "accept", message["lease"]).get("error") is None
        decomposed = unicodedata.normalize("NFD", who[0])
        with locked.client((decomposed, who[1])) as client:
            assert publish(client, "script-t").status_code == 401

    await asyncio.to_thread(receive)


async def test_a_recreated_user_is_accepted_at_once(locked: Locked, admin: Client) -> None:
    carl = ("carl", "carl-password")
    await add_acls(admin, [rule("User:carl", acl.ResourceType.TOPIC, "carl", acl.Operation.ALL)])
    with locked.client(carl) as client:
        for attempt in range(3):
            await put_user(admin, *carl)
            responses = (
                [client.get("/v1/topics"), publish(client, "carl-orders")]
                if attempt % 2
                else [publish(client, "carl-orders"), client.get("/v1/topics")]
            )
            assert [response.is_success for response in responses] == [True, True], [
                response.text for response in responses
            ]
            await delete_user(admin, "carl")


def settle(client: httpx.Client, subscription: str, verb: str, lease: str) -> dict[str, Any]:
    response = client.post(f"/v1/subscriptions/{subscription}/messages:settle", json={verb: [lease]})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()["results"][0]
    return result


# -- authentication --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["password", "jwt"])
def test_a_caller_publishes_and_receives_with_its_own_rights(locked: Locked, how: str) -> None:
    topic, name = f"alice-http-{how}", f"alice-http-{how}"
    with locked.client(ALICE if how == "password" else locked.issuer.token("alice")) as alice:
        assert publish(alice, topic).status_code == 201
        made = alice.post("/v1/subscriptions", json={"name": name, "topics": [topic], "start": "start"})
        assert made.status_code == 201, made.text
        (message,) = pulled(alice, name)
        assert message["json"] == 1
        assert settle(alice, name, "accept", message["lease"]).get("error") is None
        with locked.client(BOB) as bob:
            refused = publish(bob, topic)
            assert refused.status_code == 403
            assert bob.post(f"/v1/subscriptions/{name}/messages:pull", json={}).status_code == 403


@pytest.mark.parametrize("how", ["bearer", "basic"])
def test_an_api_token_is_limited_to_its_scope(locked: Locked, how: str) -> None:
    token_id, _, secret = locked.token.partition(".")
    with locked.client(ALICE) as alice:
        for topic in ("alice-narrow", "alice-wide"):
            assert publish(alice, topic).status_code == 201
    with locked.client(locked.token if how == "bearer" else (token_id, secret)) as token:
        assert publish(token, "alice-narrow").status_code == 201
        refused = publish(token, "alice-wide")
        assert refused.status_code == 403
        assert "this needs WRITE on topic 'alice-wide'" in refused.text
        assert token.get("/v1/topics/alice-narrow/partitions/0/messages/0").status_code == 403


def basic(user: bytes, password: bytes) -> str:
    return "Basic " + base64.b64encode(user + b":" + password).decode()


NO_CREDENTIALS = (
    None,
    "",
    "Basic",
    "Basic !",
    "Basic " + base64.b64encode(b"alice").decode(),
    basic(b"alice", b""),
    basic(b"", b"alice-password"),
    basic(b"alice", b"wrong-password"),
    basic(b"alice", b"alice-password\0"),
    basic(b"alice\0", b"alice-password"),
    basic(b"nobody", b"alice-password"),
    basic(b"User:alice", b"alice-password"),
    basic(b"__node", b"alice-password"),
    basic(b"\xff", b"\xff"),
    "Bearer",
    "Bearer a.b.c",
    "Bearer mst_0000.secret",
    "Digest username=alice",
    "MILLSTREAM-ASSERTION abc",
    "Bearer " + "x" * 30_000,
)


async def test_unknown_callers_are_challenged(locked: Locked) -> None:
    issuer = locked.issuer
    tokens = (
        issuer.token("alice", lifetime_s=-3600),
        issuer.token("alice", aud="another"),
        issuer.token("alice", iss="https://another.example"),
        issuer.token("alice") + "x",
        locked.token + "x",
    )
    async with httpx.AsyncClient(
        base_url=locked.url, verify=client_tls(locked.certificates.ca), timeout=WAIT_S
    ) as client:

        async def ask(given: str | None) -> None:
            headers = {} if given is None else {"authorization": given}
            responses = await asyncio.gather(
                client.get("/v1/topics", headers=headers),
                client.post("/v1/topics/alice-challenged/messages", json=1, headers=headers),
                client.get("/metrics", headers=headers),
            )
            for response in responses:
                assert response.status_code == 401, (given, response.text)
                assert response.headers["content-type"] == "application/problem+json"
                assert "Basic realm=" in response.headers["www-authenticate"]
                assert "Bearer" in response.headers["www-authenticate"]

        # Concurrently, since each of them gets a delayed response.
        await asyncio.gather(*map(ask, (*NO_CREDENTIALS, *(f"Bearer {token}" for token in tokens))))
        metrics = (await client.get("/metrics", auth=ADMIN)).text
    (failures,) = re.findall(r"^millstream_authentication_failures_total (\S+)", metrics, re.MULTILINE)
    assert float(failures) >= len(tokens)
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    served = set(re.findall(r"^# HELP (\S+)", metrics, re.MULTILINE))
    assert set(re.findall(r"`(millstream_\w+)`", page)) <= served


# -- authorization ---------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_operation_and_the_resource(locked: Locked) -> None:
    with locked.client(ADMIN) as admin:
        assert publish(admin, "secret-topic").status_code == 201
    with locked.client(ALICE) as alice:
        refused = publish(alice, "secret-topic")
        assert refused.status_code == 403
        assert refused.headers["content-type"] == "application/problem+json"
        assert "secret-topic" in refused.json()["detail"]
        made = alice.post("/v1/subscriptions", json={"name": "alice-s", "topics": ["secret-topic"]})
        assert made.status_code == 403
        assert made.json()["detail"] == "User:alice may not read topic 'secret-topic'"
        deleted = alice.delete("/v1/groups/secret-group")
        assert (deleted.status_code, "needs DELETE on group:secret-group" in deleted.text) == (403, True)


def test_names_of_others_are_not_revealed(locked: Locked) -> None:
    with locked.client(ADMIN) as admin, locked.client(ALICE) as alice:
        assert publish(admin, "hidden-http").status_code == 201
        assert publish(alice, "alice-seen").status_code == 201
        topics = [topic["topic"] for topic in alice.get("/v1/topics").json()["topics"]]
        assert "alice-seen" in topics
        assert not [topic for topic in topics if not topic.startswith(("alice", "shared"))]
        exists, missing = (alice.get(f"/v1/topics/{name}") for name in ("hidden-http", "absent-http"))
        assert exists.status_code == missing.status_code
        assert exists.json()["detail"].replace("hidden-http", "N") == missing.json()["detail"].replace(
            "absent-http", "N"
        )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/v1/subscriptions/{}", {"max_attempts": 3}),
        ("POST", "/v1/subscriptions/{}/seek", {"to": "start"}),
        ("POST", "/v1/subscriptions/{}/messages:pull", {"wait_ms": 10_000}),
        ("POST", "/v1/subscriptions/{}/messages:settle", {"accept": []}),
        ("GET", "/v1/subscriptions/{}", None),
        ("DELETE", "/v1/subscriptions/{}", None),
        ("GET", "/v1/pipelines/{}", None),
        ("GET", "/v1/pipelines/{}/runs", None),
        ("PATCH", "/v1/pipelines/{}", {"topic": "hidden-declared"}),
        ("DELETE", "/v1/pipelines/{}", None),
    ],
)
def test_no_route_reveals_which_names_are_declared(
    locked: Locked, declared: None, method: str, path: str, body: dict[str, Any] | None
) -> None:
    with locked.client(EVE) as eve:
        exists, missing = (eve.request(method, path.format(name), json=body) for name in ("hidden-one", "absent-one"))
    assert exists.status_code == missing.status_code, (exists.text, missing.text)
    assert exists.text.replace("hidden-one", "N") == missing.text.replace("absent-one", "N")


@pytest.fixture(scope="module")
def declared(locked: Locked) -> None:
    """A subscription and a pipeline that only the administrator may describe."""
    with locked.client(ADMIN) as admin:
        assert publish(admin, "hidden-declared").status_code == 201
        subscription = {"name": "hidden-one", "topics": ["hidden-declared"]}
        assert admin.post("/v1/subscriptions", json=subscription).status_code == 201
        pipeline = {"name": "hidden-one", "kind": "land", "settings": {"topics": "hidden-declared"}}
        assert admin.post("/v1/pipelines", json=pipeline).status_code == 201


@pytest.fixture
def seen(locked: Locked) -> Iterator[None]:
    """Subscriptions that eve may describe, read or alter, on topics whose names she may not know."""
    names = ("seen-only", "seen-read", "seen-altered")
    with locked.client(ADMIN) as admin:
        assert publish(admin, "hidden-topic").status_code == 201
        for name in names:
            new = {"name": name, "topics": ["hidden-topic"], "start": "start", "dead_letter_topic": "hidden-dead"}
            made = admin.post("/v1/subscriptions", json={**new, "filter": "key IS NULL"})
            assert made.status_code == 201, made.text
        pulled = admin.post("/v1/subscriptions/seen-only/messages:pull", json={"wait_ms": 30_000}).json()["messages"]
        rejected = {"reject": [message["lease"] for message in pulled]}
        assert admin.post("/v1/subscriptions/seen-only/messages:settle", json=rejected).json()["failed"] == 0
        wait_until(lambda: admin.get("/v1/dead-letters/seen-only").json()["letters"])
        yield
        for name in names:
            assert admin.delete(f"/v1/subscriptions/{name}?force=true").is_success


@pytest.mark.usefixtures("seen")
async def test_a_subscription_reveals_neither_its_topics_nor_its_settings(locked: Locked) -> None:
    with locked.client(ADMIN) as admin, locked.client(EVE) as eve:
        for name in ("seen-only", "seen-read"):
            shown = eve.get(f"/v1/subscriptions/{name}").json()
            assert (shown["settings"], shown["overrides"]) == ({"millstream.paused": "false"}, {})
            letters = eve.get(f"/v1/dead-letters/{name}")
            assert (letters.status_code, "hidden" in letters.text) == (403, False)
            for path in (f"/v1/subscriptions/{name}", "/v1/subscriptions"):
                assert "hidden-" not in eve.get(path).text
        listed_letters = eve.get("/v1/dead-letters").json()["dead_letters"]
        # The right to alter settings is also the right to see them.
        assert [group["subscriptions"] for group in listed_letters] == [["seen-altered"]]
        assert "hidden-dead" in eve.get("/v1/subscriptions/seen-altered").text
        everything = "User:eve may not read every topic of the subscription"
        for path, body in {
            "seen-altered/pause": None,
            "seen-read/messages:pull": {"wait_ms": 1000},
            "seen-read/seek": {"to": "start"},
        }.items():
            refused = eve.post(f"/v1/subscriptions/{path}", json=body)
            assert (refused.status_code, refused.json()["detail"]) == (403, everything)
        named = eve.patch("/v1/subscriptions/seen-altered", json={"topics": ["elsewhere-named"]})
        assert (named.status_code, "elsewhere-named" in named.text, "hidden" in named.text) == (403, True, False)
        denied = admin.delete("/v1/subscriptions/seen-only")
        assert (denied.status_code, "hidden" in denied.text) == (409, False)
    credentials = Credentials(tls=client_tls(locked.certificates.ca), user=EVE[0], password=EVE[1])
    async with Client.connect(locked.server.kafka, credentials=credentials) as client:
        setting = AlterableConfig(name="millstream.paused", config_operation=i8(0), value="true")
        group = AlterConfigsResource(resource_type=i8(32), resource_name="seen-altered", configs=(setting,))
        request = IncrementalAlterConfigsRequest(resources=(group,), validate_only=False)
        (altered,) = (await client.send(None, request)).responses
        assert altered.error_message == everything


def test_a_trace_does_not_reveal_the_dead_letter_topic(locked: Locked) -> None:
    with locked.client(ADMIN) as admin, locked.client(BOB) as bob:
        assert publish(admin, "traced").status_code == 201
        new = {"name": "traced-s", "topics": ["traced"], "start": "start", "dead_letter_topic": "hidden-traces"}
        assert admin.post("/v1/subscriptions", json=new).status_code == 201
        (message,) = pulled(admin, "traced-s")
        rejected = {"reject": [message["lease"]]}
        assert admin.post("/v1/subscriptions/traced-s/messages:settle", json=rejected).json()["failed"] == 0

        def traced(caller: httpx.Client) -> dict[str, Any]:
            (subscription,) = caller.get("/v1/topics/traced/partitions/0/messages/0/trace").json()["subscriptions"]
            return dict(subscription)

        wait_until(lambda: traced(admin)["state"] == "dead-lettered")
        assert traced(admin)["dead_letter"]["topic"] == "hidden-traces"
        shown = traced(bob)
        assert (shown["state"], shown["dead_letter"], "hidden" in str(shown)) == ("dead-lettered", None, False)


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/v1/cluster", "/v1/clients"],
)
def test_cluster_routes_require_describe_on_the_cluster(locked: Locked, path: str) -> None:
    with locked.client(ADMIN) as admin, locked.client(ALICE) as alice:
        assert admin.get(path).status_code == 200
        refused = alice.get(path)
        assert refused.status_code == 403
        assert "describe" in refused.json()["detail"]


async def test_groups_are_listed_without_numbers_to_those_who_may_not_describe_them(
    locked: Locked, admin: Client
) -> None:
    with locked.client(ADMIN) as owner:
        assert publish(owner, "closed-groups").status_code == 201
        moved = owner.post("/v1/groups/closed-group/reset", json={"to": "start", "topics": ["closed-groups"]})
        assert moved.status_code == 200, moved.text
    oper = ("oper", "oper-password")
    await put_user(admin, *oper)
    describe = acl.Acl(
        resource_type=acl.ResourceType.CLUSTER,
        resource_name=acl.CLUSTER_NAME,
        principal="User:oper",
        operation=acl.Operation.DESCRIBE,
    )
    await add_acls(admin, [describe])
    with locked.client(oper) as client:
        response = client.get("/v1/groups")
        assert response.status_code == 200, response.text
        (group,) = [group for group in response.json()["groups"] if group["group"] == "closed-group"]
        assert (group["members"], group["lag"]) == (None, None)


LISTS = {
    "/topics",
    "/subscriptions",
    "/groups",
    "/dead-letters",
    "/pipelines",
    "/transactions",
    "/hanging-transactions",
}
"""Routes whose responses leave out what the caller may not know."""

PATH = {
    "topic": "closed",
    "subscription": "closed",
    "group": "closed",
    "name": "closed",
    "pipeline": "closed",
    "mirror": "closed",
    "transaction": "closed",
    "partition": "0",
    "offset": "0",
    "run": "0",
}


def body_of(method: str, path: str, lease: str) -> Any:
    """A valid body, so that the request fails only for missing permissions."""
    own_rule = {"name": "r", "topic": "closed", "targets": ["closed"]}
    return {
        ("POST", "/subscriptions/{subscription}/messages:settle"): {"accept": [lease]},
        ("POST", "/topics"): {"topic": "closed-new"},
        ("PATCH", "/topics/{topic}"): {"settings": {"retention.ms": "1000"}},
        ("POST", "/subscriptions"): {"name": "closed-new", "topics": ["closed"]},
        ("PATCH", "/subscriptions/{subscription}"): {"topics": ["closed"]},
        ("POST", "/subscriptions/{subscription}/seek"): {"to": "start"},
        ("POST", "/groups/{group}/reset"): {"to": "start"},
        ("POST", "/pipelines"): {"name": "closed-new", "kind": "land", "settings": {"topics": "closed"}},
        ("PATCH", "/pipelines/{pipeline}"): {"settings": {"topics": "closed"}},
        ("PATCH", "/pipelines/{pipeline}/rules"): {"put": [own_rule]},
        ("POST", "/mirrors"): {"name": "closed-new", "settings": {"from": "127.0.0.1:9"}},
        ("PATCH", "/mirrors/{mirror}"): {"settings": {"topics": "closed"}},
        ("POST", "/hanging-transactions"): {"topic": "closed", "partition": 0, "producer_id": 1},
        ("POST", "/cluster/plan"): {"kind": "balance"},
        ("POST", "/cluster/undrain"): {"node": 0},
    }.get((method, path), {})


def test_no_route_has_an_effect_without_permission(locked: Locked) -> None:
    with locked.client(ADMIN) as admin, locked.client(EVE) as eve:
        assert publish(admin, "closed").status_code == 201
        made = admin.post("/v1/subscriptions", json={"name": "closed", "topics": ["closed"], "start": "start"})
        assert made.status_code == 201, made.text
        (message,) = pulled(admin, "closed")
        for route in ROUTES:
            method, path = route.method, route.path
            if route.path in LISTS and method == "GET":
                response = eve.get(f"/v1{path}")
                assert response.status_code == 200, (path, response.text)
                assert not any(response.json().values()), (path, response.text)
                continue
            body = {"json": body_of(method, path, message["lease"])} if method in ("POST", "PATCH") else {}
            response = eve.request(method, f"/v1{path.format_map(PATH)}", **body)
            if path.startswith("/subscriptions") and path.endswith(":settle"):
                assert [result["status"] for result in response.json()["results"]] == [403]
                continue
            # A topic that a caller may not describe does not exist for it.
            expected = 404 if path == "/hanging-transactions" else 403
            assert response.status_code == expected, (method, path, response.text)
        assert settle(admin, "closed", "accept", message["lease"]).get("error") is None


def test_the_registry_checks_the_permissions_of_its_caller(locked: Locked) -> None:
    schema = {"schema": '{"type":"record","name":"AliceOrder","fields":[]}'}
    path = "/registry/subjects/alice-orders-value/versions"
    with locked.client(ALICE) as alice, locked.client(BOB) as bob, locked.client() as nobody:
        made = alice.post(path, json=schema)
        assert made.status_code == 200, made.text
        number = made.json()["id"]
        for response in (bob.post(path, json=schema), bob.get(path), bob.delete(path.removesuffix("/versions"))):
            assert (response.status_code, response.json()["error_code"]) == (403, 403)
        assert "alice-orders-value" in alice.get("/registry/subjects").json()
        assert "alice-orders-value" not in bob.get("/registry/subjects").json()
        assert alice.get(f"/registry/schemas/ids/{number}").json()["schema"] == schema["schema"]
        assert bob.get(f"/registry/schemas/ids/{number}").json()["error_code"] == 40403
        guid = made.json()["guid"]
        hidden = {"error_code": 40403, "message": f"Schema {guid} not found"}
        assert bob.get(f"/registry/schemas/guids/{guid}").json() == hidden, "as a schema that does not exist"
        assert alice.put("/registry/config", json={"compatibility": "NONE"}).status_code == 403
        refused = nobody.get(path)
        assert (refused.status_code, refused.json()["error_code"]) == (401, 401)
        assert "www-authenticate" in refused.headers
        assert alice.get(f"https://{locked.registry}/subjects/alice-orders-value/versions").json() == [1]
        assert nobody.get(f"https://{locked.registry}/subjects").status_code == 401
        assert alice.get(f"https://{locked.registry}/v1/topics").json()["error_code"] == 404
        # A deleted schema can still be read by its id, by callers who could before.
        assert alice.delete(path.removesuffix("/versions")).json() == [1]
        assert alice.get(f"/registry/schemas/ids/{number}").json()["schema"] == schema["schema"]
        assert bob.get(f"/registry/schemas/ids/{number}").json()["error_code"] == 40403
        assert alice.post(path, json=schema).json()["id"] == number


def test_import_mode_deletes_nothing_without_permission(locked: Locked) -> None:
    subject = "/registry/subjects/configured-value"
    with locked.client(ADMIN) as admin, locked.client(EVE) as eve:
        admin.post(f"{subject}/versions", json={"schema": '"int"'})
        admin.delete(subject)
        assert eve.put("/registry/mode/configured-value", json={"mode": "READWRITE"}).status_code == 200
        assert eve.put("/registry/mode/configured-value", json={"mode": "IMPORT"}).status_code == 403
        assert admin.get(f"{subject}/versions?deleted=true").json() == [1]


OPEN_IN_THE_REGISTRY = {"/", "/v1/metadata/id", "/v1/metadata/version", "/schemas/types"}
"""What says nothing of what is registered."""


def test_no_route_of_the_registry_has_an_effect_without_permission(locked: Locked) -> None:
    closed = {"schema": '{"type":"record","name":"Closed","fields":[]}'}
    with locked.client(ADMIN) as admin, locked.client(EVE) as eve, locked.client() as nobody:
        made = admin.post("/registry/subjects/closed-value/versions", json=closed).json()
        admin.put("/registry/config/closed-value", json={"compatibility": "FULL"})
        names = {"subject": "closed-value", "version": "1", "id": made["id"], "guid": made["guid"]}
        before = admin.get("/registry/subjects/closed-value/versions/1").json()
        for route in registry_app.ROUTES:
            path = route.path.format_map(names)
            body = {"mode": "READONLY"} if path.startswith("/mode") else {"compatibility": "NONE"}
            sent = {"POST": closed, "PUT": body}.get(route.method)
            for prefix in ("/registry", "/registry/contexts/.other"):
                assert nobody.request(route.method, prefix + path, json=sent).status_code == 401
                response = eve.request(route.method, prefix + path, json=sent)
                if route.path in OPEN_IN_THE_REGISTRY:
                    assert response.status_code == 200
                elif response.status_code == 200:
                    # A list omits what the caller may not know.
                    assert response.json() in ([], ["."]), (route.method, prefix + path, response.text)
                else:
                    assert response.status_code in (403, 404), (route.method, prefix + path, response.text)
                    assert "Closed" not in response.text
        assert admin.get("/registry/subjects/closed-value/versions/1").json() == before
        assert admin.get("/registry/config/closed-value").json() == {"compatibilityLevel": "FULL"}
        assert admin.get("/registry/mode").json() == {"mode": "READWRITE"}


def test_a_topic_names_only_subjects_that_its_owner_may_describe(locked: Locked) -> None:
    named = {"millstream.schema.value": "bob-hidden-value"}
    with locked.client(ALICE) as alice:
        refused = alice.post("/v1/topics", json={"topic": "alice-ruled", "settings": named})
        assert refused.status_code == 403, refused.text
        assert alice.post("/v1/topics", json={"topic": "alice-ruled"}).status_code == 201
        assert alice.patch("/v1/topics/alice-ruled", json={"settings": named}).status_code == 403
        own = {"millstream.schema.value": "alice-ruled-value"}
        assert alice.patch("/v1/topics/alice-ruled", json={"settings": own}).status_code == 200


def test_neither_an_alias_nor_a_reference_grants_access_to_another_subject(locked: Locked) -> None:
    hidden = {"schema": '{"type":"record","name":"Hidden","fields":[{"name":"salary","type":"double"}]}'}
    referring = {
        "schema": '{"type":"record","name":"Leak","fields":[{"name":"hidden","type":"Hidden"}]}',
        "references": [{"name": "Hidden", "subject": "alice-hidden-value", "version": 1}],
    }
    aliases = {"bob-alias": "alice-hidden-value", "bob-second": "bob-alias"}
    with locked.client(ALICE) as alice, locked.client(BOB) as bob, locked.client(ADMIN) as admin:
        assert alice.post("/registry/subjects/alice-hidden-value/versions", json=hidden).status_code == 200
        for name, target in aliases.items():
            # References to the alias and rules of topics would reveal the schema.
            assert bob.put(f"/registry/config/{name}", json={"alias": "alice-hidden-value"}).status_code == 403
            assert admin.put(f"/registry/config/{name}", json={"alias": target}).status_code == 200
        for name in ("bob-alias", "bob-second"):
            subject = f"/registry/subjects/{name}"
            for response in (
                bob.get(f"{subject}/versions"),
                bob.get(f"{subject}/versions/latest"),
                bob.post(subject, json=hidden),
                bob.post(f"{subject}/versions", json={"schema": '"string"'}),
                bob.post(f"/registry/compatibility/subjects/{name}/versions/latest", json=hidden),
                bob.delete(f"{subject}/versions/1"),
                bob.delete(subject),
            ):
                assert response.status_code == 403, (response.request.method, response.url, response.text)
        for path in (
            "/registry/subjects/bob-leak/versions",
            "/registry/subjects/bob-leak",
            "/registry/compatibility/subjects/bob-leak/versions",
        ):
            assert bob.post(path, json=referring).status_code == 403
        assert alice.get("/registry/subjects/alice-hidden-value/versions").json() == [1]
        referring["references"][0]["subject"] = "shared-absent-value"  # type: ignore[index]
        assert bob.post("/registry/subjects/bob-leak/versions", json=referring).json()["error_code"] == 42201


def test_a_node_with_authentication_has_the_documented_metrics(locked: Locked) -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    with locked.client(ADMIN) as admin:
        served = set(re.findall(r"^# HELP (\S+)", admin.get("/metrics").text, re.MULTILINE))
    assert set(re.findall(r"`(millstream_\w+_(?:total|waiting))`", page)) <= served


def test_only_health_is_public(locked: Locked) -> None:
    with locked.client() as nobody:
        for path in ("/", "/healthz", "/readyz", "/openapi.json", "/docs"):
            assert nobody.get(path).status_code == 200
        document = nobody.get("/openapi.json").json()
    assert document["components"]["securitySchemes"].keys() == {"basic", "bearer"}
    assert document["security"]


def test_rules_for_an_address_apply_to_that_of_the_caller(locked: Locked) -> None:
    with locked.client(EVE, headers={"x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9"}) as eve:
        assert publish(eve, "elsewhere").status_code == 403


async def test_concurrent_publishers_are_kept_separate(locked: Locked) -> None:
    async with httpx.AsyncClient(
        base_url=locked.url, verify=client_tls(locked.certificates.ca), timeout=WAIT_S
    ) as client:

        async def send(who: tuple[str, str], topic: str) -> int:
            response = await client.post(f"/v1/topics/{topic}/messages", json=1, auth=who)
            return response.status_code

        calls = [(who, topic) for who in (ALICE, BOB) for topic in ("alice-mixed", "bob-mixed", "shared-mixed")] * 20
        results = await asyncio.gather(*(send(*call) for call in calls))
    for (who, topic), status in zip(calls, results, strict=True):
        assert status == (201 if topic.startswith((who[0], "shared")) else 403), (who, topic)


# -- leases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["accept", "release", "reject", "extend"])
def test_a_lease_is_settled_by_its_principal_only(locked: Locked, verb: str) -> None:
    name = f"shared-lease-{verb}"
    with locked.client(ALICE) as alice, locked.client(BOB) as bob:
        assert publish(alice, name).status_code == 201
        made = alice.post("/v1/subscriptions", json={"name": name, "topics": [name], "start": "start"})
        assert made.status_code == 201, made.text
        (message,) = pulled(alice, name)
        refused = settle(bob, name, verb, message["lease"])
        assert refused["status"] == 409, "bob has every right on the group, and used the name of the same worker"
        assert settle(alice, name, "accept", message["lease"]).get("error") is None


# -- revocation -----------------------------------------------------------------------------------------------------


async def test_a_deleted_user_is_refused_and_its_stream_ends(locked: Locked, admin: Client) -> None:
    topic = "alice-stream"
    place = f"/v1/topics/{topic}/partitions/0/messages/0"
    with locked.client(ALICE) as alice:
        assert publish(alice, topic).status_code == 201
    await put_user(admin, "carol", "carol-password")
    add = rule("User:carol", acl.ResourceType.TOPIC, "alice", acl.Operation.READ)
    await add_acls(admin, [add])
    async with httpx.AsyncClient(
        base_url=locked.url, verify=client_tls(locked.certificates.ca), timeout=WAIT_S, auth=("carol", "carol-password")
    ) as carol:
        assert (await carol.get(place)).status_code == 200
        async with carol.stream("GET", f"/v1/topics/{topic}/events", params={"from": "start"}) as stream:
            lines = stream.aiter_lines()
            async with asyncio.timeout(WAIT_S):
                while not (await anext(lines)).startswith("event: message"):
                    pass
                await delete_user(admin, "carol")
                rest = [line async for line in lines]
        assert "event: error" in rest
        data = next(line for line in reversed(rest) if line.startswith("data: "))
        assert json.loads(data.removeprefix("data: "))["status"] == 401
        async with asyncio.timeout(WAIT_S):
            while (response := await carol.get(place)).status_code != 401:
                assert response.status_code == 503, "a caller that cannot be verified is never let through"


def test_callers_may_be_anonymous_while_a_node_migrates_to_authentication(tmp_path: Path) -> None:
    """The listener `default` is open and another one is not: rules apply to all callers, also over HTTP."""
    rules = (
        rule("User:ANONYMOUS", acl.ResourceType.TOPIC, "open", acl.Operation.ALL),
        rule("User:alice", acl.ResourceType.TOPIC, "alice", acl.Operation.ALL),
    )
    declare_security(tmp_path / "data", dict((ALICE,)), frozenset(rules))
    listener = '[[listeners]]\nname = "locked"\naddress = "127.0.0.1:0"\nauth = "required"\n'
    (tmp_path / "node.toml").write_text(listener, encoding="utf-8")
    settings = {"config": tmp_path / "node.toml", "pipelines-enabled": "false"}
    with (
        Server(tmp_path / "data", settings=settings) as server,
        httpx.Client(base_url=f"http://{server.http}", timeout=WAIT_S) as client,
    ):
        for who, topic, status in (
            (None, "open-topic", 201),
            (None, "alice-topic", 403),
            (ALICE, "alice-topic", 201),
            (ALICE, "open-topic", 403),
            (("alice", "wrong"), "open-topic", 401),
        ):
            auth = httpx.USE_CLIENT_DEFAULT if who is None else who
            response = client.post(f"/v1/topics/{topic}/messages", json=1, auth=auth)
            assert response.status_code == status, (who, topic, response.text)


# -- attacks ---------------------------------------------------------------------------------------------------------


def raw(locked: Locked, request: bytes) -> tuple[int, bytes]:
    """Send bytes over TLS; return the status and the whole response."""
    host, port = locked.server.http.rsplit(":", 1)
    context = client_tls(locked.certificates.ca)
    with (
        socket.create_connection((host, int(port)), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(request)
        response = b""
        while piece := connection.recv(65536):
            response += piece
    return int(response.split()[1]), response


ALICE_HEADER = f"authorization: {basic(*(part.encode() for part in ALICE))}\r\n"
ADMIN_HEADER = f"authorization: {basic(*(part.encode() for part in ADMIN))}\r\n"


@pytest.mark.parametrize(
    ("target", "headers", "expected"),
    [
        ("/v1/topics", "", {401}),
        ("//v1/topics", "", {404}),
        ("/v1//topics", "", {404}),
        ("/./v1/topics", "", {404}),
        ("/healthz/../v1/topics", "", {404}),
        ("/v1/../metrics", "", {404}),
        ("/%76%31/topics", ADMIN_HEADER, {404}),
        ("/v1%2fx/topics", ADMIN_HEADER, {404}),
        ("/registry%2fx/subjects", ADMIN_HEADER, {404}),
        ("/v1/%74opics", "", {401, 404}),
        ("/%6detrics", "", {401}),
        ("/metrics/", "", {404}),
        ("/metrics?x=/healthz", "", {401}),
        ("/V1/topics", "", {404}),
        ("http://127.0.0.1/v1/topics", "", {401}),
        ("http://127.0.0.1/healthz/../v1/topics", "", {404}),
        ("/v1/topics", ALICE_HEADER + ADMIN_HEADER, {400}),
        ("/v1/topics", ADMIN_HEADER + ALICE_HEADER, {400}),
        ("/v1/topics", "Authorization : Basic YTpi\r\n", {400, 401}),
        ("/v1/topics", "x-forwarded-user: admin\r\nx-remote-user: admin\r\n", {401}),
        ("/v1/topics", ALICE_HEADER + "Host: other\r\n", {400}),
        ("/v1/topics", ALICE_HEADER + "transfer-encoding: unknown\r\n", {501}),
        ("/v1/topics", ALICE_HEADER + "transfer-encoding: gzip, chunked\r\n", {501}),
        ("/v1/topics", f"transfer-encoding: chunked\r\n\r\n0\r\n{ALICE_HEADER}", {401}),
        ("/v1/cluster", ALICE_HEADER, {403}),
        ("/v1/topics", f"authorization: Bearer {'x' * 70_000}\r\n", {431}),
    ],
)
def test_attacks_with_paths_and_headers_are_refused(
    locked: Locked, target: str, headers: str, expected: set[int]
) -> None:
    request = f"GET {target} HTTP/1.1\r\nhost: {locked.server.http}\r\nconnection: close\r\n{headers}\r\n"
    status, response = raw(locked, request.encode())
    assert status in expected, response[:300]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"accept-language": "en", "referer": "http://evil.example/"},
        {"accept-language": "en"},
    ],
)
def test_a_page_of_another_origin_cannot_use_the_password_of_the_browser(
    locked: Locked, headers: dict[str, str]
) -> None:
    with locked.client(ADMIN, headers=headers) as browser:
        for response in (browser.get("/v1/topics"), publish(browser, "from-another-origin")):
            assert response.status_code == 403
            assert "access-control-allow-origin" not in response.headers


def test_a_program_and_a_page_of_the_gateway_may_use_a_password(locked: Locked) -> None:
    for headers in (
        {"accept-language": "*"},
        {"origin": locked.url, "accept-language": "en"},
        {"sec-fetch-site": "same-origin", "accept-language": "en"},
        {"sec-fetch-site": "none", "accept-language": "en"},
    ):
        with locked.client(ADMIN, headers=headers) as client:
            assert client.get("/v1/topics").status_code == 200


# -- TLS -------------------------------------------------------------------------------------------------------------


def serial_of(locked: Locked) -> bytes:
    host, port = locked.server.http.rsplit(":", 1)
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(locked.certificates.ca)).encode()


def test_a_renewed_certificate_is_used_from_the_next_connection_on(locked: Locked) -> None:
    with locked.client(ADMIN) as client:
        assert client.get("/v1/topics").status_code == 200
        before = serial_of(locked)
        locked.certificates.renew_node()
        wait_until(lambda: serial_of(locked) != before)
        stream = client.get("/v1/topics").extensions["network_stream"]
        still = ssl.DER_cert_to_PEM_cert(stream.get_extra_info("ssl_object").getpeercert(True))
        assert still.encode() == before, "the connection that was open stays"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_supported(locked: Locked, version: ssl.TLSVersion) -> None:
    context = client_tls(locked.certificates.ca)
    context.minimum_version = context.maximum_version = version
    with httpx.Client(base_url=locked.url, verify=context, timeout=WAIT_S) as client:
        assert client.get("/healthz").status_code == 200


def test_plain_text_and_old_tls_are_refused(locked: Locked) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{locked.server.http}/healthz", timeout=WAIT_S)
    context = client_tls(locked.certificates.ca)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{locked.url}/healthz", verify=context, timeout=WAIT_S)
