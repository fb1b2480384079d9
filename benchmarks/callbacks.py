"""What librdkafka calls for each message, compiled: no Python object per message, and no lock of the interpreter.

librdkafka hands over a message and a pointer of ours, which leads to an array of 64-bit numbers:

| place | number |
|---|---|
| 0 | messages without an error |
| 1 | the last error |
| 2, 3 | room for the clock |
| 4 | how many times there are |
| 5 … | when the message of that number came, in nanoseconds of the monotonic clock; 0 if it did not yet |
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

COUNT, ERROR, CLOCK, SIZE, TIMES = 0, 1, 2, 4, 5
# The places of a message's fields, counted in words of eight bytes; see `librdkafka.MESSAGE`.
_ERROR, _PAYLOAD, _PRIVATE = 0, 3, 8
_WORDS = 9
_MONOTONIC = 1
_S_NS = 1_000_000_000

Notes = npt.NDArray[np.int64]

_clock = ctypes.CDLL(None).clock_gettime
_clock.argtypes, _clock.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_int
_NUMBERS: Any = types.CPointer(types.int64)  # type: ignore[no-untyped-call]


def _as_pointer(_typing: Any, address: Any) -> Any:
    """The number of an address as a pointer, which numba has no word for."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_as_pointer)


def notes(times: int = 0) -> Notes:
    """An array for one of the functions below, with room for this many times."""
    made = np.zeros(TIMES + times, np.int64)
    made[SIZE] = times
    return made


@cfunc(types.void(_NUMBERS, _NUMBERS))
def _counted(message: Any, place: Any) -> None:
    note = carray(place, TIMES)
    error = carray(message, _WORDS)[_ERROR] & 0xFFFFFFFF
    if error:
        note[ERROR] = error
    else:
        note[COUNT] += 1


@cfunc(types.void(_NUMBERS, _NUMBERS))
def _received(message: Any, place: Any) -> None:
    note = carray(place, TIMES)
    fields = carray(message, _WORDS)
    error = fields[_ERROR] & 0xFFFFFFFF
    if error:
        note[ERROR] = error
        return
    note[COUNT] += 1
    number = carray(_pointer(fields[_PAYLOAD]), 1, np.int64)[0]
    if 0 < number <= note[SIZE]:
        _clock(_MONOTONIC, note[CLOCK:].ctypes)
        carray(place, TIMES + note[SIZE])[TIMES + number - 1] = note[CLOCK] * _S_NS + note[CLOCK + 1]


@cfunc(types.void(types.voidptr, _NUMBERS, _NUMBERS))
def _acknowledged(_handle: Any, message: Any, place: Any) -> None:
    note = carray(place, TIMES)
    fields = carray(message, _WORDS)
    error = fields[_ERROR] & 0xFFFFFFFF
    if error:
        note[ERROR] = error
        return
    note[COUNT] += 1
    number = fields[_PRIVATE]
    if 0 < number <= note[SIZE]:
        _clock(_MONOTONIC, note[CLOCK:].ctypes)
        carray(place, TIMES + note[SIZE])[TIMES + number - 1] = note[CLOCK] * _S_NS + note[CLOCK + 1]


COUNTED = ctypes.c_void_p(_counted.address)
"""For a consumer: counts the message."""

RECEIVED = ctypes.c_void_p(_received.address)
"""For a consumer: counts the message and notes when the number at the start of its payload came."""

ACKNOWLEDGED = ctypes.c_void_p(_acknowledged.address)
"""For a producer's delivery reports: counts the message and notes when the number it was sent with came."""
