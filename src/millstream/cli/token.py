"""`millstream token`: create, list and revoke API tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun, flag
from millstream.cli.output import local_time, print_list, print_note, print_result
from millstream.core.acl import EVERYONE, WILDCARD, Acl, Permission, parse_rules
from millstream.core.credential import split_token
from millstream.core.errors import AuthenticationFailed, BrokerUnreachable

if TYPE_CHECKING:
    from millstream.protocol.private.security_messages import ScopeRule

app = Noun(help="Create, list and revoke API tokens.", no_args_is_help=True)


@app.command("create")
def create(
    resources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TYPE:NAME",
            help="The resource of each --allow, such as topic:orders. A name that ends in * is a prefix.",
            show_default=False,
        ),
    ] = None,
    owner: Annotated[
        str,
        typer.Option("--owner", metavar="PRINCIPAL", help="The principal, such as User:alice. Default: yours."),
    ] = "",
    expires: Annotated[
        str, typer.Option("--expires", metavar="DURATION", help="How long it is valid: 90s, 15m, 2h, 30d; up to 366d.")
    ] = "30d",
    allow: Annotated[
        list[str] | None,
        flag(
            "--allow",
            "OPERATIONS",
            "Restrict it to some of its owner's rights, as in --allow read,write topic:orders; may be repeated. "
            "Default: everything.",
        ),
    ] = None,
    prefixed: Annotated[
        bool, typer.Option("--prefixed", help="The name in --allow is a prefix; with one --allow only.")
    ] = False,
    common: Common = COMMON,
) -> None:
    """Create a token and show it, once."""
    from millstream.client.admin.position import parse_age_ms
    from millstream.client.admin.security import create_token

    permissions = list(zip(allow or (), resources or (), strict=False))
    lifetime_ms = parse_age_ms(expires)
    if lifetime_ms is None:
        raise CommandFailed(f"--expires takes a length of time, such as 12h or 30d, not {expires!r}", ExitCode.USAGE)
    if len(allow or ()) != len(resources or ()):
        raise CommandFailed(
            "--allow takes operations and a resource, as in --allow read,write topic:orders", ExitCode.USAGE
        )
    if prefixed and len(permissions) != 1:
        raise CommandFailed(
            "--prefixed goes with one --allow; end the names that are prefixes with * instead", ExitCode.USAGE
        )
    scope = [acl for operations, resource in permissions for acl in _scope(operations, resource, prefixed=prefixed)]
    made = call_broker(common, lambda client: create_token(client, scope, owner=owner, lifetime_ms=lifetime_ms))
    token_id, secret = split_token(made.token)
    document = {
        "id": token_id,
        "secret": secret,
        "token": made.token,
        "owner": made.owner,
        "expires_ms": made.expires_ms,
    }
    print_result(document, made.token, as_json=common.as_json)
    if made.is_shortened:
        print_note(f"Not valid for {expires}: it expires with the token that it was created with.")
    if not common.as_json:
        print_note(
            f"Valid for {made.owner} until {local_time(made.expires_ms)}, and not shown again. Kafka clients take it "
            f"as SASL/PLAIN: the user is {token_id}, the password is the part after the dot."
        )


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List your tokens. Users who may describe the cluster see everyone's."""
    from millstream.client.admin.security import list_tokens

    tokens = call_broker(common, list_tokens)
    documents = [
        {
            "id": token.token_id,
            "owner": token.owner,
            "scope": [
                {"operation": rule.operation, "type": rule.type, "name": rule.name, "pattern": rule.pattern}
                for rule in token.scope
            ],
            "parent": token.parent,
            "created_ms": token.created_ms,
            "expires_ms": token.expires_ms,
        }
        for token in tokens
    ]
    header = ("id", "owner", "may", "created with", "expires")
    rows = [
        [token.token_id, token.owner, _text(token.scope), token.parent or None, local_time(token.expires_ms)]
        for token in tokens
    ]
    empty = "No tokens; see millstream token create --help."
    print_list({"tokens": documents}, header, rows, empty=empty, as_json=common.as_json)


@app.command("revoke")
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="The id of the token, which begins with mst_.", show_default=False)
    ],
    common: Common = COMMON,
) -> None:
    """Revoke a token and those that were created with it. Their connections are closed."""
    from millstream.client.admin.security import list_tokens, revoke_token

    # If a user pastes the whole token, use only its id: the secret must not reach a log.
    token_id, _ = split_token(token_id)
    try:
        call_broker(common, lambda client: revoke_token(client, token_id))
    except BrokerUnreachable:
        # A token that revokes itself loses its connection before it gets a response, and cannot sign in again.
        with suppress(AuthenticationFailed):
            call_broker(common, list_tokens)
            raise
    print_result({"id": token_id, "revoked": True}, f"Revoked token {token_id}.", as_json=common.as_json)


def _scope(operations: str, resource: str, *, prefixed: bool) -> list[Acl]:
    if resource.endswith(WILDCARD) and not resource.endswith(f":{WILDCARD}"):
        resource, prefixed = resource.removesuffix(WILDCARD), True
    return parse_rules(Permission.ALLOW, EVERYONE, operations, resource, prefixed, WILDCARD)


def _text(scope: list[ScopeRule]) -> str:
    allowed: dict[str, list[str]] = {}
    for rule in scope:
        star = WILDCARD if rule.pattern == "prefixed" else ""
        allowed.setdefault(f"{rule.type}:{rule.name}{star}", []).append(rule.operation)
    return (
        "; ".join(f"{','.join(operations)} {what}" for what, operations in allowed.items()) or "all rights of its owner"
    )
