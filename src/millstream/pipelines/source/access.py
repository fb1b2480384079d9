"""How Spark's processes sign in at brokers.

The driver signs in with the credentials of the options or the environment: a password, a certificate or a token. Tasks
sign in with API tokens that the driver creates for them: valid for some hours, and only for the topics of their query.
The driver's credentials do not leave its machine: pickling them is an error.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.client.admin.security import create_token, revoke_token
from millstream.core.acl import EVERYONE, WILDCARD, Acl, Operation, PatternType, ResourceType
from millstream.core.credential import SCRAM_MECHANISMS
from millstream.core.errors import InvalidRequest, InvalidSetting, MillstreamError, NotAuthorized
from millstream.core.private_file import write_private
from millstream.core.tasks import within
from millstream.protocol.wire.credentials import NO_CREDENTIALS, PLAIN, Credentials, client_tls, node_tls

if TYPE_CHECKING:
    from millstream.pipelines.source.link import Link

_logger = logging.getLogger(__name__)

TOKEN_MS: Final = 12 * 3_600_000
"""Longer than a task runs."""
_RENEW_S: Final = 60.0
"""How often tokens are checked for renewal, and how soon a failed attempt is repeated."""
_REVOKE_S: Final = 2.0
_CACHED_MAX: Final = 256

PROTOCOL: Final = "kafka.security.protocol"
_JAAS, _MECHANISM = "kafka.sasl.jaas.config", "kafka.sasl.mechanism"
_USER, _PASSWORD = "kafka.sasl.username", "kafka.sasl.password"
_CA_FILES: Final = ("kafka.ssl.ca.location", "kafka.ssl.truststore.location")
_CA_TEXT: Final = "kafka.ssl.truststore.certificates"
_CERTIFICATE_FILES: Final = ("kafka.ssl.certificate.location", "kafka.ssl.keystore.location")
_KEY_FILE: Final = "kafka.ssl.key.location"
_TYPES: Final = ("kafka.ssl.truststore.type", "kafka.ssl.keystore.type")
_NAMES: Final = "kafka.ssl.endpoint.identification.algorithm"
_OWN: Final = ("tls", "cluster", "user", "password", "token", "tokenFile")
ACCESS_OPTIONS: Final = (
    *_OWN,
    PROTOCOL,
    _JAAS,
    _MECHANISM,
    _USER,
    _PASSWORD,
    *_CA_FILES,
    _CA_TEXT,
    *_CERTIFICATE_FILES,
    _KEY_FILE,
    *_TYPES,
    _NAMES,
)
SECRET_OPTIONS: Final = frozenset(name.lower() for name in ("password", "token", _JAAS, _PASSWORD))
_MODULE: Final = re.compile(r"\s*([\w.]+)\s+required\b(.*?);?\s*\Z", re.DOTALL)
_MODULE_OPTION: Final = re.compile(r"""(\w+)\s*=\s*(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|([^\s;"']+))""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The credentials of a process; without any, it connects in plain text and anonymously."""

    ca: str = field(default="", repr=False)
    """The trusted certificate authorities, in PEM; empty for those of the machine."""
    tls: bool = False
    cluster: str = ""
    """The cluster whose nodes are trusted by their certificates, regardless of the address used."""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    mechanism: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""

    def __reduce__(self) -> tuple[Callable[[], Access], tuple[()]]:
        if self.password or self.certificate or self.token_file:
            raise InvalidRequest("the credentials of a driver cannot be pickled; tasks use `Access.for_tasks`")
        return partial(Access, **{name: getattr(self, name) for name in self.__dataclass_fields__}), ()

    @property
    def is_known(self) -> bool:
        """Whether it names a user, so that tasks need their own tokens."""
        return bool(self.user or self.token or self.token_file or self.certificate)

    def credentials(self) -> Credentials:
        """Return the credentials of connections; files are read for each connection, since they are renewed."""
        if not (self.is_known or self.tls):
            return NO_CREDENTIALS
        token_source = None
        if self.token or self.token_file:
            token_source = self._read_token
        check = None
        tls: Callable[[], ssl.SSLContext] | None = self._tls_context if self.tls else None
        if self.cluster:
            tls, check = node_tls(self.cluster, self._tls_context)
        return Credentials(
            tls=tls,
            user=self.user,
            password=self.password,
            token=token_source,
            mechanism=self.mechanism,
            check_peer=check,
        )

    def _tls_context(self) -> ssl.SSLContext:
        return client_tls(ca_text=self.ca or None, certificate=self.certificate or None, key=self.key or None)

    def _read_token(self) -> str:
        return self.token or _read("tokenFile", self.token_file).strip()

    def for_tasks(self, brokers: str, allowed: Iterable[Acl]) -> Access:
        """Return the access of tasks: a token for this scope, created when it is needed and then kept for a while."""
        if not self.is_known:
            return self
        key = self, brokers, frozenset(allowed)
        now = time.time()
        with _lock:
            token, renew_at = _tokens.get(key, ("", 0.0))
            if renew_at <= now:
                token, expires_at = self._create_token(brokers, key[2])
                _tokens.pop(key, None)
                # Renewed long before it expires: a task that starts now may run for hours.
                _tokens[key] = token, now + (expires_at - now) / 4
                while len(_tokens) > _CACHED_MAX:
                    _tokens.pop(next(iter(_tokens)))
        return replace(self.without_secrets(), token=token)

    def as_options(self) -> dict[str, str]:
        """The options of a query of this process; only a file can be named there, since Spark keeps them in plans."""
        if self.is_known and not self.token_file:
            raise InvalidRequest("the credentials of a query must be in a token file")
        options = {"tls": "true" if self.tls else "", _CA_TEXT: self.ca, "cluster": self.cluster}
        return {name: text for name, text in {**options, "tokenFile": self.token_file}.items() if text}

    def without_secrets(self) -> Access:
        return Access(ca=self.ca, tls=self.tls, cluster=self.cluster)

    def _create_token(self, brokers: str, scope: frozenset[Acl]) -> tuple[str, float]:
        from millstream.pipelines.source.link import link_to
        from millstream.pipelines.source.target_topic import supports_batch_commit

        link = link_to(brokers, client_id="millstream-spark", timeout_s=60.0, access=self)
        refused = f"tasks sign in with API tokens that the driver creates, and the broker at {brokers} creates none"
        if not supports_batch_commit(link):
            raise InvalidSetting(f"{refused}: it is not Millstream")
        try:
            made = link.call(create_token(link.client, scope, lifetime_ms=TOKEN_MS))
        except (InvalidRequest, NotAuthorized) as error:
            raise InvalidSetting(f"{refused}: {error}") from error
        return made.token, made.expires_ms / 1000


NO_ACCESS: Final = Access()


class TokenFiles:
    """A token file for each principal that pipelines run as; tokens are renewed before they expire."""

    def __init__(self, link: Link, folder: str, base: Access = NO_ACCESS) -> None:
        """Create tokens over a link; `base` is how their users connect."""
        self.link = link
        self._folder = folder
        self._base = base
        self._made: dict[str, tuple[str, str, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._keep_renewing, name="tokens", daemon=True).start()

    def access_of(self, owner: str) -> Access:
        """Return a pipeline's credentials on behalf of its owner; without an owner, those of the link."""
        with self._lock:
            if owner not in self._made:
                self._create(owner)
            return replace(self._base, token_file=self._made[owner][1])

    def close(self) -> None:
        """Revoke all tokens; those that cannot be revoked now expire."""
        self._closed.set()
        for token_id, _, _ in self._made.values():
            with suppress(MillstreamError, TimeoutError):
                self.link.call(within(_REVOKE_S, revoke_token(self.link.client, token_id)))

    def _create(self, owner: str) -> None:
        made = self.link.call(create_token(self.link.client, owner=owner, lifetime_ms=TOKEN_MS))
        path = Path(self._folder, f"token-{sha256(owner.encode()).hexdigest()[:16]}")
        write_private(path, made.token.encode(), replace=True)
        now = time.time()
        self._made[owner] = made.token_id, str(path), now + (made.expires_ms / 1000 - now) / 2

    def _keep_renewing(self) -> None:
        while not self._closed.wait(_RENEW_S):
            with self._lock:
                due = [owner for owner, (_, _, renew_at) in self._made.items() if renew_at <= time.time()]
                for owner in due:
                    try:
                        self._create(owner)
                    except (MillstreamError, OSError) as error:
                        _logger.warning("a token could not be renewed", extra={"owner": owner, "error": str(error)})


_tokens: dict[tuple[Access, str, frozenset[Acl]], tuple[str, float]] = {}
_lock = threading.Lock()


def _reset_after_fork() -> None:
    """Replace a lock that another thread of the parent may have held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def connection_access(credentials: Credentials) -> Access:
    """Return the options with which others connect to the same brokers, without these credentials."""
    context = credentials.tls_context
    if context is None:
        return NO_ACCESS
    ca = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))
    return Access(tls=True, ca=ca, cluster=(credentials.exported or {}).get("cluster", ""))


def may_read(topics: Iterable[str]) -> frozenset[Acl]:
    return frozenset(_rule(Operation.READ, ResourceType.TOPIC, topic) for topic in topics)


def may_write(
    topics: Iterable[str] | None, query: str, *, groups: Iterable[str] = (), sources: Iterable[str] = ()
) -> frozenset[Acl]:
    """Return the scope of a query's writing tasks and its commit: its topics, or all topics if the rows name them."""
    targets = [WILDCARD] if topics is None else list(topics)
    written = [
        _rule(operation, ResourceType.TOPIC, topic)
        for topic in targets
        for operation in (Operation.WRITE, Operation.CREATE)
    ]
    transactions = [
        replace(_rule(Operation.ALL, ResourceType.TRANSACTIONAL_ID, name), pattern=pattern)
        for name, pattern in _transactional_ids(query)
    ]
    read = [_rule(Operation.READ, ResourceType.GROUP, group) for group in groups]
    return frozenset([*written, *transactions, *read, *may_read(sources)])


def _transactional_ids(query: str) -> list[tuple[str, PatternType]]:
    """Return the ids of a query; of all queries for a stream, which learns its query's name in its tasks."""
    if query:
        return [(query, PatternType.LITERAL), (f"spark/{query}/", PatternType.PREFIXED)]
    return [(WILDCARD, PatternType.LITERAL)]


def _rule(operation: Operation, kind: ResourceType, name: str) -> Acl:
    return Acl(resource_type=kind, resource_name=name, principal=EVERYONE, operation=operation)


def parse_access(raw_options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Access:
    """Read the credentials from options, by the names of `ACCESS_OPTIONS`, or else from the environment."""
    options = {name: text.strip() for name, text in raw_options.items() if text.strip()}
    if not options:
        return _from_environment(environment)
    if _NAMES in options and options[_NAMES].lower() != "https":
        raise InvalidSetting(f"option {_NAMES} cannot be turned off: anyone could pose as the broker")
    for name in _TYPES:
        if options.get(name, "PEM").upper() != "PEM":
            raise InvalidSetting(f"option {name} has to be PEM; keytool and openssl convert a {options[name]} store")
    protocol = options.get(PROTOCOL, "").upper()
    user, password, mechanism = _login(options)
    ca, has_tls = _trusted(options, protocol)
    certificate = next((options[name] for name in _CERTIFICATE_FILES if name in options), "")
    token, token_file = options.get("token", ""), options.get("tokenFile", "")
    if bool(user) + bool(token) + bool(token_file) > 1:
        raise InvalidSetting("set a user with its password, a token or a tokenFile, and only one of them")
    if bool(user) != bool(password):
        raise InvalidSetting("set a user and its password together")
    signs_in = bool(user or token or token_file)
    asks_to = next((name for name in (PROTOCOL, _MECHANISM) if name in options), "")
    if not signs_in and (protocol.startswith("SASL") or _MECHANISM in options):
        raise InvalidSetting(
            f"option {asks_to} is {options[asks_to]}, but there are no credentials: set {_JAAS}, or user and "
            "password, or token"
        )
    if signs_in and protocol in ("PLAINTEXT", "SSL"):
        raise InvalidSetting(
            f"option {PROTOCOL} is {protocol}, but other options authenticate; make it SASL_{protocol}, or leave it out"
        )
    return Access(
        tls=has_tls,
        cluster=options.get("cluster", ""),
        ca=ca,
        certificate=certificate,
        key=options.get(_KEY_FILE, ""),
        user=user,
        password=password,
        mechanism=mechanism,
        token=token,
        token_file=token_file,
    )


def _from_environment(environment: Mapping[str, str]) -> Access:
    options = {
        name: environment.get(f"MILLSTREAM_{name.upper()}", "") for name in ("tls_ca", "user", "password", "token")
    }
    ca = _read("MILLSTREAM_TLS_CA", options["tls_ca"]) if options["tls_ca"] else ""
    if options["user"]:
        return Access(tls=bool(ca), ca=ca, user=options["user"], password=options["password"])
    return Access(tls=bool(ca), ca=ca, token=options["token"])


def _login(options: Mapping[str, str]) -> tuple[str, str, str]:
    user = options.get("user") or options.get(_USER, "")
    password = options.get("password") or options.get(_PASSWORD, "")
    mechanism = options.get(_MECHANISM, "")
    if _JAAS in options:
        module, user, password = _parse_jaas(options[_JAAS])
        mechanism = mechanism or (PLAIN if "Plain" in module else "")
    if mechanism == "OAUTHBEARER" and (options.get("token") or options.get("tokenFile")):
        return "", "", ""
    if user and mechanism not in ("", PLAIN, *SCRAM_MECHANISMS):
        known = ", ".join((PLAIN, *SCRAM_MECHANISMS))
        raise InvalidSetting(f"option {_MECHANISM} has to be one of {known}, or set a token; it is {mechanism!r}")
    return user, password, mechanism


def _parse_jaas(text: str) -> tuple[str, str, str]:
    module = _MODULE.match(text)
    options = (
        {}
        if module is None
        else {match[1]: match[2] or match[3] or match[4] for match in _MODULE_OPTION.finditer(module[2])}
    )
    if module is None or not module[1].endswith(("PlainLoginModule", "ScramLoginModule")) or "username" not in options:
        # The text itself is not repeated: it holds a password.
        raise InvalidSetting(
            f"option {_JAAS} is supported for PlainLoginModule and ScramLoginModule with username and password; "
            "for anything else, set the options user and password, or token"
        )
    user, password = (re.sub(r"\\(.)", r"\1", options.get(name, "")) for name in ("username", "password"))
    return module[1], user, password


def _trusted(options: Mapping[str, str], protocol: str) -> tuple[str, bool]:
    """Return the trusted certificate authorities, and whether TLS is used at all."""
    own = options.get("tls", "")
    files = [name for name in _CA_FILES if name in options]
    if own.lower() not in ("", "true", "false"):
        files = ["tls"]
    ca = options.get(_CA_TEXT, "") or (_read(files[0], options[files[0]]) if files else "")
    if protocol not in ("", "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise InvalidSetting(f"option {PROTOCOL} has to be PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, not {protocol}")
    has_files = bool(ca) or any(name in options for name in _CERTIFICATE_FILES)
    if protocol.endswith("PLAINTEXT") and (has_files or own):
        raise InvalidSetting(f"option {PROTOCOL} is {protocol}, but other options enable TLS")
    return ca, has_files or own.lower() == "true" or protocol.endswith("SSL")


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"option {name}: {path} cannot be read: {error}") from None
