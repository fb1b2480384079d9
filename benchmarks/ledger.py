"""`make bench-ledger`: what a ledger costs the broker, and how long an audit of many deliveries takes.

    python -m benchmarks.ledger [--rounds N] [--messages N] [--deliveries N] [--range N] [--only PART]

Cost: the same messages are published, delivered and accepted, in large ranges and one by one, through a subscription
without and one with a ledger, on one broker and in turn; the figures are CPU seconds of the broker's process, and their
ratio. Nothing lands meanwhile.

Landing: the events of messages that were accepted in ranges and one by one are landed by one run of the pipeline. The
figures are CPU seconds of its processes beyond those of a run that finds nothing to land, which starts Spark as well.

Failover: messages are delivered, each rejected once with a reason of 500 random characters and then accepted, one by
one, nothing lands, and the node is killed with a ledger near its bound of 256 MiB. The figures are the
time until it serves again, the time until a worker then has the next message, which needs the queue's state, and how
long the trace of a message from before takes, without and with a ledger.

Audit: Spark audits a table of synthetic deliveries, stored as ranges, on this machine, and the memory of the largest
process is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa

from millstream.broker.subscriptions.frame import LedgerWindow, encode_window
from millstream.core.subscription import EXACTLY_ONCE, LEDGER, START, Verb
from millstream.core.topic import SUBSCRIPTIONS
from millstream.pipelines.jobs.ledger.audit import AuditTasks, LedgerLocation, QueueAudit, SparkTasks, account_queues
from millstream.pipelines.jobs.ledger.events import EVENTS
from millstream.pipelines.jobs.ledger.table import LedgerTable, ledger_storage
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient, message_trace
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.spark.session import session
from millstream_testing.server import Server

RATIO_MAX: Final = 1.05
_SCHEDULED: Final = 2
"""The kind of a process's CPU clock: the time for which it was scheduled."""
_VALUE: Final = b"x" * 100
_BATCH: Final = 500
_FRAMES: Final = 100_000
_AT_ONCE: Final = 100
"""The number of concurrent acknowledgements where their cost is not measured."""
QUEUES: Final = 8
_SAMPLED_S: Final = 0.1
"""How often the CPU time of ending processes is sampled."""


def main() -> int:
    """Measure and print; return 1 if a ledger costs too much."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--deliveries", type=int, default=100_000_000)
    parser.add_argument("--range", type=int, default=50, help="messages per stored range")
    parser.add_argument("--unlanded", type=int, default=600_000, help="messages accepted before the node is killed")
    parser.add_argument("--only", choices=("cost", "landing", "failover", "audit"))
    options = parser.parse_args()
    failed = False
    if options.only in (None, "cost"):
        with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
            failed = asyncio.run(cost(server, options.rounds, options.messages))
    if options.only in (None, "landing"):
        with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
            asyncio.run(landing(server, folder, options.messages))
    if options.only in (None, "failover"):
        for ledger in (False, True):
            with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
                failover(server, options.unlanded, ledger=ledger)
    if options.only in (None, "audit"):
        with tempfile.TemporaryDirectory() as folder:
            failed |= audit_synthetic(folder, options.deliveries, options.range)
    return int(failed)


def broker_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process by its own clock: a tick of /proc would be 5 % of a round."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


async def cost(server: Server, rounds: int, messages: int) -> bool:
    """Publish, deliver and accept, without and with a ledger in turn."""
    failed = False
    async with Client.connect(server.kafka) as client:
        for way, at_once, count in (("in ranges", _BATCH, 5 * messages), ("one by one", 1, messages // 10)):
            taken: dict[bool, list[float]] = {False: [], True: []}
            for number in range(rounds + 1):
                for ledger in (False, True) if number % 2 else (True, False):
                    before = broker_cpu_s(server.pid)
                    await _deliver(client, f"cost-{way[:2]}-{number}-{ledger}", count, at_once, ledger=ledger)
                    if number:
                        # The first round is a warm-up.
                        taken[ledger].append(broker_cpu_s(server.pid) - before)
            without, with_it = (statistics.median(taken[is_on]) for is_on in (False, True))
            ratio = statistics.median(b / a for a, b in zip(taken[False], taken[True], strict=True))
            per_message = 1e6 / count
            print(
                f"{way}: {without * per_message:.1f} µs of broker CPU per message without a ledger, "
                f"{with_it * per_message:.1f} with one; ratio {ratio:.3f} (at most {RATIO_MAX})",
                flush=True,
            )
            failed |= ratio > RATIO_MAX
    return failed


async def _deliver(client: Client, name: str, count: int, at_once: int, *, ledger: bool) -> None:
    await client.metadata([name], create=True)
    subscriptions = SubscriptionClient(client)
    settings = {START: "earliest", LEDGER: str(ledger).lower()}
    await subscriptions.create(name, [name], settings)
    for _ in range(count // _BATCH):
        batch = encode_batch([NewRecord(None, _VALUE, (), int(time.time() * 1000))] * _BATCH)
        await client.produce(name, 0, batch)
    done = 0
    while done < count // _BATCH * _BATCH:
        messages = await subscriptions.receive(name, "worker", max_records=_BATCH, wait_ms=1000)
        for start in range(0, len(messages), at_once):
            part = messages[start : start + at_once]
            errors = await subscriptions.settle(name, "worker", part, Verb.ACCEPT)
            if any(errors):
                raise RuntimeError(f"a message was not accepted: {errors}")
        done += len(messages)


async def landing(server: Server, folder: str, messages: int) -> None:
    """Deliver with a ledger, and measure the cost of landing its events."""
    async with Client.connect(server.kafka) as client:
        for way, at_once, count in (("in ranges", _BATCH, messages), ("one by one", 1, messages // 10)):
            await _deliver(client, f"landing-{way[:2]}", count, at_once, ledger=True)
            full_s, empty_s = [await asyncio.to_thread(_land, server, f"{folder}/lake") for _ in range(2)]
            print(
                f"landing {count:,} messages accepted {way}: {full_s - empty_s:.1f} CPU seconds, "
                f"{(full_s - empty_s) * 1e6 / count:.0f} µs per message, and {empty_s:.1f} to start Spark",
                flush=True,
            )


def _land(server: Server, lake: str) -> float:
    """Run the pipeline once; return the CPU seconds of its processes, including Java."""
    command = [sys.executable, "-m", "millstream.cli.main", "pipeline", "run", "ledger", "--once", "--lake", lake]
    used: dict[int, float] = {}
    with subprocess.Popen([*command, "--brokers", server.kafka], stdout=subprocess.DEVNULL) as driver:
        while driver.poll() is None:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(driver.pid)
                used |= {
                    process.pid: sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True))
                }
            time.sleep(_SAMPLED_S)
    if driver.returncode:
        raise RuntimeError(f"landing failed with exit code {driver.returncode}")
    return sum(used.values())


def failover(server: Server, messages: int, *, ledger: bool) -> None:
    """Kill a node with a large state, and measure how long it takes until a worker gets a message again."""
    name = "failover"
    topic_id = asyncio.run(_deliver_many(server, name, messages, ledger=ledger))
    stored = sum(path.stat().st_size for path in (server.data / "partitions" / topic_id).rglob("*"))
    cpu = broker_cpu_s(server.pid)
    server.restart(clean=False)
    first_s, traced_s, events = asyncio.run(_first_message_s(server, name, messages // 2))
    print(
        f"killed after {messages:,} messages {'with' if ledger else 'without'} a ledger, {stored / 2**20:.0f} MiB of "
        f"events stored: serves after {server.start_s:.1f} s, the next message {first_s:.2f} s later, a trace of one "
        f"from before in {traced_s:.2f} s ({events} events), {broker_cpu_s(server.pid):.1f} CPU seconds (before the "
        f"kill: {cpu:.0f})",
        flush=True,
    )


async def _deliver_many(server: Server, name: str, count: int, *, ledger: bool) -> str:
    """Accept messages one by one, concurrently, and leave one; return the id of the topic of states."""
    async with Client.connect(server.kafka) as client:
        await client.metadata([name], create=True)
        subscriptions = SubscriptionClient(client)
        await subscriptions.create(name, [name], {START: "earliest", LEDGER: str(ledger).lower()})
        record = NewRecord(None, _VALUE, (), int(time.time() * 1000))
        for _ in range(count // _BATCH):
            await client.produce(name, 0, encode_batch([record] * _BATCH))
        done = 0
        while done < count // _BATCH * _BATCH:
            messages = await subscriptions.receive(name, "worker", max_records=_AT_ONCE, wait_ms=1000)
            # As workers do: neighbouring messages that are accepted together would be one event.
            random.shuffle(messages)
            await asyncio.gather(*(_settle_one(subscriptions, name, message) for message in messages))
            done += sum(message.attempt > 1 for message in messages)
        await client.produce(name, 0, encode_batch([record]))
        return str((await client.metadata([SUBSCRIPTIONS])).topics[SUBSCRIPTIONS].topic_id)


async def _settle_one(subscriptions: SubscriptionClient, name: str, message: LeasedMessage) -> None:
    if message.attempt > 1:
        await subscriptions.settle(name, "worker", [message], Verb.ACCEPT)
        return
    reason = base64.b64encode(random.randbytes(375)).decode()
    await subscriptions.settle(name, "worker", [message], Verb.RELEASE, delay_ms=0, reason=reason)


async def _first_message_s(server: Server, name: str, traced: int) -> tuple[float, float, int]:
    async with Client.connect(server.kafka) as client:
        began = time.monotonic()
        while not await SubscriptionClient(client).receive(name, "next", max_records=1, wait_ms=1000):
            pass
        first_s = time.monotonic() - began
        began = time.monotonic()
        (subscription,) = (await message_trace(client, name, 0, traced)).subscriptions
        return first_s, time.monotonic() - began, len(subscription.events)


# -- the audit ----------------------------------------------------------------------------------------------------


def audit_synthetic(folder: str, deliveries: int, length: int) -> bool:
    """Write a ledger of deliveries in eight queues, and audit it."""
    storage = ledger_storage(folder)
    began = time.monotonic()
    queues = _write_synthetic(LedgerTable(storage), deliveries, length)
    rows = sum(queue.end for queue in queues)
    print(f"{rows:,} deliveries in ranges of {length} written in {time.monotonic() - began:.0f} s", flush=True)
    spark = session("bench-ledger", master="local[2]")
    try:
        began = time.monotonic()
        results = account_queues(
            SparkTasks(spark), AuditTasks(LedgerLocation(brokers="", storage=storage), queues), len(queues)
        )
        taken_s = time.monotonic() - began
    finally:
        spark.stop()
    accepted = sum(result["totals"]["accepted"] for _queue, result in results)
    findings = sum(len(result["findings"]) for _queue, result in results)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"audited {accepted:,} accepted messages in {taken_s:.0f} s on two cores, {findings} findings; "
        f"the largest process took {memory:.0f} MiB",
        flush=True,
    )
    return bool(accepted != rows or findings)


def _write_synthetic(table: LedgerTable, deliveries: int, length: int) -> list[QueueAudit]:
    queues: list[QueueAudit] = []
    size = deliveries // QUEUES // length * length
    subscription_id, topic_id = str(uuid.uuid4()), str(uuid.uuid4())
    for partition in range(QUEUES):
        writer = table.writer("synthetic", uuid.uuid4().hex[:16])
        for start in range(0, size // length, _FRAMES):
            frames = np.arange(start, min(start + _FRAMES, size // length))
            writer.write(_events(frames, length, partition, subscription_id, topic_id))
        table.commit(writer.close(), {("synthetic", partition): (0, size // length)})
        queues.append(
            QueueAudit(
                subscription="synthetic",
                subscription_id=subscription_id,
                topic="synthetic",
                topic_id=topic_id,
                partition=partition,
                base=0,
                end=size,
            )
        )
    return queues


def _events(
    frames: npt.NDArray[np.int64], length: int, partition: int, subscription_id: str, topic_id: str
) -> pa.RecordBatch:
    """Each frame scans, leases and accepts one range; the first starts the queue, the last records its window."""
    kinds = ["scanned", "acquired", "accepted"]
    columns: dict[str, Any] = {
        "kind": np.tile(np.array(kinds, object), len(frames)),
        "offset": np.repeat(frames * length, len(kinds)),
        "end_offset": np.repeat((frames + 1) * length, len(kinds)),
        "sequence": np.repeat(frames, len(kinds)),
        "row": np.tile(np.arange(len(kinds)), len(frames)),
        "state_offset": np.repeat(frames, len(kinds)),
        "window": np.full(len(frames) * len(kinds), None, object),
    }
    end = int(frames[-1] + 1) * length
    window = encode_window(LedgerWindow(b"", EXACTLY_ONCE, "read_committed", "", ""))
    marks: list[tuple[object, ...]] = [("window", end, end, int(frames[-1]), len(kinds), int(frames[-1]), window)]
    if frames[0] == 0:
        marks.append(("start", 0, 0, 0, -1, 0, None))
    for name, values in zip(columns, zip(*marks, strict=True), strict=True):
        columns[name] = np.concatenate([columns[name], np.array(values, columns[name].dtype)])
    rows = len(columns["kind"])
    fixed = {
        "subscription": "synthetic",
        "topic": "synthetic",
        "subscription_id": subscription_id,
        "topic_id": topic_id,
    }
    columns_of_rows = {
        **columns,
        **{name: np.full(rows, value, object) for name, value in fixed.items()},
        "partition": np.full(rows, partition),
        "attempt": np.full(rows, 1),
        "timestamp": np.full(rows, 0),
        "state_partition": np.full(rows, 0),
    }
    schema = pa.schema([field for field in EVENTS if field.name in columns_of_rows])
    return pa.RecordBatch.from_arrays(
        [pa.array(columns_of_rows[field.name], field.type) for field in schema], schema=schema
    )


if __name__ == "__main__":
    sys.exit(main())
