"""TLS of the listeners and between nodes: contexts that follow their files, and the principals of certificates.

Files are checked when a client connects, so a renewed certificate is used from the next connection on, and connections
that are open continue. Files that do not fit together are refused, and the last ones that did stay in use.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import re2
from cryptography import x509

from millstream.core.errors import AuthenticationFailed, InvalidSetting
from millstream.core.private_file import warn_if_exposed
from millstream.protocol.wire.credentials import tls_file_problem

_logger = logging.getLogger(__name__)

_RULE: Final = re2.compile(r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?))\s*(?:,|\n|$)")

_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
"""The types of attributes that RFC 2253 names."""
_TEXT_TAGS: Final = frozenset({0x0C, 0x13, 0x14, 0x16, 0x1E})
"""UTF8String, PrintableString, T61String, IA5String and BMPString, all of which Java reads as UTF-8."""
_ESCAPES: Final = str.maketrans({"\0": "\\00", **{character: f"\\{character}" for character in ',=+<>#;"\\'}})
_ESCAPED_AT_ENDS: Final = " \r"
"""The characters that are escaped at the beginning and the end of a value."""


class DirectConnection(ssl.SSLObject):
    """A TLS connection that reads and writes without a Python wrapper around each call.

    OpenSSL decrypts one record of TLS per call, and producers send a record or two per message.
    """

    _outgoing: ssl.MemoryBIO

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **named: Any) -> DirectConnection:
        made: DirectConnection = super()._create(incoming, outgoing, **named)  # type: ignore[misc]
        inner = made._sslobj  # type: ignore[attr-defined]
        made.read, made.write, made.pending = inner.read, inner.write, inner.pending  # type: ignore[method-assign]
        made._outgoing = outgoing
        return made

    def do_handshake(self) -> None:
        """Continue the handshake; the error of one that failed has an `alert`, which the transport would discard."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.alert = self._outgoing.read()  # type: ignore[attr-defined]
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files with a listener's certificate, its key and the authority of its clients."""

    certificate: str
    key: str
    client_ca: str = ""

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes with the files."""
        statuses = (os.stat(path) for path in (self.certificate, self.key, self.client_ca) if path)
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in statuses)

    def load(self, *, is_server: bool) -> ssl.SSLContext:
        """Create a context from the current files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslobject_class = DirectConnection
        context.load_cert_chain(self.certificate, self.key)
        # A session resumed by a ticket would skip the check of a client's certificate, which may be withdrawn.
        context.options |= ssl.OP_NO_TICKET
        if is_server:
            context.num_tickets = 0
        if self.client_ca:
            context.load_verify_locations(self.client_ca)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_OPTIONAL if is_server else ssl.CERT_REQUIRED
        return context


class ReloadingTls:
    """Server contexts that follow their files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = self._refused = ()  # type: tuple[tuple[int, int, int], ...]
        try:
            self._stamp = files.stamp()
            self._current = self._load()
        except OSError as error:
            named = [path for path in (files.certificate, files.client_ca, files.key) if path]
            raise InvalidSetting(f"TLS cannot be set up: {tls_file_problem(error, named)}") from error
        warn_if_exposed(files.key, flag="tls-key")

    @property
    def context(self) -> ssl.SSLContext:
        """The context of the next connection.

        With TLS 1.2, a client may resume a session of the same context without showing its certificate again. A context
        is therefore replaced when its files change: otherwise certificates of a withdrawn authority would remain valid.
        """
        self._reload_if_changed()
        return self._current

    def _load(self) -> ssl.SSLContext:
        context = self._files.load(is_server=True)
        context.sni_callback = self._choose
        return context

    def _choose(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called at the beginning of each handshake, whether the client names a server or not."""
        self._reload_if_changed()
        connection.context = self._current

    def _reload_if_changed(self) -> None:
        try:
            stamp = self._files.stamp()
            if stamp in (self._stamp, self._refused):
                return
            self._refused = stamp
            self._current = self._load()
        except (OSError, ssl.SSLError) as error:
            _logger.warning(
                "a changed certificate cannot be used; the one before stays in use",
                extra={"certificate": self._files.certificate, "error": str(error)},
            )
            return
        self._stamp = stamp
        warn_if_exposed(self._files.key, flag="tls-key")
        _logger.info("certificate changed", extra={"certificate": self._files.certificate})


def uris_of(certificate: x509.Certificate) -> Sequence[str]:
    """Return the URIs among the alternative names of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def peer_certificate(connection: ssl.SSLObject | None) -> x509.Certificate | None:
    """Return the certificate that the other end has shown, which the handshake has verified."""
    encoded = None if connection is None else connection.getpeercert(binary_form=True)
    if not encoded:
        return None
    try:
        return x509.load_der_x509_certificate(encoded)
    except ValueError as error:
        raise AuthenticationFailed(f"the client's certificate cannot be read: {error}") from error


def subject_of(certificate: x509.Certificate) -> str:
    """Return the subject as Java's `X500Principal.getName()` prints it, so that Kafka's access rules match it."""
    try:
        names = certificate.subject.rdns
    except ValueError as error:
        raise AuthenticationFailed(f"the name in the client's certificate cannot be read: {error}") from error
    return ",".join("+".join(map(_format_attribute, name)) for name in reversed(names))


def _format_attribute(attribute: x509.NameAttribute[Any]) -> str:
    # A name of one attribute, of one pair: its type and its value.
    encoded = x509.Name([attribute]).public_bytes()
    for _ in range(3):
        encoded, _rest = _split_der(encoded)
    _type, value = _split_der(encoded)
    keyword = _KEYWORDS.get(attribute.oid.dotted_string)
    in_hex = f"{keyword or attribute.oid.dotted_string}=#{value.hex()}"
    if keyword is None or value[0] not in _TEXT_TAGS:
        return in_hex
    try:
        text = _split_der(value)[0].decode().translate(_ESCAPES)
    except UnicodeDecodeError:
        # Java replaces what it cannot decode, so that different names would become the same principal.
        return in_hex
    inner = text.strip(_ESCAPED_AT_ENDS)
    before, after = text[: len(text) - len(text.lstrip(_ESCAPED_AT_ENDS))], text.lstrip(_ESCAPED_AT_ENDS)[len(inner) :]
    return "".join(
        [keyword, "=", *(f"\\{character}" for character in before), inner, *(f"\\{character}" for character in after)]
    )


def _split_der(encoded: bytes) -> tuple[bytes, bytes]:
    """Return the content of the first value, and the remaining bytes."""
    size, start = encoded[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(encoded[2:start], "big")
    return encoded[start : start + size], encoded[start + size :]


class _Rule:
    """A rule of `ssl.principal.mapping.rules`."""

    def __init__(self, pattern: str, replacement: str, case: str) -> None:
        try:
            self._pattern = re2.compile(pattern.replace("\\/", "/"))
        except re2.error as error:
            raise InvalidSetting(f"the rule for {pattern!r} is not a regular expression: {error}") from error
        # Java writes a group as $1, and a plain character behind a backslash.
        self._replacement = re2.sub(r"\$(\d)", r"\\\1", replacement.replace("\\/", "/"))
        self._case = case

    def map(self, name: str) -> str | None:
        """Return the name that a distinguished name becomes; None if it does not match as a whole."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        mapped = str(match.expand(self._replacement))
        if self._case == "L":
            return mapped.lower()
        return mapped.upper() if self._case == "U" else mapped


class PrincipalRules:
    """Maps the name in a certificate to a principal's, in the syntax of Kafka's `ssl.principal.mapping.rules`."""

    def __init__(self, text: str) -> None:
        self._rules: list[_Rule | None] = []
        at = 0
        text = text.strip() or "DEFAULT"
        while at < len(text):
            match = _RULE.match(text, at)
            if match is None or match.end() == at:
                raise InvalidSetting(
                    "tls-principal-rules takes DEFAULT and RULE:pattern/replacement/[LU], separated by commas, "
                    f"not {text[at:]!r}"
                )
            default, pattern, replacement, case = match.groups()
            self._rules.append(None if default else _Rule(pattern, replacement, case or ""))
            at = match.end()

    def principal(self, certificate: x509.Certificate) -> str:
        name = subject_of(certificate)
        for rule in self._rules:
            mapped = name if rule is None else rule.map(name)
            if mapped:
                return f"User:{mapped}"
        raise AuthenticationFailed(f"no rule of tls-principal-rules maps the certificate of {name!r}")
