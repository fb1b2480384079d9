"""A real `millstream serve --cores N` for trials: any of its processes may be killed, and N changes between starts.

`MachineServer` takes the place of a server or of a trial's node, and `TrialMachine` that of a trial's cluster, so that
the trials of messages, transactions and subscriptions run on a machine as they are.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from millstream.cli.local_process import is_free
from millstream.core.errors import MillstreamError
from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.server import READY_S_MAX, Server, ServerFailed
from millstream_testing.trial_cluster import TrialNode
from millstream_testing.trial_solo import TrialSolo

CORES = (1, 2, 3, 4)
_BASES = range(20_000, 30_000)
_LOOK_S = 0.05


class MachineServer(TrialNode):
    """A machine whose `kill` picks its victims: one broker, the supervisor, or all processes."""

    def __init__(
        self, folder: Path, *, seed: int, cores: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(1, folder, RelayNetwork(1), {**(settings or {}), "cores": cores})
        self._random = random.Random(seed)
        base = next(
            base
            for base in self._random.sample(_BASES, len(_BASES))
            if all(is_free("127.0.0.1", base + number) for number in range(max(CORES)))
        )
        self.kafka = f"127.0.0.1:{base}"
        self._base = base
        self._broker_is_back = True
        self.last_kill = ""

    def command(self) -> Sequence[str]:
        """The command line of a machine, whose processes all have the machine's clock."""
        return Server.command(self)

    @property
    def kafka_addresses(self) -> list[str]:
        """Where each broker process listens."""
        return [f"127.0.0.1:{self._base + number}" for number in range(self.cores)]

    @property
    def cores(self) -> int:
        """How many broker processes it runs."""
        return int(str(self.settings["cores"]))

    def kill(self) -> None:
        """Kill something, as kill -9 does; `start` follows."""
        if not self.is_running():
            self.end()
            return
        brokers = [child for child in psutil.Process(self.pid).children() if _is_broker(child)]
        self.last_kill = self._random.choice(("a broker", "the supervisor", "all processes")) if brokers else "the node"
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

    def stop(self) -> int:
        """Stop cleanly; the next start has another number of cores."""
        self._broker_is_back = True
        code = super().stop()
        self.settings["cores"] = self._random.choice(CORES)
        return code

    def end(self) -> None:
        """Kill the supervisor, and so everything."""
        self._broker_is_back = True
        super().kill()

    def start(self) -> Self:
        """Start the machine, or wait until a killed broker is back."""
        if self._broker_is_back:
            return super().start()
        began = time.monotonic()
        while not all(self._answers(self._base + number) for number in range(self.cores)):
            if time.monotonic() - began > READY_S_MAX:
                raise ServerFailed(f"a killed broker is not back; the log ends with:\n{self.log_tail()}")
            time.sleep(_LOOK_S)
        self.start_s = time.monotonic() - began
        self._broker_is_back = True
        return self

    def is_whole(self) -> bool:
        """Whether it runs and no broker was killed since it was waited for."""
        return self.is_running() and self._broker_is_back

    @staticmethod
    def _answers(port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            return False


def _is_broker(child: psutil.Process) -> bool:
    try:
        return "millstream.cli.machine" in child.cmdline()
    except psutil.NoSuchProcess:
        return False


class TrialMachine(TrialSolo):
    """A machine with several broker processes, with the face of a trial's cluster."""

    def __init__(self, folder: Path, *, seed: int, settings: Mapping[str, object]) -> None:
        super().__init__(folder, settings=settings)
        self.server = MachineServer(folder, seed=seed, settings=settings)

    @property
    def brokers_max(self) -> int:
        """From how many brokers clients may fetch."""
        return max(CORES)

    def start(self, nodes: object = None) -> None:
        """Start the machine, or wait until a killed broker is back."""
        if not self.server.is_whole():
            self.server.start()

    def lacks(self) -> str:
        """What it lacks to be whole: processes that answer and know each other, and leaders."""
        for address in self.server.kafka_addresses:
            try:
                found = self.ask(lambda client: client.metadata(), address)
            except (MillstreamError, OSError, TimeoutError) as error:
                return f"{address} gives no answer: {error!r}"
            if len(found.nodes) < self.server.cores:
                return f"{address} knows only {len(found.nodes)} of {self.server.cores} brokers"
            leaderless = [
                f"{name}-{one.partition}"
                for name, topic in found.topics.items()
                for one in topic.partitions.values()
                if one.leader_id < 0
            ]
            if leaderless:
                return f"{address}: no leader for {', '.join(leaderless[:5])}"
        return ""

    def _start(self) -> None:
        self.nodes[1] = self.server
        self._stack.callback(self.server.end)
        self.start()
