"""A real etcd for tests, as `cluster up` starts it, with its data in a temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from millstream.cli.cluster_up import LocalEtcd
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
