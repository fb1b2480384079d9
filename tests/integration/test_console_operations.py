"""The console in a real browser with large or broken content: hanging transactions, job runs, a redrive of many
letters, a search through a million messages.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from confluent_kafka import Producer
from playwright.sync_api import Page, expect

from millstream.client.admin.dead_letter import dead_letter_topics
from millstream.core.subscription import ATTEMPTS, START, Verb
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.browser import WAIT_S, check_appearance, chromium, open_page, running_browser, save_screenshot
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

LETTERS = 30_000
MESSAGES = 1_000_000
BATCH = 2000
JOB = """
import time

def run(spark, millstream):
    print("counting the orders of yesterday")
    rows = spark.range(1000).count()
    for part in range(3):
        millstream.report(part=part + 1, rows=rows)
        print(f"part {part + 1} of 3: {rows} rows")
        time.sleep(2)
"""
BROKEN = JOB + '    raise ValueError("no such order: <b>4711</b>")\n'
SPARK_MS = 180_000
"""How long Spark may take to start."""


@pytest.fixture(autouse=True)
def needs_browser() -> None:
    """Skip before anything is started."""
    chromium()


def test_a_hanging_transaction_is_found_and_ended(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        command = CommandLine(server.kafka)
        assert command("topic", "create", "orders").code == 0
        writer = Producer({"bootstrap.servers": server.kafka, "transactional.id": "invoices", "log_level": 0})
        writer.init_transactions(WAIT_S)
        writer.begin_transaction()
        writer.produce("orders", b"never committed")
        assert writer.flush(WAIT_S) == 0
        coordinators = command("topic", "describe", "__transaction_state", "--json").document["id"]
        server.stop()
        # A coordinator that has lost its state never ends its transactions.
        shutil.rmtree(server.data / "partitions" / coordinators)
        server.start()
        with running_browser() as browser:
            watched = open_page(browser, f"http://{server.http}/console/transactions")
            page = watched.page
            expect(page.get_by_text("No open transaction")).to_be_visible()
            page.get_by_role("link", name="Look for hanging ones").click()
            expect(page.get_by_role("heading", name="Hanging")).to_be_visible()
            page.get_by_role("row").filter(has_text="orders/0").locator("summary").click()
            expect(page.get_by_text("millstream transaction abort --topic orders")).to_be_visible()
            check_appearance(page, "transactions-hanging")
            page.get_by_label("to confirm").fill("orders")
            page.get_by_role("button", name="End it").click()
            expect(page.get_by_role("status")).to_contain_text("is ended: millstream transaction abort --topic orders")
            page.get_by_role("link", name="Look for hanging ones").click()
            expect(page.get_by_text("No transactions are hanging.")).to_be_visible()
            assert watched.problems == []


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_a_job_is_run_followed_and_its_log_read(tmp_path: Path) -> None:
    settings = {"pipelines-lake": tmp_path / "lake", "pipelines-folder": tmp_path / "pipelines"}
    with (
        Server(tmp_path / "data", settings={**settings, "pipelines-master": "local[1]"}) as server,
        httpx.Client(base_url=f"http://{server.http}/v1", timeout=WAIT_S) as api,
        running_browser() as browser,
    ):
        made = api.post("/pipelines", json={"name": "nightly", "kind": "job", "settings": {"code": JOB}})
        assert made.is_success, made.text
        pipelines = f"http://{server.http}/console/pipelines"
        watched = open_page(browser, pipelines)
        page = watched.page
        check_appearance(page, "pipelines-running")
        page.get_by_role("link", name="nightly").click()
        _open_run(page)
        # The output of a run in progress, and its end, appear without a reload.
        expect(page.locator("#run")).to_contain_text("counting the orders of yesterday", timeout=SPARK_MS)
        check_appearance(page, "run-running")
        expect(page.locator("#run")).to_contain_text("part 3 of 3: 1000 rows", timeout=SPARK_MS)
        expect(page.locator("#run .chip")).to_have_text("succeeded", timeout=SPARK_MS)
        check_appearance(page, "run-succeeded")
        page.get_by_role("link", name="nightly").click()
        expect(page.get_by_role("row").filter(has_text="succeeded")).to_contain_text("rows: 1000")
        page.locator("summary").filter(has_text="Run it now").click()
        page.get_by_role("button", name="Run now").click()
        expect(page.get_by_role("status")).to_contain_text("millstream pipeline trigger nightly")
        expect(page.locator("#runs").get_by_role("link", name="2", exact=True)).to_be_visible(timeout=SPARK_MS)
        check_appearance(page, "job")
        page.locator("summary").filter(has_text="Cancel the run").click()
        page.get_by_label("to confirm").first.fill("nightly")
        page.get_by_role("button", name="Cancel run").click()
        expect(page.get_by_role("status")).to_contain_text("millstream pipeline cancel nightly")
        broken = {"code": BROKEN, "retries": "0"}
        assert api.post("/pipelines", json={"name": "broken", "kind": "job", "settings": broken}).is_success
        page.goto(f"{pipelines}/broken")
        _open_run(page)
        expect(page.locator("#run .chip")).to_have_text("failed", timeout=SPARK_MS)
        expect(page.get_by_text("no such order: <b>4711</b>").first).to_be_visible()
        check_appearance(page, "run-failed")
        assert watched.problems == []


def _open_run(page: Page) -> None:
    """Open the newest run of a job once there is one."""
    page.locator("#runs").get_by_role("link", name=re.compile(r"^\d+$")).first.click(timeout=SPARK_MS)
    expect(page.locator("#run")).to_be_visible()


# -- much of it ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with many dead letters and very many messages."""
    chromium()
    with Server(tmp_path_factory.mktemp("full") / "data") as server:
        asyncio.run(_fill(server.kafka))
        yield server


async def _fill(kafka: str) -> None:
    async with Client.connect(kafka, timeout_s=120) as client:
        now_ms = int(time.time() * 1000)
        await client.metadata(["orders", "searched"], create=True)
        subscriptions = SubscriptionClient(client)
        await subscriptions.create("billing", ["orders"], {START: "earliest", ATTEMPTS: "1"})
        for start in range(0, LETTERS, BATCH):
            records = [NewRecord(None, b'{"order": %d}' % number, (), now_ms) for number in range(start, start + BATCH)]
            await client.produce("orders", 0, encode_batch(records))
        rejected = 0
        while rejected < LETTERS:
            messages = await subscriptions.receive("billing", "bank", max_records=500, wait_ms=1000)
            await subscriptions.settle("billing", "bank", messages, Verb.REJECT, reason="the bank did not respond")
            rejected += len(messages)
        while sum(topic.letters for topic in await dead_letter_topics(client)) < LETTERS:
            await asyncio.sleep(0.5)
        for start in range(0, MESSAGES, BATCH):
            values = (
                b'{"order":%d,"total":%d,"note":"' % (number, number % 10_000) for number in range(start, start + BATCH)
            )
            records = [NewRecord(None, value + b"x" * (158 - len(value)) + b'"}', (), now_ms) for value in values]
            await client.produce("searched", 0, encode_batch(records))


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_a_large_redrive_shows_its_progress_on_every_page(full_server: Server) -> None:
    with running_browser() as browser:
        watched = open_page(browser, f"http://{full_server.http}/console")
        page = watched.page
        page.get_by_role("link", name="See why and redrive").click()
        expect(page.get_by_text(f"{LETTERS:,} open letters of billing")).to_be_visible()
        check_appearance(page, "dead-letters-many")
        page.locator("summary").filter(has_text=f"Redrive {LETTERS:,} letters").click()
        page.get_by_role("button", name="Count only").first.click()
        expect(page.get_by_role("status")).to_contain_text(
            f"{LETTERS:,} letters would be redriven ({LETTERS:,} in billing); nothing was changed", timeout=300_000
        )
        # Such a count holds letters back for a minute; the page says so.
        expect(page.get_by_role("status")).to_contain_text("after a minute")
        _wait_for_letters(full_server)
        page.goto(f"http://{full_server.http}/console/dead-letters/billing-dlq")
        page.locator("summary").filter(has_text=f"Redrive {LETTERS:,} letters").click()
        page.get_by_role("button", name="Redrive").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Redrive letters of billing-dlq")
        expect(page.get_by_role("progressbar", name="Progress")).to_be_visible()
        expect(page.get_by_role("status")).to_contain_text(f"of {LETTERS:,} examined")
        save_screenshot(page, "task")
        page.get_by_role("link", name="Topics", exact=True).click()
        expect(page.get_by_text("Redrive letters of billing-dlq: in progress")).to_be_visible()
        page.get_by_role("link", name="See its progress").click()
        expect(page.get_by_role("status")).to_contain_text(
            f"{LETTERS:,} messages delivered again ({LETTERS:,} to billing)", timeout=300_000
        )
        check_appearance(page, "task-done")
        page.get_by_role("link", name="Back").click()
        expect(page.get_by_text("No open letter.")).to_be_visible()
        page.goto(f"http://{full_server.http}/console/subscriptions/billing")
        expect(page.locator(".stat").filter(has_text="Waiting")).to_contain_text(f"{LETTERS:,}")
        assert watched.problems == []


def _wait_for_letters(server: Server) -> None:
    """Wait until letters held back by a count can be redriven."""

    async def wait() -> None:
        async with Client.connect(server.kafka) as client:
            while True:
                (counted,) = await SubscriptionClient(client).describe(["__dlq/billing-dlq"])
                if sum(queue["available"] for queue in counted["queues"]) >= LETTERS:
                    return
                await asyncio.sleep(1)

    # In its own thread, since the browser's driver has the event loop of this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, asyncio.wait_for(wait(), 180)).result()


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_a_search_through_very_many_messages_shows_progress_and_stops(full_server: Server) -> None:
    with running_browser() as browser, ExitStack() as stack:
        api = stack.enter_context(httpx.Client(base_url=f"http://{full_server.http}/v1", timeout=WAIT_S))
        watched = open_page(browser, f"http://{full_server.http}/console/topics/searched/messages")
        page = watched.page
        page.get_by_label("Filter").fill("payload.total = 4242 AND payload.order < 0")
        page.get_by_label("From").fill("start")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_role("progressbar", name="Messages searched")).to_be_visible()
        check_appearance(page, "search-running", schemes=())
        assert api.post("/topics/orders/messages", json={"order": "during the search"}).is_success
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("[data-state]")).to_contain_text("Stopped.")
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        # No filter is evaluated any more.
        before = _filter_cpu_s(full_server.pid)
        time.sleep(2)
        assert _filter_cpu_s(full_server.pid) - before < 1
        page.get_by_label("Filter").fill("payload.order = 999999")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#rows tr")).to_have_count(1, timeout=120_000)
        expect(page.locator("#rows")).to_contain_text('"order":999999')
        check_appearance(page, "search-done")
        assert watched.problems == []


def _filter_cpu_s(pid: int) -> float:
    children = psutil.Process(pid).children(recursive=True)
    return sum(
        sum(process.cpu_times()[:2]) for process in children if "filter_worker_child" in " ".join(process.cmdline())
    )
