"""Scheduling of turns, on a clock that only advances when something is served."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop

from millstream.broker.net import connection, response
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import SCRATCH_BYTES, Connection, ConnectionLimits, EventualResponse
from millstream.broker.net.listener import Listener, bind
from millstream.broker.net.partial_frame import FRAME_COST_BYTES
from millstream.broker.net.response import Buffers, Promise
from millstream.broker.net.turns import (
    FOLLOWERS,
    LIGHT_BURST_S,
    PROMISE_COST_BYTES,
    QUANTUM_ALONE_S,
    QUANTUM_S,
    ROUND_SPENT_MAX_S,
    TASK_S,
    UNDER_WAY_BYTES_MAX,
    UNDER_WAY_BYTES_MIN,
    Flow,
    Turns,
)

ROUNDS = 300
LIMITS = ConnectionLimits(frame_bytes_max=1 << 20)


class Clock:
    """A clock that advances while a connection is served."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class GreedyConnection:
    """A connection that always has more work than a turn allows."""

    def __init__(self, turns: Turns, clock: Clock, host: str, name: str, turn_counts: Counter[str]) -> None:
        self._turns = turns
        self._clock = clock
        self._name = name
        self._given = turn_counts
        self.flow: Flow = turns.join(host, self.work)

    def work(self) -> None:
        self._given[self._name] += 1
        cost_s = 2 * QUANTUM_S
        self._clock.now += cost_s
        if not self._turns.spend(self.flow, cost_s, self._clock.now):
            self._turns.wait(self.flow)


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("connections", [50, 400])
async def test_an_address_gets_no_larger_share_by_opening_more_connections(connections: int) -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    for number in range(connections):
        turns.wait(GreedyConnection(turns, clock, "10.0.0.1", "many", turn_counts).flow)
        if number == connections // 2:
            turns.wait(GreedyConnection(turns, clock, "10.0.0.2", "one", turn_counts).flow)
    await rounds(ROUNDS)
    assert turn_counts.total() >= ROUNDS
    assert turn_counts["one"] == pytest.approx(turn_counts["many"], rel=0.1)


async def test_connections_of_one_address_share_evenly_and_a_new_one_is_not_last() -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    for number in range(50):
        turns.wait(GreedyConnection(turns, clock, "10.0.0.1", str(number), turn_counts).flow)
    while turn_counts.total() < 1000:
        await asyncio.sleep(0)
    assert max(turn_counts.values()) - min(turn_counts.values()) <= 1
    before = turn_counts.total()
    new = GreedyConnection(turns, clock, "10.0.0.1", "new", turn_counts)
    # Its first use is charged from the position of the others, so it is served within one round of them.
    turns.spend(new.flow, 2 * QUANTUM_S, clock.now)
    while not turn_counts["new"]:
        await asyncio.sleep(0)
    assert turn_counts.total() - before <= 55


async def test_light_requests_take_precedence_up_to_half_of_the_loop() -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    for number in range(10):
        turns.wait(GreedyConnection(turns, clock, "10.0.0.1", str(number), turn_counts).flow)
    light = turns.join("10.0.0.1", lambda: None)
    assert not any(turns.spend(light, LIGHT_BURST_S / 10, clock.now, is_light=True) for _ in range(9))
    # A slow one is not penalised, but uses up the share.
    assert not turns.spend(light, LIGHT_BURST_S, clock.now, is_light=True)
    assert turns.spend(light, 2 * QUANTUM_S, clock.now, is_light=True)
    other = turns.join("10.0.0.2", lambda: None)
    assert not turns.spend(other, 2 * QUANTUM_S, clock.now, is_light=True)
    clock.now += 2 * LIGHT_BURST_S
    again = turns.join("10.0.0.1", lambda: None)
    assert not turns.spend(again, LIGHT_BURST_S / 2, clock.now, is_light=True)


def crowd(turns: Turns, clock: Clock, turn_counts: Counter[str], connections: int = 400) -> None:
    for number in range(connections):
        turns.wait(GreedyConnection(turns, clock, "10.0.0.1", str(number), turn_counts).flow)


async def test_light_requests_beyond_their_share_do_not_wait_for_bulk_of_their_address() -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    crowd(turns, clock, turn_counts)
    served: list[int] = []
    bystander = turns.join("10.0.0.1", lambda: served.append(turn_counts.total()))
    for number in range(5):
        # The machine is busy, so each takes long, and the share is soon used up.
        while not turns.spend(bystander, LIGHT_BURST_S, clock.now, is_light=True):
            pass
        before = turn_counts.total()
        while len(served) == number:
            await asyncio.sleep(0)
        assert served[-1] - before <= 2


async def test_light_requests_beyond_their_share_wait_once_per_quantum() -> None:
    clock = Clock()
    turns = Turns(clock)
    resumed = asyncio.Event()
    only = turns.join("10.0.0.1", resumed.set)
    cost_s, waits = QUANTUM_ALONE_S / 100, 0
    for _ in range(1000):
        clock.now += cost_s
        if turns.spend(only, cost_s, clock.now, is_light=True):
            waits += 1
            await resumed.wait()
            resumed.clear()
    assert 0 < waits <= 10


async def test_time_used_while_none_waited_is_not_credited_to_each_of_a_crowd() -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    first = GreedyConnection(turns, clock, "10.0.0.1", "first", turn_counts)
    assert not turns.spend(first.flow, QUANTUM_ALONE_S - QUANTUM_S, clock.now)
    crowd(turns, clock, turn_counts)
    turns.spend(first.flow, 2 * QUANTUM_S, clock.now)
    while not turn_counts["first"]:
        await asyncio.sleep(0)
    assert turn_counts.total() <= 3 * 400


async def test_followers_have_their_own_share_on_a_machine_that_floods() -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    crowd(turns, clock, turn_counts)
    follower = GreedyConnection(turns, clock, "10.0.0.1", "follower", turn_counts)
    turns.move(follower.flow, FOLLOWERS)
    turns.wait(follower.flow)
    await rounds(ROUNDS)
    assert turn_counts["follower"] == pytest.approx(turn_counts.total() / 2, rel=0.1)


async def test_a_connection_closed_while_waiting_gets_no_turn() -> None:
    clock, turn_counts = Clock(), Counter[str]()
    turns = Turns(clock)
    gone = GreedyConnection(turns, clock, "10.0.0.1", "gone", turn_counts)
    stays = GreedyConnection(turns, clock, "10.0.0.1", "stays", turn_counts)
    turns.wait(gone.flow)
    turns.wait(stays.flow)
    turns.leave(gone.flow)
    await rounds(3)
    assert turn_counts["gone"] == 0
    assert turn_counts["stays"] == 3
    assert turns.waiting == 1


def test_the_promise_budget_is_divided_among_connections_with_promises() -> None:
    turns = Turns(Clock())
    flows = [turns.join("10.0.0.1", lambda: None) for _ in range(4)]
    size = UNDER_WAY_BYTES_MAX // 4 - PROMISE_COST_BYTES
    cost_bytes = turns.promise(flows[0], size)
    assert turns.may_promise(flows[0])
    for flow in flows[1:]:
        turns.promise(flow, UNDER_WAY_BYTES_MIN)
    assert not turns.may_promise(flows[0])
    turns.keep(flows[0], cost_bytes)
    assert turns.may_promise(flows[0])


class Costly:
    """Echoes each frame and advances the clock; records who was served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.served: list[bytes] = []

    def handle(self, frame: memoryview, _connection: Connection) -> EventualResponse:
        self.served.append(bytes(frame[:1]))
        self._clock.now += QUANTUM_S / 4
        return [struct.pack(">i", 1), bytes(frame[:1])]


async def test_a_client_that_waits_for_each_response_precedes_a_flood() -> None:
    clock, budget, floods = Clock(), Budget(1 << 30), 20
    service = Costly(clock)
    listener = Listener(service, limits=LIMITS, budget=budget, connections_max=100, idle_s=600, turns=Turns(clock))
    bound = bind("127.0.0.1", 0, flag="kafka")
    port = bound.getsockname()[1]
    await listener.start(bound)
    frame = struct.pack(">i", 20) + bytes(20)
    flooding = [await asyncio.open_connection("127.0.0.1", port) for _ in range(floods)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for _, flood in flooding:
            flood.write(frame * 100_000)
        while len(service.served) < 100:
            await asyncio.sleep(0)
        held_bytes = 0
        for _ in range(20):
            before = len(service.served)
            writer.write(struct.pack(">i", 1) + b"b")
            assert await reader.readexactly(5) == struct.pack(">i", 1) + b"b"
            between = len(service.served) - before - 1
            held_bytes = max(held_bytes, budget.used_bytes)
            # It crosses the loop a few times; in each round a few turns of four frames are served.
            assert between < 1000, between
        assert service.served.count(b"\0") < floods * 100_000
        assert held_bytes <= floods * (SCRATCH_BYTES + 2 * FRAME_COST_BYTES)
    finally:
        for _, stream in [*flooding, (reader, writer)]:
            stream.transport.abort()
        await listener.drain(0)
    assert budget.used_bytes == 0


class CostlyInTasks(Costly):
    """Responds in tasks, which use the loop after the turn that started them."""

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        return self._respond(memoryview(bytes(frame)), connection)

    async def _respond(self, frame: memoryview, connection: Connection) -> Buffers:
        await asyncio.sleep(0)
        self._clock.now += QUANTUM_S
        return cast("Buffers", super().handle(frame, connection))


@pytest.mark.parametrize("kind", [Costly, CostlyInTasks])
async def test_a_loop_round_ends_however_many_connections_exceed_a_turn(
    kind: type[Costly], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, floods = Clock(), 200
    monkeypatch.setattr(response, "time", SimpleNamespace(perf_counter=clock))
    service = kind(clock)
    turns = Turns(clock)
    listener = Listener(service, limits=LIMITS, budget=Budget(1 << 30), connections_max=400, idle_s=600, turns=turns)
    bound = bind("127.0.0.1", 0, flag="kafka")
    port = bound.getsockname()[1]
    await listener.start(bound)
    flooding = [await asyncio.open_connection("127.0.0.1", port) for _ in range(floods)]
    try:
        # Everything arrives before the broker reads anything.
        for number, (_, flood) in enumerate(flooding):
            flood.write((struct.pack(">i", 20) + bytes([number]) + bytes(19)) * 1000)
        # The cost of a connection's requests is known once one was served.
        while len(set(service.served)) < floods:
            await asyncio.sleep(0)
        longest = 0.0
        enough = len(service.served) + floods * 20
        while len(service.served) < enough:
            began = clock.now
            await asyncio.sleep(0)
            longest = max(longest, clock.now - began)
        # Turns are given, and arrived data is read; a turn that started in time may use up its quantum.
        assert longest <= 3 * ROUND_SPENT_MAX_S
    finally:
        for _, stream in flooding:
            stream.transport.abort()
        await listener.drain(0)


def test_many_concurrent_connections_are_accepted_in_few_rounds() -> None:
    async def count_rounds(clients: int) -> int:
        service = Costly(Clock())
        listener = Listener(service, limits=LIMITS, budget=Budget(1 << 30), connections_max=clients, idle_s=600)
        bound = bind("127.0.0.1", 0, flag="kafka")
        connected = [socket.create_connection(bound.getsockname()) for _ in range(clients)]
        await listener.start(bound)
        rounds = 0
        while len(listener.connections) < clients:
            await asyncio.sleep(0)
            rounds += 1
        for client in connected:
            client.close()
        await listener.drain(0)
        return rounds

    # Only uvloop accepts one at a time.
    assert uvloop.run(count_rounds(128)) <= 64


@pytest.mark.parametrize("leaving", ["ends its side", "resets", "has more to send than the sockets hold"])
async def test_requests_of_clients_that_disconnect_are_hardly_served(
    leaving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DOUBT_S", -1.0)
    clock, budget, floods = Clock(), Budget(1 << 30), 50
    service, turns = Costly(clock), Turns(clock)
    listener = Listener(service, limits=LIMITS, budget=budget, connections_max=100, idle_s=600, turns=turns)
    bound = bind("127.0.0.1", 0, flag="kafka")
    await listener.start(bound)
    clients = [socket.create_connection(bound.getsockname()) for _ in range(floods)]
    for client in clients:
        client.sendall((struct.pack(">i", 20) + bytes(20)) * 1000)
    while turns.waiting < floods - 10:
        await asyncio.sleep(0)
    before = len(service.served)
    for client in clients:
        if leaving == "resets":
            client.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        elif leaving != "ends its side":
            client.setblocking(False)
            with suppress(BlockingIOError):
                while client.send((struct.pack(">i", 20) + bytes(20)) * 1000):
                    pass
            with suppress(BlockingIOError):
                # Closing with unread responses would reset the connection.
                while client.recv(1 << 16):
                    pass
        client.close()
    try:
        async with asyncio.timeout(30):
            while listener.connections:
                await asyncio.sleep(0)
    finally:
        await listener.drain(0)
    # The first response to one that only shut down its side shows that it is gone.
    assert len(service.served) - before <= 2 * floods
    assert budget.used_bytes == 0


class Tasks:
    """Responds in a task."""

    def handle(self, frame: memoryview, _connection: Connection) -> EventualResponse:
        async def respond(body: bytes) -> Buffers:
            await asyncio.sleep(0)
            return [body]

        return respond(bytes(frame))


class ChargedTurns(Turns):
    """Records what is charged."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.charged_s: list[float] = []

    def spend(self, flow: Flow, cost_s: float, now: float, *, is_light: bool = False) -> bool:
        self.charged_s.append(cost_s)
        return super().spend(flow, cost_s, now, is_light=is_light)


async def test_sending_the_response_of_a_task_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sending_s = Clock(), 7 * QUANTUM_S
    monkeypatch.setattr(response, "time", SimpleNamespace(perf_counter=clock))
    turns, flush = ChargedTurns(clock), Connection._flush_responses

    def flush_slowly(self: Connection) -> None:
        clock.now += sending_s
        flush(self)

    monkeypatch.setattr(Connection, "_flush_responses", flush_slowly)
    listener = Listener(Tasks(), limits=LIMITS, budget=Budget(1 << 30), connections_max=1, idle_s=600, turns=turns)
    bound = bind("127.0.0.1", 0, flag="kafka")
    await listener.start(bound)
    reader, writer = await asyncio.open_connection(*bound.getsockname())
    try:
        for _ in range(2):
            turns.charged_s.clear()
            writer.write(struct.pack(">i", 4) + b"1234")
            assert await reader.readexactly(4) == b"1234"
            async with asyncio.timeout(60):
                while pytest.approx(TASK_S + sending_s) not in turns.charged_s:
                    await asyncio.sleep(0)
    finally:
        writer.transport.abort()
        await listener.drain(0)


class Promises:
    """Promises every response."""

    def __init__(self) -> None:
        self.promises: list[Promise] = []

    def handle(self, frame: memoryview, _connection: Connection) -> EventualResponse:
        self.promises.append(Promise())
        return self.promises[-1]


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_promise_counts_until_it_is_resolved_even_if_its_client_is_gone(hangs_up: bool) -> None:
    turns, service = Turns(), Promises()
    listener = Listener(service, limits=LIMITS, budget=Budget(1 << 30), connections_max=1, idle_s=600, turns=turns)
    bound = bind("127.0.0.1", 0, flag="kafka")
    port = bound.getsockname()[1]
    await listener.start(bound)
    other = turns.join("10.0.0.2", lambda: None)
    turns.promise(other, UNDER_WAY_BYTES_MAX // 2)
    assert turns.may_promise(other)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(2 * (struct.pack(">i", 1) + b"p"))
        while len(service.promises) < 2:
            await asyncio.sleep(0)
        service.promises[1].resolve([b"second"])
        if hangs_up:
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, reset)
            writer.transport.abort()
            while listener.connections:
                await asyncio.sleep(0)
        assert not turns.may_promise(other)
        service.promises[0].resolve([b"first, "])
        if not hangs_up:
            assert await reader.readexactly(13) == b"first, second"
        assert turns.may_promise(other)
    finally:
        writer.transport.abort()
        await listener.drain(0)
