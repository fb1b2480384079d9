"""How a command talks to a broker: one client for the duration of the command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from millstream.cli.options import DEFAULT_BROKERS
from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.client.admin.pipelines import PipelineClient
    from millstream.protocol.wire.client import Client

C = TypeVar("C")
T = TypeVar("T")

CLIENT_ID = "millstream-cli"
COMPLETION_S: Final = 2.0
"""How long completion waits for a broker."""


def ask(brokers: str, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
    """Connect, run an operation, and close."""
    return asyncio.run(_ask(brokers, timeout_s, question))


def ask_through(
    brokers: str, timeout_s: float, door: Callable[[Client], C], question: Callable[[C], Awaitable[T]]
) -> T:
    """Run an operation with a client that `door` creates from the connection."""
    return ask(brokers, timeout_s, lambda client: question(door(client)))


async def _ask(brokers: str, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
    from millstream.protocol.messages.lean_kio import import_lean_kio
    from millstream.protocol.wire.client import Client

    import_lean_kio()
    async with Client.connect(brokers, client_id=CLIENT_ID, timeout_s=timeout_s) as client:
        return await question(client)


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete topic names, for the shell."""

    async def names(client: Client) -> Iterable[str]:
        return [topic.name for topic in (await client.metadata()).topics.values() if not topic.is_internal]

    return _complete(ctx, incomplete, names)


def complete_subscriptions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete subscription names, for the shell."""

    async def names(client: Client) -> Iterable[str]:
        from millstream.core.subscription import OWN_PREFIX
        from millstream.protocol.private.subscriptions import SubscriptionClient

        known = [described["name"] for described in await SubscriptionClient(client).describe()]
        return [name for name in known if not name.startswith(OWN_PREFIX)]

    return _complete(ctx, incomplete, names)


def _complete(ctx: typer.Context, incomplete: str, names: Callable[[Client], Awaitable[Iterable[str]]]) -> list[str]:
    """Complete names with the broker of the command line so far; none if it does not answer."""
    try:
        found = ask(ctx.params.get("brokers") or DEFAULT_BROKERS, COMPLETION_S, names)
    except MillstreamError:
        return []
    return sorted(name for name in found if name.startswith(incomplete))


def ask_pipelines(brokers: str, timeout: float, question: Callable[[PipelineClient], Awaitable[T]]) -> T:
    """Connect, run an operation on pipelines, and close."""
    return ask_through(brokers, timeout, _pipelines, question)


def _pipelines(client: Client) -> PipelineClient:
    # Imported on use, so that help is quick.
    from millstream.client.admin.pipelines import PipelineClient

    return PipelineClient(client)
