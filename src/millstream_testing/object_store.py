"""A server that speaks S3, in its own process, for tests of tables in object stores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx

_SERVER: Final = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


class ObjectStore:
    """The address of the server."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which any program reaches it."""
        return {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "something",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def make_bucket(self, name: str) -> None:
        httpx.put(f"{self.endpoint}/{name}", timeout=60).raise_for_status()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server; it reads from this process, so it ends with it at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        host, port = process.stdout.readline().decode().split()
        yield ObjectStore(f"http://{host}:{port}")
    finally:
        process.communicate(timeout=60)
