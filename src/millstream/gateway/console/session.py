"""Signing in to the console: the login page, OpenID Connect, cookies, and the tokens of forms.

A session is a text that a node has signed and every node can verify; it is stored only in the browser's cookie. It
represents the password or token of the user, which a node looks up each time, so a change or revocation ends the
session. Forms carry a hash of the cookie, which pages of other sites can neither read nor forge.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import ssl
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

import httpx

from millstream.gateway.api.dispatch import host_of
from millstream.gateway.api.problem import Refused, invalid
from millstream.gateway.api.services import Services
from millstream.gateway.callers import CallerCredentials, Callers
from millstream.gateway.console.visit import PREFIX, ConsoleSettings
from millstream.gateway.origin_check import is_foreign
from millstream.gateway.pressure import BODY_S_MAX, ClientDisconnected
from millstream.protocol.private.security_messages import BASIC, BEARER, SESSION

if TYPE_CHECKING:
    from millstream.gateway.console.app import ConsoleApp

LOGIN: Final = f"{PREFIX}/login"
LOGOUT: Final = f"{PREFIX}/logout"
OIDC: Final = f"{PREFIX}/oidc"
CALLBACK: Final = f"{PREFIX}/oidc/callback"
NOTICE_LENGTH_MAX: Final = 1500
FORM_BYTES_MAX: Final = 64 * 1024
OIDC_S: Final = 10.0
OIDC_BYTES_MAX: Final = 256 * 1024
ATTEMPT_S: Final = 600
"""How long a user may take to sign in at the OpenID provider."""
_SESSION, _FORM, _NOTICE, _ATTEMPT = "session", "form", "notice", "oidc"

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class SignedIn:
    """The contents of the browser's cookies."""

    cookie: str = ""
    """The signed session; empty for users who are not signed in."""
    form_key: str = ""
    """Random, for the forms of users without a session."""
    is_new: bool = False
    notice: str = ""
    attempt: str = ""

    @property
    def csrf(self) -> str:
        """The token that the forms of this browser carry."""
        return hashlib.sha256(f"millstream form\0{self.cookie or self.form_key}".encode()).hexdigest()

    def is_own_form(self, token: str) -> bool:
        return bool(self.cookie or self.form_key) and hmac.compare_digest(token.encode(), self.csrf.encode())

    def shown(self, host: str) -> CallerCredentials | None:
        return CallerCredentials(SESSION, "", self.cookie, host) if self.cookie else None


class Sessions:
    def __init__(self, services: Services, callers: Callers | None, settings: ConsoleSettings, *, is_tls: bool) -> None:
        self._services = services
        self._callers = callers
        self._settings = settings
        self._is_tls = is_tls
        # Browsers take cookies with this prefix only from the host itself, over TLS, for every path.
        self._prefix = "__Host-millstream-" if is_tls else "millstream-"
        self._provider: dict[str, Any] | None = None
        self._tls: ssl.SSLContext | None = None
        """The authorities that the provider's certificate may have."""

    # -- cookies --------------------------------------------------------------------------------------------

    def read(self, headers: Mapping[bytes, bytes]) -> SignedIn:
        # Not by the standard library, which takes seconds for 64 KiB of quotes in some versions of Python.
        pairs = (part.partition("=") for part in headers.get(b"cookie", b"").decode("latin-1").split(";"))
        cookies = {name.strip(" \t"): value.strip(" \t") for name, _, value in pairs}
        session, form_key, notice, attempt = (
            cookies.get(self._prefix + name, "") for name in (_SESSION, _FORM, _NOTICE, _ATTEMPT)
        )
        return SignedIn(
            cookie=session if self._callers is not None else "",
            form_key=form_key or secrets.token_urlsafe(24),
            is_new=not form_key,
            notice=unquote(notice)[:NOTICE_LENGTH_MAX],
            attempt=unquote(attempt),
        )

    def cookies_of(self, signed_in: SignedIn) -> Headers:
        """Return the cookie for forms, unless the browser has it."""
        return [self._cookie(_FORM, signed_in.form_key)] if signed_in.is_new and not signed_in.cookie else []

    def notice(self, text: str) -> Headers:
        """Return a cookie with the notice for the next page, or without one."""
        return [self._cookie(_NOTICE, quote(text[:NOTICE_LENGTH_MAX]), max_age_s=60 if text else 0)]

    def _cookie(
        self, name: str, value: str, *, max_age_s: int | None = None, same_site: str = "Strict"
    ) -> tuple[bytes, bytes]:
        parts = [f"{self._prefix}{name}={value}", "Path=/", "HttpOnly", f"SameSite={same_site}"]
        if max_age_s is not None:
            parts.append(f"Max-Age={max_age_s}")
        if self._is_tls:
            parts.append("Secure")
        return b"set-cookie", "; ".join(parts).encode("latin-1")

    # -- pages ----------------------------------------------------------------------------------------------

    async def serve(self, exchange: Any, signed_in: SignedIn, app: ConsoleApp) -> bool:
        """Serve the pages that sign users in and out; return False for all others."""
        path, method = exchange.scope["path"].rstrip("/"), exchange.scope["method"]
        if path not in (LOGIN, LOGOUT, OIDC, CALLBACK):
            return False
        if self._callers is None:
            await app.redirect(exchange, PREFIX, [])
        elif path == LOGIN and method == "POST":
            await self._sign_in(exchange, signed_in, app)
        elif path == LOGIN and method in ("GET", "HEAD"):
            query = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))
            await self._send_login(exchange, signed_in, app, to=_own_page(query.get("next", "")))
        elif path == LOGOUT and method == "POST":
            self._check_form(await self._read_form(exchange), signed_in)
            await app.redirect(exchange, LOGIN, [self._cookie(_SESSION, "", max_age_s=0)])
        elif path in (OIDC, CALLBACK) and method == "GET" and self._has_oidc:
            try:
                if path == OIDC:
                    await self._begin_oidc(exchange, app)
                else:
                    await self._finish_oidc(exchange, signed_in, app)
            except Refused as error:
                await self._send_login(exchange, signed_in, app, reason=error.detail, status=error.status)
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        return True

    async def ask_to_sign_in(self, exchange: Any, signed_in: SignedIn, app: ConsoleApp, error: Refused) -> None:
        """Show the login page in place of a page that requires a signed-in user."""
        headers = [self._cookie(_SESSION, "", max_age_s=0)] if signed_in.cookie else []
        query = exchange.scope["query_string"].decode("latin-1")
        here = exchange.scope["raw_path"].partition(b"?")[0].decode("latin-1") + (f"?{query}" if query else "")
        if exchange.is_partial:
            headers.append((b"hx-redirect", LOGIN.encode()))
        elif exchange.scope["method"] in ("GET", "HEAD"):
            if is_foreign(exchange.headers):
                # The browser has followed a link of another site, and left out the cookies of this one.
                await app.send_page(exchange, HTTPStatus.OK, "continue.html", {"to": here}, [])
                return
            to = "" if here.rstrip("/") == PREFIX else "?" + urlencode({"next": here})
            await app.redirect(exchange, LOGIN + to, headers)
            return
        reason = "Your session has ended; sign in again." if signed_in.cookie else error.detail
        await self._send_login(
            exchange,
            SignedIn(form_key=signed_in.form_key, is_new=signed_in.is_new),
            app,
            reason=reason,
            headers=headers,
            status=HTTPStatus.UNAUTHORIZED,
        )

    async def _send_login(
        self,
        exchange: Any,
        signed_in: SignedIn,
        app: ConsoleApp,
        *,
        to: str = "",
        reason: str = "",
        user: str = "",
        is_by_token: bool = False,
        headers: Headers | None = None,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        fresh = SignedIn(form_key=signed_in.form_key, is_new=signed_in.is_new)
        context = {
            "csrf": fresh.csrf,
            "to": to,
            "reason": reason,
            "user": user,
            "is_by_token": is_by_token,
            "has_oidc": self._has_oidc,
            "oidc": OIDC,
        }
        # Sent each time: the form of an old session must not prevent a sign-in.
        cookies = [self._cookie(_FORM, fresh.form_key), *(headers or [])]
        await app.send_page(exchange, status, "login.html", context, cookies)

    async def _sign_in(self, exchange: Any, signed_in: SignedIn, app: ConsoleApp) -> None:
        form = await self._read_form(exchange)
        user, secret, token = form.get("user", "").strip(), form.get("password", ""), form.get("token", "").strip()
        to = _own_page(form.get("next", ""))
        host = host_of(exchange.scope)
        try:
            # The user may have an older session, which the login form does not know.
            self._check_form(form, SignedIn(form_key=signed_in.form_key))
            if token:
                shown = CallerCredentials(BEARER, "", token, host)
            elif user and secret and "\0" not in user + secret:
                shown = CallerCredentials(BASIC, user, secret, host)
            else:
                raise Refused(HTTPStatus.UNAUTHORIZED, "enter a user and a password, or a token")
            cookie = await self._open(shown)
        except Refused as error:
            await self._send_login(
                exchange,
                signed_in,
                app,
                to=to,
                reason=error.detail,
                user=user,
                is_by_token=bool(token),
                status=error.status,
            )
            return
        await app.redirect(exchange, to or PREFIX, [cookie])

    async def _open(self, shown: CallerCredentials) -> tuple[bytes, bytes]:
        if self._callers is None:
            raise Refused(HTTPStatus.NOT_FOUND, "this node does not authenticate clients")
        opened = await self._callers.open_session(shown, self._settings.session_s)
        left_s = max(1, int(opened.expires_ms / 1000 - time.time()))
        return self._cookie(_SESSION, opened.session, max_age_s=left_s)

    async def _read_form(self, exchange: Any) -> dict[str, str]:
        body = b""
        try:
            async with asyncio.timeout(BODY_S_MAX):
                while True:
                    message = await exchange.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    body += message["body"]
                    if len(body) > FORM_BYTES_MAX:
                        raise Refused(
                            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"this form has at most {FORM_BYTES_MAX} bytes"
                        )
                    if not message["more_body"]:
                        break
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the form did not arrive within {BODY_S_MAX:g} s") from None
        return dict(parse_qsl(body.decode("latin-1"), keep_blank_values=True))

    def _check_form(self, form: Mapping[str, str], signed_in: SignedIn) -> None:
        if not signed_in.is_own_form(form.get("csrf", "")):
            raise Refused(HTTPStatus.FORBIDDEN, "the form is not from this browser, or its cookie is gone; try again")

    # -- OpenID Connect -------------------------------------------------------------------------------------

    @property
    def _has_oidc(self) -> bool:
        return bool(self._settings.oidc_client_id and self._settings.oidc_issuer)

    def _verifying(self, exchange: Any) -> AbstractContextManager[None]:
        """Count a request to the provider for the address that caused it; raise `Refused` if that has too many."""
        return nullcontext() if self._callers is None else self._callers.verifying(host_of(exchange.scope))

    async def _begin_oidc(self, exchange: Any, app: ConsoleApp) -> None:
        with self._verifying(exchange):
            provider = await self._discover()
        query = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))
        verifier, state, nonce = (secrets.token_urlsafe(48), secrets.token_urlsafe(24), secrets.token_urlsafe(24))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        requested = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": self._callback(exchange),
            "scope": "openid",
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        attempt = quote(json.dumps([state, verifier, nonce, _own_page(query.get("next", ""))]))
        # Lax, since the browser returns from the provider's site.
        cookie = self._cookie(_ATTEMPT, attempt, max_age_s=ATTEMPT_S, same_site="Lax")
        await app.redirect(exchange, f"{provider['authorization_endpoint']}?{urlencode(requested)}", [cookie])

    async def _finish_oidc(self, exchange: Any, signed_in: SignedIn, app: ConsoleApp) -> None:
        query = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1")))
        try:
            state, verifier, nonce, to = json.loads(signed_in.attempt)
        except (ValueError, TypeError, RecursionError):
            raise invalid("signing in took too long, or began in another browser; try again") from None
        if not hmac.compare_digest(str(state).encode(), query.get("state", "").encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "the OpenID provider's response is not for this browser; try again")
        if "code" not in query:
            reason = query.get("error_description") or query.get("error") or "it sent no code"
            raise Refused(HTTPStatus.FORBIDDEN, f"the OpenID provider did not sign you in: {reason[:300]}")
        with self._verifying(exchange):
            tokens = await self._exchange_code(exchange, query["code"], str(verifier))
        if _claims(tokens.get("id_token", "")).get("nonce") != nonce:
            raise Refused(HTTPStatus.FORBIDDEN, "the OpenID provider's token is not for this attempt; try again")
        cookie: tuple[bytes, bytes] | None = None
        refused: Refused | None = None
        host = host_of(exchange.scope)
        # Providers that are configured for the API issue an access token; others name the client in the identity token.
        for token in (tokens.get("access_token", ""), tokens.get("id_token", "")):
            if cookie is None and isinstance(token, str) and token.count(".") == 2:
                try:
                    cookie = await self._open(CallerCredentials(BEARER, "", token, host))
                except Refused as error:
                    refused = error
        if cookie is None:
            why = "it is not a JSON web token" if refused is None else refused.detail
            raise Refused(HTTPStatus.FORBIDDEN, f"the OpenID provider signed you in, but its token is refused: {why}")
        headers = [cookie, self._cookie(_ATTEMPT, "", max_age_s=0, same_site="Lax")]
        # A page, not a redirect: browsers send strict cookies only once a page of this site asks.
        await app.send_page(exchange, HTTPStatus.OK, "continue.html", {"to": _own_page(str(to)) or PREFIX}, headers)

    async def _exchange_code(self, exchange: Any, code: str, verifier: str) -> dict[str, Any]:
        provider = await self._discover()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._callback(exchange),
            "client_id": self._settings.oidc_client_id,
            "code_verifier": verifier,
        }
        if self._settings.oidc_client_secret_file:
            secret = await asyncio.to_thread(Path(self._settings.oidc_client_secret_file).read_text, "utf-8")
            form["client_secret"] = secret.strip()
        return await self._request_provider("POST", str(provider["token_endpoint"]), form)

    async def _discover(self) -> dict[str, Any]:
        if self._provider is None:
            issuer = self._settings.oidc_issuer.rstrip("/")
            document = await self._request_provider("GET", f"{issuer}/.well-known/openid-configuration", None)
            if str(document.get("issuer", "")).rstrip("/") != issuer or "token_endpoint" not in document:
                raise Refused(HTTPStatus.BAD_GATEWAY, f"the OpenID provider at {issuer} describes another issuer")
            self._provider = document
        return self._provider

    async def _request_provider(self, method: str, url: str, form: dict[str, str] | None) -> dict[str, Any]:
        if self._tls is None:
            # For each request, loading the authorities would block the loop for tens of milliseconds.
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        try:
            async with httpx.AsyncClient(timeout=OIDC_S, follow_redirects=False, verify=self._tls) as client:
                response = await client.request(method, url, data=form)
                document = json.loads(response.content[:OIDC_BYTES_MAX])
        except (httpx.HTTPError, ValueError) as error:
            # The authorities may have been replaced.
            self._tls = None
            raise Refused(HTTPStatus.BAD_GATEWAY, f"the OpenID provider cannot be reached: {error}") from None
        if response.is_error or not isinstance(document, dict):
            refusal = (
                document.get("error", response.status_code) if isinstance(document, dict) else response.status_code
            )
            raise Refused(HTTPStatus.BAD_GATEWAY, f"the OpenID provider refused the request: {refusal}")
        return document

    def _callback(self, exchange: Any) -> str:
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        return f"{'https' if self._is_tls else 'http'}://{host}{CALLBACK}"


def _claims(token: str) -> dict[str, Any]:
    """Read the claims of a token that came straight from the provider; a node checks its signature later."""
    try:
        part = token.split(".")[1]
        document = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _own_page(to: str) -> str:
    """Return an address if it is a page of the console; a link must not lead elsewhere after signing in."""
    is_own = to == PREFIX or to.startswith((f"{PREFIX}/", f"{PREFIX}?"))
    return to if is_own and "\\" not in to and to.isprintable() and not to.startswith((LOGIN, LOGOUT, OIDC)) else ""
