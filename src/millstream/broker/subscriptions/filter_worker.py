"""Evaluate filters and scan heavy batches: a few messages in this process, more in a child process.

The child starts with the first batch that is worth it, stops after an idle period, and is restarted when it dies. It
handles one request at a time; the others wait in order, holding no more than the bytes that their callers hold anyway.
A request that kills the child twice, while the child responds to others, counts as unreadable, so that it cannot block
a queue forever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from millstream.broker.subscriptions.batch_scan import BatchScan
from millstream.broker.subscriptions.filter_worker_child import (
    BatchRequest,
    FilterMatches,
    FilterRequest,
    FilterResponse,
    ScannedBatch,
    Unreadable,
)
from millstream.core.backoff import delay_after
from millstream.core.child_pool import ChildDied, ChildPool, ChildTimedOut
from millstream.core.errors import CorruptBatch, FilterUnavailable, QuotaExceeded
from millstream.core.tasks import within
from millstream.protocol.filter.filter import Evaluation, Filter, Messages, evaluate_few
from millstream.protocol.records.batch import Buffer, iterate_whole_headers

_logger = logging.getLogger(__name__)

MODULE = "millstream.broker.subscriptions.filter_worker_child"

INLINE_BYTES_MAX = 32 * 1024
INLINE_MESSAGES_MAX = 64
INLINE_CHECKS_MAX = 1024
"""The number of messages times filters up to which evaluation stays on the loop, for less than a millisecond."""

ATTEMPTS = 2
RESPONSE_S_MAX = 60.0
"""A child that takes longer counts as dead."""

FATAL_REQUESTS_MAX = 1024
"""The number of fatal requests that are remembered and not tried again for other queues."""

IDLE_S = 300.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 10.0

_FAILURES = (ChildDied, ChildTimedOut, QuotaExceeded, OSError, msgspec.MsgspecError)
_FATAL_RESPONSE = Unreadable(f"the process that reads it died {ATTEMPTS} times")
_PROBE = msgspec.msgpack.encode(FilterRequest("", 0, b"", 0, 0, [], []))


class FilterWorker:
    """Evaluates filters; one per node."""

    def __init__(
        self, *, response_s_max: float = RESPONSE_S_MAX, idle_s: float = IDLE_S, backoff_min_s: float = BACKOFF_MIN_S
    ) -> None:
        self._children = ChildPool(MODULE, noun="messages", response_s=response_s_max, idle_s=idle_s, slow_workers=0)
        self._backoff_min_s = backoff_min_s
        self._lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._failures = 0
        self._fatal_requests: dict[int, None] = {}
        """Hashes of the requests that killed the child, the oldest first."""
        self.evaluated_inline = 0
        self.evaluated_in_child = 0
        self.scanned_in_child = 0
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return next(iter(self._children.pids), None)

    async def evaluate(self, messages: Messages, filters: Sequence[Filter]) -> Evaluation:
        """Find which messages match which filter.

        Raises `CorruptBatch` if the messages are unreadable or kill the child, and `FilterUnavailable` without a
        response.
        """
        if is_light(messages, len(filters)):
            with suppress(CorruptBatch):
                evaluation = evaluate_few(messages, filters, decompressed_bytes_max=INLINE_BYTES_MAX)
                self.evaluated_inline += 1
                return evaluation
            # Batches that decompress to too much go to the child, which also recognizes corrupt ones.
        request = _encode_request(messages, filters)
        async with self._lock:
            response = await self._send_with_retries(request)
        if not isinstance(response, FilterMatches):
            raise CorruptBatch(
                response.reason if isinstance(response, Unreadable) else "the response has an unexpected type"
            )
        self.evaluated_in_child += 1
        return response.evaluation()

    async def scan_batch(self, batch: Buffer, first: int, *, with_keys: bool) -> BatchScan | str:
        """Scan a batch that is too heavy for the loop; return the reason if it is unreadable or kills the child.

        Raises `FilterUnavailable` without a response.
        """
        request = msgspec.msgpack.encode(BatchRequest(bytes(batch), first, with_keys))
        async with self._lock:
            response = await self._send_with_retries(request)
        self.scanned_in_child += 1
        return (
            response.scan() if isinstance(response, ScannedBatch) else getattr(response, "reason", "it was not scanned")
        )

    async def stop(self) -> None:
        """Stop the child; pending requests raise `FilterUnavailable`."""
        self._stopping.set()
        await self._children.close()

    async def _send_with_retries(self, request: bytes) -> FilterResponse:
        if hash(request) in self._fatal_requests:
            return _FATAL_RESPONSE
        deaths = 0
        for attempt in range(ATTEMPTS):
            await self._pause()
            if self._stopping.is_set():
                raise FilterUnavailable("the broker is stopping")
            try:
                response = await self._send(request)
            except _FAILURES as error:
                self._failures += 1
                self.restarts += 1
                deaths += isinstance(error, ChildDied)
                reason = str(error) or type(error).__name__
                _logger.warning("evaluating filters failed", extra={"reason": reason, "attempt": attempt + 1})
            else:
                self._failures = 0
                return response
        # A timeout, or a child that returns nothing at all, does not prove that the messages are to blame.
        if deaths == ATTEMPTS and await self._child_responds():
            self._fatal_requests[hash(request)] = None
            if len(self._fatal_requests) > FATAL_REQUESTS_MAX:
                del self._fatal_requests[next(iter(self._fatal_requests))]
            return _FATAL_RESPONSE
        raise FilterUnavailable(f"filters could not be evaluated: {reason}")

    async def _child_responds(self) -> bool:
        """Whether the child runs and responds to an empty request."""
        await self._pause()
        if self._stopping.is_set():
            return False
        try:
            await self._send(_PROBE)
        except _FAILURES:
            self._failures += 1
            return False
        self._failures = 0
        return True

    async def _pause(self) -> None:
        """Wait before restarting a child that died, longer each time."""
        if self._failures == 0:
            return
        pause_s = delay_after(self._failures - 1, first_s=self._backoff_min_s, max_s=BACKOFF_MAX_S)
        with suppress(TimeoutError):
            await within(pause_s, self._stopping.wait())

    async def _send(self, request: bytes) -> FilterResponse:
        response: FilterResponse = msgspec.msgpack.decode(await self._children.request(request), type=FilterResponse)
        return response


def is_light(messages: Messages, filter_count: int) -> bool:
    """Whether the loop can evaluate filters on these messages without stalling."""
    if len(messages.batches) > INLINE_BYTES_MAX:
        return False
    count = sum(header.record_count for header in iterate_whole_headers(messages.batches))
    return count <= INLINE_MESSAGES_MAX and count * filter_count <= INLINE_CHECKS_MAX


def _encode_request(messages: Messages, filters: Sequence[Filter]) -> bytes:
    request = FilterRequest(
        messages.topic,
        messages.partition,
        bytes(messages.batches),
        messages.start_offset,
        messages.end_offset,
        list(messages.aborted),
        [compiled.text for compiled in filters],
    )
    return msgspec.msgpack.encode(request)
