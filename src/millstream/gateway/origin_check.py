"""Which pages may use the gateway through somebody's browser: those that were loaded from it, by a name that it has.

A page of another site is told by its origin. One that has pointed its own name at this machine (DNS rebinding) looks
like a page of the gateway, but for the name. So what a browser sends over plain HTTP has to name the gateway by an
address, by a name that nobody on the Internet can own, or by one that is known here. Programs, also behind load
balancers, are not asked for a name, since no page makes them send requests. Nor are browsers that came by TLS: they
have checked it.
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


class OriginCheck:
    """The names of one gateway."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(_bare(name.strip()) for name in names if name.strip())
        self._is_any = ANY in self._names

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a page of another site sent; over plain HTTP browsers tell it only by the page's origin."""
        origin = headers.get(b"origin")
        if headers.get(b"sec-fetch-site") in _FOREIGN or (
            origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()
        ):
            raise Refused(HTTPStatus.FORBIDDEN, "pages of other sites may not use this")
        self.check_name(headers)

    def check_name(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a browser sent to a name that may be anybody's."""
        if b"accept-language" not in headers and b"origin" not in headers and b"referer" not in headers:
            # No browser: a page cannot keep it from naming languages.
            return
        if self._is_any or b"sec-fetch-site" in headers or headers.get(b"origin", b"").startswith(b"https://"):
            # Where a request comes from, browsers tell only when they go by TLS or to a name of the machine itself.
            return
        host = _bare(headers.get(b"host", b"").decode("latin-1"))
        if not self._is_own(host):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"{host!r} is not known as a name of this gateway, and a page of another site could have pointed it "
                "here; if it is one, name it in the setting http-hosts (--http-hosts)",
            )

    def _is_own(self, host: str) -> bool:
        # Names of the Internet have a dot; without one they are of the machine, its network or its containers.
        if "." not in host or host in self._names or host.endswith(".localhost"):
            return True
        with suppress(ValueError):
            ip_address(host.strip("[]"))
            return True
        return False


def _bare(host: str) -> str:
    """A host without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".").lower()
