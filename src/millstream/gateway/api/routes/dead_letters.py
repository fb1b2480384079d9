"""Dead letters: list their topics, show open ones, redrive and purge them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.dead_letter import (
    DeadLetterClient,
    DeadLetterTopic,
    LetterFilter,
    LetterPass,
    compile_letter_filter,
    dead_letter_topics,
    find_topic,
    process_letters,
    redrive_letters,
    undeliverable_note,
)
from millstream.gateway.api.message import ReceivedMessage, received
from millstream.gateway.api.problem import Refused, invalid
from millstream.gateway.api.route import NoFields, Request, Route, TopicName
from millstream.gateway.api.services import Services
from millstream.protocol.private.subscriptions import LeasedMessage

PATIENCE_S: Final = 10.0
SHOWN_MAX: Final = 100
SHOWN_BYTES_MAX: Final = 8 * 1024 * 1024
WORKED_ON_MAX: Final = 1000
"""The most letters that one request redrives or purges, so that no request takes long; repeat it for more."""

Condition = Annotated[str, Meta(max_length=8192, description="A condition in the filter language.")]
ShortCondition = Annotated[
    str, Meta(max_length=4096, description="A condition in the filter language, limited to the length of a URL.")
]
Number = Annotated[int, Meta(ge=1, le=WORKED_ON_MAX)]


class DeadLetterList(msgspec.Struct, frozen=True):
    """Dead letter topics, by name."""

    dead_letters: list[DeadLetterTopic]


class Letters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The letters to show."""

    filter: ShortCondition | None = None
    limit: Annotated[int, Meta(ge=1, le=SHOWN_MAX)] = 10


class LetterList(msgspec.Struct, frozen=True):
    """Open letters; the headers `dlq-…` record what happened to them."""

    topic: str
    letters: list[ReceivedMessage]
    held: int
    """Letters leased by others."""
    held_back: int
    """Letters that this request examined and left open, but that others get only a minute later."""


class Redrive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The letters to deliver again."""

    filter: Condition | None = None
    limit: Number = WORKED_ON_MAX
    to_topic: TopicName | None = None
    """Publish the letters to this topic, for all of its subscriptions, instead of delivering the originals again."""


class Purge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The letters to close."""

    filter: Condition | None = None
    limit: Number = WORKED_ON_MAX


class LettersProcessed(msgspec.Struct, frozen=True):
    """The outcome of a redrive or purge."""

    topic: str
    done: int
    skipped: int
    """Letters that did not match the filter."""
    held: int
    """Letters leased by others."""
    held_back: int
    """Letters that did not match and stay open, but that others get only a minute later."""
    uncertain: int
    """Letters that were processed, but whose leases expired meanwhile, so that they may still be open."""
    topics: dict[str, int] = {}
    """Published letters, by target topic."""
    subscriptions: dict[str, int] = {}
    """Redelivered letters, by subscription."""
    refused: int = 0
    """Letters left open because their messages cannot be delivered again; `to_topic` publishes them."""
    reasons: list[str] = []


async def list_topics(services: Services, request: Request[NoFields, NoFields]) -> DeadLetterList:
    return DeadLetterList(await dead_letter_topics(services.client))


async def show(services: Services, request: Request[Letters, NoFields]) -> LetterList:
    """Show open letters; they stay open."""
    shown: list[ReceivedMessage] = []
    request.memory.reserve(SHOWN_BYTES_MAX)
    size = 0

    async def note(_dlq: DeadLetterClient, letter: LeasedMessage) -> None:
        nonlocal size
        size += len(letter.record.value or b"")
        if size > SHOWN_BYTES_MAX:
            raise invalid(f"the letters have more than {SHOWN_BYTES_MAX} bytes; request fewer")
        shown.append(received(letter.topic, letter.topic_id, letter.partition, letter.record))

    dlq, matches = await _dlq(services, request.path["name"], request.query.filter)
    outcome = LetterPass(matches, request.query.limit)
    await process_letters(dlq, note, outcome, keep=True)
    return LetterList(dlq.topic, shown, outcome.held, outcome.held_back)


async def redrive(services: Services, request: Request[NoFields, Redrive]) -> LettersProcessed:
    """Deliver the messages of open letters again, each to its own subscription, and close the letters."""
    body = request.body
    dlq, matches = await _dlq(services, request.path["name"], body.filter)
    outcome = LetterPass(matches, body.limit)
    if (to_topic := body.to_topic) is not None:
        await dlq.check_target(to_topic)
        await process_letters(dlq, lambda dlq, letter: dlq.publish(letter, to_topic), outcome, keep=False)
        return _letters_processed(dlq.topic, outcome, {to_topic: outcome.done} if outcome.done else {})
    await redrive_letters(dlq, outcome)
    if outcome.refused and not outcome.done:
        raise Refused(HTTPStatus.CONFLICT, undeliverable_note(outcome.refused, 'set "to_topic"'))
    return _letters_processed(dlq.topic, outcome, {})


async def purge(services: Services, request: Request[NoFields, Purge]) -> LettersProcessed:
    """Close open letters without delivering their messages."""
    body = request.body
    dlq, matches = await _dlq(services, request.path["name"], body.filter)
    outcome = LetterPass(matches, body.limit)
    await process_letters(dlq, None, outcome, keep=False)
    return _letters_processed(dlq.topic, outcome, {})


async def _dlq(services: Services, name: str, condition: str | None) -> tuple[DeadLetterClient, LetterFilter | None]:
    matches = await compile_letter_filter(condition)
    topic = await find_topic(services.client, name, patience_s=PATIENCE_S)
    return DeadLetterClient(services.client, topic, services.new_worker(None), patience_s=PATIENCE_S), matches


def _letters_processed(topic: str, outcome: LetterPass, sent: dict[str, int]) -> LettersProcessed:
    return LettersProcessed(
        topic,
        outcome.done,
        outcome.unmatched,
        outcome.held,
        outcome.held_back,
        outcome.uncertain,
        sent,
        outcome.revived,
        sum(outcome.refused.values()),
        sorted(outcome.refused),
    )


ROUTES: Final = (
    Route("GET", "/dead-letters", "List dead letter topics", list_topics, DeadLetterList),
    Route(
        "GET",
        "/dead-letters/{name}",
        "Show open letters of a topic, or of a subscription",
        show,
        LetterList,
        query=Letters,
    ),
    Route(
        "POST",
        "/dead-letters/{name}/redrive",
        "Deliver open letters again, and close them",
        redrive,
        LettersProcessed,
        body=Redrive,
    ),
    Route("POST", "/dead-letters/{name}/purge", "Close open letters", purge, LettersProcessed, body=Purge),
)
