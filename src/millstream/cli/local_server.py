"""A server of this machine with its data in a folder, for trying out and for tests: what etcd and PostgreSQL share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from millstream.cli.held_port import HeldPort
from millstream.cli.local_process import LocalProcess

STOP_S_MAX = 15.0
_PROBE_S = 0.05


class LocalServer(ABC):
    """One server process; started again on the same folder it has what it had, on the same port."""

    ready_s_max = 30.0

    def __init__(self, folder: Path, *, port: int = 0, durable: bool = True, keep: Sequence[int] = ()) -> None:
        """`keep` are file descriptors that the server holds open; one that is not `durable` does not sync its files."""
        self.folder = folder.absolute()
        self.port = port
        self._held: HeldPort | None = None
        self.process: LocalProcess | None = None
        self._durable = durable
        self._keep = keep

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients find it."""

    def start(self) -> Self:
        """Start it, on new data if there are none, and wait until it answers."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.port:
            self._held = HeldPort()
            self.port = self._held.number
        self._prepare()
        self.process = self._process().start()
        try:
            self._wait_until_ready(self.process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it cleanly."""
        if self.process is not None:
            self.process.stop(within_s=STOP_S_MAX)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _prepare(self) -> None:  # noqa: B027 - not every server has something to lay out
        """Lay out the folder."""

    @abstractmethod
    def _process(self) -> LocalProcess:
        """The server, not started yet."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether it takes clients."""

    def _wait_until_ready(self, process: LocalProcess) -> None:
        deadline = time.monotonic() + self.ready_s_max
        while not self._is_ready():
            process.check_runs()
            if time.monotonic() > deadline:
                raise process.failed(f"gave no answer within {self.ready_s_max:g} s")
            time.sleep(_PROBE_S)
