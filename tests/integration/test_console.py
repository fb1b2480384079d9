"""The console in a real browser, against a real server: every page and action, hostile content, no scripts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from html import unescape
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from confluent_kafka import KafkaException, Producer, ShareConsumer
from playwright.sync_api import Browser, Page, expect

from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.gateway.console.search import TAILS_PER_USER_MAX
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import commit_offsets
from millstream_testing.browser import (
    DESKTOP,
    SCREENSHOTS,
    WAIT_S,
    WatchedPage,
    check_appearance,
    chromium,
    open_page,
    running_browser,
    save_screenshot,
)
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>window.pwned=1</script>"
MESSAGES = {"content-type": "application/vnd.millstream.messages+json"}
PAGES = (
    "",
    "/topics",
    "/topics/orders",
    "/topics/orders/messages",
    "/topics/orders/messages/0/0",
    "/topics/orders/settings",
    "/topics/orders/consumers",
    "/topics/orders/publish",
    "/subscriptions",
    "/subscriptions/billing",
    "/dead-letters",
    "/dead-letters/billing-dlq",
    "/groups",
    "/groups/reporting",
    "/pipelines",
    "/pipelines/by-region",
    "/pipelines/nightly",
    "/cluster",
    "/cluster/plan",
    "/transactions",
    "/clients",
    "/schemas",
    "/schemas/orders-value",
    "/mirrors",
    "/access",
)


ORDER: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "order", "type": "long"}]}
PARCEL = {"type": "record", "name": "Parcel", "fields": [{"name": "to", "type": "string"}]}
THEMED = ("", "/topics/orders/messages", "/subscriptions/billing", "/dead-letters/billing-dlq")
"""The pages that are checked in both themes; others have no colours of their own."""


class Console:
    """A server and a browser. Tests share a page, since each new session starts processes of the browser."""

    def __init__(self, server: Server, browser: Browser) -> None:
        self.server = server
        self._browser = browser
        self._shared = open_page(browser, f"{self.url}/static/icon.svg")

    @property
    def url(self) -> str:
        return f"http://{self.server.http}/console"

    def api(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://{self.server.http}/v1", timeout=WAIT_S)

    def page(self, path: str = "") -> WatchedPage:
        """Open an address in the page that all tests share."""
        self._shared.problems.clear()
        self._shared.page.goto(self.url + path)
        return self._shared

    def new_page(self, path: str, **context: Any) -> WatchedPage:
        """Open an address in a new session."""
        return open_page(self._browser, self.url + path, **context)

    def leave_pages(self) -> None:
        """Leave the pages of a test, which keep refreshing, and forget its session."""
        shared = self._shared.page
        for context in self._browser.contexts:
            if context is not shared.context:
                context.close()
        # A page of another site would be shown by another process.
        shared.goto(f"{self.url}/static/icon.svg")
        shared.set_viewport_size(DESKTOP)
        shared.emulate_media(color_scheme="light")
        shared.context.clear_cookies()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    chromium()
    with Server(tmp_path_factory.mktemp("console") / "data") as server:
        with httpx.Client(base_url=f"http://{server.http}/v1", timeout=WAIT_S) as api:
            _fill(api)
        # Before the browser, whose driver has its own event loop.
        asyncio.run(_commit(server.kafka))
        with running_browser() as browser:
            yield Console(server, browser)


@pytest.fixture(autouse=True)
def leave_pages(console: Console) -> Iterator[None]:
    yield
    console.leave_pages()


def _fill(api: httpx.Client) -> None:
    card = {"owner": "team-shop", "description": f"Every order. {HOSTILE}"}
    assert api.post("/topics", json={"topic": "orders", "partitions": 2, **card}).status_code == 201
    assert api.post("/topics", json={"topic": "payments"}).status_code == 201
    for name in ("billing", "shipping"):
        made = api.post("/subscriptions", json={"name": name, "topics": ["orders"], "start": "start", "attempts": 2})
        assert made.status_code == 201, made.text
    orders = [
        {"json": {"order": number, "total": 100 * number}, "key": f"customer-{number % 3}", "headers": {"region": "eu"}}
        for number in range(60)
    ]
    assert api.post("/topics/orders/messages", content=json.dumps({"messages": orders}), headers=MESSAGES).is_success
    pulled = api.post("/subscriptions/billing/messages:pull", json={"max": 12, "wait_ms": 20_000}).json()["messages"]
    reject = [{"lease": message["lease"], "reason": f"card declined {HOSTILE}"} for message in pulled[:4]]
    reject += [{"lease": message["lease"], "reason": "the bank did not respond"} for message in pulled[4:7]]
    accept = [message["lease"] for message in pulled[7:9]]
    settled = api.post("/subscriptions/billing/messages:settle", json={"reject": reject, "accept": accept})
    assert settled.is_success, settled.text
    for subject, schema in (("orders-value", ORDER), ("parcels-value", PARCEL)):
        path = f"{api.base_url.copy_with(path='/registry')}/subjects/{subject}/versions"
        assert api.post(path, json={"schema": json.dumps(schema)}).is_success
    for kind, name, settings in (
        ("route", "by-region", {}),
        ("job", "nightly", {"code": "def run(spark, millstream):\n    print(1)\n"}),
    ):
        made = api.post("/pipelines", json={"name": name, "kind": kind, "settings": settings, "enabled": False})
        assert made.is_success, made.text


async def _commit(kafka: str) -> None:
    async with Client.connect(kafka, client_id=HOSTILE) as client:
        for group in ("reporting", "sampling"):
            await commit_offsets(client, group, {TopicPartition("orders", PartitionIndex(0)): 5})


# -- pages -----------------------------------------------------------------------------------------------------------


def test_the_navigation_opens_every_page(console: Console) -> None:
    watched = console.page()
    page = watched.page
    for name in ("Topics", "Subscriptions", "Dead letters", "Groups", "Pipelines", "Cluster", "Overview"):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        expect(page.get_by_role("navigation", name="Main").locator("[aria-current]")).to_have_text(name)
    assert watched.problems == []


_UNREACHABLE = """() => [...document.querySelectorAll("a, button, input:not([type=hidden]), select, textarea, summary")]
  .filter((one) => one.checkVisibility() && one.tabIndex !== 0).map((one) => one.outerHTML)"""


def test_pages_are_accessible_fit_on_a_phone_and_run_no_foreign_code(console: Console) -> None:
    watched = console.page()
    page = watched.page
    for path in PAGES:
        response = page.goto(console.url + path)
        assert response is not None
        assert response.status == 200, (path, response.text())
        assert "unsafe" not in response.headers["content-security-policy"]
        name = path.strip("/").replace("/", "-") or "overview"
        check_appearance(page, name, schemes=("light", "dark") if SCREENSHOTS or path in THEMED else ("light",))
        assert page.evaluate(_UNREACHABLE) == [], path
        assert page.evaluate("window.pwned") is None
    assert watched.problems == []


def test_pages_are_readable_without_scripts(console: Console) -> None:
    page = console.new_page("/topics", java_script_enabled=False).page
    page.get_by_label("Search by name").fill("pay")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("rowheader")).to_have_text(["payments"])
    page.goto(f"{console.url}/topics/orders")
    page.get_by_role("link", name="Messages", exact=True).click()
    page.get_by_label("Filter").fill("payload.total = 700")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#rows tr")).to_have_count(1)


def test_topics_are_searched_while_typing(console: Console) -> None:
    watched = console.page("/topics")
    watched.page.get_by_label("Search by name").press_sequentially("orde")
    expect(watched.page.get_by_role("rowheader")).to_have_text(["orders"])
    # What was typed first may have been searched for already.
    expect(watched.page).to_have_url(re.compile("search=orde"))
    save_screenshot(watched.page, "topics")
    assert watched.problems == []


# -- messages --------------------------------------------------------------------------------------------------------


def test_the_keyboard_is_sufficient(console: Console) -> None:
    watched = console.page("/topics")
    page = watched.page
    focused = page.locator("*:focus")
    page.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    expect(focused).to_have_id("main")
    page.keyboard.press("/")
    page.keyboard.type("pay")
    expect(page.get_by_role("rowheader")).to_have_text(["payments"])
    page.goto(f"{console.url}/subscriptions/shipping")
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("millstream subscription pause shipping")
    page.get_by_role("button", name="Resume").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("status")).to_contain_text("millstream subscription resume shipping")
    page.locator("summary").filter(has_text="Try a filter").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("payload.order = 7")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text(re.compile(r"orders: 1 of \d+ recent messages match"))
    assert watched.problems == []


def test_a_filter_selects_messages_and_an_invalid_one_is_explained(console: Console) -> None:
    watched = console.page("/topics/orders/messages")
    page = watched.page
    page.get_by_label("Filter").fill("payload.total >= 5500 AND headers['region'] = 'eu'")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#rows tr")).to_have_count(5)
    expect(page.locator("#rows")).to_contain_text('{"order": 59, "total": 5900}')
    save_screenshot(page, "messages")
    page.get_by_label("Filter").fill("payload.total >=")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.goto(f"{console.url}/topics/orders/messages?key=customer-1&filter=payload.total+<+500")
    expect(page.locator("#rows tr")).to_have_count(2)
    assert watched.problems == []


@pytest.mark.parametrize("text", ["o'brien", "C:\\new", "KeyError: 'city'\n\\'"])
def test_keys_and_reasons_are_selected_with_any_content(console: Console, topic: str, text: str) -> None:
    with console.api() as api, httpx.Client(base_url=console.url, timeout=WAIT_S) as pages:
        made = api.post("/subscriptions", json={"name": f"{topic}-s", "topics": [topic], "start": "start"})
        assert made.status_code == 201, made.text
        sent = [{"value": "1", "key": text}, {"value": "2", "key": "other"}]
        assert api.post(
            f"/topics/{topic}/messages", content=json.dumps({"messages": sent}), headers=MESSAGES
        ).is_success
        pull = f"/subscriptions/{topic}-s/messages:pull"
        (first, *_) = api.post(pull, json={"max": 1, "wait_ms": 20_000}).json()["messages"]
        rejected = {"reject": [{"lease": first["lease"], "reason": text}]}
        assert api.post(pull.replace(":pull", ":settle"), json=rejected).is_success
        page = pages.get(f"/topics/{topic}/messages", params={"key": text})
        assert (page.status_code, "1 found in 2 of 2 messages" in page.text) == (200, True), page.text
        # The letter is written after the rejection was confirmed.
        letters = f"/dead-letters/{topic}-s-dlq"
        (link,) = wait_until(lambda: re.findall(r'href="[^"]*(\?filter=[^"]+)"', pages.get(letters).text))
        selected = pages.get(f"/dead-letters/{topic}-s-dlq{unescape(link)}")
        assert (selected.status_code, "Selected letters" in selected.text) == (200, True), selected.text


def test_hostile_messages_are_shown_as_text(console: Console) -> None:
    with console.api() as api:
        made = api.post("/subscriptions", json={"name": HOSTILE, "topics": ["hostile"]})
        assert made.status_code == 201, made.text
        hostile = {"value": HOSTILE, "key": HOSTILE, "headers": {"x": HOSTILE}}
        sent = api.post("/topics/hostile/messages", content=json.dumps({"messages": [hostile]}), headers=MESSAGES)
        assert sent.is_success, sent.text
    watched = console.page("/topics/hostile/messages")
    page = watched.page
    expect(page.locator("#rows")).to_contain_text(HOSTILE)
    page.locator("#rows a").click()
    expect(page.locator("#value")).to_have_text(HOSTILE)
    for path in (
        "",
        "/subscriptions",
        f"/subscriptions/{quote(HOSTILE, safe='')}",
        "/clients?all=1",
        "/topics/hostile/consumers",
    ):
        page.goto(console.url + path)
    page.goto(f"{console.url}/topics?search={quote(HOSTILE)}")
    expect(page.locator("#list")).to_contain_text(HOSTILE)
    assert page.evaluate("window.pwned") is None
    assert watched.problems == []


def test_a_published_message_arrives_in_the_live_tail(console: Console) -> None:
    following = console.new_page("/topics/payments/messages")
    following.page.get_by_role("button", name="Live tail").click()
    expect(following.page.get_by_role("button", name="Stop the tail")).to_be_visible()
    watched = console.page("/topics/payments/publish")
    page = watched.page
    page.get_by_label("Value", exact=True).fill('{"payment": 1}')
    page.get_by_label("Key").fill("customer-1")
    page.get_by_label("Headers").fill("region: eu")
    page.get_by_label("Publish to payments").check()
    page.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("status")).to_contain_text("millstream publish payments --key customer-1")
    expect(page.locator("#value")).to_contain_text('"payment": 1')
    expect(page.get_by_text("customer-1").first).to_be_visible()
    expect(following.page.locator("#rows")).to_contain_text('{"payment": 1}')
    assert watched.problems + following.problems == []


def test_publishing_to_an_internal_topic_is_not_offered(console: Console) -> None:
    page = httpx.get(f"{console.url}/topics/__subscriptions/publish", timeout=WAIT_S).text
    assert ("internal" in page, page.count("<textarea"), page.count(">Publish</a>")) == (True, 0, 0)


def test_the_samples_on_the_page_of_a_message_republish_it(console: Console, topic: str) -> None:
    with console.api() as api, httpx.Client(base_url=console.url, timeout=WAIT_S) as pages:
        sent = {"value": "it's 5 > 4", "key": "o'brien", "headers": {"region": "eu"}}
        path = f"/topics/{topic}/messages"
        assert api.post(path, content=json.dumps({"messages": [sent]}), headers=MESSAGES).is_success
        samples = re.findall(r'<pre class="code" id="sample-\d">(.*?)</pre>', pages.get(f"{path}/0/0").text, re.DOTALL)
        curl, python, _ = (unescape(text) for text in samples)
        subprocess.run(["sh", "-c", curl], check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, "-c", python], check=True, timeout=WAIT_S)
        for offset in (1, 2):
            assert re.findall(r'id="sample-1">(.*?)</pre>', pages.get(f"{path}/0/{offset}").text) == [samples[0]]


@pytest.mark.parametrize(
    ("path", "status", "output"),
    [
        ("/topics/orders/messages?filter=payload.total+>>", 422, r"<pre[^>]*>[^<]*\n *\^+\n?</pre>.*Correct “Filter”"),
        ("/topics/orders/messages?from=never", 422, r'id="from"[^>]*aria-invalid.*Correct “From”'),
        ("/nothing", 404, "there is no page /console/nothing;"),
        *(
            (f"/{section}/nothing{more}", 404, rf'alert">(?:(?!millstream).)*</div>\s*<p><a href="/console/{section}">')
            for section, more in (
                ("topics", ""),
                ("topics", "/settings"),
                ("topics", "/messages"),
                ("topics", "/publish"),
                ("subscriptions", ""),
                ("dead-letters", ""),
                ("groups", ""),
                ("pipelines", ""),
                ("schemas", ""),
                ("mirrors", ""),
            )
        ),
        *(
            (f"/{name}?page=99{more}", 200, "The list has fewer pages")
            for name in ("topics", "subscriptions", "groups", "schemas", "pipelines")
            for more in ("", "&search=e")
        ),
    ],
)
def test_an_error_is_shown_at_its_place(console: Console, path: str, status: int, output: str) -> None:
    page = httpx.get(console.url + path, timeout=WAIT_S)
    assert page.status_code == status
    assert re.search(output, unescape(page.text), re.DOTALL), page.text


def test_messages_are_shown_as_decoded_by_their_schema(console: Console) -> None:
    with console.api() as api:
        sent = api.post("/topics/parcels-typed/messages?schema=parcels-value", json={"to": "Utrecht"})
        assert sent.is_success, sent.text
    watched = console.page("/topics/parcels-typed/messages")
    page = watched.page
    expect(page.locator("#rows")).to_contain_text('{"to":"Utrecht"}')
    page.locator("#rows a").click()
    expect(page.locator("#value")).to_contain_text('"to": "Utrecht"')
    page.get_by_role("link", name="Hex").click()
    expect(page.locator("#value")).to_contain_text("00000000")
    assert watched.problems == []


def test_a_continued_search_counts_the_messages_found(console: Console, topic: str) -> None:
    with console.api() as api:
        for at in range(0, 600, 100):
            orders = [{"json": {"order": at + number}} for number in range(100)]
            content = json.dumps({"messages": orders})
            assert api.post(f"/topics/{topic}/messages", content=content, headers=MESSAGES).is_success
    watched = console.page(f"/topics/{topic}/messages?from=start&filter=payload.order%20%3C%20120")
    page = watched.page
    state, rows = page.locator("[data-state]"), page.locator("#rows tr")
    expect(state).to_have_text("120 found in 600 of 600 messages.")
    expect(rows).to_have_count(120)
    expect(page.get_by_role("link", name="Continue from here")).to_be_hidden()
    page.goto(f"{console.url}/topics/{topic}/messages?from=start&filter=payload.order%20%3E%3D%200")
    expect(state).to_contain_text("500 found in 500 of 600 messages. Stopped after 500 messages")
    expect(rows).to_have_count(500)
    page.get_by_role("link", name="Continue from here").click()
    expect(state).to_contain_text("100 found in 100 of 100 messages.")
    expect(rows).to_have_count(100)
    assert watched.problems == []


def test_messages_are_downloaded_as_lines(console: Console) -> None:
    with httpx.Client(timeout=WAIT_S) as client:
        response = client.get(f"{console.url}/topics/orders/download", params={"filter": "payload.total > 5000"})
    assert "attachment" in response.headers["content-disposition"]
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert sorted(line["json"]["order"] for line in lines) == list(range(51, 60))


# -- the story -------------------------------------------------------------------------------------------------------


def test_a_new_user_finds_why_orders_are_stuck_and_redrives_them(console: Console) -> None:
    with console.api() as api:
        assert api.post("/subscriptions/billing/pause").is_success
    watched = console.page()
    page = watched.page
    save_screenshot(page, "overview")
    expect(page.get_by_text("billing is paused")).to_be_visible()
    page.get_by_role("link", name="Resume it").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("status")).to_contain_text("millstream subscription resume billing")
    save_screenshot(page, "subscription")
    page.get_by_role("link", name="Dead letters", exact=True).click()
    page.get_by_role("link", name="billing-dlq").click()
    save_screenshot(page, "dead-letters")
    page.get_by_role("link", name="the bank did not respond").first.click()
    first = page.get_by_role("link", name="orders/").first.get_attribute("href")
    page.get_by_text("Redrive 3 letters").click()
    page.get_by_role("button", name="Count only").first.click()
    expect(page.get_by_role("status")).to_contain_text(
        "3 letters would be redriven (3 in billing); nothing was changed"
    )
    # The counted letters stay selected.
    expect(page.get_by_label("Filter")).to_have_value(re.compile("the bank did not respond"))
    page.get_by_text("Redrive 3 letters").click()
    page.get_by_role("button", name="Redrive").click()
    expect(page.get_by_role("status")).to_contain_text("3 messages delivered again (3 to billing)")
    expect(page.get_by_role("status")).to_contain_text("millstream dlq redrive billing-dlq --filter")
    # The bank responds again: the worker gets the messages, and their pages show it.
    with console.api() as api:
        pulled = api.post("/subscriptions/billing/messages:pull", json={"max": 100, "wait_ms": 5000}).json()["messages"]
        accept = [message["lease"] for message in pulled]
        assert api.post("/subscriptions/billing/messages:settle", json={"accept": accept}).is_success
    page.goto(f"http://{console.server.http}{first}")
    expect(page.get_by_role("row").filter(has_text="billing")).to_contain_text("accepted")
    page.go_back()
    expect(page.get_by_role("rowheader")).to_have_text([f"card declined {HOSTILE}"])
    page.get_by_text("Delete 4 letters").click()
    page.get_by_role("button", name="Count only").last.click()
    expect(page.get_by_role("status")).to_contain_text("4 letters would be deleted; nothing was changed")
    expect(page.get_by_role("status")).to_contain_text("millstream dlq purge billing-dlq --dry-run")
    page.get_by_text("Delete 4 letters").click()
    page.get_by_label("to confirm").fill("something else")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("alert")).to_contain_text("nothing was changed")
    page.go_back()
    page.get_by_text("Delete 4 letters").click()
    page.get_by_label("to confirm").fill("billing-dlq")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_contain_text("4 dead letters deleted")
    assert watched.problems == []


def test_the_oldest_message_is_one_click_away(console: Console) -> None:
    with console.api() as api:
        assert api.post("/topics", json={"topic": "returns"}).is_success
        made = {"name": "refunds", "topics": ["returns"], "start": "start", "ledger": True}
        assert api.post("/subscriptions", json=made).is_success
        for number in range(3):
            assert api.post("/topics/returns/messages", json={"return": number}).is_success
        pulled = api.post("/subscriptions/refunds/messages:pull", json={"max": 2, "wait_ms": 20_000}).json()["messages"]
        accepted, failed = (message["lease"] for message in pulled)
        release = {"lease": failed, "reason": "no such account", "delay_ms": 0}
        settled = {"accept": [accepted], "release": [release]}
        assert api.post("/subscriptions/refunds/messages:settle", json=settled).is_success
    watched = console.page("/subscriptions/refunds")
    page = watched.page
    for setting, value, flags in (
        ("millstream.backoff.max.ms", "2000", "--set millstream.backoff.max.ms=2000"),
        ("millstream.ledger", "false", "--no-ledger"),
        ("millstream.ledger", "true", "--ledger"),
        ("millstream.backoff.max.ms", "", "--unset millstream.backoff.max.ms"),
    ):
        page.locator("summary").filter(has_text="Change a setting").click()
        page.get_by_label("Setting", exact=True).select_option(setting)
        page.get_by_label("Value").fill(value)
        page.get_by_role("button", name="Change setting").click()
        expect(page.get_by_role("status")).to_contain_text(f"millstream subscription update refunds {flags}")
    page.locator(".stat").filter(has_text="Oldest").click()
    expect(page.get_by_role("heading", name="Partition 0, offset 1")).to_be_visible()
    row = page.get_by_role("row").filter(has_text="refunds")
    expect(row).to_contain_text("no such account")
    row.locator("summary").click()
    expect(row.get_by_role("listitem")).to_contain_text(
        ["acquired, attempt 1 by http/", "released, attempt 1 by http/"]
    )
    assert watched.problems == []


def test_a_topic_shows_partition_sizes_and_the_known_lag(console: Console) -> None:
    watched = console.page("/topics/orders")
    page = watched.page
    for partition in range(2):
        row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=str(partition), exact=True))
        expect(row).to_contain_text(re.compile(r"[1-9][\d.]* (B|KiB)"))
    page.get_by_role("link", name="Consumers and producers").click()
    expect(page.get_by_role("row").filter(has_text="sampling")).to_contain_text("in 1 of 2 partitions")
    assert watched.problems == []


def test_the_holder_of_a_message_is_shown_there_and_on_its_page(console: Console) -> None:
    with console.api() as api:
        # Others may have skipped earlier messages.
        assert api.post("/topics/orders/messages", json={"id": 99, "total": 1}).is_success
        pull_request = {"max": 1, "wait_ms": 20_000, "worker": "slow-worker"}
        (held,) = api.post("/subscriptions/shipping/messages:pull", json=pull_request).json()["messages"]
        watched = console.page("/subscriptions/shipping")
        page = watched.page
        expect(page.get_by_text("http/slow-worker")).to_be_visible()
        page.get_by_role("link", name=f"orders/{held['partition']}@{held['offset']}").click()
        row = page.get_by_role("row").filter(has_text="shipping")
        expect(row).to_contain_text("leased")
        expect(row).to_contain_text("slow-worker")
        save_screenshot(page, "message")
        api.post("/subscriptions/shipping/messages:settle", json={"accept": [held["lease"]]})
    assert watched.problems == []


def test_a_seek_shows_its_effect_before_it_is_applied(console: Console) -> None:
    watched = console.page("/subscriptions/shipping")
    page = watched.page
    page.get_by_text("Deliver messages again, or skip ahead").click()
    page.get_by_label("Continue at").fill("end")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#seek")).to_contain_text("skipped")
    page.locator("#seek").get_by_label("to confirm").fill("shipping")
    page.locator("#seek").get_by_role("button", name="Seek").click()
    expect(page.get_by_role("status")).to_contain_text("millstream subscription seek shipping --to end")
    with console.api() as api:
        assert sum(queue["backlog"] for queue in api.get("/subscriptions/shipping").json()["queues"]) == 0
    assert watched.problems == []


def test_a_group_is_reset_after_a_preview(console: Console) -> None:
    watched = console.page("/groups/reporting")
    page = watched.page
    page.get_by_text("Reset offsets").first.click()
    page.get_by_label("Continue at").fill("start")
    page.get_by_role("button", name="Preview").click()
    page.locator("#reset").get_by_label("to confirm").fill("reporting")
    page.locator("#reset").get_by_role("button", name="Reset offsets").click()
    expect(page.get_by_role("status")).to_contain_text("millstream group reset reporting --to start")
    with console.api() as api:
        assert api.get("/groups/reporting").json()["offsets"][0]["committed"] == 0
    assert watched.problems == []


def test_topics_are_created_changed_and_deleted(console: Console) -> None:
    watched = console.page("/topics")
    page = watched.page
    page.get_by_text("Create a topic").click()
    page.get_by_label("Name", exact=True).fill("parcels")
    page.get_by_role("button", name="Create topic").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("parcels")
    page.get_by_role("link", name="Settings", exact=True).click()
    page.get_by_text("Change a setting").click()
    page.get_by_label("Setting", exact=True).select_option("retention.ms")
    page.get_by_label("Value", exact=True).fill("60000")
    page.get_by_role("button", name="Change setting").click()
    expect(page.get_by_role("row").filter(has_text="retention.ms").first).to_contain_text("60000")
    page.get_by_role("link", name="Partitions", exact=True).click()
    page.get_by_text("Delete this topic").click()
    page.get_by_label("to confirm").fill("parcels")
    page.get_by_role("button", name="Delete topic").click()
    expect(page.get_by_role("status")).to_contain_text("Topic parcels is deleted")
    assert watched.problems == []


def test_a_schema_is_checked_registered_and_compared(console: Console) -> None:
    watched = console.page("/schemas")
    page = watched.page
    page.get_by_text("Register a schema").click()
    page.get_by_label("Subject (").fill("orders-value")
    wrong = {**ORDER, "fields": [*ORDER["fields"], {"name": "total", "type": "long"}]}
    page.get_by_label("Schema", exact=True).fill(json.dumps(wrong))
    for button in ("Check only", "Register"):
        page.get_by_role("button", name=button).click()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("incompatible with version 1: with compatibility level BACKWARD, a new")
        expect(alert.get_by_role("listitem")).to_have_text(
            "Field total is new and has no default, and messages of version 1 do not have it."
        )
        expect(alert.get_by_text("READER_FIELD_MISSING_DEFAULT_VALUE")).to_be_hidden()
    alert.get_by_text("As the registry reports it").click()
    expect(alert.get_by_text("READER_FIELD_MISSING_DEFAULT_VALUE")).to_be_visible()
    check_appearance(page, "schema-refused")
    right = {**ORDER, "fields": [*ORDER["fields"], {"name": "total", "type": "long", "default": 0}]}
    page.get_by_label("Schema", exact=True).fill(json.dumps(right))
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_role("status")).to_contain_text("compatible")
    page.get_by_role("button", name="Register").click()
    expect(page.get_by_role("status")).to_contain_text("millstream schema register orders-value schema.avsc")
    expect(page.locator(".diff")).to_contain_text('"name": "total"')
    page.get_by_text("Change the compatibility").click()
    page.get_by_label("Level").select_option("FULL")
    page.get_by_role("button", name="Set compatibility").click()
    expect(page.get_by_role("status")).to_contain_text("millstream schema compatibility orders-value --set FULL")
    page.locator("summary").filter(has_text="Delete").click()
    page.get_by_label("What").select_option("1")
    page.get_by_label("to confirm").fill("orders-value")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_contain_text("millstream schema delete orders-value --version 1")
    assert watched.problems == []


def test_the_rules_of_a_route_are_tried_and_changed(console: Console) -> None:
    watched = console.page("/pipelines/by-region")
    page = watched.page
    page.get_by_text("Put a rule").click()
    page.get_by_label("Rule", exact=True).first.fill("eu")
    page.get_by_label("From topic").fill("orders")
    page.get_by_label("To topics").fill("orders-eu")
    page.get_by_label("Condition").fill("headers['region'] = 'eu'")
    for button, output in (
        ("Try only", "recent messages of orders match"),
        ("Put rule", "pipeline rule put by-region eu"),
    ):
        page.get_by_role("button", name=button).click()
        expect(page.get_by_role("status")).to_contain_text(output)
    page.get_by_role("link", name="Try them on recent messages").click()
    expect(page.get_by_role("row").filter(has_text="orders-eu")).to_contain_text("60 of 6")
    page.get_by_text("Delete a rule").click()
    page.get_by_label("to confirm").first.fill("eu")
    page.get_by_role("button", name="Delete rule").click()
    expect(page.get_by_role("status")).to_contain_text("pipeline rule delete by-region eu")
    page.get_by_text("Change a setting").click()
    page.get_by_label("Setting", exact=True).select_option("batch.max.messages")
    page.get_by_label("Value").fill("10")
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_role("status")).to_contain_text("nothing was changed")
    expect(page.get_by_role("row").filter(has_text="batch.max.messages")).not_to_contain_text("set here")
    assert watched.problems == []


def test_a_mirror_is_followed_paused_and_failed_over(console: Console, server: Server, topic: str) -> None:
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=WAIT_S) as source:
        assert source.post("/topics", json={"topic": topic}).is_success
        assert source.post(f"/topics/{topic}/messages", json={"order": 1}).is_success
    with console.api() as api:
        settings = {"from": server.kafka, "topics": topic, "groups": "false", "subscriptions": "false"}
        made = api.post("/mirrors", json={"name": "paris", "settings": settings})
        assert made.is_success, made.text
        nothing = {**settings, "topics": "of-another-name"}
        assert api.post("/mirrors", json={"name": "rome", "settings": nothing}).is_success
        watched = console.page("/mirrors/rome")
        page = watched.page
        unmatched = page.get_by_text("No topic of the source matches topics=of-another-name, so nothing is copied.")
        _reload_until(page, lambda: unmatched.count() == 1)
        page.get_by_role("link", name="Mirrors").first.click()
        page.get_by_role("link", name="paris").click()
        expect(page.get_by_text("running", exact=True)).to_be_visible()
        row = page.get_by_role("row").filter(has_text=f"{topic}/0")
        _reload_until(page, lambda: row.count() == 1 and "1" in row.get_by_role("cell").nth(1).inner_text())
        save_screenshot(page, "mirror")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("status")).to_contain_text("millstream mirror pause paris")
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("status")).to_contain_text("copies again")
        refused = api.post(f"/topics/{topic}/messages", json={"order": 2})
        assert not refused.is_success
        page.locator("summary").filter(has_text="Fail over").click()
        page.get_by_label("to confirm").fill("paris")
        page.get_by_role("button", name="Fail over").click()
        expect(page.get_by_role("status")).to_contain_text("writable")
        expect(page.get_by_text("failed over", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        assert api.post(f"/topics/{topic}/messages", json={"order": 2}).is_success
    assert watched.problems == []


def _reload_until(page: Page, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        page.reload()


def test_an_open_transaction_is_aborted(console: Console) -> None:
    writer = Producer({"bootstrap.servers": console.server.kafka, "transactional.id": "invoices", "log_level": 0})
    writer.init_transactions(WAIT_S)
    writer.begin_transaction()
    writer.produce("payments", b"not yet")
    writer.flush()
    watched = console.page("/topics/payments/consumers")
    page = watched.page
    page.get_by_role("link", name="open", exact=True).click()
    expect(page.get_by_role("row").filter(has_text="invoices")).to_contain_text("Ongoing")
    page.get_by_role("link", name="Look for hanging ones").click()
    expect(page.get_by_text("No transactions are hanging.")).to_be_visible()
    page.get_by_role("row").filter(has_text="invoices").locator("summary").click()
    page.get_by_label("to confirm").fill("invoices")
    page.get_by_role("button", name="Abort").click()
    expect(page.get_by_role("status")).to_contain_text("invoices is aborted; it was Ongoing")
    with pytest.raises(KafkaException):
        writer.commit_transaction(WAIT_S)
    assert watched.problems == []


def test_members_of_a_share_group_are_shown(console: Console) -> None:
    with console.api() as api:
        assert api.post("/topics", json={"topic": "chores"}).is_success
    consumer = ShareConsumer(
        {"bootstrap.servers": console.server.kafka, "group.id": "sharers", "client.id": "sharer", "log_level": 0}
    )
    with closing(consumer):
        consumer.subscribe(["chores"])
        consumer.poll(1)
        watched = console.page("/groups")
        page = watched.page
        _reload_until(page, lambda: page.get_by_role("link", name="sharers").count() == 1)
        page.get_by_role("link", name="sharers").click()
        _reload_until(page, lambda: page.get_by_role("cell", name="sharer", exact=True).count() == 1)
        expect(page.get_by_text("Share group, assignor simple.")).to_be_visible()
    assert watched.problems == []


def test_landing_is_tried_on_recent_messages(console: Console) -> None:
    with console.api() as api:
        assert api.post("/topics", json={"topic": "crates"}).is_success
        for value in ({"to": "Rome", "kilograms": 2}, {"to": "Oslo", "kilograms": 7.5}):
            assert api.post("/topics/crates/messages", json=value).is_success
        assert api.post(
            "/topics/crates/messages", content=b"no json", headers={"content-type": "text/plain"}
        ).is_success
        settings = {"topics": "crates", "decode": "json"}
        made = api.post("/pipelines", json={"name": "landed", "kind": "land", "settings": settings, "enabled": False})
        assert made.is_success, made.text
    watched = console.page("/pipelines/landed")
    page = watched.page
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_role("heading", name="Dry run of landed")).to_be_visible()
    expect(page.get_by_text("2 would be landed in a new table")).to_be_visible()
    expect(page.get_by_role("cell", name="Oslo", exact=True)).to_be_visible()
    expect(page.get_by_role("rowheader", name="the payload")).to_be_visible()
    save_screenshot(page, "dry-run", folder=console.server.data)
    page.get_by_role("link", name="Back").click()
    expect(page.get_by_role("heading", name="landed", exact=True)).to_be_visible()
    assert watched.problems == []
    assert not (console.server.data / "lake" / "crates").exists()


def test_a_quota_is_set_and_removed(console: Console) -> None:
    watched = console.page("/access")
    page = watched.page
    page.get_by_text("Set a quota").click()
    page.get_by_label("For (").fill("client-id:app")
    page.get_by_label("Produce").fill("1048576")
    page.get_by_role("button", name="Set quota").click()
    expect(page.get_by_role("status")).to_contain_text("millstream quota set client-id:app --produce 1048576")
    expect(page.get_by_role("row").filter(has_text="client-id app")).to_contain_text("1.0 MiB/s")
    page.get_by_text("Remove a quota").click()
    page.get_by_role("button", name="Remove quota").click()
    expect(page.get_by_text("No quotas.")).to_be_visible()
    assert watched.problems == []


# -- refusals --------------------------------------------------------------------------------------------------------


_FILL = """([at, wrong]) => {
  const form = document.querySelectorAll('main form[method="post"]')[at];
  if (!form.querySelector("input:not([type=hidden], [type=checkbox]), textarea")) return null;
  const entered = {};
  for (const one of form.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    if (one.type === "checkbox") one.checked = one.name === "sure";
    else if (one.tagName === "SELECT") one.selectedIndex = one.options.length - 1;
    else one.value = wrong;
    entered[one.name] = one.type === "checkbox" ? one.checked : one.value;
  }
  form.noValidate = true;
  return entered;
}"""
_KEPT = """() => Object.fromEntries(
  [...document.querySelectorAll("form:has(#outcome) :is(input:not([type=hidden]), select, textarea)")]
    .map(one => [one.name, one.type === "checkbox" ? one.checked : one.value]))"""


@pytest.mark.parametrize("path", [*PAGES, "/subscriptions/billing?to=start", "/groups/reporting?to=start"])
def test_a_refused_form_keeps_its_input(console: Console, path: str) -> None:
    watched = console.page(path)
    page = watched.page
    forms = page.locator('main form[method="post"]')
    for at in range(forms.count()):
        page.goto(console.url + path)
        entered = page.evaluate(_FILL, [at, f"wrong {HOSTILE}"])
        if entered is None:
            # A button, or a choice: nothing can be lost.
            continue
        with page.expect_response(lambda response: response.request.method == "POST") as responded:
            forms.nth(at).evaluate("form => form.requestSubmit()")
        assert responded.value.status in (404, 409, 422), (at, entered)
        expect(page.get_by_role("alert")).to_be_focused()
        expect(page.locator("form:has(#outcome) button").first).to_be_visible()
        assert page.evaluate(_KEPT) == entered
        assert page.url == console.url + path, "a page that can be loaded again"
    assert watched.problems == []


def test_secret_settings_are_not_entered_on_a_page_that_shows_them(console: Console, topic: str) -> None:
    with console.api() as api, httpx.Client(timeout=WAIT_S) as client:
        made = api.post(
            "/pipelines", json={"name": topic, "kind": "land", "settings": {"topics": topic}, "enabled": False}
        )
        assert made.is_success, made.text
        address = f"{console.url}/pipelines/{topic}"
        page = client.get(address)
        assert "<option>topics</option>" in page.text
        assert "<option>lake.options</option>" not in page.text
        (csrf,) = set(re.findall(r'name="csrf" value="(\w+)"', page.text))
        form = {"csrf": csrf, "setting": "lake.options", "setting_value": '{"AWS_SECRET_ACCESS_KEY": "4711"}'}
        refused = client.post(f"{address}/settings", data=form)
        assert refused.status_code == 422
        assert "4711" not in refused.text


def test_a_form_of_another_site_changes_nothing(console: Console) -> None:
    with httpx.Client(timeout=WAIT_S) as client:
        address = f"{console.url}/subscriptions/billing/pause"
        assert client.post(address, data={"csrf": "0" * 64}).status_code == 403
        own = client.get(f"{console.url}/topics")
        assert "httponly" in own.headers["set-cookie"].lower()
        assert "samesite=strict" in own.headers["set-cookie"].lower()
        assert client.post(address, data={"csrf": "0" * 64}).status_code == 403
        assert client.post(address, data={}, headers={"origin": "https://evil.example"}).status_code == 403
        assert client.get(f"{console.url}/nowhere").status_code == 404
        assert client.get(f"{console.url}/static/..%2fapp.py").status_code == 404


def test_live_tails_are_bounded_and_end_with_their_browsers(console: Console) -> None:
    path = f"{console.url}/topics/payments/tail"

    def follow(client: httpx.Client, stack: ExitStack) -> Iterator[str]:
        return stack.enter_context(client.stream("GET", path)).iter_lines()

    with httpx.Client(timeout=WAIT_S) as client, ExitStack() as stack:
        # Kept: a dropped iterator closes its connection.
        streams = [follow(client, stack) for _ in range(TAILS_PER_USER_MAX)]
        assert [next(page) for page in streams] == [": listening"] * TAILS_PER_USER_MAX
        refused = list(islice(follow(client, stack), 4))
        assert "live tails per user" in refused[-1], refused
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        # The server notices closed connections later.
        with (
            httpx.Client(timeout=httpx.Timeout(WAIT_S, read=1.0)) as client,
            ExitStack() as stack,
            suppress(httpx.ReadTimeout),
        ):
            if any("per user" in line for line in follow(client, stack)):
                continue
        return
    pytest.fail("the tails of browsers that are gone still count")
