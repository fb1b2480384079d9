from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, create_engine, text

from millstream.client.idempotent_handler import (
    CLEANED_MAX,
    ClaimResult,
    HandledTable,
    IdempotentHandler,
    Operation,
    Row,
    TransactionalHandler,
    Verb,
    decide,
    engine_of,
)
from millstream.core.errors import InvalidRequest
from millstream_testing.clock import ManualClock
from millstream_testing.postgres_server import PostgresServer

LEASE_S, LIVE_S = 30.0, 3600.0


class Taken(NamedTuple):
    """The parts of a message that a handler needs here."""

    id: str


class Died(BaseException):
    """The worker's process is dead; nothing it would do afterwards happens."""


class DyingWorker(IdempotentHandler[Taken]):
    """A worker that can die between its effect and the record of it."""

    is_dead = False

    async def _give_back(self, message_id: str, owner: str) -> None:
        if not self.is_dead:
            await super()._give_back(message_id, owner)


def dying_worker(handler: Callable[[Taken], Any], store: str, clock: ManualClock, name: str = "bill") -> DyingWorker:
    return DyingWorker(handler, name=name, store=store, clock=clock, lease_s=LEASE_S, time_to_live_s=LIVE_S)


async def test_a_message_is_handled_once(tmp_path: Path) -> None:
    seen: list[str] = []
    async with IdempotentHandler(
        lambda message: seen.append(message.id), name="a", store=str(tmp_path / "db")
    ) as handler:
        for identifier in ("1", "2", "1", "1"):
            await handler(Taken(identifier))
    async with IdempotentHandler(lambda message: seen.append(message.id), name="a", store=str(tmp_path / "db")) as two:
        await two(Taken("2"))
    async with IdempotentHandler(
        lambda message: seen.append(message.id), name="b", store=str(tmp_path / "db")
    ) as other:
        await other(Taken("2"))
    assert seen == ["1", "2", "2"]


async def test_concurrent_messages_share_transactions_and_wait_for_each_other(tmp_path: Path) -> None:
    running: set[str] = set()
    effects: Counter[str] = Counter()

    async def handle(message: Taken) -> None:
        assert message.id not in running
        running.add(message.id)
        await asyncio.sleep(0)
        effects[message.id] += 1
        running.discard(message.id)

    async with IdempotentHandler(handle, name="a", store=str(tmp_path / "db")) as worker:
        await asyncio.gather(*(worker(Taken(str(number % 40))) for number in range(120)))
    assert effects == Counter({str(number): 1 for number in range(40)})


async def test_a_failing_handler_releases_its_claim(tmp_path: Path) -> None:
    tries: list[str] = []

    async def handle(message: Taken) -> None:
        tries.append(message.id)
        if len(tries) == 1:
            raise ValueError("not now")

    async with IdempotentHandler(handle, name="a", store=str(tmp_path / "db")) as worker:
        with pytest.raises(ValueError, match="not now"):
            await worker(Taken("1"))
        await worker(Taken("1"))
        await worker(Taken("1"))
    assert tries == ["1", "1"]


async def test_a_worker_waits_for_a_claim_of_another_process(tmp_path: Path) -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def slow(message: Taken) -> None:
        began.set()
        await goes_on.wait()
        seen.append("slow")

    async def quick(message: Taken) -> None:
        seen.append("quick")

    store = str(tmp_path / "db")
    async with (
        IdempotentHandler(slow, name="a", store=store) as one,
        IdempotentHandler(quick, name="a", store=store) as two,
    ):
        first = asyncio.create_task(one(Taken("1")))
        await began.wait()
        second = asyncio.create_task(two(Taken("1")))
        await asyncio.sleep(0.1)
        assert not second.done()
        goes_on.set()
        await asyncio.gather(first, second)
    assert seen == ["slow"]


async def test_a_slow_handler_renews_its_claim(tmp_path: Path) -> None:
    clock, goes_on, store = ManualClock(), asyncio.Event(), str(tmp_path / "db")

    async def slow(message: Taken) -> None:
        await goes_on.wait()

    async with IdempotentHandler(slow, name="a", store=store, lease_s=0.02, clock=clock) as worker:
        handling = asyncio.create_task(worker(Taken("1")))
        engine = engine_of(store)
        async with asyncio.timeout(60):
            while await asyncio.to_thread(lease_end, engine) < clock.now_ms() + 20:
                await asyncio.sleep(0.01)
            clock.advance_ms(15)
            while await asyncio.to_thread(lease_end, engine) < clock.now_ms() + 20:
                await asyncio.sleep(0.01)
        goes_on.set()
        await handling
        engine.dispose()


def lease_end(engine: Engine) -> int:
    HandledTable(engine, "a").prepare()
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT max(until_ms) FROM millstream_handled")).scalar() or 0)


async def test_a_cancelled_handler_releases_its_claim(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def handle(message: Taken) -> None:
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()

    async with IdempotentHandler(handle, name="a", store=str(tmp_path / "db")) as worker:
        task = asyncio.create_task(worker(Taken("1")))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            await worker(Taken("1"))


PLANS = st.lists(
    st.tuples(st.sampled_from("123"), st.sampled_from(("ok", "fail", "die before", "die after", "forget"))), max_size=10
)


@settings(max_examples=15, deadline=None)
@given(plans=PLANS)
async def test_effects_happen_as_often_as_documented_wherever_a_worker_dies(plans: list[tuple[str, str]]) -> None:
    clock, effects, expected, handled = ManualClock(), Counter[str](), Counter[str](), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        for identifier, plan in plans:
            worker = dying_worker(handler_of(plan, effects), f"{folder}/db", clock)
            if plan == "forget":
                clock.advance_ms(int(LIVE_S * 1000))
                handled.clear()
            worker.is_dead = plan.startswith("die")
            try:
                await worker(Taken(identifier))
            except (Died, ValueError):
                clock.advance_ms(int(LEASE_S * 1000) if worker.is_dead else 0)
            await worker.close()
            if identifier not in handled and plan not in ("fail", "die before"):
                expected[identifier] += 1
            if plan in ("ok", "forget"):
                handled.add(identifier)
            assert effects == expected


def handler_of(plan: str, effects: Counter[str]) -> Callable[[Taken], Any]:
    async def handle(message: Taken) -> None:
        if plan == "fail":
            raise ValueError(plan)
        if plan == "die before":
            raise Died
        effects[message.id] += 1
        if plan == "die after":
            raise Died

    return handle


@settings(max_examples=15, deadline=None)
@given(plans=PLANS)
async def test_an_effect_in_the_transaction_happens_exactly_once(plans: list[tuple[str, str]]) -> None:
    handled: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(f"{folder}/db")
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (id TEXT)"))
        for identifier, plan in plans:
            worker = TransactionalHandler(in_transaction(plan), name="a", store=engine)
            try:
                await worker(Taken(identifier))
                handled.add(identifier)
            except (Died, ValueError):
                pass
            await worker.close()
            with engine.connect() as connection:
                ids = connection.execute(text("SELECT id FROM effects ORDER BY id")).scalars().all()
            assert ids == sorted(handled)
        engine.dispose()


def in_transaction(plan: str) -> Callable[[Taken, Connection], None]:
    def handle(message: Taken, connection: Connection) -> None:
        if plan == "fail":
            raise ValueError(plan)
        if plan == "die before":
            raise Died
        connection.execute(text("INSERT INTO effects VALUES (:id)"), {"id": message.id})
        if plan == "die after":
            raise Died

    return handle


PROGRAM = """
import asyncio, os, sys
from typing import NamedTuple
from sqlalchemy import text
from millstream.client.idempotent_handler import TransactionalHandler

class Taken(NamedTuple):
    id: str

store, dies_at = sys.argv[1:]

def handle(message, connection):
    connection.execute(text("CREATE TABLE IF NOT EXISTS effects (id TEXT)"))
    connection.execute(text("INSERT INTO effects VALUES (:id)"), {"id": message.id})
    if message.id == dies_at:
        os._exit(9)

async def main():
    worker = TransactionalHandler(handle, name="a", store=store)
    for number in range(6):
        await worker(Taken(str(number)))

asyncio.run(main())
"""


def test_a_process_killed_in_its_transaction_leaves_no_partial_effect(tmp_path: Path) -> None:
    store = str(tmp_path / "db")
    codes = [
        subprocess.run([sys.executable, "-c", PROGRAM, store, dies_at], check=False).returncode
        for dies_at in ("3", "never")
    ]
    assert codes == [9, 0]
    engine = create_engine(f"sqlite:///{store}")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM effects")).scalars().all() == [str(n) for n in range(6)]
    engine.dispose()


async def test_postgresql_stores_the_ids_too(postgres: PostgresServer) -> None:
    url, effects = postgres.new_database(), Counter[str]()

    async def handle(message: Taken) -> None:
        effects[message.id] += 1

    async with (
        IdempotentHandler(handle, name="a", store=url) as one,
        IdempotentHandler(handle, name="a", store=url) as two,
    ):
        await asyncio.gather(*(worker(Taken(str(number % 20))) for worker in (one, two) for number in range(60)))
    assert effects == Counter({str(number): 1 for number in range(20)})


async def test_in_postgresql_the_second_transaction_waits_for_the_first(postgres: PostgresServer) -> None:
    engine = engine_of(postgres.new_database())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id TEXT)"))

    async with (
        TransactionalHandler(in_transaction("ok"), name="a", store=engine) as one,
        TransactionalHandler(in_transaction("ok"), name="a", store=engine) as two,
    ):
        await asyncio.gather(*(worker(Taken(str(number % 5))) for worker in (one, two) for number in range(15)))
    with engine.connect() as connection:
        ids = connection.execute(text("SELECT id FROM effects ORDER BY id")).scalars().all()
    engine.dispose()
    assert ids == ["0", "1", "2", "3", "4"]


def test_old_ids_are_removed_in_chunks(tmp_path: Path) -> None:
    engine = engine_of(str(tmp_path / "db"))
    table = HandledTable(engine, "a")
    table.run([Operation(Verb.FINISH, str(number), "me", 10) for number in range(CLEANED_MAX + 5)], 0)
    table.run([Operation(Verb.FINISH, "young", "me", 1000)], 0)
    assert [table.clean(9), table.clean(10), table.clean(10), table.clean(10)] == [0, CLEANED_MAX, 5, 0]
    assert table.run([Operation(Verb.CLAIM, "young", "you", 2000)], 10) == [ClaimResult.HANDLED]
    engine.dispose()


async def do_nothing(message: Taken) -> None:
    """Do nothing."""


ROWS = st.none() | st.builds(Row, st.booleans(), st.sampled_from(("me", "you")), st.integers(0, 20))


@settings(deadline=None)
@given(row=ROWS, verb=st.sampled_from(Verb), now_ms=st.integers(0, 20))
def test_a_claim_of_another_worker_is_not_taken(row: Row | None, verb: Verb, now_ms: int) -> None:
    after, response = decide(row, Operation(verb, "1", "me", 99), now_ms)
    if row is not None and row.until_ms > now_ms and (row.owner == "you" or row.is_done):
        assert after == row
        assert verb is Verb.GIVE_BACK or response is (ClaimResult.HANDLED if row.is_done else ClaimResult.BUSY)
    if verb is Verb.CLAIM and response is ClaimResult.MINE:
        assert after == Row(False, "me", 99)


async def test_long_ids_are_accepted_and_invalid_names_refused(tmp_path: Path) -> None:
    seen: list[str] = []
    async with IdempotentHandler(
        lambda message: seen.append(message.id), name="a", store=str(tmp_path / "db")
    ) as handler:
        await handler(Taken("x" * 1000))
        await handler(Taken("x" * 1000))
        await handler(Taken("x" * 1001))
    assert len(seen) == 2
    with pytest.raises(InvalidRequest, match="1 to 100 characters"):
        IdempotentHandler(do_nothing, name="", store=str(tmp_path / "db"))
