"""The child process that compacts: requests on its standard input, responses on its standard output.

The first request is the pass, the next are numbers of groups; each gets a response before the next is read. A message
is its length in four bytes and MessagePack. The child ends when its input closes or its parent is gone, and runs with a
lower priority than the broker.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import IO

import msgspec

from millstream.broker.log.cleaner import (
    Cleaner,
    CleaningCancelled,
    CleanResult,
    CompactionPass,
    DamagedSource,
    MapResult,
)
from millstream.broker.log.files import DiskFiles
from millstream.core.child_process import frame_message, read_framed

NICENESS = 10
BYTES_PER_S_MAX = 64 * 1024 * 1024
"""The maximum read rate, for mapping and copying together, so that the disk stays usable for others."""

_PAUSE_S = 0.01


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The pass cannot continue. `base_offset` is that of a damaged segment, or -1."""

    reason: str
    errno: int = 0
    base_offset: int = -1
    position: int = 0


class MapResponse(msgspec.Struct, frozen=True, tag=True):
    mapped: MapResult


class CleanResponse(msgspec.Struct, frozen=True, tag=True):
    cleaned: CleanResult


Response = MapResponse | CleanResponse | Failure


def write_message(stream: IO[bytes], message: object) -> None:
    stream.write(frame_message(msgspec.msgpack.encode(message)))
    stream.flush()


class RateLimit:
    """Keeps the work below a rate, and ends it when the parent is gone."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S_MAX) -> None:
        self._bytes_per_s = bytes_per_s
        self._parent = os.getppid()
        self._free_at = time.monotonic()

    def __call__(self, worked_bytes: int) -> None:
        """Account for some work; wait if it went too fast."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _PAUSE_S) + worked_bytes / self._bytes_per_s
        if self._free_at - now > _PAUSE_S:
            if os.getppid() != self._parent:
                raise CleaningCancelled("the broker is gone")
            time.sleep(self._free_at - now)


def _run(work: Callable[[], MapResult | CleanResult]) -> Response:
    try:
        done = work()
    except DamagedSource as damaged:
        return Failure(str(damaged), base_offset=damaged.base_offset, position=damaged.position)
    except OSError as error:
        return Failure(f"{error.strerror or error}", errno=error.errno or 0)
    return MapResponse(done) if isinstance(done, MapResult) else CleanResponse(done)


def main() -> None:
    # Ctrl-C in a terminal reaches the whole process group; the broker decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    request = read_framed(requests)
    if request is None:
        return
    cleaner = Cleaner(DiskFiles(), msgspec.msgpack.decode(request, type=CompactionPass), RateLimit())
    try:
        write_message(responses, _run(cleaner.map_keys))
        while (request := read_framed(requests)) is not None:
            group = msgspec.msgpack.decode(request, type=int)
            write_message(responses, _run(lambda group=group: cleaner.clean(group)))  # type: ignore[misc]
    except (CleaningCancelled, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
