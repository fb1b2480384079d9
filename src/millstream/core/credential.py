"""Passwords as SCRAM stores them (RFC 5802), and API tokens: verifiers, never the secrets themselves."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from millstream.core.acl import Acl
from millstream.core.errors import InvalidRequest

SHA_256: Final = "SCRAM-SHA-256"
SHA_512: Final = "SCRAM-SHA-512"
SCRAM_MECHANISMS: Final = (SHA_256, SHA_512)
ITERATIONS: Final = 8192
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16384
"""Kafka's bounds."""
PASSWORD_CHARACTERS_MIN: Final = 8
NAME_CHARACTERS_MAX: Final = 128
_SALT_BYTES: Final = 24
TOKEN_PREFIX: Final = "mst_"
"""The prefix of API tokens; no user's name begins with it."""
_TOKEN_ID: Final = re.compile(TOKEN_PREFIX + "[0-9a-f]{16}")
_TOKEN_ID_BYTES: Final = 8
_TOKEN_SECRET_BYTES: Final = 32
_HASHES: Final = {SHA_256: "sha256", SHA_512: "sha512"}
_KEY_BYTES: Final = {SHA_256: 32, SHA_512: 64}
_PUNCTUATION: Final = "_.@+-"
"""No colon, comma or equals sign: names of certificates and of tokens have those, so none of them is a user's name."""
_CATEGORIES: Final = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd"})
"""Letters, their marks, and digits."""
_INVISIBLE: Final = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Letters and marks that are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScramCredential:
    """The stored verifier of one user's password for one mechanism."""

    user: str
    mechanism: str
    salt: bytes = field(repr=False)
    iterations: int
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    def check(self) -> None:
        """Raise `InvalidRequest` unless the credential can be used."""
        check_user_name(self.user)
        if self.mechanism not in SCRAM_MECHANISMS:
            raise InvalidRequest(f"{self.mechanism!r} is not one of {', '.join(SCRAM_MECHANISMS)}")
        if not ITERATIONS_MIN <= self.iterations <= ITERATIONS_MAX:
            raise InvalidRequest(f"a password is hashed {ITERATIONS_MIN} to {ITERATIONS_MAX} times")
        if not 1 <= len(self.salt) <= 128:
            raise InvalidRequest("a salt has 1 to 128 bytes")
        if len(self.stored_key) != _KEY_BYTES[self.mechanism] or len(self.server_key) != len(self.stored_key):
            raise InvalidRequest(f"the keys of {self.mechanism} have {_KEY_BYTES[self.mechanism]} bytes")

    def matches(self, password: str) -> bool:
        """Whether this is the password. Takes milliseconds, on purpose."""
        return is_same(self.stored_key, derive(self.user, self.mechanism, salted(self, password)).stored_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The principal that last changed a pipeline or an endpoint, with whose rights it acts."""

    principal: str = ""
    """Empty if it was changed while clients were not authenticated."""
    has_password: bool = False
    """Whether the owner was a user with a password; its rights then end when that user is deleted."""


NO_OWNER: Final = Owner()
DELETED_OWNER: Final = " (deleted)"
"""Appended to an owner when the user is deleted, so that another user of the same name does not own what it owned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """The stored form of an API token: a secret that acts for its owner, within a scope, until it expires."""

    token_id: str
    owner: str
    """The principal it acts for."""
    digest: bytes = field(repr=False)
    scope: frozenset[Acl] = frozenset()
    """The subset of its owner's rights; empty for all of them. The rules allow, and name no principal."""
    parent: str = ""
    """The token with which it was created, whose scope applies too; empty if it was created without one."""
    created_ms: int
    expires_ms: int

    def matches(self, secret: str) -> bool:
        """Whether this is the secret. A random one cannot be guessed, so one round of hashing is enough."""
        return is_same(self.digest, hashlib.sha256(secret.encode()).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityChange:
    """A change of users, tokens and rules that is stored as a whole or not at all."""

    put_credentials: tuple[ScramCredential, ...] = ()
    delete_credentials: tuple[tuple[str, str], ...] = ()
    """Users with mechanisms."""
    put_tokens: tuple[ApiToken, ...] = ()
    delete_tokens: frozenset[str] = frozenset()
    add_acls: frozenset[Acl] = frozenset()
    delete_acls: frozenset[Acl] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSecurity:
    """Every user, token and rule of a catalog."""

    cluster_key: bytes = b""
    """A random key that only nodes know, for the salts of users that do not exist and the digests in assertions."""
    credentials: tuple[ScramCredential, ...] = ()
    tokens: tuple[ApiToken, ...] = ()
    acls: frozenset[Acl] = frozenset()


def check_user_name(name: str) -> None:
    """Raise `InvalidRequest` unless a user may have this name."""
    is_reserved = name == "ANONYMOUS" or name.startswith(TOKEN_PREFIX)
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not _is_spelled_as_name(name) or is_reserved:
        raise InvalidRequest(
            f"the name of a user has up to {NAME_CHARACTERS_MAX} letters, digits and the characters "
            f"{' '.join(_PUNCTUATION)}, begins with a letter, a digit or _, is not ANONYMOUS and does not begin with "
            f"{TOKEN_PREFIX}; {name[:200]!a} cannot be one"
        )
    if not unicodedata.is_normalized("NFKC", name):
        canonical = unicodedata.normalize("NFKC", name)
        raise InvalidRequest(
            f"the name of a user is in Unicode normal form NFKC; {name!a} is not, write {canonical} ({canonical!a})"
        )


def _is_spelled_as_name(name: str) -> bool:
    is_spelled = all(character in _PUNCTUATION or unicodedata.category(character) in _CATEGORIES for character in name)
    return is_spelled and (name[0] == "_" or name[0].isalnum()) and _INVISIBLE.search(name) is None


def user_principal(name: str) -> str:
    return f"User:{name}"


def check_password(password: str) -> None:
    """Raise `InvalidRequest` for a password that is too short to be one."""
    if len(password) < PASSWORD_CHARACTERS_MIN:
        raise InvalidRequest(f"a password has at least {PASSWORD_CHARACTERS_MIN} characters")


def new_credentials(user: str, password: str) -> tuple[ScramCredential, ...]:
    check_user_name(user)
    check_password(password)
    return tuple(
        derive(
            user,
            mechanism,
            hash_password(mechanism, password, salt := secrets.token_bytes(_SALT_BYTES), ITERATIONS),
            salt=salt,
            iterations=ITERATIONS,
        )
        for mechanism in SCRAM_MECHANISMS
    )


def new_token(
    owner: str, *, scope: Iterable[Acl] = (), parent: str = "", created_ms: int, expires_ms: int
) -> tuple[ApiToken, str]:
    """Create an API token: its stored form, and its text, which is shown once."""
    token_id = TOKEN_PREFIX + secrets.token_hex(_TOKEN_ID_BYTES)
    secret = secrets.token_urlsafe(_TOKEN_SECRET_BYTES)
    token = ApiToken(
        token_id=token_id,
        owner=owner,
        digest=hashlib.sha256(secret.encode()).digest(),
        scope=frozenset(scope),
        parent=parent,
        created_ms=created_ms,
        expires_ms=expires_ms,
    )
    return token, f"{token_id}.{secret}"


def is_api_token(text: str) -> bool:
    """Whether a token, or a user's name, is that of an API token."""
    return text.startswith(TOKEN_PREFIX)


def is_token_id(text: str) -> bool:
    return _TOKEN_ID.fullmatch(text) is not None


def split_token(text: str) -> tuple[str, str]:
    """Return the id and the secret of an API token, which are its user and its password in SASL/PLAIN."""
    token_id, _, secret = text.partition(".")
    return token_id, secret


def hash_password(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    """SCRAM's `Hi`: the salted password."""
    return hashlib.pbkdf2_hmac(_HASHES[mechanism], password.encode(), salt, iterations)


def salted(credential: ScramCredential, password: str) -> bytes:
    """Return a password, salted with a credential's salt and iterations."""
    return hash_password(credential.mechanism, password, credential.salt, credential.iterations)


def derive(
    user: str, mechanism: str, salted_password: bytes, *, salt: bytes = b"", iterations: int = ITERATIONS
) -> ScramCredential:
    return ScramCredential(
        user=user,
        mechanism=mechanism,
        salt=salt,
        iterations=iterations,
        stored_key=digest(mechanism, mac(mechanism, salted_password, b"Client Key")),
        server_key=mac(mechanism, salted_password, b"Server Key"),
    )


def mac(mechanism: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, _HASHES[mechanism])


def digest(mechanism: str, message: bytes) -> bytes:
    return hashlib.new(_HASHES[mechanism], message).digest()


def is_same(one: bytes, other: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one, other)
