"""The table of the messages that handlers have handled, or are handling: in SQLite, or in any database of SQLAlchemy's.

One row for each handler and message. It is a claim, which counts until its lease ends, or a mark that the message was
handled, which counts until it is forgotten:

    no row ──claim──▶ claimed ──finish──▶ handled ──(time to live)──▶ no row
       ▲                 │ give back, or the end of the lease
       └─────────────────┘

`decide` says what becomes of a row and knows nothing of databases. Many operations are one transaction. Each row is
written only if it is still as it was read; if another worker was faster, everything is read and decided again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    CursorResult,
    Engine,
    Index,
    MetaData,
    String,
    Table,
    and_,
    create_engine,
    delete,
    event,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError

from millstream.core.errors import Conflict, InvalidRequest

NAME_MAX = 100
"""The maximum length of a handler's name."""

ID_MAX = 255
"""A longer message id is stored as its digest."""

CLEANED_MAX = 1000
"""How many expired rows are removed at a time."""

_ATTEMPTS_MAX = 10
_SQLITE_BUSY_S = 30.0

metadata = MetaData()
handled = Table(
    "millstream_handled",
    metadata,
    Column("handler", String(NAME_MAX), primary_key=True),
    Column("message_id", String(ID_MAX), primary_key=True),
    Column("is_done", Boolean, nullable=False),
    Column("owner", String(32), nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    Index("millstream_handled_until", "handler", "until_ms"),
)


class Row(NamedTuple):
    """The state of a message: whether it was handled, or who has claimed it, and until when this is valid."""

    is_done: bool
    owner: str
    until_ms: int


class Verb(Enum):
    """What a worker does to a row."""

    CLAIM = "claim"
    EXTEND = "extend"
    FINISH = "finish"
    GIVE_BACK = "give back"


class Answer(Enum):
    """The result for the worker."""

    MINE = "mine"
    HANDLED = "handled"
    BUSY = "busy"
    """Another worker has it."""


class Operation(NamedTuple):
    """One verb of one worker on one message; what it writes is valid until `until_ms`."""

    verb: Verb
    message_id: str
    owner: str
    until_ms: int


def decide(row: Row | None, wanted: Operation, now_ms: int) -> tuple[Row | None, Answer]:
    """Return the new row and the worker's result."""
    if row is not None and row.is_done and row.until_ms <= now_ms:
        row = None
    verb, _, owner, until_ms = wanted
    is_mine = row is not None and not row.is_done and row.owner == owner
    if verb is Verb.GIVE_BACK:
        return (None if is_mine else row), Answer.MINE
    # An expired lease still belongs to its worker while no other one has claimed the message.
    is_free = row is None or is_mine or (verb is Verb.CLAIM and not row.is_done and row.until_ms <= now_ms)
    if is_free:
        return Row(verb is Verb.FINISH, owner, until_ms), Answer.MINE
    return row, Answer.HANDLED if row is not None and row.is_done else Answer.BUSY


def key_of(message_id: str) -> str:
    """Return the message id as it is stored."""
    if len(message_id) <= ID_MAX:
        return message_id
    return "sha256:" + hashlib.sha256(message_id.encode()).hexdigest()


class RowChanged(Exception):
    """Another worker has changed a row since it was read."""


class HandledTable:
    """The rows of one handler. Every method blocks: call it in a thread."""

    def __init__(self, engine: Engine, name: str) -> None:
        if not 0 < len(name) <= NAME_MAX:
            raise InvalidRequest(f"the name of a handler has 1 to {NAME_MAX} characters, not {len(name)}")
        self.engine = engine
        self._name = name
        self._is_prepared = False

    def prepare(self) -> None:
        """Create the table if it is missing."""
        if self._is_prepared:
            return
        try:
            metadata.create_all(self.engine)
        except DBAPIError:
            # Another worker may have created it at the same moment; any other error will occur again.
            metadata.create_all(self.engine)
        self._is_prepared = True

    def run(self, operations: Sequence[Operation], now_ms: int) -> list[Answer]:
        """Run operations in order, in one transaction."""
        self.prepare()
        for _ in range(_ATTEMPTS_MAX):
            try:
                with self.engine.begin() as connection:
                    return self._run(connection, operations, now_ms)
            except (IntegrityError, RowChanged):
                continue
        raise Conflict(f"other workers of handler {self._name!r} keep changing the same messages; try again")

    def mark(self, connection: Connection, message_id: str, until_ms: int, now_ms: int) -> bool:
        """Mark a message as handled in the caller's transaction; return False if it was handled before.

        If another transaction has just done the same, this waits for it, and raises `IntegrityError` if it was
        committed, or `RowChanged`: the caller then starts again.
        """
        wanted = Operation(Verb.FINISH, key_of(message_id), "", until_ms)
        before = self._read(connection, [wanted.message_id]).get(wanted.message_id)
        after, answer = decide(before, wanted, now_ms)
        if answer is Answer.BUSY:
            raise Conflict(f"message {message_id} is claimed by a worker that handles it without a transaction")
        if answer is Answer.HANDLED:
            return False
        self._write(connection, {wanted.message_id: before}, {wanted.message_id: after})
        return True

    def clean(self, now_ms: int) -> int:
        """Remove some expired rows; return how many."""
        self.prepare()
        mine = and_(handled.c.handler == self._name, handled.c.until_ms <= now_ms)
        oldest = select(handled.c.message_id).where(mine).order_by(handled.c.until_ms).limit(CLEANED_MAX)
        with self.engine.begin() as connection:
            found = connection.execute(oldest).scalars().all()
            if found:
                connection.execute(delete(handled).where(mine, handled.c.message_id.in_(found)))
        return len(found)

    def _run(self, connection: Connection, operations: Sequence[Operation], now_ms: int) -> list[Answer]:
        before = self._read(connection, sorted({one.message_id for one in operations}))
        after: dict[str, Row | None] = dict(before)
        answers: list[Answer] = []
        for one in operations:
            after[one.message_id], answer = decide(after.get(one.message_id), one, now_ms)
            answers.append(answer)
        self._write(connection, before, after)
        return answers

    def _read(self, connection: Connection, message_ids: Sequence[str]) -> dict[str, Row | None]:
        columns = select(handled.c.message_id, handled.c.is_done, handled.c.owner, handled.c.until_ms)
        mine = columns.where(handled.c.handler == self._name, handled.c.message_id.in_(message_ids))
        return {
            message_id: Row(is_done, owner, until_ms)
            for message_id, is_done, owner, until_ms in connection.execute(mine)
        }

    def _write(self, connection: Connection, before: dict[str, Row | None], after: dict[str, Row | None]) -> None:
        """Write what differs, in the order of the ids, so that two workers cannot deadlock."""
        new: list[dict[str, Any]] = []
        for message_id, row in sorted(after.items()):
            was = before.get(message_id)
            if was == row:
                continue
            if was is None and row is not None:
                new.append({"handler": self._name, "message_id": message_id, **row._asdict()})
                continue
            as_read = and_(*(handled.c[name] == value for name, value in self._key(message_id, was).items()))
            change = delete(handled) if row is None else update(handled).values(**row._asdict())
            done: CursorResult[Any] = connection.execute(change.where(as_read))
            if done.rowcount != 1:
                raise RowChanged
        if new:
            connection.execute(insert(handled), new)

    def _key(self, message_id: str, was: Row | None) -> dict[str, Any]:
        return {"handler": self._name, "message_id": message_id, **(was._asdict() if was is not None else {})}


def engine_of(store: str) -> Engine:
    """Open the database of a URL, or an SQLite file by its path."""
    url = make_url(store if "://" in store else f"sqlite:///{Path(store)}")
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": _SQLITE_BUSY_S})
    event.listen(engine, "connect", _make_durable)
    event.listen(engine, "begin", _begin_to_write)
    return engine


def _make_durable(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    # FULL makes a commit survive a power failure in WAL mode too.
    connection.execute("PRAGMA journal_mode=WAL").close()
    connection.execute("PRAGMA synchronous=FULL").close()


def _begin_to_write(connection: Connection) -> None:
    # A transaction that reads before it writes fails at once if another one writes; this one waits its turn.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
