"""Putting a new segment in the place of those it was made of, so that a crash leaves the old or the new ones.

1. The new file is complete and synced under a name of its own, which no one else uses.
2. On the loop, the log goes on with the new segment, read under that name.
3. A checkpoint says so and names the swap: this is the moment from which on the new one counts. Journal entries of
   the old files are void from here on.
4. The file takes its place by a rename, the directory is synced, and the other old files are removed.

Recovery carries out the rename of a swap that the checkpoint names, if the file is still there under its own name,
and removes every other such file. Before the checkpoint the old segments are all there, after it the new one is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.log.files import Files
from millstream.broker.log.segment import Segment, cleaned_path, segment_path
from millstream.broker.log.state import SwapName

if TYPE_CHECKING:
    from millstream.broker.log.log import Log


class Swap(NamedTuple):
    """A segment whose file does not have its place yet."""

    segment: Segment
    token: str


def swap_names(swaps: Iterable[Swap]) -> list[SwapName]:
    """Swaps as a checkpoint keeps them."""
    return [(swap.segment.base_offset, swap.token) for swap in swaps]


def swap_in(log: Log, old: list[Segment], new: Segment, token: str) -> bool:
    """Go on with a new segment in the place of old ones, unless the log is not what it was; called on the loop.

    Without old ones it goes where its offsets belong, which no segment has.
    """
    if log.closed or log.broken or log.repairing:
        return False
    at = bisect_left(log.segments, new.base_offset, key=lambda segment: segment.base_offset)
    if old and ([*map(id, log.segments[at : at + len(old)])] != [*map(id, old)] or not old[-1].sealed):
        return False
    new.path = cleaned_path(log.directory, new.base_offset, token)
    # Pinned until it is renamed, as nothing can open it by name in that moment.
    log.open_files.pin(new)
    for segment in old:
        log.open_files.release(segment)
    log.removed_segments += old[1:]
    log.swaps.append(Swap(new, token))
    log.swap_segments([*log.segments[:at], new, *log.segments[at + len(old) :]])
    return True


def complete_swaps(files: Files, directory: str, swaps: Sequence[SwapName]) -> bool:
    """Give the files of swaps their place, for good when this returns; whether there was one left to do."""
    found = False
    for base_offset, token in swaps:
        try:
            files.rename(cleaned_path(directory, base_offset, token), segment_path(directory, base_offset))
            found = True
        except FileNotFoundError:
            # It was done before, and perhaps not synced.
            continue
    if swaps:
        files.sync_directory(directory)
    return found


def settle_swaps(log: Log, swaps: Iterable[Swap]) -> None:
    """The files have their place; called on the loop."""
    for swap in swaps:
        if swap in log.swaps:
            log.swaps.remove(swap)
            swap.segment.path = segment_path(log.directory, swap.segment.base_offset)
            log.open_files.unpin(swap.segment)
