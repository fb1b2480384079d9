"""How a command talks to a broker: one client for as long as the command runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from millstream.wire.client import Client

C = TypeVar("C")
T = TypeVar("T")

CLIENT_ID = "millstream-cli"


def ask(brokers: str, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
    """Connect, ask, close; errors are those of the tree."""
    return asyncio.run(_ask(brokers, timeout_s, question))


def ask_through(
    brokers: str, timeout_s: float, door: Callable[[Client], C], question: Callable[[C], Awaitable[T]]
) -> T:
    """The same of a client of some kind, which `door` makes of the connection."""
    return ask(brokers, timeout_s, lambda client: question(door(client)))


async def _ask(brokers: str, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
    from millstream.wire.client import Client
    from millstream.wire.lean_kio import import_lean_kio

    import_lean_kio()
    async with Client.connect(brokers, client_id=CLIENT_ID, timeout_s=timeout_s) as client:
        return await question(client)
