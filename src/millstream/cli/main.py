"""The start of the `millstream` command: nothing is imported before Ctrl-C can end it without a word."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def run() -> None:
    """Run the command line and end the process with an exit code that scripts can use."""
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    from millstream.cli.app import call

    # From here on it is an exception, which the commands and the event loop know how to end with.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(call(sys.argv[1:]))


if __name__ == "__main__":
    run()
