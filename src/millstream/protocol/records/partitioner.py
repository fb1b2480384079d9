"""Which partition a key goes to, for whole columns of keys."""

from __future__ import annotations

import numpy as np

from millstream.protocol.records.columns import BinaryColumn
from millstream.protocol.records.kernels import murmur2
from millstream.protocol.records.layout import Int32s, read_only


def choose_partitions(keys: BinaryColumn, partitions: int) -> Int32s:
    """The partition of every key by Kafka's rule, `positive(murmur2(key)) % partitions`; -1 where the key is null."""
    if partitions < 1:
        raise ValueError(f"a topic has at least one partition, not {partitions}")
    keys.check()
    chosen = np.empty(len(keys), np.int32)
    murmur2.choose_partitions(read_only(keys.data), read_only(keys.offsets[:-1]), keys.lengths(), partitions, chosen)
    return chosen
