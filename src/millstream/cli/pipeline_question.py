"""How commands ask about pipelines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from millstream.cli.connection import ask_through

if TYPE_CHECKING:
    from millstream.client.admin.pipelines import PipelineClient
    from millstream.protocol.wire.client import Client

T = TypeVar("T")


def ask_pipelines(brokers: str, timeout: float, question: Callable[[PipelineClient], Awaitable[T]]) -> T:
    """Connect, ask, close."""
    return ask_through(brokers, timeout, _pipelines, question)


def _pipelines(client: Client) -> PipelineClient:
    # Imported when there is something to ask, so that help is told at once.
    from millstream.client.admin.pipelines import PipelineClient

    return PipelineClient(client)
