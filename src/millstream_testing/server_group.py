"""Real `millstream serve` processes that form a cluster, on an etcd and a PostgreSQL that are running."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from millstream_testing.server import Server


class ServerGroup:
    """The nodes of one cluster, numbered from 1."""

    def __init__(
        self, folder: Path, etcd: str, catalog: str, *, nodes: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        shared = {"etcd": etcd, "catalog": catalog, "cluster": uuid.uuid4().hex, **(settings or {})}
        self.nodes = {
            number: Server(folder / f"node-{number}", settings={"node-id": number, **shared})
            for number in range(1, nodes + 1)
        }

    @property
    def kafka(self) -> str:
        """The addresses of all nodes, for clients."""
        return ",".join(node.kafka for node in self.nodes.values())

    def __getitem__(self, number: int) -> Server:
        return self.nodes[number]

    def __iter__(self) -> Iterator[Server]:
        return iter(self.nodes.values())

    def start(self) -> Self:
        """Start every node that is not running, at the same time."""
        down = [node for node in self if not node.is_running()]
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Server.start, down))
        return self

    def kill(self) -> None:
        for node in self:
            node.kill()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *exception: object) -> None:
        self.kill()
