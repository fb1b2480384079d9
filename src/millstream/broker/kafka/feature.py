"""Features and their levels (KIP-584), as ApiVersions reports them and clients read them.

What clients make of them: a Java producer uses the second version of the transaction protocol when
`transaction.version` is finalized at 2, and tools derive the version and capabilities of a broker from the finalized
`metadata.version`. Here that level says which Kafka the APIs are those of; there is no metadata log behind it, and so
no `kraft.version`. `group.version` is there once the consumer group protocol of KIP-848 is served, `share.version` once
the share groups of KIP-932 are.

A level is fixed by the release: it rises with a newer Millstream and is not changed by UpdateFeatures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

END_TXN_KEY: Final = 26
CONSUMER_GROUP_HEARTBEAT_KEY: Final = 68
SHARE_FETCH_KEY: Final = 78

METADATA_VERSION: Final = "metadata.version"
TRANSACTION_VERSION: Final = "transaction.version"
GROUP_VERSION: Final = "group.version"
SHARE_VERSION: Final = "share.version"

EPOCH_PER_TRANSACTION: Final = 2
"""The second version of the transaction protocol (KIP-890)."""

KAFKA_4_0: Final = 25
"""The level that Kafka calls 4.0-IV3."""


class Feature(NamedTuple):
    """A feature, the levels that this release knows, and the one in force; 0 means that it is off."""

    name: str
    oldest: int
    newest: int
    level: int


def features_of(served: Collection[int]) -> Iterator[Feature]:
    """The features of a broker that serves the APIs of these keys."""
    yield Feature(METADATA_VERSION, KAFKA_4_0, KAFKA_4_0, KAFKA_4_0)
    if END_TXN_KEY in served:
        yield Feature(TRANSACTION_VERSION, 0, EPOCH_PER_TRANSACTION, EPOCH_PER_TRANSACTION)
    if CONSUMER_GROUP_HEARTBEAT_KEY in served:
        yield Feature(GROUP_VERSION, 0, 1, 1)
    if SHARE_FETCH_KEY in served:
        yield Feature(SHARE_VERSION, 0, 1, 1)


def epoch_of(features: Iterable[Feature]) -> int:
    """Return the epoch of the levels, which is their sum: clients adopt levels with a larger epoch."""
    return sum(feature.level for feature in features)
