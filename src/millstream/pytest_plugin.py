"""Fixtures for pytest: a Millstream broker inside the test process. docs/python-testing.md shows how to use them.

    async def test_orders_are_billed(millstream_broker):
        topic = millstream_broker.unique("orders")
        async with millstream_broker.connect() as ms:
            await ms.publish(topic, {"order_id": 1})

Nothing of Millstream is imported before a test asks for one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from millstream.client.sync_connection import SyncConnection
    from millstream.sandbox import Sandbox


def pytest_plugin_registered(manager: pytest.PytestPluginManager) -> None:
    """Keep pytest from rewriting Millstream's modules.

    pytest would rewrite the assertions of every module of a distribution that has a plugin. That takes time for
    nothing, and early versions of Python 3.11 break when two threads do it at the same time, as a broker's would.
    """
    marked = getattr(manager.rewrite_hook, "_must_rewrite", None)
    if isinstance(marked, set):
        marked.discard(__package__)


@pytest.fixture(scope="session")
def millstream_broker() -> Iterator[Sandbox]:
    """Provide one broker for all tests of the process; each test uses its own names, from `unique`."""
    from millstream.sandbox import Sandbox

    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def fresh_millstream_broker() -> Iterator[Sandbox]:
    """Provide a broker for one test, whose topics have the names that the program gives them."""
    from millstream.sandbox import Sandbox

    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def millstream_client(millstream_broker: Sandbox) -> Iterator[SyncConnection]:
    """Provide a connection to `millstream_broker`, for tests without an event loop."""
    with millstream_broker.connect_sync() as connection:
        yield connection
