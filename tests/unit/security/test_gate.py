"""Sessions that a gateway opens for its callers, on listeners of each kind."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509

from millstream.broker.net.connection import Connection, ConnectionLimits, Service
from millstream.broker.security import gate
from millstream.broker.security.gate import AuthenticationContext, Gate, Session
from millstream.broker.security.sasl import AuthenticatedClient
from millstream.broker.security.state import SecurityState
from millstream.cli.certs import make_node_certificate
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.credential import SHA_256, new_credentials, new_token
from millstream.core.errors import AuthenticationFailed, ProtocolViolation
from millstream.core.ids import NodeId
from millstream.protocol.wire.credentials import ASSERTION, PLAIN, _prove_password
from millstream_testing.security import Certificates, authenticating
from millstream_testing.waiting import until

GATEWAY, CALLER = "192.0.2.1", "10.0.0.7"


@pytest.fixture
async def authentication(tmp_path: Path) -> AsyncIterator[AuthenticationContext]:
    async with authenticating(tmp_path, "alice", "alice-password") as context:
        yield context


def opened(
    authentication: AuthenticationContext, *, fail: Callable[[Exception], None] = lambda _: None, **listener: Any
) -> Session:
    at = Gate(
        cast("Service", None), ConnectionLimits(frame_bytes_max=1), authentication, is_plaintext=False, **listener
    )
    connection = SimpleNamespace(
        listener="default",
        session=None,
        host=GATEWAY,
        peer=f"{GATEWAY}:1",
        ssl_object=None,
        state=None,
        deadline=None,
        serve_with=lambda _service, _limits: None,
        close_after_response=lambda: None,
        is_muted=False,
        lift_mute=lambda: None,
        restore_mute=lambda: None,
        fail=fail,
    )
    return at._open_session(cast("Connection", connection))


def opened_by_node(authentication: AuthenticationContext, folder: Path, **listener: Any) -> Session:
    files = make_node_certificate(folder, ["localhost"], authentication.cluster, NodeId(2))
    session = opened(authentication, requires=True, **{"admits_nodes": True, **listener})
    session.admit_certificate(x509.load_pem_x509_certificate(Path(files["certificate"]).read_bytes()))
    return session


def signed(authentication: AuthenticationContext, user: str = "alice", principal: str = "") -> bytes:
    credential = authentication.state.credentials[user, SHA_256]
    verified = AuthenticatedClient(principal=principal or f"User:{user}", credential=credential)
    return authentication.assertions.sign(verified, CALLER).encode()


@pytest.mark.parametrize("listener", [{}, {"requires": False}, {"requires": True, "is_internal": True}])
async def test_an_assertion_opens_a_session_of_the_caller(
    authentication: AuthenticationContext, tmp_path: Path, listener: dict[str, Any]
) -> None:
    if listener:
        session = opened(authentication, takes_assertions=True, **listener)
    else:
        session = opened_by_node(authentication, tmp_path, takes_assertions=True)
    assert session.may_begin(bare=False)
    assert session.begin(ASSERTION, bare=False)
    _, lifetime_s = await session.step(signed(authentication))
    assert lifetime_s > 0
    assert session.rights is not None
    assert (session.rights.principal, session.rights.host) == ("User:alice", CALLER)
    assert session.rights.node_id is None
    assert authentication.connections == {"User:alice": 1}
    assert not session.is_revoked()
    assert not session.begin(PLAIN, bare=False)
    await authentication.state.change_users(delete=[("alice", SHA_256)])
    assert session.is_revoked()
    session.close()


async def test_sign_ins_with_a_token_on_the_listener_of_the_node_are_audited(
    authentication: AuthenticationContext,
) -> None:
    """Others on the machine reach it as well."""
    now_ms = int(time.time() * 1000)
    token, text = new_token("User:alice", scope=frozenset(), parent="", created_ms=now_ms, expires_ms=now_ms + 60_000)
    await authentication.state.add_token(token)
    audit = authentication.state.audit
    audit.take()
    message = b"\0" + b"\0".join(part.encode() for part in text.split("."))
    for _ in range(2):
        session = opened(authentication, requires=True, is_internal=True)
        assert session.begin(PLAIN, bare=False)
        await session.step(message)
    session = opened(authentication, requires=True, is_internal=True)
    assert session.begin(PLAIN, bare=False)
    with pytest.raises(AuthenticationFailed):
        await session.step(message + b"x")
    signed_in, failed = audit.take()
    assert (signed_in["user"]["uid"], signed_in["status_id"], signed_in["count"]) == ("User:alice", 1, 2)
    assert (failed["user"]["uid"], failed["status_id"]) == (token.token_id, 2)


async def test_the_holder_of_a_certificate_may_authenticate_by_sasl_before_any_request(
    authentication: AuthenticationContext, tmp_path: Path
) -> None:
    certificate, _ = Certificates(tmp_path / "certs").client("bob")

    def opened_by_bob() -> Session:
        session = opened(authentication, requires=True)
        session.admit_certificate(x509.load_pem_x509_certificate(certificate.read_bytes()))
        assert authentication.connections == {"User:CN=bob": 1}
        return session

    session = opened_by_bob()
    assert session.may_begin(bare=False)
    assert session.begin(PLAIN, bare=False)
    await session.step(b"\0alice\0alice-password")
    assert session.rights is not None
    assert session.rights.principal == "User:alice"
    assert authentication.connections == {"User:alice": 1}
    assert not session.may_begin(bare=False), "only once"
    session.close()
    assert not authentication.connections
    session = opened_by_bob()
    session.refuse_sasl()
    assert not session.may_begin(bare=False)
    session.close()


async def test_a_session_may_be_renewed_but_not_transferred(
    authentication: AuthenticationContext, tmp_path: Path
) -> None:
    await authentication.state.change_users(new_credentials("bob", "bob-password"))
    session = opened_by_node(authentication, tmp_path, takes_assertions=True)
    for _ in range(2):
        assert session.begin(ASSERTION, bare=False)
        await session.step(signed(authentication))
    assert session.begin(ASSERTION, bare=False)
    with pytest.raises(AuthenticationFailed, match="another principal"):
        await session.step(signed(authentication, "bob"))
    session.close()


async def test_scram_does_not_transfer_a_session_either(authentication: AuthenticationContext) -> None:
    await authentication.state.change_users(new_credentials("bob", "bob-password"))
    session = opened(dataclasses.replace(authentication, session_s_max=600.0), requires=True)

    async def authenticate(user: str) -> None:
        assert session.begin(SHA_256, bare=False)
        exchange = _prove_password(SHA_256, user, f"{user}-password")
        challenge, _ = await session.step(next(exchange))
        await session.step(exchange.send(challenge))

    await authenticate("alice")
    await authenticate("alice")
    with pytest.raises(AuthenticationFailed, match="another principal"):
        await authenticate("bob")
    session.close()


async def test_a_password_that_is_deleted_during_the_exchange_opens_no_session(
    authentication: AuthenticationContext,
) -> None:
    session = opened(authentication, requires=True)
    assert session.begin(SHA_256, bare=False)
    exchange = _prove_password(SHA_256, "alice", "alice-password")
    challenge, _ = await session.step(next(exchange))
    await authentication.state.change_users(delete=[("alice", SHA_256)])
    with pytest.raises(AuthenticationFailed, match="was deleted"):
        await session.step(exchange.send(challenge))
    assert not session.is_known
    session.close()


async def test_clients_try_again_until_the_users_are_known(
    authentication: AuthenticationContext, tmp_path: Path
) -> None:
    unread = SecurityState(authentication.state._declarations, ())
    authentication = dataclasses.replace(authentication, state=unread)
    session = opened(authentication, requires=True)
    assert session.begin(PLAIN, bare=False)
    # Not an authentication failure, after which clients give up.
    with pytest.raises(ProtocolViolation, match="not known yet"):
        await session.step(b"\0alice\0alice-password")
    file, _ = Certificates(tmp_path).client("alice")
    with pytest.raises(ProtocolViolation, match="not known yet"):
        session.admit_certificate(x509.load_pem_x509_certificate(file.read_bytes()))
    assert opened_by_node(authentication, tmp_path).is_known
    await unread.load()
    await session.step(b"\0alice\0alice-password")
    assert session.is_known
    session.close()


async def test_a_client_that_reauthenticates_may_finish(
    authentication: AuthenticationContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RENEWAL_S", 0.0)
    failed = asyncio.Event()
    session = opened(
        dataclasses.replace(authentication, session_s_max=0.01), requires=True, fail=lambda _: failed.set()
    )
    word = b"\0alice\0alice-password"
    for _ in range(3):
        assert session.begin(PLAIN, bare=False)
        await asyncio.sleep(0.1)
        assert not failed.is_set()
        await session.step(word)
    assert session.begin(PLAIN, bare=False)
    monkeypatch.setattr(gate, "DEADLINE_S", 0.01)
    async with asyncio.timeout(30):
        await failed.wait()
    session.close()


async def until_ended(session: Session) -> None:
    await until(lambda: session.has_ended)


async def test_a_client_may_reauthenticate_after_the_end_of_its_session_but_not_forever(
    authentication: AuthenticationContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RENEWAL_S", 0.0)
    failed = asyncio.Event()
    session = opened(
        dataclasses.replace(authentication, session_s_max=0.01), requires=True, fail=lambda _: failed.set()
    )
    for _ in range(2):
        assert session.begin(PLAIN, bare=False)
        await session.step(b"\0alice\0alice-password")
        assert not session.has_ended
        await until_ended(session)
        assert session.may_begin(bare=False)
    assert not failed.is_set()
    monkeypatch.setattr(gate, "DEADLINE_S", 0.01)
    assert session.begin(PLAIN, bare=False)
    async with asyncio.timeout(30):
        await failed.wait()
    session.close()


async def test_a_throttled_client_has_a_while_to_reauthenticate(
    authentication: AuthenticationContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RENEWAL_S", 0.0)
    monkeypatch.setattr(gate, "DEADLINE_S", 0.01)
    events: list[str] = []
    session = opened(dataclasses.replace(authentication, session_s_max=0.01), requires=True)
    connection: Any = session._connection
    connection.is_muted, connection.lift_mute = True, lambda: events.append("lifted")
    connection.restore_mute = lambda: events.append("restored")
    assert session.begin(PLAIN, bare=False)
    await session.step(b"\0alice\0alice-password")
    await until_ended(session)
    assert events == ["restored", "lifted"]
    session.close()


async def test_the_session_of_a_throttled_client_ends_with_its_credential(
    authentication: AuthenticationContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RENEWAL_S", 0.0)
    session = opened(dataclasses.replace(authentication, session_s_max=0.01), requires=True)
    connection: Any = session._connection
    lifted: list[None] = []
    connection.is_muted, connection.lift_mute = True, lambda: lifted.append(None)
    assert session.begin(PLAIN, bare=False)
    await session.step(b"\0alice\0alice-password")
    assert session.verified is not None
    session.verified = dataclasses.replace(session.verified, expires_at=time.time())
    await until_ended(session)
    assert not lifted
    session.close()


@pytest.mark.parametrize("admits_nodes", [True, False])
async def test_a_certificate_identifies_a_node_only_where_its_authority_is_that_of_nodes(
    authentication: AuthenticationContext, tmp_path: Path, admits_nodes: bool
) -> None:
    await authentication.state.load()
    session = opened_by_node(authentication, tmp_path, admits_nodes=admits_nodes, takes_assertions=True)
    assert session.rights is not None
    assert session.rights.node_id == (2 if admits_nodes else None)
    assert session.rights.allows(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME) == admits_nodes
    assert session.begin(ASSERTION, bare=False) == admits_nodes
    session.close()


async def test_an_expired_certificate_is_refused_in_a_resumed_session_too(
    authentication: AuthenticationContext, tmp_path: Path
) -> None:
    expired, _ = Certificates(tmp_path / "certs").sign("bob", begins_days=-2, lasts_days=1)
    session = opened(authentication, requires=True)
    with pytest.raises(AuthenticationFailed, match="expired"):
        session.admit_certificate(x509.load_pem_x509_certificate(expired.read_bytes()))
    assert session.rights is None


async def test_a_connection_that_is_known_by_its_certificate_ends_with_it(
    authentication: AuthenticationContext, tmp_path: Path
) -> None:
    session = opened_by_node(authentication, tmp_path)
    drained: list[None] = []
    connection: Any = session._connection
    connection.drain = lambda: drained.append(None)
    session._expire()
    assert (drained, session.has_ended) == ([None], False)
    session.close()


async def test_a_failed_reauthentication_gets_its_response_though_the_session_ends_meanwhile(
    authentication: AuthenticationContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RENEWAL_S", 0.0)
    monkeypatch.setattr(authentication.attempts, "pause_s", lambda _host, _user: 0.2)
    failed: list[Exception] = []
    session = opened(dataclasses.replace(authentication, session_s_max=0.01), requires=True, fail=failed.append)
    assert session.begin(PLAIN, bare=False)
    await session.step(b"\0alice\0alice-password")
    assert session.begin(PLAIN, bare=False)
    with pytest.raises(AuthenticationFailed):
        await session.step(b"\0alice\0wrong")
    assert not failed
    session.close()


async def test_an_assertion_never_authenticates_a_node(authentication: AuthenticationContext) -> None:
    session = opened(authentication, takes_assertions=True, requires=True, is_internal=True)
    assert session.begin(ASSERTION, bare=False)
    with pytest.raises(AuthenticationFailed):
        await session.step(signed(authentication, principal="Node:self"))
    assert session.rights is None
    session.close()


async def test_other_listeners_and_sessions_accept_no_assertions(
    authentication: AuthenticationContext, tmp_path: Path
) -> None:
    for requires in (True, False):
        assert not opened(authentication, requires=requires).begin(ASSERTION, bare=False)
    assert not opened_by_node(authentication, tmp_path / "other").begin(ASSERTION, bare=False)
    node = opened_by_node(authentication, tmp_path / "node", takes_assertions=True)
    assert not node.begin(PLAIN, bare=False), "a node does not become a user by a password"
    session = opened(authentication, takes_assertions=True, requires=True)
    assert not session.begin(ASSERTION, bare=False), "a node shows its certificate first"
    assert session.begin(PLAIN, bare=False)
    await session.step(b"\0alice\0alice-password")
    assert not session.begin(ASSERTION, bare=False)
    session.close()
