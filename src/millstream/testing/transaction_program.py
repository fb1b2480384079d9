"""A program that consumes, transforms and produces in transactions, and is killed for it.

    python -m millstream.testing.transaction_program TASK

TASK is a file with a `Task` as JSON. SIGTERM ends the program between two transactions. The exit code is 0 then,
`RENEW` when it needs a new life (fenced, or an error after which clients begin anew), and `STUCK` when something was
tried in vain for longer than the task says.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from millstream.testing.transaction_worker import RENEW, STUCK, Renew, Stuck, Task, Worker

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run one task."""
    die_with_parent()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    worker = _worker(task)
    signal.signal(signal.SIGTERM, lambda *_: worker.stopping.set())
    try:
        worker.run()
    except Renew as error:
        print(f"{task.producer} needs a new life: {error}", file=sys.stderr)
        return RENEW
    except Stuck as error:
        print(f"{task.producer} is stuck: {error}", file=sys.stderr)
        return STUCK
    return 0


def _worker(task: Task) -> Worker:
    # Each client is imported by those only who use it: a new life should begin at once.
    if task.client == "aiokafka":
        from millstream.testing.aiokafka_worker import AiokafkaWorker

        return AiokafkaWorker(task)
    from millstream.testing.confluent_worker import ConfluentWorker

    return ConfluentWorker(task)


def die_with_parent() -> None:
    """Have the kernel kill this process when the trial is gone, also while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    # Threads of clients that do not end must not keep the process.
    sys.stderr.flush()
    os._exit(code)
