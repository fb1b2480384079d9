from __future__ import annotations

from typing import Any

import httpx
import pytest

from millstream.gateway.api.problem import Refused
from millstream.gateway.app import build_app
from millstream.gateway.origin_check import OriginCheck

BROWSER = {b"accept-language": b"en", b"user-agent": b"Mozilla/5.0"}


def is_taken(headers: dict[bytes, bytes], *names: str) -> bool:
    try:
        OriginCheck(names).check(headers)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [b"localhost:8080", b"127.0.0.1:8080", b"[::1]:8080", b"[::ffff:127.0.0.1]", b"box", b"a.localhost", b"10.1.2.3"],
)
def test_pages_of_the_gateway_itself_are_allowed(host: bytes) -> None:
    assert is_taken({b"host": host, b"origin": b"http://" + host, **BROWSER})
    assert is_taken({b"host": host, **BROWSER})


def test_dns_rebinding_is_refused() -> None:
    rebound = {b"host": b"evil.example:8080", **BROWSER}
    assert not is_taken(rebound)
    assert not is_taken({**rebound, b"origin": b"http://evil.example:8080"})
    assert not is_taken({**rebound, b"host": b"127.0.0.1.evil.example"})
    assert not is_taken(rebound, "shop.example", "")


def test_known_names_are_accepted_with_any_port() -> None:
    shop = {b"host": b"Shop.example.:80", **BROWSER}
    assert is_taken(shop, "localhost:8080", " shop.example ")
    assert is_taken(shop, "shop.example:8080")
    assert is_taken(shop, "*")


def test_programs_and_tls_pages_need_no_known_name() -> None:
    assert is_taken({b"host": b"millstream.example"})
    assert is_taken({b"host": b"millstream.example", b"origin": b"https://millstream.example", **BROWSER})
    assert is_taken({b"host": b"millstream.example", b"sec-fetch-site": b"same-origin", **BROWSER})


def test_pages_of_other_sites_are_refused_under_any_name() -> None:
    assert not is_taken({b"host": b"localhost", b"origin": b"http://evil.example", **BROWSER}, "*")
    assert not is_taken({b"host": b"localhost", b"origin": b"null", **BROWSER}, "*")
    assert not is_taken({b"host": b"localhost", b"sec-fetch-site": b"cross-site", **BROWSER}, "*")


def test_links_from_other_sites_may_open_pages() -> None:
    link = {b"host": b"localhost", b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate", **BROWSER}
    opened, framed = ({**link, b"sec-fetch-dest": dest} for dest in (b"document", b"iframe"))
    OriginCheck().check(opened, is_page=True)
    assert not is_taken(opened), "a request of the API is no page"
    with pytest.raises(Refused):
        OriginCheck().check(framed, is_page=True)
    with pytest.raises(Refused):
        OriginCheck().check({**opened, b"origin": b"http://evil.example"}, is_page=True)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({b"referer": b"https://evil.example/x"}, "a page of another site, 'evil.example', caused this request"),
        (BROWSER, "the browser does not name the page that caused this request"),
    ],
)
def test_a_refused_password_names_the_page_that_sent_it(headers: dict[bytes, bytes], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        OriginCheck().check({b"host": b"127.0.0.1:8080", b"authorization": b"Basic YTpi", **headers})


def test_a_page_cannot_pass_for_a_program() -> None:
    """Over plain HTTP, a page can look like Node.js, with any language and no referrer, except for the agent."""
    page = {b"host": b"box:8080", b"accept-language": b"*", b"user-agent": b"Mozilla/5.0"}
    with pytest.raises(Refused, match="does not say that a page of this gateway"):
        OriginCheck().check_cause(page)
    assert not is_taken({**page, b"authorization": b"Basic YTpi"})
    program = {**page, b"user-agent": b"node"}
    OriginCheck().check_cause(program)
    assert is_taken({**program, b"authorization": b"Basic YTpi"})


async def test_a_refusal_names_the_setting_to_change() -> None:
    async def ask() -> Any:
        raise AssertionError("nobody asks the broker")

    transport = httpx.ASGITransport(build_app(ask, ask))
    async with httpx.AsyncClient(transport=transport, base_url="http://evil.example:8080") as client:
        response = await client.get("/metrics", headers={"accept-language": "en"})
    assert (response.status_code, response.headers["content-type"]) == (403, "application/problem+json")
    assert "--http-hosts" in response.json()["detail"]
