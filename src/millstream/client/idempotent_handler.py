"""Handlers whose effect happens once, although a message may be delivered more than once.

    handle = IdempotentHandler(bill, name="billing")                    # the ids are kept in an SQLite file
    handle = TransactionalHandler(bill, name="billing", store="postgresql://…")   # the effect and its mark are one
    await ms.subscribe("orders", handle, name="billing")

`IdempotentHandler` claims the id of a message before the handler runs and marks it after. A duplicate waits while
another worker handles the message, and is then accepted without being handled. A handler that fails releases its claim.
If a worker dies after the effect and before the mark, the effect happens again.

`TransactionalHandler` gives the handler a connection of SQLAlchemy's, in whose transaction the mark is written. The
handler's writes there happen exactly once, whichever process crashes.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar
from uuid import uuid4

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
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from millstream.core.backoff import Backoff
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import Conflict, InvalidRequest, MillstreamError

_logger = logging.getLogger(__name__)

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
    CLAIM = "claim"
    EXTEND = "extend"
    FINISH = "finish"
    GIVE_BACK = "give back"


class ClaimResult(Enum):
    """The result for the worker."""

    MINE = "mine"
    HANDLED = "handled"
    BUSY = "busy"
    """Another worker has it."""


class Operation(NamedTuple):
    """A verb of one worker on one message; the row that it writes is valid until `until_ms`."""

    verb: Verb
    message_id: str
    owner: str
    until_ms: int


def decide(row: Row | None, operation: Operation, now_ms: int) -> tuple[Row | None, ClaimResult]:
    """Return the new row and the worker's result."""
    if row is not None and row.is_done and row.until_ms <= now_ms:
        row = None
    verb, _, owner, until_ms = operation
    is_mine = row is not None and not row.is_done and row.owner == owner
    if verb is Verb.GIVE_BACK:
        return (None if is_mine else row), ClaimResult.MINE
    # An expired lease still belongs to its worker while no other one has claimed the message.
    is_free = row is None or is_mine or (verb is Verb.CLAIM and not row.is_done and row.until_ms <= now_ms)
    if is_free:
        return Row(verb is Verb.FINISH, owner, until_ms), ClaimResult.MINE
    return row, ClaimResult.HANDLED if row is not None and row.is_done else ClaimResult.BUSY


def key_of(message_id: str) -> str:
    if len(message_id) <= ID_MAX:
        return message_id
    return "sha256:" + hashlib.sha256(message_id.encode()).hexdigest()


class RowChanged(Exception):
    """Another worker has changed a row since it was read."""


class HandledTable:
    """The rows of one handler. Every method blocks: call it in a thread.

    One row for each handler and message. It is a claim, which counts until its lease ends, or a mark that the message
    was handled, which counts until it is forgotten:

        no row ──claim──▶ claimed ──finish──▶ handled ──(time to live)──▶ no row
           ▲                 │ give back, or the end of the lease
           └─────────────────┘

    `decide` computes the new state of a row, independently of the database. Many operations are one transaction. Each
    row is written only if it has not changed since it was read; otherwise everything is read and decided again.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        if not 0 < len(name) <= NAME_MAX:
            raise InvalidRequest(f"the name of a handler has 1 to {NAME_MAX} characters, not {len(name)}")
        self.engine = engine
        self._name = name
        self._is_prepared = False

    def prepare(self) -> None:
        if self._is_prepared:
            return
        try:
            metadata.create_all(self.engine)
        except DBAPIError:
            # Another worker may have created it at the same moment; any other error will occur again.
            metadata.create_all(self.engine)
        self._is_prepared = True

    def run(self, operations: Sequence[Operation], now_ms: int) -> list[ClaimResult]:
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
        operation = Operation(Verb.FINISH, key_of(message_id), "", until_ms)
        before = self._read(connection, [operation.message_id]).get(operation.message_id)
        after, result = decide(before, operation, now_ms)
        if result is ClaimResult.BUSY:
            raise Conflict(f"message {message_id} is claimed by a worker that handles it without a transaction")
        if result is ClaimResult.HANDLED:
            return False
        self._write(connection, {operation.message_id: before}, {operation.message_id: after})
        return True

    def clean(self, now_ms: int) -> int:
        """Remove some expired rows; return how many."""
        self.prepare()
        mine = and_(handled.c.handler == self._name, handled.c.until_ms <= now_ms)
        oldest = select(handled.c.message_id).where(mine).order_by(handled.c.until_ms).limit(CLEANED_MAX)
        with self.engine.begin() as connection:
            expired = connection.execute(oldest).scalars().all()
            if expired:
                connection.execute(delete(handled).where(mine, handled.c.message_id.in_(expired)))
        return len(expired)

    def _run(self, connection: Connection, operations: Sequence[Operation], now_ms: int) -> list[ClaimResult]:
        before = self._read(connection, sorted({operation.message_id for operation in operations}))
        after: dict[str, Row | None] = dict(before)
        results: list[ClaimResult] = []
        for operation in operations:
            after[operation.message_id], result = decide(after.get(operation.message_id), operation, now_ms)
            results.append(result)
        self._write(connection, before, after)
        return results

    def _read(self, connection: Connection, message_ids: Sequence[str]) -> dict[str, Row | None]:
        columns = select(handled.c.message_id, handled.c.is_done, handled.c.owner, handled.c.until_ms)
        mine = columns.where(handled.c.handler == self._name, handled.c.message_id.in_(message_ids))
        return {
            message_id: Row(is_done, owner, until_ms)
            for message_id, is_done, owner, until_ms in connection.execute(mine)
        }

    def _write(self, connection: Connection, before: dict[str, Row | None], after: dict[str, Row | None]) -> None:
        """Write the changed rows in the order of their ids, so that two workers cannot deadlock."""
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
    # A transaction that reads before it writes fails at once if another one is writing; this one waits instead.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


BATCH_MAX = 500
"""The maximum number of operations in one transaction."""

CLEAN_MS = 60_000
"""The shortest interval between removals of expired rows."""


class HandledIds:
    """Claims, extends, finishes and releases messages without blocking the event loop."""

    def __init__(self, table: HandledTable, clock: Clock, *, lease_ms: int, time_to_live_ms: int) -> None:
        self._table = table
        self._clock = clock
        self._lease_ms = lease_ms
        self._time_to_live_ms = time_to_live_ms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millstream handled")
        self._waiting: list[tuple[Operation, asyncio.Future[ClaimResult]]] = []
        self._running: asyncio.Task[None] | None = None
        self._cleaned_ms = 0

    async def do(self, verb: Verb, message_id: str, owner: str) -> ClaimResult:
        """Run one verb; calls made during a transaction share the next one."""
        counts_ms = self._time_to_live_ms if verb is Verb.FINISH else self._lease_ms
        operation = Operation(verb, key_of(message_id), owner, self._clock.now_ms() + counts_ms)
        result: asyncio.Future[ClaimResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, result))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="millstream handled")
        return await result

    async def close(self) -> None:
        while self._running is not None:
            await asyncio.wait([self._running])
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        try:
            # Calls of the same turn of the loop are batched.
            await asyncio.sleep(0)
            while self._waiting:
                taken, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                await self._transact(taken)
                await self._clean()
        finally:
            self._running = None

    async def _transact(self, taken: list[tuple[Operation, asyncio.Future[ClaimResult]]]) -> None:
        operations = [operation for operation, _ in taken]
        now_ms, loop = self._clock.now_ms(), asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._table.run, operations, now_ms)
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(taken, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _clean(self) -> None:
        now_ms = self._clock.now_ms()
        if now_ms - self._cleaned_ms < CLEAN_MS:
            return
        self._cleaned_ms = now_ms
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._table.clean, now_ms)
        except (SQLAlchemyError, MillstreamError) as error:
            _logger.warning("old ids of handled messages could not be removed", extra={"reason": str(error)})


DEFAULT_STORE = "millstream-handled.db"

TIME_TO_LIVE_S = 7 * 24 * 3600.0

LEASE_S = 30.0

THREADS = 10

THREADS_MAX = 1000
"""The maximum number of plain functions running at once; threads start as needed, and the subscriber bounds them."""

_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 1.0

_FINISH_ATTEMPTS = 4
_FINISH_PAUSE_S = 0.6

_MARK_ATTEMPTS = 10


class HasMessageId(Protocol):
    """Any message that has an id."""

    @property
    def id(self) -> str:
        """Return the message id."""


M = TypeVar("M", bound=HasMessageId)


class _StoreHandler(Generic[M]):
    """A handler with a database, which it closes if it has opened it."""

    def __init__(self, store: str | Engine) -> None:
        self._owns_engine = not isinstance(store, Engine)
        self._engine = store if isinstance(store, Engine) else engine_of(store)

    async def close(self) -> None:
        if self._owns_engine:
            await asyncio.to_thread(self._engine.dispose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class IdempotentHandler(_StoreHandler[M]):
    """Runs a handler once for each message id, within the time to live; pass it to `subscribe`.

    `store` is the path of an SQLite file, a SQLAlchemy URL, or an engine. Workers that share a store and a `name` act
    as one. The claim of a worker that died stays valid for `lease_s`; a handler that runs longer keeps its claim.
    """

    def __init__(
        self,
        handler: Callable[[M], Awaitable[Any]] | Callable[[M], Any],
        *,
        name: str,
        store: str | Engine = DEFAULT_STORE,
        time_to_live_s: float = TIME_TO_LIVE_S,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(store)
        self._handler = handler
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
        self._ids = HandledIds(
            HandledTable(self._engine, name),
            clock or SystemClock(),
            lease_ms=int(lease_s * 1000),
            time_to_live_ms=int(time_to_live_s * 1000),
        )
        self._threads = (
            None if self._is_async else ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="millstream handler")
        )
        self._extend_s = lease_s / 2
        self._busy: dict[str, asyncio.Event] = {}
        self._extending: set[asyncio.Task[Any]] = set()

    async def __call__(self, message: M) -> None:
        """Handle a message unless it was handled before; return when it is handled, by any worker."""
        message_id, owner = message.id, uuid4().hex
        runs = False
        try:
            if not await self._claim(message_id, owner):
                return
            runs = True
            await self._handle(message, owner)
        except BaseException as error:
            # A function in a thread continues when its caller is cancelled; its claim is left to expire.
            if not (runs and isinstance(error, asyncio.CancelledError) and not self._is_async):
                await self._give_back(message_id, owner)
            raise
        await self._finish(message_id, owner)

    async def close(self) -> None:
        await self._ids.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        await super().close()

    async def _claim(self, message_id: str, owner: str) -> bool:
        """Wait until no other worker handles this message; return False if it has been handled."""
        backoff = Backoff(first_s=_PAUSE_S_MIN, max_s=_PAUSE_S_MAX)
        while True:
            beside = self._busy.get(message_id)
            if beside is not None:
                await beside.wait()
                continue
            result = await self._ids.do(Verb.CLAIM, message_id, owner)
            if result is not ClaimResult.BUSY:
                return result is ClaimResult.MINE
            if message_id not in self._busy:
                # Another process has it; only the store shows its progress.
                await backoff.pause()

    async def _handle(self, message: M, owner: str) -> None:
        done = self._busy[message.id] = asyncio.Event()
        timer = self._extend_later(message.id, owner)
        try:
            if self._is_async:
                await self._handler(message)
            else:
                context = contextvars.copy_context()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, context.run, self._handler, message)
        finally:
            timer.cancel()
            del self._busy[message.id]
            done.set()

    def _extend_later(self, message_id: str, owner: str) -> _Timer:
        """Keep the claim while the handler runs, with a timer, which costs a short handler almost nothing."""

        async def extend() -> None:
            try:
                if await self._ids.do(Verb.EXTEND, message_id, owner) is not ClaimResult.MINE:
                    _logger.warning("another worker has taken a message over", extra={"message_id": message_id})
            except Exception as error:
                _logger.warning("a claim was not extended", extra={"message_id": message_id, "reason": str(error)})

        def begin() -> None:
            task = asyncio.ensure_future(extend())
            self._extending.add(task)
            task.add_done_callback(self._extending.discard)

        return _Timer(self._extend_s, begin)

    async def _finish(self, message_id: str, owner: str) -> None:
        """Mark the message as handled; retried, because the effect has happened."""
        backoff = Backoff(first_s=_FINISH_PAUSE_S)
        while True:
            try:
                result = await self._ids.do(Verb.FINISH, message_id, owner)
            except Exception:
                if backoff.failures == _FINISH_ATTEMPTS - 1:
                    raise
                await backoff.pause()
                continue
            if result is not ClaimResult.MINE:
                _logger.warning("a message was handled by two workers", extra={"message_id": message_id})
            return

    async def _give_back(self, message_id: str, owner: str) -> None:
        try:
            await self._ids.do(Verb.GIVE_BACK, message_id, owner)
        except Exception as error:
            # The claim also expires on its own.
            _logger.warning("a claim was not released", extra={"message_id": message_id, "reason": str(error)})


class _Timer:
    def __init__(self, every_s: float, call: Callable[[], None]) -> None:
        self._every_s = every_s
        self._call = call
        self._handle = asyncio.get_running_loop().call_later(every_s, self._due)

    def cancel(self) -> None:
        self._handle.cancel()

    def _due(self) -> None:
        self._call()
        self._handle = asyncio.get_running_loop().call_later(self._every_s, self._due)


class TransactionalHandler(_StoreHandler[M]):
    """Runs a handler in a transaction that also marks the message as handled: both happen, or neither.

    The handler is a plain function, `handler(message, connection)`, and runs in a thread. It must not commit or roll
    back: the transaction is committed when it returns and rolled back when it raises. Of two concurrent deliveries, one
    waits for the other.
    """

    def __init__(
        self,
        handler: Callable[[M, Connection], Any],
        *,
        name: str,
        store: str | Engine = DEFAULT_STORE,
        time_to_live_s: float = TIME_TO_LIVE_S,
        threads: int = THREADS,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(store)
        self._handler = handler
        self._table = HandledTable(self._engine, name)
        self._time_to_live_ms = int(time_to_live_s * 1000)
        self._clock = clock or SystemClock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="millstream handler")
        self._cleaned_ms = 0

    async def __call__(self, message: M) -> None:
        """Handle a message unless it was handled before."""
        # The thread inherits the context that the handler's publishes carry on.
        context = contextvars.copy_context()
        await asyncio.get_running_loop().run_in_executor(self._threads, context.run, self._handle, message)

    async def close(self) -> None:
        self._threads.shutdown(wait=False)
        await super().close()

    def _handle(self, message: M) -> None:
        self._clean()
        for _ in range(_MARK_ATTEMPTS):
            if self._is_settled(message):
                return
        raise Conflict(f"message {message.id} keeps being handled elsewhere; try later")

    def _is_settled(self, message: M) -> bool:
        """Run one transaction; return False if another one marked the message meanwhile, which the next one sees."""
        now_ms = self._clock.now_ms()
        with self._table.engine.connect() as connection:
            transaction = connection.begin()
            try:
                if not self._table.mark(connection, message.id, now_ms + self._time_to_live_ms, now_ms):
                    return True
            except (IntegrityError, RowChanged):
                return False
            self._handler(message, connection)
            transaction.commit()
            return True

    def _clean(self) -> None:
        self._table.prepare()
        now_ms = self._clock.now_ms()
        if now_ms - self._cleaned_ms >= CLEAN_MS:
            self._cleaned_ms = now_ms
            self._table.clean(now_ms)
