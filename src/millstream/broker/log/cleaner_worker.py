"""Where compaction works: in a child process for a real disk, otherwise in the calling thread."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import suppress
from typing import Protocol

import msgspec

from millstream.broker.log.cleaner import (
    Cleaner,
    CleaningCancelled,
    CleanResult,
    CompactionPass,
    DamagedSource,
    MapResult,
)
from millstream.broker.log.cleaner_child import (
    CleanResponse,
    Failure,
    MapResponse,
    Response,
    read_message,
    write_message,
)
from millstream.broker.log.files import Files

MODULE = "millstream.broker.log.cleaner_child"


class Worker(Protocol):
    """Does the work of one pass. Every method but `cancel` is called in a thread and may raise `OSError`."""

    def map_keys(self) -> MapResult:
        """Collect the last offset of each key."""

    def clean(self, group: int) -> CleanResult:
        """Write the retained records of a group into a new file."""

    def close(self) -> None:
        """End the pass."""

    def cancel(self) -> None:
        """Stop the work soon; called from any thread."""


class InlineWorker:
    """Works in the calling thread: for files that only this process has."""

    def __init__(self, files: Files, compaction_pass: CompactionPass) -> None:
        self._cancelled = False
        self._cleaner = Cleaner(files, compaction_pass, self._progress)

    def _progress(self, _bytes: int) -> None:
        if self._cancelled:
            raise CleaningCancelled("the store is closing")

    def map_keys(self) -> MapResult:
        """Collect the last offset of each key."""
        return self._cleaner.map_keys()

    def clean(self, group: int) -> CleanResult:
        """Write the retained records of a group into a new file."""
        return self._cleaner.clean(group)

    def close(self) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Raise at the next batch."""
        self._cancelled = True


class ChildWorker:
    """Works in a child process, so that the loop of the broker is not delayed."""

    def __init__(self, compaction_pass: CompactionPass) -> None:
        self._pass = compaction_pass
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def map_keys(self) -> MapResult:
        """Start the child and let it collect the last offset of each key."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True
        )
        if self._cancelled:
            self._child.kill()
        answer = self._request(self._pass)
        if not isinstance(answer, MapResponse):
            raise OSError(errno.EIO, "the compaction process sent an unexpected response")
        return answer.mapped

    def clean(self, group: int) -> CleanResult:
        """Let the child write the retained records of a group into a new file."""
        answer = self._request(group)
        if not isinstance(answer, CleanResponse):
            raise OSError(errno.EIO, "the compaction process sent an unexpected response")
        return answer.cleaned

    def _request(self, request: CompactionPass | int) -> MapResponse | CleanResponse:
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise OSError(errno.ECHILD, "no compaction process is running")
        body = None
        with suppress(BrokenPipeError):
            write_message(child.stdin, request)
            body = read_message(child.stdout)
        if body is None:
            if self._cancelled:
                raise CleaningCancelled("the store is closing")
            raise OSError(errno.ECHILD, "the compaction process died")
        answer: Response = msgspec.msgpack.decode(body, type=Response)
        if not isinstance(answer, Failure):
            return answer
        if answer.base_offset >= 0:
            raise DamagedSource(answer.base_offset, answer.position)
        raise OSError(answer.errno, answer.reason)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        child.wait()

    def cancel(self) -> None:
        """Kill the child; the thread that waits for its response gets `CleaningCancelled`."""
        self._cancelled = True
        child = self._child
        if child is not None:
            child.kill()
