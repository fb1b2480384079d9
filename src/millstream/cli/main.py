"""The entry point of `millstream`: nothing is imported before Ctrl-C can end it quietly."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def run() -> None:
    """Run the command line and exit with a code that scripts can use."""
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    from millstream.cli.app import call

    # From here on Ctrl-C is an exception, which commands and the event loop handle.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(call(sys.argv[1:]))


if __name__ == "__main__":
    run()
