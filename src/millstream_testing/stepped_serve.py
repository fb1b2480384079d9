"""`millstream serve` with a clock that a trial can step.

    python -m millstream_testing.stepped_serve FILE serve --data DIR ...

FILE holds eight bytes: by how many milliseconds the wall clock of this node is off. Writing to it steps the clock of
the running node; the monotonic clock is not affected, as with a real step. On SIGUSR2 the node logs
what each of its threads is doing.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import sys
from pathlib import Path

from millstream.broker import node as broker
from millstream.cli.main import run
from millstream.core.clock import SystemClock
from millstream.core.config import Config

PROGRAM = ("millstream_testing.stepped_serve",)
"""Return how to run it: a module, with its arguments first."""

_BYTES = 8


class SteppedClock(SystemClock):
    """The clock of the machine, offset by what a file contains at each moment."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._off = mmap.mmap(opened.fileno(), _BYTES, access=mmap.ACCESS_READ)

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970, as this node sees them."""
        return super().now_ms() + int.from_bytes(self._off[:_BYTES], "little", signed=True)


def step(file: Path, off_ms: int) -> None:
    """Set the offset of a clock; the file is created if it is missing."""
    content = off_ms.to_bytes(_BYTES, "little", signed=True)
    if not file.exists():
        file.write_bytes(content)
        return
    # In place: a running node has this file mapped.
    with file.open("r+b") as opened:
        opened.write(content)


def main() -> None:
    """Run the command with brokers that use a stepped clock."""
    faulthandler.register(signal.SIGUSR2)
    clock = SteppedClock(Path(sys.argv.pop(1)))

    class SteppedBroker(broker.Broker):
        def __init__(self, config: Config, *, children: broker.ChildProcesses) -> None:
            super().__init__(config, children=children, clock=clock)

    vars(broker)["Broker"] = SteppedBroker
    run()


if __name__ == "__main__":
    main()
