"""Verifies passwords, API tokens and bearer tokens: the server side of SASL, and the delay after failed attempts.

`Authenticator.verify` verifies the credentials of every endpoint. Passwords are checked outside of the event loop,
since that takes milliseconds by design, and results are cached. An unknown user goes through the same steps as a known
one, so that responses do not reveal which users exist.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import shake_256
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from millstream.broker.security.rights import ANONYMOUS
from millstream.broker.security.state import SecurityState
from millstream.core.credential import (
    ITERATIONS,
    NAME_CHARACTERS_MAX,
    SCRAM_MECHANISMS,
    ApiToken,
    ScramCredential,
    digest,
    is_api_token,
    is_same,
    mac,
    split_token,
    user_principal,
)
from millstream.core.crowding import network_of
from millstream.core.errors import AuthenticationFailed
from millstream.protocol.wire.credentials import OAUTHBEARER, PLAIN, scram_fields

if TYPE_CHECKING:
    from millstream.broker.security.oauth import TokenChecker

MECHANISMS: Final = (*SCRAM_MECHANISMS, PLAIN, OAUTHBEARER)
_CHECKS_AT_ONCE: Final = 2
_CHECKS_WAITING_MAX: Final = 256
_VERIFIED_MAX: Final = 1024
_VERIFIED_S: Final = 300.0
_NONCE_BYTES: Final = 24
_SALT_BYTES: Final = 24
_SALT_LETTERS: Final = b"0123456789abcdefghijklmnopqrstuvwxyz"
_FAILED: Final = "authentication failed: the user or the password is wrong"
_ATTEMPTS_MAX: Final = 10_000
_PAUSE_S_FIRST, _PAUSE_S_MAX = 0.1, 5.0
_FORGIVEN_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticatedClient:
    """An authenticated principal, its credential, and when that expires."""

    principal: str
    expires_at: float | None = None
    """Seconds since 1970."""
    credential: ScramCredential | None = None
    """The password; the session ends when it is changed or deleted."""
    user: str = ""
    tokens: tuple[ApiToken, ...] = ()
    """The API token that was shown, and those that it was created with; the session ends when one is revoked."""
    host: str = ""
    """The address of the client, if a gateway acts for it; empty for the other end of the connection."""


UNAUTHENTICATED: Final = AuthenticatedClient(principal=ANONYMOUS)
"""A client without credentials, where they are not required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Password:
    """A user with a password, or the id of an API token with its secret."""

    user: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerToken:
    """A token as HTTP and OAUTHBEARER carry it: a JWT, or an API token."""

    text: str = field(repr=False)


class Mechanism(Protocol):
    """An exchange of one mechanism."""

    user: str
    """The user that the client claims to be; empty until it has said so."""

    async def step(self, message: bytes) -> bytes | tuple[bytes, AuthenticatedClient]:
        """Respond to a message of the client; the last response is returned with the principal."""


class _Shape(NamedTuple):
    """The parts of a credential that are visible before authentication."""

    salt_bytes: int
    is_text: bool
    """Whether the salt consists of small letters and digits, as that of Kafka's tools."""
    iterations: int

    @classmethod
    def of(cls, credential: ScramCredential) -> _Shape:
        salt = credential.salt
        return cls(len(salt), is_text=not salt.strip(_SALT_LETTERS), iterations=credential.iterations)


class Passwords:
    """Checks passwords in threads, a few at a time, and caches correct ones."""

    def __init__(self, state: SecurityState) -> None:
        self.state = state
        self._key = secrets.token_bytes(32)
        self._executor = ThreadPoolExecutor(_CHECKS_AT_ONCE, thread_name_prefix="password")
        self._waiting = 0
        self._verified: OrderedDict[bytes, float] = OrderedDict()
        self._seen: Mapping[tuple[str, str], ScramCredential] | None = None
        self._shapes: dict[str, set[_Shape]] = {}

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def decoy(self, user: str, mechanism: str) -> ScramCredential:
        """Return a decoy credential for an unknown user, which no password matches.

        Its salt and its iterations are always the same for a name, on every node, and look like those of the users that
        exist. These differ by the tool that created a user.
        """
        name = f"{mechanism}:{user}".encode()
        key = self.state.cluster_key or self._key

        def weight(shape: _Shape) -> bytes:
            # A further shape changes only the names for which it has the largest weight.
            return hmac.digest(key, f"{tuple(shape)}".encode() + name, "sha256")

        shape = max(self._shapes_of(mechanism), key=weight)
        salt = shake_256(key + name).digest(shape.salt_bytes)
        if shape.is_text:
            salt = bytes(_SALT_LETTERS[character % len(_SALT_LETTERS)] for character in salt)
        size = len(digest(mechanism, b""))
        return ScramCredential(
            user=user,
            mechanism=mechanism,
            salt=salt,
            iterations=shape.iterations,
            stored_key=secrets.token_bytes(size),
            server_key=secrets.token_bytes(size),
        )

    def _shapes_of(self, mechanism: str) -> Collection[_Shape]:
        """Return how the credentials of a mechanism look."""
        if self._seen is not self.state.credentials:
            self._seen, self._shapes = self.state.credentials, {}
            for credential in self._seen.values():
                self._shapes.setdefault(credential.mechanism, set()).add(_Shape.of(credential))
        return self._shapes.get(mechanism) or (_Shape(_SALT_BYTES, is_text=False, iterations=ITERATIONS),)

    async def check(self, user: str, password: str) -> AuthenticatedClient:
        """Authenticate a user, or raise `AuthenticationFailed`."""
        credential = self.state.credential(user, SCRAM_MECHANISMS)
        mark = b""
        if credential is not None:
            mark = hmac.digest(self._key, credential.stored_key + password.encode(), "sha256")
            if self._verified.get(mark, 0.0) > time.monotonic():
                return AuthenticatedClient(principal=user_principal(user), credential=credential, user=user)
        checked = credential or self.decoy(user, SCRAM_MECHANISMS[0])
        if self._waiting >= _CHECKS_WAITING_MAX:
            raise AuthenticationFailed("too many passwords are being checked; try again")
        self._waiting += 1
        try:
            is_right = await asyncio.get_running_loop().run_in_executor(self._executor, checked.matches, password)
        finally:
            self._waiting -= 1
        if credential is None or not is_right:
            raise AuthenticationFailed(_FAILED)
        self._verified[mark] = time.monotonic() + _VERIFIED_S
        if len(self._verified) > _VERIFIED_MAX:
            self._verified.popitem(last=False)
        return AuthenticatedClient(principal=user_principal(user), credential=credential, user=user)


class _Plain:
    """PLAIN (RFC 4616): the password itself."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self.user = ""

    async def step(self, message: bytes) -> tuple[bytes, AuthenticatedClient]:
        """Check the only message of the exchange."""
        try:
            authorized, user, password = message.decode().split("\0")
        except ValueError:
            raise AuthenticationFailed("a message of PLAIN cannot be read") from None
        if not user or not password or authorized not in ("", user):
            raise AuthenticationFailed(_FAILED)
        self.user = user
        return b"", await self._authenticator.verify(Password(user=user, secret=password))


class _Scram:
    """SCRAM (RFC 5802) without channel binding, as Kafka has it."""

    def __init__(self, mechanism: str, passwords: Passwords) -> None:
        self._mechanism = mechanism
        self._passwords = passwords
        self.user = ""
        self._header = self._first = self._challenge = self._nonce = ""
        self._credential: ScramCredential | None = None
        self._is_known = False

    async def step(self, message: bytes) -> bytes | tuple[bytes, AuthenticatedClient]:
        """Respond to the first message with a challenge, and the second with a verdict."""
        try:
            text = message.decode()
        except UnicodeDecodeError:
            raise AuthenticationFailed("the SCRAM message is malformed") from None
        return self._challenge_response(text) if self._credential is None else self._check_proof(text, self._credential)

    def _challenge_response(self, message: str) -> bytes:
        flag, _, rest = message.partition(",")
        authorized, comma, first = rest.partition(",")
        if flag.startswith("p="):
            raise AuthenticationFailed("SCRAM with channel binding is not served")
        if flag not in ("n", "y") or not comma:
            raise AuthenticationFailed("the SCRAM message is malformed")
        # Extensions, which have longer names, follow the nonce.
        named = scram_fields(",".join(first.split(",", 2)[:2]))
        name, nonce = _decode_name(named.get("n", "")), named.get("r", "")
        if not name or not nonce or len(nonce) > 256 or authorized not in ("", f"a={named['n']}"):
            raise AuthenticationFailed("the SCRAM message is malformed")
        self.user = name
        known = self._passwords.state.credential(name, (self._mechanism,))
        self._is_known = known is not None
        self._credential = credential = known or self._passwords.decoy(name, self._mechanism)
        self._header, self._first = f"{flag},{authorized},", first
        self._nonce = nonce + base64.b64encode(os.urandom(_NONCE_BYTES)).decode()
        salt = base64.b64encode(credential.salt).decode()
        self._challenge = f"r={self._nonce},s={salt},i={credential.iterations}"
        return self._challenge.encode()

    def _check_proof(self, message: str, credential: ScramCredential) -> tuple[bytes, AuthenticatedClient]:
        without_proof, comma, encoded = message.rpartition(",p=")
        fields = scram_fields(without_proof)
        channel = base64.b64encode(self._header.encode()).decode()
        try:
            proof = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            proof = b""
        signed = f"{self._first},{self._challenge},{without_proof}".encode()
        signature = mac(self._mechanism, credential.stored_key, signed)
        is_same_dialogue = fields.get("c") == channel and fields.get("r") == self._nonce and bool(comma)
        if not is_same_dialogue or len(proof) != len(signature) or not self._is_known:
            raise AuthenticationFailed(_FAILED)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not is_same(digest(self._mechanism, client_key), credential.stored_key):
            raise AuthenticationFailed(_FAILED)
        verdict = base64.b64encode(mac(self._mechanism, credential.server_key, signed))
        who = AuthenticatedClient(principal=user_principal(self.user), credential=credential, user=self.user)
        return b"v=" + verdict, who


class _Bearer:
    """OAUTHBEARER (RFC 7628): a token."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self.user = ""

    async def step(self, message: bytes) -> tuple[bytes, AuthenticatedClient]:
        """Check the only message of the exchange."""
        try:
            header, *pairs = message.decode().split("\x01")
        except UnicodeDecodeError:
            raise AuthenticationFailed("a message of OAUTHBEARER cannot be read") from None
        values = dict(pair.partition("=")[::2] for pair in pairs if pair)
        scheme, _, token = values.get("auth", "").partition(" ")
        flag, _, authorized = header.partition(",")
        if flag not in ("n", "y") or scheme.lower() != "bearer" or not token:
            raise AuthenticationFailed("a message of OAUTHBEARER cannot be read")
        verified = await self._authenticator.verify(BearerToken(text=token.strip()))
        name = verified.principal.removeprefix(user_principal(""))
        if _decode_name(authorized.removesuffix(",").removeprefix("a=")) not in ("", name):
            raise AuthenticationFailed(
                f"the token belongs to {verified.principal}, and cannot be used for another principal"
            )
        return b"", verified


class Authenticator:
    """Verifies credentials of all mechanisms and endpoints."""

    def __init__(self, passwords: Passwords, tokens: TokenChecker | None) -> None:
        self._passwords = passwords
        self._tokens = tokens

    async def verify(self, credentials: Password | BearerToken) -> AuthenticatedClient:
        """Authenticate the holder of a password or token, or raise `AuthenticationFailed`."""
        if isinstance(credentials, Password):
            if is_api_token(credentials.user):
                return await self._verify_token(credentials.user, credentials.secret)
            return await self._passwords.check(credentials.user, credentials.secret)
        if is_api_token(credentials.text):
            return await self._verify_token(*split_token(credentials.text))
        if self._tokens is None:
            raise AuthenticationFailed("this node trusts no issuer of tokens (--oauth-jwks)")
        bearer = await self._tokens.check(credentials.text)
        return AuthenticatedClient(principal=bearer.principal, expires_at=bearer.expires_at)

    async def _verify_token(self, token_id: str, secret: str) -> AuthenticatedClient:
        chain = await self._passwords.state.find_token(token_id)
        if not chain or not chain[0].matches(secret):
            raise AuthenticationFailed("authentication failed: the token is wrong, expired or revoked")
        ends_ms = min(token.expires_ms for token in chain)
        return AuthenticatedClient(principal=chain[0].owner, expires_at=ends_ms / 1000, tokens=chain)

    def is_revoked(self, verified: AuthenticatedClient) -> bool:
        """Whether a password or token is no longer valid."""
        state, proved = self._passwords.state, verified.credential
        if verified.tokens and state.token_chain(verified.tokens[0].token_id) != verified.tokens:
            return True
        return proved is not None and state.credentials.get((proved.user, proved.mechanism)) != proved

    def offered(self, *, is_plaintext: bool) -> Sequence[str]:
        """Return the mechanisms of a listener; those that send a secret are not offered in clear text."""
        if is_plaintext:
            return SCRAM_MECHANISMS
        return MECHANISMS if self._tokens is not None else (*SCRAM_MECHANISMS, PLAIN)

    def begin(self, mechanism: str) -> Mechanism:
        if mechanism == OAUTHBEARER:
            return _Bearer(self)
        if mechanism == PLAIN:
            return _Plain(self)
        return _Scram(mechanism, self._passwords)


class FailedAttempts:
    """Delays the responses to failures, longer after each failure of the same address or user."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.total = 0

    def pause_s(self, host: str, user: str) -> float:
        """Count a failure; return how many seconds to wait before responding; the user may be unknown."""
        self.total += 1
        now = time.monotonic()
        worst = 0
        # A client may claim any name: what is longer than a name can be is not kept.
        for key in (f"h{network_of(host)}", *([f"u{user[:NAME_CHARACTERS_MAX]}"] if user else ())):
            count, since = self._failures.pop(key, (0, now))
            count = count + 1 if now - since < _FORGIVEN_S else 1
            self._failures[key] = (count, now)
            worst = max(worst, count)
        while len(self._failures) > _ATTEMPTS_MAX:
            self._failures.popitem(last=False)
        return float(min(_PAUSE_S_FIRST * 2 ** min(worst - 1, 10), _PAUSE_S_MAX))


def _decode_name(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")
