"""The connection to the database of the catalog: SQLite in the data folder, or PostgreSQL for a cluster.

A call to the catalog ends within seconds even if the database hangs: connecting, every statement and the whole
call have their limits.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, delete, event, insert, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DisconnectionError

from millstream.broker.catalog.tables import about, metadata, topics
from millstream.core.errors import CatalogDenied, InvalidSetting
from millstream.core.private_file import read_secret
from millstream.core.setting import without_password

_ROWS_AT_ONCE: Final = 500
_FLUSH: Final = "flush"


def copy_tables(source: Connection, target: Connection, *, flush: str) -> None:
    """Replace the contents of the target with those of the source.

    A topic without its own `flush` gets the given one, its default at the source.
    """
    for table in metadata.sorted_tables:
        if table is about:
            continue
        target.execute(delete(table))
        rows = [dict(row._mapping) for row in source.execute(select(table))]
        if table is topics:
            rows = [{**row, "overrides": with_flush(row["overrides"], flush)} for row in rows]
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            target.execute(insert(table), rows[at : at + _ROWS_AT_ONCE])


def with_flush(overrides: dict[str, Any], flush: str) -> dict[str, Any]:
    """Return the settings of a topic with its `flush` made explicit."""
    return {_FLUSH: flush, **overrides}


def is_empty(connection: Connection) -> bool:
    """Whether a catalog declares nothing; it may have no tables yet."""
    declared = (table for table in metadata.sorted_tables if table is not about)
    return not inspect(connection).has_table(about.name) or all(
        connection.execute(select(table).limit(1)).first() is None for table in declared
    )


CONNECT_S_MAX = 3
STATEMENT_MS_MAX = 5_000
CALL_S_MAX = 10.0
"""The time limit of a call: a server that hangs with open connections cannot enforce its own timeouts."""

POOL_SIZE = 2
POOL_OVERFLOW = 6
_FRESH_S = 1.0
"""A connection that was used within this time is not tested before it is used again."""

WRITES = "millstream_writes"
"""The execution option of connections that change something."""

_WATCH = "millstream-deadline"
_USED_AT = "millstream-used-at"


def open_database(url: str, *, password_file: str = "") -> Engine:
    """Return the SQLAlchemy engine for a URL; it connects later. No error holds the URL's password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError(
            f"{without_password(url)!r} is not a URL such as postgresql://user@host:5432/database"
        ) from None
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed, hide_parameters=True, connect_args={"timeout": CALL_S_MAX})
        event.listen(engine, "connect", _make_durable)
        event.listen(engine, "begin", _begin)
        return engine
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise ValueError(f"the catalog is kept in postgresql://…, not in {parsed.get_backend_name()}://…")
    return _open_postgres(parsed, password_file)


def _open_postgres(url: URL, password_file: str) -> Engine:
    limits = f"-c statement_timeout={STATEMENT_MS_MAX} -c lock_timeout={STATEMENT_MS_MAX}"
    connection: dict[str, Any] = {
        "connect_timeout": CONNECT_S_MAX,
        "options": limits,
        "tcp_user_timeout": 1000 * CONNECT_S_MAX,
        "application_name": "millstream",
        # Statements are few, and a pooler between us and the server cannot keep prepared ones.
        "prepare_threshold": None,
    }
    # Options in the operator's URL take precedence.
    own = {name: value for name, value in connection.items() if name not in url.query}
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        connect_args=own,
        pool_size=POOL_SIZE,
        max_overflow=POOL_OVERFLOW,
        pool_timeout=CONNECT_S_MAX,
        isolation_level="READ COMMITTED",
        # Errors are logged, so they must not contain stored values.
        hide_parameters=True,
    )
    if password_file:

        def use_password(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
            # For each connection, since passwords are rotated.
            try:
                parameters["password"] = read_secret(password_file, flag="--catalog-password-file")
            except InvalidSetting as error:
                raise CatalogDenied(f"the catalog cannot be reached: {error}") from None

        event.listen(engine, "do_connect", use_password)
    event.listen(engine, "checkout", _begin_call)
    event.listen(engine, "checkin", _end_call)
    return engine


def _begin_call(connection: Any, record: Any, _proxy: Any) -> None:
    """Set the limit of a call, and test a connection that was idle."""
    record.info[_WATCH] = _Deadline(connection.fileno())
    if time.monotonic() - record.info.get(_USED_AT, float("-inf")) < _FRESH_S:
        return
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except Exception as error:
        _drop_deadline(record)
        # The pool then opens a new connection, or reports that it cannot.
        raise DisconnectionError(str(error)) from error


def _end_call(_connection: Any, record: Any) -> None:
    _drop_deadline(record)
    record.info[_USED_AT] = time.monotonic()


def _drop_deadline(record: Any) -> None:
    deadline = record.info.pop(_WATCH, None)
    if deadline is not None:
        deadline.drop()


class _Deadline:
    """Closes a connection when its call takes too long, to unblock the waiting thread."""

    def __init__(self, handle: int) -> None:
        # A duplicate handle: the number may belong to another connection by the time the limit is reached.
        self._socket = socket.socket(fileno=os.dup(handle))
        self._timer = threading.Timer(CALL_S_MAX, self._shut_down_socket)
        self._timer.daemon = True
        self._timer.start()

    def drop(self) -> None:
        """End the watch: the call is over."""
        self._timer.cancel()
        self._socket.close()

    def _shut_down_socket(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _begin(connection: Connection) -> None:
    # The processes of a machine share the file. A writer locks it before its first read, since a process that has read
    # cannot wait for a lock.
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _make_durable(connection: Any, _record: Any) -> None:
    # Transactions are begun by `_begin` alone.
    connection.isolation_level = None
    # FULL makes a commit survive a power cut in WAL mode too.
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


RESERVE_BYTES = 512 * 1024
"""Far more than the pages that deleting a topic or lowering its retention writes."""


class Reserve:
    """A file that reserves space, which is freed for an important change on a full disk."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def fill(self) -> None:
        """Reserve the space, if the disk has it."""
        if self._path is None or self._path.exists():
            return
        # A disk without room for the reserve is no error; the next change tries again.
        with suppress(OSError):
            try:
                self._path.touch(mode=0o600, exist_ok=False)
                with self._path.open("r+b") as file:
                    file.write(bytes(RESERVE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                self._path.unlink(missing_ok=True)
                raise

    def free(self) -> bool:
        """Free the space; return False if nothing was reserved."""
        if self._path is None:
            return False
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
