"""`millstream secrets`: the keys that seal secrets in the catalog, and the sealed secrets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, AsJson, Common, Noun, flag
from millstream.cli.output import counted, print_json, print_line, print_note, print_result, print_table

if TYPE_CHECKING:
    from millstream.protocol.private.security_messages import SecretsResponse

app = Noun(help="Create and rotate the keys that seal secrets in the catalog.", no_args_is_help=True)

KeyFile = Annotated[
    Path | None,
    flag(
        "--file",
        "FILE",
        "The file that nodes read as --secrets-key-file. Default: the file of a single node that this user runs.",
    ),
]


@app.command("init")
def init(file: KeyFile = None, as_json: AsJson = False) -> None:
    """Create a key file. Copy it to every node of a cluster, and keep it out of backups of the data."""
    from millstream.broker.catalog.sealing import SecretKey, write_keys

    path, key = _path(file), SecretKey.new()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        write_keys(path, [key])
    except FileExistsError:
        raise CommandFailed(
            f"{path} already exists; `millstream secrets rotate` adds a key to it", ExitCode.CONFLICT
        ) from None
    print_result(
        {"file": str(path), "key": key.key_id},
        f"Created {path} with key {key.key_id}. Copy it to a safe place: without it, sealed secrets are lost.",
        as_json=as_json,
    )


@app.command("rotate")
def rotate(file: KeyFile = None, as_json: AsJson = False) -> None:
    """Add a key to a file. It seals secrets from now on; earlier keys still open what they sealed.

    Nodes that use this file reload it without a restart. Copy it to the other nodes of a cluster, then run
    `millstream secrets reseal`.
    """
    from millstream.broker.catalog.sealing import SecretKey, read_keys, write_keys

    path, key = _path(file), SecretKey.new()
    if not path.exists():
        raise CommandFailed(f"{path} does not exist; see `millstream secrets init`", ExitCode.NOT_FOUND)
    write_keys(path, [*read_keys(path), key], replace=True)
    print_result(
        {"file": str(path), "key": key.key_id},
        f"Added key {key.key_id} to {path}; it seals secrets from now on. When every node has the file, run: "
        "millstream secrets reseal",
        as_json=as_json,
    )


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List the secrets in the catalog, without their values. Shows their owners, and the keys that sealed them."""
    _print(_send_request(common, reseal=False), as_json=common.as_json)


@app.command("reseal")
def reseal(common: Common = COMMON) -> None:
    """Seal every secret with the newest key. Earlier keys can then be removed from the file."""
    response = _send_request(common, reseal=True)
    if not common.as_json:
        print_line(f"Sealed {counted(response.resealed, 'secret')} again with key {response.newest or 'none'}.")
    _print(response, as_json=common.as_json)


def _path(file: Path | None) -> Path:
    from millstream.broker.catalog.sealing import default_key_file

    path = file or default_key_file()
    if path is None:
        raise CommandFailed("this user has no home folder; name the file with --file", ExitCode.USAGE)
    return path


def _send_request(common: Common, *, reseal: bool) -> SecretsResponse:
    from millstream.client.admin.security import list_secrets

    return call_broker(common, lambda client: list_secrets(client, reseal=reseal))


def _print(response: SecretsResponse, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        secrets = [msgspec.to_builtins(secret) for secret in response.secrets]
        print_json({"newest": response.newest, "resealed": response.resealed, "secrets": secrets})
        return
    if response.secrets:
        print_table(
            ("noun", "name", "setting", "key"),
            [[secret.noun, secret.name, secret.setting, secret.key] for secret in response.secrets],
        )
    else:
        print_line("The catalog holds no secrets.")
    for secret in response.secrets:
        if secret.problem:
            print_note(f"{secret.noun} {secret.name}: {secret.problem}")
