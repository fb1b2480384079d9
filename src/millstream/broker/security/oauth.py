"""Bearer tokens: JSON web tokens of a trusted issuer, verified with its published keys.

Only asymmetric algorithms are accepted, so a public key can never be used as a secret, and `alg: none` is rejected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final, TypeGuard

import httpx
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import Key, KeySet, import_key

from millstream.core.errors import AuthenticationFailed, InvalidSetting

_logger = logging.getLogger(__name__)

ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "Ed25519",
    "EdDSA",
)
LEEWAY_S: Final = 30
TIME_MAX_S: Final = 253_402_300_799
"""The end of the year 9999. A time in milliseconds is later, and is not taken for one that never comes."""
_REASONS: Final = {
    "bad_signature": "its signature is wrong",
    "exceeded_size": "its header or its signature is too long",
    "missing_algorithm": "it names no algorithm",
    "unsupported_algorithm": "its algorithm is not accepted",
}
TOKEN_BYTES_MAX: Final = 16 * 1024
KEYS_BYTES_MAX: Final = 1024 * 1024
REFRESH_S: Final = 300.0
REFRESH_S_MIN: Final = 10.0
"""How soon they are, when a token names a key that is not among them."""
FETCH_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """The principal of a token, and until when it is valid."""

    principal: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthSettings:
    jwks: str
    """A file or an https URL."""
    issuer: str
    audience: str
    principal: str = "oauth:{sub}"
    """The principal's name as a template of claims; the prefix distinguishes it from users with passwords."""

    def check(self) -> None:
        """Raise `InvalidSetting` unless tokens can be checked."""
        if not (self.issuer and self.audience):
            raise InvalidSetting("with --oauth-jwks, pass --oauth-issuer and --oauth-audience too")
        if self.jwks.startswith("http://"):
            raise InvalidSetting(
                "--oauth-jwks needs an https URL or a file: anyone who can replace the keys can issue tokens"
            )
        try:
            self.principal.format_map({"sub": "x"}) if "{sub}" in self.principal else None
        except (KeyError, ValueError, IndexError) as error:
            raise InvalidSetting(f"--oauth-principal cannot be read: {error}") from error

    def may_name(self, principal: str) -> bool:
        """Whether the template can yield this principal."""
        parts = Formatter().parse(f"User:{self.principal}")
        pattern = "".join(re.escape(text) + ("" if claim is None else ".+") for text, claim, _, _ in parts)
        return re.fullmatch(pattern, principal, re.DOTALL) is not None


class TokenChecker:
    """Verifies tokens with keys that may change at any time."""

    def __init__(self, settings: OAuthSettings) -> None:
        settings.check()
        self._settings = settings
        self._is_url = settings.jwks.startswith("https://")
        self._keys: KeySet | None = None
        self._stamp: tuple[int, int] | None = None
        self._problem = ""
        """The last error of reading the file; it is logged when it changes, not for each token."""
        self._fetched_at = 0.0
        self._fetching = asyncio.Lock()

    async def run(self) -> None:
        """Keep the keys of a URL fresh, forever; those of a file are checked on use."""
        while self._is_url:
            await self._fetch()
            await asyncio.sleep(REFRESH_S)

    async def check(self, token: str) -> Bearer:
        """Return the principal of a token, or raise `AuthenticationFailed`."""
        if len(token) > TOKEN_BYTES_MAX:
            raise AuthenticationFailed(f"the token has more than {TOKEN_BYTES_MAX} bytes")
        if not self._is_url:
            self._read_file()
        try:
            return self._verify(token)
        except _UnknownKey:
            if not self._is_url or time.monotonic() - self._fetched_at < REFRESH_S_MIN:
                raise
        await self._fetch()
        return self._verify(token)

    def _verify(self, token: str) -> Bearer:
        if self._keys is None:
            raise _UnknownKey("the keys that verify tokens are not known yet")
        try:
            checked = jwt.decode(token, self._keys, algorithms=list(ALGORITHMS))
        except InvalidKeyIdError:
            raise _UnknownKey("the token is signed by a key that is not known") from None
        except JoseError as error:
            if error.error == "decode_error":
                raise AuthenticationFailed("the token is neither an API token nor a JSON web token") from None
            reason = _REASONS.get(error.error, "its header or its signature cannot be used")
            raise AuthenticationFailed(f"the token is not valid: {reason}") from None
        except Exception as error:
            _logger.debug("a token could not be read", exc_info=error)
            raise AuthenticationFailed("the token cannot be read") from None
        return self._check_claims(checked.claims)

    def _check_claims(self, claims: dict[str, Any]) -> Bearer:
        now = time.time()
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        expires = claims.get("exp")
        if claims.get("iss") != self._settings.issuer:
            raise AuthenticationFailed("the token is of another issuer")
        if self._settings.audience not in audiences:
            raise AuthenticationFailed("the token is for another audience")
        if not _is_time(expires):
            raise AuthenticationFailed("the token has no expiry time in seconds (`exp`)")
        if expires + LEEWAY_S <= now:
            raise AuthenticationFailed("the token has expired")
        for claim in ("nbf", "iat"):
            if claim in claims and (not _is_time(claims[claim]) or claims[claim] - LEEWAY_S > now):
                raise AuthenticationFailed("the token is not valid yet")
        return Bearer(principal=f"User:{self._name(claims)}", expires_at=float(expires) + LEEWAY_S)

    def _name(self, claims: dict[str, Any]) -> str:
        texts = {name: value for name, value in claims.items() if isinstance(value, str) and value}
        try:
            name = self._settings.principal.format_map(texts)
        except (KeyError, ValueError, IndexError, AttributeError):
            raise AuthenticationFailed("the token lacks the claim that names its principal") from None
        if not name.isprintable() or len(name) > 512:
            raise AuthenticationFailed("the name in the token cannot be that of a principal")
        return name

    def _read_file(self) -> None:
        try:
            status = os.stat(self._settings.jwks)
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp == self._stamp:
                return
            with open(self._settings.jwks, "rb") as file:
                self._load_keys(file.read(KEYS_BYTES_MAX))
            self._stamp, self._problem = stamp, ""
        except (OSError, ValueError, JoseError) as error:
            before, self._problem = self._problem, str(error) or type(error).__name__
            if self._problem != before:
                _logger.warning(
                    "the keys that verify tokens cannot be read; those read before remain in use",
                    extra={"file": self._settings.jwks, "error": self._problem},
                )

    async def _fetch(self) -> None:
        async with self._fetching:
            if self._keys is not None and time.monotonic() - self._fetched_at < REFRESH_S_MIN:
                return
            self._fetched_at = time.monotonic()
            try:
                async with asyncio.timeout(FETCH_S_MAX):
                    self._load_keys(await self._download())
            except (httpx.HTTPError, TimeoutError, ValueError, JoseError) as error:
                _logger.warning(
                    "the keys that verify tokens cannot be fetched; those fetched before remain in use",
                    extra={"url": self._settings.jwks, "error": str(error) or type(error).__name__},
                )

    async def _download(self) -> bytes:
        document = b""
        async with (
            httpx.AsyncClient(timeout=FETCH_S_MAX, follow_redirects=False) as client,
            client.stream("GET", self._settings.jwks) as response,
        ):
            response.raise_for_status()
            async for piece in response.aiter_bytes():
                document += piece
                if len(document) > KEYS_BYTES_MAX:
                    raise ValueError(f"the set of keys has more than {KEYS_BYTES_MAX} bytes")
        return document

    def _load_keys(self, document: bytes) -> None:
        published = json.loads(document)
        listed = published.get("keys") if isinstance(published, dict) else None
        if not isinstance(listed, list):
            raise ValueError("a set of keys must be a JSON object with the list `keys`")
        keys = [key for key in map(_import_key, listed) if key is not None]
        if listed and not keys:
            raise ValueError("none of its keys can verify tokens")
        self._keys = KeySet(keys)


def _import_key(published: object) -> Key | None:
    """Return a key of a set, or None if it cannot be used, such as one with a curve that is not known.

    The others remain usable, so that those which were removed are no longer trusted.
    """
    if not isinstance(published, dict) or published.get("kty") == "oct":
        # A secret in the set would let its readers sign tokens.
        return None
    try:
        return import_key(published)
    except Exception as error:
        _logger.warning(
            "a key that verifies tokens cannot be used",
            extra={"kid": str(published.get("kid", ""))[:128], "error": str(error) or type(error).__name__},
        )
        return None


class _UnknownKey(AuthenticationFailed):
    """The token names a key that is not among those known."""


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= TIME_MAX_S
