"""Assertions: signed statements of a node about a caller's identity, with which a gateway acts for that caller on every
node.

Each node signs with a key that exists only in its memory, and is new with each start. The public part is in the node's
registration, so every node verifies the assertions of every other, and a gateway, which has neither, can make none. The
broker processes of a machine have one key, which lasts as long as their supervisor.

An assertion refers to the password or the API token that was shown, and says nothing about rights. The node that
receives it finds the scope of the token, or the password, in its copy of the catalog, so a change or deletion takes
effect at once, regardless of earlier signatures.

A session is an assertion for a user of a browser, stored in a cookie: it lasts for hours, is not bound to an address,
and ends when the node that signed it stops, since its key is lost.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from millstream.broker.security.rights import ANONYMOUS
from millstream.broker.security.sasl import AuthenticatedClient
from millstream.broker.security.state import SecurityState
from millstream.core.credential import user_principal
from millstream.core.errors import AuthenticationFailed
from millstream.core.ids import NodeId

ASSERTION_S: Final = 120.0
"""How long an assertion opens sessions; far longer than clocks of nodes differ."""
SESSION_S_MAX: Final = 900.0
"""How long a session that it opened lasts."""
ASSERTION_BYTES_MAX: Final = 4096
_SIGNATURE_BYTES: Final = 64
_PURPOSE: Final = b"millstream assertion 1\0"
_SESSION_PURPOSE: Final = b"millstream session 1\0"
"""Part of every signed text, so that a signature is not valid for any other purpose."""


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """The proven credential: a user's password, as stored for a mechanism, or an API token; and its keyed hash."""

    name: str
    """The user, or the id of the token."""
    mechanism: str
    """Empty for a token."""
    digest: bytes


class Assertion(msgspec.Struct, frozen=True, array_like=True):
    """A caller's identity, address and expiry, signed by one node of one cluster."""

    cluster_id: str
    node_id: int
    principal: str
    host: str
    expires_at: float
    credential_expires_at: float | None
    proof: Proof | None


_decode: Final = msgspec.msgpack.Decoder(Assertion).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class Assertions:
    """Signs assertions for one node, and verifies those of every node of its cluster."""

    def __init__(self, state: SecurityState, cluster_id: str, node_id: NodeId, key: Ed25519PrivateKey) -> None:
        self._state = state
        self._cluster_id = cluster_id
        self._node_id = node_id
        self._key = key
        self.machine: frozenset[NodeId] = frozenset({node_id})
        """The nodes that sign with the same key."""
        self.public_key_of: Callable[[NodeId], str] = lambda _node: ""
        """Finds the public key in the registration of another node; empty if there is none."""
        self.is_named_by_token: Callable[[str], bool] = lambda _principal: False
        """Whether a JWT, which no node stores, may name a principal."""

    def sign(self, verified: AuthenticatedClient, host: str) -> str:
        """Assert who a caller is, as text that is used once per connection."""
        return self._sign(_PURPOSE, verified, host, time.time() + ASSERTION_S)

    def open_session(self, verified: AuthenticatedClient, lifetime_s: float) -> tuple[str, float]:
        """Open a session; return it, and when it ends: no later than the token that was shown."""
        ends = [time.time() + lifetime_s, *(() if verified.expires_at is None else (verified.expires_at,))]
        return self._sign(_SESSION_PURPOSE, verified, "", min(ends)), min(ends)

    def _sign(self, purpose: bytes, verified: AuthenticatedClient, host: str, expires_at: float) -> str:
        asserted = _encode(
            Assertion(
                cluster_id=self._cluster_id,
                node_id=self._node_id,
                principal=verified.principal,
                host=host,
                expires_at=expires_at,
                credential_expires_at=verified.expires_at,
                proof=self._proof_of(verified),
            )
        )
        return base64.b64encode(self._key.sign(purpose + asserted) + asserted).decode()

    def identity_of(self, verified: AuthenticatedClient) -> str:
        """Distinguish callers whose rights or credentials differ."""
        proof = self._proof_of(verified)
        return verified.principal if proof is None else f"{verified.principal} {proof.digest.hex()}"

    async def verify(self, text: bytes) -> AuthenticatedClient:
        """Return the identity that an assertion proves, or raise `AuthenticationFailed`."""
        assertion = self._verify_signature(_PURPOSE, text)
        ends = [time.time() + SESSION_S_MAX]
        if assertion.credential_expires_at is not None:
            ends.append(assertion.credential_expires_at)
        return await self._verify_proof(
            assertion, AuthenticatedClient(principal=assertion.principal, expires_at=min(ends), host=assertion.host)
        )

    async def verify_session(self, text: bytes) -> AuthenticatedClient:
        """Return the identity of a session, or raise `AuthenticationFailed`."""
        assertion = self._verify_signature(_SESSION_PURPOSE, text)
        return await self._verify_proof(
            assertion, AuthenticatedClient(principal=assertion.principal, expires_at=assertion.expires_at)
        )

    def _verify_signature(self, purpose: bytes, text: bytes) -> Assertion:
        if len(text) > ASSERTION_BYTES_MAX:
            raise AuthenticationFailed(f"an assertion has at most {ASSERTION_BYTES_MAX} bytes")
        try:
            signed = base64.b64decode(text, validate=True)
            signature, asserted = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
            assertion = _decode(asserted)
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            raise AuthenticationFailed("the assertion cannot be read") from None
        if assertion.cluster_id != self._cluster_id:
            raise AuthenticationFailed("the assertion is of another cluster")
        try:
            self._public_key(NodeId(assertion.node_id)).verify(signature, purpose + asserted)
        except InvalidSignature:
            raise AuthenticationFailed("the assertion is not signed by the node that it names") from None
        if assertion.expires_at <= time.time():
            raise AuthenticationFailed("the assertion has expired")
        return assertion

    async def _verify_proof(self, assertion: Assertion, who: AuthenticatedClient) -> AuthenticatedClient:
        """Look up the current credential."""
        proof = assertion.proof
        if proof is None:
            has_token = assertion.credential_expires_at is not None and self.is_named_by_token(who.principal)
            if who.principal != ANONYMOUS and not has_token:
                raise AuthenticationFailed(f"the assertion does not say how {who.principal} was authenticated")
            return who
        if not proof.mechanism:
            tokens = await self._state.find_token(proof.name)
            if not tokens or tokens[0].owner != who.principal or self._digest_of(tokens[0].digest) != proof.digest:
                raise AuthenticationFailed("the token was revoked, or has expired")
            return replace(who, tokens=tokens)
        stored = self._state.credentials.get((proof.name, proof.mechanism))
        if user_principal(proof.name) != who.principal:
            raise AuthenticationFailed(f"the assertion is about {who.principal}, and proves another user's password")
        if stored is None or self._digest_of(stored.salt + stored.stored_key) != proof.digest:
            raise AuthenticationFailed("the user was deleted, or its password was changed")
        return replace(who, credential=stored, user=proof.name)

    def _proof_of(self, verified: AuthenticatedClient) -> Proof | None:
        if verified.tokens:
            return Proof(verified.tokens[0].token_id, "", self._digest_of(verified.tokens[0].digest))
        proved = verified.credential
        if proved is None:
            return None
        return Proof(proved.user, proved.mechanism, self._digest_of(proved.salt + proved.stored_key))

    def _digest_of(self, stored: bytes) -> bytes:
        """Return a digest that only nodes can compute: without their key, it would show whether a password is right."""
        return hmac.digest(self._state.cluster_key, _PURPOSE + stored, "sha256")

    def _public_key(self, node_id: NodeId) -> Ed25519PublicKey:
        if node_id in self.machine:
            return self._key.public_key()
        try:
            return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_key_of(node_id)))
        except ValueError:
            raise AuthenticationFailed(f"the key of node {node_id} is not known here") from None


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the public part of a key, as a registration carries it."""
    return key.public_key().public_bytes_raw().hex()
