"""A program that consumes, transforms and produces in transactions, and is killed for it.

    python -m millstream_testing.transaction_program TASK

TASK is a file with a `Task` as JSON; one with its own command becomes that program. SIGTERM ends the program
between two transactions. The exit code is 0 then, `RENEW` when it needs a new life (fenced, or an error after which
clients start over), and `STUCK` when something was tried in vain for longer than the task says.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from millstream_testing.transaction_worker import BATCH_MAX, RENEW, STUCK, Renew, Stuck, Task, Worker

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run one task."""
    die_with_parent()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    if task.command:
        os.execvp(task.command[0], [*task.command, *_arguments(task)])
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


def _arguments(task: Task) -> list[str]:
    """Return a task as the arguments of a program in another language."""
    plain = {
        "producer": task.producer,
        "brokers": task.brokers,
        "group": task.group,
        "transactional_id": task.transactional_id,
        "source": task.source,
        "outputs": ",".join(f"{topic}:{partitions}" for topic, partitions in task.outputs.items()),
        "file": task.file,
        "seed": task.seed,
        "abort_share": task.abort_share,
        "timeout_ms": task.timeout_ms,
        "stuck_s": task.stuck_s,
        "batch_max": BATCH_MAX,
    }
    settings = {f"{of}.{name}": value for of, given in task.settings.items() for name, value in given.items()}
    return [f"{name}={value}" for name, value in {**plain, **settings}.items()]


def _worker(task: Task) -> Worker:
    # Imported only where it is used: a new life should start quickly.
    if task.client == "aiokafka":
        from millstream_testing.aiokafka_worker import AiokafkaWorker

        return AiokafkaWorker(task)
    from millstream_testing.confluent_worker import ConfluentWorker

    return ConfluentWorker(task)


def die_with_parent() -> None:
    """Let the kernel kill this process when the trial ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    # Threads of clients that do not end must not keep the process running.
    sys.stderr.flush()
    os._exit(code)
