"""Where a failure of a pipeline comes from: from outside, which passes, or from what was declared, which does not.

What fails in a task of Spark comes as a text with the traces of two languages, so the kinds of errors that these name
are looked up, and what object stores, disks and Spark itself say is known by its words.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from enum import Enum
from typing import Final

from millstream.model import errors
from millstream.wire.refusal import TRANSIENT


class Fault(Enum):
    """What a failure says about the pipeline."""

    OUTSIDE = "outside"
    """Something that it uses is away: it goes on when that is back, however long it takes."""
    DECLARED = "declared"
    """What was declared, or the data, cannot be worked with: that is the same each time."""
    UNKNOWN = "unknown"


_OUTSIDE: Final[tuple[type[BaseException], ...]] = (
    *TRANSIENT,
    errors.RequestTimedOut,
    errors.StorageFailure,
    errors.PartitionClosed,
    errors.StoreUnavailable,
    errors.CatalogUnavailable,
    errors.FilterUnavailable,
    errors.QuotaExceeded,
    errors.GroupRejected,
    errors.ConcurrentTransactions,
    errors.TransactionAbortable,
    OSError,
    EOFError,
)
_NOT_OUTSIDE: Final[tuple[type[BaseException], ...]] = (NotADirectoryError, IsADirectoryError, FileExistsError)
"""A place that something else is at."""
_DECLARED: Final[tuple[type[BaseException], ...]] = (errors.InvalidRequest, errors.LostData, errors.ColumnMismatch)

_JAVA_LOST: Final = {"Py4JNetworkError"}
_REFUSED_BY_SPARK: Final = {
    "ParseException",
    "AnalysisException",
    "ArithmeticException",
    "ArrayIndexOutOfBoundsException",
    "DateTimeException",
    "NumberFormatException",
}
"""What Spark raises for statements, and for values that these cannot take; named, since it may not be installed."""

_NAMED: Final = re.compile(r"^(?:.*: )?(?:[a-z_]\w*\.)*([A-Z]\w+)(?::|$)", re.MULTILINE)
"""The name of an error at the beginning of a line, or behind what Spark says before it."""
_WORDS: Final = re.compile(
    r"Generic \w+ error|error sending request|os error \d+|\[Errno \d+\]|Connection refused|Connection reset|"
    r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|"
    r"SlowDown|ServiceUnavailable|Service Unavailable|TooManyRequests|Too Many Requests|RequestTimeout|"
    r"java\.net\.\w+Exception|ExecutorLostFailure|Python worker exited unexpectedly|"
    r"Python worker failed to connect back|SparkContext was shut down|stopped SparkContext"
)


def fault_of(error: BaseException) -> Fault:
    """Where a failure comes from, as far as it can be told."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _REFUSED_BY_SPARK:
        return Fault.DECLARED
    if names & _JAVA_LOST:
        return Fault.OUTSIDE
    if isinstance(error, errors.MillstreamError):
        return _fault_of_kind(type(error))
    said = str(error)
    known = [fault for kind in (type(error), *_named_in(said)) if (fault := _fault_of_kind(kind)) != Fault.UNKNOWN]
    if known:
        # Of errors that follow from each other the last is what was raised.
        return known[-1]
    return Fault.OUTSIDE if _WORDS.search(said) else Fault.UNKNOWN


def _fault_of_kind(kind: type[BaseException]) -> Fault:
    if issubclass(kind, _NOT_OUTSIDE):
        return Fault.UNKNOWN
    if issubclass(kind, _OUTSIDE):
        return Fault.OUTSIDE
    return Fault.DECLARED if issubclass(kind, _DECLARED) else Fault.UNKNOWN


def _named_in(said: str) -> Iterator[type[BaseException]]:
    for name in _NAMED.findall(said):
        found = getattr(errors, name, None) or getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            yield found
