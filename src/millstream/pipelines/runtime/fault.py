"""Classifies a pipeline's failures: an unavailable dependency, which recovers, or a wrong declaration, which does not.

An error of a Spark task arrives as text with the stack traces of two languages. Millstream's own tasks, and the
functions of statements, therefore classify their errors where they are raised, and add a line that says so. For all
others the error names in the text are looked up, and messages of object stores, disks and Spark are matched.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from millstream.core import errors
from millstream.protocol.wire.error_codes import TRANSIENT

if TYPE_CHECKING:
    import pyarrow as pa

    Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    """The argument of `mapInArrow`."""


class Fault(Enum):
    OUTSIDE = "outside"
    """A dependency is unavailable: the pipeline continues once it is back, however long that takes."""
    DECLARED = "declared"
    """The declaration or the data is wrong: every attempt fails the same way."""
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
"""The path is taken by something else."""
_DECLARED: Final[tuple[type[BaseException], ...]] = (
    errors.InvalidRequest,
    errors.LostData,
    errors.ColumnMismatch,
    errors.NotAuthorized,
)
_OF_PROGRAMS: Final[tuple[type[BaseException], ...]] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)
"""Python's own errors that a function raises for the same data again; libraries derive others from them."""

_JAVA_LOST: Final = ("Py4JNetworkError", "Py4JError")
"""Raised when Java no longer responds. Java's own errors are of other classes."""
_REFUSED_BY_SPARK: Final = {
    "ParseException",
    "AnalysisException",
    "ArithmeticException",
    "ArrayIndexOutOfBoundsException",
    "DateTimeException",
    "NumberFormatException",
}
"""Spark's errors about statements and values, by name, since it may not be installed."""

MARK: Final = re.compile(r"^\[millstream fault: (outside|declared|unknown), (\w+)\]$", re.MULTILINE)
"""The line that a task adds to its error: the cause, and the nearest class that is known everywhere."""
_NAMED: Final = re.compile(r"^(?:.*: )?(?:[a-z_]\w*\.)*([A-Z]\w+)(?::|$)", re.MULTILINE)
"""The name of an error at the start of a line, or after Spark's prefix."""
_WORDS: Final = re.compile(
    r"Generic \w+ error|error sending request|os error \d+|\[Errno \d+\]|Connection refused|Connection reset|"
    r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|"
    r"SlowDown|ServiceUnavailable|Service Unavailable|TooManyRequests|Too Many Requests|RequestTimeout|"
    r"java\.net\.\w+Exception|ExecutorLostFailure|Python worker exited unexpectedly|"
    r"Python worker failed to connect back|SparkContext was shut down|stopped SparkContext"
)


def fault_of(error: BaseException) -> Fault:
    """Return the cause of a failure, as far as known."""
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
        # Of chained errors, the last is the one that was raised.
        return known[-1]
    return Fault.OUTSIDE if _WORDS.search(text) else Fault.UNKNOWN


def kind_in(error: BaseException) -> type[BaseException] | None:
    """Return the class of an error, or of the task error that it reports; None if unknown."""
    if isinstance(error, errors.MillstreamError):
        return type(error)
    marks = MARK.findall(str(error))
    return _kind_named(marks[-1][1]) if marks else None


class MarkedTask:
    """A task that adds the cause to its errors, in a line that `fault_of` reads on the driver."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._task(batches)
        except Exception as error:
            _mark(error, _fault_here(error))
            raise


def marked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function whose program errors are those of the declaration; libraries' may be transient."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            result = function(*arguments, **named)
        except Exception as error:
            _mark_function(error)
            raise
        return iterate(result) if isinstance(result, Iterator) else result

    def iterate(results: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from results
        except Exception as error:
            _mark_function(error)
            raise

    return call


def _mark_function(error: Exception) -> None:
    fault = _fault_here(error)
    is_own = type(error).__module__ == "builtins" and isinstance(error, _OF_PROGRAMS)
    _mark(error, Fault.DECLARED if fault is Fault.UNKNOWN and is_own else fault)


def _mark(error: Exception, fault: Fault) -> None:
    kind = next(base for base in type(error).__mro__ if _kind_named(base.__name__) is base)
    error.add_note(f"[millstream fault: {fault.value}, {kind.__name__}]")


def _fault_here(error: BaseException | None) -> Fault:
    """Classify an error where it is raised, or its cause; texts are matched only for errors of libraries."""
    while error is not None:
        fault = _fault_of_kind(type(error))
        if fault != Fault.UNKNOWN:
            return fault
        if not isinstance(error, (errors.MillstreamError, OSError)) and _WORDS.search(str(error)):
            return Fault.OUTSIDE
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return Fault.UNKNOWN


def is_java_lost(error: BaseException) -> bool:
    """Whether the end of the Java process may have caused a failure."""
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
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None
