"""Fair turns for the connections of one event loop.

What a connection costs is measured in seconds: the time that serving it took, in tasks too, plus its bytes at `BYTE_S`
each, for the later work that they cause. A connection that has used up its quantum is neither read nor sent to until
its turn comes, so its backlog stays in the socket buffers. Turns are given as in start-time fair queueing: first to the
client address that has used least, then to that address's connection that has used least; an address does not get more
by opening more connections. Between two rounds the loop polls, so everything else waits for one round at most. The
connections over which other nodes replicate share a separate account, `FOLLOWERS`.

A light request, one that is small and leaves nothing behind it in the socket, is served when it arrives and is not
charged, as long as all light requests of its address together take no more than `LIGHT_SHARE` of the loop. A connection
whose light request exceeds that waits only for others like it: every second turn of its address is theirs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final

QUANTUM_S: Final = 0.001
"""How much a connection may use before waiting ones get their turn."""
QUANTUM_ALONE_S: Final = 0.010
"""The same while none waits."""
CROWD: Final = 8
READ_BYTES_MAX: Final = 32 * 1024
READ_BYTES_MIN: Final = 4 * 1024
READ_AHEAD_BYTES: Final = 32 * 1024 * 1024
"""How much a connection reads at a time while others wait, so that waiting connections leave memory for the others."""
ROUND_S: Final = 0.005
"""How long one round of the loop should take; turns per round adapt to it."""
ROUND_SPENT_MAX_S: Final = 2 * ROUND_S
QUANTA_MAX: Final = 64
CHARGE_QUANTA_MAX: Final = 2
"""The most that is charged at once: the time may be due to a slow disk, another process, or garbage collection."""
BYTE_S: Final = 4e-9
TASK_S: Final = 0.0001
"""The cost of a request that a task serves, in addition to the steps of that task."""

LIGHT_BYTES: Final = 16 * 1024
LIGHT_RESPONSE_BYTES: Final = 256 * 1024
LIGHT_RESPONSES_MAX: Final = 3
"""A client with more requests in progress does not wait for a single one of them."""
LIGHT_SHARE: Final = 0.5
LIGHT_BURST_S: Final = 0.02

UNDER_WAY_BYTES_MAX: Final = 8 * 1024 * 1024
UNDER_WAY_BYTES_MIN: Final = 64 * 1024
"""How much all connections together, and each one at least, may have promised: it becomes durable in one commit, and a
long commit delays everyone."""
PROMISE_COST_BYTES: Final = 8 * 1024

FOLLOWERS: Final = "followers"
"""The account of the connections that replicate, which belongs to no client address."""


class _Address:
    """The account of a client address."""

    __slots__ = ("connections", "floor_s", "light", "light_at", "light_s", "light_was_last", "used_s", "waiting")

    def __init__(self) -> None:
        self.connections = 0
        self.used_s = 0.0
        self.floor_s = 0.0
        """What the connection had used that got the last turn; those that used less start from here."""
        self.light_s = LIGHT_BURST_S
        self.light_at = 0.0
        self.waiting: list[tuple[float, int, Flow]] = []
        self.light: deque[Flow] = deque()
        """Connections that wait after a light request."""
        self.light_was_last = False

    @property
    def has_waiting(self) -> bool:
        """Whether some connection waits, or did when it closed."""
        return bool(self.waiting or self.light)

    def pop_waiting(self) -> Flow:
        """Take the connection that is next: by turns one after a light request, and the one that has used least."""
        if self.light and not (self.light_was_last and self.waiting):
            self.light_was_last = True
            flow = self.light.popleft()
            # It has waited for what it used; otherwise each of its next requests would wait as well.
            flow.used_s = min(flow.used_s, self.floor_s)
            return flow
        self.light_was_last = False
        used_s, _, flow = heappop(self.waiting)
        if flow.is_waiting:
            self.floor_s = max(self.floor_s, used_s)
        return flow

    def take_light(self, cost_s: float, now: float) -> bool:
        """Serve a light request out of the share for these, unless that is used up."""
        self.light_s = min(LIGHT_BURST_S, self.light_s + (now - self.light_at) * LIGHT_SHARE)
        self.light_at = now
        if self.light_s <= 0:
            return False
        # Its time may be due to a slow disk or another process, so a single one may exceed the share.
        self.light_s = max(self.light_s - cost_s, -LIGHT_BURST_S)
        return True


class Flow:
    """The account of one connection."""

    __slots__ = ("address", "host", "is_waiting", "resume", "task_s", "under_way_bytes", "used_s")

    def __init__(self, host: str, address: _Address, resume: Callable[[], None], task_s: float) -> None:
        self.host = host
        self.address = address
        self.resume = resume
        self.used_s = 0.0
        self.is_waiting = False
        self.under_way_bytes = 0
        self.task_s = task_s
        """What its last request cost that a task served, so probably what the next one will."""


class Turns:
    """Decides which connections continue and which wait."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._addresses: dict[str, _Address] = {}
        self._queue: list[tuple[float, int, _Address]] = []
        """Addresses with a waiting connection."""
        self._floor_s = 0.0
        self._order = count()
        self._is_scheduled = False
        self._round_at = 0.0
        self.spent_s = 0.0
        """What was used since the last round."""
        self._begun_s = 0.0
        """What the tasks will probably use that were begun since the last round."""
        self._task_s = TASK_S
        """What the last one cost, for connections that have begun none."""
        self._quanta = 8
        self._flows_under_way = 0
        self.waiting = 0
        """How many connections wait for their turn."""
        self.quantum_s = QUANTUM_ALONE_S
        """What a connection may use at once: less, the more of them wait."""
        self.is_crowded = False
        """Whether so many wait that each should read and send in small steps."""
        self.read_bytes = READ_BYTES_MAX
        """How much a connection reads at a time in a crowd."""
        self.given = 0

    def join(self, host: str, resume: Callable[[], None]) -> Flow:
        """Open the account of a connection; `resume` is called when its turn comes.

        `host` is the client's address; for IPv6, its network (`network_of`).
        """
        address = self._addresses.get(host)
        if address is None:
            address = self._addresses[host] = _Address()
        address.connections += 1
        return Flow(host, address, resume, self._task_s)

    def leave(self, flow: Flow) -> None:
        """Close the account of a connection."""
        if flow.is_waiting:
            flow.is_waiting = False
            self._count_waiting(-1)
        flow.address.connections -= 1
        if not flow.address.connections:
            self._addresses.pop(flow.host, None)

    def move(self, flow: Flow, host: str) -> None:
        """Account for a connection, while it is served, under another name than its client's address."""
        if flow.host != host and not flow.is_waiting:
            self.leave(flow)
            joined = self.join(host, flow.resume)
            flow.host, flow.address, flow.used_s = host, joined.address, 0.0

    def _count_waiting(self, change: int) -> None:
        """Update what every read depends on from how many wait, which changes far less often."""
        self.waiting += change
        self.quantum_s = max(QUANTUM_S, QUANTUM_ALONE_S / (1 + self.waiting))
        self.is_crowded = self.waiting >= CROWD
        if self.is_crowded:
            self.read_bytes = max(READ_BYTES_MIN, min(READ_BYTES_MAX, READ_AHEAD_BYTES // self.waiting))

    def spend(self, flow: Flow, cost_s: float, now: float, *, is_light: bool = False) -> bool:
        """Charge a connection; return whether it has to wait for its turn now."""
        address = flow.address
        if is_light and not flow.is_waiting and address.take_light(cost_s, now):
            return False
        self.spent_s += cost_s
        quantum_s = self.quantum_s
        if cost_s > CHARGE_QUANTA_MAX * quantum_s:
            cost_s = CHARGE_QUANTA_MAX * quantum_s
        used_s = flow.used_s if flow.used_s > address.floor_s else address.floor_s
        flow.used_s = used_s + cost_s
        address.used_s += cost_s
        if flow.is_waiting:
            # It left some of what came unserved; the turn that it waits for is given by what it had used before.
            return True
        if flow.used_s - address.floor_s <= quantum_s:
            return False
        self.wait(flow, is_light=is_light)
        return True

    def begin_task(self, flow: Flow) -> None:
        """Count a task that will use the loop after this turn."""
        self.spent_s += flow.task_s
        self._begun_s += flow.task_s

    def end_task(self, flow: Flow, cost_s: float) -> None:
        """Remember what a task has cost."""
        flow.task_s = self._task_s = cost_s

    def wait(self, flow: Flow, *, is_light: bool = False) -> None:
        """Make a connection wait for its turn."""
        flow.is_waiting = True
        self._count_waiting(1)
        address = flow.address
        if not address.has_waiting:
            address.used_s = max(address.used_s, self._floor_s)
            heappush(self._queue, (address.used_s, next(self._order), address))
        # Usage from when there were few others is capped at the current quantum, or all others would get many turns
        # before this one.
        flow.used_s = min(flow.used_s, address.floor_s + CHARGE_QUANTA_MAX * self.quantum_s)
        if is_light:
            address.light.append(flow)
        else:
            heappush(address.waiting, (flow.used_s, next(self._order), flow))
        self._run_soon()

    def _run_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._round_at = self.clock()
            asyncio.get_running_loop().call_soon(self._run_round)

    def _run_round(self) -> None:
        self._is_scheduled = False
        self.spent_s = self._begun_s = 0.0
        self._adapt(self.clock() - self._round_at)
        left = self.waiting
        until = self.clock() + self._quanta * QUANTUM_S
        try:
            # Limited by time, since a connection that has little to do, or has left, uses a fraction of a quantum.
            while left and self._queue:
                flow = self._next_flow()
                if flow is not None:
                    left -= 1
                    self.given += 1
                    flow.resume()
                    if self.clock() + self._begun_s >= until:
                        break
        finally:
            if self._queue:
                self._run_soon()

    def _next_flow(self) -> Flow | None:
        _, _, address = heappop(self._queue)
        flow = self._next_flow_of(address)
        if flow is not None:
            self._floor_s = max(self._floor_s, address.used_s)
        if address.has_waiting:
            # What the turn costs is not known yet.
            heappush(self._queue, (max(address.used_s, self._floor_s) + QUANTUM_S, next(self._order), address))
        return flow

    def _next_flow_of(self, address: _Address) -> Flow | None:
        while address.has_waiting:
            flow = address.pop_waiting()
            if flow.is_waiting:
                flow.is_waiting = False
                self._count_waiting(-1)
                return flow
        return None

    def _adapt(self, took_s: float) -> None:
        """Give fewer turns in a round after one that took too long, and more after a short one."""
        if took_s > 2 * ROUND_S:
            self._quanta = max(1, self._quanta // 2)
        elif took_s < ROUND_S and self._quanta < QUANTA_MAX:
            self._quanta += 1

    # -- promised responses ---------------------------------------------------------------------------------

    def promise(self, flow: Flow, size_bytes: int, requests: int = 1) -> int:
        """Count requests whose response is promised; return what to pass to `keep` when it is sent."""
        cost_bytes = size_bytes + requests * PROMISE_COST_BYTES
        if not flow.under_way_bytes:
            self._flows_under_way += 1
        flow.under_way_bytes += cost_bytes
        return cost_bytes

    def keep(self, flow: Flow, cost_bytes: int) -> None:
        """Count requests of a connection as completed."""
        if cost_bytes:
            flow.under_way_bytes -= cost_bytes
            self._flows_under_way -= not flow.under_way_bytes

    def may_promise(self, flow: Flow) -> bool:
        """Whether a connection may have more requests under way."""
        if flow.under_way_bytes < UNDER_WAY_BYTES_MIN:
            return True
        return flow.under_way_bytes < UNDER_WAY_BYTES_MAX // self._flows_under_way
