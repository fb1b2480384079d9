"""A real PostgreSQL for tests, as `cluster up` starts it, with its data in a folder that goes with it."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path

import psutil
import psycopg

from millstream.cli.cluster_up import LocalPostgres


class PostgresServer(LocalPostgres):
    """A PostgreSQL on a free port; it does not sync its files, since no test cuts the power."""

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="millstream-postgres-")), durable=False)

    def new_database(self) -> str:
        """Create a database and return its URL."""
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url.removesuffix("/postgres") + f"/{name}"

    def worker_pids(self) -> list[int]:
        """The server's process and those that serve connections and do its chores."""
        if self.process is None:
            return []
        main = psutil.Process(self.process.pid)
        return [main.pid, *(child.pid for child in main.children(recursive=True))]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        shutil.rmtree(self.folder, ignore_errors=True)
