"""The console as an ASGI application: signs users in, finds the page, carries out changes, renders.

Every response has a strict Content-Security-Policy: pages run the console's own script and nothing else, whatever
messages, names and headers contain. Changes need the token in the user's own pages, and are made with the user's rights
by the operations that commands and the API use.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError
from millstream.core.tasks import cancel_and_wait
from millstream.gateway.api.dispatch import PathTree, Scope, Send, host_of, parse_pairs, wait_for_disconnect
from millstream.gateway.api.event_stream import send_events
from millstream.gateway.api.problem import Refused, refusal_of, stopped
from millstream.gateway.api.route import EVENT_STREAM, Lane
from millstream.gateway.api.services import Services
from millstream.gateway.callers import CallerCredentials, Callers
from millstream.gateway.console import tasks
from millstream.gateway.console.history import History, ResponseCache
from millstream.gateway.console.pages import (
    access,
    cluster,
    dead_letters,
    groups,
    messages,
    mirrors,
    overview,
    pipelines,
    schemas,
    subscriptions,
    topics,
)
from millstream.gateway.console.render import OUTCOME, environment, render, show_again, static_file
from millstream.gateway.console.search import Searches
from millstream.gateway.console.session import Sessions, SignedIn
from millstream.gateway.console.tasks import Tasks, UserServices
from millstream.gateway.console.visit import (
    PREFIX,
    Checked,
    ConsoleSettings,
    Done,
    Download,
    Page,
    PageRoute,
    Response,
    Visit,
    refuse_read_only,
)
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.pressure import ClientDisconnected, Receive, RequestMemory

_logger = logging.getLogger(__name__)

ROUTES: Final[tuple[PageRoute, ...]] = (
    *overview.ROUTES,
    *topics.ROUTES,
    *messages.ROUTES,
    *subscriptions.ROUTES,
    *dead_letters.ROUTES,
    *groups.ROUTES,
    *pipelines.ROUTES,
    *cluster.ROUTES,
    *mirrors.ROUTES,
    *schemas.ROUTES,
    *access.ROUTES,
    *tasks.ROUTES,
)
"""Every page."""

FORM_BYTES_MAX: Final = 2 * 1024 * 1024
STATIC: Final = f"{PREFIX}/static/"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_NO_STORE: Final = (b"cache-control", b"no-store")
_HTML: Final = (b"content-type", b"text/html; charset=utf-8")

_ADVICE: Final = re.compile(r"\bmillstream [a-z]+ ")
"""The beginning of a command; one at the end of an error message is advice."""
LISTS: Final = {
    "topics": "Topics",
    "subscriptions": "Subscriptions",
    "dead-letters": "Dead letters",
    "groups": "Groups",
    "pipelines": "Pipelines",
    "schemas": "Schemas",
    "mirrors": "Mirrors",
}
"""The lists in which to look for what was not found."""

Headers = list[tuple[bytes, bytes]]


class _Exchange(NamedTuple):
    scope: Scope
    headers: dict[bytes, bytes]
    receive: Receive
    send: Send

    @property
    def is_partial(self) -> bool:
        """Whether a script asks for a part of a page."""
        return b"hx-request" in self.headers


class ConsoleApp:
    def __init__(
        self,
        services: Services,
        site: OriginCheck,
        callers: Callers | None = None,
        settings: ConsoleSettings | None = None,
        *,
        is_tls: bool = False,
    ) -> None:
        self._services = services
        self._site = site
        self._callers = callers
        """Authenticates users; None where everyone may do everything."""
        self._settings = settings or ConsoleSettings()
        self._is_tls = is_tls
        self.history = History(services)
        self.response_cache = ResponseCache()
        self.searches = Searches()
        self.tasks = Tasks(self.response_cache.clear)
        self._sessions = Sessions(services, callers, self._settings, is_tls=is_tls)
        self._tree: PathTree[PageRoute] = PathTree()
        for route in ROUTES:
            self._tree.add(route.method, route.path, route)

    def start(self) -> None:
        self.history.start()

    async def close(self) -> None:
        """Stop sampling, searching and working."""
        await self.tasks.close()
        await self.history.close()
        await self.searches.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, dict(scope["headers"]), receive, send)
        path: str = scope["path"]
        if path.startswith(STATIC):
            await self._send_static(exchange, path.removeprefix(STATIC))
            return
        signed_in = SignedIn()
        try:
            self._site.check(exchange.headers, is_page=scope["method"] in ("GET", "HEAD"))
            self._services.check_started()
            signed_in = self._sessions.read(exchange.headers)
            if await self._sessions.serve(exchange, signed_in, self):
                return
            await self._serve(exchange, signed_in)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            if not self._services.stopping.done():
                raise
            await self._refuse(exchange, signed_in, stopped())
        except Exception as error:
            await self._refuse(exchange, signed_in, _refusal(error, path))

    async def _serve(self, exchange: _Exchange, signed_in: SignedIn) -> None:
        scope = exchange.scope
        raw_path = scope["raw_path"].partition(b"?")[0]
        below = raw_path[len(PREFIX) :].rstrip(b"/") or b"/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            route, names = self._tree.find(method, below)
        except Refused as error:
            if error.status is not HTTPStatus.NOT_FOUND:
                raise
            raise Refused(error.status, f"there is no page {scope['path']}; the menu leads to every page") from None
        if route.method == "POST" and self._settings.read_only:
            raise refuse_read_only()
        async with self._acting_for(exchange, signed_in) as services:
            with RequestMemory(self._services.pressure, route.lane, services.principal) as memory:
                form = await self._form(exchange, memory) if route.method == "POST" else {}
                visit = Visit(
                    services=services,
                    method=route.method,
                    path=raw_path.decode("ascii").rstrip("/"),
                    names=names,
                    query=_pairs(scope["query_string"]),
                    form=form,
                    memory=memory,
                    history=self.history,
                    response_cache=self.response_cache,
                    searches=self.searches,
                    tasks=self.tasks,
                    acting=lambda: self._acting_on(exchange, signed_in),
                    settings=self._settings,
                    principal=services.principal,
                    host=host_of(scope),
                    site=self._site_of(exchange),
                    is_refresh=exchange.is_partial,
                    can_sign_out=bool(signed_in.cookie),
                    csrf=signed_in.csrf,
                    notice=signed_in.notice,
                )
                if route.lane is Lane.WAIT:
                    await self._wait(exchange, route, visit, signed_in)
                elif route.method == "POST":
                    await self._change(exchange, route, visit, signed_in)
                else:
                    await self._respond(exchange, visit, signed_in, await _run_while_connected(exchange, route, visit))

    @asynccontextmanager
    async def _acting_for(self, exchange: _Exchange, signed_in: SignedIn) -> AsyncIterator[Services]:
        if self._callers is None:
            yield self._services
            return
        shown = self._credential_of(exchange, signed_in)
        async with self._callers.acting_as(shown) as caller:
            yield caller.services

    @asynccontextmanager
    async def _acting_on(self, exchange: _Exchange, signed_in: SignedIn) -> AsyncIterator[UserServices]:
        """Act for a user beyond a request, until the session ends."""
        async with self._acting_for(exchange, signed_in) as services:
            lapsed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if self._callers is not None:
                lapsed = asyncio.ensure_future(self._callers.until_lapsed(self._credential_of(exchange, signed_in)))
            try:
                yield UserServices(services, lapsed)
            finally:
                await cancel_and_wait(lapsed)

    def _site_of(self, exchange: _Exchange) -> str:
        host = exchange.headers.get(b"host", b"").decode("ascii", "replace")
        return f"{'https' if self._is_tls else 'http'}://{host}"

    def _credential_of(self, exchange: _Exchange, signed_in: SignedIn) -> CallerCredentials:
        host = host_of(exchange.scope)
        return signed_in.shown(host) or self._callers_required().read(exchange.scope["headers"], host)

    def _callers_required(self) -> Callers:
        if self._callers is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this node does not authenticate clients")
        return self._callers

    async def _form(self, exchange: _Exchange, memory: RequestMemory) -> dict[str, str]:
        kind = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/x-www-form-urlencoded":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a form must be sent as application/x-www-form-urlencoded")
        body = await memory.read(exchange.headers, exchange.receive)
        if len(body) > FORM_BYTES_MAX:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a form has at most {FORM_BYTES_MAX} bytes")
        return _pairs(body)

    async def _change(self, exchange: _Exchange, route: PageRoute, visit: Visit, signed_in: SignedIn) -> None:
        """Carry out a change, even if the browser disconnects meanwhile."""
        try:
            if not signed_in.is_own_form(visit.form.get("csrf", "")):
                raise Refused(
                    HTTPStatus.FORBIDDEN,
                    "the form is not from this session, or the session has ended; nothing was changed; send it again",
                )
            response = await route.handle(visit)
        except Exception as error:
            await self._show_form(exchange, visit, signed_in, _refusal(error, visit.path))
        else:
            await self._respond(exchange, visit, signed_in, response)
        finally:
            self.response_cache.clear()

    async def _show_form(self, exchange: _Exchange, visit: Visit, signed_in: SignedIn, outcome: Refused) -> None:
        """Show a form again as it was sent, with the outcome; raise that if the form has no page."""
        shown = None if outcome.status is HTTPStatus.UNAUTHORIZED else await self._page_of_form(visit)
        if shown is None:
            raise outcome
        again, page = shown
        note = environment().get_template("outcome.html").render(outcome=outcome, id=OUTCOME, address=again.here())
        text = (await self._render(exchange, again, page)).decode()
        content = show_again(text, visit.path, visit.form, note, outcome.more.get("field", "")).encode()
        headers = [_HTML, *_encoded(outcome.headers), *self._sessions.cookies_of(signed_in)]
        await self._send(exchange, outcome.status, headers, content)

    async def _page_of_form(self, visit: Visit) -> tuple[Visit, Page] | None:
        """Prepare the page on which a form was sent; None if that page cannot be shown any more."""
        path, _, query = visit.form.get("back", "").partition("?")
        if not path.startswith(PREFIX):
            return None
        try:
            route, names = self._tree.find("GET", path.removeprefix(PREFIX).encode("ascii") or b"/")
            if route.lane is not Lane.ADMIN:
                return None
            again = replace(visit, method="GET", path=path, names=names, query=_pairs(query.encode("ascii")), form={})
            page = await route.handle(again)
        except (Refused, MillstreamError, UnicodeEncodeError):
            return None
        return (again, page) if isinstance(page, Page) else None

    async def _wait(self, exchange: _Exchange, route: PageRoute, visit: Visit, signed_in: SignedIn) -> None:
        """Serve a stream while the browser is connected and the user may see it."""
        disconnected = asyncio.ensure_future(wait_for_disconnect(exchange.receive))
        lapsed: asyncio.Future[bytes] | None = None
        if self._callers is not None:
            lapsed = asyncio.ensure_future(self._until_lapsed(exchange, signed_in, self._callers))
        try:
            response = await route.handle(visit)
            if isinstance(response, Download) and response.content_type == EVENT_STREAM:
                self._services.pressure.count(HTTPStatus.OK)
                await send_events(exchange.send, response.pieces, disconnected, self._services.stopping, lapsed)
            else:
                await self._respond(exchange, visit, signed_in, response, disconnected)
        finally:
            await cancel_and_wait(*(task for task in (disconnected, lapsed) if task is not None))

    async def _until_lapsed(self, exchange: _Exchange, signed_in: SignedIn, callers: Callers) -> bytes:
        await callers.until_lapsed(self._credential_of(exchange, signed_in))
        return b"event: ended\ndata: {}\n\n"

    # -- responses ------------------------------------------------------------------------------------------

    async def _respond(
        self,
        exchange: _Exchange,
        visit: Visit,
        signed_in: SignedIn,
        response: Response,
        disconnected: asyncio.Future[None] | None = None,
    ) -> None:
        cookies = self._sessions.cookies_of(signed_in)
        if isinstance(response, Done):
            cookies += self._sessions.notice(response.notice)
            headers = [(b"location", response.to.encode()), *cookies]
            await self._send(exchange, HTTPStatus.SEE_OTHER, headers, b"")
        elif isinstance(response, Download):
            await self._send_download(exchange, response, disconnected)
        elif isinstance(response, Checked):
            await self._show_form(exchange, visit, signed_in, Refused(HTTPStatus.OK, response.text))
        else:
            if visit.notice and not exchange.is_partial:
                cookies += self._sessions.notice("")
            await self._send(
                exchange, response.status, [_HTML, *cookies], await self._render(exchange, visit, response)
            )

    async def _render(self, exchange: _Exchange, visit: Visit, page: Page) -> bytes:
        # Scripts replace the numbers of a page, not its menu.
        may_describe = exchange.is_partial or await visit.may(Operation.DESCRIBE, ResourceType.CLUSTER)
        context = {
            "visit": visit,
            "section": _section(visit.path),
            "csrf": visit.csrf,
            "read_only": visit.settings.read_only,
            "notice": visit.notice,
            "working": visit.tasks.running(visit.session),
            "may_describe": may_describe,
            "live": True,
            **page.context,
        }
        return render(page.template, context)

    async def _refuse(self, exchange: _Exchange, signed_in: SignedIn, error: Refused) -> None:
        if error.status is HTTPStatus.UNAUTHORIZED and self._callers is not None:
            await self._sessions.ask_to_sign_in(exchange, signed_in, self, error)
            return
        section = _section(exchange.scope["path"]) if error.status is HTTPStatus.NOT_FOUND else ""
        context = {
            "section": section,
            "list_name": LISTS.get(section, ""),
            "status": int(error.status),
            "title": error.status.phrase,
            "detail": error.detail,
            "read_only": self._settings.read_only,
        }
        with suppress(RuntimeError):
            # Raised if the response has started already; one that breaks off shows that it failed.
            await self.send_page(exchange, error.status, "refused.html", context, _encoded(error.headers))

    async def send_page(
        self, exchange: Any, status: HTTPStatus, template: str, context: Mapping[str, Any], headers: Headers
    ) -> None:
        """Send a page that is not part of a visit, to a user who is not signed in."""
        shown = {
            "section": "",
            "live": False,
            "read_only": False,
            "notice": "",
            "visit": None,
            "csrf": "",
            "working": [],
        }
        await self._send(exchange, status, [_HTML, *headers], render(template, {**shown, **context}))

    async def redirect(self, exchange: Any, to: str, headers: Headers) -> None:
        await self._send(exchange, HTTPStatus.SEE_OTHER, [(b"location", to.encode()), *headers], b"")

    async def _send(
        self,
        exchange: _Exchange,
        status: HTTPStatus,
        headers: Headers,
        content: bytes,
        caching: tuple[bytes, bytes] = _NO_STORE,
    ) -> None:
        self._services.pressure.count(status)
        sent = [*headers, *HEADERS, caching, (b"content-length", b"%d" % len(content))]
        await exchange.send({"type": "http.response.start", "status": int(status), "headers": sent})
        body = b"" if exchange.scope["method"] == "HEAD" else content
        await exchange.send({"type": "http.response.body", "body": body})

    async def _send_download(
        self, exchange: _Exchange, response: Download, disconnected: asyncio.Future[None] | None
    ) -> None:
        self._services.pressure.count(HTTPStatus.OK)
        headers = [(b"content-type", response.content_type.encode()), *HEADERS, _NO_STORE]
        if response.file_name:
            safe = "".join(
                character if character.isalnum() or character in "._-" else "_" for character in response.file_name
            )
            headers.append((b"content-disposition", f'attachment; filename="{safe}"'.encode("ascii", "replace")))
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for piece in response.pieces:
                if disconnected is not None and disconnected.done():
                    return
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await response.pieces.aclose()
        await exchange.send({"type": "http.response.body", "body": b""})

    async def _send_static(self, exchange: _Exchange, name: str) -> None:
        file = static_file(name) if exchange.scope["method"] in ("GET", "HEAD") else None
        if file is None:
            await self._refuse(
                exchange, SignedIn(), Refused(HTTPStatus.NOT_FOUND, "there is no such file; the console is at /console")
            )
            return
        content, kind = file
        # Addresses of static files carry the version.
        caching = (b"cache-control", b"public, max-age=86400")
        await self._send(
            exchange, HTTPStatus.OK, [(b"content-type", f"{kind}; charset=utf-8".encode())], content, caching
        )


def _section(path: str) -> str:
    return path.removeprefix(PREFIX).strip("/").partition("/")[0]


def _encoded(headers: Mapping[str, str]) -> Headers:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _refusal(error: Exception, path: str) -> Refused:
    """Convert an error to a refusal; what is not found is in a list of the console, so commands are left out."""
    if isinstance(error, MillstreamError):
        error = refusal_of(error)
    if not isinstance(error, Refused):
        _logger.error("a page failed", extra={"path": path}, exc_info=error)
        return Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed; see its log for the reason")
    if error.status is HTTPStatus.NOT_FOUND:
        detail, _, advice = error.detail.rpartition("; ")
        error.detail = detail if detail and _ADVICE.search(advice) else error.detail
    return error


def _pairs(text: bytes) -> dict[str, str]:
    return dict(parse_pairs(text, "the parameters"))


async def _run_while_connected(exchange: _Exchange, route: PageRoute, visit: Visit) -> Response:
    """Prepare a page; stop when the browser has disconnected."""
    working = asyncio.ensure_future(route.handle(visit))
    disconnected = asyncio.ensure_future(wait_for_disconnect(exchange.receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        await cancel_and_wait(working, disconnected)
