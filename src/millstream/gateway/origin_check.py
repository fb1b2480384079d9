"""The check that only web pages loaded from the gateway, under one of its own names, use it through a browser.

A page of another site is recognized by its origin. One that has pointed its own name at this machine (DNS rebinding)
looks like a page of the gateway except for the name. Requests that a browser sends over plain HTTP therefore have to
name the gateway by an address, by a name that cannot be registered on the Internet, or by a configured one. Programs,
also behind load balancers, are not checked, since no page controls them; nor are browsers that use TLS, which verifies
the name.

A browser adds a password that its user has once entered to every request, also to those of other sites' pages. It
therefore has to show that a request with one was not caused by such a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final

from millstream.gateway.api.problem import Refused

ANY: Final = "*"
_FOREIGN: Final = frozenset({b"cross-site", b"same-site"})

_OPENS_PAGE: Final = (b"navigate", b"document")
_BROWSER: Final = b"Mozilla/"
"""The beginning of every browser's `User-Agent`."""


def is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the browser says that a page of another site caused a request."""
    return headers.get(b"sec-fetch-site") in _FOREIGN


class OriginCheck:
    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(_strip_port(name.strip()) for name in names if name.strip())
        self._is_any = ANY in self._names

    def check(self, headers: Mapping[bytes, bytes], *, is_page: bool = False) -> None:
        """Refuse requests of pages from other sites; over plain HTTP, only the origin shows them.

        Links and redirects of other sites may lead to a page: showing it changes nothing, and they cannot read it.
        """
        origin = headers.get(b"origin")
        is_link = is_page and (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == _OPENS_PAGE
        if (is_foreign(headers) and not is_link) or (
            origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()
        ):
            raise Refused(HTTPStatus.FORBIDDEN, "cross-origin requests are not allowed")
        if headers.get(b"authorization", b"")[:6].lower() == b"basic " and not _is_own_request(headers):
            page = _page_host(headers).decode("latin-1")
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"a page of another site, {page!r}, caused this request, so the password of the browser is not accepted"
                if page
                else "the browser does not name the page that caused this request, so its password is not accepted; "
                "browsers name it over TLS, on this machine, and for pages of this gateway",
            )
        self.check_name(headers)

    def check_cause(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse browser requests that a page of another site may have caused, for a GET that changes something.

        An `<img>` sends no origin, and the fetch metadata only over TLS or to the machine itself.
        """
        if not _is_own_request(headers):
            raise Refused(
                HTTPStatus.FORBIDDEN, "the browser does not say that a page of this gateway caused this request"
            )

    def check_name(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse browser requests to a host name that an attacker could own."""
        if b"accept-language" not in headers and b"origin" not in headers and b"referer" not in headers:
            # Not a browser: pages cannot suppress this header.
            return
        if self._is_any or b"sec-fetch-site" in headers or headers.get(b"origin", b"").startswith(b"https://"):
            # Browsers send the fetch metadata only over TLS or to the machine itself.
            return
        host = _strip_port(headers.get(b"host", b"").decode("latin-1"))
        if not self._is_own(host):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"{host!r} is not a known name of this gateway, and another site's page could have pointed it "
                "here; if it is one, add it to the setting http-hosts (--http-hosts)",
            )

    def _is_own(self, host: str) -> bool:
        # Names on the Internet have a dot; a name without one belongs to the machine, its network or its containers.
        if "." not in host or host in self._names or host.endswith(".localhost"):
            return True
        with suppress(ValueError):
            ip_address(host.strip("[]"))
            return True
        return False


def _is_own_request(headers: Mapping[bytes, bytes]) -> bool:
    """Whether no page of another site caused a request; one that is not a browser's has no page."""
    language = headers.get(b"accept-language")
    is_program = language is None or (language == b"*" and not headers.get(b"user-agent", b"").startswith(_BROWSER))
    if is_program and b"referer" not in headers:
        # Programs send no language, or any; a page may set the language of its requests to any, but not their agent.
        return True
    if b"sec-fetch-site" in headers or b"origin" in headers:
        return True
    return _page_host(headers).lower() == headers.get(b"host", b"").lower()


def _page_host(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the host of the page that caused a request, if the browser names it."""
    return headers.get(b"referer", b"").partition(b"://")[2].partition(b"/")[0]


def _strip_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".").lower()
