"""`millstream acl`: allow, deny, list, remove and explain access rules, one by one or by roles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun
from millstream.cli.output import counted, print_json, print_line, print_list, print_result
from millstream.core.acl import (
    CLUSTER_NAME,
    ROLES,
    WILDCARD,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    check_names,
    check_principal,
    name_of,
    parse_name,
    parse_resource,
    parse_rules,
    role_operations,
)
from millstream.core.errors import ClusterNotAuthorized

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client

app = Noun(help="Allow, deny, list, remove and explain access rules.", no_args_is_help=True)


Principal = Annotated[
    str, typer.Argument(help="The principal: User:alice, or User:* for everyone.", show_default=False)
]
Operations = Annotated[
    str,
    typer.Argument(
        help="The operations, separated by commas: read, write, create, delete, alter, describe, describe_configs, "
        "alter_configs, cluster_action, idempotent_write, or all.",
        show_default=False,
    ),
]
Resource = Annotated[
    str,
    typer.Argument(
        metavar="TYPE:NAME",
        help="The resource: topic:orders, group:billing (subscriptions are groups), transactional_id:NAME, cluster. "
        "The name * stands for all.",
        show_default=False,
    ),
]
Prefixed = Annotated[bool, typer.Option("--prefixed", help="All resources whose names begin with NAME.")]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Only for clients at this address.")]


Resources = Annotated[
    list[str],
    typer.Argument(
        metavar="TYPE:NAME",
        help="The resources: topic:orders, group:billing (subscriptions are groups), transactional_id:NAME, cluster.",
        show_default=False,
    ),
]
Role = Annotated[str, typer.Argument(help=f"The role: {', '.join(ROLES)}.", show_default=False)]


@dataclass(frozen=True)
class RuleArguments:
    principal: Principal
    operations: Operations
    resource: Resource
    prefixed: Prefixed = False
    host: Host = WILDCARD

    def parse(self, permission: Permission = Permission.ALLOW) -> list[Acl]:
        return parse_rules(permission, self.principal, self.operations, self.resource, self.prefixed, self.host)


@dataclass(frozen=True)
class RoleArguments:
    principal: Principal
    role: Role
    resources: Resources
    prefixed: Prefixed = False
    host: Host = WILDCARD

    def rules(self) -> list[Acl]:
        rules: list[Acl] = []
        for resource in self.resources:
            operations = ",".join(map(name_of, role_operations(self.role, parse_resource(resource)[0])))
            rules += RuleArguments(self.principal, operations, resource, self.prefixed, self.host).parse()
        return rules


@app.command("allow")
def allow(rule: RuleArguments, common: Common = COMMON) -> None:
    """Allow a principal some operations on a resource."""
    _add(rule.parse(), common)


@app.command("deny")
def deny(rule: RuleArguments, common: Common = COMMON) -> None:
    """Deny a principal operations on a resource. Denials override all rules that allow."""
    _add(rule.parse(Permission.DENY), common)


@app.command("grant")
def grant(role: RoleArguments, common: Common = COMMON) -> None:
    """Add the rules of a role. Example: millstream acl grant User:alice worker topic:orders group:billing."""
    _add(role.rules(), common)


@app.command("revoke")
def revoke(role: RoleArguments, common: Common = COMMON) -> None:
    """Remove the rules of a role, however they were added."""
    _remove(role.rules(), common, permission=Permission.ALLOW)


@app.command("list")
def list_(
    principal: Annotated[
        str | None, typer.Option("--principal", metavar="PRINCIPAL", help="Only the rules for this principal.")
    ] = None,
    resource: Annotated[
        str | None,
        typer.Option("--resource", metavar="TYPE:NAME", help="Only the rules that cover this resource."),
    ] = None,
    common: Common = COMMON,
) -> None:
    """List access rules."""
    from millstream.protocol.wire.admin_requests import describe_acls

    selected = AclFilter(principal=principal)
    if resource is not None:
        kind, name = parse_resource(resource)
        selected = AclFilter(principal=principal, resource_type=kind, resource_name=name, pattern=PatternType.MATCH)
    rules = sorted(call_broker(common, lambda client: describe_acls(client, selected)))
    keys = ("permission", "principal", "operation", "type", "name", "pattern", "host")
    listed = [_document(acl) for acl in rules]
    rows = [[acl[key] for key in keys] for acl in listed]
    empty = "No rules; only super users may do anything."
    print_list({"acls": listed}, keys, rows, empty=empty, as_json=common.as_json)


@app.command("remove")
def remove(
    rule: RuleArguments,
    only: Annotated[
        str, typer.Option("--only", metavar="allow|deny", help="Remove only the rule that allows, or that denies.")
    ] = "any",
    common: Common = COMMON,
) -> None:
    """Remove the rules that allow or deny exactly this."""
    permissions = {"any": Permission.ANY, "allow": Permission.ALLOW, "deny": Permission.DENY}
    if only not in permissions:
        raise typer.BadParameter(f"--only takes allow or deny, not {only!r}")
    _remove(rule.parse(), common, permission=permissions[only])


@app.command("explain")
def explain(
    principal: Principal,
    operation: Annotated[str, typer.Argument(help="One operation.", show_default=False)],
    resource: Resource,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address of the client.")] = "127.0.0.1",
    common: Common = COMMON,
) -> None:
    """Show whether an operation is allowed, and which rule decides.

    The rules, and the rights of others, are shown to those who may DESCRIBE the cluster.
    """
    from millstream.broker.security.authorizer import AclSnapshot
    from millstream.broker.security.state import parse_super_users
    from millstream.client.admin.browse import own_rights
    from millstream.client.admin.security import super_users_setting
    from millstream.protocol.wire.admin_requests import describe_acls

    kind, name = parse_resource(resource)
    parsed_operation = parse_name(Operation, operation)
    check_principal(principal)

    sufficient = [(parsed_operation, kind, name)]
    if (parsed_operation, kind) == (Operation.CREATE, ResourceType.TOPIC):
        # It allows every topic, even if a rule denies the topic.
        sufficient.insert(0, (parsed_operation, ResourceType.CLUSTER, CLUSTER_NAME))

    async def load_rules(client: Client) -> tuple[AclSnapshot, bool] | bool:
        named = await super_users_setting(client)
        try:
            rules = await describe_acls(client, AclFilter())
        except ClusterNotAuthorized as error:
            allowed, caller = await own_rights(client, sufficient)
            if caller != principal:
                raise ClusterNotAuthorized(
                    f"explaining the rights of others needs DESCRIBE on the cluster; you are {caller}"
                ) from error
            return any(allowed)
        return AclSnapshot(rules, parse_super_users(named or "")), named is not None

    loaded_rules = call_broker(common, load_rules)
    if isinstance(loaded_rules, bool):
        why = "showing which rule decides needs DESCRIBE on the cluster"
        document: dict[str, object] = {"allowed": loaded_rules, "super_user": None, "rule": None}
        print_result(document, f"{'allowed' if loaded_rules else 'denied'}: {why}", as_json=common.as_json)
        return
    rules, knows_super_users = loaded_rules
    decisions = [rules.decide(principal, host, *acl) for acl in sufficient]
    decision = next(filter(None, decisions), decisions[-1])
    is_super_user = principal in rules.super_users
    if is_super_user:
        why = f"{principal} is a super user"
    else:
        why = "no rule allows it" if decision.rule is None else str(decision.rule)
        why += "" if knows_super_users else " (unless it is a super user, which you may not see)"
    document = {
        "allowed": bool(decision),
        "super_user": is_super_user if knows_super_users else None,
        "rule": None if decision.rule is None else _document(decision.rule),
    }
    print_result(document, f"{'allowed' if decision else 'denied'}: {why}", as_json=common.as_json)


def _add(rules: list[Acl], common: Common) -> None:
    from millstream.client.admin.security import add_acls

    check_names(rules)
    call_broker(common, lambda client: add_acls(client, rules))
    if common.as_json:
        print_json({"acls": [_document(acl) for acl in rules]})
        return
    for acl in rules:
        is_pattern = acl.resource_type is not ResourceType.CLUSTER and acl.resource_name != WILDCARD
        print_line(f"{acl} ({name_of(acl.pattern)})" if is_pattern else str(acl))


def _remove(rules: Iterable[Acl], common: Common, *, permission: Permission = Permission.ANY) -> None:
    from millstream.client.admin.security import remove_acls

    filters = [AclFilter.of(acl, permission) for acl in rules]
    removed = call_broker(common, lambda client: remove_acls(client, filters))
    if not removed:
        raise CommandFailed("no rule matches exactly; see `millstream acl list`", ExitCode.NOT_FOUND)
    print_result({"removed": removed}, f"{counted(removed, 'rule')} removed.", as_json=common.as_json)


def _document(acl: Acl) -> dict[str, str]:
    return {
        "permission": name_of(acl.permission),
        "principal": acl.principal,
        "operation": name_of(acl.operation),
        "type": name_of(acl.resource_type),
        "name": acl.resource_name,
        "pattern": name_of(acl.pattern),
        "host": acl.host,
    }
