"""Where a failure of a pipeline comes from: from outside, which passes, or from what was declared, which does not.

What fails in a task of Spark comes as a text with the traces of two languages. So what Millstream's own tasks raise is
judged where it is raised, and carries that with it as a line of its own. For everything else the kinds of errors that
the text names are looked up, and what object stores, disks and Spark itself say is known by its words.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Final

from millstream.core import errors
from millstream.protocol.wire.error_codes import TRANSIENT

if TYPE_CHECKING:
    import pyarrow as pa

    Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    """What `mapInArrow` takes."""


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

_JAVA_LOST: Final = ("Py4JNetworkError", "Py4JError")
"""What is raised when Java does not answer any more. What it raises itself comes as another kind."""
_REFUSED_BY_SPARK: Final = {
    "ParseException",
    "AnalysisException",
    "ArithmeticException",
    "ArrayIndexOutOfBoundsException",
    "DateTimeException",
    "NumberFormatException",
}
"""What Spark raises for statements, and for values that these cannot take; named, since it may not be installed."""

MARK: Final = re.compile(r"^\[millstream fault: (outside|declared|unknown), (\w+)\]$", re.MULTILINE)
"""What a task says of its error: where it comes from, and the nearest kind that is known everywhere."""
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
    if is_java_lost(error):
        return Fault.OUTSIDE
    if isinstance(error, errors.MillstreamError):
        return _fault_of_kind(type(error))
    text = str(error)
    marks = MARK.findall(text)
    if marks:
        return Fault(marks[-1][0])
    known = [fault for kind in (type(error), *_named_in(text)) if (fault := _fault_of_kind(kind)) != Fault.UNKNOWN]
    if known:
        # Of errors that follow from each other the last is what was raised.
        return known[-1]
    return Fault.OUTSIDE if _WORDS.search(text) else Fault.UNKNOWN


def kind_in(error: BaseException) -> type[BaseException] | None:
    """The kind of an error, or of the one in a task of Millstream's that it tells of; None if that is not known."""
    if isinstance(error, errors.MillstreamError):
        return type(error)
    marks = MARK.findall(str(error))
    return _kind_named(marks[-1][1]) if marks else None


class Marked:
    """A task whose errors say where they come from, in a line that `fault_of` reads on the driver."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do the task."""
        try:
            yield from self._task(batches)
        except Exception as error:
            kind = next(one for one in type(error).__mro__ if _kind_named(one.__name__) is one)
            error.add_note(f"[millstream fault: {_fault_here(error).value}, {kind.__name__}]")
            raise


def _fault_here(error: BaseException | None) -> Fault:
    """The same for an error where it is raised, or for what it follows from; only of libraries the words are read."""
    while error is not None:
        fault = _fault_of_kind(type(error))
        if fault != Fault.UNKNOWN:
            return fault
        if not isinstance(error, (errors.MillstreamError, OSError)) and _WORDS.search(str(error)):
            return Fault.OUTSIDE
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return Fault.UNKNOWN


def is_java_lost(error: BaseException) -> bool:
    """Whether a failure may be of Java that has ended in the middle of it."""
    return type(error).__name__ in _JAVA_LOST or isinstance(error, ConnectionError | EOFError)


def _fault_of_kind(kind: type[BaseException]) -> Fault:
    if issubclass(kind, _NOT_OUTSIDE):
        return Fault.UNKNOWN
    if issubclass(kind, _OUTSIDE):
        return Fault.OUTSIDE
    return Fault.DECLARED if issubclass(kind, _DECLARED) else Fault.UNKNOWN


def _named_in(text: str) -> Iterator[type[BaseException]]:
    yield from filter(None, map(_kind_named, _NAMED.findall(text)))


def _kind_named(name: str) -> type[BaseException] | None:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
