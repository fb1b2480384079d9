"""Batches that a broker must refuse, and producer ids."""

from __future__ import annotations

import struct
import time
from typing import Any

from conformance.questions.asking import (
    BAD_NAME,
    COMPACTED,
    COMPACTED_RECENT,
    NOWHERE,
    RECENT,
    UNKNOWN_ID,
    Key,
    Question,
    batch,
    keyed_batch,
    produced,
    question,
)
from crc32c import crc32c

_MAGIC_AT, _CRC_AT, _ATTRIBUTES_AT, _LAST_DELTA_AT, _COUNT_AT = 16, 17, 21, 23, 57
_FAR_AHEAD_MS = 4_000_000_000_000
_NOW_MS = int(time.time() * 1000)


def _patched(position: int, layout: str, value: int) -> bytes:
    """A batch with one field overwritten and a correct checksum."""
    data = bytearray(batch(2))
    struct.pack_into(layout, data, position, value)
    struct.pack_into(">I", data, _CRC_AT, crc32c(bytes(data[_ATTRIBUTES_AT:])))
    return bytes(data)


def _corrupt() -> bytes:
    data = bytearray(batch())
    data[-1] ^= 0xFF
    return bytes(data)


def _produce(about: str, records: bytes | None, version: int = 9, **more: Any) -> Question:
    return question(about, Key.PRODUCE, version, **produced(records, **more))


def _from_producer(producer_id: int, sequence: int, **settings: Any) -> bytes:
    return batch(producer_id=producer_id, producer_epoch=0, base_sequence=sequence, **settings)


def _init(about: str, version: int = 4, **values: Any) -> Question:
    settings = {"transactional_id": None, "transaction_timeout": 60000, **values}
    return question(about, Key.INIT_PRODUCER_ID, version, **settings)


QUESTIONS = (
    _produce("unknown topic", batch(), topic=NOWHERE),
    _produce("bad topic name", batch(), topic=BAD_NAME),
    _produce("unknown partition", batch(), partition=7),
    _produce("unknown partition", batch(), 3, partition=7),
    _produce("acks=2", batch(), acks=2),
    _produce("no records", b""),
    _produce("null records", None),
    _produce("bad checksum", _corrupt()),
    _produce("half a batch", batch()[:-3]),
    _produce("less than a header", batch()[:40]),
    _produce("garbage", bytes(100)),
    _produce("two batches", batch() + batch()),
    _produce("magic 1", _patched(_MAGIC_AT, ">b", 1)),
    _produce("magic 7", _patched(_MAGIC_AT, ">b", 7)),
    _produce("wrong count", _patched(_COUNT_AT, ">i", 5)),
    _produce("wrong last offset delta", _patched(_LAST_DELTA_AT, ">i", 5)),
    _produce("negative last offset delta", _patched(_LAST_DELTA_AT, ">i", -1)),
    _produce("unknown codec", _patched(_ATTRIBUTES_AT, ">h", 7)),
    _produce("says gzip, is not", _patched(_ATTRIBUTES_AT, ">h", 1), topic="with.dot"),
    _produce("control batch", batch(control=True)),
    _produce("batch of a transaction, without its name", _from_producer(5, 0, transactional=True)),
    _produce("zstd", batch(compression=4), 6),
    _produce("zstd", batch(compression=4), 7),
    _produce("too large", batch(size=1_200_000)),
    _produce("internal topic", batch(), topic="__consumer_offsets"),
    _produce("time far ahead", batch(time_ms=_FAR_AHEAD_MS), topic="with.dot"),
    _produce("time long ago", batch(time_ms=1)),
    _produce("no time", batch(time_ms=-1)),
    *(
        _produce("records without a key", keyed_batch(b"a", None, b"b", None), version, topic=COMPACTED)
        for version in (7, 8, 9, 12)
    ),
    _produce("records without a key, gzip", keyed_batch(None, b"a", compression=1), topic=COMPACTED),
    _produce("a time ago among others", keyed_batch(b"a", b"b", times_ms=(_NOW_MS, 1000)), topic=RECENT),
    _produce("the first a time ago", keyed_batch(b"a", b"b", times_ms=(1000, _NOW_MS)), topic=RECENT),
    _produce("all a time ago, lz4", keyed_batch(b"a", b"b", times_ms=(1000, 2000), compression=3), topic=RECENT),
    _produce("times ahead", keyed_batch(b"a", b"b", b"c", times_ms=(_NOW_MS, _FAR_AHEAD_MS, _NOW_MS)), topic=RECENT),
    _produce(
        "no key, a time ago, both",
        keyed_batch(None, b"b", None, b"c", times_ms=(_NOW_MS, 1000, 1000, _NOW_MS)),
        topic=COMPACTED_RECENT,
    ),
    _produce("producer id without sequence", _from_producer(4002, -1)),
    _produce("sequence that does not begin with 0", _from_producer(4001, 7)),
    question(
        "unknown topic id",
        Key.PRODUCE,
        13,
        acks=-1,
        timeout=5000,
        topic_data=[{"topic_id": UNKNOWN_ID, "partition_data": [{"index": 0, "records": batch()}]}],
    ),
    _init("plain", 0),
    _init("plain"),
    _init("empty name", transactional_id=""),
    _init("id without epoch", producer_id=5),
    _init("epoch without id", producer_epoch=5),
    _init("no timeout", transaction_timeout=0),
)
