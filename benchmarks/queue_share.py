"""The queue benchmark's client with confluent-kafka's share consumers, one per worker, each in a thread.

Messages are accepted implicitly: those of a poll by the next poll, the last ones by a commit, which is included in the
measurement.

    python -m benchmarks.queue_share --address HOST:PORT --queue TOPIC ...
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.queue_load import Publishers, Run, arguments
from confluent_kafka import ShareConsumer

_POLL_S: Final = 0.1
_COMMIT_S: Final = 30.0
_READY_S_MAX: Final = 60.0


class Worker:
    """One share consumer."""

    def __init__(self, run: Run, begun: threading.Event, number: int) -> None:
        self._run = run
        self._begun = begun
        options = run.given
        self._consumer = ShareConsumer(
            {
                "bootstrap.servers": options.address,
                "log_level": 0,
                "group.id": options.queue,
                "client.id": f"worker-{number}",
                "max.poll.records": options.batch,
            }
        )
        self._consumer.subscribe([options.queue])
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until it has accepted everything that it received."""
        self._thread.join()

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    def _work(self) -> None:
        run, consumer = self._run, self._consumer
        unaccepted = 0
        while not run.is_received:
            messages = consumer.poll(_POLL_S)
            count = len(messages)
            if not count:
                continue
            if not self._begun.is_set():
                continue
            unaccepted += count
            if run.is_timed:
                run.record_received(
                    count, [int.from_bytes((message.value() or b"")[:8], "little") for message in messages]
                )
            else:
                run.record_received(count)
        if unaccepted:
            consumer.commit_sync(_COMMIT_S)
            run.record_accepted(unaccepted)


def main() -> None:
    options = arguments(__doc__ or "")
    run, begun = Run(options), threading.Event()
    workers = [Worker(run, begun, number) for number in range(options.workers)]
    with Publishers(run) as publishers:
        _join(options.workers)
        begun.set()
        run.begin()
        publishers.start()
        for worker in workers:
            worker.end()
        run.end()
    # Each consumer takes a while to leave.
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(Worker.close, workers))


def _join(workers: int) -> None:
    """Wait for the assignments of the share group, which take a heartbeat or two."""
    time.sleep(min(2.0 + workers / 20, _READY_S_MAX))


if __name__ == "__main__":
    main()
