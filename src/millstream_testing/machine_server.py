"""A real `millstream serve --cores N` for trials: any of its processes may be killed, and N changes between starts."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Self

import psutil

from millstream.cli.local_process import is_free
from millstream_testing.server import READY_S_MAX, Server, ServerFailed

CORES = (1, 2, 3, 4)
_BASES = range(20_000, 30_000)
_LOOK_S = 0.05


class MachineServer(Server):
    """A machine whose `kill` picks its victims: one broker, the supervisor, or all processes."""

    def __init__(self, data: Path, *, seed: int, cores: int = 3) -> None:
        super().__init__(data, settings={"cores": cores})
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

    @property
    def cores(self) -> int:
        """How many broker processes it runs."""
        return int(str(self.settings["cores"]))

    def kill(self) -> None:
        """Kill something, as kill -9 does; `start` follows."""
        if self._process is None:
            return
        brokers = [
            child for child in psutil.Process(self.pid).children() if "millstream.cli.machine" in child.cmdline()
        ]
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

    def end(self) -> None:
        """Kill the supervisor, and so everything."""
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

    @staticmethod
    def _answers(port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            return False
