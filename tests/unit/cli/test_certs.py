"""`millstream certs`: an authority that is created once, and the node and client certificates that it signs."""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509

from millstream.cli.app import call
from millstream.cli.exit_code import ExitCode


def names_in(path: Path) -> x509.SubjectAlternativeName:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def is_signed_by(path: Path, authority: Path) -> bool:
    signer = x509.load_pem_x509_certificate(authority.read_bytes())
    try:
        x509.load_pem_x509_certificate(path.read_bytes()).verify_directly_issued_by(signer)
    except ValueError:
        return False
    return True


def test_a_cluster_and_its_clients_share_one_authority(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    hosts = [
        "--host",
        "a.example",
        "--host",
        "10.0.0.7",
        "--host",
        "::1",
        "--host",
        "[fe80::1]",
        "--host",
        "*.b.example",
    ]
    assert call(["certs", "init", "--dir", str(folder), *hosts, "--cluster", "prod"]) == 0
    authority = (folder / "ca.pem").read_bytes()
    assert call(["certs", "init", "--dir", str(folder), "--node-id", "2", "--cluster", "prod"]) == 0
    for client in ("alice", "carol", "nodejs-app", "cache.1"):
        assert call(["certs", "client", client, "--dir", str(folder)]) == 0
        assert is_signed_by(folder / f"{client}.pem", folder / "ca.pem")
    assert (folder / "ca.pem").read_bytes() == authority
    names = names_in(folder / "node.pem")
    assert names.get_values_for_type(x509.DNSName) == ["a.example", "*.b.example"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ip_address(address) for address in ("10.0.0.7", "::1", "fe80::1")
    ]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["millstream://prod/node/1"]
    assert names_in(folder / "node-2.pem").get_values_for_type(x509.DNSName) == ["localhost"]
    assert is_signed_by(folder / "node-2.pem", folder / "ca.pem")
    for key in folder.glob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600, key
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(folder.glob(".*"))
    ssl.create_default_context(cafile=folder / "ca.pem").load_cert_chain(folder / "node.pem", folder / "node.key")


def test_existing_files_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = ["certs", "init", "--dir", str(tmp_path)]
    assert call(init) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert call(init) == ExitCode.CONFLICT
    assert call(["certs", "client", "alice", "--dir", str(tmp_path)]) == 0
    assert call(["certs", "client", "alice", "--dir", str(tmp_path)]) == ExitCode.CONFLICT
    assert {path: path.read_bytes() for path in before} == before
    # An authority without its key.
    (tmp_path / "ca.key").unlink()
    assert call([*init, "--node-id", "2"]) == ExitCode.CONFLICT
    assert "ca.key" in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_bytes() == before[tmp_path / "ca.pem"]
    assert call(["certs", "client", "bob", "--dir", str(tmp_path)]) == ExitCode.NOT_FOUND
    # The key of another authority.
    assert call(["certs", "init", "--dir", str(tmp_path / "other")]) == 0
    (tmp_path / "other" / "ca.key").rename(tmp_path / "ca.key")
    assert call([*init, "--node-id", "2"]) == ExitCode.USAGE
    assert "not the key of ca.pem" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["broker:9092", "a b", "", "bücher.example", "https://a.example", "a/b", "-a"])
def test_an_invalid_host_is_refused(tmp_path: Path, host: str) -> None:
    assert call(["certs", "init", "--dir", str(tmp_path / "certs"), f"--host={host}"]) == ExitCode.USAGE
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("name", ["ca", "node", "node-2", ".hidden", "../alice", "a/b", "a b", ""])
def test_a_client_cannot_take_the_name_of_other_files(tmp_path: Path, name: str) -> None:
    assert call(["certs", "init", "--dir", str(tmp_path)]) == 0
    before = sorted(tmp_path.iterdir())
    assert call(["certs", "client", "--dir", str(tmp_path), "--", name]) == ExitCode.USAGE
    assert sorted(tmp_path.iterdir()) == before
