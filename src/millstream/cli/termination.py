"""Commands that have something to put away when they are told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from millstream.cli.exit_code import CommandFailed, ExitCode


class Terminated(BaseException):
    """SIGTERM has come. It is no `Exception`, so that what is retried or suppressed does not take it for a failure."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within it SIGTERM unwinds the command as Ctrl-C does; a second one changes nothing."""

    def end(_number: int, _frame: FrameType | None) -> None:
        # `timeout` sends it to the process and to its group.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Terminated:
        said = "ended by SIGTERM; what is not committed is done by the next run"
        raise CommandFailed(said, ExitCode.TERMINATED) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)
