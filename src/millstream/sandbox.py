"""A broker for the tests of programs that use Millstream: the real one, inside the process, in a temporary folder.

    with millstream.Sandbox() as sandbox:
        topic = sandbox.unique("orders")
        with sandbox.connect_sync() as ms:
            ms.publish(topic, {"order_id": 1})

It starts in a tenth of a second (the first one of a process takes about one, for imports), has one partition per topic
unless set otherwise, and leaves nothing behind. Messages are not synced to the disk, since no test cuts the power.
`millstream.pytest_plugin` has it as fixtures.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from typing import Final, Self, Unpack

from millstream.client.connection import Connection, connect
from millstream.client.sync_connection import SyncConnection, connect_sync
from millstream.embedded import ConnectOptions, EmbeddedBroker

SETTINGS: Final[Mapping[str, object]] = {
    "default-flush": "os",
    "journal-bytes": 1024 * 1024,
    "offsets-partitions": 1,
    "transactions-partitions": 1,
    "subscriptions-partitions": 1,
    # The members of a test's group join at once, so there is no need to wait for more.
    "group-initial-delay-ms": 0,
    "shutdown-ms": 1000,
}


class Sandbox:
    """A broker for the duration of a block; `settings` are those of a node, by flag name."""

    def __init__(self, **settings: object) -> None:
        options = {name.replace("_", "-"): value for name, value in settings.items()}
        self._folder = tempfile.mkdtemp(prefix="millstream-sandbox-")
        self._broker = EmbeddedBroker(self._folder, settings={**SETTINGS, **options})

    @property
    def address(self) -> str:
        """The address for clients: Millstream's and every Kafka client."""
        return self._broker.kafka_address

    def unique(self, name: str) -> str:
        """Return a name that no other test uses, for topics, subscriptions and groups on a shared broker."""
        return f"{name}-{uuid.uuid4().hex[:12]}"

    def connect(self, **options: Unpack[ConnectOptions]) -> Connection:
        """Connect to this broker, as `millstream.connect` does."""
        return connect(self.address, **options)

    def connect_sync(self, **options: Unpack[ConnectOptions]) -> SyncConnection:
        """Connect to this broker, as `millstream.connect_sync` does."""
        return connect_sync(self.address, **options)

    def start(self) -> Self:
        """Start, where a block cannot be used."""
        try:
            self._broker.start_and_wait()
        except BaseException:
            self._remove()
            raise
        return self

    def stop(self) -> None:
        """Stop, and remove everything."""
        try:
            self._broker.stop_and_wait()
        finally:
            self._remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.stop)

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
