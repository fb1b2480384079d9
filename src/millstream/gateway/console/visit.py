"""A visit: one request for a page, and what its handler responds with."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from millstream.client.admin.browse import Right, allowed_rights, audit_reading
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.setting import Setting
from millstream.core.topic import INTERNAL_TOPICS
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane
from millstream.gateway.api.services import Services
from millstream.gateway.pressure import RequestMemory
from millstream.protocol.private.browse_messages import AuditReadingRequest
from millstream.protocol.wire.client import Client

if TYPE_CHECKING:
    from millstream.gateway.console.history import History, ResponseCache
    from millstream.gateway.console.search import Searches
    from millstream.gateway.console.tasks import Start, Tasks

T = TypeVar("T")

PREFIX: Final = "/console"
PAGE_ROWS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    read_only: bool = False
    runs_pipelines: bool = True
    """Whether the node may run pipelines, and so try them."""
    data: str = ""
    lake: str = ""
    """The node's own, by its settings."""
    kafka: str = ""
    """The address for Kafka clients."""
    session_s: int = 8 * 3600
    oidc_client_id: str = ""
    oidc_client_secret_file: str = ""
    oidc_issuer: str = ""


@dataclass(slots=True, kw_only=True)
class Visit:
    services: Services
    method: str
    path: str
    names: Mapping[str, str]
    """The names in the path."""
    query: Mapping[str, str]
    form: Mapping[str, str]
    memory: RequestMemory
    history: History
    response_cache: ResponseCache
    searches: Searches
    tasks: Tasks
    acting: Start
    """Acts for the user beyond this request."""
    settings: ConsoleSettings
    principal: str = ""
    """The user who is signed in; empty where everyone may do everything."""
    host: str = ""
    """The address of the browser."""
    site: str = ""
    """The gateway's address, as the browser uses it: `http://localhost:8080`."""
    is_refresh: bool = False
    """Whether an open page refreshes its numbers, as opposed to a user opening the page."""
    can_sign_out: bool = False
    csrf: str = ""
    notice: str = ""
    _rights: dict[Right, bool] = field(default_factory=dict)

    # -- request parameters ---------------------------------------------------------------------------------

    def text(self, name: str, default: str = "", *, length_max: int = 4096) -> str:
        """Return a parameter of the query, or a field of the form."""
        value = (self.form if self.method == "POST" else self.query).get(name, default)
        if len(value) > length_max:
            raise _field_error(name, f"{name} has more than {length_max} characters")
        return value.strip() if name != "value" else value

    def number(self, name: str, default: int, *, low: int = 0, high: int = 2**31 - 1) -> int:
        text = self.text(name)
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise _field_error(name, f"{name} must be a number from {low} to {high}, not {text!r}")
        return int(text)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """Return one of some values; the first is the default."""
        value = self.text(name, allowed[0]) or allowed[0]
        if value not in allowed:
            raise _field_error(name, f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        return value

    @property
    def search(self) -> str:
        return self.text("search", length_max=249)

    @property
    def page(self) -> int:
        """The page of a list to show; the first is 0."""
        return self.number("page", 0, high=1_000_000)

    def paging(self, total: int) -> dict[str, Any]:
        return {"total": total, "search": self.search, "page": self.page, "rows": PAGE_ROWS}

    def on_page(self, rows: Sequence[T]) -> Sequence[T]:
        return rows[self.page * PAGE_ROWS : (self.page + 1) * PAGE_ROWS]

    def confirm(self, name: str) -> None:
        """Refuse a destructive change unless its form repeats the name of the resource."""
        if self.text("confirm") != name:
            raise _field_error("confirm", f"type {name!r} to confirm; nothing was changed")

    def here(self, **changes: object) -> str:
        """Return the address of this page with other parameters; None removes one."""
        query = {**self.query, **{name: str(value) for name, value in changes.items() if value is not None}}
        for name in [name for name, value in changes.items() if value is None]:
            query.pop(name, None)
        parameters = {name: value for name, value in query.items() if value != ""}
        return f"{self.path}?{urlencode(parameters)}" if parameters else self.path

    @property
    def kafka(self) -> str:
        """The address for Kafka clients: a node that listens everywhere has the name that the browser uses."""
        host, _, port = self.settings.kafka.rpartition(":")
        if host not in ("", "0.0.0.0", "[::]"):
            return self.settings.kafka
        name = urlsplit(self.site).hostname or "localhost"
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    @property
    def user(self) -> str:
        """The key by which searches are counted: the principal, or everyone at an address."""
        return self.principal or self.host

    @property
    def session(self) -> str:
        """The key of the session, to which its tasks are shown; a token of the same user may have fewer rights."""
        return self.csrf if self.principal else self.host

    async def audit_reading(self, topic: str, how: str, *, client: Client | None = None, **more: Any) -> None:
        """Record in the audit log, if any, that the user is shown messages; another client does so after the visit."""
        if self.principal:
            await audit_reading(client or self.services.client, AuditReadingRequest(topic=topic, how=how, **more))

    async def shared(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the data of the page: fresh when a user opens it, possibly shared when an open page refreshes."""
        if not self.is_refresh or (self.principal and not self.can_sign_out):
            return await ask()
        # By session, since the rights of a token are a part of its owner's.
        return await self.response_cache.get((self.csrf if self.principal else "", self.path), ask)

    # -- rights ---------------------------------------------------------------------------------------------

    async def look_up(self, *rights: Right) -> None:
        """Look up the rights that the page depends on, in one request."""
        unknown = [right for right in rights if right not in self._rights]
        if not unknown:
            return
        if not self.principal:
            self._rights.update(dict.fromkeys(unknown, True))
            return
        self._rights.update(zip(unknown, await allowed_rights(self.services.client, unknown), strict=True))

    async def may(self, operation: Operation, kind: ResourceType, name: str = CLUSTER_NAME) -> bool:
        await self.look_up((operation, kind, name))
        return self._rights[operation, kind, name]

    async def topic_tabs(self, name: str) -> dict[str, Any]:
        """Return the variables for the tabs of a topic's pages: its name, and the tabs to offer."""
        kind = ResourceType.TOPIC
        await self.look_up(
            *((operation, kind, name) for operation in (Operation.READ, Operation.WRITE, Operation.DESCRIBE_CONFIGS))
        )
        return {
            "topic": name,
            "may_read": await self.may(Operation.READ, kind, name),
            "may_write": name not in INTERNAL_TOPICS and await self.may_change(Operation.WRITE, kind, name),
            "may_see_settings": await self.may(Operation.DESCRIBE_CONFIGS, kind, name),
        }

    async def may_change(self, operation: Operation, kind: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return whether to offer a change: the user may make it, and the console is not read-only."""
        return not self.settings.read_only and await self.may(operation, kind, name)


@dataclass(frozen=True, slots=True)
class Page:
    template: str
    context: Mapping[str, Any]
    status: HTTPStatus = HTTPStatus.OK


@dataclass(frozen=True, slots=True)
class Done:
    """A change was made: go to a page, which shows what happened."""

    to: str
    notice: str


@dataclass(frozen=True, slots=True)
class Download:
    """A stream of text: a file to keep, or events."""

    pieces: AsyncGenerator[bytes, None]
    content_type: str
    file_name: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A form could be sent like this: show it again with what was entered."""

    text: str


Response = Page | Done | Download | Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRoute:
    """A method of one path below `/console`."""

    path: str
    handle: Callable[[Visit], Awaitable[Response]]
    method: str = "GET"
    lane: Lane = Lane.ADMIN


def change(path: str, handle: Callable[[Visit], Awaitable[Response]]) -> PageRoute:
    return PageRoute(path=path, handle=handle, method="POST")


def done(to: str, text: str, *words: object) -> Done:
    """Return the response to a change: its result, and the equivalent command."""
    shown_command = command(*words)
    return Done(to, f"{text} ({shown_command})" if text.endswith(".") else f"{text}: {shown_command}")


def setting_rows(described: Mapping[str, Any], declared: Mapping[str, Setting]) -> list[dict[str, Any]]:
    """Return the settings of a resource with their meanings and defaults, those that were changed first."""
    settings, overrides = described["settings"], described["overrides"]
    return [
        {
            "name": name,
            "value": settings[name],
            "is_override": name in overrides,
            "default": declared[name].default if name in declared else None,
            "meaning": declared[name].description if name in declared else "",
            "fixed": name in declared and declared[name].is_fixed,
        }
        for name in sorted(settings, key=lambda name: (name not in overrides, name))
    ]


def address(*parts: object) -> str:
    """Return the address of a page, with names percent-encoded."""
    return "/".join([PREFIX, *(quote(str(part), safe="") for part in parts)])


def command(*words: object) -> str:
    """Return the command that does the same as a page, for a shell."""
    return " ".join(["millstream", *(_quoted(str(word)) for word in words)])


def _quoted(word: str) -> str:
    """Quote a word for a shell: conditions contain single quotes, so double quotes are easier to read."""
    if "'" in word and word.isprintable() and not any(character in word for character in '"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)


def _field_error(field: str, detail: str) -> Refused:
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, detail, field=field)


def refuse_read_only() -> Refused:
    return Refused(
        HTTPStatus.FORBIDDEN,
        "this console is read-only (setting console-read-only); use the command line or the API to change things",
    )
