"""Builds docs/protocol.md from the APIs that are served; `make docs` prints it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from millstream.broker.kafka.apis.api_versions import features_of
from millstream.core.quota import MISSING

_PRIVATE_KEY_MIN = 32000
_HEADLINE = re.compile(r"\w+ \(key \d+\), versions? [\w ]+[:;] ")

_HEAD = """# The Kafka protocol

This page is generated from the APIs' own declarations by `make docs`; do not edit it.

Millstream speaks Kafka's protocol on its `--kafka` port. Clients discover the supported APIs and versions with
ApiVersions, as with any Kafka broker. This page lists them. Versions are those that Kafka 4 advertises. A request
for an API or a version that is not supported closes the connection, as in Kafka; only ApiVersions responds to every
version.

## APIs

"""

_FEATURES = """
## Features

ApiVersions reports these features (KIP-584). Levels are fixed by the release; UpdateFeatures cannot change them.

| feature | levels | level | meaning |
|---|---|---|---|
"""

_MEANINGS = MappingProxyType(
    {
        "metadata.version": "The APIs are those of Kafka 4.0-IV3 or later, which tools derive from this level. "
        "There is no metadata log.",
        "transaction.version": "Both versions of the transaction protocol are served; clients that know the second "
        "(KIP-890) use it.",
        "group.version": "The consumer group protocol of KIP-848 is served (`group.protocol=consumer`).",
        "share.version": "Share groups (KIP-932) are served; each is a subscription of the same name.",
    }
)

_QUOTAS = """
## Quotas

AlterClientQuotas (`kafka-configs.sh --alter --entity-type clients`) limits the bytes per second of clients:
`producer_byte_rate` limits what producers send, `consumer_byte_rate` what consumers receive. Quotas are stored in the
catalog and apply from the next request on.

- An entity is a client id, a user, or both; without a name it is the default for every entity that has no quota of its
  own. A client's user is the name of its principal (`alice`, `CN=alice,O=example`, `oauth:SUBJECT`); without
  authentication, every client is the user `ANONYMOUS`. `millstream quota` sets and lists them.
- The most specific quota applies, in Kafka's order: user and client id, user and default client id, user, default user
  and client id, default user and default client id, default user, client id, default client id. A quota of a user is
  shared by all its clients, one of a client id by all clients with that id, and one of both by those that match both.
  A default applies to each user or client id separately.
- A client that was idle may use ten seconds' worth of its quota at once. Beyond the quota, requests still get a
  response, with a `throttle_time_ms` for which the client pauses; the broker does not read from its connection for that
  time, at most five minutes. Other clients are not affected. A fetch returns at most what the client may use at once,
  but always at least one batch.
- A throttled client whose session ends (`session-max-ms`) has ten seconds to authenticate again, during which its
  requests are served, since its handshake may wait behind them. These requests count towards the quota, and then the
  connection is muted again. This does not apply to a certificate or token that has expired.
- Connections that carry Millstream's own requests are not muted, because several workers share them. Instead, workers
  and share consumers receive no messages until their client is within its quota again; their acknowledgements are not
  delayed. PublishOnce is refused with THROTTLING_QUOTA_EXCEEDED and the time to wait. Over HTTP, requests beyond the
  quota of the client `millstream-gateway` are refused with 429. Push uses the client id `push`.
- `millstream_throttled_requests_total` and `millstream_throttled_seconds_total` count throttled requests and their
  delay.

Kafka quotas that are not supported:

| quota | why it is refused |
|---|---|
"""

_MISSING_HEAD = """
## What is not supported

| APIs | why |
|---|---|
"""

NOT_SERVED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "there are no delegation tokens": (
            "CreateDelegationToken",
            "RenewDelegationToken",
            "ExpireDelegationToken",
            "DescribeDelegationToken",
        ),
        "Kafka Streams uses classic groups here (`group.protocol=classic`, its default)": (
            "StreamsGroupHeartbeat",
            "StreamsGroupDescribe",
        ),
        "client metrics are not collected": ("GetTelemetrySubscriptions", "PushTelemetry"),
        "there is no KRaft quorum: a single node decides for itself, and a cluster agrees through etcd": (
            "DescribeQuorum",
            "UnregisterBroker",
            "AddRaftVoter",
            "RemoveRaftVoter",
            "UpdateRaftVoter",
        ),
        "used between Kafka's own brokers and controllers, not by clients": (
            "Vote",
            "BeginQuorumEpoch",
            "EndQuorumEpoch",
            "AlterPartition",
            "Envelope",
            "FetchSnapshot",
            "BrokerRegistration",
            "BrokerHeartbeat",
            "AllocateProducerIds",
            "ControllerRegistration",
            "AssignReplicasToDirs",
            "InitializeShareGroupState",
            "ReadShareGroupState",
            "WriteShareGroupState",
            "DeleteShareGroupState",
            "ReadShareGroupStateSummary",
        ),
    }
)
"""Kafka's APIs that are not served, by reason."""


class ApiEntry(NamedTuple):
    """A row of the table."""

    key: int
    name: str
    oldest: int
    newest: int
    does: str


def protocol_page() -> str:
    entries = sorted(api_entries())
    public = [entry for entry in entries if entry.key < _PRIVATE_KEY_MIN]
    private = [entry for entry in entries if entry.key >= _PRIVATE_KEY_MIN]
    features = "".join(
        f"| `{feature.name}` | {_span(feature.oldest, feature.newest)} | {feature.level or 'off'} | "
        f"{_MEANINGS[feature.name]} |\n"
        for feature in features_of({entry.key for entry in entries})
    )
    quotas = "".join(f"| `{name}` | {reason} |\n" for name, reason in sorted(MISSING.items()))
    own = (
        "\n## Millstream's own requests\n\n"
        "ApiVersions lists them only for Millstream's own clients. Their bodies are MessagePack.\n\n"
    )
    return _HEAD + _table(public) + own + _table(private) + _FEATURES + features + _QUOTAS + quotas + _not_served()


def api_entries() -> Iterator[ApiEntry]:
    """Return every API of `broker/kafka/apis/`; its class describes it if the module has several, else the module."""
    package = importlib.import_module("millstream.broker.kafka.apis")
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        apis = apis_of(module)
        for api in apis:
            described = module if len(apis) == 1 else api
            summary = " ".join((described.__doc__ or "").split("\n\n")[0].split())
            does = _HEADLINE.sub("", summary)
            oldest, newest = api.versions
            yield ApiEntry(api.key, api.__name__, oldest, newest, does[0].upper() + does[1:])


def apis_of(module: Any) -> list[Any]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and isinstance(vars(value).get("key"), int)
    ]


def _table(entries: list[ApiEntry]) -> str:
    rows = "".join(
        f"| {entry.key} | {entry.name} | {_span(entry.oldest, entry.newest)} | "
        f"{entry.does.replace('|', chr(92) + '|')} |\n"
        for entry in entries
    )
    return "| key | API | versions | what it does |\n|---|---|---|---|\n" + rows


def _span(oldest: int, newest: int) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"


def _not_served() -> str:
    return _MISSING_HEAD + "".join(f"| {', '.join(names)} | {reason} |\n" for reason, names in NOT_SERVED.items())


if __name__ == "__main__":
    sys.stdout.write(protocol_page())
