"""Authenticates the clients of a listener before their requests reach the APIs.

Until a client has authenticated, it may send only the requests of authentication, few and small, before a deadline.
Afterwards its requests go directly to the APIs. When its session has ended, the requests in progress get their
responses, and the next one closes the connection unless it authenticates again, as in Kafka.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Protocol, cast

from kio.schema.errors import ErrorCode

from millstream.broker.net.connection import Buffers, Connection, ConnectionLimits, EventualResponse, Service
from millstream.broker.security.assertion import Assertions
from millstream.broker.security.audit import HTTP
from millstream.broker.security.rights import ANONYMOUS, Rights
from millstream.broker.security.sasl import (
    UNAUTHENTICATED,
    AuthenticatedClient,
    Authenticator,
    FailedAttempts,
    Mechanism,
)
from millstream.broker.security.state import NO_SNAPSHOT, SecurityState
from millstream.broker.security.tls import PrincipalRules, peer_certificate, subject_of, uris_of
from millstream.core.credential import TOKEN_PREFIX
from millstream.core.errors import AuthenticationFailed, ProtocolViolation
from millstream.core.ids import NodeId
from millstream.core.metric import Metric, counter
from millstream.protocol.messages.codec import (
    API_VERSIONS_KEY,
    RequestHeader,
    load_response_class,
    read_request_header,
    write_response,
)
from millstream.protocol.messages.shape import default_of
from millstream.protocol.wire.credentials import ASSERTION, NODE_USER, PLAIN, NodeName

_logger = logging.getLogger(__name__)

FRAME_BYTES_MAX: Final = 64 * 1024
REQUESTS_MAX: Final = 16
_RENEWAL_S: Final = 1.0
"""How long a session outlives its announced expiry: its new handshake may wait behind its own requests."""
DEADLINE_S: Final = 10.0
SASL_HANDSHAKE_KEY, SASL_AUTHENTICATE_KEY = 17, 36
CERTIFICATE: Final = "TLS"
"""The mechanism of clients that authenticate by certificate, in the audit log."""
_BEFORE: Final = frozenset({API_VERSIONS_KEY, SASL_HANDSHAKE_KEY})
_IN_DIALOGUE: Final = frozenset({SASL_HANDSHAKE_KEY, SASL_AUTHENTICATE_KEY})
"""The allowed requests before a client has chosen a mechanism, and after that; a second handshake gets a response."""
_REVOKED: Final = "the user or token was deleted, or the password was changed"
LIMITS: Final = ConnectionLimits(frame_bytes_max=FRAME_BYTES_MAX)


class Client(Protocol):
    """The part of a client's state that authentication changes."""

    rights: Rights | None
    session: Session | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticationContext:
    """The state with which a node authenticates its clients."""

    state: SecurityState
    authenticator: Authenticator
    attempts: FailedAttempts
    rules: PrincipalRules
    cluster: str
    node_id: NodeId
    node_secret: bytes
    """The secret with which this node's own processes sign in; new with each start."""
    assertions: Assertions
    connections_max: int = 2**31
    connections: Counter[str] = field(default_factory=Counter)
    """How many each principal has open; nodes do not count."""
    session_s_max: float = 0.0
    """The longest session, in seconds; 0 for no limit."""


class Gate:
    """The service of a listener that authenticates its clients."""

    def __init__(
        self,
        service: Service,
        limits: ConnectionLimits,
        authentication: AuthenticationContext,
        *,
        requires: bool,
        is_plaintext: bool,
        is_internal: bool = False,
        takes_assertions: bool = False,
        admits_nodes: bool = False,
    ) -> None:
        self.service = service
        self.limits = limits
        self.authentication = authentication
        self.requires = requires
        """Whether clients have to authenticate; otherwise they are anonymous."""
        self.is_internal = is_internal
        """Whether this listener is for the node's own processes only."""
        self.takes_assertions = takes_assertions
        """Whether gateways act for their callers here; where clients authenticate by certificate, with their node's."""
        self.admits_nodes = admits_nodes
        """Whether certificates may identify nodes: they are of the authority that nodes trust."""
        self.offered: Sequence[str] = (
            (PLAIN,) if is_internal else authentication.authenticator.offered(is_plaintext=is_plaintext)
        )

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        """Respond to a request of a client that has authenticated, or one that authenticates it."""
        session: Session = connection.session or self._open_session(connection)
        if session.is_known and not session.has_begun:
            key = read_request_header(frame).api_key
            if session.has_ended and key != SASL_HANDSHAKE_KEY:
                raise ProtocolViolation("the session has ended without authenticating again")
            if session.may_use_sasl and key not in _BEFORE:
                session.refuse_sasl()
            return self.service.handle(frame, connection)
        session.requests += 1
        if session.requests > REQUESTS_MAX:
            raise ProtocolViolation(f"more than {REQUESTS_MAX} requests before authentication")
        if session.takes_tokens:
            return session.respond_to_token(bytes(frame))
        header = read_request_header(frame)
        if session.has_begun and header.api_key not in _IN_DIALOGUE:
            return self._refuse(header, connection)
        if not session.has_begun and header.api_key not in _BEFORE:
            raise ProtocolViolation(f"API {header.api_key} was requested before authentication")
        return self.service.handle(frame, connection)

    async def _refuse(self, header: RequestHeader, connection: Connection) -> Buffers:
        """Respond to a request during an exchange with ILLEGAL_SASL_STATE, if its response has a code, and close."""
        entity = load_response_class(header.api_key, header.version)
        values = {field.name: default_of(field) for field in fields(entity)}
        if "error_code" not in values:
            raise ProtocolViolation(f"API {header.api_key} was requested during authentication")
        connection.close_after_response()
        response = entity(**{**values, "error_code": ErrorCode.illegal_sasl_state})
        return [write_response(header.api_key, header.version, header.correlation_id, response)]

    def _open_session(self, connection: Connection) -> Session:
        session = connection.session = Session(self, connection)
        if not self.requires:
            session.admit(UNAUTHENTICATED)
            return session
        name = ""
        try:
            certificate = None if self.is_internal else peer_certificate(connection.ssl_object)
            if certificate is not None:
                name = subject_of(certificate)
                session.admit_certificate(certificate)
        except AuthenticationFailed as error:
            self.authentication.attempts.total += 1
            self.authentication.state.audit.fail_sign_in(
                name, connection.host, connection.listener, CERTIFICATE, str(error)
            )
            raise ProtocolViolation(str(error)) from error
        return session


class Session:
    """The authentication state of one connection, including re-authentication."""

    def __init__(self, gate: Gate, connection: Connection) -> None:
        self._gate = gate
        self._connection = connection
        self._mechanism_name = ""
        self._mechanism: Mechanism | None = None
        self._ends: asyncio.TimerHandle | None = None
        self._counted_as = ""
        self._has_signed_in = False
        self._is_node = False
        """Whether the other end has shown the certificate of a node."""
        self.may_use_sasl = False
        """Whether a client that is known by its certificate may authenticate by SASL: it has requested nothing yet."""
        self.has_ended = False
        """Whether the session has ended, so that the client has to authenticate again before other requests."""
        self.requests = 0
        self.takes_tokens = False
        """Whether frames are bare SASL messages, as after the first version of SaslHandshake."""
        self.verified: AuthenticatedClient | None = None
        self.rights: Rights | None = None

    @property
    def is_known(self) -> bool:
        return self.rights is not None

    @property
    def _is_default(self) -> bool:
        """Whether the client may still become another principal.

        It is anonymous, where that is allowed, a node, or the holder of a certificate that may authenticate by SASL.
        """
        acts_as_node = self.rights is not None and self.rights.node_id is not None
        is_caller = (acts_as_node or not self._gate.requires) and self._mechanism_name in ("", ASSERTION)
        return is_caller or self.may_use_sasl

    @property
    def mechanisms(self) -> Sequence[str]:
        """The mechanisms that the listener offers; none where clients do not authenticate."""
        return self._gate.offered if self._gate.requires else ()

    def may_begin(self, *, bare: bool) -> bool:
        """Whether a handshake is allowed now: first, and again in a session that expires (KIP-368)."""
        if self.has_begun or (bare and self.is_known and not self.may_use_sasl):
            self._connection.close_after_response()
            return False
        return not self.is_known or self._is_default or bool(self._ends and self._mechanism_name)

    def begin(self, mechanism: str, *, bare: bool) -> bool:
        """Begin an exchange; return False, and close, if the mechanism cannot be used here."""
        authentication = self._gate.authentication
        if mechanism == ASSERTION and self._may_assert:
            chosen: Mechanism = _AssertionMechanism(authentication.assertions)
        elif self._is_node or mechanism not in self.mechanisms:
            if self.mechanisms:
                self._connection.close_after_response()
            return False
        else:
            chosen = (
                _NodeSecret(authentication) if self._gate.is_internal else authentication.authenticator.begin(mechanism)
            )
        if self.verified is not None and not self._is_default and mechanism != self._mechanism_name:
            self._connection.close_after_response()
            return False
        self._mechanism_name = mechanism
        self._mechanism = chosen
        self.takes_tokens = bare
        if self.is_known:
            # Until the client has reauthenticated, no other request is served.
            self.requests = 0
            self._connection.serve_with(self._gate, self._gate.limits)
            if self.has_ended:
                self._await_renewal()
        return True

    @property
    def _may_assert(self) -> bool:
        """Whether the other end is a gateway: in a cluster that authenticates, it shows its node's certificate."""
        return self._gate.takes_assertions and (self._is_node or self._gate.is_internal or not self._gate.requires)

    @property
    def has_begun(self) -> bool:
        """Whether an exchange is in progress."""
        return self._mechanism is not None

    async def step(self, message: bytes) -> tuple[bytes, float]:
        """Continue the exchange; return the response and, at its end, the session's length in seconds (0: no end).

        The response to a failure is sent after a pause, and then the connection is closed.
        """
        mechanism = self._mechanism
        if mechanism is None:
            raise ProtocolViolation("SASL messages came before a mechanism was chosen")
        self._require_snapshot()
        try:
            response = await mechanism.step(message)
            if isinstance(response, bytes):
                return response, 0.0
            reply, verified = response
            if self.verified is not None and not (self._is_default or verified.principal == self.verified.principal):
                raise AuthenticationFailed("a connection cannot authenticate again as another principal")
            if self._gate.authentication.authenticator.is_revoked(verified):
                # It was valid when the exchange began, and nothing would close the connection later.
                raise AuthenticationFailed(_REVOKED)
            lifetime_s = self.admit(verified) if self._mechanism_name != ASSERTION else self._admit(verified, None)
        except AuthenticationFailed as error:
            self._mechanism = None
            await self._fail(error, mechanism.user)
            raise
        self._mechanism = None
        self.takes_tokens = False
        return reply, lifetime_s

    async def respond_to_token(self, message: bytes) -> Buffers:
        """Respond to a bare SASL message."""
        try:
            reply, _ = await self.step(message)
        except AuthenticationFailed as error:
            # Bare messages cannot carry an error.
            raise ProtocolViolation(str(error)) from error
        return [len(reply).to_bytes(4, "big") + reply]

    def admit(self, verified: AuthenticatedClient) -> float:
        """Admit a client; return the session's length in seconds (0: no end)."""
        node_id = self._gate.authentication.node_id if verified.principal == _NODE_PRINCIPAL else None
        return self._admit(verified, node_id)

    def admit_certificate(self, certificate: Any) -> None:
        """Admit the holder of a certificate: a node of this cluster, or the principal that the rules map it to."""
        authentication = self._gate.authentication
        until = certificate.not_valid_after_utc.timestamp()
        if until <= time.time():
            # A resumed session is not checked by TLS.
            raise AuthenticationFailed("the certificate has expired")
        name = NodeName.of(uris_of(certificate)) if self._gate.admits_nodes else None
        if name is None:
            self._require_snapshot()
            principal = authentication.rules.principal(certificate)
            self._admit(AuthenticatedClient(principal=principal, expires_at=until), None)
            self.may_use_sasl = True
            self._connection.serve_with(self._gate, self._gate.limits)
            return
        if name.cluster != authentication.cluster:
            raise AuthenticationFailed(f"the certificate is that of a node of another cluster, {name.cluster!r}")
        self._admit(AuthenticatedClient(principal=f"Node:{name.node_id}", expires_at=until), name.node_id)
        # A caller that the node acts for later has signed in as well.
        self._is_node, self._has_signed_in = True, False

    def _require_snapshot(self) -> None:
        """Close the connection of a client while its rights are not known: it tries again, unlike after a failure."""
        if not (self._gate.authentication.state.is_loaded or self._gate.is_internal):
            raise ProtocolViolation(NO_SNAPSHOT)

    def refuse_sasl(self) -> None:
        """Remain the principal of the certificate."""
        self.may_use_sasl = False
        self._connection.serve_with(self._gate.service, self._gate.limits)

    def is_revoked(self) -> bool:
        """Whether the password or token of the session is no longer valid."""
        return self.verified is not None and self._gate.authentication.authenticator.is_revoked(self.verified)

    def end_if_revoked(self) -> None:
        """Close the connection if its password or token is no longer valid; a change of its own gets its response."""
        if not self.is_revoked():
            return
        if self.rights is not None and self.rights.is_changing_declarations:
            self._connection.close_after_response()
        else:
            self._connection.fail(AuthenticationFailed(_REVOKED))

    def close(self) -> None:
        """Release the connection's share of the limits."""
        self._cancel_timer()
        self._uncount()

    def _uncount(self) -> None:
        if self._counted_as:
            connections = self._gate.authentication.connections
            connections[self._counted_as] -= 1
            if not connections[self._counted_as]:
                del connections[self._counted_as]
            self._counted_as = ""

    def _cancel_timer(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None

    def _count(self, principal: str) -> None:
        """Count the connection for its principal; raise `AuthenticationFailed` if that has too many."""
        authentication = self._gate.authentication
        if authentication.connections[principal] >= authentication.connections_max:
            raise AuthenticationFailed(
                f"{principal} has {authentication.connections_max} connections open, as many as "
                "connections-per-principal-max allows"
            )
        authentication.connections[principal] += 1
        self._counted_as = principal

    def _admit(self, verified: AuthenticatedClient, node_id: NodeId | None) -> float:
        authentication, connection = self._gate.authentication, self._connection
        if self.may_use_sasl:
            self._uncount()
            self.may_use_sasl = self._has_signed_in = False
        is_new = not self._has_signed_in and verified.principal != ANONYMOUS
        if is_new and node_id is None:
            self._count(verified.principal)
        self._has_signed_in = self._has_signed_in or is_new
        self.verified = verified
        self.rights = Rights(
            authentication.state,
            verified.principal,
            verified.host or connection.host,
            node_id=node_id,
            tokens=verified.tokens,
        )
        if is_new and self._mechanism_name == ASSERTION:
            authentication.state.audit.sign_in(self.rights.actor, HTTP, ASSERTION)
        elif is_new and (verified.tokens or not self._gate.is_internal):
            # The tasks of pipelines sign in again and again.
            mechanism, is_frequent = self._mechanism_name or CERTIFICATE, self._gate.is_internal
            authentication.state.audit.sign_in(
                self.rights.actor, connection.listener, mechanism, is_frequent=is_frequent
            )
        client = cast("Client | None", connection.state)
        if client is not None:
            client.rights = self.rights
        connection.serve_with(self._gate.service, self._gate.limits)
        connection.restore_mute()
        self._cancel_timer()
        self.has_ended = False
        is_password = self._mechanism_name != "" and not self._gate.is_internal
        lifetime_s = authentication.session_s_max if is_password else 0.0
        if verified.expires_at is not None:
            remaining_s = max(verified.expires_at - time.time(), 0.001)
            lifetime_s = min(lifetime_s, remaining_s) if lifetime_s else remaining_s
        if lifetime_s:
            loop = asyncio.get_running_loop()
            # A certificate may be valid for longer than a timer can run.
            self._ends = loop.call_later(min(lifetime_s, 365 * 86400.0) + _RENEWAL_S, self._expire)
        return lifetime_s if self._mechanism_name else 0.0

    def _expire(self, *, is_last: bool = False) -> None:
        connection = self._connection
        expires_at = None if self.verified is None else self.verified.expires_at
        is_valid = self._mechanism_name != "" and (expires_at is None or expires_at > time.time())
        if self.has_begun and is_last:
            connection.fail(AuthenticationFailed("the client did not finish authenticating again in time"))
        elif self.has_begun or (connection.is_muted and is_valid and not is_last):
            # The client is reauthenticating, and has as much time as a new one. The handshake of a throttled client may
            # wait behind its own requests; while its password is valid, those are served, and the quota counts them.
            connection.lift_mute()
            self._await_renewal()
        elif not self._mechanism_name:
            # A client that is known by its certificate cannot authenticate again on this connection.
            connection.drain()
        else:
            self.has_ended = True
            connection.serve_with(self._gate, self._gate.limits)

    def _await_renewal(self) -> None:
        self._ends = asyncio.get_running_loop().call_later(DEADLINE_S, partial(self._expire, is_last=True))

    async def _fail(self, error: AuthenticationFailed, user: str) -> None:
        authentication, connection = self._gate.authentication, self._connection
        # An assertion cannot be guessed, and the address is that of a gateway with many callers.
        pause_s = authentication.attempts.pause_s(connection.host, user) if self._mechanism_name != ASSERTION else 0.0
        _logger.warning(
            "authentication failed",
            extra={
                "peer": connection.peer,
                "user": user[:128],
                "mechanism": self._mechanism_name,
                "reason": str(error),
            },
        )
        authentication.state.audit.fail_sign_in(
            user, connection.host, connection.listener, self._mechanism_name, str(error)
        )
        connection.deadline = None
        # The session may end during the pause, and its client gets the response first.
        self._cancel_timer()
        await asyncio.sleep(pause_s)
        connection.close_after_response()


_NODE_PRINCIPAL: Final = "Node:self"


class _NodeSecret:
    """The mechanism of a node's own processes, on a listener that only they know: as the node, or with an API token."""

    def __init__(self, authentication: AuthenticationContext) -> None:
        self._authenticator = authentication.authenticator
        self._secret = authentication.node_secret
        self.user = NODE_USER

    async def step(self, message: bytes) -> bytes | tuple[bytes, AuthenticatedClient]:
        """Compare the secret, or verify a token."""
        if message.startswith(b"\0" + TOKEN_PREFIX.encode()):
            plain = self._authenticator.begin(PLAIN)
            try:
                return await plain.step(message)
            finally:
                self.user = plain.user
        if not hmac.compare_digest(message, b"\0" + NODE_USER.encode() + b"\0" + self._secret):
            raise AuthenticationFailed("this listener is for the node's own processes")
        return b"", AuthenticatedClient(principal=_NODE_PRINCIPAL)


class _AssertionMechanism:
    """The mechanism of a gateway that acts for a caller: an assertion of a node."""

    def __init__(self, assertions: Assertions) -> None:
        self._assertions = assertions
        self.user = ""

    async def step(self, message: bytes) -> tuple[bytes, AuthenticatedClient]:
        return b"", await self._assertions.verify(message)


class RevokedSessions:
    """Closes the connections of passwords and tokens that were changed or deleted."""

    def __init__(self, state: SecurityState, attempts: FailedAttempts) -> None:
        self._listeners: list[Collection[Connection]] = []
        self._attempts = attempts
        state.on_change(self._close_revoked)

    def watch(self, connections: Collection[Connection]) -> None:
        self._listeners.append(connections)

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "millstream_authentication_failures_total", "Clients that failed to authenticate.", self._attempts.total
        )

    def _close_revoked(self) -> None:
        for connections in self._listeners:
            for connection in tuple(connections):
                if connection.session is not None:
                    connection.session.end_if_revoked()
