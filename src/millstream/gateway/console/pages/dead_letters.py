"""Dead letters: grouped by reason and subscription, selected by a filter; redrive or delete the selected ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import Final

from millstream.client.admin.dead_letter import (
    DeadLetterDesk,
    Outcome,
    Wanted,
    dead_letter_topics,
    find_topic,
    headers_of,
    process_letters,
    redrive_letters,
    undeliverable_note,
)
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest
from millstream.gateway.api.message import held_bytes
from millstream.gateway.console.render import counted
from millstream.gateway.console.visit import Answer, Done, Page, PageRoute, Visit, address, change, command
from millstream.protocol.private.subscriptions import LeasedMessage

LOOKED_AT_MAX: Final = 2000
"""Letters that a page looks at for its groups."""
SHOWN: Final = 50
REDRIVEN_MAX: Final = 10_000
PATIENCE_S: Final = 5.0


async def list_all(visit: Visit) -> Answer:
    """List the dead letter topics with their open letters."""
    return Page("dead_letters.html", {"topics": await dead_letter_topics(visit.services.client)})


class _Selected:
    """The letters that a page looks at: the first few to show, and how many there are for each reason."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self.groups: Counter[tuple[str, str]] = Counter()
        self.shown: list[tuple[LeasedMessage, dict[str, str]]] = []
        self._bytes = 0

    async def note(self, _desk: DeadLetterDesk, letter: LeasedMessage) -> None:
        """Count a letter, and keep it if few are shown."""
        headers = headers_of(letter)
        self.groups[headers.get("dlq-subscription", ""), headers.get("dlq-reason", "")] += 1
        if len(self.shown) < SHOWN:
            self._bytes += held_bytes(letter.record)
            self._visit.memory.resize(self._bytes)
            self.shown.append((letter, headers))


def _selects(subscription: str, reason: str) -> str:
    """Return the filter that selects the letters of one group."""
    terms = [
        f"headers['{name}'] = {_quoted(value)}" if value else f"coalesce(headers['{name}'], '') = ''"
        for name, value in (("dlq-subscription", subscription), ("dlq-reason", reason))
    ]
    return " AND ".join(terms)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


async def _wanted(condition: str) -> Wanted | None:
    return await asyncio.to_thread(_matcher, condition) if condition else None


def _matcher(condition: str) -> Wanted:
    # Imported here, in a thread: the filter compiler takes long to load.
    from millstream.protocol.filter.evaluation import matcher

    return matcher(condition)


async def show(visit: Visit) -> Answer:
    """Show the open letters of a topic; they stay open."""
    topic = await find_topic(visit.services.client, visit.names["topic"], patience_s=PATIENCE_S)
    condition = visit.text("filter")
    await visit.note_reading(topic, "letters", filter=condition)
    selected, outcome, problem = _Selected(visit), Outcome(), ""
    try:
        wanted = await _wanted(condition)
        await process_letters(
            _desk(visit, topic), selected.note, outcome, wanted=wanted, limit=LOOKED_AT_MAX, keep=True
        )
    except InvalidRequest as error:
        problem = str(error)
    known = next((one for one in await dead_letter_topics(visit.services.client) if one.topic == topic), None)
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
        "is_cut": outcome.done >= LOOKED_AT_MAX,
        "problem": problem,
        "may_redrive": all(may) and not visit.settings.read_only,
        "redrive_words": _words("redrive", topic, condition),
        "purge_words": _words("purge", topic, condition),
        "redriven_max": REDRIVEN_MAX,
    }
    status = HTTPStatus.UNPROCESSABLE_ENTITY if problem else HTTPStatus.OK
    return Page("dead_letter.html", context, status)


def _words(verb: str, topic: str, condition: str) -> str:
    return command("dlq", verb, topic, *(("--filter", condition) if condition else ()))


def _desk(visit: Visit, topic: str) -> DeadLetterDesk:
    return DeadLetterDesk(visit.services.client, topic, visit.services.new_worker(None), patience_s=PATIENCE_S)


async def redrive(visit: Visit) -> Answer:
    """Deliver the selected messages again, each in its own subscription."""
    topic, condition, wanted = await _chosen(visit)
    outcome = Outcome()
    await redrive_letters(_desk(visit, topic), outcome, wanted=wanted, limit=REDRIVEN_MAX)
    where = ", ".join(f"{number} to {name}" for name, number in sorted(outcome.revived.items()))
    text = f"{counted(outcome.done, 'message')} delivered again" + (f" ({where})" if where else "")
    if outcome.refused:
        text += ". " + undeliverable_note(outcome.refused, "millstream dlq redrive --to-topic TOPIC")
    return _done(topic, outcome, text, _words("redrive", topic, condition))


async def purge(visit: Visit) -> Answer:
    """Close the selected letters without delivering their messages."""

    async def nothing(_desk: DeadLetterDesk, _letter: LeasedMessage) -> None:
        return

    topic, condition, wanted = await _chosen(visit)
    visit.confirm(topic)
    outcome = Outcome()
    await process_letters(_desk(visit, topic), nothing, outcome, wanted=wanted, limit=REDRIVEN_MAX, keep=False)
    return _done(topic, outcome, f"{counted(outcome.done, 'dead letter')} deleted", _words("purge", topic, condition))


async def _chosen(visit: Visit) -> tuple[str, str, Wanted | None]:
    topic = await find_topic(visit.services.client, visit.names["topic"], patience_s=PATIENCE_S)
    condition = visit.text("filter")
    return topic, condition, await _wanted(condition)


def _done(topic: str, outcome: Outcome, text: str, words: str) -> Done:
    if outcome.held:
        text += f"; {counted(outcome.held, 'letter')} held by other commands"
    if outcome.done >= REDRIVEN_MAX:
        text += f"; {REDRIVEN_MAX:,} at a time, repeat for more"
    return Done(address("dead-letters", topic), f"{text}: {words}")


ROUTES: Final = (
    PageRoute(path="/dead-letters", handle=list_all),
    PageRoute(path="/dead-letters/{topic}", handle=show),
    change("/dead-letters/{topic}/redrive", redrive),
    change("/dead-letters/{topic}/purge", purge),
)
