"""Have the kernel sync files in the background: no thread, and one wake-up of the loop for each.

A thread that syncs has to take the interpreter's lock before and after the call, and a busy loop keeps it for up to
five milliseconds at a time; its hand-overs also cost more CPU time than the sync. Linux syncs a file asynchronously
(`IOCB_CMD_FDSYNC` of io_submit) and counts up an event descriptor that the loop watches. What a sync promises, and that
an error is reported once, is the same as for fdatasync(2). Where the system has or allows no such call, `open` returns
None, and a thread syncs.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple, Protocol, cast

SLOTS: Final = 16
"""How many syncs may be under way."""


class SyncListener(Protocol):
    """Waits for one sync."""

    def sync_ended(self, error: OSError | None) -> None:
        """Take the outcome at once; nothing else may happen here, since the loop may be in the middle of something."""

    def proceed(self) -> None:
        """Act on the outcome."""


class BackgroundSync(Protocol):
    """What syncs files in the background."""

    def begin(self, descriptor: int, listener: SyncListener) -> bool:
        """Begin to sync a file; return False if that has to be done otherwise."""

    def drain(self) -> None:
        """Wait here until all have ended; code that blocks the loop on its own sync needs that first."""

    def close(self) -> None:
        """Wait for the rest, and begin no more."""


class _Calls(NamedTuple):
    """The numbers of the system calls, which glibc has no functions for."""

    setup: int
    destroy: int
    submit: int
    get_events: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}
# The kernel's `struct iocb` and `struct io_event`, on machines of either kind.
_REQUEST: Final = struct.Struct("<QIiHhIQQqQII")
_EVENT: Final = struct.Struct("<QQqq")
_FDSYNC: Final = 3
_NOTIFIES: Final = 1
_no_wait = ctypes.create_string_buffer(16)


class KernelSync:
    """Syncs under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: _Calls, context: int) -> None:
        self._loop = loop
        self._calls = calls
        self._context = context
        self._requests = [ctypes.create_string_buffer(_REQUEST.size) for _ in range(SLOTS)]
        self._pointers = [(ctypes.c_void_p * 1)(ctypes.addressof(request)) for request in self._requests]
        self._events = ctypes.create_string_buffer(_EVENT.size * SLOTS)
        self._free = list(range(SLOTS))
        self._listeners: dict[int, SyncListener] = {}
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._collect)

    @classmethod
    def open(cls, loop: asyncio.AbstractEventLoop) -> KernelSync | None:
        """Start watching for ends of syncs; None where the system offers none in the background."""
        calls = _CALLS.get(platform.machine())
        if sys.platform != "linux" or calls is None:
            return None
        context = ctypes.c_ulong(0)
        if _call(calls.setup, SLOTS, ctypes.addressof(context)) != 0:
            return None
        return cls(loop, calls, context.value)

    def begin(self, descriptor: int, listener: SyncListener) -> bool:
        """Begin to sync a file; return False if that has to be done otherwise."""
        if not self._free:
            return False
        slot = self._free[-1]
        _REQUEST.pack_into(
            self._requests[slot], 0, slot, 0, 0, _FDSYNC, 0, descriptor, 0, 0, 0, 0, _NOTIFIES, self._event
        )
        if _call(self._calls.submit, self._context, 1, ctypes.addressof(self._pointers[slot])) != 1:
            return False
        self._free.pop()
        self._listeners[slot] = listener
        return True

    def drain(self) -> None:
        """Wait here until all have ended; code that blocks the loop on its own sync needs that first."""
        while self._listeners:
            for listener in self._take_ended(least=1):
                self._loop.call_soon(listener.proceed)

    def close(self) -> None:
        """Wait for the rest, and begin no more."""
        self.drain()
        self._loop.remove_reader(self._event)
        _call(self._calls.destroy, self._context)
        os.close(self._event)

    def _collect(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for listener in self._take_ended(least=0):
            listener.proceed()

    def _take_ended(self, least: int) -> list[SyncListener]:
        """Pass on the outcomes of those that have ended, of so many at least; return who waits for them."""
        patience = 0 if least else ctypes.addressof(_no_wait)
        count = _call(self._calls.get_events, self._context, least, SLOTS, ctypes.addressof(self._events), patience)
        if count < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), "the outcome of a sync could not be read")
        listeners = []
        for at in range(max(0, count)):
            slot, _, result, _ = _EVENT.unpack_from(self._events, at * _EVENT.size)
            self._free.append(slot)
            listener = self._listeners.pop(slot)
            listener.sync_ended(None if result == 0 else OSError(-result, os.strerror(-result)))
            listeners.append(listener)
        return listeners


@cache
def _system_call() -> Callable[..., int]:
    # The interpreter's lock is kept: the calls are short, and taking it again is what costs.
    found = ctypes.PyDLL(None, use_errno=True).syscall
    found.restype = ctypes.c_long
    return cast("Callable[..., int]", found)


def _call(number: int, *arguments: int) -> int:
    return _system_call()(ctypes.c_long(number), *map(ctypes.c_long, arguments))
