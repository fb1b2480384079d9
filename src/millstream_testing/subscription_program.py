"""A process with workers of subscriptions, which is killed for it.

    python -m millstream_testing.subscription_program TASK

TASK is a file with a `Task` as JSON. SIGTERM ends the workers; they leave as clients do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from millstream_testing.subscription_events import Notebook
from millstream_testing.subscription_worker import Task, Worker
from millstream_testing.transaction_program import die_with_parent


def main() -> None:
    """Run one task."""
    die_with_parent()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    notebook = Notebook(task.file)
    if task.door == "own":
        with suppress(asyncio.CancelledError):
            asyncio.run(_work(task, notebook))
    else:
        _share(task, notebook)


async def _work(task: Task, notebook: Notebook) -> None:
    working = asyncio.gather(*(Worker(task, notebook, name).run() for name in task.subscriptions))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    await working


def _share(task: Task, notebook: Notebook) -> None:
    # Imported only where it is used: a new life should start quickly.
    from millstream_testing.share_worker import ShareWorker

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    threads = [
        threading.Thread(target=ShareWorker(task, notebook, name, stopping).run, name=name)
        for name in task.subscriptions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)


if __name__ == "__main__":
    main()
    # Threads of clients that do not end must not keep the process running.
    sys.stderr.flush()
    os._exit(0)
