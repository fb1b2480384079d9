"""librdkafka without Python between it and the broker, so that a benchmark measures the broker and not the client.

confluent-kafka makes a Python object per message, which on two cores costs more than the broker does. This calls the
very library that confluent-kafka ships, unmodified, by its batch functions: a message costs no Python at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka

PRODUCER, CONSUMER = 0, 1
# A number, not "the beginning": looking that up makes the client wait half a second for some of the partitions.
START_OFFSET = 0
_BLOCK = 0x4
_ERROR_TEXT_BYTES = 512


class _Message(ctypes.Structure):
    _fields_ = (
        ("err", ctypes.c_int),
        ("rkt", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("_private", ctypes.c_void_p),
    )


def _load() -> ctypes.CDLL:
    package = Path(confluent_kafka.__file__).parent
    for folder in (package.parent / "confluent_kafka.libs", package / ".dylibs"):
        for path in sorted(folder.glob("librdkafka*")):
            return _declare(ctypes.CDLL(str(path)))
    raise OSError("this confluent-kafka does not bring a librdkafka of its own")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "rd_kafka_conf_new": (pointer, []),
        "rd_kafka_conf_set": (
            ctypes.c_int,
            [pointer, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
        ),
        "rd_kafka_new": (pointer, [ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_size_t]),
        "rd_kafka_topic_new": (pointer, [pointer, ctypes.c_char_p, pointer]),
        "rd_kafka_topic_destroy": (None, [pointer]),
        "rd_kafka_produce_batch": (
            ctypes.c_int,
            [pointer, ctypes.c_int32, ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int],
        ),
        "rd_kafka_flush": (ctypes.c_int, [pointer, ctypes.c_int]),
        "rd_kafka_queue_new": (pointer, [pointer]),
        "rd_kafka_queue_destroy": (None, [pointer]),
        "rd_kafka_consume_start_queue": (ctypes.c_int, [pointer, ctypes.c_int32, ctypes.c_int64, pointer]),
        "rd_kafka_consume_stop": (ctypes.c_int, [pointer, ctypes.c_int32]),
        "rd_kafka_consume_callback_queue": (ctypes.c_int, [pointer, ctypes.c_int, pointer, pointer]),
        "rd_kafka_destroy": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Client:
    """One librdkafka handle and one topic."""

    def __init__(self, kind: int, topic: str, settings: Mapping[str, str]) -> None:
        self._library = _load()
        error = ctypes.create_string_buffer(_ERROR_TEXT_BYTES)
        conf = self._library.rd_kafka_conf_new()
        for name, value in settings.items():
            if self._library.rd_kafka_conf_set(conf, name.encode(), value.encode(), error, _ERROR_TEXT_BYTES):
                raise ValueError(error.value.decode())
        self._handle = self._library.rd_kafka_new(kind, conf, error, _ERROR_TEXT_BYTES)
        if not self._handle:
            raise ValueError(error.value.decode())
        self._topic = self._library.rd_kafka_topic_new(self._handle, topic.encode(), None)

    def close(self) -> None:
        """Let go of the library's threads and memory."""
        self._library.rd_kafka_topic_destroy(self._topic)
        self._library.rd_kafka_destroy(self._handle)


class Producer(Client):
    """Sends the same payload over and over, spread evenly over the partitions."""

    def __init__(self, topic: str, settings: Mapping[str, str], payload: bytes, *, at_once: int = 1000) -> None:
        super().__init__(PRODUCER, topic, settings)
        self._payload = ctypes.create_string_buffer(payload, len(payload))
        self._batch = (_Message * at_once)()
        self._at_once = at_once
        self._size = len(payload)

    def send(self, partition: int, count: int) -> None:
        """Queue `count` messages for one partition; waits while the client's own queue is full."""
        for done in range(0, count, self._at_once):
            now = min(self._at_once, count - done)
            for message in self._batch[:now]:
                message.err = 0
                message.payload, message.len = ctypes.addressof(self._payload), self._size
            taken = self._library.rd_kafka_produce_batch(self._topic, partition, _BLOCK, self._batch, now)
            if taken != now:
                raise RuntimeError(f"librdkafka took {taken} of {now} messages")

    def flush(self, timeout_ms: int) -> bool:
        """Wait until every message is answered; False when the time is up before."""
        return not self._library.rd_kafka_flush(self._handle, timeout_ms)


class Consumer(Client):
    """Reads partitions from their start and counts the messages; errors of the library count too, so check the sum."""

    def __init__(self, topic: str, settings: Mapping[str, str], partitions: Sequence[int]) -> None:
        super().__init__(CONSUMER, topic, settings)
        self._queue = self._library.rd_kafka_queue_new(self._handle)
        self._partitions = partitions
        # The library calls this for each message and frees the message after it. It must cost nothing and may ignore
        # its arguments; abs() of the C library does.
        self._ignore = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
        for partition in partitions:
            if self._library.rd_kafka_consume_start_queue(self._topic, partition, START_OFFSET, self._queue):
                raise RuntimeError(f"librdkafka could not start on partition {partition}")

    def poll(self, timeout_ms: int) -> int:
        """Take all that is there, waiting at most `timeout_ms` for the first, and tell how many there were."""
        count: int = self._library.rd_kafka_consume_callback_queue(self._queue, timeout_ms, self._ignore, None)
        return count

    def close(self) -> None:
        """Stop reading, then let go of the rest."""
        for partition in self._partitions:
            self._library.rd_kafka_consume_stop(self._topic, partition)
        self._library.rd_kafka_queue_destroy(self._queue)
        super().close()
