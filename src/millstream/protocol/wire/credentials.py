"""How a client proves who it is: TLS, and SASL with a password or a token.

A connection that is opened without credentials uses those of the node that its process belongs to, if any:
`NODE_CREDENTIALS` holds them for every task of a node and its child processes. Programs and commands always pass their
own, so that they never act as a node.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from millstream.core.errors import AuthenticationFailed, InvalidRequest, NotFound
from millstream.core.ids import NodeId

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"
ASSERTION: Final = "MILLSTREAM-ASSERTION"
"""The mechanism with which a gateway acts for a caller: an assertion that a node has signed."""
_GS2_HEADER: Final = "n,,"
_NONCE_BYTES: Final = 24
_NODE_URI: Final = "millstream://"
NODE_USER: Final = "__node"
"""The user name of a node's own processes, which no listener for others accepts."""
_CHILD_VARIABLE: Final = "_MILLSTREAM_NODE_CREDENTIALS"

Exchange = Generator[bytes, bytes, None]
"""Yields what to send, and receives the broker's responses; ends when authentication is complete."""

CheckPeer = Callable[[ssl.SSLObject | None], None]


class OptionNames(NamedTuple):
    """The names of the options for TLS and for an identity, for errors that ask for them."""

    tls: str
    identity: str


CLI_SPELLED: Final = OptionNames("--tls-ca", "--user, --token-file")
SDK_SPELLED: Final = OptionNames("tls=", "user= and password=, or token=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The encryption and authentication of a client; by default plain text and anonymous."""

    tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None
    """How connections are encrypted; a function is called for each of them, since certificates are renewed."""
    user: str = ""
    password: str = field(default="", repr=False)
    token: Callable[[], str] | None = field(default=None, repr=False)
    """Returns a bearer token or an API token; called for each connection, since tokens are short-lived."""
    renew: Callable[[], Awaitable[None]] | None = field(default=None, repr=False)
    """Obtains another token when a broker has refused one; called at most once for each connection."""
    mechanism: str = ""
    check_peer: CheckPeer | None = field(default=None, repr=False)
    """Verifies the peer's certificate, where it is not checked against the host name."""

    spelled: OptionNames = CLI_SPELLED
    exported: Mapping[str, str] | None = field(default=None, repr=False)
    """The variables from which a child process builds the same credentials; None if it gets none."""

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS of a new connection; None for plain text."""
        return self.tls() if callable(self.tls) else self.tls

    def begin(self) -> tuple[str, Exchange] | None:
        """Return the SASL mechanism to use, and its dialogue; None without a user and a token."""
        if self.token is None and not self.user and not self.mechanism:
            return None
        # Imported on use, so that commands without credentials start faster.
        from millstream.core.credential import SCRAM_MECHANISMS, SHA_512, is_api_token, split_token

        token = "" if self.token is None else self.token()
        if is_api_token(token):
            return PLAIN, _send_password(*split_token(token))
        if self.token is not None:
            if self.mechanism == ASSERTION:
                return ASSERTION, _send_assertion(token)
            return OAUTHBEARER, _send_token(token)
        mechanism = self.mechanism or SHA_512
        if mechanism == PLAIN:
            return mechanism, _send_password(self.user, self.password)
        if mechanism in SCRAM_MECHANISMS:
            return mechanism, _prove_password(mechanism, self.user, self.password)
        raise InvalidRequest(f"this client does not know the SASL mechanism {mechanism!r}")


NO_CREDENTIALS: Final = Credentials()
NODE_CREDENTIALS: ContextVar[Credentials] = ContextVar("node_credentials", default=NO_CREDENTIALS)


def client_tls(
    ca: str | Path | None = None,
    *,
    ca_text: str | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> ssl.SSLContext:
    """Return TLS that trusts an authority, or those of the machine, and presents a certificate if one is given."""
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca), cadata=ca_text)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate is not None:
            context.load_cert_chain(str(certificate), None if key is None else str(key))
    except OSError as error:
        files = [str(path) for path in (ca, certificate, key) if path is not None]
        raise InvalidRequest(f"TLS cannot be set up: {tls_file_problem(error, files)}") from error
    return context


def tls_file_problem(error: OSError, files: Sequence[str]) -> str:
    """Return which TLS file cannot be used, and why; raise `NotFound` if one of them does not exist."""
    for file in files:
        if not Path(file).exists():
            raise NotFound(f"TLS cannot be set up: there is no file {file}") from error
    if not isinstance(error, ssl.SSLError):
        return f"{error.filename or ' or '.join(files)} cannot be read: {error.strerror}"
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"{files[-1]} is not the key of the certificate"
    reason = (error.reason or "").replace("_", " ").lower()
    return f"{' or '.join(files)} is not a valid PEM file of the expected kind ({reason})"


# -- nodes and their child processes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeName:
    cluster: str
    node_id: NodeId

    @property
    def uri(self) -> str:
        """The alternative name of the certificate."""
        return f"{_NODE_URI}{quote(self.cluster, safe='')}/node/{self.node_id}"

    @classmethod
    def of(cls, uris: Iterable[str]) -> NodeName | None:
        """Return the node that the alternative names of a certificate name; None for one of a client."""
        for uri in uris:
            if uri.startswith(_NODE_URI):
                cluster, slash, number = uri.removeprefix(_NODE_URI).partition("/node/")
                if slash and number.isdecimal() and len(number) <= 10:
                    return cls(cluster=unquote(cluster), node_id=NodeId(int(number)))
                raise AuthenticationFailed("the certificate names a node in a way that cannot be read")
        return None


def node_by_secret(secret: str) -> Credentials:
    """Return the credentials of a single node's own processes."""
    return Credentials(user=NODE_USER, password=secret, mechanism=PLAIN, exported={"secret": secret})


def node_by_certificate(certificate: str, key: str, ca: str, cluster: str) -> Credentials:
    """Return the credentials with which nodes of a cluster, and their processes, sign in to each other."""
    exported = {"certificate": certificate, "key": key, "ca": ca, "cluster": cluster}
    load, check_peer = node_tls(cluster, lambda: client_tls(ca, certificate=certificate, key=key))
    return Credentials(tls=load, check_peer=check_peer, exported=exported)


def node_tls(cluster: str, make: Callable[[], ssl.SSLContext]) -> tuple[Callable[[], ssl.SSLContext], CheckPeer]:
    """TLS to the nodes of a cluster, which their certificates identify, regardless of the address used."""

    def load() -> ssl.SSLContext:
        context = make()
        context.check_hostname = False
        return context

    def check_peer(connection: ssl.SSLObject | None) -> None:
        shown: Any = {} if connection is None else connection.getpeercert() or {}
        name = NodeName.of(value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
        if name is None or name.cluster != cluster:
            raise AuthenticationFailed(f"the peer's certificate does not identify a node of {cluster!r}")

    return load, check_peer


def on_behalf_of(assertion: Callable[[], str], renew: Callable[[], Awaitable[None]]) -> Credentials:
    """Return the credentials of a caller that the node has authenticated.

    The node's certificate shows that a node acts for the caller; the assertion replaces its rights by the caller's.
    """
    node = NODE_CREDENTIALS.get()
    return Credentials(tls=node.tls, check_peer=node.check_peer, token=assertion, renew=renew, mechanism=ASSERTION)


def child_environment() -> dict[str, str]:
    """Return the environment of a process that works for this node: with its credentials, without its settings."""
    from millstream.core.child_process import environment_without_settings
    from millstream.core.config import LIMIT_VARIABLES

    limits = {name: os.environ[name] for name in LIMIT_VARIABLES if name in os.environ}
    exported = NODE_CREDENTIALS.get().exported
    credentials = {} if exported is None else {_CHILD_VARIABLE: json.dumps(exported)}
    return environment_without_settings() | limits | credentials


def adopt_node_credentials() -> None:
    """Use the credentials of the node that has started this process."""
    text = os.environ.pop(_CHILD_VARIABLE, None)
    if text is None:
        return
    exported: dict[str, str] = json.loads(text)
    is_alone = "secret" in exported
    NODE_CREDENTIALS.set(node_by_secret(**exported) if is_alone else node_by_certificate(**exported))


# -- SASL exchanges -----------------------------------------------------------------------------------------------


def _send_token(token: str) -> Exchange:
    yield f"n,,\x01auth=Bearer {token}\x01\x01".encode()


def _send_assertion(assertion: str) -> Exchange:
    yield assertion.encode()


def _send_password(user: str, password: str) -> Exchange:
    yield f"\0{user}\0{password}".encode()


def _prove_password(mechanism: str, user: str, password: str) -> Exchange:
    import secrets

    from millstream.core.credential import ITERATIONS_MAX, ITERATIONS_MIN, derive, digest, hash_password, is_same, mac

    nonce = secrets.token_urlsafe(_NONCE_BYTES)
    name = user.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={nonce}"
    challenge = (yield (_GS2_HEADER + first).encode()).decode()
    fields = scram_fields(challenge)
    try:
        full_nonce, salt, iterations = fields["r"], base64.b64decode(fields["s"], validate=True), int(fields["i"])
    except (KeyError, ValueError):
        raise AuthenticationFailed("the broker's response to SCRAM cannot be read") from None
    if not full_nonce.startswith(nonce) or not ITERATIONS_MIN <= iterations <= 4 * ITERATIONS_MAX:
        raise AuthenticationFailed("the broker's response to SCRAM does not match this client's nonce")
    channel = base64.b64encode(_GS2_HEADER.encode()).decode()
    final = f"c={channel},r={full_nonce}"
    salted = hash_password(mechanism, password, salt, iterations)
    signed = f"{first},{challenge},{final}".encode()
    client_key = mac(mechanism, salted, b"Client Key")
    signature = mac(mechanism, digest(mechanism, client_key), signed)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
    verdict = scram_fields((yield f"{final},p={proof}".encode()).decode())
    expected = mac(mechanism, derive(user, mechanism, salted).server_key, signed)
    if not is_same(verdict.get("v", "").encode(), base64.b64encode(expected)):
        raise AuthenticationFailed(
            "the broker could not prove that it knows this user's password; it is not a genuine broker of the cluster"
        )


def scram_fields(message: str) -> dict[str, str]:
    """Return the `name=value` fields of a SCRAM message, each of which occurs once."""
    fields: dict[str, str] = {}
    for part in message.split(","):
        name, equals, value = part.partition("=")
        if len(name) != 1 or not equals or name in fields:
            raise AuthenticationFailed("the SCRAM message is malformed")
        fields[name] = value
    return fields
