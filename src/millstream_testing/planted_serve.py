"""`millstream serve` with an injected bug in subscriptions, so that a trial can show that it would be found.

    python -m millstream_testing.planted_serve BUG FILE serve --data DIR ...

FILE is as for `stepped_serve`. Each bug is one that a developer could have written.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, Final

from millstream.broker.subscriptions.dead_letters import DeadLetterAppender
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.routed_store import RoutedStateStore
from millstream.broker.subscriptions.state_store import PendingWrite
from millstream.core.ids import Offset
from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing import stepped_serve

LATE_S: Final = 0.3
_SOMETIMES: Final = 0.05
_random = Random(1)


def planted(bug: str) -> tuple[str, ...]:
    """Return how to run a node with a bug, as `TrialCluster` takes it."""
    return "millstream_testing.planted_serve", bug


def _responds_early() -> None:
    """Writes to the store count as durable before they are: they wait a little for more writes."""
    write = RoutedStateStore.write
    last: dict[RoutedStateStore, float] = {}

    def hasty(self: RoutedStateStore, write_key: Any) -> PendingWrite:
        loop = asyncio.get_running_loop()
        # In order, even if the clock of the loop gives two the same time.
        last[self] = max(loop.time() + LATE_S, last.get(self, 0.0) + 1e-4)
        loop.call_at(last[self], write, self, write_key)
        done = PendingWrite()
        done.finish()
        return done

    _replace(RoutedStateStore, "write", hasty)


def _forgets_attempts() -> None:
    """A queue that moves restarts its count of attempts."""
    restore = Queue._rebuild

    def forgetful(self: Queue) -> None:
        attempts = self._fold.window.attempts
        attempts[:] = bytes(len(attempts))
        restore(self)

    _replace(Queue, "_rebuild", forgetful)


def _writes_letters_again() -> None:
    """A letter whose response is late is written again, without the number that identifies it."""
    append = DeadLetterAppender.append

    async def again(self: DeadLetterAppender, topic: str, index: int, batch: bytearray) -> Offset:
        if _random.random() < _SOMETIMES:
            records = [
                NewRecord(record.key, record.value, record.headers, record.timestamp_ms)
                for record in decode_records(batch)
            ]
            await append(self, topic, index, bytearray(encode_batch(records)))
        return await append(self, topic, index, batch)

    _replace(DeadLetterAppender, "append", again)


def _ignores_delays() -> None:
    """Messages are delivered when they arrive, without their delay."""
    look = Queue.add_scanned

    def hasty(self: Queue, first: int, next_offset: int, **seen: Any) -> None:
        look(self, first, next_offset, **{**seen, "due": ()})

    _replace(Queue, "add_scanned", hasty)


def _passes_over() -> None:
    """From time to time, the last scanned message is treated as absent."""
    look = Queue.add_scanned

    def careless(self: Queue, first: int, next_offset: int, **seen: Any) -> None:
        if _random.random() < _SOMETIMES:
            seen["absent"] = [*seen.get("absent", ()), (next_offset - 1, next_offset - 1)]
        look(self, first, next_offset, **seen)

    _replace(Queue, "add_scanned", careless)


def _forgets_keys() -> None:
    """A queue that moves loses the order of its keys."""
    _with_settings(lambda settings, moved: replace(settings, ordered=settings.ordered and not moved))


def _leases_at_most_once() -> None:
    """A message of an at-most-once subscription is leased like any other."""

    def lenient(settings: Any, moved: bool) -> Any:
        return replace(settings, delivery=AT_LEAST_ONCE) if settings.delivery == AT_MOST_ONCE else settings

    _with_settings(lenient)


def _with_settings(change: Callable[[Any, bool], Any]) -> None:
    begin = Queue.__init__

    def other(self: Queue, key: Any, settings: Any, *, snapshot: bytes | None = None, **more: Any) -> None:
        begin(self, key, change(settings, snapshot is not None), snapshot=snapshot, **more)

    _replace(Queue, "__init__", other)


def _replace(kind: type, name: str, function: object) -> None:
    setattr(kind, name, function)


BUGS: Final[Mapping[str, Callable[[], None]]] = {
    "responses-early": _responds_early,
    "forgets-attempts": _forgets_attempts,
    "forgets-keys": _forgets_keys,
    "ignores-delays": _ignores_delays,
    "leases-at-most-once": _leases_at_most_once,
    "passes-over": _passes_over,
    "writes-letters-again": _writes_letters_again,
}


def main() -> None:
    """Plant the bug, and run the command."""
    BUGS[sys.argv.pop(1)]()
    stepped_serve.main()


if __name__ == "__main__":
    main()
