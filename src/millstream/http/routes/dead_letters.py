"""Dead letters: list their topics, show open ones, redrive and purge them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.admin.dead_letter import DeadLetterDesk, dead_letter_topics, find_topic
from millstream.admin.letter_pass import Act, Outcome, Wanted, work_through
from millstream.http.message import ReceivedMessage, received
from millstream.http.parts import Parts
from millstream.http.problem import invalid
from millstream.http.route import Asked, Nothing, Route
from millstream.wire.subscriptions import LeasedMessage

PATIENCE_S: Final = 10.0
SHOWN_MAX: Final = 100
SHOWN_BYTES_MAX: Final = 8 * 1024 * 1024
WORKED_ON_MAX: Final = 1000
"""More are redriven or purged by asking again, so that no request takes long."""

Condition = Annotated[str, Meta(max_length=8192, description="Only these, in the language of subscriptions' filters.")]
Number = Annotated[int, Meta(ge=1, le=WORKED_ON_MAX)]


class DeadLetters(msgspec.Struct, frozen=True):
    """A dead letter topic, the subscriptions that write to it, and how many letters are open."""

    topic: str
    subscriptions: list[str]
    letters: int


class DeadLetterList(msgspec.Struct, frozen=True):
    """Dead letter topics, by their names."""

    dead_letters: list[DeadLetters]


class Letters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which letters to show."""

    filter: Condition | None = None
    limit: Annotated[int, Meta(ge=1, le=SHOWN_MAX)] = 10


class LetterList(msgspec.Struct, frozen=True):
    """Open letters; the headers `dlq-…` tell their story. `held` are with somebody else now."""

    topic: str
    letters: list[ReceivedMessage]
    held: int


class Redrive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which letters to publish again, and where."""

    filter: Condition | None = None
    limit: Number = WORKED_ON_MAX
    to: str | None = None
    """Another topic than the one they came from."""


class Purge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which letters to close."""

    filter: Condition | None = None
    limit: Number = WORKED_ON_MAX


class WorkedOn(msgspec.Struct, frozen=True):
    """What became of the letters of a topic."""

    topic: str
    done: int
    skipped: int
    """Those that did not match."""
    held: int
    """Those that are with somebody else now."""
    doubtful: int
    """Done, but their leases were lost meanwhile, so that they may be open still."""
    topics: dict[str, int] = {}
    """Where they went."""


async def list_topics(parts: Parts, asked: Asked[Nothing, Nothing]) -> DeadLetterList:
    """All dead letter topics."""
    found = await dead_letter_topics(parts.client)
    return DeadLetterList([DeadLetters(one.topic, one.subscriptions, one.letters) for one in found])


async def show(parts: Parts, asked: Asked[Letters, Nothing]) -> LetterList:
    """Open letters with their story; they stay open."""
    shown: list[ReceivedMessage] = []
    asked.room.reserve(SHOWN_BYTES_MAX)
    size = 0

    async def note(_desk: DeadLetterDesk, letter: LeasedMessage) -> None:
        nonlocal size
        size += len(letter.record.value or b"")
        if size > SHOWN_BYTES_MAX:
            raise invalid(f"more than {SHOWN_BYTES_MAX} bytes are not shown at once; ask for fewer letters")
        shown.append(received(letter.topic, letter.topic_id, letter.partition, letter.record))

    topic, outcome = await _work(parts, asked.path["name"], asked.query.filter, asked.query.limit, note, keep=True)
    return LetterList(topic, shown, outcome.held)


async def redrive(parts: Parts, asked: Asked[Nothing, Redrive]) -> WorkedOn:
    """Publish open letters again, where they came from, and close them."""
    said = asked.body
    sent: dict[str, int] = {}

    async def send(desk: DeadLetterDesk, letter: LeasedMessage) -> None:
        topic = await desk.send_back(letter, said.to)
        sent[topic] = sent.get(topic, 0) + 1

    topic, outcome = await _work(parts, asked.path["name"], said.filter, said.limit, send, keep=False, to=said.to)
    return _worked_on(topic, outcome, sent)


async def purge(parts: Parts, asked: Asked[Nothing, Purge]) -> WorkedOn:
    """Close open letters without publishing them."""

    async def nothing(_desk: DeadLetterDesk, _letter: LeasedMessage) -> None:
        return

    said = asked.body
    return _worked_on(*await _work(parts, asked.path["name"], said.filter, said.limit, nothing, keep=False), {})


async def _work(
    parts: Parts, name: str, condition: str | None, limit: int, act: Act, *, keep: bool, to: str | None = None
) -> tuple[str, Outcome]:
    wanted = None if condition is None else await asyncio.to_thread(_matcher, condition)
    topic = await find_topic(parts.client, name)
    desk = DeadLetterDesk(parts.client, topic, parts.new_worker(None), patience_s=PATIENCE_S)
    if to is not None:
        await desk.check_target(to)
    outcome = Outcome()
    await work_through(desk, act, outcome, wanted=wanted, limit=limit, keep=keep)
    return topic, outcome


def _matcher(condition: str) -> Wanted:
    # Imported here, in a thread: what reads conditions takes a while to load.
    from millstream.subscriptions.filter.matcher import matcher

    return matcher(condition)


def _worked_on(topic: str, outcome: Outcome, sent: dict[str, int]) -> WorkedOn:
    return WorkedOn(topic, outcome.done, outcome.unmatched, outcome.held, outcome.doubtful, sent)


_SHARED: Final[dict[str, Any]] = {"tag": "dead letters"}

ROUTES: Final = (
    Route(
        method="GET",
        path="/dead-letters",
        summary="List dead letter topics",
        handle=list_topics,
        query=Nothing,
        body=Nothing,
        answer=DeadLetterList,
        **_SHARED,
    ),
    Route(
        method="GET",
        path="/dead-letters/{name}",
        summary="Show open letters of a topic, or of a subscription",
        handle=show,
        query=Letters,
        body=Nothing,
        answer=LetterList,
        **_SHARED,
    ),
    Route(
        method="POST",
        path="/dead-letters/{name}/redrive",
        summary="Publish open letters again, and close them",
        handle=redrive,
        query=Nothing,
        body=Redrive,
        answer=WorkedOn,
        **_SHARED,
    ),
    Route(
        method="POST",
        path="/dead-letters/{name}/purge",
        summary="Close open letters",
        handle=purge,
        query=Nothing,
        body=Purge,
        answer=WorkedOn,
        **_SHARED,
    ),
)
