"""Users, API tokens and access rules as the catalog declares them, held in memory as one immutable snapshot.

If the catalog is unavailable, the last snapshot applies. Before the first one, no user exists and nothing is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import Declarations, Holder
from millstream.broker.security.audit import AuditTrail
from millstream.broker.security.authorizer import AclSnapshot
from millstream.core.acl import Acl, AclFilter, check_principal
from millstream.core.credential import (
    SCRAM_MECHANISMS,
    ApiToken,
    DeclaredSecurity,
    Owner,
    ScramCredential,
    SecurityChange,
    is_token_id,
    user_principal,
)
from millstream.core.errors import CatalogUnavailable, InvalidRequest, InvalidSetting
from millstream.core.mirror import SightingChange
from millstream.core.tasks import finish

_logger = logging.getLogger(__name__)

ACLS_MAX: Final = 100_000
CREDENTIALS_MAX: Final = 100_000
TOKENS_MAX: Final = 100_000
TOKENS_PER_OWNER_MAX: Final = 10_000
SCOPE_RULES_PER_OWNER_MAX: Final = 10_000
"""The limit for all tokens of one owner: everyone may create tokens, and every node keeps them in memory."""
CHAIN_MAX: Final = 8
NO_SNAPSHOT: Final = "users and access rules are not known yet, since the catalog could not be read"
_LOGGED_MAX: Final = 20
_REFRESH_S_MIN: Final = 1.0
"""The minimum time between two reads of the catalog for unknown tokens, which another node may have created."""


def parse_super_users(text: str) -> frozenset[str]:
    """Parse `alice,bob` or `alice;User:CN=ops,O=x`; a plain name is a user with a password."""
    principals = set()
    # Names in certificates contain commas.
    separator = ";" if ";" in text or "=" in text else ","
    for part in filter(None, map(str.strip, text.split(separator))):
        principals.add(part if ":" in part else f"User:{part}")
    try:
        for principal in principals:
            check_principal(principal)
    except InvalidRequest as error:
        raise InvalidSetting(f"super-users: {error}") from error
    return frozenset(principals)


async def _nothing_owned() -> None:
    pass


class SecurityState(Holder):
    """Every user, token and access rule."""

    def __init__(self, declarations: Declarations, super_users: Iterable[str]) -> None:
        super().__init__(declarations)
        self._super_users = frozenset(super_users)
        self._credentials: dict[tuple[str, str], ScramCredential] = {}
        self._tokens: dict[str, ApiToken] = {}
        self.cluster_key = b""
        self.is_loaded = False
        """Whether the catalog was ever read; until then, not even the users are known."""
        self._refreshing = asyncio.Lock()
        self._refreshed_at = 0.0
        self._unknown_tokens: set[str] = set()
        """The ids to look up in the catalog next."""
        self.audit = AuditTrail()
        self.topic_name: Callable[[UUID], str | None] = lambda _topic_id: None
        """Finds the name of a topic by its id, for requests that know only that."""
        self.has_topic: Callable[[str], bool] = lambda _name: False
        self.load_owned: Callable[[], Awaitable[None]] = _nothing_owned
        """Reads again what users own; the catalog has marked what deleted ones owned."""
        self.snapshot = AclSnapshot(super_users=self._super_users)
        """The rules in force; a new object after each change."""

    async def load(self) -> None:
        async with self._changing:
            self._apply(await self._declarations.call(Catalog.security))

    @property
    def credentials(self) -> Mapping[tuple[str, str], ScramCredential]:
        """All credentials, by user and mechanism; a new object after each change."""
        return self._credentials

    def credential(self, user: str, mechanisms: Iterable[str]) -> ScramCredential | None:
        """Return the first credential that a user has among some mechanisms."""
        credentials = (self._credentials.get((user, mechanism)) for mechanism in mechanisms)
        return next((credential for credential in credentials if credential is not None), None)

    @property
    def tokens(self) -> Mapping[str, ApiToken]:
        """Every API token, by id; some have expired."""
        return self._tokens

    def token_chain(self, token_id: str) -> tuple[ApiToken, ...]:
        """Return a token, the one that it was created with, and so on; empty unless all of them are valid."""
        chain: list[ApiToken] = []
        now_ms = time.time() * 1000
        while token_id:
            token = self._tokens.get(token_id)
            if token is None or token.expires_ms <= now_ms or len(chain) == CHAIN_MAX:
                return ()
            chain.append(token)
            token_id = token.parent
        return tuple(chain)

    async def find_token(self, token_id: str) -> tuple[ApiToken, ...]:
        """Return the chain of a token; one that is unknown here is looked up in the catalog, at a bounded rate."""
        if token_id not in self._tokens and is_token_id(token_id):
            asked_at = time.monotonic()
            self._unknown_tokens.add(token_id)
            async with self._refreshing:
                if self._refreshed_at < asked_at:
                    await asyncio.sleep(self._refreshed_at + _REFRESH_S_MIN - asked_at)
                    self._refreshed_at = time.monotonic()
                    unknown, self._unknown_tokens = self._unknown_tokens, set()
                    try:
                        if await self._declarations.call(Catalog.has_token, sorted(unknown)):
                            await self.load()
                    except CatalogUnavailable as error:
                        _logger.debug("an unknown token cannot be looked up", exc_info=error)
        return self.token_chain(token_id)

    def owner(self, principal: str) -> Owner:
        return Owner(principal=principal, has_password=self._has_password(principal))

    def is_gone(self, owner: Owner) -> bool:
        """Whether an owner was a user that has been deleted."""
        return owner.has_password and not self._has_password(owner.principal)

    def _has_password(self, principal: str) -> bool:
        user = principal.removeprefix(user_principal(""))
        return principal == user_principal(user) and self.credential(user, SCRAM_MECHANISMS) is not None

    async def change_users(self, put: Iterable[ScramCredential] = (), delete: Iterable[tuple[str, str]] = ()) -> None:
        change = SecurityChange(put_credentials=tuple(put), delete_credentials=tuple(delete))
        if len(self._credentials) + len(change.put_credentials) > CREDENTIALS_MAX:
            raise InvalidRequest(f"there are {CREDENTIALS_MAX} credentials at most; delete some first")
        if change.put_credentials or change.delete_credentials:
            await self._change(change)

    async def add_token(self, token: ApiToken) -> None:
        """Store a token, durably, and remove those that have expired."""
        chain = self.token_chain(token.parent)
        if len(chain) >= CHAIN_MAX - 1:
            raise InvalidRequest(
                f"this token is the {len(chain)}th of a chain, each created with the one before; use an earlier one"
            )
        unexpired = [other for other in self._tokens.values() if other.expires_ms > token.created_ms]
        if (
            len(unexpired) >= TOKENS_MAX
            or sum(other.owner == token.owner for other in unexpired) >= TOKENS_PER_OWNER_MAX
        ):
            raise InvalidRequest(
                f"an owner has {TOKENS_PER_OWNER_MAX} tokens at most, and a cluster {TOKENS_MAX}; revoke some first"
            )
        rules = sum(len(other.scope) for other in unexpired if other.owner == token.owner) + len(token.scope)
        if (
            rules > SCOPE_RULES_PER_OWNER_MAX
            or sum(len(other.scope) for other in unexpired) + len(token.scope) > ACLS_MAX
        ):
            raise InvalidRequest(
                f"the scopes of an owner's tokens have {SCOPE_RULES_PER_OWNER_MAX} rules together at most, and those "
                f"of a cluster {ACLS_MAX}; revoke some first"
            )
        expired = self._tokens.keys() - {other.token_id for other in unexpired}
        await self._change(SecurityChange(put_tokens=(token,), delete_tokens=frozenset(expired)))

    async def delete_token(self, token_id: str) -> None:
        """Remove a token and those that were created with it, durably."""
        deleted_ids = {token_id}
        for _ in range(CHAIN_MAX):
            deleted_ids |= {token.token_id for token in self._tokens.values() if token.parent in deleted_ids}
        await self._change(SecurityChange(delete_tokens=frozenset(deleted_ids)))

    async def add_acls(self, acls: Iterable[Acl]) -> None:
        """Add rules durably; existing ones stay."""
        added = frozenset(acls) - self.snapshot.acls
        if len(self.snapshot.acls) + len(added) > ACLS_MAX:
            raise InvalidRequest(f"there are {ACLS_MAX} access rules at most; remove some first")
        if added:
            await self._change(SecurityChange(add_acls=added))

    async def delete_acls(self, selected: AclFilter) -> frozenset[Acl]:
        """Remove the rules that a filter selects durably; return them."""
        selected_acls = frozenset(acl for acl in self.snapshot.acls if selected.matches(acl))
        if selected_acls:
            await self._change(SecurityChange(delete_acls=selected_acls))
        return selected_acls

    async def follow(self, rules: Iterable[Acl], to_delete: Iterable[Acl], sightings: SightingChange) -> None:
        """Add and delete rules as at the source of a mirror, in one transaction with its sightings."""
        here = self.snapshot.acls
        added, removed = frozenset(rules) - here, frozenset(to_delete) & here
        if len(here) + len(added) > ACLS_MAX:
            raise InvalidRequest(f"there are {ACLS_MAX} access rules at most; the source of a mirror has more")
        if added or removed:
            await self._change(SecurityChange(add_acls=added, delete_acls=removed), sightings)
        elif sightings:
            await self._declarations.call(Catalog.store_sightings, sightings)

    async def _change(self, change: SecurityChange, sightings: SightingChange | None = None) -> None:
        # A change that the catalog has stored must apply here too, even if the client has disconnected.
        await finish(self._store(change, sightings))

    async def _store(self, change: SecurityChange, sightings: SightingChange | None) -> None:
        async with self._changing:
            await self._declarations.change(Catalog.change_security, change, sightings)
            self._apply(await self._declarations.call(Catalog.security))
        if change.delete_credentials:
            await self.load_owned()
        changed = {
            "users": sorted({credential.user for credential in change.put_credentials}),
            "users_removed": sorted({user for user, _ in change.delete_credentials}),
            "tokens_created": sorted(f"{token.token_id} of {token.owner}" for token in change.put_tokens),
            "tokens_removed": sorted(change.delete_tokens)[:_LOGGED_MAX],
            "acls_added": sorted(map(str, change.add_acls)),
            "acls_removed": sorted(map(str, change.delete_acls)),
        }
        _logger.info(
            "users, tokens or access rules changed", extra={name: named for name, named in changed.items() if named}
        )

    def _apply(self, declared: DeclaredSecurity) -> None:
        self._credentials = {(credential.user, credential.mechanism): credential for credential in declared.credentials}
        self.cluster_key = declared.cluster_key
        self.is_loaded = True
        self._tokens = {token.token_id: token for token in declared.tokens}
        if declared.acls != self.snapshot.acls:
            # A new object makes every connection authorize again, so it is kept when only tokens change.
            self.snapshot = AclSnapshot(declared.acls, self._super_users)
        self._notify()
