"""Logging in to the console: passwords, tokens, OpenID Connect; missing permissions; read-only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest
from confluent_kafka import Producer
from playwright.sync_api import expect

from millstream.client.admin.security import put_user
from millstream.core import acl
from millstream.core.errors import TopicNotAuthorized
from millstream.protocol.private.subscriptions import SubscriptionClient, mark_ledger
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials, client_tls
from millstream_testing.browser import check_appearance, chromium, open_page, running_browser
from millstream_testing.command import CommandLine
from millstream_testing.security import AUDIENCE, Certificates, Issuer, declare_security
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 60.0
PASSWORDS = {name: f"{name}-password" for name in ("admin", "alice", "bob", "otto")}
"""Alice owns what her name begins, Bob may read it, Otto may read it and change pipelines."""
CLIENT_ID = "millstream-console"


class Provider:
    """An OpenID provider that signs everyone in as alice, and insists on PKCE."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._codes: dict[str, dict[str, str]] = {}
        self.audience = AUDIENCE
        self.denial = ""
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if url.path == "/.well-known/openid-configuration":
                    self._say(provider.document())
                    return
                self.send_response(302)
                self.send_header("location", provider.authorize(dict(parse_qsl(url.query))))
                self.end_headers()

            def do_POST(self) -> None:
                form = dict(parse_qsl(self.rfile.read(int(self.headers["content-length"])).decode()))
                self._say(provider.tokens(form))

            def _say(self, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(400 if "error" in document else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def document(self) -> dict[str, Any]:
        ends = {"authorization_endpoint": f"{self.url}/authorize", "token_endpoint": f"{self.url}/token"}
        return {"issuer": self.url, **ends}

    def authorize(self, asked: dict[str, str]) -> str:
        if self.denial:
            denied = {"error": "access_denied", "error_description": self.denial, "state": asked["state"]}
            return f"{asked['redirect_uri']}?{urlencode(denied)}"
        code = f"code-{len(self._codes)}"
        self._codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def tokens(self, form: dict[str, str]) -> dict[str, Any]:
        request = self._codes.pop(form["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if request is None or request["code_challenge"] != challenge.decode() or request["client_id"] != CLIENT_ID:
            return {"error": "invalid_grant"}
        access = self._issuer.token("alice", iss=self.url, aud=self.audience)
        identity = self._issuer.token("alice", iss=self.url, aud=CLIENT_ID, nonce=request["nonce"])
        return {"access_token": access, "id_token": identity, "token_type": "Bearer"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Guarded(NamedTuple):
    server: Server
    certificates: Certificates
    issuer: Issuer
    provider: Provider

    def client(self, **more: Any) -> httpx.Client:
        tls = client_tls(self.certificates.ca)
        return httpx.Client(base_url=f"https://{self.server.http}", verify=tls, timeout=WAIT_S, **more)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded-console")
    certificates, issuer = Certificates(folder / "certs"), Issuer(folder / "jwks.json")
    provider = Provider(issuer)
    rules = frozenset(
        acl.Acl(
            resource_type=kind,
            resource_name="alice",
            pattern=acl.PatternType.PREFIXED,
            principal=principal,
            operation=acl.Operation.ALL if principal != "User:bob" else acl.Operation.READ,
        )
        for principal in ("User:alice", "User:oauth:alice", "User:bob")
        for kind in (acl.ResourceType.TOPIC, acl.ResourceType.GROUP)
    )
    rules |= {
        acl.Acl(resource_type=kind, resource_name=name, pattern=pattern, principal=principal, operation=operation)
        for principal, kind, name, pattern, operation in (
            ("User:otto", acl.ResourceType.CLUSTER, acl.CLUSTER_NAME, acl.PatternType.LITERAL, acl.Operation.ALTER),
            ("User:otto", acl.ResourceType.TOPIC, "alice", acl.PatternType.PREFIXED, acl.Operation.READ),
            ("User:otto", acl.ResourceType.GROUP, "pipeline-", acl.PatternType.PREFIXED, acl.Operation.DESCRIBE),
            ("User:alice", acl.ResourceType.TRANSACTIONAL_ID, "alice", acl.PatternType.PREFIXED, acl.Operation.WRITE),
            ("User:bob", acl.ResourceType.TRANSACTIONAL_ID, "alice", acl.PatternType.PREFIXED, acl.Operation.DESCRIBE),
            ("User:alice", acl.ResourceType.GROUP, "pipeline-", acl.PatternType.PREFIXED, acl.Operation.DESCRIBE),
        )
    }
    declare_security(folder / "data", PASSWORDS, rules)
    settings = {
        "auth": "required",
        "tls-cert": certificates.node,
        "tls-key": certificates.node_key,
        "super-users": "admin",
        "oauth-jwks": issuer.jwks,
        "oauth-issuer": provider.url,
        "oauth-audience": AUDIENCE,
        "console-oidc-client-id": CLIENT_ID,
    }
    try:
        with Server(folder / "data", settings=settings) as server:
            found = Guarded(server, certificates, issuer, provider)
            with found.client(auth=("admin", "admin-password")) as admin:
                for topic in ("alice-orders", "secret"):
                    assert admin.post("/v1/topics", json={"topic": topic}).status_code == 201
                made = admin.post("/v1/subscriptions", json={"name": "alice-billing", "topics": ["alice-orders"]})
                assert made.status_code == 201, made.text
            yield found
    finally:
        provider.close()


def _token(page: httpx.Response) -> str:
    match = re.search(r'name="csrf" value="(\w+)"', page.text)
    assert match is not None, page.text
    return match[1]


def sign_in(client: httpx.Client, user: str, form: dict[str, str] | None = None) -> httpx.Response:
    page = client.get("/console/login")
    fields = {"user": user, "password": PASSWORDS[user]} if form is None else form
    return client.post("/console/login", data={"csrf": _token(page), **fields})


def test_a_user_signs_in_sees_what_is_permitted_and_signs_out(guarded: Guarded) -> None:
    with guarded.client() as client:
        refused = client.get("/console/topics?search=a")
        assert refused.status_code == 303
        assert refused.headers["location"] == "/console/login?next=%2Fconsole%2Ftopics%3Fsearch%3Da"
        page = client.get(refused.headers["location"])
        form = {"csrf": _token(page), "user": "alice", "password": "alice-password", "next": "/console/topics?search=a"}
        response = client.post("/console/login", data=form)
        assert (response.status_code, response.headers["location"]) == (303, "/console/topics?search=a")
        cookie = response.headers["set-cookie"]
        assert cookie.startswith("__Host-millstream-session=")
        assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/"} <= set(cookie.split("; "))
        topics = client.get("/console/topics")
        assert "alice-orders" in topics.text
        assert "secret" not in topics.text
        assert client.get("/console/topics/secret/messages").status_code == 403
        assert client.get("/console/cluster").status_code == 403
        assert client.get("/console").status_code == 200
        stolen = dict(client.cookies)
        out = client.post("/console/logout", data={"csrf": _token(topics)})
        assert out.headers["location"] == "/console/login"
        assert client.get("/console/topics").status_code == 303
        assert "__Host-millstream-session" in stolen


@pytest.mark.parametrize("form", [{"user": "alice", "password": "wrong"}, {"token": "mst_wrong.wrong"}, {}])
def test_invalid_credentials_are_refused(guarded: Guarded, form: dict[str, str]) -> None:
    with guarded.client() as client:
        response = sign_in(client, "alice", form)
        assert response.status_code == 401
        assert 'role="alert"' in response.text
        assert client.get("/console/topics").status_code == 303
        client.cookies.set("__Host-millstream-session", base64.urlsafe_b64encode(b"x" * 200).decode())
        assert client.get("/console/topics").status_code == 303
        assert client.post("/console/login", data={"user": "alice", "password": "alice-password"}).status_code == 403


def test_a_link_does_not_redirect_elsewhere_after_signing_in(guarded: Guarded) -> None:
    for to in ("https://evil.example/", "//evil.example", "/console/../v1/topics\\evil", "/v1/topics"):
        with guarded.client() as client:
            page = client.get("/console/login", params={"next": to})
            form = {"csrf": _token(page), "user": "alice", "password": "alice-password", "next": to}
            assert client.post("/console/login", data=form).headers["location"] == "/console"


def test_actions_without_permission_are_not_offered_and_refused(guarded: Guarded) -> None:
    with guarded.client() as alice, guarded.client() as bob:
        assert sign_in(alice, "alice").status_code == 303
        assert sign_in(bob, "bob").status_code == 303
        offered, shown = (browser.get("/console/subscriptions/alice-billing") for browser in (alice, bob))
        assert "Pause" in offered.text
        assert "Delete this subscription" in offered.text
        assert "Pause" not in shown.text
        assert "Delete this subscription" not in shown.text
        address = "/console/subscriptions/alice-billing/pause"
        assert bob.post(address, data={"csrf": _token(shown)}).status_code == 403
        assert alice.post(address, data={"csrf": _token(shown)}).status_code == 403, "another session's form"
        assert alice.post(address, data={"csrf": _token(offered)}).status_code == 303
        resumed = alice.post(address.replace("pause", "resume"), data={"csrf": _token(offered)})
        assert resumed.status_code == 303
        assert bob.get("/console/topics/alice-orders/publish").text.count("<textarea") == 0


def test_a_subscription_hides_topics_that_the_user_may_not_describe(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same over HTTP, in the console, on the command line and for private requests."""

    async def send_private_request(name: str) -> None:
        tls = client_tls(guarded.certificates.ca)
        credentials = Credentials(tls=tls, user="alice", password=PASSWORDS["alice"])
        async with Client.connect(guarded.server.kafka, credentials=credentials) as client:
            with pytest.raises(TopicNotAuthorized):
                await mark_ledger(client, "now", [name])
            with pytest.raises(TopicNotAuthorized):
                await SubscriptionClient(client).describe([name], [("classified", 0)])

    run = CommandLine(guarded.server.kafka)
    monkeypatch.setenv("MILLSTREAM_TLS_CA", str(guarded.certificates.ca))
    monkeypatch.setenv("MILLSTREAM_USER", "alice")
    monkeypatch.setenv("MILLSTREAM_PASSWORD", PASSWORDS["alice"])
    with guarded.client(auth=("admin", "admin-password")) as admin, guarded.client() as alice:
        assert admin.post("/v1/topics", json={"topic": "classified"}).status_code == 201
        for name, topics in {"alice-partly": ["classified", "alice-orders"], "alice-hidden": ["classified"]}.items():
            new = {"name": name, "topics": topics, "settings": {"millstream.ledger": "true"}}
            made = admin.post("/v1/subscriptions", json=new)
            assert made.status_code == 201, made.text
        try:
            assert admin.post("/v1/topics/classified/messages", json={"plan": 1}).status_code == 201
            for name in ("alice-partly", "alice-hidden"):
                taken = {"max": 1, "wait_ms": 20_000, "worker": "w"}
                assert admin.post(f"/v1/subscriptions/{name}/messages:pull", json=taken).json()["messages"]
                seen = admin.get(f"/v1/subscriptions/{name}").json()
                assert [(queue["topic"], queue["backlog"]) for queue in seen["queues"] if queue["backlog"]] == [
                    ("classified", 1)
                ]
                assert not seen["has_hidden_topics"]
            sign_in(alice, "alice")
            for name, topics in {"alice-partly": ["alice-orders"], "alice-hidden": []}.items():
                own: Any = {"auth": ("alice", PASSWORDS["alice"])}
                over_http = alice.get(f"/v1/subscriptions/{name}", **own).json()
                subscriptions = alice.get("/v1/subscriptions", **own).json()["subscriptions"]
                for shown in (over_http, run("subscription", "describe", name, "--json").document):
                    assert (shown["topics"], shown["has_hidden_topics"]) == (topics, True)
                    assert {queue["topic"] for queue in shown["queues"]} <= set(topics)
                for rows in (subscriptions, run("subscription", "list", "--json").document["subscriptions"]):
                    (row,) = (row for row in rows if row["subscription"] == name)
                    assert (row["topics"], row["has_hidden_topics"]) == (topics, True)
                    assert (row["backlog"], row["leased"]) == (0, 0)
                assert alice.get(f"/v1/subscriptions/{name}/leases", **own).json() == {"leases": [], "omitted": 0}
                page = alice.get(f"/console/subscriptions/{name}").text
                printed = run("subscription", "describe", name)
                for text in (page, printed.out, run("subscription", "list").out):
                    assert "topics that you may not describe" in text
                    assert "classified" not in text
                assert "Change a setting" not in page
                asyncio.run(send_private_request(name))
        finally:
            for name in ("alice-partly", "alice-hidden"):
                assert admin.delete(f"/v1/subscriptions/{name}").is_success


def test_aborting_a_transaction_is_offered_only_with_permission(guarded: Guarded) -> None:
    connection = {
        "bootstrap.servers": guarded.server.kafka,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(guarded.certificates.ca),
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": PASSWORDS["alice"],
    }
    writer = Producer({**connection, "transactional.id": "alice-invoices", "log_level": 0})
    writer.init_transactions(WAIT_S)
    writer.begin_transaction()
    writer.produce("alice-orders", b"not yet")
    assert writer.flush(WAIT_S) == 0
    with guarded.client() as alice, guarded.client() as bob:
        assert sign_in(alice, "alice").status_code == 303
        assert sign_in(bob, "bob").status_code == 303
        path = "/console/transactions"
        offered, shown = (browser.get(path) for browser in (alice, bob))
        for page in (offered, shown):
            assert "alice-invoices" in page.text
        assert "/transactions/abort" in offered.text
        assert "/transactions/abort" not in shown.text
        form = {"back": path, "transaction": "alice-invoices", "confirm": "alice-invoices"}
        refused = bob.post(f"{path}/abort", data={**form, "csrf": _token(shown)})
        assert refused.status_code == 403
        assert "<h1>Transactions</h1>" in refused.text
        assert alice.post(f"{path}/abort", data={**form, "csrf": _token(offered)}).status_code == 303


def test_linked_pages_can_be_opened(guarded: Guarded) -> None:
    with guarded.client() as bob:
        assert sign_in(bob, "bob").status_code == 303
        seen: set[str] = set()
        for page in ("/console", "/console/topics", "/console/topics/alice-orders"):
            seen |= set(re.findall(r'href="(/console[^"?]*)"', bob.get(page).text))
        assert "/console/topics/alice-orders/messages" in seen
        responses = {path: bob.get(path).status_code for path in sorted(seen)}
        assert {path: status for path, status in responses.items() if status != 200} == {}
        shown = bob.get("/console/topics/alice-orders").text
        assert "In sync" in shown
        assert "DESCRIBE_CONFIGS" in shown
        assert bob.get("/console/topics/alice-orders/settings").status_code == 403


def test_reading_messages_is_audited(guarded: Guarded) -> None:
    with guarded.client() as client, guarded.client(auth=("admin", "admin-password")) as admin:
        admin.post("/v1/topics/alice-orders/messages", json={"total": 1}).raise_for_status()
        assert sign_in(client, "alice").status_code == 303
        assert client.get("/console/topics/alice-orders/messages?filter=payload.total+%3D+1").status_code == 200
        assert client.get("/console/topics/alice-orders/messages/0/0").status_code == 200
        assert client.get("/console/topics/secret/messages/0/0").status_code == 403
        seen: set[str] = set()
        with admin.stream("GET", "/v1/topics/__audit/events", params={"from": "start"}) as events:
            for line in events.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(json.loads(line.removeprefix("data: "))["value"])
                    entity = event.get("entity", {})
                    is_hers = entity.get("type") == "messages" and event["actor"]["user"]["name"] == "alice"
                    assert not (is_hers and entity["name"] == "secret")
                    # Other tests read other topics, and as other users.
                    if is_hers and entity["name"] == "alice-orders":
                        read = entity["data"]
                        if read["how"] == "message" and (read["partition"], read["offset"]) == (0, 0):
                            seen.add("message")
                        elif read["how"] == "browse" and read["filter"] == "(payload.total = 1)":
                            seen.add("browse")
                if len(seen) == 2:
                    break


def test_users_rules_and_tokens_are_changed(guarded: Guarded) -> None:
    with guarded.client(follow_redirects=True) as admin, guarded.client() as alice:
        assert sign_in(admin, "admin").status_code == 200
        token = _token(admin.get("/console/access"))

        def do(change: str, **form: str) -> str:
            return admin.post(f"/console/access/{change}", data={"csrf": token, **form}).text

        assert "millstream user create carol --password-stdin" in do(
            "user", what="create", name="carol", password="password-1"
        )
        assert "already exists" in do("user", what="create", name="carol", password="password-2")
        assert "has a new password" in do("user", what="password", name="carol", password="password-3")
        rule = {"permission": "allow", "principal": "User:carol", "operations": "read", "type": "topic", "name": "car"}
        assert "millstream acl allow User:carol read topic:car --prefixed" in do("rule", **rule, prefixed="1")
        assert "User:carol" in admin.get("/console/access?search=topic:car").text
        assert "is not an operation on a topic" in do("rule", **{**rule, "operations": "cluster_action"})
        assert "use --prefixed topic:car" in do("rule", **{**rule, "name": "car*"})
        written = "allow User:carol read topic:car*"
        assert "nothing was changed" in do("remove-rule", rule=written, confirm="wrong")
        opposite = {**rule, "permission": "deny", "prefixed": "1"}
        assert "millstream acl deny User:carol read topic:car --prefixed" in do("rule", **opposite)
        assert "millstream acl remove User:carol read topic:car --prefixed --only allow" in do(
            "remove-rule", rule=written, confirm="User:carol"
        )
        assert "deny User:carol read topic:car*" in admin.get("/console/access?search=topic:car").text
        made = do("token", owner="User:carol", expires="1h", operations="read", resource="topic:cars")
        (secret,) = re.findall(r"mst_\w+\.[\w-]+", made)
        token_id = secret.partition(".")[0]
        assert secret not in admin.get("/console/access").text
        assert token_id in admin.get("/console/access").text
        assert "is revoked" in do("revoke", token=token_id, confirm=token_id)
        assert "is deleted" in do("delete-user", name="carol", confirm="carol")
        assert "Jürgen" in do("user", what="create", name="Jürgen", password="pässwörd-1")
        with guarded.client() as juergen:
            form = {"user": "Jürgen", "password": "pässwörd-1"}
            assert sign_in(juergen, "", form).status_code == 303
            assert "Jürgen" in juergen.get("/console").text
        assert "is deleted" in do("delete-user", name="Jürgen", confirm="Jürgen")
        assert sign_in(alice, "alice").status_code == 303
        page = alice.get("/console/access")
        for what in ("users", "access rules", "quotas"):
            assert f"You may not see {what}: that needs DESCRIBE" in page.text
        assert "Create a user" not in page.text
        form = {"csrf": _token(page), "what": "create", "name": "x", "password": "y"}
        refused = alice.post("/console/access/user", data=form)
        assert refused.status_code == 403


def test_a_count_of_dead_letters_names_the_permissions_a_redrive_lacks(guarded: Guarded) -> None:
    with guarded.client(follow_redirects=True) as alice, guarded.client(auth=("admin", "admin-password")) as admin:
        for topic, name in (("alice-crates", "alice-crating"), ("secret", "alice-spying")):
            settings = {"attempts": 1, "dead_letter_topic": "alice-dead", "start": "start"}
            made = admin.post("/v1/subscriptions", json={"name": name, "topics": [topic], **settings})
            assert made.status_code == 201, made.text
            admin.post(f"/v1/topics/{topic}/messages", json={"crate": 1}).raise_for_status()
            _reject(admin, name, 1, "no room")
        assert sign_in(alice, "alice").status_code == 200
        page = alice.get("/console/dead-letters/alice-dead")
        form = {"csrf": _token(page), "filter": "", "only": "check"}
        counted = alice.post("/console/dead-letters/alice-dead/redrive", data=form)
        assert "1 letter would be redriven (1 in alice-crating)" in counted.text, counted.text
        assert "1 letter would stay open: redriving needs READ on topic &#39;secret&#39; (1)" in counted.text
        done = alice.post("/console/dead-letters/alice-dead/redrive", data={"csrf": _token(page), "filter": ""})
        assert "1 message delivered again (1 to alice-crating)" in done.text, done.text
        assert "1 letter is left open" in done.text
        again = alice.post("/console/dead-letters/alice-dead/redrive", data={"csrf": _token(page), "filter": ""})
        assert again.status_code == 409, "nothing that she may redrive is left"
        assert "secret" in again.text
        response = admin.post("/v1/dead-letters/alice-dead/redrive", json={}).json()
        assert (response["done"], response["held_back"], response["subscriptions"]) == (1, 0, {"alice-spying": 1})


def _reject(client: httpx.Client, name: str, number: int, reason: str) -> None:
    """Reject messages as a worker does, and wait for their letters."""
    pulled = client.post(f"/v1/subscriptions/{name}/messages:pull", json={"max": number, "wait_ms": 20_000}).json()
    reject = [{"lease": message["lease"], "reason": reason} for message in pulled["messages"]]
    assert len(reject) == number
    assert client.post(f"/v1/subscriptions/{name}/messages:settle", json={"reject": reject}).is_success
    wait_until(lambda: len(client.get(f"/v1/dead-letters/{name}").json()["letters"]) >= number)


def test_a_dry_run_reads_with_the_permissions_of_the_user(guarded: Guarded) -> None:
    with guarded.client(auth=("admin", "admin-password")) as admin:
        for name, topic in (("land-orders", "alice-orders"), ("land-secret", "secret")):
            admin.post(f"/v1/topics/{topic}/messages", json={"kept": topic}).raise_for_status()
            settings = {"topics": topic, "decode": "json"}
            made = admin.post(
                "/v1/pipelines", json={"name": name, "kind": "land", "settings": settings, "enabled": False}
            )
            assert made.is_success, made.text

    def dry_run(person: httpx.Client, name: str) -> httpx.Response:
        page = person.get(f"/console/pipelines/{name}")
        assert ("Try it" in page.text) == (person is not alice)
        return person.post(f"/console/pipelines/{name}/dry-run", data={"csrf": _token(person.get("/console/topics"))})

    def ended(person: httpx.Client, task: httpx.Response) -> str:
        assert task.status_code == 200, task.text
        wait_until(lambda: "Stop</button>" not in person.get(task.url).text)
        return person.get(task.url).text

    with guarded.client(follow_redirects=True) as alice, guarded.client(follow_redirects=True) as otto:
        assert sign_in(alice, "alice").status_code == 200
        assert sign_in(otto, "otto").status_code == 200
        assert dry_run(alice, "land-orders").status_code == 403
        tokens = set(re.findall("mst_[0-9a-f]+", otto.get("/console/access").text))
        task = dry_run(otto, "land-orders")
        shown = ended(otto, task)
        assert "would be landed in a new table" in shown, shown
        with guarded.client() as other:
            # Another session of the user may have been opened with a token that has fewer rights.
            assert sign_in(other, "otto").status_code == 303
            assert other.get(task.url).status_code == 404
        refused = ended(otto, dry_run(otto, "land-secret"))
        assert "would be landed" not in refused
        assert re.search(r"(not authorized|may not|READ).*secret|secret.*(not authorized|may not|READ)", refused), (
            refused
        )
        # A token created for a dry run is deleted with it.
        assert set(re.findall("mst_[0-9a-f]+", otto.get("/console/access").text)) == tokens


def test_a_new_user_signs_in_finds_why_orders_are_stuck_and_fixes_it(guarded: Guarded) -> None:
    chromium()
    with guarded.client(auth=("admin", "admin-password")) as admin:
        settings = {"name": "alice-shipping", "topics": ["alice-parcels"], "start": "start", "attempts": 2}
        assert admin.post("/v1/subscriptions", json=settings).status_code == 201
        for number in range(8):
            admin.post("/v1/topics/alice-parcels/messages", json={"parcel": number}).raise_for_status()
        _reject(admin, "alice-shipping", 5, "the address is missing")
        assert admin.post("/v1/subscriptions/alice-shipping/pause").is_success
        with running_browser() as browser:
            watched = open_page(browser, f"https://{guarded.server.http}/console", ignore_https_errors=True)
            page = watched.page
            check_appearance(page, "login")
            page.get_by_label("User").fill("alice")
            page.get_by_label("Password").fill("alice-password")
            page.get_by_role("button", name="Sign in", exact=True).click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
            expect(page.get_by_text("alice-shipping is paused, and 3 messages wait")).to_be_visible()
            check_appearance(page, "overview-of-a-person")
            # Why do orders not arrive? The subscription is paused: resume it.
            page.get_by_role("listitem").filter(has_text="alice-shipping is paused").get_by_role("link").click()
            page.get_by_role("button", name="Resume").click()
            expect(page.get_by_role("status")).to_contain_text("millstream subscription resume alice-shipping")
            # Why did some fail? Their letters say it, and are redriven once the addresses are known.
            page.locator(".stat").filter(has_text="Dead-lettered").click()
            page.get_by_role("link", name="the address is missing").first.click()
            parcel = page.get_by_role("link", name="alice-parcels/").first.get_attribute("href")
            page.locator("summary").filter(has_text="Redrive 5 letters").click()
            page.get_by_role("button", name="Count only").first.click()
            expect(page.get_by_role("status")).to_contain_text("5 letters would be redriven (5 in alice-shipping)")
            page.get_by_role("link", name="the address is missing").first.click()
            page.locator("summary").filter(has_text="Redrive 5 letters").click()
            page.get_by_role("button", name="Redrive").click()
            expect(page.get_by_role("status")).to_contain_text("5 messages delivered again (5 to alice-shipping)")
            work = {"max": 100, "wait_ms": 10_000}
            pulled = admin.post("/v1/subscriptions/alice-shipping/messages:pull", json=work).json()["messages"]
            accept = {"accept": [message["lease"] for message in pulled]}
            assert len(pulled) == 8
            assert admin.post("/v1/subscriptions/alice-shipping/messages:settle", json=accept).is_success
            # Confirmed: the page of the message shows its holder, and the backlog is empty.
            page.goto(f"https://{guarded.server.http}{parcel}")
            expect(page.get_by_role("row").filter(has_text="alice-shipping")).to_contain_text("accepted")
            page.get_by_role("link", name="Subscriptions", exact=True).click()
            expect(page.get_by_role("row").filter(has_text="alice-shipping")).not_to_contain_text("paused")
            page.get_by_role("button", name="Sign out").click()
            expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
            assert watched.problems == []


def test_openid_connect_signs_in_with_pkce(guarded: Guarded) -> None:
    with guarded.client() as client:
        assert "Sign in with your organization" in client.get("/console/login").text
        begun = client.get("/console/oidc?next=/console/topics")
        assert begun.status_code == 303
        parameters = parse_qs(urlsplit(begun.headers["location"]).query)
        assert parameters["code_challenge_method"] == ["S256"]
        assert "SameSite=Lax" in begun.headers["set-cookie"]
        with httpx.Client(timeout=WAIT_S) as elsewhere:
            back = elsewhere.get(begun.headers["location"]).headers["location"]
        with guarded.client() as other:
            assert other.get(back).status_code == 422, "the response is for another browser"
        signed_in = client.get(back)
        assert signed_in.status_code == 200
        assert 'url=/console/topics"' in signed_in.text
        assert "User:oauth:alice" in client.get("/console/topics").text
        assert client.get(back).status_code in (403, 422, 502), "a code works once"


def test_a_browser_signs_in_at_the_openid_provider_or_shows_the_reason(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    chromium()
    console = f"https://{guarded.server.http}/console"
    with running_browser() as browser:
        watched = open_page(browser, f"{console}/topics", ignore_https_errors=True)
        page = watched.page
        for attribute, value, output in (
            ("denial", "alice is not in the group", "did not sign you in: alice is not in the group"),
            ("audience", "others", "its token is refused: the token is for another audience"),
        ):
            with monkeypatch.context() as changed:
                changed.setattr(guarded.provider, attribute, value)
                page.get_by_role("link", name="Sign in with your organization").click()
                expect(page.get_by_role("alert")).to_contain_text(output)
        page.goto(f"{console}/topics")
        page.get_by_role("link", name="Sign in with your organization").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Topics")
        expect(page.get_by_text("User:oauth:alice")).to_be_visible()
        # A link from another site opens a page, and the session is still there.
        page.goto(guarded.provider.url + "/.well-known/openid-configuration")
        page.evaluate("address => { location = address }", f"{console}/subscriptions")
        expect(page.get_by_role("heading", level=1)).to_have_text("Subscriptions")
        assert watched.problems == []


def test_a_browser_signs_in_with_a_token_or_shows_the_reason(guarded: Guarded) -> None:
    chromium()
    with guarded.client(follow_redirects=True) as admin, running_browser() as browser:
        assert sign_in(admin, "admin").status_code == 200
        form = {"csrf": _token(admin.get("/console/access")), "owner": "User:alice", "expires": "1h"}
        (token,) = re.findall(r"mst_\w+\.[\w-]+", admin.post("/console/access/token", data=form).text)
        watched = open_page(browser, f"https://{guarded.server.http}/console/topics", ignore_https_errors=True)
        page = watched.page
        page.get_by_text("Use a token instead").click()
        for wrong, output in (
            ("mst_wrong.wrong", "the token is wrong, expired or revoked"),
            ("typed wrongly", "the token is neither an API token nor a JSON web token"),
            (guarded.issuer.token("alice", iss=guarded.provider.url, exp=1), "the token has expired"),
        ):
            page.get_by_label("Token").fill(wrong)
            page.get_by_role("button", name="Sign in", exact=True).click()
            expect(page.get_by_role("alert")).to_contain_text(output)
            expect(page.get_by_role("alert")).to_be_focused()
            expect(page.get_by_label("Token")).to_have_value("")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Topics")
        expect(page.get_by_text("User:alice")).to_be_visible()
        assert watched.problems == []


def test_a_refused_form_keeps_its_input_except_the_password(guarded: Guarded) -> None:
    with guarded.client() as admin, guarded.client() as bob:
        assert sign_in(admin, "admin").status_code == 303
        form = {"csrf": _token(admin.get("/console/access")), "back": "/console/access", "what": "create"}
        typed = {"name": "alice", "password": "a new password"}
        refused = admin.post("/console/access/user", data={**form, **typed})
        assert refused.status_code == 422
        (shown,) = re.findall(r'<form[^>]*>(?:(?!</form>).)*id="outcome".*?</form>', refused.text, re.DOTALL)
        assert "already exists" in shown
        assert 'value="alice"' in shown
        assert "a new password" not in refused.text
        again = admin.post("/console/access/user", data={**form, **typed, "csrf": "0" * 64})
        assert again.status_code == 403, "a form of an older session"
        assert 'value="alice"' in again.text
        assert "a new password" not in again.text
        assert sign_in(bob, "bob").status_code == 303
        path = "/console/subscriptions/alice-billing"
        form = {"csrf": _token(bob.get(path)), "back": path, "setting": "share.session.timeout.ms"}
        refused = bob.post(f"{path}/settings", data={**form, "setting_value": "1"})
        assert refused.status_code == 403
        assert "<h1>alice-billing</h1>" in refused.text, "the page, which does not offer the form"
        assert 'role="alert"' in refused.text
        for back in ("/console/topics/secret/messages", "/console/tasks/../..", "/v1/topics", "//evil.example/console"):
            refused = bob.post(f"{path}/settings", data={**form, "back": back})
            assert (refused.status_code, "<h1>Forbidden" in refused.text) == (403, True), back


def test_a_changed_password_ends_the_session(guarded: Guarded) -> None:
    with guarded.client() as client:
        assert sign_in(client, "bob").status_code == 303
        assert client.get("/console/topics").status_code == 200

        async def change(password: str) -> None:
            credentials = Credentials(tls=client_tls(guarded.certificates.ca), user="admin", password="admin-password")
            async with Client.connect(guarded.server.kafka, credentials=credentials) as admin:
                await put_user(admin, "bob", password)

        asyncio.run(change("another-password"))
        # The node closes connections of the old password at once, and the gateway notices.
        wait_until(lambda: client.get("/console/topics").status_code in (303, 401))
        # Other tests sign in as bob, too.
        asyncio.run(change(PASSWORDS["bob"]))


def test_a_read_only_console_changes_nothing(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data", settings={"console-read-only": "true"}) as server,
        httpx.Client(base_url=f"http://{server.http}", timeout=WAIT_S) as client,
    ):
        client.post("/v1/topics/orders/messages", content="1")
        page = client.get("/console/topics")
        assert "Read-only" in page.text
        assert "Create a topic" not in page.text
        assert client.get("/console/topics/orders/publish").text.count("<textarea") == 0
        refused = client.post("/console/topics", data={"name": "new"})
        assert refused.status_code == 403
        assert "console-read-only" in refused.text
