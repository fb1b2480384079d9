"""Measure the console: server CPU per page with 10,000 topics and 1,000 subscriptions, open browsers, and a search.

    python -m benchmarks.console [--quick] [--only pages|browsers|search]

CPU seconds are those of the server's processes together, so that other work on the machine does not count. A search is
measured on one topic with messages of 160 bytes and a filter on a field; the CPU of the process that evaluates filters
is listed separately. Publishing and a page are timed alternately with and without a concurrent search; then the search
is stopped, and the remaining cost of filters is measured. Browsers keep the overview open and refresh it as the script
of the page does, while a steady load is published and read; their cost is the CPU that the broker's process uses in
addition to the load alone, measured in turn. `--quick` uses 1,000 topics, 100 subscriptions and fewer messages.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from millstream.gateway.console.history import FIRST_S
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

TOPICS, SUBSCRIPTIONS, MESSAGES = 10_000, 1000, 1_000_000
QUICK: Final = (1000, 100, 200_000)
PAGE_CPU_S_MAX: Final = 0.3
SEARCHED_PER_CPU_S_MIN: Final = 200_000
BROWSERS: Final = 20
BROWSERS_SHARE_MAX: Final = 0.02
WATCHED_S: Final = 40.0
WINDOWS: Final = 2
"""How often the load is measured without browsers, and then with them."""
LOAD_S: Final = 0.05
LOAD_RECORDS: Final = 50
"""The interval and the size of the batches that are published and read: 1,000 messages per second."""
REPEATS: Final = 5
SEARCHED: Final = {"filter": "payload.total = 4242 AND payload.order < 0", "at": "0:0"}
OTHER_REQUESTS: Final = 20
"""How often other requests are timed during a search."""
STOPPED_S: Final = 2.0
STOPPED_SHARE_MAX: Final = 0.05
TOPICS_PER_REQUEST: Final = 500
LOADED: Final = "topic-00000"
RECORDS_PER_BATCH: Final = 2000
PAGES: Final = (
    "",
    "/topics",
    "/topics?search=77",
    "/topics?order=bytes&down=1",
    "/topics/topic-00042",
    "/topics/topic-00042/consumers",
    "/topics/searched/messages",
    "/topics/searched/messages/0/5",
    "/topics/topic-00042/settings",
    "/subscriptions",
    "/subscriptions/subscription-0007",
    "/dead-letters",
    "/groups",
    "/pipelines",
    "/cluster",
    "/transactions",
    "/clients",
    "/schemas",
    "/mirrors",
    "/access",
)


def main() -> None:
    """Fill a server, measure, report; exit with 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("pages", "browsers", "search"))
    options = parser.parse_args()
    topics, subscriptions, messages = QUICK if options.quick else (TOPICS, SUBSCRIPTIONS, MESSAGES)
    if options.only == "search":
        topics = subscriptions = 1
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
        asyncio.run(_fill(server.kafka, topics, subscriptions, messages))
        print(f"{topics:,} topics, {subscriptions:,} subscriptions, {messages:,} messages of 160 B")
        with httpx.Client(base_url=f"http://{server.http}/console", timeout=600) as client:
            may_commit = True
            if options.only in (None, "pages"):
                may_commit &= all(list(_pages(server, client)))
            if options.only in (None, "browsers"):
                may_commit &= _browsers(server, client)
            if options.only in (None, "search"):
                may_commit &= _search(server, client, messages)
                may_commit &= _search_with_other_load(server, client)
        memory = dict(_memory(server.pid))
        print("memory: " + ", ".join(f"{name} {rss / 2**20:.0f} MiB" for name, rss in memory.items()))
    sys.exit(0 if may_commit else 1)


async def _fill(kafka: str, topics: int, subscriptions: int, messages: int) -> None:
    from datetime import timedelta

    from kio.schema.create_topics.v7 import request

    wire: Any = request
    async with Client.connect(kafka, timeout_s=300) as client:
        names = [f"topic-{number:05}" for number in range(topics)] + ["searched"]
        for at in range(0, len(names), TOPICS_PER_REQUEST):
            new_topics = tuple(
                wire.CreatableTopic(name=name, num_partitions=1, replication_factor=1, assignments=(), configs=())
                for name in names[at : at + TOPICS_PER_REQUEST]
            )
            await client.send(None, wire.CreateTopicsRequest(topics=new_topics, timeout=timedelta(minutes=5)))
        declared = SubscriptionClient(client)
        for number in range(subscriptions):
            await declared.create(f"subscription-{number:04}", [f"topic-{number:05}"], {})
        now_ms = int(time.time() * 1000)
        for at in range(0, messages, RECORDS_PER_BATCH):
            records = [
                NewRecord(None, _value(number), (), now_ms)
                for number in range(at, min(at + RECORDS_PER_BATCH, messages))
            ]
            await client.produce("searched", 0, encode_batch(records))


def _value(number: int) -> bytes:
    head = f'{{"order":{number},"total":{number % 10_000},"note":"'
    return (head + "x" * (158 - len(head)) + '"}').encode()


def _pages(server: Server, client: httpx.Client) -> Iterator[bool]:
    # The first visit starts the sampling, whose first two samples are close together.
    _page(client, "")
    time.sleep(2 * FIRST_S)
    for path in PAGES:
        _page(client, path)
        before = _cpu_s(server.pid)
        for _ in range(REPEATS):
            size = _page(client, path)
        used_s = (_cpu_s(server.pid) - before) / REPEATS
        print(f"{path or '/':40} {used_s * 1000:6.0f} ms of CPU  {size / 1024:6.0f} KiB")
        yield used_s < PAGE_CPU_S_MAX


def _page(client: httpx.Client, path: str) -> int:
    response = client.get(path)
    response.raise_for_status()
    return len(response.content)


def _browsers(server: Server, client: httpx.Client) -> bool:
    """Open the overview in browsers, each with its stream of events, and measure what they cost the broker."""
    is_over = threading.Event()
    load = threading.Thread(target=lambda: asyncio.run(_load(server.kafka, is_over)), daemon=True)
    load.start()
    without: list[float] = []
    with_them: list[float] = []
    for _ in range(WINDOWS):
        without.append(_broker_share(server.pid))
        with_them.append(_watched(server, client))
    is_over.set()
    load.join()
    loaded, used = statistics.median(without), statistics.median(with_them) - statistics.median(without)
    print(f"{BROWSERS} browsers: {used:.2%} of a core of the broker, beside a load that takes {loaded:.1%}")
    return used < BROWSERS_SHARE_MAX


def _watched(server: Server, client: httpx.Client) -> float:
    """Return how much of a core the broker uses while browsers are open."""
    is_over = threading.Event()

    def browse() -> None:
        with httpx.Client(base_url=client.base_url, timeout=600) as own, own.stream("GET", "/events") as events:
            for line in events.iter_lines():
                if is_over.is_set():
                    return
                if line == "event: sampled":
                    own.get("/", headers={"hx-request": "true"}).raise_for_status()

    threads = [threading.Thread(target=browse, daemon=True) for _ in range(BROWSERS)]
    for thread in threads:
        thread.start()
    time.sleep(3.0)
    used = _broker_share(server.pid)
    is_over.set()
    for thread in threads:
        # They notice with the next event.
        thread.join()
    return used


async def _load(kafka: str, is_over: threading.Event) -> None:
    """Publish and read at a steady rate."""
    async with Client.connect(kafka) as client:
        at: int = (await client.list_offsets(LOADED, {0: -1}))[0].offset
        while not is_over.is_set():
            now_ms = int(time.time() * 1000)
            await client.produce(LOADED, 0, encode_batch([NewRecord(None, _value(1), (), now_ms)] * LOAD_RECORDS))
            await client.fetch(LOADED, 0, at, max_bytes=1 << 20, max_wait_ms=100)
            at += LOAD_RECORDS
            await asyncio.sleep(LOAD_S)


def _broker_share(pid: int) -> float:
    """Return the share of a core that the broker's own process uses."""
    process = psutil.Process(pid)
    before, started = float(sum(process.cpu_times()[:2])), time.monotonic()
    time.sleep(WATCHED_S)
    return (float(sum(process.cpu_times()[:2])) - before) / (time.monotonic() - started)


def _search(server: Server, client: httpx.Client, messages: int) -> bool:
    with client.stream("GET", "/topics/searched/search", params=SEARCHED) as response:
        # Starts the process that evaluates filters.
        response.read()
    before, worker_before = _cpu_s(server.pid), _worker_cpu_s(server.pid)
    started = time.monotonic()
    with client.stream("GET", "/topics/searched/search", params=SEARCHED) as response:
        events = [line for line in response.iter_lines() if line.startswith("data:")]
    took_s = time.monotonic() - started
    worker_s = _worker_cpu_s(server.pid) - worker_before
    used_s = _cpu_s(server.pid) - before
    print(f"search: {events[-1][:120]}")
    print(
        f"search: {messages / took_s:,.0f} messages a second, {messages / worker_s:,.0f} per CPU second of the process "
        f"that evaluates, {messages / used_s:,.0f} per CPU second of all processes"
    )
    return messages / worker_s >= SEARCHED_PER_CPU_S_MIN


def _search_with_other_load(server: Server, client: httpx.Client) -> bool:
    """Time other requests with and without a search, in turn; then stop it, and measure its remaining cost."""
    timed: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(2 * WINDOWS):
        is_searching = bool(number % 2)
        with ExitStack() as stack:
            if is_searching:
                _begin_search(stack, client)
            timed[is_searching] += [_time_other_requests(server, client) for _ in range(OTHER_REQUESTS)]
    for name, at in (("publish", 0), ("page", 1)):
        without, beside = (sorted(sample[at] * 1000 for sample in timed[way]) for way in (False, True))
        print(
            f"search: a {name} takes {statistics.median(beside):.1f} ms beside a search, "
            f"{statistics.median(without):.1f} without; at most {beside[-1]:.0f} and {without[-1]:.0f}"
        )
    before = _worker_cpu_s(server.pid)
    time.sleep(STOPPED_S)
    cpu_share = (_worker_cpu_s(server.pid) - before) / STOPPED_S
    print(f"search: stopped, filters use {cpu_share:.1%} of a core")
    return cpu_share < STOPPED_SHARE_MAX


def _begin_search(stack: ExitStack, client: httpx.Client) -> None:
    """Start a search, and stop it with the stack by closing the connection, as a browser does."""
    own = stack.enter_context(httpx.Client(base_url=client.base_url, timeout=600))
    response = stack.enter_context(own.stream("GET", "/topics/searched/search", params=SEARCHED))
    next(response.iter_lines())


def _time_other_requests(server: Server, client: httpx.Client) -> tuple[float, float]:
    """Return how long a message takes to be published, and a page to be shown."""
    started = time.monotonic()
    address = f"http://{server.http}/v1/topics/{LOADED}/messages"
    client.post(address, content=_value(1), headers={"content-type": "application/json"}).raise_for_status()
    published = time.monotonic()
    _page(client, f"/topics/{LOADED}")
    return published - started, time.monotonic() - published


def _processes(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _cpu_s(pid: int) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _processes(pid))


def _worker_cpu_s(pid: int) -> float:
    return sum(
        sum(process.cpu_times()[:2])
        for process in _processes(pid)
        if "filter_worker_child" in " ".join(process.cmdline())
    )


def _memory(pid: int) -> Iterator[tuple[str, int]]:
    for process in _processes(pid):
        command = " ".join(process.cmdline())
        name = "gateway" if "gateway.process" in command else "filters" if "filter_worker" in command else "broker"
        yield f"{name} {process.pid}", process.memory_info().rss


if __name__ == "__main__":
    main()
