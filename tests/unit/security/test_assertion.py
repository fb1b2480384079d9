"""Assertions: which nodes accept them, and when they become invalid."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.security.assertion import ASSERTION_S, SESSION_S_MAX, Assertion, Assertions, public_text
from millstream.broker.security.oauth import OAuthSettings
from millstream.broker.security.sasl import UNAUTHENTICATED, AuthenticatedClient
from millstream.broker.security.state import SecurityState
from millstream.core.credential import SHA_256, new_credentials, new_token
from millstream.core.errors import AuthenticationFailed
from millstream.core.ids import NodeId

HOST = "10.0.0.7"


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[SecurityState]:
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ())
    await state.change_users(new_credentials("alice", "alice-password"))
    yield state
    catalog.close()


def node(state: SecurityState, *, cluster_id: str = "a", node_id: int = 1) -> tuple[Assertions, str]:
    """A node that signs, and the public key in its registration."""
    key = Ed25519PrivateKey.generate()
    return Assertions(state, cluster_id, NodeId(node_id), key), public_text(key)


def alice(state: SecurityState) -> AuthenticatedClient:
    return AuthenticatedClient(principal="User:alice", credential=state.credentials["alice", SHA_256], user="alice")


async def test_every_node_accepts_an_assertion_signed_by_another(state: SecurityState) -> None:
    signer, public_key = node(state)
    other, _ = node(state, node_id=2)
    other.public_key_of = lambda node_id: public_key if node_id == 1 else ""
    for verifier in (signer, other):
        client = await verifier.verify(signer.sign(alice(state), HOST).encode())
        assert (client.principal, client.host, client.credential) == ("User:alice", HOST, alice(state).credential)
        assert client.expires_at is not None
        assert 0 < client.expires_at - time.time() <= SESSION_S_MAX


async def test_a_session_ends_with_the_credential(state: SecurityState) -> None:
    signer, _ = node(state)
    signer.is_named_by_token = "User:oauth:a".__eq__
    ends = time.time() + 30
    client = await signer.verify(
        signer.sign(AuthenticatedClient(principal="User:oauth:a", expires_at=ends), HOST).encode()
    )
    assert client.expires_at == ends
    assert (await signer.verify(signer.sign(UNAUTHENTICATED, HOST).encode())).principal == "User:ANONYMOUS"


async def test_an_assertion_without_a_proof_of_its_own_principal_is_refused(state: SecurityState) -> None:
    signer, _ = node(state)
    signer.is_named_by_token = OAuthSettings(jwks="keys", issuer="i", audience="a").may_name
    now_ms = int(time.time() * 1000)
    token, _ = new_token("User:alice", created_ms=now_ms, expires_ms=now_ms + 600_000)
    await state.add_token(token)
    for forged in (
        AuthenticatedClient(principal="User:alice"),
        AuthenticatedClient(principal="User:alice", expires_at=time.time() + 30),
        AuthenticatedClient(principal="User:oauth:a"),
        AuthenticatedClient(principal="User:admin", credential=alice(state).credential),
        AuthenticatedClient(principal="User:admin", tokens=(token,)),
    ):
        with pytest.raises(AuthenticationFailed):
            await signer.verify(signer.sign(forged, HOST).encode())
        with pytest.raises(AuthenticationFailed):
            await signer.verify_session(signer.open_session(forged, 30)[0].encode())


async def test_assertions_of_untrusted_signers_are_refused(state: SecurityState) -> None:
    verifier, public_key = node(state)
    foreign, foreign_key = node(state, cluster_id="b", node_id=2)
    unknown, _ = node(state, node_id=3)
    impostor, _ = node(state, node_id=1)
    restarted, _ = node(state, node_id=4)
    verifier.public_key_of = lambda node_id: {2: foreign_key, 4: public_key}.get(node_id, "")
    for signer, why in (
        (foreign, "another cluster"),
        (unknown, "key of node 3 is not known"),
        (impostor, "not signed by the node"),
        (restarted, "not signed by the node"),
    ):
        with pytest.raises(AuthenticationFailed, match=why):
            await verifier.verify(signer.sign(alice(state), HOST).encode())


def altered(**fields: object) -> Callable[[bytes], bytes]:
    def alter(signed: bytes) -> bytes:
        assertion = msgspec.msgpack.decode(signed[64:], type=Assertion)
        return signed[:64] + msgspec.msgpack.encode(msgspec.structs.replace(assertion, **fields))

    return alter


@pytest.mark.parametrize(
    "alter",
    [
        altered(principal="User:admin"),
        altered(principal="Node:self"),
        altered(host="127.0.0.1"),
        altered(expires_at=time.time() + 10 * ASSERTION_S),
        altered(proof=None),
        lambda signed: signed[:-1],
        lambda signed: b"\0" * 64 + signed[64:],
        lambda signed: signed[:63],
        lambda signed: b"",
        lambda signed: signed + b"\xc1" * 100_000,
    ],
)
async def test_altered_assertions_are_refused(state: SecurityState, alter: Callable[[bytes], bytes]) -> None:
    signer, _ = node(state)
    signed = base64.b64decode(signer.sign(alice(state), HOST))
    with pytest.raises(AuthenticationFailed):
        await signer.verify(base64.b64encode(alter(signed)))


async def test_unreadable_assertions_are_refused(state: SecurityState) -> None:
    signer, _ = node(state)
    for text in (b"", b"?", b"\xff" * 100, b"A" * 100):
        with pytest.raises(AuthenticationFailed):
            await signer.verify(text)


async def test_an_expired_assertion_is_refused(state: SecurityState, monkeypatch: pytest.MonkeyPatch) -> None:
    signer, _ = node(state)
    text = signer.sign(alice(state), HOST).encode()
    later = time.time() + ASSERTION_S + 1
    monkeypatch.setattr("millstream.broker.security.assertion.time.time", lambda: later)
    with pytest.raises(AuthenticationFailed, match="has expired"):
        await signer.verify(text)


async def test_a_changed_or_deleted_password_invalidates_earlier_assertions(state: SecurityState) -> None:
    signer, _ = node(state)
    text = signer.sign(alice(state), HOST).encode()
    await state.change_users(new_credentials("alice", "another-password"))
    with pytest.raises(AuthenticationFailed, match="password was changed"):
        await signer.verify(text)
    text = signer.sign(alice(state), HOST).encode()
    await state.change_users(delete=[("alice", SHA_256)])
    with pytest.raises(AuthenticationFailed, match="was deleted"):
        await signer.verify(text)


async def test_the_scope_of_a_token_comes_from_the_catalog_and_ends_with_it(state: SecurityState) -> None:
    signer, _ = node(state)
    now_ms = int(time.time() * 1000)
    token, _ = new_token("User:alice", created_ms=now_ms, expires_ms=now_ms + 600_000)
    await state.add_token(token)
    text = signer.sign(AuthenticatedClient(principal="User:alice", tokens=(token,)), HOST).encode()
    assert (await signer.verify(text)).tokens == (token,)
    assert signer.identity_of(AuthenticatedClient(principal="User:alice", tokens=(token,))) != signer.identity_of(
        alice(state)
    )
    await state.delete_token(token.token_id)
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await signer.verify(text)
