"""The servers that are measured: Millstream, the limit server, and a server that throws everything away."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from millstream.testing.server import Server

PARTITIONS = 4
LIMIT, MILLSTREAM, DISCARD = "limit", "millstream", "client alone"


class LimitServer(Server):
    """`benchmarks.limit_server` as a process."""

    def command(self) -> Sequence[str]:
        flags = [part for name, value in self.settings.items() for part in (f"--{name}", str(value))]
        return [
            sys.executable,
            "-m",
            "benchmarks.limit_server",
            "--data",
            str(self.data),
            "--kafka",
            self.kafka,
            *flags,
        ]

    def _folder(self) -> Path:
        return Path(__file__).resolve().parent.parent


def limit(data: Path, flush: str) -> Server:
    """The server that does the least."""
    return LimitServer(data, settings={"flush": flush, "partitions": PARTITIONS})


def millstream(data: Path, flush: str) -> Server:
    """The server that all this is about, as a user would start it."""
    return Server(data, settings={"default-flush": flush, "default-partitions": PARTITIONS})


def discard(data: Path, flush: str) -> Server:
    """A server that answers and keeps nothing: what is measured with it is the client and the socket."""
    return LimitServer(data, settings={"flush": "discard", "partitions": PARTITIONS})


SUBJECTS: dict[str, Callable[[Path, str], Server]] = {LIMIT: limit, MILLSTREAM: millstream, DISCARD: discard}
