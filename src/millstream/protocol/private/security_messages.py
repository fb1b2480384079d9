"""Private requests about API tokens, secrets in the catalog, and the callers of a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from millstream.core.acl import EVERYONE, Acl, Operation, PatternType, ResourceType, name_of, parse_name
from millstream.core.credential import ApiToken
from millstream.protocol.private.message import Request, Response

BASIC: Final = "basic"
BEARER: Final = "bearer"
SESSION: Final = "session"
NO_CREDENTIAL: Final = ""


class AuthenticateResponse(Response, frozen=True, kw_only=True):
    """The caller's identity; on failure `pause_ms` says how long to hold the response back."""

    principal: str = ""
    identity: str = ""
    """Differs between callers whose rights or credentials differ; equal callers may share connections."""
    assertion: str = ""
    expires_ms: int = 0
    """When the credential itself expires, on the wall clock; 0 if it does not."""
    pause_ms: int = 0
    session: str = ""
    """The session that was asked for, sealed: only nodes can read it."""
    session_expires_ms: int = 0


class AuthenticateRequest(Request[AuthenticateResponse], frozen=True):
    """The credentials and the address of a caller."""

    KEY: ClassVar = 32060
    scheme: str
    """`basic` with a user and a password, `bearer` with a token, `session` with a session that a node of the cluster
    has opened, or empty for a caller without credentials."""
    host: str
    user: str = ""
    secret: str = ""
    session_s: int = 0
    """How long a session to open lasts at most; 0 opens none."""

    def __repr__(self) -> str:
        return f"AuthenticateRequest(scheme={self.scheme!r}, host={self.host!r}, user={self.user!r})"


class SecretsResponse(Response, frozen=True, kw_only=True):
    """Every secret, the key that seals new ones, and how many were sealed again."""

    newest: str = ""
    resealed: int = 0
    secrets: Sequence[ListedSecret] = ()


class SecretsRequest(Request[SecretsResponse], frozen=True, kw_only=True):
    """Whether to seal everything with the node's newest key before it is listed."""

    KEY: ClassVar = 32090
    reseal: bool = False


class ListedSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret, without its value."""

    noun: str
    name: str
    setting: str
    key: str
    """The id of the key that sealed it."""
    problem: str = ""
    """The reason why the node cannot open it; empty if it can."""


TOKEN_LIFETIME_MS: Final = 30 * 86_400_000
TOKEN_LIFETIME_MS_MAX: Final = 366 * 86_400_000


class ScopeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    operation: str
    type: str
    name: str
    pattern: str = name_of(PatternType.LITERAL)

    @classmethod
    def of(cls, acl: Acl) -> ScopeRule:
        """Convert from an access rule, without its principal."""
        return cls(
            operation=name_of(acl.operation),
            type=name_of(acl.resource_type),
            name=acl.resource_name,
            pattern=name_of(acl.pattern),
        )

    def acl(self) -> Acl:
        """Convert to an access rule, or raise `InvalidRequest`."""
        return Acl(
            resource_type=parse_name(ResourceType, self.type),
            resource_name=self.name,
            pattern=parse_name(PatternType, self.pattern),
            principal=EVERYONE,
            operation=parse_name(Operation, self.operation),
        ).check()


class CreateTokenResponse(Response, frozen=True, kw_only=True):
    """A new token; its text is shown only once."""

    token_id: str = ""
    token: str = ""
    owner: str = ""
    expires_ms: int = 0
    is_shortened: bool = False
    """Whether it expires earlier than requested, with the token that it was created with."""


class CreateTokenRequest(Request[CreateTokenResponse], frozen=True, kw_only=True):
    KEY: ClassVar = 32080
    owner: str = ""
    """The principal that it acts for; empty for the client's own."""
    lifetime_ms: int = TOKEN_LIFETIME_MS
    scope: list[ScopeRule] = msgspec.field(default_factory=list)


class TokenDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    token_id: str
    owner: str
    scope: list[ScopeRule]
    parent: str
    created_ms: int
    expires_ms: int

    @classmethod
    def of(cls, token: ApiToken) -> TokenDescription:
        return cls(
            token_id=token.token_id,
            owner=token.owner,
            scope=[ScopeRule.of(acl) for acl in sorted(token.scope)],
            parent=token.parent,
            created_ms=token.created_ms,
            expires_ms=token.expires_ms,
        )


class ListTokensResponse(Response, frozen=True, kw_only=True):
    """The tokens that the client may see."""

    tokens: Sequence[TokenDescription] = ()


class ListTokensRequest(Request[ListTokensResponse], frozen=True):
    KEY: ClassVar = 32081


class RevokeTokenRequest(Request[Response], frozen=True, kw_only=True):
    KEY: ClassVar = 32082
    token_id: str
