"""librdkafka without Python per message, so that a benchmark measures the broker and not the client.

confluent-kafka creates a Python object per message, which on two cores costs more than the broker. This module calls
the unmodified library that confluent-kafka ships, through its batch functions and with compiled callbacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import numpy.typing as npt
from benchmarks.callbacks import ACKNOWLEDGED, COUNTED, ERROR, RECEIVED, Counters

PRODUCER, CONSUMER = 0, 1
ANY_PARTITION = -1
# A number, not "the beginning", whose lookup delays some partitions by half a second.
START_OFFSET = 0
_BLOCK = 0x4
_ERROR_TEXT_BYTES = 512
_RESPONSE_MS_MAX = 30_000
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

MESSAGE = np.dtype(
    [
        ("err", np.int32),
        ("rkt", np.uint64),
        ("partition", np.int32),
        ("payload", np.uint64),
        ("len", np.uint64),
        ("key", np.uint64),
        ("key_len", np.uint64),
        ("offset", np.int64),
        ("private", np.int64),
    ],
    align=True,
)
"""The memory layout of the library's message."""

Messages = npt.NDArray[np.void]


class ClientFailed(Exception):
    """The library or the broker reported an error."""


def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: returning it and allocating it again would dominate the client's cost."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 128 << 20), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, value)


@cache
def _library() -> ctypes.CDLL:
    _keep_freed_memory()
    package = Path(confluent_kafka.__file__).parent
    for folder in (package.parent / "confluent_kafka.libs", package / ".dylibs"):
        for path in sorted(folder.glob("librdkafka*")):
            return _declare(ctypes.CDLL(str(path)))
    raise OSError("this confluent-kafka does not include librdkafka")


def version() -> str:
    return str(confluent_kafka.libversion()[0])


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    offset = ctypes.POINTER(ctypes.c_int64)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "rd_kafka_conf_new": (pointer, []),
        "rd_kafka_conf_set": (number, [pointer, text, text, text, ctypes.c_size_t]),
        "rd_kafka_conf_set_opaque": (None, [pointer, pointer]),
        "rd_kafka_conf_set_dr_msg_cb": (None, [pointer, pointer]),
        "rd_kafka_new": (pointer, [number, pointer, text, ctypes.c_size_t]),
        "rd_kafka_topic_new": (pointer, [pointer, text, pointer]),
        "rd_kafka_topic_destroy": (None, [pointer]),
        "rd_kafka_produce_batch": (number, [pointer, ctypes.c_int32, number, pointer, number]),
        "rd_kafka_poll": (number, [pointer, number]),
        "rd_kafka_flush": (number, [pointer, number]),
        "rd_kafka_query_watermark_offsets": (number, [pointer, text, ctypes.c_int32, offset, offset, number]),
        "rd_kafka_queue_new": (pointer, [pointer]),
        "rd_kafka_queue_destroy": (None, [pointer]),
        "rd_kafka_queue_length": (ctypes.c_size_t, [pointer]),
        "rd_kafka_consume_start_queue": (number, [pointer, ctypes.c_int32, ctypes.c_int64, pointer]),
        "rd_kafka_consume_stop": (number, [pointer, ctypes.c_int32]),
        "rd_kafka_consume_callback_queue": (number, [pointer, number, pointer, pointer]),
        "rd_kafka_err2str": (text, [number]),
        "rd_kafka_destroy": (None, [pointer]),
        "rd_kafka_init_transactions": (pointer, [pointer, number]),
        "rd_kafka_begin_transaction": (pointer, [pointer]),
        "rd_kafka_commit_transaction": (pointer, [pointer, number]),
        "rd_kafka_abort_transaction": (pointer, [pointer, number]),
        "rd_kafka_error_string": (text, [pointer]),
        "rd_kafka_error_destroy": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def error_text(code: int) -> str:
    message: bytes = _library().rd_kafka_err2str(ctypes.c_int(code & 0xFFFFFFFF).value)
    return message.decode()


class Client:
    """One librdkafka handle and one topic."""

    def __init__(self, kind: int, topic: str, settings: Mapping[str, str], reports: Counters | None = None) -> None:
        self._library = _library()
        self._name = topic.encode()
        error = ctypes.create_string_buffer(_ERROR_TEXT_BYTES)
        conf = self._library.rd_kafka_conf_new()
        for name, value in settings.items():
            if self._library.rd_kafka_conf_set(conf, name.encode(), value.encode(), error, _ERROR_TEXT_BYTES):
                raise ClientFailed(error.value.decode())
        if reports is not None:
            self._library.rd_kafka_conf_set_opaque(conf, reports.ctypes.data)
            self._library.rd_kafka_conf_set_dr_msg_cb(conf, ACKNOWLEDGED)
        self._handle = self._library.rd_kafka_new(kind, conf, error, _ERROR_TEXT_BYTES)
        if not self._handle:
            raise ClientFailed(error.value.decode())
        self._topic = self._library.rd_kafka_topic_new(self._handle, self._name, None)

    def close(self) -> None:
        """Release the library's threads and memory."""
        self._library.rd_kafka_topic_destroy(self._topic)
        self._library.rd_kafka_destroy(self._handle)


class PreparedMessages:
    """Prepared messages, created once and sent repeatedly.

    With `numbered`, the first eight bytes of a message are its number, starting at 1. To save memory, each message is a
    window into one long sequence of numbers.
    """

    def __init__(self, count: int, size_bytes: int, *, keys: int = 0, numbered: bool = False) -> None:
        self.count = count
        self.messages: Messages = np.zeros(count, MESSAGE)
        self.messages["len"] = size_bytes
        if numbered:
            self._payload = np.arange(1, count + size_bytes // 8 + 2, dtype=np.int64)
            self.messages["payload"] = self._payload.ctypes.data + 8 * np.arange(count, dtype=np.uint64)
            self.messages["private"] = np.arange(1, count + 1)
        else:
            self._payload = np.random.default_rng(1).integers(1, 2**62, size_bytes // 8 + 1)
            # Not a number that a consumer waits for.
            self._payload[0] = 0
            self.messages["payload"] = self._payload.ctypes.data
        if keys:
            self._keys = np.char.zfill((np.arange(count) % keys).astype("S8"), 8)
            self.messages["key"] = self._keys.ctypes.data + 8 * np.arange(count, dtype=np.uint64)
            self.messages["key_len"] = 8


class Producer(Client):
    """Sends prepared messages; `reports` records the responses."""

    def __init__(self, topic: str, settings: Mapping[str, str], reports: Counters | None = None) -> None:
        super().__init__(PRODUCER, topic, settings, reports)
        self._reports = reports

    def send(self, load: PreparedMessages, first: int, count: int, partition: int = ANY_PARTITION) -> None:
        """Queue some messages; waits while the client's own queue is full."""
        place = load.messages.ctypes.data + first * MESSAGE.itemsize
        taken = self._library.rd_kafka_produce_batch(self._topic, partition, _BLOCK, place, count)
        if taken != count:
            refused = load.messages["err"][first : first + count]
            raise ClientFailed(f"{count - taken} of {count} messages: {error_text(int(refused[refused != 0][0]))}")

    def poll(self, timeout_ms: int) -> int:
        """Process delivery reports, waiting at most `timeout_ms` for the first; return their number."""
        count: int = self._library.rd_kafka_poll(self._handle, timeout_ms)
        return count

    def flush(self, timeout_ms: int) -> bool:
        """Wait until every message has a response; return False after the timeout."""
        return not self._library.rd_kafka_flush(self._handle, timeout_ms)

    def end_offset(self, partition: int) -> int:
        """Return the number of messages of a partition that was empty."""
        low, high = ctypes.c_int64(), ctypes.c_int64()
        code = self._library.rd_kafka_query_watermark_offsets(
            self._handle, self._name, partition, ctypes.byref(low), ctypes.byref(high), _RESPONSE_MS_MAX
        )
        if code:
            raise ClientFailed(f"the end of partition {partition}: {error_text(code)}")
        return high.value


class TransactionalProducer(Producer):
    """Sends prepared messages in transactions; the settings have to name a transactional id."""

    def initialize(self) -> None:
        """Initialize the transactional id."""
        self._check(self._library.rd_kafka_init_transactions(self._handle, _RESPONSE_MS_MAX))

    def begin(self) -> None:
        self._check(self._library.rd_kafka_begin_transaction(self._handle))

    def end(self, *, commit: bool) -> None:
        """Wait for all responses, and commit or abort the transaction."""
        end = self._library.rd_kafka_commit_transaction if commit else self._library.rd_kafka_abort_transaction
        if not commit:
            # An abort discards unsent messages, but these are to be read back.
            self.flush(_RESPONSE_MS_MAX)
        self._check(end(self._handle, _RESPONSE_MS_MAX))

    def _check(self, error: int | None) -> None:
        if error:
            message: bytes = self._library.rd_kafka_error_string(error)
            self._library.rd_kafka_error_destroy(error)
            raise ClientFailed(message.decode())


class Consumer(Client):
    """Reads partitions from their start; `counters` records the messages and, with `timed`, their times of arrival."""

    def __init__(
        self,
        topic: str,
        settings: Mapping[str, str],
        partitions: Sequence[int],
        counters: Counters,
        *,
        timed: bool = False,
    ) -> None:
        super().__init__(CONSUMER, topic, settings)
        self._queue = self._library.rd_kafka_queue_new(self._handle)
        self._partitions = partitions
        self._counters = counters
        self._callback = RECEIVED if timed else COUNTED
        for partition in partitions:
            if self._library.rd_kafka_consume_start_queue(self._topic, partition, START_OFFSET, self._queue):
                raise ClientFailed(f"librdkafka could not start on partition {partition}")

    def waiting(self) -> int:
        """Return how many messages the library has received and parsed, and that were not consumed yet."""
        count: int = self._library.rd_kafka_queue_length(self._queue)
        return count

    def poll(self, timeout_ms: int) -> None:
        """Consume all available messages, waiting at most `timeout_ms` for the first."""
        self._library.rd_kafka_consume_callback_queue(
            self._queue, timeout_ms, self._callback, self._counters.ctypes.data
        )
        if self._counters[ERROR]:
            raise ClientFailed(error_text(int(self._counters[ERROR])))

    def close(self) -> None:
        """Stop reading, and release the client."""
        for partition in self._partitions:
            self._library.rd_kafka_consume_stop(self._topic, partition)
        self._library.rd_kafka_queue_destroy(self._queue)
        super().close()
