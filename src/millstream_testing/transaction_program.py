"""A program that consumes, transforms and produces in transactions, which a trial kills.

    python -m millstream_testing.transaction_program TASK

TASK is a file with a `Task` as JSON; one with its own command becomes that program. SIGTERM ends the program
between two transactions. The exit code is 0 then, `RESTART` when it has to be restarted (fenced, or after an error that
requires new clients), and `STUCK` when retries did not succeed within the task's `stuck_s`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from millstream_testing.transaction_worker import BATCH_MAX, RESTART, STUCK, RestartRequired, Stuck, Task, Worker

_PR_SET_PDEATHSIG = 1


def main() -> int:
    die_with_parent()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    if task.command:
        os.execvp(task.command[0], [*task.command, *_arguments(task)])
    worker = _worker(task)
    signal.signal(signal.SIGTERM, lambda *_: worker.stopping.set())
    try:
        worker.run()
    except RestartRequired as error:
        print(f"{task.producer} has to be restarted: {error}", file=sys.stderr)
        return RESTART
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
    # Imported only where it is used, so that a restart is fast.
    if task.client == "aiokafka":
        from millstream_testing.aiokafka_worker import AiokafkaWorker

        return AiokafkaWorker(task)
    from millstream_testing.confluent_worker import ConfluentWorker

    return ConfluentWorker(task)


def die_with_parent() -> None:
    """Make the kernel kill this process when the trial ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    # Client threads that do not end must not keep the process running.
    sys.stderr.flush()
    os._exit(code)
