"""A real PostgreSQL for tests, as `cluster up` starts it, with its data in a temporary folder."""

from __future__ import annotations

import shutil
import socket
import ssl
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import psutil
import psycopg

from millstream.cli.cluster_up import LocalPostgres
from millstream_testing.security import Certificates

_TLS_REQUEST: Final = bytes.fromhex("0000000804d2162f")


class PostgresServer(LocalPostgres):
    """A PostgreSQL on a free port; it does not sync its files, since no test cuts the power."""

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="millstream-postgres-")), durable=False)

    def new_database(self) -> str:
        """Create a database and return its URL."""
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        server, _, query = self.url.partition("/postgres")
        return f"{server}/{name}{query}"

    def worker_pids(self) -> list[int]:
        """Return the server's process and its background processes."""
        if self.process is None:
            return []
        main = psutil.Process(self.process.pid)
        return [main.pid, *(child.pid for child in main.children(recursive=True))]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        shutil.rmtree(self.folder, ignore_errors=True)


class EncryptedPostgresServer(PostgresServer):
    """A PostgreSQL behind TLS, for clients with a certificate of its authority.

    The packaged server is built without TLS, so a proxy does what PostgreSQL does for `hostssl`.
    """

    def __init__(self, certificates: Certificates) -> None:
        super().__init__()
        self._certificates = certificates
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.node, certificates.node_key)
        self._context.load_verify_locations(certificates.ca)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listening = socket.create_server(("127.0.0.1", 0))

    @property
    def url(self) -> str:
        """The address for clients that present the node's certificate and verify the server's."""
        files, port = self._certificates, self._listening.getsockname()[1]
        query = f"sslmode=verify-full&sslrootcert={files.ca}&sslcert={files.node}&sslkey={files.node_key}"
        return f"{super().url.replace(f':{self.port}/', f':{port}/')}?{query}"

    def __enter__(self) -> Self:
        super().__enter__()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        super().__exit__(*exception)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if client.recv(len(_TLS_REQUEST), socket.MSG_WAITALL) != _TLS_REQUEST:
                return
            client.sendall(b"S")
            with (
                self._context.wrap_socket(client, server_side=True) as encrypted,
                socket.create_connection(("127.0.0.1", self.port)) as server,
            ):
                back = threading.Thread(target=_copy, args=(server, encrypted), daemon=True)
                back.start()
                _copy(encrypted, server)
                back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for stream in (source, target):
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)
