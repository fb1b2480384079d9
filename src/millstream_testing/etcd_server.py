"""A real etcd for tests, as `cluster up` starts it, with its data in a temporary folder."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from millstream.cli.cluster_up import LocalEtcd
from millstream.cli.local_process import LocalProcess, ReservedPort
from millstream_testing.security import Certificates


class EtcdServer(LocalEtcd):
    """An etcd on a free port; it does not sync its files, since no test cuts the power."""

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="millstream-etcd-")), durable=False)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        shutil.rmtree(self.folder, ignore_errors=True)


class EncryptedEtcdServer(EtcdServer):
    """An etcd that accepts only TLS clients with a certificate of its authority."""

    def __init__(self) -> None:
        super().__init__()
        made = Certificates(self.folder)
        self.certificates = made.folder
        self.ca, self.certificate, self.key = map(str, (made.ca, made.node, made.node_key))


class EtcdGroupMember(LocalEtcd):
    """One of several members. It is healthy only when a majority is, so starting it does not wait for that."""

    def __init__(self, group: EtcdGroup, folder: Path) -> None:
        held = ReservedPort()
        super().__init__(folder, port=held.number, durable=False)
        self._reserved_port = held
        self._group = group
        self.name = folder.name
        self.peer = f"http://{self._peer.address}"

    def flags(self) -> dict[str, object]:
        return super().flags() | {
            "name": self.name,
            "initial-cluster": ",".join(f"{member.name}={member.peer}" for member in self._group),
        }

    def wait_until_healthy(self) -> None:
        """Wait until it has a leader, which may be itself."""
        if self.process is not None:
            super()._wait_until_ready(self.process)

    @property
    def leads(self) -> bool:
        request = urllib.request.Request(f"{self.url}/v3/maintenance/status", data=b"{}")
        with urllib.request.urlopen(request, timeout=60) as response:
            status = json.loads(response.read())
        return bool(status["leader"] == status["header"]["member_id"])

    def _wait_until_ready(self, process: LocalProcess) -> None:
        """Do nothing: see `wait_until_healthy`."""


class EtcdGroup:
    """The members. Use it as a context manager."""

    def __init__(self, members: int = 3) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="millstream-etcd-"))
        self.members: list[EtcdGroupMember] = []
        for number in range(members):
            self.members.append(EtcdGroupMember(self, self._folder / f"member-{number}"))

    @property
    def url(self) -> str:
        """Return the addresses of all members for clients."""
        return ",".join(member.url for member in self.members)

    def __iter__(self) -> Iterator[EtcdGroupMember]:
        return iter(self.members)

    def leader(self) -> EtcdGroupMember:
        """Return the leader, if there is one."""
        deadline = time.monotonic() + LocalEtcd.ready_s_max
        while True:
            for member in self.members:
                if member.leads:
                    return member
            if time.monotonic() > deadline:
                raise TimeoutError("no member of etcd leads")

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start()
            for member in self.members:
                member.wait_until_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for member in self.members:
            member.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
