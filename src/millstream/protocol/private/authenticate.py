"""The private request by which a gateway has its node authenticate a caller."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.protocol.private.message import Response

AUTHENTICATE_KEY: Final = 32060

BASIC: Final = "basic"
BEARER: Final = "bearer"
SESSION: Final = "session"
NOTHING: Final = ""


class AuthenticateRequest(msgspec.Struct, frozen=True):
    """What a caller showed, and where it is."""

    scheme: str
    """`basic` with a user and a password, `bearer` with a token, `session` with a session that a node of the cluster
    has opened, or empty for a caller that showed nothing."""
    host: str
    user: str = ""
    secret: str = ""
    session_s: int = 0
    """How long a session to open lasts at most; 0 opens none."""

    def __repr__(self) -> str:
        return f"AuthenticateRequest(scheme={self.scheme!r}, host={self.host!r}, user={self.user!r})"


class AuthenticateResponse(Response, frozen=True, kw_only=True):
    """Who the caller is; on failure `pause_ms` says how long to hold the answer back."""

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
