"""A real etcd for tests, as `cluster up` starts it, with its data in a folder that goes with it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from millstream.cli.cluster_up import LocalEtcd
from millstream.cli.reserved_port import ReservedPort


class EtcdServer(LocalEtcd):
    """An etcd on a free port; it does not sync its files, since no test cuts the power."""

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="millstream-etcd-")), durable=False)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        shutil.rmtree(self.folder, ignore_errors=True)


class EncryptedEtcdServer(EtcdServer):
    """An etcd that speaks TLS only, and only with clients that show a certificate of its authority."""

    def __init__(self) -> None:
        super().__init__()
        self._health = ReservedPort()
        self.ca = self._file("ca.pem")
        self.certificate = self._file("node.pem")
        self.key = self._file("node.key")
        _make_certificates(self.folder)

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def health_url(self) -> str:
        """Where it says, without encryption, whether it is well."""
        return f"http://{self._health.address}/health"

    def flags(self) -> dict[str, object]:
        """How it is to run."""
        return super().flags() | {
            "cert-file": self.certificate,
            "key-file": self.key,
            "trusted-ca-file": self.ca,
            "client-cert-auth": "true",
            "listen-metrics-urls": f"http://{self._health.address}",
        }

    def _file(self, name: str) -> str:
        return str(self.folder / name)


def _make_certificates(folder: Path) -> None:
    """An authority and one certificate that etcd and its clients both show."""
    authority = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    _openssl(folder, "req", *authority, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    request = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=node"]
    _openssl(folder, "req", *request, "-keyout", "node.key", "-out", "node.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signing = ["-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    _openssl(folder, "x509", *signing, "-extfile", "names", "-out", "node.pem")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
