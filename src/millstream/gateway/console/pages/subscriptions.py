"""Subscriptions: depth, age, who holds which message; pause, resume, seek, purge, change, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from millstream.client.admin.position import parse_position
from millstream.client.admin.subscriptions import place_of, plan_seek, start_of, summary_of
from millstream.client.admin.tailer import Message
from millstream.client.admin.topics import find_topic, offset_bounds
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError
from millstream.core.ids import OffsetRange
from millstream.core.subscription import (
    ATTEMPTS,
    DEAD_LETTER_TOPIC,
    EXPIRES,
    FILTER,
    IN_FLIGHT_MAX,
    LEASE,
    LEDGER,
    OWN_PREFIX,
    PAUSED,
    START,
    SubscriptionSettings,
)
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.pages.messages import rows_of as message_rows
from millstream.gateway.console.search import Progress, compiled
from millstream.gateway.console.visit import Done, Page, PageRoute, Response, Visit, address, change, done, setting_rows
from millstream.protocol.wire.fetch import READ_COMMITTED

LEASES_SHOWN: Final = 200
RECENT: Final = 1000
"""Messages on which a filter is tried, per topic."""
EXAMPLES: Final = 5
"""Matching messages that are shown, per topic."""
_ORDERS: Final = ("subscription", "backlog", "leased", "oldest_s", "parked", "dead_lettered", "dropped")
_DECLARED: Final = SubscriptionSettings.declared()
_GROUP: Final = ResourceType.GROUP
_FLAGS: Final = {
    FILTER: "--filter",
    LEASE: "--lease",
    ATTEMPTS: "--attempts",
    DEAD_LETTER_TOPIC: "--dead-letter",
    IN_FLIGHT_MAX: "--in-flight",
    EXPIRES: "--expires",
}
"""Settings for which the command has flags of their own."""
_CHANGEABLE: Final = [
    name for name, declared in sorted(_DECLARED.items()) if not declared.is_secret and name not in (PAUSED, START)
]


def rows_of(described: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return subscriptions as rows, without Millstream's own."""
    return [_row(subscription) for subscription in described if not subscription["name"].startswith(OWN_PREFIX)]


def _row(described: dict[str, Any]) -> dict[str, Any]:
    queues = described["queues"]
    oldest = max((queue["oldest_age_ms"] for queue in queues if queue["backlog"]), default=None)
    return {
        **summary_of(described),
        "oldest_s": None if oldest is None else oldest / 1000,
        "waiting_workers": sum(queue["waiting_workers"] for queue in queues),
        "redelivered": sum(queue["redelivered"] for queue in queues),
    }


async def list_all(visit: Visit) -> Response:
    search = visit.search.lower()
    order, descending = visit.choice("order", _ORDERS), visit.text("down") == "1"
    rows = [
        row
        for row in await visit.shared(lambda: _all_rows(visit))
        if search in row["subscription"].lower() or any(search in topic.lower() for topic in row["topics"])
    ]
    rows.sort(key=lambda row: -1 if row[order] is None else row[order], reverse=descending)
    context = {
        **visit.paging(len(rows)),
        "subscriptions": visit.on_page(rows),
        "order": order,
        "descending": descending,
        "may_create": not visit.settings.read_only,
    }
    return Page("subscriptions.html", context)


async def _all_rows(visit: Visit) -> list[dict[str, Any]]:
    return rows_of(await visit.services.subscriptions.describe(without_silent=True))


async def create(visit: Visit) -> Response:
    name, topics = visit.text("name"), visit.text("topics").replace(",", " ").split()
    start, condition = visit.choice("start", ("end", "start")), visit.text("filter")
    if not name or not topics:
        raise invalid("enter a name and at least one topic")
    settings = {START: start_of(start), **({FILTER: condition} if condition else {})}
    await visit.services.subscriptions.create(name, topics, settings)
    words = [*(word for topic in topics for word in ("--topic", topic)), "--start", start]
    if condition:
        words += ["--filter", condition]
    return _done(name, f"Subscription {name} is created", "create", name, *words)


async def show(visit: Visit) -> Response:
    """Show a subscription: its queues, leases and settings, and the available actions."""
    name = visit.names["subscription"]
    (described,) = await visit.services.subscriptions.describe([name], leases_max=LEASES_SHOWN)
    leases = sorted(described["leases"], key=lambda lease: (lease["deadline_ms"], lease["topic"], lease["partition"]))
    described["queues"].sort(key=lambda queue: (queue["topic"], queue["partition"]))
    topics: Sequence[str] = described["topics"]
    await visit.look_up(
        *((operation, _GROUP, name) for operation in (Operation.READ, Operation.ALTER_CONFIGS, Operation.DELETE)),
        *((Operation.READ, ResourceType.TOPIC, topic) for topic in topics),
    )
    reads = not described["has_hidden_topics"] and all(
        [await visit.may(Operation.READ, ResourceType.TOPIC, topic) for topic in topics]
    )
    context = {
        "name": name,
        "described": described,
        "row": _row(described),
        "oldest": max(
            (queue for queue in described["queues"] if queue["backlog"]),
            key=lambda queue: queue["oldest_age_ms"],
            default=None,
        ),
        "leases": leases[:LEASES_SHOWN],
        "held": sum(queue["leased"] for queue in described["queues"]),
        "settings": setting_rows(described, _DECLARED),
        "changeable": _CHANGEABLE,
        "may_alter": reads and await visit.may_change(Operation.ALTER_CONFIGS, _GROUP, name),
        "may_seek": reads and await visit.may_change(Operation.READ, _GROUP, name),
        "may_delete": await visit.may_change(Operation.DELETE, _GROUP, name),
        "may_read": reads,
        "plan": None,
        "tried": None,
        "to": visit.text("to"),
        "try_filter": visit.text("filter"),
        "problem": "",
    }
    try:
        if context["to"]:
            context["plan"] = await plan_seek(visit.services.client, described, parse_position(context["to"]))
        if context["try_filter"] and reads:
            context["tried"] = await try_condition(visit, topics, context["try_filter"])
    except MillstreamError as error:
        context["problem"] = str(error)
    return Page("subscription.html", context)


async def try_condition(visit: Visit, topics: Sequence[str], text: str) -> list[dict[str, Any]]:
    """Try a condition on the newest messages of each topic."""
    condition = await compiled(text)
    tried = []
    async with visit.searches.admitted(visit.user):
        for name in topics[:20]:
            with suppress(MillstreamError):
                topic = await find_topic(visit.services.client, name)
                bounds = await offset_bounds(
                    visit.services.client, name, list(topic.partitions), isolation=READ_COMMITTED
                )
                per_partition = max(1, RECENT // max(1, len(bounds)))
                ranges = {
                    index: OffsetRange(max(start, end - per_partition), end) for index, (start, end) in bounds.items()
                }
                progress = Progress()
                await visit.audit_reading(name, "filter", filter=text)
                examples: list[Message] = []
                async for step in visit.searches.read(visit.services, topic, ranges, condition, progress):
                    examples = [*examples, *step][-EXAMPLES:]
                    await asyncio.sleep(0)
                rows = await message_rows(visit, name, reversed(examples))
                tried.append({"topic": name, "read": progress.read, "matched": progress.matched, "rows": rows})
    return tried


async def pause(visit: Visit) -> Response:
    """Stop delivering; leases can still be settled."""
    name = visit.names["subscription"]
    await visit.services.subscriptions.alter(name, {PAUSED: "true"})
    return _done(name, f"{name} is paused", "pause", name)


async def resume(visit: Visit) -> Response:
    name = visit.names["subscription"]
    await visit.services.subscriptions.alter(name, {PAUSED: None})
    return _done(name, f"Subscription {name} is resumed", "resume", name)


async def seek(visit: Visit) -> Response:
    name, to = visit.names["subscription"], visit.text("to")
    visit.confirm(name)
    moved = await visit.services.subscriptions.seek(name, place_of(to))
    return _done(name, f"{len(moved)} queues of {name} moved", "seek", name, "--to", to)


async def purge(visit: Visit) -> Response:
    name = visit.names["subscription"]
    visit.confirm(name)
    await visit.services.subscriptions.seek(name, "latest")
    return _done(name, f"{name} is empty; waiting messages were skipped", "seek", name, "--to", "end")


async def alter(visit: Visit) -> Response:
    name, key, value = visit.names["subscription"], visit.text("setting"), visit.text("setting_value")
    if key not in _CHANGEABLE:
        raise invalid("choose a setting")
    await visit.services.subscriptions.alter(name, {key: value or None})
    return _done(name, f"{name} is changed", "update", name, *_flags(key, value))


def _flags(key: str, value: str) -> tuple[str, ...]:
    """Return the flags of `subscription update` for a setting; without a value it gets its default."""
    if not value:
        return ("--unset", key)
    if key == LEDGER and value in ("true", "false"):
        return ("--ledger" if value == "true" else "--no-ledger",)
    if key not in _FLAGS:
        return ("--set", f"{key}={value}")
    return _FLAGS[key], f"{int(value) / 1000:g}" if key in (LEASE, EXPIRES) and value.isdigit() else value


async def delete(visit: Visit) -> Response:
    """Delete a subscription; messages stay in their topics."""
    name = visit.names["subscription"]
    visit.confirm(name)
    await visit.services.subscriptions.delete(name)
    return done(address("subscriptions"), f"Subscription {name} is deleted", "subscription", "delete", name)


def _done(name: str, text: str, *words: object) -> Done:
    return done(address("subscriptions", name), text, "subscription", *words)


_ONE: Final = "/subscriptions/{subscription}"

ROUTES: Final = (
    PageRoute(path="/subscriptions", handle=list_all),
    change("/subscriptions", create),
    PageRoute(path=_ONE, handle=show),
    change(f"{_ONE}/pause", pause),
    change(f"{_ONE}/resume", resume),
    change(f"{_ONE}/seek", seek),
    change(f"{_ONE}/purge", purge),
    change(f"{_ONE}/settings", alter),
    change(f"{_ONE}/delete", delete),
)
