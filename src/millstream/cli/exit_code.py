"""The exit codes of all commands. Scripts rely on them, so they never change."""

from __future__ import annotations

from enum import IntEnum
from errno import EADDRINUSE

from millstream.core.errors import (
    AddressTaken,
    AuthenticationFailed,
    BrokerUnreachable,
    CatalogDenied,
    CatalogUnavailable,
    Conflict,
    DataFolderInUse,
    InvalidRequest,
    NotFound,
    RequestTimedOut,
    SchemaRegistryError,
    StoreDenied,
    StoreUnavailable,
    TransactionRejected,
)


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    CONFLICT = 5
    TIMED_OUT = 6
    INTERRUPTED = 130
    TERMINATED = 143


class CommandFailed(Exception):
    """A command cannot do what was requested. The message is one sentence that says what to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (InvalidRequest, ExitCode.USAGE),
    (AuthenticationFailed, ExitCode.USAGE),
    (CatalogDenied, ExitCode.USAGE),
    (StoreDenied, ExitCode.USAGE),
    (NotFound, ExitCode.NOT_FOUND),
    (BrokerUnreachable, ExitCode.UNREACHABLE),
    (CatalogUnavailable, ExitCode.UNREACHABLE),
    (StoreUnavailable, ExitCode.UNREACHABLE),
    (Conflict, ExitCode.CONFLICT),
    (DataFolderInUse, ExitCode.CONFLICT),
    (TransactionRejected, ExitCode.CONFLICT),
    (RequestTimedOut, ExitCode.TIMED_OUT),
)

_REGISTRY_CODES = {404: ExitCode.NOT_FOUND, 409: ExitCode.CONFLICT, 422: ExitCode.USAGE}
"""Exit codes by the HTTP status with which the registry's codes begin."""


def exit_code_of(error: Exception) -> ExitCode:
    if isinstance(error, CommandFailed):
        return error.exit_code
    if isinstance(error, AddressTaken):
        # Only an address in use is a conflict; others can never be bound.
        return ExitCode.CONFLICT if getattr(error.__cause__, "errno", None) == EADDRINUSE else ExitCode.FAILED
    if isinstance(error, SchemaRegistryError):
        return _REGISTRY_CODES.get(int(str(error.code)[:3]), ExitCode.FAILED)
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)
