"""A process with workers of subscriptions, which a trial kills.

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

from millstream_testing.subscription_history import JournalFile
from millstream_testing.subscription_worker import Task, Worker
from millstream_testing.transaction_program import die_with_parent


def main() -> None:
    die_with_parent()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    journal_file = JournalFile(task.file)
    if task.client_kind == "own":
        with suppress(asyncio.CancelledError):
            asyncio.run(_work(task, journal_file))
    else:
        _share(task, journal_file)


async def _work(task: Task, journal_file: JournalFile) -> None:
    working = asyncio.gather(*(Worker(task, journal_file, name).run() for name in task.subscriptions))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    await working


def _share(task: Task, journal_file: JournalFile) -> None:
    # Imported only where it is used, so that a restart is fast.
    from millstream_testing.share_worker import ShareWorker

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    threads = [
        threading.Thread(target=ShareWorker(task, journal_file, name, stopping).run, name=name)
        for name in task.subscriptions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)


if __name__ == "__main__":
    main()
    # Client threads that do not end must not keep the process running.
    sys.stderr.flush()
    os._exit(0)
