"""Private requests about API tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import CREATE, DELETE, Users
from millstream.broker.security.rights import ANONYMOUS, Rights
from millstream.broker.security.state import SecurityState
from millstream.core.acl import EVERYONE, NAME_CHARACTERS_MAX, Operation, ResourceType, check_principal
from millstream.core.credential import new_token
from millstream.core.errors import InvalidRequest, NotFound
from millstream.protocol.private.message import Nothing, Response
from millstream.protocol.private.security_messages import (
    CREATE_TOKEN_KEY,
    LIST_TOKENS_KEY,
    REVOKE_TOKEN_KEY,
    TOKEN_LASTS_MS_MAX,
    CreateTokenResponse,
    ListTokensResponse,
    NewToken,
    RevokeTokenRequest,
    TokenDescription,
)

SCOPE_RULES_MAX: Final = 1000


class TokenCreate(PrivateApi[NewToken, CreateTokenResponse]):
    """Creates an API token.

        {"owner": "", "lasts_ms": 2592000000,
        "scope": [{"operation": "read", "type": "topic", "name": "orders", "pattern": "literal"}]}
        answer: {"error": 0, "message": null, "token_id": "mst_…", "token": "mst_….…", "owner": "User:alice",
        "expires_ms": 1790000000000}

    Without an owner it is the client's own; one for another principal needs ALTER on the cluster. An empty scope is all
    that the owner may do. A token that is created with another one may do no more, and lasts no longer, than that one.
    The token itself is in this answer only.
    """

    key = CREATE_TOKEN_KEY

    def __init__(self, state: SecurityState) -> None:
        self._state = state

    async def needs(self, request: NewToken) -> Sequence[Need]:
        """Nothing for a token of one's own; for another's, `handle_from` requires ALTER on the cluster."""
        return ()

    async def handle(self, request: NewToken) -> CreateTokenResponse:
        """Refuse: without authentication, tokens have no owner and no use."""
        raise InvalidRequest("this node does not authenticate its clients; tokens need --auth required")

    async def handle_from(self, client: ClientInfo, request: NewToken) -> CreateTokenResponse:
        """Store what is kept of a new token, and show it."""
        rights = client.rights
        if rights is None:
            return await self.handle(request)
        owner = _owner(request, rights)
        scope = frozenset(rule.acl() for rule in request.scope)
        if len(scope) > SCOPE_RULES_MAX:
            raise InvalidRequest(f"the scope of a token has {SCOPE_RULES_MAX} rules at most")
        if not 0 < request.lasts_ms <= TOKEN_LASTS_MS_MAX:
            raise InvalidRequest(
                f"the lifetime of a token must be from 1 ms to {TOKEN_LASTS_MS_MAX // 86_400_000} days"
            )
        now_ms = time.time_ns() // 1_000_000
        expires_ms = min([now_ms + request.lasts_ms, *(token.expires_ms for token in rights.tokens)])
        parent = rights.tokens[0].token_id if rights.tokens else ""
        kept, text = new_token(owner, scope=scope, parent=parent, created_ms=now_ms, expires_ms=expires_ms)
        await self._state.add_token(kept)
        return CreateTokenResponse(token_id=kept.token_id, token=text, owner=owner, expires_ms=expires_ms)

    @staticmethod
    def changes(_request: NewToken, response: CreateTokenResponse, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            data = {"owner": response.owner, "expires_ms": response.expires_ms}
            yield Change(activity=CREATE, kind="token", name=response.token_id, data=data)


def _owner(request: NewToken, rights: Rights) -> str:
    owner = request.owner or rights.principal
    check_principal(owner)
    if not owner.startswith("User:") or owner in (ANONYMOUS, EVERYONE) or len(owner) > NAME_CHARACTERS_MAX:
        raise InvalidRequest(f"a token acts for one principal, such as User:alice, and not for {owner[:200]!r}")
    if owner != rights.principal:
        rights.require(Operation.ALTER, ResourceType.CLUSTER)
    return owner


class TokenList(PrivateApi[Nothing, ListTokensResponse]):
    """Lists API tokens.

        {}     answer: {"error": 0, "message": null, "tokens": [{"token_id": "mst_…", "owner": "User:alice",
        "scope": [], "parent": "", "created_ms": 1780000000000, "expires_ms": 1790000000000}]}

    A client sees its own, and with DESCRIBE on the cluster those of everyone. Secrets are not kept, so they are not
    listed.
    """

    key = LIST_TOKENS_KEY
    changes = None

    def __init__(self, state: SecurityState) -> None:
        self._state = state

    async def needs(self, request: Nothing) -> Sequence[Need]:
        """Nothing: what a client may not know of is left out."""
        return ()

    def redact(self, response: ListTokensResponse, rights: Rights) -> ListTokensResponse:
        """Leave out the tokens of others."""
        if rights.cluster(Operation.DESCRIBE):
            return response
        own = [one for one in response.tokens if rights.has_token(self._state.tokens.get(one.token_id))]
        return ListTokensResponse(tokens=own)

    async def handle(self, request: Nothing) -> ListTokensResponse:
        """Describe those that have not expired."""
        now_ms = time.time_ns() // 1_000_000
        valid = [token for token in self._state.tokens.values() if token.expires_ms > now_ms]
        ordered = sorted(valid, key=lambda token: (token.owner, token.created_ms, token.token_id))
        return ListTokensResponse(tokens=[TokenDescription.of(token) for token in ordered])


class TokenRevoke(PrivateApi[RevokeTokenRequest, Response]):
    """Revokes an API token.

        {"token_id": "mst_…"}     answer: {"error": 0, "message": null}

    Those that were created with it are revoked too, and their connections are closed. One's own needs nothing,
    another's ALTER on the cluster. An unknown id, and one that the client may not know of, is RESOURCE_NOT_FOUND.
    """

    key = REVOKE_TOKEN_KEY

    def __init__(self, state: SecurityState) -> None:
        self._state = state

    async def needs(self, request: RevokeTokenRequest) -> Sequence[Need]:
        """Nothing for a token of one's own; for another's, `handle_from` requires ALTER on the cluster."""
        return ()

    async def handle(self, request: RevokeTokenRequest) -> Response:
        """Remove it durably."""
        await self._state.delete_token(request.token_id)
        return Response()

    async def handle_from(self, client: ClientInfo, request: RevokeTokenRequest) -> Response:
        """Remove a token that the client may know of."""
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
