"""Authenticate (key 32060), version 0: authenticates a caller of a gateway, and returns an assertion about it.

    {"scheme": "basic", "host": "10.0.0.7", "user": "alice", "secret": "…", "session_s": 0}
    answer: {"error": 0, "message": null, "principal": "User:alice", "identity": "…", "assertion": "…", "expires_ms": 0,
    "pause_ms": 0, "session": "", "session_expires_ms": 0}

`scheme` is `basic` (a user and a password), `bearer` (a token), `session` (what an earlier answer has as `session`, if
`session_s` asked for one), or empty for a caller that showed nothing, which is anonymous unless HTTP requires
authentication. A session cannot open another one. With the assertion, the gateway opens connections on which it has the
caller's rights at every node; `broker/security/assertion.py` describes it. A failure is SASL_AUTHENTICATION_FAILED, and
`pause_ms` says how long the gateway has to hold its answer back: longer with each failure of the address or the user.

Only nodes may send this request, since the sender names the address that access rules are evaluated with.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is not part of Kafka.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from millstream.broker.kafka.api import Need, PrivateApi, error_code
from millstream.broker.security.audit import HTTP
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.credential import is_api_token, split_token
from millstream.core.errors import AuthenticationFailed, InvalidRequest
from millstream.protocol.private.security_messages import (
    AUTHENTICATE_KEY,
    BASIC,
    BEARER,
    SESSION,
    AuthenticateRequest,
    AuthenticateResponse,
)

if TYPE_CHECKING:
    from millstream.broker.security.gate import Knowledge
    from millstream.broker.security.sasl import Verified

_logger = logging.getLogger(__name__)

_SECRET_LENGTH_MAX: Final = 16 * 1024
_USER_LENGTH_MAX: Final = 512
SESSION_S_MAX: Final = 30 * 86_400


class Authenticate(PrivateApi[AuthenticateRequest, AuthenticateResponse]):
    """Authenticates callers of gateways."""

    key = AUTHENTICATE_KEY
    changes = None

    def __init__(self, knowledge: Knowledge | None, *, requires: bool) -> None:
        self._knowledge = knowledge
        self._requires = requires

    async def needs(self, request: AuthenticateRequest) -> Sequence[Need]:
        """CLUSTER_ACTION on the cluster, which nodes have."""
        return [(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: AuthenticateRequest) -> AuthenticateResponse:
        """Verify what the caller showed."""
        knowledge = self._knowledge
        if knowledge is None:
            raise InvalidRequest("this node does not authenticate its clients; start it with --auth required")
        try:
            verified = await self._verify(request, knowledge)
        except AuthenticationFailed as error:
            user = split_token(request.secret)[0] if is_api_token(request.secret) else request.user
            pause_s = knowledge.attempts.pause_s(request.host, user)
            if request.scheme:
                knowledge.state.audit.fail_sign_in(user, request.host, HTTP, request.scheme, str(error))
            _logger.warning(
                "authentication over HTTP failed",
                extra={"host": request.host, "user": user[:128], "reason": str(error)},
            )
            return AuthenticateResponse(error=int(error_code(error)), message=str(error), pause_ms=int(pause_s * 1000))
        session, ends = "", 0.0
        if request.session_s > 0 and request.scheme in (BASIC, BEARER):
            session, ends = knowledge.assertions.open_session(verified, min(request.session_s, SESSION_S_MAX))
        return AuthenticateResponse(
            session=session,
            session_expires_ms=int(ends * 1000),
            principal=verified.principal,
            identity=knowledge.assertions.identity_of(verified),
            assertion=knowledge.assertions.sign(verified, request.host),
            expires_ms=0 if verified.expires_at is None else int(verified.expires_at * 1000),
        )

    async def _verify(self, request: AuthenticateRequest, knowledge: Knowledge) -> Verified:
        if len(request.secret) > _SECRET_LENGTH_MAX or len(request.user) > _USER_LENGTH_MAX:
            raise AuthenticationFailed("the credential is too long")
        from millstream.broker.security.sasl import UNAUTHENTICATED, BearerToken, Password

        if request.scheme == BASIC and request.user and request.secret:
            return await knowledge.authenticator.verify(Password(user=request.user, secret=request.secret))
        if request.scheme == BEARER:
            return await knowledge.authenticator.verify(BearerToken(text=request.secret))
        if request.scheme == SESSION:
            return await knowledge.assertions.verify_session(request.secret.encode())
        if request.scheme or self._requires:
            raise AuthenticationFailed("authentication failed: the user or the password is wrong")
        return UNAUTHENTICATED
