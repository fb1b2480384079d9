"""Settings of Kafka's topics that Millstream does not have, each with the reason, so that they are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from millstream.core.errors import InvalidSetting
from millstream.core.nearest import suggestion

_REMOTE = "retention through remote storage is not available; a topic keeps all its segments on the node's own disk"
_RECOMPRESSION = "batches are stored as their producer compressed them; set the level in the producer"
_THROTTLE = "replication is not throttled by topic, and a cluster of one node has none"
_REMOVED = "Kafka 4.0 removed it too"

MISSING: Mapping[str, str] = MappingProxyType(
    {
        "compression.gzip.level": _RECOMPRESSION,
        "compression.lz4.level": _RECOMPRESSION,
        "compression.zstd.level": _RECOMPRESSION,
        "follower.replication.throttled.replicas": _THROTTLE,
        "leader.replication.throttled.replicas": _THROTTLE,
        "local.retention.bytes": _REMOTE,
        "local.retention.ms": _REMOTE,
        "message.downconversion.enable": f"{_REMOVED}; consumers of all versions served read the stored format",
        "message.format.version": f"{_REMOVED}; batches are stored in format v2",
        "message.timestamp.difference.max.ms": f"{_REMOVED}; set message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms",
        "remote.log.copy.disable": _REMOTE,
        "remote.log.delete.on.disable": _REMOTE,
    }
)
"""The name of each setting and the reason why it is not here."""


def unknown_setting(name: str, known: Iterable[str]) -> InvalidSetting:
    """The error for a setting that a topic does not have: Kafka's, with the reason, or nobody's."""
    if name in MISSING:
        return InvalidSetting(f"{name} is a setting of Kafka that Millstream does not have: {MISSING[name]}")
    names = sorted(known)
    meant = suggestion(name, names) or f"; known are: {', '.join(names)}"
    return InvalidSetting(f"unknown topic setting {name!r}{meant}")
