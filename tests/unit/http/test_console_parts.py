"""Parts of the console in isolation: shared responses for refreshing pages, charts, shell commands, ages."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.config import Config
from millstream.core.ids import Offset
from millstream.core.setting import HIDDEN
from millstream.gateway.api.problem import Refused
from millstream.gateway.callers import PENDING_PER_HOST_MAX, Callers
from millstream.gateway.child import HttpChild
from millstream.gateway.console import session as session_module
from millstream.gateway.console.app import _Exchange, _refusal, _run_while_connected
from millstream.gateway.console.history import (
    COST_MAX,
    HOUR_S,
    HOUR_SAMPLES,
    RECENT_S,
    RECENT_S_MAX,
    Counters,
    History,
    ResponseCache,
    Series,
)
from millstream.gateway.console.pages import messages
from millstream.gateway.console.pages.overview import _push_warnings
from millstream.gateway.console.pages.pipelines import dry_run_refusal
from millstream.gateway.console.render import age, chart, number, size, static_file
from millstream.gateway.console.session import Sessions, SignedIn
from millstream.gateway.console.visit import ConsoleSettings, Page, PageRoute, Visit, command
from millstream.gateway.pressure import ClientDisconnected
from millstream.protocol.private.browse_messages import ListTopicsResponse, NodeSummaryResponse
from millstream.protocol.records.record import Record
from millstream_testing.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_response_is_shared_for_a_hundred_times_its_cost() -> None:
    clock = Clock()
    recent, asked = ResponseCache(clock=clock, used=clock), 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        clock.now += 0.2
        return asked

    key = ("User:alice", "/console")
    assert await asyncio.gather(*(recent.get(key, ask) for _ in range(20))) == [1] * 20
    clock.now += 0.2 / COST_MAX - 1
    assert await recent.get(key, ask) == 1
    assert await recent.get(("User:bob", "/console"), ask) == 2
    clock.now += 2
    assert await recent.get(key, ask) == 3
    recent.clear()
    assert await recent.get(key, ask) == 4


async def test_all_sessions_together_use_at_most_a_hundredth_of_the_time() -> None:
    clock = Clock()
    recent, asked = ResponseCache(clock=clock, used=clock), 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        clock.now += 0.05
        return asked

    began, passed = clock.now, 600.0
    while clock.now < began + passed:
        for session in range(20):
            await recent.get((f"session {session}", "/console"), ask)
        clock.now += 10.0
    # The first session did not know of the others yet.
    assert asked <= 20 + passed * COST_MAX / 0.05 * 1.5
    # Closed sessions no longer count.
    clock.now += RECENT_S_MAX + 1
    await recent.get(("session 0", "/console"), ask)
    clock.now += 0.05 / COST_MAX + 0.1
    before = asked
    await recent.get(("session 0", "/console"), ask)
    assert asked == before + 1


async def test_a_response_is_shared_for_minutes_at_most_and_an_error_never() -> None:
    clock = Clock()
    recent, asked = ResponseCache(clock=clock, used=clock), 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        clock.now += 10.0
        if asked == 1:
            raise ValueError("down")
        return asked

    with pytest.raises(ValueError, match="down"):
        await recent.get(("", "/"), ask)
    assert await recent.get(("", "/"), ask) == 2
    clock.now += RECENT_S_MAX + 0.1
    assert await recent.get(("", "/"), ask) == 3


async def test_a_silent_node_does_not_block_a_page() -> None:
    clock = Clock()
    recent, asked = ResponseCache(clock=clock, used=lambda: 0.0), 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        clock.now += 3.0
        return asked

    key = ("User:alice", "/console")
    assert await asyncio.gather(*(recent.get(key, ask) for _ in range(20))) == [1] * 20
    clock.now += 10.0
    assert await recent.get(key, ask) == 2


def test_a_dry_run_is_refused_where_the_node_runs_no_pipelines_or_a_secret_is_needed() -> None:
    def settings_of(config: Config) -> ConsoleSettings:
        with socket.socket() as listening:
            return ConsoleSettings(**HttpChild.configured(config, listening, "localhost:1")._options.console)

    enabled, disabled = settings_of(Config()), settings_of(Config(pipelines_enabled=False))
    plain: dict[str, Any] = {"overrides": {"topics": "orders"}}
    assert dry_run_refusal(plain, enabled) == ""
    assert "pipelines-enabled is off" in dry_run_refusal(plain, disabled)
    assert "lake.options" in dry_run_refusal({"overrides": {"lake.options": HIDDEN}}, enabled)


def visit_of(response_cache: ResponseCache, **fields: Any) -> Visit:
    nothing: Any = None
    return Visit(
        services=nothing,
        method="GET",
        path="/console/topics",
        names={},
        query={},
        form={},
        memory=nothing,
        history=nothing,
        response_cache=response_cache,
        searches=nothing,
        tasks=nothing,
        acting=nothing,
        settings=ConsoleSettings(),
        **fields,
    )


async def test_refreshing_pages_share_responses_within_their_session() -> None:
    clock = Clock()
    recent, asked = ResponseCache(clock=clock, used=clock), 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        clock.now += 0.1
        return asked

    async def shown(**fields: Any) -> int:
        return await visit_of(recent, **{"is_refresh": True, "principal": "User:ann", **fields}).shared(ask)

    signed_in = {"can_sign_out": True, "csrf": "first"}
    assert [await shown(**signed_in) for _ in range(2)] == [1, 1]
    assert await shown(can_sign_out=True, csrf="second") == 2, "another session of the same person"
    # A request with a token has no session, and may have fewer permissions than the owner of the token.
    assert [await shown(csrf="first") for _ in range(2)] == [3, 4]
    assert await shown(**signed_in, is_refresh=False) == 5, "a person who opens the page sees it as it is"
    assert await shown(**signed_in) == 1
    assert [await shown(principal="") for _ in range(2)] == [6, 6], "everyone may see everything"


async def test_unused_responses_are_forgotten() -> None:
    clock = Clock()
    recent = ResponseCache(clock=clock, used=clock)

    async def ask() -> int:
        clock.now += 0.1
        return 1

    for at in range(20):
        await recent.get((f"session {at}", "/console"), ask)
        clock.now += RECENT_S + 1
    assert len(recent._kept) == 1


def browser(*messages: str) -> _Exchange:
    """A browser that sends these messages, and nothing more."""
    remaining = list(messages)

    async def receive() -> Any:
        return {"type": remaining.pop(0)} if remaining else await asyncio.Future()

    return _Exchange({}, {}, receive, cast("Any", None))


def route_to(handle: Callable[[], Awaitable[Any]]) -> PageRoute:
    return PageRoute(path="/topics", handle=lambda _visit: handle())


async def test_preparing_a_page_stops_when_its_browser_disconnects() -> None:
    visit, is_cancelled = visit_of(ResponseCache()), False

    async def prepare() -> str:
        await asyncio.sleep(0)
        return "page"

    preparing = asyncio.Event()

    async def prepare_for_long() -> None:
        nonlocal is_cancelled
        preparing.set()
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    async def fail() -> None:
        raise ValueError("down")

    assert cast("Any", await _run_while_connected(browser("http.request"), route_to(prepare), visit)) == "page"
    with pytest.raises(ValueError, match="down"):
        await _run_while_connected(browser("http.request"), route_to(fail), visit)
    with pytest.raises(ClientDisconnected):
        await _run_while_connected(browser("http.request", "http.disconnect"), route_to(prepare_for_long), visit)
    assert is_cancelled
    # A stopping gateway leaves neither the page nor the wait for the browser behind.
    is_cancelled = False
    preparing.clear()
    stopped = asyncio.create_task(_run_while_connected(browser(), route_to(prepare_for_long), visit))
    await preparing.wait()
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    assert is_cancelled
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_counter_reset_leaves_a_gap() -> None:
    series = Series()
    for at, count in enumerate((0, 100, 300, 50, 150)):
        series.add(Counters(count, 0, 0), float(10 * at))
    assert series.shown("records_in") == [None] * (HOUR_SAMPLES - 4) + [10.0, 20.0, None, 10.0]


def test_rates_are_placed_in_the_hour_at_any_sampling_interval() -> None:
    series = Series()
    # Two at once, as for the first visitor; then every minute for 70 minutes; then every ten seconds.
    times = [0, 2, *range(60, 4260, 60), *range(4210, 4240, 10)]
    for at in times:
        series.add(Counters(0 if at <= 2400 else at - 2400, 0, 0), float(at))
    shown = series.shown("records_in")
    assert len(shown) == HOUR_SAMPLES
    idle = (2400 - (times[-1] - HOUR_S)) / 10
    assert shown == [0.0] * int(idle) + [1.0] * (HOUR_SAMPLES - int(idle))
    assert str(chart(shown, "Rate")).count("1 h") == 1


async def test_numbers_are_sampled_before_the_first_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = itertools.count(0, 1000)

    async def node_summaries(_client: object) -> list[NodeSummaryResponse]:
        return [NodeSummaryResponse(node_id=1, state="ready", records_in=next(counted))]

    async def list_if_reachable(*_asked: object) -> ListTopicsResponse:
        return ListTopicsResponse()

    services = Mock()
    services.client.metadata = AsyncMock(return_value=Mock(nodes=[1]))
    services.subscriptions.describe = AsyncMock(return_value=[])
    replaced = {
        "node_summaries": node_summaries,
        "list_if_reachable": list_if_reachable,
        "list_groups": AsyncMock(return_value=[]),
    }
    for name, value in {**replaced, "FULL_S": 0.001}.items():
        monkeypatch.setattr(f"millstream.gateway.console.history.{name}", value)
    history = History(services)
    history.start()
    await history.sampled()
    await history.sampled()
    assert history.totals.now is not None
    assert history.totals.now.records_in > 0
    await history.close()


@given(st.lists(st.none() | st.floats(0, 1e12), max_size=400), st.booleans())
def test_charts_stay_within_their_frame(values: list[float | None], as_size: bool) -> None:
    drawn = str(chart(values, '<script>"', as_size=as_size))
    assert "<script>" not in drawn
    points = [point for part in drawn.split('points="')[1:] for point in part.split('"')[0].split()]
    for point in points:
        x, y = map(float, point.split(","))
        assert -0.1 <= x <= 240.1
        assert 0 <= y <= 56


@given(st.lists(st.text(min_size=1).filter(lambda word: "\0" not in word), min_size=1, max_size=4))
def test_commands_are_quoted_for_the_shell(words: list[str]) -> None:
    assert shlex.split(command(*words)) == ["millstream", *words]


@pytest.mark.parametrize(
    ("kafka", "site", "shown"),
    [
        ("broker.example:9092", "https://console.example", "broker.example:9092"),
        ("0.0.0.0:9092", "http://node-1:8080", "node-1:9092"),
        ("[::]:9092", "http://[fe80::1]:8080", "[fe80::1]:9092"),
    ],
)
def test_clients_connect_to_the_advertised_address_or_that_of_the_browser(kafka: str, site: str, shown: str) -> None:
    visit = dataclasses.replace(visit_of(ResponseCache(), site=site), settings=ConsoleSettings(kafka=kafka))
    assert visit.kafka == shown


def test_conditions_are_shown_in_double_quotes() -> None:
    assert command("dlq", "redrive", "x", "--filter", "key = 'a'") == "millstream dlq redrive x --filter \"key = 'a'\""


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (59, "59 s"), (80, "1 min 20 s"), (3600, "1 h"), (90_000, "1 d 1 h")]
)
def test_ages_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize("asked", ["", "1"])
async def test_the_page_of_a_message_reads_the_ledger_on_request(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    life = {"subscription": "billing", "ledger": True, "is_complete": False, "state": "done"}
    forgotten = {"published_ms": 1, "subscriptions": [life]}
    whole = {**forgotten, "subscriptions": [{**life, "state": "accepted", "is_complete": True}]}
    stored = Mock(record=Record(Offset(0), 0, None, b"{}", ()))
    replaced = {"trace_at": forgotten, "with_history": whole, "find_message": stored, "decode_record": None}
    for name, value in replaced.items():
        monkeypatch.setattr(messages, name, AsyncMock(return_value=value))
    monkeypatch.setattr(messages, "find_topic", AsyncMock(return_value=Mock(topic_id=UUID(int=1))))
    fields: dict[str, Any] = {"names": {"topic": "orders", "partition": "0", "offset": "0"}, "query": {"ledger": asked}}
    visit = dataclasses.replace(visit_of(ResponseCache()), services=Mock(), memory=Mock(), **fields)
    monkeypatch.setattr(Visit, "audit_reading", AsyncMock())
    monkeypatch.setattr(Visit, "may_change", AsyncMock(return_value=True))
    page = await messages.show(visit)
    assert isinstance(page, Page)
    assert page.context["may_have_more"] == (not asked)
    assert page.context["trace"][0]["state"] == ("accepted" if asked else "done")


def test_small_rates_are_not_shown_as_none() -> None:
    assert [number(value) for value in (0.0, 0.004, 0.03, 0.1, 2.5)] == ["0", "<0.01", "0.03", "0.1", "2.5"]
    assert [size(value) for value in (0.0, 0.4, 1.0)] == ["0 B", "<1 B", "1 B"]


def test_a_failing_endpoint_is_a_warning() -> None:
    row = {"node": 2, "state": "down", "last_error": "the endpoint returned 500"}
    (warned,) = _push_warnings([{"name": "hook", "push": [row]}, {"name": "billing"}])
    assert warned.text == "Push of subscription hook is down (node 2): the endpoint returned 500."
    assert warned.is_bad


@pytest.mark.parametrize(
    ("starts_at", "filter_", "words"),
    [
        ("", "", "millstream tail orders"),
        ("1h", "", "millstream tail orders --from 1h"),
        ("", "key = 'a'", "millstream tail orders --from start"),
    ],
)
def test_messages_have_their_equivalent_command(starts_at: str, filter_: str, words: str) -> None:
    topic: Any = SimpleNamespace(name="orders", partitions={0: None})
    form = messages._SearchForm(topic=topic, partitions=[0], starts_at=starts_at, key="", filter=filter_)
    assert messages._words(form) == words


def test_a_name_of_no_static_file_is_neither_kept_nor_looked_up_on_disk() -> None:
    assert static_file("console.css") is not None
    for name in ("x" * 1000, "x" * 1000 + ".css", "../render.py", "\0.css"):
        before = sys.getrefcount(name)
        assert static_file(name) is None
        assert sys.getrefcount(name) == before


def read_cookies(header: str, *, is_tls: bool = False) -> SignedIn:
    sessions = Sessions(cast("Any", None), cast("Any", object()), ConsoleSettings(), is_tls=is_tls)
    return sessions.read({b"cookie": header.encode("latin-1")})


def test_cookies_are_read_by_their_whole_name() -> None:
    quoted = '"\\\\"'
    assert read_cookies(f"millstream-form={quoted}").form_key == quoted
    read = read_cookies('a="b; millstream-session=x+/=; millstream-form=f ; millstream-notice=two%20words%3B; c')
    assert (read.cookie, read.form_key, read.notice, read.is_new) == ("x+/=", "f", "two words;", False)
    tossed = "millstream-session=x; session=x; \xa0__Host-millstream-session=x; __Host-millstream-form=f"
    assert read_cookies(tossed, is_tls=True).cookie == ""


def request_of(method: str, path: str, *, cookie: str = "", query: bytes = b"") -> _Exchange:
    """A request without a session, whose body does not arrive."""
    headers = {b"cookie": cookie.encode(), b"host": b"node"}
    scope = {"path": path, "method": method, "query_string": query, "client": ("10.0.0.7", 1)}
    return browser()._replace(scope=scope, headers=headers)


async def test_a_form_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "BODY_S_MAX", 0.01)
    sessions = Sessions(cast("Any", None), cast("Any", object()), ConsoleSettings(), is_tls=True)
    for path in ("/console/login", "/console/logout"):
        with pytest.raises(Refused, match="the form did not arrive within"):
            await sessions.serve(request_of("POST", path), SignedIn(), cast("Any", None))
    left = browser("http.disconnect")._replace(scope=request_of("POST", "/console/login").scope)
    with pytest.raises(ClientDisconnected):
        await sessions.serve(left, SignedIn(), cast("Any", None))


async def test_an_address_may_not_keep_the_openid_provider_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ConsoleSettings(oidc_client_id="console", oidc_issuer="https://login.example")
    sessions = Sessions(cast("Any", None), Callers(cast("Any", None), requires=True), settings, is_tls=True)
    asking = 0

    async def request_provider(*_asked: Any) -> Any:
        nonlocal asking
        asking += 1
        await asyncio.Future()

    reasons: list[str] = []
    app = SimpleNamespace(send_page=AsyncMock(side_effect=lambda *sent: reasons.append(sent[3]["reason"])))
    monkeypatch.setattr(sessions, "_request_provider", request_provider)
    attempt = SignedIn(attempt='["s", "v", "n", ""]')
    callback = request_of("GET", "/console/oidc/callback", query=b"state=s&code=c")
    begun = request_of("GET", "/console/oidc")
    requests = [
        asyncio.ensure_future(sessions.serve(callback if number % 2 else begun, attempt, cast("Any", app)))
        for number in range(PENDING_PER_HOST_MAX + 2)
    ]
    await until(lambda: len(reasons) == 2)
    assert asking == PENDING_PER_HOST_MAX
    assert all("too many credentials of this address" in reason for reason in reasons)
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)
    again = asyncio.ensure_future(sessions.serve(begun, attempt, cast("Any", app)))
    await until(lambda: asking == PENDING_PER_HOST_MAX + 1)
    again.cancel()
    await asyncio.wait([again])


def test_the_advice_of_an_error_is_left_out_however_long_the_error_is() -> None:
    def shown(detail: str) -> str:
        return _refusal(Refused(HTTPStatus.NOT_FOUND, detail), "/console/x").detail

    assert shown("there is no x; `millstream topic list` lists them") == "there is no x"
    # A search that tries each of these words up to the end would take hours.
    for detail in ("there is no x; try y", "x; " + "millstream a " * 300_000 + "; the menu leads to every page"):
        assert shown(detail) == detail
