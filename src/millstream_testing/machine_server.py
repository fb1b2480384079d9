"""Run `millstream serve --cores N` in a trial: kill any of its processes, and change N between starts.

A trial of messages uses `MachineServer` as its server. Trials of transactions and subscriptions use `TrialMachine` as
their cluster, whose only node is a `MachineServer`. Several trials may share one machine: it is killed and started when
all of them have requested it.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from millstream.cli.local_process import is_free
from millstream.core.errors import MillstreamError
from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.server import READY_S_MAX, Server, ServerFailed
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialNode, TrialSingleNode

CORES = (1, 2, 3, 4)
VICTIMS = ("a broker", "the supervisor", "all processes")
CLEAN_STOP_SHARE = 0.2
"""The share of starts after a kill that are followed by a clean stop and a start with another number of cores."""
_BASE_PORTS = range(20_000, 30_000)
_POLL_S = 0.05
_BARRIER_S_MAX = 400.0
"""How long one trial waits for the others: longer than each may take to recover from a kill."""


class MachineServer(TrialNode):
    """A machine whose `kill` draws its victim: one broker, the supervisor, or all processes."""

    def __init__(
        self, folder: Path, *, seed: int, cores: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(1, folder, RelayNetwork(1), {**(settings or {}), "cores": cores})
        self._random = random.Random(seed)
        base = next(
            base
            for base in self._random.sample(_BASE_PORTS, len(_BASE_PORTS))
            if all(is_free("127.0.0.1", base + number) for number in range(max(CORES)))
        )
        self.kafka = f"127.0.0.1:{base}"
        self._base = base
        self._broker_is_back = True
        self.last_kill = ""
        self.kills = 0
        self.clean_stops = 0
        self.share(1)

    def share(self, trials: int) -> None:
        """Let this many trials, each in its own thread, use the machine; each calls `kill` and `start` in turn."""
        self._killing = threading.Barrier(trials, self._kill, _BARRIER_S_MAX)
        self._starting = threading.Barrier(trials, self._start, _BARRIER_S_MAX)

    def abandon(self) -> None:
        """Wake the other waiting trials, because one of them has failed."""
        self._killing.abort()
        self._starting.abort()

    def command(self) -> Sequence[str]:
        """Return the command line of a machine, whose processes all use the system's clock."""
        return Server.command(self)

    @property
    def kafka_addresses(self) -> list[str]:
        """Return where each broker process listens."""
        return [f"127.0.0.1:{self._base + number}" for number in range(self.cores)]

    @property
    def cores(self) -> int:
        """Return how many broker processes it runs."""
        return int(str(self.settings["cores"]))

    def kill(self) -> None:
        """Kill something with SIGKILL; `start` follows."""
        _wait_for_others(self._killing)

    def start(self) -> Self:
        """Start the machine if it is down, and wait until a killed broker is back."""
        _wait_for_others(self._starting)
        return self

    def stop(self) -> int:
        """Stop cleanly; the next start has another number of cores."""
        self._broker_is_back = True
        code = super().stop()
        self.settings["cores"] = self._random.choice(CORES)
        return code

    def end(self) -> None:
        """Kill the supervisor, and with it everything."""
        self._broker_is_back = True
        super().end()

    def dump_stacks(self) -> None:
        """Do nothing: the processes of a machine would end on the signal that dumps stacks."""

    def _kill(self) -> None:
        if not self.is_running():
            self.end()
            return
        self.kills += 1
        brokers = [child for child in psutil.Process(self.pid).children() if _is_broker(child)]
        self.last_kill = self._random.choice(VICTIMS) if brokers else "the node"
        if self.last_kill == "a broker":
            victim = self._random.choice(brokers)
            victim.kill()
            victim.wait(READY_S_MAX)
            self._broker_is_back = False
            return
        if self.last_kill == "all processes":
            for broker in brokers:
                broker.send_signal(signal.SIGSTOP)
            os.kill(self.pid, signal.SIGKILL)
            for broker in brokers:
                broker.kill()
        self.end()
        self.settings["cores"] = self._random.choice(CORES)

    def _start(self) -> None:
        if self.is_running():
            self._await_broker()
        else:
            super().start()
        if self.kills and self._random.random() < CLEAN_STOP_SHARE:
            code = self.stop()
            if code:
                raise ServerFailed(f"stopped with exit code {code}; the log ends with:\n{self.log_tail()}")
            self.clean_stops += 1
            super().start()

    def _await_broker(self) -> None:
        started = time.monotonic()
        while not all(self._responds(self._base + number) for number in range(self.cores)):
            if time.monotonic() - started > READY_S_MAX:
                raise ServerFailed(f"a killed broker is not back; the log ends with:\n{self.log_tail()}")
            time.sleep(_POLL_S)
        if not self._broker_is_back:
            self.start_s = time.monotonic() - started
            self._broker_is_back = True

    @staticmethod
    def _responds(port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            return False


def _wait_for_others(barrier: threading.Barrier) -> None:
    try:
        barrier.wait()
    except threading.BrokenBarrierError:
        raise TrialFailed("another trial on this machine failed, or did not get this far in time") from None


def _is_broker(child: psutil.Process) -> bool:
    try:
        return "millstream.cli.machine" in child.cmdline()
    except psutil.NoSuchProcess:
        return False


class TrialMachine(TrialSingleNode):
    """A machine with several broker processes, used as the cluster of a trial."""

    def __init__(self, folder: Path, *, seed: int, settings: Mapping[str, object]) -> None:
        super().__init__(folder, settings=settings)
        self.server = MachineServer(folder, seed=seed, settings=settings)

    @property
    def brokers_max(self) -> int:
        """Return from how many brokers clients may fetch."""
        return max(CORES)

    def start(self, nodes: Iterable[int] | None = None) -> None:
        """Start the machine, or wait until a killed broker is back."""
        self.server.start()

    def unhealthy_reason(self) -> str:
        """Return why not all processes respond and know each other, or which partitions have no leader."""
        for address in self.server.kafka_addresses:
            try:
                found = self.run_request(lambda client: client.metadata(), address)
            except (MillstreamError, OSError, TimeoutError) as error:
                return f"{address} gives no response: {error!r}"
            if len(found.nodes) < self.server.cores:
                return f"{address} knows only {len(found.nodes)} of {self.server.cores} brokers"
            leaderless = [
                f"{name}-{partition.partition}"
                for name, topic in found.topics.items()
                for partition in topic.partitions.values()
                if partition.leader_id < 0
            ]
            if leaderless:
                return f"{address}: no leader for {', '.join(leaderless[:5])}"
        return ""

    def _start(self) -> None:
        self.nodes[1] = self.server
        self._stack.callback(self.server.end)
        self.start()
