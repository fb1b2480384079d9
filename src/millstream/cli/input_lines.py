"""Lines of a file, a pipe or a terminal, in groups as they arrive, so that slow input is not delayed."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass

from millstream.cli.exit_code import CommandFailed

CHUNK_BYTES = 1024 * 1024
LINE_BYTES_MAX = 100 * 1024 * 1024
"""No broker accepts a longer message in one request, so a longer line is a mistake, such as a file without lines."""


@dataclass(frozen=True, slots=True)
class LineGroup:
    """Lines that were read together, without line ends, and the number of bytes read for them."""

    lines: list[bytes]
    size_bytes: int


async def read_line_groups(descriptor: int) -> AsyncIterator[LineGroup]:
    """Yield the lines of a descriptor as they arrive; the last one may lack its line end."""
    may_block = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    rest = b""
    done = 0
    while True:
        if may_block:
            await _readable(descriptor)
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        done += len(lines)
        if len(rest) > LINE_BYTES_MAX:
            raise CommandFailed(
                f"line {done + 1} of the input is longer than {LINE_BYTES_MAX} bytes, the limit for one message"
            )
        if lines:
            yield LineGroup(lines, len(chunk))
    if rest:
        yield LineGroup([rest], 0)


async def _readable(descriptor: int) -> None:
    """Wait, without a thread, until reading does not block, so that a silent pipe never delays Ctrl-C."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:
        # Not something that can be waited for, such as /dev/null: it never blocks.
        return
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
