"""How a command talks to a broker: one client for the duration of the command."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import SHARED, Common, default_brokers, read_text_file
from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.client.admin.pipelines import PipelineClient
    from millstream.client.profile import Profile
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.credentials import Credentials

T = TypeVar("T")

CLIENT_ID = "millstream-cli"
COMPLETION_S: Final = 2.0
"""How long completion waits for a broker."""

FLAGS: Final = ("--profile", "--tls-ca", "--tls-cert", "--tls-key", "--user", "--password-file", "--token-file")
SWITCHES: Final = ("--tls",)
_WITHOUT: Final = ("serve", "certs", "demo")
"""Commands that connect to nothing, or to what they have started themselves."""
_OWN_PASSWORD: Final = (("user", "create"), ("user", "password"))
_given: dict[str, str] = {}


def take_credentials(arguments: list[str]) -> list[str]:
    """Remove the connection flags from a command line, wherever they are; return the rest.

    After `user create` and `user password`, `--password-file` is the password of that user, not of the caller.
    """
    _given.clear()
    command, verb, rest, left = "", "", list[str](), list(arguments)
    while left and left[0] != "--" and command not in _WITHOUT:
        name, equals, value = left[0].partition("=")
        if name in SWITCHES and not equals:
            _given[left.pop(0)] = "yes"
        elif name in FLAGS and not (name == "--password-file" and (command, verb) in _OWN_PASSWORD):
            left.pop(0)
            if not equals and not left:
                raise CommandFailed(f"{name} needs a value", ExitCode.USAGE)
            _given[name] = value if equals else left.pop(0)
        else:
            size = 1 if verb or equals else 1 + SHARED.get(name, 0)
            if not name.startswith("-"):
                command, verb = command or name, (verb or name) if command else ""
            rest, left = [*rest, *left[:size]], left[size:]
    return [*rest, *left]


def command_credentials() -> Credentials:
    """Return a command's credentials: its flags, MILLSTREAM_TLS_CA, _USER, _PASSWORD and _TOKEN, or its profile."""
    from millstream.client.profile import Profile
    from millstream.protocol.wire.credentials import Credentials, client_tls

    environment, profile = os.environ, chosen_profile() or Profile()
    ca = _given.get("--tls-ca") or environment.get("MILLSTREAM_TLS_CA") or profile.tls_ca or None
    certificate = _given.get("--tls-cert") or profile.tls_cert or None
    key = _given.get("--tls-key") or (None if "--tls-cert" in _given else profile.tls_key or None)
    has_user, has_token = "--user" in _given, "--token-file" in _given
    user = _given.get("--user") or ("" if has_token else environment.get("MILLSTREAM_USER", ""))
    password = _secret("--password-file", "MILLSTREAM_PASSWORD")
    token = "" if has_user and not has_token else _secret("--token-file", "MILLSTREAM_TOKEN")
    if user and token:
        names = "--user and --token-file" if has_user else "MILLSTREAM_USER and MILLSTREAM_TOKEN"
        raise CommandFailed(f"pass a user with its password, or a token, not both ({names})", ExitCode.USAGE)
    if not token and user in ("", profile.user):
        # An identity is taken as a whole.
        user = profile.user
        password = password or profile.read_password()
        token = "" if user else profile.read_token()
    has_tls = ca is not None or certificate is not None or "--tls" in _given or profile.has_tls
    if user and not password:
        raise CommandFailed(
            f"there is no password for user {user!r}; set MILLSTREAM_PASSWORD, or pass --password-file (before the "
            "command if that is user create or user password)",
            ExitCode.USAGE,
        )
    return Credentials(
        tls=client_tls(ca, certificate=certificate, key=key) if has_tls else None,
        user=user,
        password=password,
        token=(lambda: token) if token and not user else None,
    )


def chosen_profile() -> Profile | None:
    name = _given.get("--profile") or os.environ.get("MILLSTREAM_PROFILE")
    if not name:
        return None
    from millstream.client.profile import load_profile

    return load_profile(name)


def _secret(flag: str, variable: str) -> str:
    """Return a secret from a file or the environment; never from the command line, which others can see."""
    path = _given.get(flag)
    if path is None:
        return os.environ.get(variable, "")
    secret = read_text_file(Path(path), flag=flag).rstrip("\r\n")
    if not secret:
        # Without it, the command would run with another identity, such as that of the profile.
        raise CommandFailed(f"{flag} {path} is empty", ExitCode.USAGE)
    return secret


def call_broker(
    common: Common, operation: Callable[[Client], Awaitable[T]], credentials: Credentials | None = None
) -> T:
    """Connect, with the command's credentials unless others are given, run an operation, and close."""
    return asyncio.run(_connect_and_call(common, operation, credentials or command_credentials()))


async def _connect_and_call(common: Common, operation: Callable[[Client], Awaitable[T]], credentials: Credentials) -> T:
    from millstream.protocol.messages.lean_kio import import_lean_kio
    from millstream.protocol.wire.client import Client

    import_lean_kio()
    async with Client.connect(
        common.brokers, client_id=CLIENT_ID, timeout_s=common.timeout, credentials=credentials
    ) as client:
        return await operation(client)


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    async def names(client: Client) -> Iterable[str]:
        return [topic.name for topic in (await client.metadata()).topics.values() if not topic.is_internal]

    return _complete(ctx, incomplete, names)


def complete_subscriptions(ctx: typer.Context, incomplete: str) -> list[str]:
    async def names(client: Client) -> Iterable[str]:
        from millstream.core.subscription import OWN_PREFIX
        from millstream.protocol.private.subscriptions import SubscriptionClient

        known = [described["name"] for described in await SubscriptionClient(client).describe()]
        return [name for name in known if not name.startswith(OWN_PREFIX)]

    return _complete(ctx, incomplete, names)


def _complete(ctx: typer.Context, incomplete: str, names: Callable[[Client], Awaitable[Iterable[str]]]) -> list[str]:
    """Complete names with the broker of the command line so far; none if it does not respond."""
    try:
        completions = call_broker(
            Common(brokers=ctx.params.get("brokers") or default_brokers(), timeout=COMPLETION_S), names
        )
    except (MillstreamError, CommandFailed):
        return []
    return sorted(name for name in completions if name.startswith(incomplete))


def call_pipelines(common: Common, operation: Callable[[PipelineClient], Awaitable[T]]) -> T:
    # Imported on use, so that help is quick.
    from millstream.client.admin.pipelines import PipelineClient

    return call_broker(common, lambda client: operation(PipelineClient(client)))
