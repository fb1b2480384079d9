"""The network of a trial's cluster, whose links can be cut: relays without special rights, namespaces as root.

Both silently hold back data, as a network that loses packets does. Clients of the trial reach every running node,
whichever links are cut.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from millstream.cli.local_process import ReservedPort
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.link_relay import Direction, LinkRelay, RelayThread

ETCD = 0
"""The number of the coordination store; nodes are numbered from 1."""

_KAFKA_PORT, _HTTP_PORT = 9092, 8080
_ETCD_HOST, _OWN_HOST = 250, 254
_UNUSED_MAC = "02:00:00:00:00:01"
_PREFIX = "mst"


class Network(Protocol):
    """The links between nodes, and to etcd."""

    kind: str

    def __enter__(self) -> Self:
        """Set up the network."""

    def __exit__(self, *exception: object) -> None:
        """Remove the network, with everything that was set up for it."""

    def etcd(self) -> EtcdServer:
        """Return an etcd that the nodes can reach; it is not started yet."""

    def connect(self, etcd: EtcdServer, catalog: str) -> None:
        """Make a running etcd and a catalog on this machine reachable for the nodes."""

    def settings(self, node: int) -> Mapping[str, object]:
        """Return the listeners of a node and the addresses of the stores."""

    def addresses(self, node: int) -> tuple[str, str]:
        """Return the Kafka and HTTP listeners of a node."""

    def bootstrap(self) -> str:
        """The addresses of all nodes for clients."""

    def command(self, node: int, command: Sequence[str]) -> Sequence[str]:
        """Return a command line that runs a command where a node runs."""

    def cut(self, one: int, other: int, *, one_way: bool = False) -> None:
        """Drop everything between two nodes, or a node and `ETCD`; one way: only what the first sends."""

    def heal(self, one: int, other: int) -> None:
        """Heal every cut."""


class RelayNetwork:
    """Every link is a relay of this process."""

    kind = "relays"

    def __init__(self, nodes: int) -> None:
        self._nodes = range(1, nodes + 1)
        self._stack = ExitStack()
        self._thread = RelayThread()
        self._held = {node: (ReservedPort(), ReservedPort()) for node in self._nodes}
        self._addresses = {node: (kafka.address, http.address) for node, (kafka, http) in self._held.items()}
        self._to_node: dict[int, LinkRelay] = {}
        self._to_etcd: dict[int, LinkRelay] = {}
        self._catalog = ""

    def __enter__(self) -> Self:
        self._stack.enter_context(self._thread)
        for node, (kafka, _) in self._addresses.items():
            self._to_node[node] = self._relay(kafka, named=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def etcd(self) -> EtcdServer:
        """Return an etcd on a free port."""
        return EtcdServer()

    def connect(self, etcd: EtcdServer, catalog: str) -> None:
        """Create one relay to etcd for each node; the nodes reach the catalog directly."""
        self._catalog = catalog
        for node in self._nodes:
            self._to_etcd[node] = self._relay(f"127.0.0.1:{etcd.port}")

    def settings(self, node: int) -> Mapping[str, object]:
        """Advertise the address of the relay."""
        etcd = f"http://{self._to_etcd[node].address}"
        return {"advertise": self._to_node[node].address, "etcd": etcd, "catalog": self._catalog}

    def addresses(self, node: int) -> tuple[str, str]:
        return self._addresses[node]

    def bootstrap(self) -> str:
        """Clients go through the relays as well."""
        return ",".join(relay.address for relay in self._to_node.values())

    def command(self, node: int, command: Sequence[str]) -> Sequence[str]:
        return command

    def cut(self, one: int, other: int, *, one_way: bool = False) -> None:
        """Hold data in both directions, or only the data of the first side."""
        for relay, name, direction in self._links(one, other):
            relay.cut(name, [direction] if one_way else Direction)

    def heal(self, one: int, other: int) -> None:
        for relay, name, _ in self._links(one, other):
            relay.heal(name)

    def _links(self, one: int, other: int) -> list[tuple[LinkRelay, str, Direction]]:
        """Return the relays between two places, and in which direction the data of the first place passes each."""
        if one == ETCD:
            return [(self._to_etcd[other], "", Direction.RESPONSES)]
        if other == ETCD:
            return [(self._to_etcd[one], "", Direction.REQUESTS)]
        return [
            (self._to_node[one], f"replica-{other}", Direction.RESPONSES),
            (self._to_node[other], f"replica-{one}", Direction.REQUESTS),
        ]

    def _relay(self, target: str, *, named: bool = False) -> LinkRelay:
        relay = LinkRelay(self._thread, target, named=named)
        self._stack.callback(relay.close)
        return relay


class NamespaceNetwork:
    """Every node and etcd in its own network namespace, joined by a bridge. Needs root.

    A link is cut by giving each side a wrong hardware address of the other, so that packets are lost.
    """

    kind = "network namespaces"

    def __init__(self, nodes: int) -> None:
        self._nodes = range(1, nodes + 1)
        self._stack = ExitStack()
        self._thread = RelayThread()
        self._name = f"{_PREFIX}{os.getpid()}"
        self._subnet = ""
        self._catalog = ""
        self._etcd_url = ""

    def __enter__(self) -> Self:
        remove_leftovers()
        self._stack.enter_context(self._thread)
        try:
            self._create()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def etcd(self) -> EtcdServer:
        return _NamespacedEtcd(self._host(ETCD), self._in(ETCD))

    def connect(self, etcd: EtcdServer, catalog: str) -> None:
        """Relay the catalog, which runs on this machine's loopback, into every namespace."""
        self._etcd_url = etcd.url
        login, _, rest = catalog.rpartition("@")
        local, _, database = rest.partition("/")
        relay = LinkRelay(self._thread, local, host=f"{self._subnet}.{_OWN_HOST}")
        self._stack.callback(relay.close)
        self._catalog = f"{login}@{relay.address}/{database}"

    def settings(self, node: int) -> Mapping[str, object]:
        """Every node has the same ports, on an address that only the other namespaces of the trial reach."""
        return {"advertise": "", "etcd": self._etcd_url, "catalog": self._catalog, "insecure": "true"}

    def addresses(self, node: int) -> tuple[str, str]:
        return f"{self._host(node)}:{_KAFKA_PORT}", f"{self._host(node)}:{_HTTP_PORT}"

    def bootstrap(self) -> str:
        return ",".join(self.addresses(node)[0] for node in self._nodes)

    def command(self, node: int, command: Sequence[str]) -> Sequence[str]:
        """Run the command in the node's namespace, in the same process."""
        return [*self._in(node), *command]

    def cut(self, one: int, other: int, *, one_way: bool = False) -> None:
        """Drop the packets of both sides, or of the first one."""
        for here, there in ((one, other), (other, one))[: 1 if one_way else 2]:
            entry = ["neigh", "replace", self._host(there), "lladdr", _UNUSED_MAC, "dev", "eth0", "nud", "permanent"]
            run_ip("-n", self._space(here), *entry)

    def heal(self, one: int, other: int) -> None:
        """Let each side look up the true address again."""
        for here, there in ((one, other), (other, one)):
            run_ip("-n", self._space(here), "neigh", "flush", "to", self._host(there), "dev", "eth0", "nud", "all")

    def _create(self) -> None:
        run_ip("link", "add", self._name, "type", "bridge")
        self._stack.callback(run_ip, "link", "del", self._name)
        # A range that is reserved for network benchmarks, so that no machine uses it.
        self._subnet = _free_subnet()
        run_ip("addr", "add", f"{self._subnet}.{_OWN_HOST}/24", "dev", self._name)
        run_ip("link", "set", self._name, "up")
        for place in (ETCD, *self._nodes):
            space, veth = self._space(place), f"{self._name}-{place}"
            run_ip("netns", "add", space)
            self._stack.callback(run_ip, "netns", "del", space)
            run_ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            run_ip("link", "set", veth, "master", self._name, "up")
            run_ip("-n", space, "addr", "add", f"{self._host(place)}/24", "dev", "eth0")
            run_ip("-n", space, "link", "set", "eth0", "up")
            run_ip("-n", space, "link", "set", "lo", "up")

    def _space(self, place: int) -> str:
        return f"{self._name}-{place}"

    def _in(self, place: int) -> list[str]:
        return [_ip(), "netns", "exec", self._space(place)]

    def _host(self, place: int) -> str:
        return f"{self._subnet}.{place or _ETCD_HOST}"


class _NamespacedEtcd(EtcdServer):
    """An etcd that listens inside its namespace."""

    def __init__(self, host: str, prefix: Sequence[str]) -> None:
        super().__init__()
        self._host = host
        self._prefix = prefix
        self.port = 2379

    @property
    def url(self) -> str:
        """The address of the node for clients."""
        return f"http://{self._host}:{self.port}"

    def _command(self) -> list[str]:
        return [*self._prefix, *super()._command()]


def can_create_namespaces() -> bool:
    """Whether this process can create network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        run_ip("netns", "add", name)
        run_ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


def remove_leftovers() -> None:
    """Remove the namespaces and bridges of trials that were killed."""
    for line in run_ip("netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        if _is_left_over(name.partition("-")[0]):
            run_ip("netns", "del", name)
    for line in run_ip("-o", "link", "show", "type", "bridge").splitlines():
        name = line.split(":")[1].strip()
        if _is_left_over(name):
            run_ip("link", "del", name)


def _is_left_over(name: str) -> bool:
    number = name.removeprefix(_PREFIX)
    return name.startswith(_PREFIX) and number.isdigit() and not Path("/proc", number).exists()


def _free_subnet() -> str:
    taken = run_ip("-o", "addr", "show")
    start = os.getpid()
    for number in range(256):
        subnet = f"198.18.{(start + number) % 256}"
        if f" {subnet}." not in taken:
            return subnet
    raise OSError("every subnet of 198.18.0.0/16 is in use")


def run_ip(*arguments: str) -> str:
    """Run `ip` and return its output; raise `CalledProcessError` if it fails."""
    return subprocess.run([_ip(), *arguments], check=True, capture_output=True, text=True).stdout


def _ip() -> str:
    return shutil.which("ip") or "ip"
