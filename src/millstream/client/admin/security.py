"""Users and access rules, over the requests that Kafka has for them, and tokens and secrets, over private ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millstream.client.admin.topics import node_configs
from millstream.core.acl import Acl, AclFilter
from millstream.core.credential import ITERATIONS, SCRAM_MECHANISMS, check_password, check_user_name, hash_password
from millstream.core.errors import NotFound
from millstream.protocol.messages.codec import build_request
from millstream.protocol.private.message import request_private
from millstream.protocol.private.security_messages import (
    TOKEN_LIFETIME_MS,
    CreateTokenRequest,
    CreateTokenResponse,
    ListTokensRequest,
    RevokeTokenRequest,
    ScopeRule,
    SecretsRequest,
    SecretsResponse,
    TokenDescription,
)
from millstream.protocol.wire.admin_requests import filter_fields
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

_SALT_BYTES = 24
_SUPER_USERS = "super-users"


async def list_users(client: Client) -> Mapping[str, Sequence[str]]:
    """Return every user that has a password, with the mechanisms it has one for."""
    response = await client.send(None, build_request("describe_user_scram_credentials", 0))
    if response.error_code:
        raise error_from_code(response.error_code, response.error_message, about="list users")
    return {
        result.user: [SCRAM_MECHANISMS[info.mechanism - 1] for info in result.credential_infos]
        for result in response.results
    }


async def put_user(client: Client, name: str, password: str) -> None:
    """Set a user's password, and create the user if it does not exist. The password itself stays in this process."""
    check_user_name(name)
    check_password(password)
    upsertions = []
    for number, mechanism in enumerate(SCRAM_MECHANISMS, start=1):
        salt = secrets.token_bytes(_SALT_BYTES)
        upsertions.append(
            {
                "name": name,
                "mechanism": number,
                "iterations": ITERATIONS,
                "salt": salt,
                "salted_password": hash_password(mechanism, password, salt, ITERATIONS),
            }
        )
    await _alter_users(client, upsertions=upsertions)


async def delete_user(client: Client, name: str) -> None:
    """Delete a user; its connections are closed."""
    mechanisms = (await list_users(client)).get(name)
    if not mechanisms:
        raise NotFound(f"there is no user {name!r}; see `millstream user list`")
    await _alter_users(
        client,
        deletions=[{"name": name, "mechanism": SCRAM_MECHANISMS.index(mechanism) + 1} for mechanism in mechanisms],
    )


async def _alter_users(client: Client, **changes: list[dict[str, Any]]) -> None:
    for result in (await client.send(None, build_request("alter_user_scram_credentials", 0, **changes))).results:
        if result.error_code:
            raise error_from_code(result.error_code, result.error_message, about=f"user {result.user!r}")


async def super_users_setting(client: Client) -> str | None:
    """Return the super users as a node's configuration names them; None if the client may not see that."""
    node = next(iter((await client.metadata([])).nodes))
    return (await node_configs(client, node, (_SUPER_USERS,))).get(_SUPER_USERS)


async def create_token(
    client: Client, scope: Iterable[Acl] = (), *, owner: str = "", lifetime_ms: int = TOKEN_LIFETIME_MS
) -> CreateTokenResponse:
    """Create an API token; this is the only time that its secret is shown."""
    request = CreateTokenRequest(owner=owner, lifetime_ms=lifetime_ms, scope=[ScopeRule.of(acl) for acl in scope])
    return await request_private(client, None, request)


async def list_tokens(client: Client) -> Sequence[TokenDescription]:
    return (await request_private(client, None, ListTokensRequest())).tokens


async def revoke_token(client: Client, token_id: str) -> None:
    """Revoke an API token and those that were created with it."""
    await request_private(client, None, RevokeTokenRequest(token_id=token_id))


async def add_acls(client: Client, acls: Iterable[Acl]) -> None:
    added = list(acls)
    creations = [
        {
            "resource_type": acl.resource_type,
            "resource_name": acl.resource_name,
            "resource_pattern_type": acl.pattern,
            "principal": acl.principal,
            "host": acl.host,
            "operation": acl.operation,
            "permission_type": acl.permission,
        }
        for acl in added
    ]
    response = await client.send(None, build_request("create_acls", 3, creations=creations))
    for acl, result in zip(added, response.results, strict=True):
        if result.error_code:
            raise error_from_code(result.error_code, result.error_message, about=str(acl))


async def remove_acls(client: Client, filters: Iterable[AclFilter]) -> int:
    """Remove the access rules that filters select; return how many there were."""
    removed = 0
    request = build_request("delete_acls", 3, filters=map(filter_fields, filters))
    for result in (await client.send(None, request)).filter_results:
        if result.error_code:
            raise error_from_code(result.error_code, result.error_message, about="remove access rules")
        removed += len(result.matching_acls)
    return removed


async def list_secrets(client: Client, *, reseal: bool = False) -> SecretsResponse:
    """Return the secrets in the catalog, without their values; with `reseal`, seal them with the newest key first."""
    return await request_private(client, None, SecretsRequest(reseal=reseal))
