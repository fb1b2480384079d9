"""`millstream cluster adopt` that kills itself after one of its steps.

python -m millstream_testing.killed_adopt STEP cluster adopt --data DIR ...

STEP is one of `STEPS`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from millstream.broker.catalog.catalog import CATALOG_NAME
from millstream.broker.cluster import adoption
from millstream.broker.cluster.adoption import Adoption
from millstream.broker.cluster.embedded_store import FILE_NAME as COORDINATION_NAME
from millstream.cli.main import run

MODULE = "millstream_testing.killed_adopt"
STEPS = ("mark", "catalog", "some states", "states", "owner", COORDINATION_NAME, CATALOG_NAME)
"""In order; each attempt repeats the earlier ones as far as they are not done."""


def main() -> None:
    """Run the command that the arguments name."""
    last = sys.argv.pop(1)

    def die_after(step: str) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    class KilledAdoption(Adoption):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named, on_step=die_after)

    vars(adoption)["Adoption"] = KilledAdoption
    run()


if __name__ == "__main__":
    main()
