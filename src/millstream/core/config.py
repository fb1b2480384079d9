"""A node's configuration. Flags, environment variables, the file and `docs/configuration.md` derive from it."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from millstream.core.errors import InvalidSetting, NotFound
from millstream.core.setting import Setting, parse_address, setting, settings_of, suggestion, value_text

DECOMPRESSED_BYTES_MAX = 64 * 1024 * 1024
COMPRESSION_RATIO_MAX = 1000
"""Limits on what one batch may decompress to, in bytes and as a multiple of its size; enforced by
`protocol/records/compression.py`."""
DECOMPRESSED_BYTES_VARIABLE = "MILLSTREAM_DECOMPRESSED_BYTES_MAX"
RATIO_VARIABLE = "MILLSTREAM_COMPRESSION_RATIO_MAX"
LIMIT_VARIABLES = (DECOMPRESSED_BYTES_VARIABLE, RATIO_VARIABLE)
"""The variables by which a node passes these limits to its child processes."""

ENVIRONMENT_PREFIX = "MILLSTREAM_"
FILE_NAME = "millstream.toml"
COMMAND_VARIABLES = frozenset(
    f"MILLSTREAM_{name}"
    for name in ("BROKERS", "TIMEOUT", "TRACEBACK", "TLS_CA", "USER", "PASSWORD", "TOKEN", "PROFILE", "PROFILES")
)
"""Variables that commands read and that do not configure a node."""

# Kubernetes puts the addresses of a service into the environment; a service named millstream is not a mistake.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)\Z")

# The first of each pair must not exceed the second.
_ORDERED = (
    ("group_session_min_ms", "group_session_max_ms"),
    ("group_consumer_heartbeat_ms", "group_consumer_session_ms"),
)

CORES_MAX = 256
_ALL_CORES = "auto"

SPARK_CONNECT = "sc://"
"""Begins the address of a Spark Connect server."""
NO_CONNECT = (
    "pipelines and jobs have their own Spark driver, which a Spark Connect server (sc://…) does not allow; name a "
    "master such as spark://HOST:PORT"
)

DEFAULT_LISTENER = "default"
"""The name of the listener that `kafka` describes."""
NO_AUTHENTICATION, AUTHENTICATION_REQUIRED = "none", "required"
_LISTENERS = "listeners"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """An address at which Kafka clients connect: a table of `[[listeners]]`, or what `kafka` describes."""

    name: str
    address: str
    advertise: str = ""
    auth: str = NO_AUTHENTICATION
    tls: bool = False
    """Whether it uses those of the node's files for TLS that it does not name itself."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.address)

    @property
    def requires_authentication(self) -> bool:
        return self.auth == AUTHENTICATION_REQUIRED

    def with_files_of(self, node: ListenerConfig) -> ListenerConfig:
        """Use another listener's files for TLS where this one names none."""
        return dataclasses.replace(
            self,
            tls_cert=self.tls_cert or node.tls_cert,
            tls_key=self.tls_key or node.tls_key,
            tls_client_ca=self.tls_client_ca or node.tls_client_ca,
        )

    def check(self) -> None:
        """Raise `InvalidSetting` unless it can be listened on."""
        name = "kafka" if self.name == DEFAULT_LISTENER else f"the address of listener {self.name!r}"
        parse_address(self.address, name=name)
        if self.auth not in (NO_AUTHENTICATION, AUTHENTICATION_REQUIRED):
            raise InvalidSetting(f"auth of listener {self.name!r} must be none or required, not {self.auth!r}")
        if self.tls and not self.tls_cert:
            raise InvalidSetting(
                f"listener {self.name!r} has tls = true, but neither it nor the node has a certificate; set tls-cert "
                "and tls-key"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidSetting(f"listener {self.name!r} needs both a certificate (tls-cert) and its key (tls-key)")
        if self.tls_client_ca and not self.tls_cert:
            raise InvalidSetting(f"listener {self.name!r} checks clients' certificates only with its own tls-cert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a node. A field's name is its flag (`--node-id`), its variable and its key in the file."""

    data: str = setting("data", "./millstream-data", "The folder that holds everything the node stores.")
    kafka: str = setting(
        "kafka",
        "127.0.0.1:9092",
        "HOST:PORT on which Kafka clients connect; port 0 picks a free one. With `cores`, processes use the ports that "
        "follow; a range such as HOST:9092-9095 limits them.",
    )
    http: str = setting(
        "http", "127.0.0.1:8080", "HOST:PORT of the HTTP gateway; port 0 picks a free one, empty disables the gateway."
    )
    http_hosts: str = setting(
        "http-hosts",
        "",
        "Names by which browsers reach the HTTP gateway without TLS, separated by commas; `*` allows any. "
        "Addresses, names without a dot and the hosts of `http` and `advertise` are always allowed.",
    )
    http_tls_cert: str = setting(
        "http-tls-cert",
        "",
        "File with the certificate of the HTTP gateway, and the chain to its authority; empty means `tls-cert`. With "
        "either, HTTP is served over TLS.",
    )
    http_tls_key: str = setting("http-tls-key", "", "File with the private key of `http-tls-cert`.")
    console_read_only: bool = setting("console-read-only", False, "Whether the console under `/console` is read-only.")
    console_session_ms: int = setting(
        "console-session-ms",
        8 * 3600 * 1000,
        "How long a user stays signed in to the console, at most as long as the token used to sign in is valid.",
        minimum=60_000,
        maximum=30 * 86_400_000,
    )
    console_oidc_client_id: str = setting(
        "console-oidc-client-id",
        "",
        "The client id of the console at the OpenID provider of `oauth-issuer`; empty allows only users and tokens.",
    )
    console_oidc_secret_file: str = setting(
        "console-oidc-secret-file",
        "",
        "File with the secret of `console-oidc-client-id`; empty for a public client, which PKCE protects.",
    )
    registry: str = setting(
        "registry",
        "",
        "HOST:PORT at which the schema registry is served without a prefix, usually port 8081; port 0 picks a free "
        "one. Empty serves it under `/registry` of `http` only.",
    )
    advertise: str = setting(
        "advertise",
        "",
        "The HOST:PORT that this node advertises to clients. Empty means the address of `kafka`, or, if "
        "that is every address of the machine (0.0.0.0), the one that the client connected to. A node of a cluster "
        "that listens on every address needs it.",
    )
    listeners: tuple[ListenerConfig, ...] = ()
    """More listeners, which only the file can describe."""
    auth: str = setting(
        "auth",
        NO_AUTHENTICATION,
        "Whether clients have to authenticate: over Kafka by SASL or a certificate, over HTTP by a password or a "
        "token. With `none`, the node refuses to listen on an address that other machines can reach, unless `insecure` "
        "is set.",
        choices=(NO_AUTHENTICATION, AUTHENTICATION_REQUIRED),
    )
    tls_cert: str = setting("tls-cert", "", "File with the certificate of this node, and the chain to its authority.")
    tls_key: str = setting("tls-key", "", "File with the private key of `tls-cert`.")
    tls_client_ca: str = setting(
        "tls-client-ca",
        "",
        "File with the authority that signs the certificates of clients and of other nodes; with it, a certificate is "
        "one way to authenticate.",
    )
    tls_principal_rules: str = setting(
        "tls-principal-rules",
        "DEFAULT",
        "How the name in a client's certificate becomes a principal, as Kafka's ssl.principal.mapping.rules.",
    )
    super_users: str = setting(
        "super-users",
        "",
        "Principals that may do everything, separated by commas, or by semicolons where a name has commas: `alice` is "
        "the user of that name, `User:CN=ops,O=example` the holder of a certificate, `User:oauth:42` that of a token.",
    )
    insecure: bool = setting(
        "insecure",
        False,
        "Whether to accept that addresses reachable by other machines require no authentication, and that passwords "
        "reach them in plain text.",
    )
    node_listener: str = setting(
        "node-listener",
        DEFAULT_LISTENER,
        "In a cluster: the name of the listener by which other nodes and this node's own processes connect.",
    )
    session_max_ms: int = setting(
        "session-max-ms",
        0,
        "How long a client that authenticated by SASL may stay before it has to authenticate again; 0 for as long as "
        "its credential is valid.",
        minimum=0,
    )
    audit_retention_ms: int = setting(
        "audit-retention-ms",
        90 * 24 * 3600 * 1000,
        "Where clients authenticate: how long the audit log (topic `__audit`) keeps its events; -1 keeps them forever.",
        minimum=-1,
    )
    oauth_jwks: str = setting(
        "oauth-jwks",
        "",
        "File or https URL with the keys that sign bearer tokens; empty accepts no bearer tokens.",
    )
    oauth_issuer: str = setting("oauth-issuer", "", "The issuer (`iss`) of bearer tokens.")
    oauth_audience: str = setting("oauth-audience", "", "The audience (`aud`) of bearer tokens.")
    oauth_principal: str = setting(
        "oauth-principal",
        "oauth:{sub}",
        "The template for the principal of a bearer token, filled from its claims; with `{sub}` alone, a token's "
        "subject is the same principal as the user of that name.",
    )
    secrets_key_file: str = setting(
        "secrets-key-file",
        "",
        "File with the keys that seal secrets in the catalog, such as those of push, outside the data folder; "
        "`millstream secrets init` creates one. Empty means `millstream/secrets.keys` in `$XDG_STATE_HOME` or "
        "`~/.local/state` on a single node, created when first needed; the nodes of a cluster need the same file.",
    )
    cores: str = setting(
        "cores",
        "1",
        "How many broker processes this machine runs, each with its own node id, Kafka port and folder; "
        "`auto` means one for each core. In a cluster, a number above 1 can be raised, but not lowered.",
    )
    node_id: int = setting("node-id", 1, "The number of this node in its cluster.", minimum=0, maximum=2**31 - 1)
    etcd: str = setting(
        "etcd",
        "",
        "URLs of the etcd that coordinates the cluster, separated by commas; empty means a single node.",
        is_url=True,
    )
    etcd_user: str = setting("etcd-user", "", "The user that signs in at etcd, if it requires one.")
    etcd_password_file: str = setting(
        "etcd-password-file",
        "",
        "File with the password of `etcd-user`, which only this node's user may read. It is read at each sign-in.",
    )
    etcd_ca: str = setting(
        "etcd-ca",
        "",
        "File with the certificate authority of etcd's certificate; empty means the authorities that the machine "
        "trusts.",
    )
    etcd_certificate: str = setting("etcd-certificate", "", "File with this node's certificate, if etcd requires one.")
    etcd_key: str = setting("etcd-key", "", "File with the private key of `etcd-certificate`.")
    etcd_wait_ms: int = setting(
        "etcd-wait-ms",
        60_000,
        "In a cluster: how long a starting node waits for etcd before it gives up; 0 waits forever.",
        minimum=0,
    )
    cluster: str = setting("cluster", "millstream", "The name of the cluster in etcd.")
    catalog: str = setting(
        "catalog",
        "",
        "URL of the catalog that all nodes of a cluster share (postgresql://…); empty means one in the data folder. "
        "`?sslmode=verify-full&sslrootcert=FILE` encrypts the connection and checks the server; `sslcert` and `sslkey` "
        "name this node's certificate.",
        is_url=True,
    )
    catalog_password_file: str = setting(
        "catalog-password-file",
        "",
        "File with the password of the catalog's user, which only this node's user may read. It is read for each "
        "connection. Without it, `PGPASSFILE` and `PGPASSWORD` apply, as in other PostgreSQL clients.",
    )
    rack: str = setting(
        "rack",
        "",
        "The failure domain of this node; replicas are spread over racks. Empty means the machine's name.",
    )
    lease_ms: int = setting(
        "lease-ms",
        3_000,
        "In a cluster: how long a node may be silent before it is considered dead and others lead its partitions.",
        minimum=1000,
        maximum=600_000,
    )
    leader_balance_ms: int = setting(
        "leader-balance-ms",
        30_000,
        "In a cluster: how long a preferred leader must be back in sync before it leads again; 0 never moves "
        "leadership back.",
        minimum=0,
    )
    unclean_leader_election: bool = setting(
        "unclean-leader-election",
        False,
        "In a cluster: the `unclean.leader.election.enable` of topics that do not set their own.",
    )
    leave_ms: int = setting(
        "leave-ms",
        10_000,
        "In a cluster: how long a stopping node waits for others to take over the partitions that it leads.",
        minimum=0,
    )
    replica_lag_ms: int = setting(
        "replica-lag-ms",
        10_000,
        "In a cluster: how long a replica may be behind its leader before it leaves the in-sync replicas.",
        minimum=100,
        maximum=600_000,
    )
    replica_fetch_wait_ms: int = setting(
        "replica-fetch-wait-ms",
        500,
        "In a cluster: how long a leader holds a follower's fetch when there are no new records.",
        minimum=1,
        maximum=5_000,
    )
    replica_fetch_bytes: int = setting(
        "replica-fetch-bytes",
        10 * 1024 * 1024,
        "In a cluster: the maximum size of one fetch by a follower, over all partitions of a leader.",
        minimum=1024 * 1024,
        maximum=128 * 1024 * 1024,
    )
    auto_create_topics: bool = setting(
        "auto-create-topics",
        True,
        "Whether a topic is created when a client first produces to it or requests its metadata.",
    )
    default_partitions: int = setting(
        "default-partitions",
        1,
        "Partitions of a topic that is created without a number of partitions.",
        minimum=1,
        maximum=10_000,
    )
    default_replication: int = setting(
        "default-replication",
        3,
        "Replicas of a topic that is created without a number of replicas; at most the number of nodes.",
        minimum=1,
        maximum=100,
    )
    offsets_partitions: int = setting(
        "offsets-partitions",
        4,
        "Partitions of `__consumer_offsets`; fixed once the topic exists.",
        minimum=1,
        maximum=1000,
    )
    transactions_partitions: int = setting(
        "transactions-partitions",
        4,
        "Partitions of `__transaction_state`; fixed once the topic exists.",
        minimum=1,
        maximum=1000,
    )
    subscriptions_partitions: int = setting(
        "subscriptions-partitions",
        4,
        "Partitions of `__subscriptions`; fixed once the topic exists.",
        minimum=1,
        maximum=1000,
    )
    ledger_bytes_max: int = setting(
        "ledger-bytes-max",
        256 * 1024 * 1024,
        "How much of each partition of `__subscriptions` is kept until the ledger has landed it, beyond what the node "
        "needs itself. What exceeds it is deleted, and the ledger records this.",
        minimum=1024 * 1024,
        maximum=2**50,
    )
    default_flush: str = setting(
        "default-flush",
        "auto",
        "The `flush` setting of topics that do not set their own; `auto` means `always` on a single node and `os` "
        "in a cluster, where other nodes have a record before it is acknowledged.",
        choices=("auto", "always", "interval", "os"),
    )
    default_retention_ms: int = setting(
        "default-retention-ms",
        7 * 24 * 3600 * 1000,
        "The `retention.ms` of topics that do not set their own; -1 keeps records forever.",
        minimum=-1,
    )
    retention_check_ms: int = setting(
        "retention-check-ms",
        60_000,
        "How often old segments are deleted and failed compactions retried.",
        minimum=100,
    )
    scrub_bytes_per_s: int = setting(
        "scrub-bytes-per-s",
        8 * 1024 * 1024,
        "How fast the scrub reads stored segments to detect damage early; 0 turns it off.",
        minimum=0,
    )
    scrub_interval_ms: int = setting(
        "scrub-interval-ms",
        3_600_000,
        "How long the scrub pauses between two passes over all segments.",
        minimum=100,
    )
    request_bytes_max: int = setting(
        "request-bytes-max",
        100 * 1024 * 1024,
        "The largest request a client may send.",
        minimum=1024,
        maximum=2**31 - 1,
    )
    inflight_bytes_max: int = setting(
        "inflight-bytes-max",
        256 * 1024 * 1024,
        "Bytes of requests and responses held in memory for all clients together; beyond it, the node stops reading "
        "from sockets.",
        minimum=1024 * 1024,
    )
    decompressed_bytes_max: int = setting(
        "decompressed-bytes-max",
        DECOMPRESSED_BYTES_MAX,
        "The maximum size of the decompressed records of one batch. Larger batches are rejected, and skipped when "
        "they are read. Clients read the environment variable of the same name.",
        minimum=1024 * 1024,
        maximum=2**30,
    )
    compression_ratio_max: int = setting(
        "compression-ratio-max",
        COMPRESSION_RATIO_MAX,
        "The maximum ratio of decompressed to compressed size for batches that decompress to more than 8 MiB; "
        "enforced like `decompressed-bytes-max`.",
        minimum=10,
    )
    fetch_bytes_max: int = setting(
        "fetch-bytes-max", 55 * 1024 * 1024, "The maximum size of the response to one fetch.", minimum=1024
    )
    connections_max: int = setting("connections-max", 10_000, "The maximum number of open connections.", minimum=1)
    connections_per_address_max: int = setting(
        "connections-per-address-max",
        5_000,
        "The maximum number of open connections of one client address, or of one IPv6 network of 64 bits. Where "
        "clients authenticate, at most 256 of them may be unauthenticated.",
        minimum=1,
    )
    connections_per_principal_max: int = setting(
        "connections-per-principal-max",
        5_000,
        "Where clients authenticate: the maximum number of open connections of one principal.",
        minimum=1,
    )
    connection_idle_ms: int = setting(
        "connection-idle-ms", 600_000, "How long a connection may be idle before it is closed.", minimum=1000
    )
    journal_bytes: int = setting(
        "journal-bytes",
        64 * 1024 * 1024,
        "The size of one file of the shared journal, which takes commits that touch many partitions.",
        minimum=1024 * 1024,
    )
    transaction_timeout_max_ms: int = setting(
        "transaction-timeout-max-ms",
        900_000,
        "The longest timeout that a transactional producer may request.",
        minimum=1,
    )
    transactional_id_expiry_ms: int = setting(
        "transactional-id-expiry-ms",
        604_800_000,
        "How long a transactional id, and the last batch of a query, are kept after their last use.",
        minimum=1,
    )
    group_session_min_ms: int = setting(
        "group-session-min-ms", 6_000, "The shortest session timeout that a group member may request.", minimum=1
    )
    group_session_max_ms: int = setting(
        "group-session-max-ms", 1_800_000, "The longest session timeout that a group member may request.", minimum=1
    )
    group_initial_delay_ms: int = setting(
        "group-initial-delay-ms",
        500,
        "How long an empty group waits for more members before its first assignment.",
        minimum=0,
    )
    group_members_max: int = setting(
        "group-members-max", 10_000, "The maximum number of members of one group.", minimum=1
    )
    group_consumer_session_ms: int = setting(
        "group-consumer-session-ms",
        45_000,
        "How long a member of a consumer group (the newer protocol) may be silent before it is removed.",
        minimum=1,
        maximum=1_800_000,
    )
    group_consumer_heartbeat_ms: int = setting(
        "group-consumer-heartbeat-ms",
        5_000,
        "How often members of consumer groups (the newer protocol) send heartbeats.",
        minimum=1,
        maximum=600_000,
    )
    offsets_retention_ms: int = setting(
        "offsets-retention-ms",
        7 * 24 * 3600 * 1000,
        "How long the committed offsets of a group without members are kept.",
        minimum=1,
    )
    producer_expiry_ms: int = setting(
        "producer-expiry-ms",
        24 * 3600 * 1000,
        "How long a partition remembers an idempotent producer that sends nothing.",
        minimum=1000,
    )
    shutdown_ms: int = setting(
        "shutdown-ms",
        30_000,
        "How long a stopping node waits for requests in progress before it closes their connections.",
        minimum=0,
    )
    push_private_addresses: bool = setting(
        "push-private-addresses",
        False,
        "Whether messages may be pushed to private, loopback and link-local addresses, through which the owner of a "
        "subscription could reach internal services.",
    )
    pipelines_enabled: bool = setting(
        "pipelines-enabled",
        True,
        "Whether this node may run pipelines. In a cluster, one of the enabled nodes runs all of them.",
    )
    pipelines_jobs: str = setting(
        "pipelines-jobs",
        "auto",
        "Whether jobs, and transforms with Python functions, may be declared and run here: their code runs as the user "
        "of this node. "
        "`auto` allows them unless clients authenticate.",
        choices=("auto", "on", "off"),
    )
    pipelines_master: str = setting(
        "pipelines-master",
        "",
        "The Spark master of pipelines, such as spark://HOST:PORT; empty means this machine, with all cores but one.",
    )
    pipelines_memory: str = setting("pipelines-memory", "1g", "The memory of the Spark driver's Java process.")
    pipelines_spare: str = setting(
        "pipelines-spare",
        "auto",
        "Whether a second driver is kept ready, with Spark started, while pipelines run: when the first one dies, "
        "they resume at once. It takes as much memory as the first one, about 0.7 GB. `auto` keeps one if this node "
        "has 4 GB of memory or more, by the limit of its container or service, and at least three times "
        "`pipelines-memory`. `millstream cluster up` turns it off for its nodes, which share a machine.",
        choices=("auto", "on", "off"),
    )
    pipelines_lake: str = setting(
        "pipelines-lake",
        "",
        "Where landed tables are stored: a folder or a URL such as s3://bucket/path; empty means `lake` in the "
        "data folder. In a cluster it must be reachable from all nodes.",
    )
    pipelines_folder: str = setting(
        "pipelines-folder",
        "",
        "Where pipelines store checkpoints; empty means `pipelines` in the data folder. In a cluster it must be "
        "reachable from all nodes.",
    )
    pipelines_spark: str = setting(
        "pipelines-spark",
        "",
        "Additional settings of the Spark driver: NAME=VALUE, separated by semicolons. They are never shown, since "
        "credentials may be among them.",
        is_secret=True,
    )
    log_level: str = setting(
        "log-level", "info", "The lowest level that is logged.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "log-format", "text", "Whether log lines are text for people or one JSON object each.", choices=("text", "json")
    )

    @classmethod
    def declared(cls) -> Mapping[str, tuple[str, Setting]]:
        """Return every setting: flag name to attribute and declaration."""
        return {declared.name: (attribute, declared) for attribute, declared in settings_of(cls)}

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Config:
        """Combine the sources: a flag overrides the environment, which overrides the file."""
        values = _from_file(file)
        values.update(_from_environment(os.environ if environment is None else environment))
        declared = cls.declared()
        for name, value in (flags or {}).items():
            attribute, known = declared[name]
            values[attribute] = known.parse(value) if isinstance(value, str) else value
            known.check(values[attribute])
        config = cls(**values)._with_first_ports()
        config._check_together()
        return config

    def _with_first_ports(self) -> Config:
        """Replace ranges of ports by their first one; the others follow it, and must suffice."""

        def first(address: str, name: str) -> str:
            host, _, ports = address.rpartition(":")
            low, dash, high = ports.partition("-")
            if not (dash and low.isdigit() and high.isdigit()):
                return address
            size = int(high) - int(low) + 1
            if size < self.core_count:
                raise InvalidSetting(
                    f"{name} {address} has {max(size, 0)} ports, and cores {self.cores} needs {self.core_count}"
                )
            return f"{host}:{low}"

        listeners = (
            dataclasses.replace(listener, address=first(listener.address, f"the address of listener {listener.name!r}"))
            for listener in self.listeners
        )
        return self.replace(kafka=first(self.kafka, "kafka"), listeners=tuple(listeners))

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Config:
        """Build from these settings alone, by flag name; ignore the environment and the file."""
        declared = cls.declared()
        values: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in declared:
                raise InvalidSetting(f"a node has no setting {name!r}{suggestion(name, declared)}")
            attribute, known = declared[name]
            values[attribute] = known.parse(value_text(value))
        config = cls(**values)
        config._check_together()
        return config

    def _check_together(self) -> None:
        if not self.data.strip():
            raise InvalidSetting("data cannot be empty; name the folder that holds everything the node stores")
        if self.cores != _ALL_CORES and not (self.cores.isdecimal() and 1 <= int(self.cores) <= CORES_MAX):
            raise InvalidSetting(f"cores must be `auto` or a number from 1 to {CORES_MAX}, not {self.cores!r}")
        self.spark_settings()
        if self.pipelines_master.startswith(SPARK_CONNECT):
            raise InvalidSetting(f"pipelines-master: {NO_CONNECT}")
        self._check_listeners()
        if self.in_cluster and self.catalog.startswith("sqlite"):
            raise InvalidSetting(
                "catalog must be a PostgreSQL database (postgresql://…), which all nodes of a cluster share; "
                "only a node without etcd uses SQLite, in its own data folder"
            )
        for smaller, larger in _ORDERED:
            if getattr(self, smaller) > getattr(self, larger):
                name, other = smaller.replace("_", "-"), larger.replace("_", "-")
                raise InvalidSetting(
                    f"{name} ({getattr(self, smaller)}) is larger than {other} ({getattr(self, larger)})"
                )

    def _check_listeners(self) -> None:
        names = [listener.name for listener in self.all_listeners]
        if len(set(names)) < len(names):
            raise InvalidSetting(f"two listeners have the same name; the names are {', '.join(names)}")
        if self.node_listener not in names:
            raise InvalidSetting(f"node-listener is {self.node_listener!r}; the listeners are {', '.join(names)}")
        for listener in self.all_listeners:
            listener.check()
        if bool(self.http_tls_cert) != bool(self.http_tls_key):
            raise InvalidSetting("HTTP needs both a certificate (http-tls-cert) and its key (http-tls-key)")

    @property
    def all_listeners(self) -> tuple[ListenerConfig, ...]:
        """Every listener for clients, that of `kafka` first."""
        first = ListenerConfig(
            name=DEFAULT_LISTENER,
            address=self.kafka,
            advertise=self.advertise,
            auth=self.auth,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
        )
        return (first, *(listener.with_files_of(first) if listener.tls else listener for listener in self.listeners))

    @property
    def authorizes(self) -> bool:
        """Whether access rules hold: they do for every client as soon as some clients authenticate."""
        return any(listener.requires_authentication for listener in self.all_listeners)

    @property
    def http_tls(self) -> tuple[str, str] | None:
        """The files with the certificate of HTTP and its key; None for plain text."""
        if self.http_tls_cert:
            return self.http_tls_cert, self.http_tls_key
        return (self.tls_cert, self.tls_key) if self.tls_cert else None

    @property
    def http_authenticates(self) -> bool:
        """Whether callers of HTTP have to authenticate: they do where clients of the listener `default` do."""
        return self.auth == AUTHENTICATION_REQUIRED

    @property
    def in_cluster(self) -> bool:
        """Return whether the node belongs to a cluster of several machines."""
        return bool(self.etcd)

    @property
    def core_count(self) -> int:
        """Return how many broker processes this machine runs."""
        return len(os.sched_getaffinity(0)) if self.cores == _ALL_CORES else int(self.cores)

    @property
    def has_other_nodes(self) -> bool:
        """Whether other nodes may lead partitions."""
        return self.in_cluster or self.core_count > 1

    @property
    def topic_flush(self) -> str:
        """Return the `flush` setting of topics that do not set their own."""
        if self.default_flush != "auto":
            return self.default_flush
        return "os" if self.in_cluster else "always"

    def spark_settings(self) -> dict[str, str]:
        """Return the settings in `pipelines-spark` by name."""
        settings: dict[str, str] = {}
        parts = filter(None, map(str.strip, self.pipelines_spark.split(";")))
        for number, part in enumerate(parts, 1):
            name, separator, value = part.partition("=")
            if not separator or not name.startswith("spark."):
                raise InvalidSetting(
                    f"pipelines-spark takes spark.NAME=VALUE separated by semicolons; entry {number} is not one"
                )
            settings[name.strip()] = value.strip()
        return settings

    @property
    def runs_jobs(self) -> bool:
        """Whether users' own programs may run on this node."""
        return self.pipelines_jobs == "on" or (self.pipelines_jobs == "auto" and not self.authorizes)

    @property
    def has_private_lake(self) -> bool | None:
        """Whether landed tables are in this machine's data folder, which other nodes of the cluster do not read.

        None if this node runs no pipelines, and so lands no tables.
        """
        if not self.pipelines_enabled:
            return None
        data = os.path.abspath(self.data)
        machine = os.path.dirname(data) if self.core_count > 1 else data
        lake = self.pipelines_lake or f"{data}/lake"
        return self.in_cluster and "://" not in lake and Path(os.path.abspath(lake)).is_relative_to(machine)

    @property
    def keeps_spare(self) -> bool:
        """Whether a second pipeline driver is kept ready."""
        if self.pipelines_spare != "auto":
            return self.pipelines_spare == "on"
        from millstream.core.job import parse_memory

        with suppress(InvalidSetting):
            java = parse_memory(self.pipelines_memory, name="pipelines-memory")
            return memory_bytes() >= max(_SPARE_BYTES_MIN, 3 * java)
        return False

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


_SPARE_BYTES_MIN: Final = 3_500_000_000
"""The memory from which a second pipeline driver is kept ready: that of machines with 4 GB, less what firmware and
kernel take of it."""


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory of this machine, or less if the process is in a container or service with a limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    group = Path()
    with suppress(OSError):
        # Such as "0::/system.slice/millstream.service"; in a container mostly "0::/".
        group = Path(own.read_text(encoding="utf-8").strip().rpartition("::/")[2])
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):
            # The text "max", which is no number, means no limit.
            limits.append(int((groups / folder / "memory.max").read_text(encoding="ascii")))
    return min(limits)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    declared = {_variable(name): setting for name, setting in Config.declared().items()}
    for variable, text in environment.items():
        if variable in declared:
            attribute, known = declared[variable]
            values[attribute] = known.parse(text)
        elif _is_unknown(variable):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
            hint = suggestion(name, Config.declared())
            raise InvalidSetting(f"the environment has {variable}, which is not a setting of a node{hint}")
    return values


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper().replace("-", "_")


def _is_unknown(variable: str) -> bool:
    """Return whether a variable that is not a setting looks like a mistyped one."""
    is_ours = variable.startswith(ENVIRONMENT_PREFIX)
    return is_ours and variable not in COMMAND_VARIABLES and not _SERVICE_LINK.search(variable)


def _from_file(file: Path | None) -> dict[str, Any]:
    path = file if file is not None else Path(FILE_NAME)
    if not path.exists():
        if file is not None:
            raise NotFound(f"config file {file} does not exist")
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"config file {path} is not valid TOML: {error}") from error
    declared = Config.declared()
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name == _LISTENERS:
            values[_LISTENERS] = _listeners(value, path)
            continue
        if name not in declared:
            raise InvalidSetting(f"config file {path} has an unknown setting {name!r}{suggestion(name, declared)}")
        attribute, known = declared[name]
        values[attribute] = known.parse(value_text(value))
    return values


def _listeners(tables: Any, path: Path) -> tuple[ListenerConfig, ...]:
    """Read `[[listeners]]`."""
    known = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(ListenerConfig)}
    listeners = []
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidSetting(f"config file {path}: listeners must be tables, each under [[listeners]]")
    for table in tables:
        values = {name: value for name, value in table.items() if name != "tls"}
        for name, value in values.items():
            if name not in known:
                raise InvalidSetting(f"config file {path}: a listener has no {name!r}{suggestion(name, known)}")
            if not isinstance(value, str):
                raise InvalidSetting(f"config file {path}: {name} of a listener must be a string, not {value!r}")
        if not {"name", "address"} <= values.keys():
            raise InvalidSetting(f"config file {path}: a listener needs a name and an address")
        tls = table.get("tls", False)
        if not isinstance(tls, bool):
            raise InvalidSetting(f"config file {path}: tls of a listener must be true or false, not {tls!r}")
        listeners.append(ListenerConfig(tls=tls, **{known[name]: value for name, value in values.items()}))
    return tuple(listeners)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    host, _ = parse_address(address, name="address")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
