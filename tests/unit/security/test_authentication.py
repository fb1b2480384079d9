"""Mechanisms, tokens, certificate names and user names, without a network."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import re
import time
import tracemalloc
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.name import _ASN1Type
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from joserfc.jws import JWSRegistry

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.security import oauth
from millstream.broker.security import state as state_module
from millstream.broker.security.oauth import LEEWAY_S, OAuthSettings, TokenChecker
from millstream.broker.security.rights import Rights
from millstream.broker.security.sasl import AuthenticatedClient, Authenticator, BearerToken, FailedAttempts, Passwords
from millstream.broker.security.state import SecurityState, parse_super_users
from millstream.broker.security.tls import PrincipalRules
from millstream.core.acl import EVERYONE, OPERATIONS, Acl, Operation, ResourceType
from millstream.core.credential import (
    ITERATIONS,
    SCRAM_MECHANISMS,
    SHA_256,
    ScramCredential,
    check_user_name,
    derive,
    new_credentials,
    new_token,
    split_token,
)
from millstream.core.errors import AuthenticationFailed, CatalogUnavailable, InvalidRequest, InvalidSetting
from millstream.core.topic import AUDIT
from millstream.protocol.wire.credentials import OAUTHBEARER, PLAIN, Credentials, NodeName
from millstream_testing.security import AUDIENCE, ISSUER, Certificates, Issuer
from millstream_testing.waiting import until

USER, PASSWORD = "alice", "alice-password"
ANY_HEADER = JWSRegistry(strict_check_header=False)


@pytest.fixture
async def passwords(tmp_path: Path) -> Any:
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ())
    await state.change_users(new_credentials(USER, PASSWORD))
    checker = Passwords(state)
    yield checker
    checker.close()
    catalog.close()


async def authenticate(passwords: Passwords, credentials: Credentials, *, tamper: Any = None) -> AuthenticatedClient:
    """Run the client's and the broker's side against each other."""
    begun = credentials.begin()
    assert begun is not None
    mechanism, client = begun
    server = Authenticator(passwords, None).begin(mechanism)
    message = next(client)
    verified: AuthenticatedClient | None = None
    while True:
        response = await server.step(message if tamper is None else tamper(message))
        output, verified = response if isinstance(response, tuple) else (response, verified)
        try:
            message = client.send(output)
        except StopIteration:
            assert verified is not None, "the client is content before the broker is"
            return verified


# -- passwords ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [*SCRAM_MECHANISMS, PLAIN])
async def test_both_sides_agree_on_the_principal(passwords: Passwords, mechanism: str) -> None:
    right = Credentials(user=USER, password=PASSWORD, mechanism=mechanism)
    assert (await authenticate(passwords, right)).principal == "User:alice"
    for user, password in ((USER, "another-password"), ("nobody", PASSWORD), (USER, PASSWORD + " ")):
        wrong = Credentials(user=user, password=password, mechanism=mechanism)
        with pytest.raises(AuthenticationFailed):
            await authenticate(passwords, wrong)


async def test_a_proof_cannot_be_replayed(passwords: Passwords) -> None:
    sent: list[bytes] = []

    def note(message: bytes) -> bytes:
        sent.append(message)
        return message

    credentials = Credentials(user=USER, password=PASSWORD, mechanism=SHA_256)
    await authenticate(passwords, credentials, tamper=note)
    replay = Authenticator(passwords, None).begin(SHA_256)
    await replay.step(sent[0])
    with pytest.raises(AuthenticationFailed):
        await replay.step(sent[1])


@pytest.mark.parametrize("cut", [1, 4, 20, 43])
async def test_a_truncated_proof_is_refused(passwords: Passwords, cut: int) -> None:
    def truncate(message: bytes) -> bytes:
        head, separator, proof = message.rpartition(b",p=")
        return head + separator + proof[:-cut] if separator else message

    credentials = Credentials(user=USER, password=PASSWORD, mechanism=SHA_256)
    with pytest.raises(AuthenticationFailed):
        await authenticate(passwords, credentials, tamper=truncate)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda final: re.sub(rb"r=[^,]*", b"r=", final),
        lambda final: re.sub(rb"r=([^,]*)", rb"r=\1AAAA", final),
        lambda final: re.sub(rb"(r=[^,]{10})[^,]*", rb"\1", final),
        lambda final: re.sub(rb"c=[^,]*", b"c=eSws", final),
        lambda final: re.sub(rb"c=[^,]*,", b"", final),
        lambda final: final.replace(b",p=", b",i=1,p="),
        lambda final: final.replace(b",p=", b",r=x,p="),
        lambda final: final + final[final.index(b",p=") :],
        lambda final: final[: final.index(b",p=")],
        lambda final: final[: final.index(b",p=")] + b",p=",
        lambda final: final[: final.index(b",p=")] + b",p=" + b"A" * 43 + b"=",
    ],
    ids=["no nonce", "longer", "client's only", "header", "no header", "iterations", "two", "proofs", "none", "", "0"],
)
async def test_a_tampered_final_message_is_refused(passwords: Passwords, tamper: Any) -> None:
    credentials = Credentials(user=USER, password=PASSWORD, mechanism=SHA_256)
    with pytest.raises(AuthenticationFailed):
        await authenticate(passwords, credentials, tamper=lambda output: tamper(output) if b",p=" in output else output)


@pytest.mark.parametrize(
    "challenge",
    ["r={nonce}x,s=c2E=,i=1", "r={nonce}x,s=c2E=,i=1000000000", "r=other,s=c2E=,i=8192", "r={nonce}x,i=8192"],
    ids=["cheap", "dear", "nonce", "salt"],
)
def test_a_client_gives_no_proof_to_a_malicious_broker(challenge: str) -> None:
    """A broker that could choose the cost could guess passwords, or keep its clients busy."""
    begun = Credentials(user=USER, password=PASSWORD, mechanism=SHA_256).begin()
    assert begun is not None
    _, client = begun
    nonce = next(client).decode().rpartition("r=")[2]
    with pytest.raises(AuthenticationFailed):
        client.send(challenge.format(nonce=nonce).encode())


async def test_a_final_message_without_a_first_one_is_refused(passwords: Passwords) -> None:
    for message in (b"c=biws,r=x,p=AAAA", b"", b"\xff\xfe", b"p=tls-unique,,n=alice,r=x", b"n,,n=alice", b"n,,r=x,n="):
        with pytest.raises(AuthenticationFailed):
            await Authenticator(passwords, None).begin(SHA_256).step(message)


async def test_a_refused_first_message_gets_the_reason(passwords: Passwords) -> None:
    for message, reason in ((b"p=tls-unique,,n=alice,r=x", "channel binding is not served"), (b"??", "is malformed")):
        with pytest.raises(AuthenticationFailed, match=reason):
            await Authenticator(passwords, None).begin(SHA_256).step(message)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_garbage_authenticates_no_user(first: bytes, second: bytes) -> None:
    class NoUsers:
        credentials: Mapping[tuple[str, str], ScramCredential] = {}
        cluster_key = b""

        def credential(self, user: str, mechanisms: object) -> None:
            return None

    async def exchange() -> None:
        checker = Passwords(NoUsers())  # type: ignore[arg-type]
        for mechanism in SCRAM_MECHANISMS:
            server = Authenticator(checker, None).begin(mechanism)
            await server.step(first)
            await server.step(second)
        checker.close()

    with pytest.raises(AuthenticationFailed):
        asyncio.run(exchange())


async def test_an_unknown_user_is_indistinguishable_from_a_known_one(passwords: Passwords) -> None:
    async def challenge(user: str) -> dict[str, str]:
        response = await Authenticator(passwords, None).begin(SHA_256).step(f"n,,n={user},r=abc".encode())
        assert isinstance(response, bytes)
        return dict(part.split("=", 1) for part in response.decode().split(","))

    known, unknown, again = [await challenge(user) for user in (USER, "nobody", "nobody")]
    assert known["i"] == unknown["i"]
    assert len(base64.b64decode(known["s"])) == len(base64.b64decode(unknown["s"]))
    assert unknown["s"] == again["s"]


async def test_unknown_users_look_like_those_of_every_tool_and_the_same_on_every_node(
    passwords: Passwords, tmp_path: Path
) -> None:
    # As Kafka's tools make them.
    made = derive("kafka-made", SHA_256, b"x" * 32, salt=b"1a2b3c4d5e6f7g8h9i0jklmno", iterations=12_000)
    await passwords.state.change_users((made,))
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ())
    await state.load()
    another = Passwords(state)
    decoys = set()
    for number in range(100):
        one, same = (credentials.decoy(f"nobody-{number}", SHA_256) for credentials in (passwords, another))
        assert (one.salt, one.iterations) == (same.salt, same.iterations)
        decoys.add((len(one.salt), one.salt.isalnum() and one.salt.islower(), one.iterations))
    assert decoys == {(24, False, ITERATIONS), (25, True, 12_000)}
    another.close()
    catalog.close()


async def test_a_verified_password_is_cached_until_it_changes(
    passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    await passwords.check(USER, PASSWORD)
    monkeypatch.setattr("millstream.core.credential.hash_password", None)
    assert (await passwords.check(USER, PASSWORD)).principal == "User:alice"
    monkeypatch.undo()
    await passwords.state.change_users(new_credentials(USER, "another-password"))
    with pytest.raises(AuthenticationFailed):
        await passwords.check(USER, PASSWORD)


async def test_only_changes_of_users_are_logged(passwords: Passwords, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="millstream.broker.security.state"):
        await passwords.state.change_users()
        assert not caplog.records
        await passwords.state.change_users(new_credentials(USER, "another-password"))
    (record,) = caplog.records
    assert vars(record)["users"] == [USER]
    assert not hasattr(record, "acls_added")


async def test_without_the_catalog_the_last_snapshot_applies_and_before_it_nothing_is_allowed(
    passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = passwords.state
    rule = Acl(
        resource_type=ResourceType.TOPIC, resource_name="orders", principal="User:alice", operation=Operation.READ
    )
    await here.add_acls([rule])
    restarted = Passwords(SecurityState(here._declarations, ()))

    async def is_away(*_arguments: Any, **_named: Any) -> Any:
        raise CatalogUnavailable("not now")

    monkeypatch.setattr(CatalogDeclarations, "call", is_away)
    for node, serves in ((passwords, True), (restarted, False)):
        with pytest.raises(CatalogUnavailable):
            await node.state.load()
        rights = Rights(node.state, "User:alice", "127.0.0.1")
        assert rights.topic(Operation.READ, "orders") is serves
        assert not rights.topic(Operation.WRITE, "orders")
        if serves:
            await node.check(USER, PASSWORD)
        else:
            with pytest.raises(AuthenticationFailed):
                await node.check(USER, PASSWORD)
    restarted.close()


async def test_the_audit_log_can_only_be_read(tmp_path: Path) -> None:
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ["User:admin"])
    admin = Rights(state, "User:admin", "127.0.0.1")
    readable = (Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
    assert admin.operations(ResourceType.TOPIC, AUDIT) == sum(1 << operation for operation in readable)
    assert admin.operations(ResourceType.TOPIC, "orders") == sum(
        1 << operation for operation in OPERATIONS[ResourceType.TOPIC]
    )
    catalog.close()


def test_repeated_failures_take_increasingly_long_up_to_a_limit() -> None:
    attempts = FailedAttempts()
    pauses = [attempts.pause_s("10.0.0.1", "alice") for _ in range(12)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[3] < pauses[-1] == pauses[-2]
    assert attempts.pause_s("10.0.0.2", "bob") == pauses[0]
    assert attempts.pause_s("10.0.0.3", "alice") == pauses[-1], "from another address, too"


def test_failures_from_one_ipv6_network_are_those_of_one_client() -> None:
    attempts = FailedAttempts()
    pauses = [attempts.pause_s(f"2001:db8:1:2::{number:x}", f"user-{number}") for number in range(12)]
    assert pauses[0] < pauses[3] < pauses[-1]
    assert attempts.pause_s("2001:db8:1:3::1", "bob") == pauses[0]


def test_failures_with_long_names_take_no_more_memory_than_others() -> None:
    attempts = FailedAttempts()
    tracemalloc.start()
    try:
        for number in range(100):
            attempts.pause_s("10.0.0.1", f"{number:08}\U0001f600" + "x" * 60_000)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name", ["CN=alice", "oauth:alice", "a,b", "", "ANONYMOUS", "a b", "-x", "x" * 200, "mst_x", "alice (deleted)"]
)
def test_a_user_name_cannot_imitate_another_kind_of_principal(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"letters, digits and the characters _ \. @ \+ -"):
        check_user_name(name)


@pytest.mark.parametrize("name", ["a.b@c+d-e_f", "_x", "7", "Jürgen", "анна", "王芳", "שרה", "नेहा", "x" * 128])
def test_a_user_name_may_be_in_any_script(name: str) -> None:
    check_user_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("a\u00a0b", "a\u200bb", "a\u200db", "a\u202eb", "a\n", "a\0", "\ufeffa"),
        *("a\ufe0f", "a\u034f", "\u1160", "\u0301a", "\U0001f600", "\ud800", "\ue000", "a\uff0cb", "\uff1d"),
        *("ju\u0308rgen", "\uff41dmin", "\ufb01nn", "\u212bsa", "\u3164"),
    ],
    ids=ascii,
)
def test_a_user_name_has_one_spelling_that_is_visible(name: str) -> None:
    with pytest.raises(InvalidRequest, match="the name of a user") as refused:
        check_user_name(name)
    assert name not in str(refused.value)


@pytest.mark.parametrize(("salt", "is_accepted"), [(b"", False), (b"s", True), (b"s" * 128, True), (b"s" * 129, False)])
def test_a_salt_may_be_as_short_as_tools_choose_it(salt: bytes, is_accepted: bool) -> None:
    with nullcontext() if is_accepted else pytest.raises(InvalidRequest):
        derive("tool-made", SHA_256, b"x" * 32, salt=salt).check()


def test_secrets_are_redacted() -> None:
    (credential, *_) = new_credentials(USER, PASSWORD)
    shown = repr(credential) + repr(Credentials(user=USER, password=PASSWORD, token=lambda: "token"))
    assert PASSWORD not in shown
    assert credential.stored_key.hex() not in shown
    assert repr(credential.stored_key) not in shown


def test_super_users() -> None:
    assert parse_super_users("alice, bob") == {"User:alice", "User:bob"}
    assert parse_super_users("User:CN=ops,O=x;alice") == {"User:CN=ops,O=x", "User:alice"}
    assert parse_super_users("") == frozenset()


# -- tokens ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


@pytest.fixture
def tokens(issuer: Issuer) -> TokenChecker:
    return TokenChecker(OAuthSettings(jwks=str(issuer.jwks), issuer=ISSUER, audience=AUDIENCE))


async def test_a_token_names_a_principal_of_its_own_kind(issuer: Issuer, tokens: TokenChecker) -> None:
    bearer = await tokens.check(issuer.token("alice"))
    assert bearer.principal == "User:oauth:alice"
    assert bearer.expires_at > time.time()
    assert (await tokens.check(issuer.token("alice", aud=["other", AUDIENCE]))).principal == "User:oauth:alice"


async def test_a_token_does_not_act_for_another_principal(
    issuer: Issuer, tokens: TokenChecker, passwords: Passwords
) -> None:
    authenticator, token = Authenticator(passwords, tokens), issuer.token("alice")

    async def authenticate_as(authorized: str) -> AuthenticatedClient:
        message = f"n,{authorized},\x01auth=Bearer {token}\x01\x01".encode()
        outcome = await authenticator.begin(OAUTHBEARER).step(message)
        assert isinstance(outcome, tuple)
        return outcome[1]

    for own in ("", "a=oauth:alice", "a="):
        assert (await authenticate_as(own)).principal == "User:oauth:alice"
    for other in ("a=admin", "a=alice", "a=User:oauth:alice"):
        with pytest.raises(AuthenticationFailed, match="cannot be used for another principal"):
            await authenticate_as(other)


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://another.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        pytest.param({"exp": int(time.time()) - 3600}, id="has expired"),
        {"exp": None},
        {"exp": "tomorrow"},
        pytest.param({"exp": int(time.time() * 1000)}, id="in milliseconds"),
        pytest.param({"exp": 10**400}, id="beyond numbers"),
        pytest.param({"exp": float("nan")}, id="not a number"),
        pytest.param({"nbf": int(time.time()) + 3600}, id="is not valid yet"),
        pytest.param({"iat": int(time.time()) + 3600}, id="was issued later"),
        {"sub": None},
        {"sub": ""},
        {"sub": ["alice"]},
        {"sub": "a\nb"},
    ],
    ids=str,
)
async def test_a_token_with_invalid_claims_is_refused(
    issuer: Issuer, tokens: TokenChecker, claims: dict[str, Any]
) -> None:
    with pytest.raises(AuthenticationFailed):
        await tokens.check(issuer.token("alice", **claims))


async def test_a_refused_token_gets_a_readable_reason(issuer: Issuer, tokens: TokenChecker) -> None:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 300}
    secret = OctKey.generate_key(256)
    head, payload, signature = issuer.token("alice").split(".")
    for token, reason in (
        (issuer.token("alice", exp=None), "the token has no expiry time"),
        (jwt.encode({"alg": "HS256", "kid": "one"}, claims, secret), "not valid: its algorithm is not accepted"),
        (f"{head}.{payload}.{signature[::-1]}", "not valid: its signature is wrong"),
        (f"{head}.{payload}.{signature * 10}", "not valid: its header or its signature is too long"),
    ):
        with pytest.raises(AuthenticationFailed, match=reason):
            await tokens.check(token)


async def test_a_token_is_accepted_within_the_clock_skew(issuer: Issuer, tokens: TokenChecker) -> None:
    expired = int(time.time()) - 1
    assert (await tokens.check(issuer.token("alice", exp=expired))).expires_at == expired + LEEWAY_S


async def test_a_token_of_another_algorithm_or_key_is_refused(issuer: Issuer, tokens: TokenChecker) -> None:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 300}

    def encoded(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()

    valid = issuer.token("alice")
    unsigned = f"{encoded({'alg': 'HS256', 'kid': 'one'})}.{encoded(claims)}"
    by_public_key = hmac.digest(issuer.key.as_pem(private=False), unsigned.encode(), "sha256")
    own = RSAKey.generate_key(2048)
    shown = own.as_dict(private=False)
    forged = [
        # The key, or its location, in the token itself.
        jwt.encode({"alg": "RS256", "jwk": shown}, claims, own, registry=ANY_HEADER),
        jwt.encode({"alg": "RS256", "kid": "one", "jwk": shown}, claims, own, registry=ANY_HEADER),
        jwt.encode({"alg": "RS256", "kid": "one", "jku": "https://evil.example"}, claims, own, registry=ANY_HEADER),
        jwt.encode({"alg": "RS256", "kid": "../../dev/null"}, claims, own),
        f"{encoded({'alg': 'none'})}.{encoded(claims)}.",
        f"{encoded({'alg': 'none', 'kid': 'one'})}.{encoded(claims)}.{valid.rsplit('.', 1)[1]}",
        f"{unsigned}.{base64.urlsafe_b64encode(by_public_key).rstrip(b'=').decode()}",
        jwt.encode({"alg": "RS256", "kid": "one"}, claims, RSAKey.generate_key(2048)),
        jwt.encode({"alg": "RS256", "kid": "two"}, claims, RSAKey.generate_key(2048)),
        valid[:-8] + "AAAAAAAA",
        valid.rsplit(".", 1)[0] + ".",
        "x" * 100_000,
        "",
        "a.b.c",
    ]
    for token in forged:
        with pytest.raises(AuthenticationFailed):
            await tokens.check(token)
    assert await tokens.check(valid)


async def test_keys_rotate_without_a_restart(issuer: Issuer, tokens: TokenChecker) -> None:
    old = issuer.token("alice")
    assert await tokens.check(old)
    key = RSAKey.generate_key(2048, {"kid": "two"})
    issuer.publish(issuer.key, key)
    issuer.key, former = key, issuer.key
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "bob", "exp": int(time.time()) + 300}
    new = jwt.encode({"alg": "RS256", "kid": "two"}, claims, key)
    assert (await tokens.check(new)).principal == "User:oauth:bob"
    assert await tokens.check(old), former
    issuer.publish(key)
    with pytest.raises(AuthenticationFailed):
        await tokens.check(old)


async def test_keys_that_cannot_be_read_are_logged_once(
    issuer: Issuer, tokens: TokenChecker, caplog: pytest.LogCaptureFixture
) -> None:
    valid = issuer.token("alice")
    assert await tokens.check(valid)
    for broken in ("{", "[]"):
        issuer.jwks.write_text(broken)
        for _ in range(3):
            assert await tokens.check(valid), "the last keys hold"
    logged = [record.message for record in caplog.records]
    assert logged == ["the keys that verify tokens cannot be read; those read before remain in use"] * 2


async def test_a_key_that_cannot_be_used_leaves_the_others_usable(
    issuer: Issuer, tokens: TokenChecker, caplog: pytest.LogCaptureFixture
) -> None:
    removed = issuer.token("alice")
    assert await tokens.check(removed)
    unknown = {"kty": "OKP", "crv": "Ed25519ph", "kid": "unknown", "x": "AA"}
    key = RSAKey.generate_key(2048, {"kid": "two"})
    issuer.jwks.write_text(json.dumps({"keys": [unknown, "no key", key.as_dict(private=False)]}))
    issuer.key = key
    assert await tokens.check(issuer.token("bob"))
    with pytest.raises(AuthenticationFailed):
        await tokens.check(removed)
    warnings = [record for record in caplog.records if record.message == "a key that verifies tokens cannot be used"]
    assert [vars(record)["kid"] for record in warnings] == ["unknown"]


async def test_keys_of_a_url_are_refetched_for_an_unknown_key(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = 0

    def respond(_request: httpx.Request) -> httpx.Response:
        nonlocal fetched
        fetched += 1
        return httpx.Response(200, content=issuer.jwks.read_bytes())

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(respond))
    monkeypatch.setattr("millstream.broker.security.oauth.httpx.AsyncClient", client)
    tokens = TokenChecker(OAuthSettings(jwks="https://issuer.example/keys", issuer=ISSUER, audience=AUDIENCE))
    running = asyncio.create_task(tokens.run())
    await until(lambda: fetched)
    assert await tokens.check(issuer.token("alice"))
    key = RSAKey.generate_key(2048, {"kid": "two"})
    issuer.publish(issuer.key, key)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "bob", "exp": int(time.time()) + 300}
    new = jwt.encode({"alg": "RS256", "kid": "two"}, claims, key)
    with pytest.raises(AuthenticationFailed):
        await tokens.check(new)
    assert fetched == 1, "tokens of unknown keys do not make the node ask all the time"
    monkeypatch.setattr(oauth, "REFRESH_S_MIN", 0.0)
    assert (await tokens.check(new)).principal == "User:oauth:bob"
    assert await tokens.check(issuer.token("alice")), "the other key holds too"
    assert fetched == 2
    running.cancel()


@pytest.mark.parametrize(
    "settings",
    [
        {"issuer": "", "audience": AUDIENCE},
        {"issuer": ISSUER, "audience": ""},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks": "http://keys.example/jwks"},
    ],
    ids=str,
)
def test_settings_that_would_accept_too_many_tokens_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting):
        OAuthSettings(**{"jwks": "keys.json", **settings}).check()


# -- certificates ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> x509.Certificate:
    file, _ = Certificates(tmp_path_factory.mktemp("certs")).client("Alice")
    return x509.load_pem_x509_certificate(file.read_bytes())


@pytest.mark.parametrize(
    ("rules", "principal"),
    [
        ("", "User:CN=Alice"),
        ("DEFAULT", "User:CN=Alice"),
        ("RULE:^CN=(.*?)$/$1/", "User:Alice"),
        ("RULE:^CN=(.*?)$/$1/L", "User:alice"),
        ("RULE:^CN=(.*?)$/$1/U,DEFAULT", "User:ALICE"),
        ("RULE:^OU=(.*?)$/$1/, RULE:^CN=(.*)$/$1@example/", "User:Alice@example"),
        ("RULE:^OU=(.*?)$/$1/,DEFAULT", "User:CN=Alice"),
    ],
)
def test_mapping_rules_work_as_in_kafka(certificate: x509.Certificate, rules: str, principal: str) -> None:
    assert PrincipalRules(rules).principal(certificate) == principal


def named(*attributes: tuple[str, Any], kind: _ASN1Type | None = None) -> list[x509.RelativeDistinguishedName]:
    """Return a name of these attributes, the ones with a `+` before their type together with the one before."""
    groups: list[list[x509.NameAttribute[Any]]] = []
    for oid, value in attributes:
        attribute = x509.NameAttribute(x509.ObjectIdentifier(oid.strip("+")), value, kind, _validate=False)
        if oid.startswith("+"):
            groups[-1].append(attribute)
        else:
            groups.append([attribute])
    return [x509.RelativeDistinguishedName(group) for group in groups]


def certificate_of(name: list[x509.RelativeDistinguishedName]) -> x509.Certificate:
    key = Ed25519PrivateKey.generate()
    begins = datetime(2026, 1, 1, tzinfo=UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name(name))
        .issuer_name(x509.Name(name))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=1))
        .sign(key, None)
    )


CN, OU, ORG, UID, EMAIL = "2.5.4.3", "2.5.4.11", "2.5.4.10", "0.9.2342.19200300.100.1.1", "1.2.840.113549.1.9.1"
DC = "0.9.2342.19200300.100.1.25"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        (named(("2.5.4.6", "DE"), (ORG, "Example"), (CN, "alice")), "CN=alice,O=Example,C=DE"),
        (
            named(("2.5.4.8", "s"), ("2.5.4.7", "l"), ("2.5.4.9", "st. 1"), (OU, "ops"), (DC, "d"), (UID, "u")),
            "UID=u,DC=d,OU=ops,STREET=st. 1,L=l,ST=s",
        ),
        (named((CN, "alice"), (EMAIL, "a@b.c")), f"{EMAIL}=#16056140622e63,CN=alice"),
        (
            named((CN, "alice"), ("2.5.4.12", "Dr"), ("2.5.4.5", "17"), ("1.2.3.4", "private")),
            "1.2.3.4=#0c0770726976617465,2.5.4.5=#13023137,2.5.4.12=#0c024472,CN=alice",
        ),
        (named(("2.5.4.4", "x" * 200), (CN, "a")), f"CN=a,2.5.4.4=#0c81c8{'78' * 200}"),
        (named((CN, 'a,b+c"d\\e<f>g;h=i#j')), r"CN=a\,b\+c\"d\\e\<f\>g\;h\=i\#j"),
        (named((CN, "#alice")), r"CN=\#alice"),
        (named((CN, "  alice  smith ")), "CN=\\ \\ alice  smith\\ "),
        (named((CN, " ")), "CN=\\ "),
        (named((CN, "\ralice\n\t")), "CN=\\\ralice\n\t"),
        (named((CN, "a\0b")), r"CN=a\00b"),
        (named((CN, "Jürgen 東京 😀")), "CN=Jürgen 東京 😀"),
        (named((CN, "alice/bob:*'?@!$%&|~^`{}[]_")), "CN=alice/bob:*'?@!$%&|~^`{}[]_"),
        (named((CN, "alice"), ("+" + OU, "ops"), (ORG, "x")), "O=x,OU=ops+CN=alice"),
        (named((EMAIL, "a@b"), ("+" + CN, "alice"), ("+" + UID, "7")), f"CN=alice+UID=7+{EMAIL}=#1603614062"),
        (named((CN, "alice"), kind=_ASN1Type.PrintableString), "CN=alice"),
        (named((CN, "alice"), kind=_ASN1Type.IA5String), "CN=alice"),
        (named((CN, "alice"), kind=_ASN1Type.T61String), "CN=alice"),
        (named((CN, "al"), kind=_ASN1Type.BMPString), r"CN=\00a\00l"),
        (named((CN, "al"), kind=_ASN1Type.UniversalString), "CN=#1c08000000610000006c"),
        (named((CN, "alice"), kind=_ASN1Type.VisibleString), "CN=#1a05616c696365"),
        (named(("2.5.4.45", b"\0\1"), kind=_ASN1Type.BitString), "2.5.4.45=#03020001"),
    ],
    ids=str,
)
def test_the_name_in_a_certificate_is_printed_as_by_java(
    name: list[x509.RelativeDistinguishedName], printed: str
) -> None:
    """What is expected was printed by `X500Principal.getName()` of Java 17."""
    assert PrincipalRules("").principal(certificate_of(name)) == f"User:{printed}"


def test_a_name_of_an_unknown_encoding_is_refused() -> None:
    encoded = certificate_of(named((CN, "alice"))).public_bytes(Encoding.DER)
    general_string = encoded.replace(b"\x0c\x05alice", b"\x1b\x05alice")
    with pytest.raises(AuthenticationFailed, match="cannot be read"):
        PrincipalRules("").principal(x509.load_der_x509_certificate(general_string))


def test_names_that_java_cannot_decode_remain_distinct() -> None:
    """A BMPString consists of UTF-16, which Java reads as UTF-8."""
    encoded = certificate_of(named((CN, "name"))).public_bytes(Encoding.DER)
    principals = [
        PrincipalRules("").principal(x509.load_der_x509_certificate(encoded.replace(b"\x0c\x04name", changed)))
        for changed in (b"\x1e\x04\x00\xe9\x00a", b"\x1e\x04\x00\xe8\x00a")
    ]
    assert principals == ["User:CN=#1e0400e90061", "User:CN=#1e0400e80061"]


def test_a_certificate_without_a_matching_rule_is_refused(certificate: x509.Certificate) -> None:
    with pytest.raises(AuthenticationFailed):
        PrincipalRules("RULE:^OU=(.*?)$/$1/").principal(certificate)


@pytest.mark.parametrize("rules", ["RULE:", "RULE:a/b", "default", "RULE:^CN=(.*$/$1/", "DEFAULT;DEFAULT"])
def test_invalid_mapping_rules_are_refused(rules: str) -> None:
    with pytest.raises(InvalidSetting):
        PrincipalRules(rules)


def test_a_node_is_identified_by_its_certificate() -> None:
    name = NodeName(cluster="a/b c", node_id=7)  # type: ignore[arg-type]
    assert NodeName.of(["https://other", name.uri]) == name
    assert NodeName.of(["https://other"]) is None
    for uri in ("millstream://x", "millstream://x/node/", "millstream://x/node/-1", "millstream://x/node/1/2"):
        with pytest.raises(AuthenticationFailed):
            NodeName.of([uri])


def rule(operation: Operation, topic: str, *, principal: str = EVERYONE) -> Acl:
    return Acl(resource_type=ResourceType.TOPIC, resource_name=topic, principal=principal, operation=operation)


async def add_token(
    passwords: Passwords, *, scope: Iterable[Acl] = (), parent: str = "", lifetime_s: float = 60
) -> str:
    now_ms = int(time.time() * 1000)
    expires_ms = now_ms + int(lifetime_s * 1000)
    token, text = new_token("User:alice", scope=scope, parent=parent, created_ms=now_ms, expires_ms=expires_ms)
    await passwords.state.add_token(token)
    return text


async def test_the_scopes_of_all_tokens_of_an_owner_are_bounded(
    passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "SCOPE_RULES_PER_OWNER_MAX", 3)
    scope = [rule(Operation.READ, "orders"), rule(Operation.WRITE, "orders")]
    first = split_token(await add_token(passwords, scope=scope))[0]
    await add_token(passwords)
    with pytest.raises(InvalidRequest, match="3 rules together"):
        await add_token(passwords, scope=scope)
    await passwords.state.delete_token(first)
    await add_token(passwords, scope=scope)


async def test_a_token_acts_as_its_owner_within_its_own_and_its_parents_scope(
    passwords: Passwords,
) -> None:
    state, authenticator = passwords.state, Authenticator(passwords, None)
    orders, audit = rule(Operation.ALL, "orders"), rule(Operation.READ, "audit")
    await state.add_acls([replace(orders, principal="User:alice")])
    whole = await add_token(passwords)
    reads = await add_token(passwords, scope=[rule(Operation.READ, "orders"), audit], parent=split_token(whole)[0])
    writes = await add_token(passwords, scope=[orders], parent=split_token(reads)[0])

    async def may(text: str, operation: Operation, topic: str) -> bool:
        user, secret = split_token(text)
        by_plain = await authenticate(passwords, Credentials(user=user, password=secret, mechanism=PLAIN))
        assert by_plain == await authenticator.verify(BearerToken(text=text))
        assert by_plain.principal == "User:alice"
        assert secret not in repr(by_plain)
        return Rights(state, by_plain.principal, "127.0.0.1", tokens=by_plain.tokens).topic(operation, topic)

    assert [await may(whole, operation, "orders") for operation in (Operation.READ, Operation.WRITE)] == [True, True]
    assert [await may(reads, operation, "orders") for operation in (Operation.READ, Operation.WRITE)] == [True, False]
    assert [await may(writes, operation, "orders") for operation in (Operation.READ, Operation.WRITE)] == [True, False]
    assert not await may(reads, Operation.READ, "audit"), "a scope allows nothing that the owner may not"


async def test_a_token_ends_when_it_expires_or_when_it_its_parent_or_its_owner_is_deleted(
    passwords: Passwords,
) -> None:
    state, authenticator = passwords.state, Authenticator(passwords, None)
    parent, expired = await add_token(passwords), await add_token(passwords, lifetime_s=-1)
    child = await add_token(passwords, parent=split_token(parent)[0])
    other = await add_token(passwords)
    sessions = [await authenticator.verify(BearerToken(text=text)) for text in (child, other)]

    for text in (expired, parent + "x", split_token(parent)[0], "mst_0123456789abcdef.secret", "mst_"):
        with pytest.raises(AuthenticationFailed, match="wrong, expired or revoked"):
            await authenticator.verify(BearerToken(text=text))
    await state.delete_token(split_token(parent)[0])
    assert [authenticator.is_revoked(session) for session in sessions] == [True, False]
    await state.change_users(delete=[(USER, mechanism) for mechanism in SCRAM_MECHANISMS])
    assert authenticator.is_revoked(sessions[1])
    assert not state.tokens
    await state.change_users(new_credentials(USER, PASSWORD))
    with pytest.raises(AuthenticationFailed):
        await authenticator.verify(BearerToken(text=other))


async def test_a_token_created_on_another_node_is_looked_up_in_the_catalog(
    passwords: Passwords, tmp_path: Path
) -> None:
    text = await add_token(passwords)
    catalog = Catalog.open_folder(tmp_path)
    other = Passwords(SecurityState(CatalogDeclarations(catalog), ()))
    try:
        assert (await Authenticator(other, None).verify(BearerToken(text=text))).principal == "User:alice"
    finally:
        other.close()
        catalog.close()


async def test_ids_that_no_token_has_do_not_reload_the_catalog(
    passwords: Passwords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "_REFRESH_S_MIN", 0.0)
    catalog = Catalog.open_folder(tmp_path)
    reads = Mock(wraps=Catalog.security)
    monkeypatch.setattr(Catalog, "security", lambda self: reads(self))
    other = SecurityState(CatalogDeclarations(catalog), ())
    try:
        for unknown in ("mst_0123456789abcdef", "mst_\0", "mst_" + "x" * 1000):
            assert await other.find_token(unknown) == ()
        reads.assert_not_called()
        known = split_token(await add_token(passwords))[0]
        reads.reset_mock()
        # Looked up together, although the first of them is unknown.
        found_tokens = await asyncio.gather(*map(other.find_token, ("mst_0123456789abcdef", known)))
        assert [len(chain) for chain in found_tokens] == [0, 1]
        reads.assert_called_once()
    finally:
        catalog.close()
