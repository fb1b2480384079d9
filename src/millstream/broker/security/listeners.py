"""The addresses of a node: binds them, each with the authentication and TLS that its settings require.

Where clients authenticate, the nodes of a standalone machine have another listener on loopback, for each other and
their own processes, which know the machine's secret. The nodes of a cluster and their processes use the listener that
`node-listener` names, and identify each other by certificates.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from millstream.broker.cluster.membership import Membership, is_any_address
from millstream.broker.net.connection import ConnectionLimits, Service
from millstream.broker.net.listener import Listener, ListenerOptions, bind, listen
from millstream.broker.security.state import SecurityState
from millstream.core.config import AUTHENTICATION_REQUIRED, DEFAULT_LISTENER, Config, ListenerConfig, is_loopback
from millstream.core.errors import InvalidSetting
from millstream.core.ids import NodeId
from millstream.core.setting import parse_address
from millstream.core.tasks import Supervise
from millstream.protocol.wire.credentials import NO_CREDENTIALS, Credentials, node_by_certificate, node_by_secret

if TYPE_CHECKING:
    # Cryptography takes a while to import, and is not needed without authentication.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from millstream.broker.security.gate import AuthenticationContext, RevokedSessions
    from millstream.broker.security.sasl import Passwords
    from millstream.broker.security.tls import ReloadingTls

_logger = logging.getLogger(__name__)

INTERNAL: Final = "internal"
"""The listener for the processes of a node that is alone."""
_INTERNAL_ADDRESS: Final = "127.0.0.1:0"

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundListener:
    config: ListenerConfig
    socket: socket.socket
    tls: ReloadingTls | None

    @property
    def address(self) -> str:
        return address_of(self.socket)


class Listeners:
    """Every address at which a node is reached over the Kafka protocol."""

    def __init__(
        self,
        config: Config,
        *,
        secret: str | None = None,
        internal_address: str = "",
        assertion_seed: str = "",
        machine: Collection[NodeId] = (),
    ) -> None:
        """Prepare the listeners; `check` and `bind` follow.

        The nodes of a machine authenticate to each other with `secret`; a node that runs alone generates one. They sign
        assertions with a common key, which is derived from `assertion_seed`.
        """
        self._config = config
        self._bound: list[_BoundListener] = []
        self._secret = secret or secrets.token_urlsafe(32)
        self._internal_address = internal_address or _INTERNAL_ADDRESS
        self._assertion_seed = assertion_seed
        self._machine = frozenset({NodeId(config.node_id), *machine})
        self._passwords: Passwords | None = None
        self.authentication: AuthenticationContext | None = None
        """Identifies accepted clients; None without authentication."""

    def warn(self, state: SecurityState) -> None:
        """Log what is probably a mistake, though it can be meant."""
        config = self._config
        if not config.authorizes:
            if config.super_users:
                _logger.warning("--super-users has no effect without --auth required: everyone may do everything")
            if config.insecure and state.credentials:
                _logger.warning(
                    "--insecure without --auth required: there are users, but no client has to sign in, and everyone "
                    "who reaches this node can read, write and delete everything"
                )
        elif not (state.credentials or state.snapshot.acls or config.super_users):
            _logger.warning(
                "--auth required, but there is no user, no access rule and no super user: no client may do anything; "
                "stop the node, create a user with `millstream user create NAME --data DIR`, and start it with "
                "--super-users NAME"
            )
        for listener in config.all_listeners:
            if listener.requires_authentication and not (listener.is_loopback or listener.tls_cert):
                _logger.warning(
                    "%s requires authentication without TLS: others on the network can read and change every message, "
                    "and can guess passwords from the sign-ins that they record; pass --tls-cert and --tls-key",
                    listener.address,
                )

    def check(self) -> None:
        """Raise `InvalidSetting` for invalid listeners, and for those that are open to everyone."""
        config = self._config
        if config.authorizes:
            from millstream.broker.security.tls import PrincipalRules

            PrincipalRules(config.tls_principal_rules)
        if config.registry and not config.http:
            raise InvalidSetting("--registry is served by the HTTP gateway; pass its address with --http, too")
        for flag, address in (("--http", config.http), ("--registry", config.registry)):
            if address:
                self._check_http(flag, address)
        for listener in config.all_listeners:
            if not (listener.requires_authentication or listener.is_loopback or config.insecure):
                flag = "--kafka" if listener.name == DEFAULT_LISTENER else f"listener {listener.name!r}"
                raise InvalidSetting(_exposure_warning(flag, listener.address))
            if listener.advertise and is_any_address(parse_address(listener.advertise, name="advertise")[0]):
                raise InvalidSetting(
                    f"--advertise {listener.advertise} names no address that a client could connect to; pass a name or "
                    "an address of this machine"
                )
        if config.in_cluster:
            self._check_node_listener()

    def _check_http(self, flag: str, address: str) -> None:
        config = self._config
        if config.http_tls is not None:
            from millstream.broker.security.tls import ReloadingTls, TlsFiles

            certificate, key = config.http_tls
            ReloadingTls(TlsFiles(certificate=certificate, key=key))
        if is_loopback(address) or config.insecure:
            return
        if not config.http_authenticates:
            raise InvalidSetting(_exposure_warning(flag, address))
        if config.http_tls is None:
            raise InvalidSetting(
                f"{flag} {address} is reachable by other machines, and callers would send their passwords to it in "
                "plain text; pass --tls-cert and --tls-key (or --http-tls-cert and --http-tls-key), listen on a "
                "loopback address, or pass --insecure if the network is trusted"
            )

    def _check_node_listener(self) -> None:
        listener = self._node_listener
        if listener.requires_authentication and not listener.tls_client_ca:
            raise InvalidSetting(
                f"the nodes of a cluster authenticate by certificates: listener {listener.name!r} needs tls-cert, "
                "tls-key and tls-client-ca; `millstream certs init` creates some for trials"
            )
        if not listener.advertise and is_any_address(parse_address(listener.address, name="kafka")[0]):
            raise InvalidSetting(
                f"--kafka {listener.address} listens on every address, and the other nodes need one to connect to; "
                "pass it with --advertise HOST:PORT"
            )

    @cached_property
    def _node_listener(self) -> ListenerConfig:
        return next(listener for listener in self._config.all_listeners if listener.name == self._config.node_listener)

    def _admits_nodes(self, listener: ListenerConfig) -> bool:
        """Whether certificates may identify nodes on a listener; those of another authority could be any client's.

        While a cluster moves to another listener, nodes that were restarted already use that one.
        """
        if not self._config.in_cluster:
            return False
        trusted = self._node_listener.tls_client_ca
        return not trusted or listener.tls_client_ca == trusted

    @property
    def _has_internal(self) -> bool:
        return self._config.authorizes and not self._config.in_cluster

    @property
    def own_listener(self) -> str:
        """The listener by which this node's own processes connect."""
        return INTERNAL if self._has_internal else self._config.node_listener

    def bind(self) -> None:
        """Bind every address, so that they are known; clients are refused until `listen`."""
        listeners = list(self._config.all_listeners)
        if self._has_internal:
            listeners.append(
                ListenerConfig(name=INTERNAL, address=self._internal_address, auth=AUTHENTICATION_REQUIRED)
            )
        for config in listeners:
            tls = None
            if config.tls_cert:
                from millstream.broker.security.tls import ReloadingTls, TlsFiles

                files = TlsFiles(certificate=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca)
                tls = ReloadingTls(files)
            address = parse_address(config.address, name="kafka")
            # The node's own processes send their secret to the process that listens on the internal address.
            is_held = config.name == INTERNAL
            bound = bind(*address, flag="kafka", listener=_additional_name(config), listening=False, is_held=is_held)
            self._bound.append(_BoundListener(config=config, socket=bound, tls=tls))

    def listen(self) -> None:
        for bound in self._bound:
            listen(bound.socket, flag="kafka", listener=_additional_name(bound.config))

    def close(self) -> None:
        for bound in self._bound:
            bound.socket.close()
        if self._passwords is not None:
            self._passwords.close()

    @property
    def kafka_address(self) -> str:
        """The address for clients, with the actual port."""
        return self._bound[0].address

    @property
    def addresses(self) -> list[str]:
        """The addresses for the clients of each listener, with the actual ports."""
        return [bound.address for bound in self._bound if bound.config.name != INTERNAL]

    @property
    def internal_address(self) -> str:
        """The address for this node's own processes."""
        return next(bound.address for bound in self._bound if bound.config.name == self.own_listener)

    @property
    def node_address(self) -> Address:
        """The address for other nodes and this node's own processes."""
        return self.endpoints()[self.own_listener]

    def endpoints(self) -> Mapping[str, Address]:
        return {
            bound.config.name: parse_address(bound.config.advertise or bound.address, name="advertise")
            for bound in self._bound
        }

    @cached_property
    def node_credentials(self) -> Credentials:
        """Return the credentials of this node and its processes, for itself and other nodes."""
        if self._has_internal:
            return node_by_secret(self._secret)
        listener = self._node_listener
        if not (self._config.in_cluster and listener.tls_cert and listener.tls_client_ca):
            return NO_CREDENTIALS
        return node_by_certificate(listener.tls_cert, listener.tls_key, listener.tls_client_ca, self._config.cluster)

    @cached_property
    def _assertion_key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if self._assertion_seed:
            return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self._assertion_seed))
        return Ed25519PrivateKey.generate()

    @property
    def assertion_key(self) -> str:
        """The public key of this node's assertions, for its registration; empty without authentication."""
        if not self._config.authorizes:
            return ""
        from millstream.broker.security.assertion import public_text

        return public_text(self._assertion_key)

    async def start(
        self,
        listener: Listener,
        service: Service,
        limits: ConnectionLimits,
        state: SecurityState,
        membership: Membership,
        supervise: Supervise,
    ) -> RevokedSessions | None:
        """Accept connections on all listeners; return a function that closes those no longer allowed."""
        if not self._config.authorizes:
            for bound in self._bound:
                await listener.start(
                    bound.socket, ListenerOptions(service=service, limits=limits, name=bound.config.name, tls=bound.tls)
                )
            return None
        from millstream.broker.security.gate import RevokedSessions

        self.authentication = authentication = self._authentication(state, membership, supervise)
        for bound in self._bound:
            await listener.start(bound.socket, self._listener_options(bound, service, limits, authentication))
        revoked = RevokedSessions(state, authentication.attempts)
        revoked.watch(listener.connections)
        return revoked

    def _listener_options(
        self, bound: _BoundListener, service: Service, limits: ConnectionLimits, authentication: AuthenticationContext
    ) -> ListenerOptions:
        from millstream.broker.security.gate import DEADLINE_S, LIMITS, Gate

        requires = bound.config.requires_authentication
        gate = Gate(
            service,
            limits,
            authentication,
            requires=requires,
            is_plaintext=bound.tls is None and not (bound.config.is_loopback or self._config.insecure),
            is_internal=bound.config.name == INTERNAL,
            takes_assertions=bound.config.name == self.own_listener,
            admits_nodes=self._admits_nodes(bound.config),
        )
        return ListenerOptions(
            service=gate,
            limits=LIMITS,
            name=bound.config.name,
            tls=bound.tls,
            deadline_s=DEADLINE_S if requires else None,
            is_limited=not gate.is_internal,
        )

    def _authentication(
        self, state: SecurityState, membership: Membership, supervise: Supervise
    ) -> AuthenticationContext:
        from millstream.broker.security.assertion import Assertions
        from millstream.broker.security.gate import AuthenticationContext
        from millstream.broker.security.sasl import Authenticator, FailedAttempts, Passwords
        from millstream.broker.security.tls import PrincipalRules

        config = self._config
        assertions = Assertions(state, membership.cluster_id, NodeId(config.node_id), self._assertion_key)
        tokens = None
        if config.oauth_jwks:
            from millstream.broker.security.oauth import OAuthSettings, TokenChecker

            settings = OAuthSettings(
                jwks=config.oauth_jwks,
                issuer=config.oauth_issuer,
                audience=config.oauth_audience,
                principal=config.oauth_principal,
            )
            tokens = TokenChecker(settings)
            supervise("keys of tokens", tokens.run())
            assertions.is_named_by_token = settings.may_name
        self._passwords = passwords = Passwords(state)
        assertions.machine = self._machine
        assertions.public_key_of = lambda node: (
            "" if (known_node := membership.node(node)) is None else known_node.assertion_key
        )
        return AuthenticationContext(
            state=state,
            authenticator=Authenticator(passwords, tokens),
            attempts=FailedAttempts(),
            rules=PrincipalRules(config.tls_principal_rules),
            cluster=config.cluster,
            node_id=NodeId(config.node_id),
            node_secret=self._secret.encode(),
            assertions=assertions,
            session_s_max=config.session_max_ms / 1000,
            connections_max=config.connections_per_principal_max,
        )


def address_of(bound: socket.socket) -> str:
    """Return the address that a socket is bound to, as HOST:PORT."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _additional_name(listener: ListenerConfig) -> str:
    """Return the name of a listener, or nothing for that of `--kafka`."""
    return "" if listener.name == DEFAULT_LISTENER else listener.name


def _exposure_warning(flag: str, address: str) -> str:
    return (
        f"{flag} {address} is reachable by other machines, and anyone who reaches it can read, write and delete "
        "everything; require authentication (--auth required, with --tls-cert and --tls-key), listen on a loopback "
        "address, or pass --insecure if the network is trusted"
    )
