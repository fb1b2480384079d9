"""Dead letters: grouped by reason and subscription, selected by a filter; redrive or delete the selected ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

from millstream.client.admin.dead_letter import (
    DeadLetterClient,
    LetterPass,
    compile_letter_filter,
    dead_letter_topics,
    find_topic,
    headers_of,
    preview_redrive,
    process_letters,
    redrive_letters,
    undeliverable_note,
)
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest
from millstream.gateway.api.message import held_bytes
from millstream.gateway.api.services import Services
from millstream.gateway.console.render import counted
from millstream.gateway.console.tasks import Task, TaskProgress
from millstream.gateway.console.visit import Page, PageRoute, Response, Visit, address, change, command
from millstream.protocol.filter.node import quoted
from millstream.protocol.private.subscriptions import LeasedMessage

LOOKED_AT_MAX: Final = 2000
"""Letters that a page looks at for its groups."""
SHOWN: Final = 50
PATIENCE_S: Final = 5.0


async def list_all(visit: Visit) -> Response:
    return Page("dead_letters.html", {"topics": await dead_letter_topics(visit.services.client)})


class _LetterSelection:
    """The letters that a page looks at: the first few to show, and how many there are for each reason."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self.groups: Counter[tuple[str, str]] = Counter()
        self.shown: list[tuple[LeasedMessage, dict[str, str]]] = []
        self._bytes = 0

    async def note(self, _dlq: DeadLetterClient, letter: LeasedMessage) -> None:
        """Count a letter, and keep it if few are shown."""
        headers = headers_of(letter)
        self.groups[headers.get("dlq-subscription", ""), headers.get("dlq-reason", "")] += 1
        if len(self.shown) < SHOWN:
            self._bytes += held_bytes(letter.record)
            self._visit.memory.resize(self._bytes)
            self.shown.append((letter, headers))


def _selects(subscription: str, reason: str) -> str:
    terms = [
        f"headers['{name}'] = {quoted(value)}" if value else f"coalesce(headers['{name}'], '') = ''"
        for name, value in (("dlq-subscription", subscription), ("dlq-reason", reason))
    ]
    return " AND ".join(terms)


async def show(visit: Visit) -> Response:
    """Show the open letters of a topic; they stay open."""
    topic = await find_topic(visit.services.client, visit.names["topic"], patience_s=PATIENCE_S)
    condition = visit.text("filter")
    await visit.audit_reading(topic, "letters", filter=condition)
    selected, outcome, problem = _LetterSelection(visit), LetterPass(limit=LOOKED_AT_MAX), ""
    try:
        outcome.matches = await compile_letter_filter(condition or None)
        await process_letters(_dlq(visit, topic), selected.note, outcome, keep=True)
    except InvalidRequest as error:
        problem = str(error)
    known = next(
        (
            dead_letter_topic
            for dead_letter_topic in await dead_letter_topics(visit.services.client)
            if dead_letter_topic.topic == topic
        ),
        None,
    )
    names = [] if known is None else known.subscriptions
    await visit.look_up(*((Operation.READ, ResourceType.GROUP, name) for name in names))
    may = [await visit.may_change(Operation.READ, ResourceType.GROUP, name) for name in names]
    context = {
        "topic": topic,
        "known": known,
        "condition": condition,
        "groups": [(*group, count, _selects(*group)) for group, count in selected.groups.most_common(200)],
        "letters": selected.shown,
        "outcome": outcome,
        "looked_at": LOOKED_AT_MAX,
        "is_truncated": outcome.done >= LOOKED_AT_MAX,
        "problem": problem,
        "may_redrive": all(may) and not visit.settings.read_only,
        "redrive_words": _words("redrive", topic, condition),
        "purge_words": _words("purge", topic, condition),
    }
    status = HTTPStatus.UNPROCESSABLE_ENTITY if problem else HTTPStatus.OK
    return Page("dead_letter.html", context, status)


def _words(verb: str, topic: str, condition: str, *flags: str) -> str:
    return command("dlq", verb, topic, *(("--filter", condition) if condition else ()), *flags)


def _dlq(visit: Visit, topic: str, services: Services | None = None) -> DeadLetterClient:
    used = services or visit.services
    return DeadLetterClient(used.client, topic, used.new_worker(None), patience_s=PATIENCE_S)


async def redrive(visit: Visit) -> Response:
    """Deliver the selected messages again, each in its own subscription, or only count them."""
    if visit.text("only") == "check":
        return await _count(visit, is_redrive=True)

    async def act(dlq: DeadLetterClient, outcome: LetterPass) -> str:
        await redrive_letters(dlq, outcome)
        text = f"{counted(outcome.done, 'message')} delivered again{_by_name(outcome.revived, 'to')}"
        if outcome.refused:
            text += ". " + undeliverable_note(outcome.refused, "millstream dlq redrive --to-topic TOPIC")
        return text

    return await _task(visit, "Redrive letters of", act, "redrive")


async def purge(visit: Visit) -> Response:
    """Close the selected letters without delivering their messages, or only count them."""
    if visit.text("only") == "check":
        return await _count(visit, is_redrive=False)

    async def act(dlq: DeadLetterClient, outcome: LetterPass) -> str:
        await process_letters(dlq, None, outcome, keep=False)
        return f"{counted(outcome.done, 'dead letter')} deleted"

    visit.confirm(await find_topic(visit.services.client, visit.names["topic"], patience_s=PATIENCE_S))
    return await _task(visit, "Delete letters of", act, "purge")


async def _count(visit: Visit, *, is_redrive: bool) -> Response:
    """Count the letters that a change would affect; every letter stays open."""

    async def act(dlq: DeadLetterClient, outcome: LetterPass) -> str:
        await preview_redrive(dlq, outcome)
        if not is_redrive:
            return f"{counted(outcome.selected, 'letter')} would be deleted; nothing was changed"
        redriven = f"{counted(outcome.done, 'letter')} would be redriven{_by_name(outcome.revived, 'in')}"
        text = f"{redriven}; nothing was changed"
        if stays := sum(outcome.refused.values()):
            reasons = "; ".join(f"{reason} ({number:,})" for reason, number in sorted(outcome.refused.items()))
            text += f". {counted(stays, 'letter')} would stay open: {reasons}"
        return text

    return await _task(visit, "Count letters of", act, "redrive" if is_redrive else "purge", "--dry-run")


async def _task(
    visit: Visit,
    title: str,
    act: Callable[[DeadLetterClient, LetterPass], Awaitable[str]],
    *words: str,
) -> Response:
    """Process the selected letters in a task; if it ends within a moment, respond with its result."""
    topic = await find_topic(visit.services.client, visit.names["topic"], patience_s=PATIENCE_S)
    condition = visit.text("filter")
    outcome = LetterPass(await compile_letter_filter(condition or None))
    known = next(
        (
            dead_letter_topic
            for dead_letter_topic in await dead_letter_topics(visit.services.client)
            if dead_letter_topic.topic == topic
        ),
        None,
    )
    total = 0 if known is None else known.letters
    is_redrive = words == ("redrive",)

    def measure() -> TaskProgress:
        # A redrive finds letters first, and then delivers their messages: each is half of the way.
        delivered = sum(outcome.revived.values()) + sum(outcome.refused.values())
        found = (outcome.selected + delivered) / 2 if is_redrive else outcome.selected
        text = f"{counted(outcome.selected + outcome.unmatched, 'letter')} of {total:,} examined"
        text += f", {outcome.selected:,} match" if condition else ""
        text += f", {delivered:,} messages delivered" if is_redrive else ""
        return TaskProgress(min(1.0, (found + outcome.unmatched) / max(1, total)), text)

    async def process(_task: Task, services: Services) -> str:
        text = await act(_dlq(visit, topic, services), outcome)
        if outcome.held:
            text += f"; left out: {counted(outcome.held, 'letter')} held by other commands for up to a minute"
        if outcome.held_back:
            text += (
                f"; {counted(outcome.held_back, 'letter')} that stayed open can be redriven or deleted after a minute"
            )
        return text + ("; stopped before the rest" if outcome.is_stopped else "")

    verb, *flags = words
    back = address("dead-letters", topic)
    if condition and flags:
        # What was counted stays selected, so that the next click changes that and nothing else.
        back += f"?{urlencode({'filter': condition})}"
    task = Task(visit.user, visit.session, f"{title} {topic}", back, _words(verb, topic, condition, *flags))
    task.measure = measure
    task.on_stop = lambda: setattr(outcome, "is_stopped", True)
    return (await visit.tasks.start(task, process, visit.acting)).response()


def _by_name(counts: Mapping[str, int], preposition: str) -> str:
    listed = ", ".join(f"{number:,} {preposition} {name}" for name, number in sorted(counts.items()))
    return f" ({listed})" if listed else ""


ROUTES: Final = (
    PageRoute(path="/dead-letters", handle=list_all),
    PageRoute(path="/dead-letters/{topic}", handle=show),
    change("/dead-letters/{topic}/redrive", redrive),
    change("/dead-letters/{topic}/purge", purge),
)
