"""Users, API tokens, access rules and quotas, and their changes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

from millstream.client.admin.clients import alter_quota, list_quotas
from millstream.client.admin.position import parse_age_ms
from millstream.client.admin.security import (
    add_acls,
    create_token,
    delete_user,
    list_tokens,
    list_users,
    put_user,
    remove_acls,
    revoke_token,
)
from millstream.core.acl import (
    EVERYONE,
    WILDCARD,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    check_names,
    name_of,
    parse_name,
    parse_rules,
)
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.core.quota import CONSUMER_BYTE_RATE, LIMITS, PRODUCER_BYTE_RATE, QuotaEntity
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.visit import Done, Page, PageRoute, Response, Visit, address, change, command, done
from millstream.protocol.wire.admin_requests import describe_acls

SHOWN: Final = 200
_TYPES: Final = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER, ResourceType.TRANSACTIONAL_ID)
_OPERATIONS: Final = tuple(operation for operation in Operation if operation is not Operation.ANY)


async def show(visit: Visit) -> Response:
    """Show users, tokens, access rules and quotas, as far as the person may see them."""
    client = visit.services.client
    problems: list[str] = []
    hidden: set[str] = set()

    async def seen(what: str, request: Awaitable[Any], empty: Any) -> Any:
        try:
            return await request
        except NotAuthorized:
            hidden.add(what)
        except MillstreamError as error:
            problems.append(str(error))
        return empty

    rules = sorted(await seen("rules", describe_acls(client, AclFilter()), []))
    described = [(rule, _words(rule)) for rule in rules]
    matching = [(rule, words) for rule, words in described if visit.search.lower() in " ".join(words).lower()]
    quotas: dict[QuotaEntity, dict[str, float]] = await seen("quotas", list_quotas(client), {})
    context = {
        "users": sorted((await seen("users", list_users(client), {})).items())[:SHOWN],
        "tokens": list(await seen("tokens", list_tokens(client), []))[:SHOWN],
        "rules": matching[:SHOWN],
        "rules_total": len(matching),
        "search": visit.search,
        "quotas": [
            (str(entity), " ".join(entity.words), limits.get(PRODUCER_BYTE_RATE), limits.get(CONSUMER_BYTE_RATE))
            for entity, limits in quotas.items()
        ][:SHOWN],
        "problems": sorted(set(problems)),
        "hidden": hidden,
        "types": [name_of(resource_type) for resource_type in _TYPES],
        "operations": [name_of(operation) for operation in _OPERATIONS],
        "may_alter": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
        "may_set_quotas": await visit.may_change(Operation.ALTER_CONFIGS, ResourceType.CLUSTER),
        "is_guarded": bool(visit.principal),
    }
    return Page("access.html", context)


def _words(rule: Acl) -> tuple[str, ...]:
    """Return a rule as the words of `acl remove`, beginning with its permission."""
    flags = ["--prefixed"] if rule.pattern is PatternType.PREFIXED else []
    if rule.host != WILDCARD:
        flags += ["--host", rule.host]
    kind = name_of(rule.resource_type)
    resource = kind if rule.resource_type is ResourceType.CLUSTER else f"{kind}:{rule.resource_name}"
    return (rule.principal, name_of(rule.operation), resource, *flags, "--only", name_of(rule.permission))


async def put(visit: Visit) -> Response:
    """Create a user, or give one another password."""
    name, password = visit.text("name", length_max=249), visit.form.get("password", "")
    client = visit.services.client
    is_known = name in await list_users(client)
    wants_new = visit.choice("what", ("create", "password")) == "create"
    if not name or not password:
        raise invalid("enter a name and a password")
    if is_known and wants_new:
        raise invalid(f"user {name!r} already exists; nothing was changed")
    if not is_known and not wants_new:
        raise invalid(f"there is no user {name!r}; nothing was changed")
    await put_user(client, name, password)
    text = f"User {name} {'is created' if wants_new else 'has a new password'}"
    return _done(text, "user", "create" if wants_new else "password", name, "--password-stdin")


async def delete(visit: Visit) -> Response:
    """Delete a user; its access rules stay."""
    name = visit.text("name", length_max=249)
    visit.confirm(name)
    await delete_user(visit.services.client, name)
    return _done(f"User {name} is deleted", "user", "delete", name)


async def make_token(visit: Visit) -> Response:
    """Create an API token, and show it, once."""
    owner, expires = visit.text("owner", length_max=249), visit.text("expires") or "30d"
    lifetime_ms = parse_age_ms(expires)
    if lifetime_ms is None:
        raise invalid(f"the lifetime of a token must be a duration such as 12h or 30d, not {expires!r}")
    scope: list[Acl] = []
    words: list[object] = ["token", "create", *(("--owner", owner) if owner else ()), "--expires", expires]
    if resource := visit.text("resource", length_max=1024):
        operations = visit.text("operations") or "read"
        is_prefixed = visit.text("prefixed") == "1"
        scope = parse_rules(Permission.ALLOW, EVERYONE, operations, resource, is_prefixed, WILDCARD)
        words += ["--allow", operations, resource, *(("--prefixed",) if is_prefixed else ())]
    made = await create_token(visit.services.client, scope, owner=owner, lifetime_ms=lifetime_ms)
    # Shown by this response alone: a notice would keep the secret in a cookie.
    return Page("token.html", {"made": made, "words": command(*words)})


async def revoke(visit: Visit) -> Response:
    token = visit.text("token")
    visit.confirm(token)
    await revoke_token(visit.services.client, token)
    return _done(f"Token {token} is revoked", "token", "revoke", token)


async def allow(visit: Visit) -> Response:
    verb = visit.choice("permission", ("allow", "deny"))
    principal, operations = visit.text("principal", length_max=1024), visit.text("operations") or "read"
    kind, name, host = visit.text("type") or "topic", visit.text("name", length_max=1024), visit.text("host")
    resource = kind if kind == "cluster" else f"{kind}:{name}"
    is_prefixed = visit.text("prefixed") == "1"
    rules = parse_rules(parse_name(Permission, verb), principal, operations, resource, is_prefixed, host or WILDCARD)
    check_names(rules)
    await add_acls(visit.services.client, rules)
    flags = (*(("--prefixed",) if is_prefixed else ()), *(("--host", host) if host else ()))
    return _done("The rule is added", "acl", verb, principal, operations, resource, *flags)


async def remove(visit: Visit) -> Response:
    text = visit.text("rule", length_max=8192)
    rule = next((acl for acl in await describe_acls(visit.services.client, AclFilter()) if str(acl) == text), None)
    if rule is None:
        raise invalid("there is no such rule any more; nothing was changed")
    visit.confirm(rule.principal)
    await remove_acls(visit.services.client, [AclFilter.of(rule, rule.permission)])
    return _done("The rule is removed", "acl", "remove", *_words(rule))


async def set_quota(visit: Visit) -> Response:
    """Limit a user or a client id, or remove its limits."""
    words = visit.text("entity", length_max=2048).split()
    entity = QuotaEntity.parse(words)
    if visit.text("remove") == "1":
        await alter_quota(visit.services.client, entity, dict.fromkeys(LIMITS))
        return _done(f"The quota of {entity} is removed", "quota", "remove", *words)
    rates = {PRODUCER_BYTE_RATE: visit.number("produce", 0), CONSUMER_BYTE_RATE: visit.number("consume", 0)}
    changes = {key: float(rate) for key, rate in rates.items() if rate}
    if not changes:
        raise invalid("enter how many bytes per second may be produced, consumed, or both")
    await alter_quota(visit.services.client, entity, changes)
    flags = [word for key, flag in _RATES.items() if key in changes for word in (flag, f"{changes[key]:.0f}")]
    return _done(f"{entity} is limited", "quota", "set", *words, *flags)


_RATES: Final = {PRODUCER_BYTE_RATE: "--produce", CONSUMER_BYTE_RATE: "--consume"}


def _done(text: str, *words: object) -> Done:
    return done(address("access"), text, *words)


ROUTES: Final = (
    PageRoute(path="/access", handle=show),
    change("/access/user", put),
    change("/access/delete-user", delete),
    change("/access/token", make_token),
    change("/access/revoke", revoke),
    change("/access/rule", allow),
    change("/access/remove-rule", remove),
    change("/access/quota", set_quota),
)
