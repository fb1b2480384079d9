"""`millstream user`: create, list and delete users, and change their passwords.

The first user of a cluster is created while its node is stopped, straight in the catalog: `--data DIR`, or `--catalog`
for the nodes of a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.connection import call_broker, command_credentials
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun, Yes, confirm, flag, note_password, read_text_file
from millstream.cli.output import counted, print_list, print_result, print_with_notes
from millstream.core.credential import SecurityChange, new_credentials, user_principal
from millstream.core.errors import AuthenticationFailed, BrokerUnreachable, ClusterNotAuthorized

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client

app = Noun(help="Create, list and delete users, and change their passwords.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The name of the user.", show_default=False)]
FromStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from the standard input, without asking.")
]
PasswordFile = Annotated[
    Path | None, typer.Option("--password-file", metavar="FILE", help="Read the password from a file.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The data folder of a node that is stopped, instead of a broker."),
]
CatalogUrl = Annotated[
    str, typer.Option("--catalog", metavar="URL", help="The catalog of a cluster, instead of a broker.")
]
CatalogPasswordFile = Annotated[str, flag("--catalog-password-file", "FILE", "The password of the catalog's user.")]


def _setting_password(done: str, template: str, text: str, *, is_new: bool) -> Callable[..., None]:
    def put(
        name: Name,
        password_stdin: FromStdin = False,
        password_file: PasswordFile = None,
        data: Data = None,
        catalog: CatalogUrl = "",
        catalog_password_file: CatalogPasswordFile = "",
        common: Common = COMMON,
    ) -> None:
        word = _password(password_stdin, password_file)
        if not _put_in_catalog(name, word, data, catalog, catalog_password_file, is_new=is_new):
            _put(name, word, common, is_new=is_new)
        print_result({"user": name, done: True}, template.format(name), as_json=common.as_json)

    put.__doc__ = text
    return put


app.command("create")(_setting_password("created", "Created user {}.", "Create a user with a password.", is_new=True))
app.command("password")(
    _setting_password(
        "changed",
        "Changed the password of user {}.",
        "Change the password of a user. Connections that were opened with the old one are closed.",
        is_new=False,
    )
)


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List all users."""
    from millstream.client.admin.security import list_users

    users = call_broker(common, list_users)
    print_list(
        {"users": [{"user": name, "mechanisms": list(mechanisms)} for name, mechanisms in users.items()]},
        ("user", "mechanisms"),
        [[name, ", ".join(user_mechanisms)] for name, user_mechanisms in users.items()],
        empty="No users yet; see millstream user create --help.",
        as_json=common.as_json,
    )


@app.command("delete")
def delete(name: Name, yes: Yes = False, common: Common = COMMON) -> None:
    """Delete a user. Its connections are closed and its tokens revoked; its access rules stay."""
    from millstream.client.admin.security import delete_user
    from millstream.core.acl import AclFilter
    from millstream.protocol.wire.admin_requests import describe_acls

    principal = user_principal(name)

    async def operation(client: Client) -> int:
        await delete_user(client, name)
        return len(await describe_acls(client, AclFilter(principal=principal)))

    confirm(f"Delete user {name}?", unless=yes)
    left = call_broker(common, operation)
    notes = [
        f"{principal} still has {counted(left, 'access rule')}, which would apply to a new user of that name; "
        f"`millstream acl list --principal {principal}` shows them, and `millstream acl remove` removes each"
    ]
    document = {"user": name, "deleted": True}
    print_with_notes(document, f"Deleted user {name}.", notes if left else (), as_json=common.as_json)


_NOT_CREATED: Final = "creating a user needs DESCRIBE and ALTER on the cluster"


def _put(name: str, secret: str, common: Common, *, is_new: bool) -> None:
    async def operation(client: Client) -> None:
        from millstream.client.admin.security import list_users, put_user

        try:
            _check_new(name, name in await list_users(client), is_new=is_new)
        except ClusterNotAuthorized as error:
            if is_new:
                raise ClusterNotAuthorized(_NOT_CREATED) from error
            # Users may change their own password without the right to list users.
        try:
            await put_user(client, name, secret)
        except ClusterNotAuthorized as error:
            raise ClusterNotAuthorized(
                _NOT_CREATED
                if is_new
                else f"changing another user's password needs ALTER on the cluster; everyone who signs in with a "
                f"password may change it ({error})"
            ) from error

    try:
        call_broker(common, operation)
    except BrokerUnreachable:
        # Another password closes the connections of the user, even the one that asked for it.
        mine = command_credentials()
        if mine.user != name:
            raise
        with suppress(AuthenticationFailed):
            call_broker(common, lambda client: client.metadata([]), replace(mine, password=secret))
            return
        raise


def _put_in_catalog(name: str, secret: str, data: Path | None, url: str, password_file: str, *, is_new: bool) -> bool:
    """Store the user without a broker; return False if neither a folder nor a catalog is named."""
    if data is None and not url:
        return False
    note_password(url, flag="--catalog", instead="pass --catalog-password-file")
    from contextlib import ExitStack

    from millstream.broker.catalog.catalog import Catalog
    from millstream.broker.log.files import DiskFiles
    from millstream.broker.log.folder import DataFolder, check_own_or_empty, make_private

    credentials = new_credentials(name, secret)
    with ExitStack() as stack:
        if data is not None:
            # Locked, since a node that runs would not learn of the user.
            check_own_or_empty(str(data), DiskFiles())
            stack.callback(DataFolder(data, DiskFiles()).release)
            make_private(data)
            opened = Catalog.open_folder(data)
        else:
            opened = Catalog.open_shared(url, password_file=password_file)
        stack.callback(opened.close)
        known = {credential.user for credential in opened.security().credentials}
        _check_new(name, name in known, is_new=is_new)
        opened.change_security(SecurityChange(put_credentials=credentials))
    return True


def _check_new(name: str, is_known: bool, *, is_new: bool) -> None:
    if is_new and is_known:
        raise CommandFailed(
            f"user {name!r} already exists; `millstream user password {name}` changes its password",
            ExitCode.CONFLICT,
        )
    if not is_new and not is_known:
        raise CommandFailed(f"there is no user {name!r}; see `millstream user create`", ExitCode.NOT_FOUND)


def _password(from_stdin: bool, file: Path | None) -> str:
    if from_stdin and file is not None:
        raise CommandFailed("pass --password-stdin or --password-file, not both", ExitCode.USAGE)
    if file is not None:
        return read_text_file(file, flag="--password-file").rstrip("\r\n")
    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise CommandFailed("no terminal to read a password from; pass --password-stdin", ExitCode.USAGE)
    return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
