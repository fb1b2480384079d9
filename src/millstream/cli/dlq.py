"""`millstream dlq`: list, show, redrive and purge dead letters."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import ask
from millstream.cli.options import DEFAULT_BROKERS, DEFAULT_TIMEOUT_S, AsJson, Brokers, TimeoutSeconds, Yes, ask_person
from millstream.cli.output import as_json_text, counted, one_line, print_json, print_line, print_note, print_table
from millstream.model.errors import InvalidRecordState

if TYPE_CHECKING:
    from millstream.cli.dead_letter import DeadLetterDesk, DeadLetterTopic
    from millstream.wire.client import Client
    from millstream.wire.subscriptions import LeasedMessage

app = typer.Typer(help="List, show, redrive and purge dead letters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The dead letter topic, or a subscription that has one.", show_default=False)]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        metavar="CONDITION",
        help="Only these, as in \"headers['dlq-reason'] LIKE '%timeout%'\".",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None, typer.Option("-n", "--limit", metavar="NUMBER", min=1, help="At most so many.", show_default=False)
]
Act = Callable[["DeadLetterDesk", "LeasedMessage"], Awaitable[None]]


@app.command("list")
def list_(
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """List dead letter topics and how many letters are open."""

    async def question(client: Client) -> list[DeadLetterTopic]:
        from millstream.cli.dead_letter import dead_letter_topics

        return await dead_letter_topics(client)

    found = ask(brokers, timeout, question)
    if as_json:
        print_json({"dead_letters": [one._asdict() for one in found]})
    elif found:
        print_table(
            ["topic", "subscriptions", "letters"],
            [[one.topic, ", ".join(one.subscriptions), one.letters] for one in found],
        )
    else:
        print_line("No subscription has a dead letter topic; give it one with --dead-letter.")


@app.command("show")
def show(
    name: Name,
    filter_: Filter = None,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="NUMBER", min=1, help="At most so many.")] = 10,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Show open letters with their story; they stay open."""

    async def nothing(_desk: DeadLetterDesk, letter: LeasedMessage) -> None:
        _print(letter, as_json=as_json)

    _work(name, filter_, limit, nothing, keep=True, brokers=brokers, timeout=timeout)


@app.command("redrive")
def redrive(
    name: Name,
    filter_: Filter = None,
    limit: Limit = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC", help="Another topic than the one they came from.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Publish open letters again, where they came from, and close them. Their message ids stay the same."""
    sent: dict[str, int] = {}

    async def send(desk: DeadLetterDesk, letter: LeasedMessage) -> None:
        topic = await desk.send_back(letter, to)
        sent[topic] = sent.get(topic, 0) + 1

    done, left = _work(name, filter_, limit, send, keep=False, brokers=brokers, timeout=timeout)
    if as_json:
        print_json({"redriven": done, "skipped": left, "topics": sent})
    else:
        where = f" to {', '.join(f'{topic} ({number:,})' for topic, number in sorted(sent.items()))}" if sent else ""
        print_line(
            f"Redrove {counted(done, 'letter')}{where}; {left:,} did not match."
            if left
            else f"Redrove {counted(done, 'letter')}{where}."
        )


@app.command("purge")
def purge(
    name: Name,
    filter_: Filter = None,
    limit: Limit = None,
    yes: Yes = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Close open letters without publishing them; they stay in their topic until its retention takes them."""
    ask_person(f"Close the open letters of {name}?", unless=yes or as_json)

    async def nothing(_desk: DeadLetterDesk, _letter: LeasedMessage) -> None:
        return

    done, left = _work(name, filter_, limit, nothing, keep=False, brokers=brokers, timeout=timeout)
    if as_json:
        print_json({"purged": done, "skipped": left})
    else:
        print_line(f"Closed {counted(done, 'letter')}.")


def _work(
    name: str, filter_: str | None, limit: int | None, act: Act, *, keep: bool, brokers: str, timeout: float
) -> tuple[int, int]:
    """Do something with every open letter that is meant; how many were, and how many were not."""

    async def question(client: Client) -> tuple[int, int]:
        from millstream.cli.dead_letter import ACCEPT, HELD_MAX, RELEASE, DeadLetterDesk, find_topic, matcher

        wanted = matcher(filter_)
        topic = await find_topic(client, name)
        desk = DeadLetterDesk(client, topic, f"cli/{socket.gethostname()}-{os.getpid()}")
        await desk.open()
        held: list[LeasedMessage] = []
        done = skipped = 0
        try:
            async for letters in desk.letters(HELD_MAX):
                for letter in letters:
                    if (limit is not None and done >= limit) or not wanted(letter):
                        held.append(letter)
                        skipped += 1
                        continue
                    await act(desk, letter)
                    done += 1
                    if keep:
                        held.append(letter)
                    else:
                        await desk.settle([letter], ACCEPT)
                if not keep:
                    _tell(done)
                if limit is not None and done >= limit:
                    break
        finally:
            # What was held for too long is free already, and that must not hide how the work went.
            with suppress(InvalidRecordState):
                await desk.settle(held, RELEASE)
        return done, skipped

    return ask(brokers, timeout, question)


def _tell(done: int) -> None:
    import sys

    if sys.stderr.isatty():
        print_note(f"{done:,} done")


def _print(letter: LeasedMessage, *, as_json: bool) -> None:
    from millstream.cli.dead_letter import headers_of
    from millstream.cli.message_text import as_document, local_time, readable_value

    headers = headers_of(letter)
    if as_json:
        print_line(as_json_text(as_document(letter.topic, letter.topic_id, letter.partition, letter.record)))
        return
    origin = f"{headers.get('dlq-topic')}/{headers.get('dlq-partition')}@{headers.get('dlq-offset')}"
    print_line(
        one_line(
            f"{origin}  {local_time(letter.record.timestamp_ms)}  {headers.get('dlq-subscription')}: "
            f"{headers.get('dlq-reason') or 'no reason given'} (attempts: {headers.get('dlq-attempts')})"
        )
    )
    print_line(readable_value(letter.record.value))
