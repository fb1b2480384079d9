"""`millstream certs`: certificates to try TLS with."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import AsJson, Noun, flag
from millstream.cli.output import print_result
from millstream.core.ids import NodeId
from millstream.core.private_file import write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

app = Noun(help="Create certificates for tests and private networks.", no_args_is_help=True)

_CLIENT_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_OWN_FILES: Final = re.compile(r"ca|node(-\d+)?")
_HOST_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\.?")
_AUTHORITY_DAYS: Final = 3650
_CERTIFICATE_DAYS: Final = 825

Folder = Annotated[Path, flag("--dir", "DIR", "The folder for the files.")]


@app.command("init")
def init(
    dir: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A name or an address of the node; may be repeated."),
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="The name of the node's cluster.")
    ] = "millstream",
    node_id: Annotated[int, typer.Option("--node-id", min=0, help="The number of the node in its cluster.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Create a certificate for a node, and its authority if missing. Writes node.pem, node.key, ca.pem and ca.key.

    For node ids other than 1, the files are called node-ID.pem and node-ID.key. They are meant for tests and private
    networks; otherwise, have your own authority sign the certificates.
    """
    files = make_node_certificate(dir, host or ["localhost", "127.0.0.1", "::1"], cluster, NodeId(node_id))
    certificate, key = files["certificate"], files["key"]
    print_result(
        files,
        f"Created {certificate} and {key}, signed by {files['ca']}.\n"
        f"Try: millstream serve --tls-cert {certificate} --tls-key {key}",
        as_json=as_json,
    )


def make_node_certificate(folder: Path, hosts: list[str], cluster: str, node_id: NodeId) -> dict[str, str]:
    """Make the certificate of a node, and an authority if there is none yet; returns their files."""
    from millstream.protocol.wire.credentials import NodeName

    for host in hosts:
        _check_host(host)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stem = "node" if node_id == 1 else f"node-{node_id}"
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}.key"
    if certificate.exists() or key.exists():
        raise CommandFailed(f"{certificate} already exists; remove it first, or pass another --dir", ExitCode.CONFLICT)
    authority = _authority(folder / "ca.pem", folder / "ca.key")
    uri = NodeName(cluster=cluster, node_id=node_id).uri
    _issue(authority, f"node {node_id} of {cluster}", hosts, uri, certificate, key)
    return {"ca": str(folder / "ca.pem"), "certificate": str(certificate), "key": str(key)}


@app.command("client")
def client(
    name: Annotated[str, typer.Argument(help="The common name (CN) in the certificate.", show_default=False)],
    dir: Folder,
    as_json: AsJson = False,
) -> None:
    """Create a certificate for a client. Writes NAME.pem and NAME.key, signed by the authority in DIR."""
    if not _CLIENT_NAME.fullmatch(name) or _OWN_FILES.fullmatch(name):
        raise CommandFailed(
            f"{name!r} cannot be the name of a client's files; it takes letters, digits, '.', '_' and '-', and is not "
            "that of the authority or a node",
            ExitCode.USAGE,
        )
    certificate, key = dir / f"{name}.pem", dir / f"{name}.key"
    if not (dir / "ca.key").exists():
        raise CommandFailed(
            f"{dir} has no ca.key; create an authority with `millstream certs init`", ExitCode.NOT_FOUND
        )
    if certificate.exists() or key.exists():
        raise CommandFailed(f"{certificate} already exists; remove it first", ExitCode.CONFLICT)
    _issue(_authority(dir / "ca.pem", dir / "ca.key"), name, [], None, certificate, key)
    files = {"certificate": str(certificate), "key": str(key), "principal": f"User:CN={name}"}
    print_result(files, f"Created {certificate} and {key}; its principal is User:CN={name}.", as_json=as_json)


_Authority = tuple["x509.Certificate", "EllipticCurvePrivateKey"]


def _authority(certificate_file: Path, key_file: Path) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if key_file.exists() != certificate_file.exists():
        existing, lacking = (key_file, certificate_file) if key_file.exists() else (certificate_file, key_file)
        raise CommandFailed(
            f"{existing} exists without {lacking.name}, and is not replaced; put the other file next to it, or pass "
            "another --dir",
            ExitCode.CONFLICT,
        )
    if key_file.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            signer = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (ValueError, TypeError):
            raise CommandFailed(f"{key_file} and {certificate_file.name} cannot be read", ExitCode.USAGE) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or signer.public_key() != key.public_key():
            raise CommandFailed(f"{key_file} is not the key of {certificate_file.name}", ExitCode.USAGE)
        return signer, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Millstream trial authority")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair(certificate, key, certificate_file, key_file)
    return certificate, key


def _issue(
    authority: _Authority, common_name: str, hosts: list[str], uri: str | None, certificate_file: Path, key_file: Path
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer, signing_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [host_name(host) for host in hosts]
    if uri is not None:
        names.append(x509.UniformResourceIdentifier(uri))
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if uri is not None else [])]
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    builder = (
        _builder(subject, signer.subject, key, _CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    _write_pair(builder.sign(signing_key, hashes.SHA256()), key, certificate_file, key_file)


def host_name(host: str) -> x509.GeneralName:
    """Return the alternative name of a certificate for a name or an address."""
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _check_host(host: str) -> None:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        if len(host) > 253 or not _HOST_NAME.fullmatch(host):
            raise CommandFailed(
                f"--host {host!r} is neither a name nor an address; pass it without a port", ExitCode.USAGE
            ) from None


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of other machines may be a little behind.
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
    )


def _write_pair(
    certificate: x509.Certificate, key: EllipticCurvePrivateKey, certificate_file: Path, key_file: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(key_file, encoded)
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
