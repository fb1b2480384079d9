"""Compiled librdkafka callbacks: no Python object per message, and no interpreter lock.

librdkafka passes a message and our pointer to an array of 64-bit numbers:

| index | number |
|---|---|
| 0 | messages without an error |
| 1 | the last error |
| 2, 3 | space for the clock |
| 4 | the number of times |
| 5 … | when the message with that number arrived, in nanoseconds of the monotonic clock; 0 if it has not |
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
# The positions of a message's fields, in words of eight bytes; see `librdkafka.MESSAGE`.
_ERROR, _PAYLOAD, _PRIVATE = 0, 3, 8
_WORDS = 9
_MONOTONIC = 1
_S_NS = 1_000_000_000

Counters = npt.NDArray[np.int64]

_clock = ctypes.CDLL(None).clock_gettime
_clock.argtypes, _clock.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_int
_NUMBERS: Any = types.CPointer(types.int64)  # type: ignore[no-untyped-call]


def _as_pointer(_typing: Any, address: Any) -> Any:
    """Convert an address to a pointer, which numba cannot express."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_as_pointer)


def counters(times: int = 0) -> Counters:
    """Return an array for one of the callbacks below, with space for this many times."""
    made = np.zeros(TIMES + times, np.int64)
    made[SIZE] = times
    return made


@cfunc(types.void(_NUMBERS, _NUMBERS))
def _counted(message: Any, pointer: Any) -> None:
    counters_array = carray(pointer, TIMES)
    error = carray(message, _WORDS)[_ERROR] & 0xFFFFFFFF
    if error:
        counters_array[ERROR] = error
    else:
        counters_array[COUNT] += 1


@cfunc(types.void(_NUMBERS, _NUMBERS))
def _received(message: Any, pointer: Any) -> None:
    counters_array = carray(pointer, TIMES)
    fields = carray(message, _WORDS)
    error = fields[_ERROR] & 0xFFFFFFFF
    if error:
        counters_array[ERROR] = error
        return
    counters_array[COUNT] += 1
    number = carray(_pointer(fields[_PAYLOAD]), 1, np.int64)[0]
    if 0 < number <= counters_array[SIZE]:
        _clock(_MONOTONIC, counters_array[CLOCK:].ctypes)
        carray(pointer, TIMES + counters_array[SIZE])[TIMES + number - 1] = (
            counters_array[CLOCK] * _S_NS + counters_array[CLOCK + 1]
        )


@cfunc(types.void(types.voidptr, _NUMBERS, _NUMBERS))
def _acknowledged(_handle: Any, message: Any, pointer: Any) -> None:
    counters_array = carray(pointer, TIMES)
    fields = carray(message, _WORDS)
    error = fields[_ERROR] & 0xFFFFFFFF
    if error:
        counters_array[ERROR] = error
        return
    counters_array[COUNT] += 1
    number = fields[_PRIVATE]
    if 0 < number <= counters_array[SIZE]:
        _clock(_MONOTONIC, counters_array[CLOCK:].ctypes)
        carray(pointer, TIMES + counters_array[SIZE])[TIMES + number - 1] = (
            counters_array[CLOCK] * _S_NS + counters_array[CLOCK + 1]
        )


COUNTED = ctypes.c_void_p(_counted.address)
"""For a consumer: counts the message."""

RECEIVED = ctypes.c_void_p(_received.address)
"""For a consumer: counts the message and records when the number at the start of its payload arrived."""

ACKNOWLEDGED = ctypes.c_void_p(_acknowledged.address)
"""For a producer's delivery reports: counts the message and records when the number it was sent with arrived."""
