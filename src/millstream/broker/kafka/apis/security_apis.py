"""Private requests about security: API tokens, secrets, and the callers of gateways."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi, RequestT, ResponseT, error_code
from millstream.broker.security.audit import HTTP, Change
from millstream.broker.security.changes import CREATE, DELETE, UPDATE, Users
from millstream.broker.security.rights import ANONYMOUS, Rights
from millstream.broker.security.secrets import StoredSecrets
from millstream.broker.security.state import NO_SNAPSHOT, SecurityState
from millstream.core.acl import CLUSTER_NAME, EVERYONE, NAME_CHARACTERS_MAX, Operation, ResourceType, check_principal
from millstream.core.credential import is_api_token, new_token, split_token
from millstream.core.errors import AuthenticationFailed, CatalogUnavailable, InvalidRequest, NotFound
from millstream.protocol.private.message import Response
from millstream.protocol.private.security_messages import (
    BASIC,
    BEARER,
    SESSION,
    TOKEN_LIFETIME_MS_MAX,
    AuthenticateRequest,
    AuthenticateResponse,
    CreateTokenRequest,
    CreateTokenResponse,
    ListedSecret,
    ListTokensRequest,
    ListTokensResponse,
    RevokeTokenRequest,
    SecretsRequest,
    SecretsResponse,
    TokenDescription,
)

if TYPE_CHECKING:
    from millstream.broker.security.gate import AuthenticationContext
    from millstream.broker.security.sasl import AuthenticatedClient

_logger = logging.getLogger(__name__)


SCOPE_RULES_MAX: Final = 1000


class _TokenApi(PrivateApi[RequestT, ResponseT]):
    def __init__(self, state: SecurityState) -> None:
        self._state = state

    async def needs(self, request: RequestT) -> Sequence[Need]:
        """Require no right for the caller's own tokens; those of others are omitted, or need ALTER on the cluster."""
        return ()


class TokenCreate(_TokenApi[CreateTokenRequest, CreateTokenResponse]):
    """Creates an API token.

    Without an owner, the token is the client's own; a token for another principal needs ALTER on the cluster. An empty
    scope means all rights of the owner. A token that is created with another one has no more rights and lasts no longer
    than that one. Only this response contains the token itself.
    """

    async def handle(self, request: CreateTokenRequest) -> CreateTokenResponse:
        """Refuse: without authentication, tokens have no owner and no use."""
        raise InvalidRequest("this node does not authenticate its clients; tokens need --auth required")

    async def handle_from(self, client: ClientInfo, request: CreateTokenRequest) -> CreateTokenResponse:
        rights = client.rights
        if rights is None:
            return await self.handle(request)
        owner = _token_owner(request, rights)
        scope = frozenset(rule.acl() for rule in request.scope)
        if len(scope) > SCOPE_RULES_MAX:
            raise InvalidRequest(f"the scope of a token has {SCOPE_RULES_MAX} rules at most")
        if not 0 < request.lifetime_ms <= TOKEN_LIFETIME_MS_MAX:
            raise InvalidRequest(
                f"the lifetime of a token must be from 1 ms to {TOKEN_LIFETIME_MS_MAX // 86_400_000} days"
            )
        now_ms = time.time_ns() // 1_000_000
        requested_ms = now_ms + request.lifetime_ms
        expires_ms = min([requested_ms, *(token.expires_ms for token in rights.tokens)])
        parent = rights.tokens[0].token_id if rights.tokens else ""
        stored_token, text = new_token(owner, scope=scope, parent=parent, created_ms=now_ms, expires_ms=expires_ms)
        await self._state.add_token(stored_token)
        return CreateTokenResponse(
            token_id=stored_token.token_id,
            token=text,
            owner=owner,
            expires_ms=expires_ms,
            is_shortened=expires_ms < requested_ms,
        )

    @staticmethod
    def changes(_request: CreateTokenRequest, response: CreateTokenResponse, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            data = {"owner": response.owner, "expires_ms": response.expires_ms}
            yield Change(activity=CREATE, kind="token", name=response.token_id, data=data)


def _token_owner(request: CreateTokenRequest, rights: Rights) -> str:
    owner = request.owner or rights.principal
    check_principal(owner)
    if not owner.startswith("User:") or owner in (ANONYMOUS, EVERYONE) or len(owner) > NAME_CHARACTERS_MAX:
        raise InvalidRequest(f"a token acts for one principal, such as User:alice, and not for {owner[:200]!r}")
    if owner != rights.principal:
        rights.require(Operation.ALTER, ResourceType.CLUSTER)
    return owner


class TokenList(_TokenApi[ListTokensRequest, ListTokensResponse]):
    """Lists API tokens.

    A client sees its own, and with DESCRIBE on the cluster those of everyone. Secrets are not kept, so they are not
    listed.
    """

    changes = None

    def redact(self, response: ListTokensResponse, rights: Rights) -> ListTokensResponse:
        if rights.cluster(Operation.DESCRIBE):
            return response
        own = [token for token in response.tokens if rights.has_token(self._state.tokens.get(token.token_id))]
        return ListTokensResponse(tokens=own)

    async def handle(self, request: ListTokensRequest) -> ListTokensResponse:
        now_ms = time.time_ns() // 1_000_000
        valid = [token for token in self._state.tokens.values() if token.expires_ms > now_ms]
        ordered = sorted(valid, key=lambda token: (token.owner, token.created_ms, token.token_id))
        return ListTokensResponse(tokens=[TokenDescription.of(token) for token in ordered])


class TokenRevoke(_TokenApi[RevokeTokenRequest, Response]):
    """Revokes an API token.

    Tokens that were created with it are revoked too, and their connections are closed. Revoking one's own token needs
    no permission; revoking that of another principal needs ALTER on the cluster. An unknown id, and one that the client
    may not know of, gets RESOURCE_NOT_FOUND.
    """

    async def handle(self, request: RevokeTokenRequest) -> Response:
        await self._state.delete_token(request.token_id)
        return Response()

    async def handle_from(self, client: ClientInfo, request: RevokeTokenRequest) -> Response:
        await self._state.find_token(request.token_id)
        token, rights = self._state.tokens.get(request.token_id), client.rights
        is_own = rights is None or rights.has_token(token)
        if token is None or not (is_own or (rights is not None and rights.cluster(Operation.DESCRIBE))):
            raise NotFound(f"there is no token {request.token_id[:64]!r}; see `millstream token list`")
        if not is_own and rights is not None:
            rights.require(Operation.ALTER, ResourceType.CLUSTER)
        return await self.handle(request)

    @staticmethod
    def changes(request: RevokeTokenRequest, response: Response, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            yield Change(activity=DELETE, kind="token", name=request.token_id)


class SecretList(PrivateApi[SecretsRequest, SecretsResponse]):
    """Lists the secrets in the catalog without their values, and seals them again.

    `newest` is the key with which the node that responds seals, empty if it has none; `problem` says why it cannot open
    a secret. With `reseal`, secrets that older keys sealed are sealed with `newest` first.
    """

    def __init__(self, secrets: StoredSecrets) -> None:
        self._secrets = secrets

    async def needs(self, request: SecretsRequest) -> Sequence[Need]:
        operation = Operation.ALTER if request.reseal else Operation.DESCRIBE
        return [(operation, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: SecretsRequest) -> SecretsResponse:
        resealed = await self._secrets.reseal() if request.reseal else 0
        listed = [
            ListedSecret(
                noun=secret.noun, name=secret.name, setting=secret.setting, key=secret.key_id, problem=secret.problem
            )
            for secret in await self._secrets.list()
        ]
        return SecretsResponse(newest=self._secrets.newest_key_id(), resealed=resealed, secrets=listed)

    @staticmethod
    def changes(request: SecretsRequest, response: SecretsResponse, _users: Users) -> Iterator[Change]:
        if request.reseal and response.error == 0:
            data = {"resealed": response.resealed, "key": response.newest}
            yield Change(activity=UPDATE, kind="secrets", name="(all)", data=data)


_SECRET_LENGTH_MAX: Final = 16 * 1024
_USER_LENGTH_MAX: Final = 512
SESSION_S_MAX: Final = 30 * 86_400


class Authenticate(PrivateApi[AuthenticateRequest, AuthenticateResponse]):
    """Authenticates a caller of a gateway, and returns an assertion about it.

    `scheme` is `basic` (a user and a password), `bearer` (a token), `session` (what an earlier response has as
    `session`, if `session_s` asked for one), or empty for a caller that showed nothing, which is anonymous unless HTTP
    requires authentication. A session cannot open another one. With the assertion, the gateway opens connections on
    which it has the caller's rights at every node; `broker/security/assertion.py` describes it. A failure is
    SASL_AUTHENTICATION_FAILED, and `pause_ms` says how long the gateway has to hold its response back: longer with each
    failure of the address or the user.

    Only nodes may send this request, since the sender names the address that access rules are evaluated with.
    """

    changes = None

    def __init__(self, authentication: AuthenticationContext | None, *, requires: bool) -> None:
        self._authentication = authentication
        self._requires = requires

    async def handle(self, request: AuthenticateRequest) -> AuthenticateResponse:
        authentication = self._authentication
        if authentication is None:
            raise InvalidRequest("this node does not authenticate its clients; start it with --auth required")
        if not authentication.state.is_loaded:
            raise CatalogUnavailable(NO_SNAPSHOT)
        try:
            verified = await self._verify(request, authentication)
        except AuthenticationFailed as error:
            user = split_token(request.secret)[0] if is_api_token(request.secret) else request.user
            pause_s = authentication.attempts.pause_s(request.host, user)
            if request.scheme:
                authentication.state.audit.fail_sign_in(user, request.host, HTTP, request.scheme, str(error))
            _logger.warning(
                "authentication over HTTP failed",
                extra={"host": request.host, "user": user[:128], "reason": str(error)},
            )
            return AuthenticateResponse(error=int(error_code(error)), message=str(error), pause_ms=int(pause_s * 1000))
        session, ends = "", 0.0
        if request.session_s > 0 and request.scheme in (BASIC, BEARER):
            session, ends = authentication.assertions.open_session(verified, min(request.session_s, SESSION_S_MAX))
        return AuthenticateResponse(
            session=session,
            session_expires_ms=int(ends * 1000),
            principal=verified.principal,
            identity=authentication.assertions.identity_of(verified),
            assertion=authentication.assertions.sign(verified, request.host),
            expires_ms=0 if verified.expires_at is None else int(verified.expires_at * 1000),
        )

    async def _verify(self, request: AuthenticateRequest, authentication: AuthenticationContext) -> AuthenticatedClient:
        if len(request.secret) > _SECRET_LENGTH_MAX or len(request.user) > _USER_LENGTH_MAX:
            raise AuthenticationFailed("the credential is too long")
        from millstream.broker.security.sasl import UNAUTHENTICATED, BearerToken, Password

        if request.scheme == BASIC and request.user and request.secret:
            return await authentication.authenticator.verify(Password(user=request.user, secret=request.secret))
        if request.scheme == BEARER:
            return await authentication.authenticator.verify(BearerToken(text=request.secret))
        if request.scheme == SESSION:
            return await authentication.assertions.verify_session(request.secret.encode())
        if request.scheme or self._requires:
            raise AuthenticationFailed("authentication failed: the user or the password is wrong")
        return UNAUTHENTICATED
