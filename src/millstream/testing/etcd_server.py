"""A real etcd for tests, as `cluster up` starts it, with its data in a folder that goes with it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from millstream.cli.local_etcd import LocalEtcd


class EtcdServer(LocalEtcd):
    """An etcd on a free port; it does not sync its files, since no test cuts the power."""

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="millstream-etcd-")), durable=False)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        shutil.rmtree(self.folder, ignore_errors=True)
