"""`millstream dlq`: list, show, redrive and purge dead letters."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker, complete_subscriptions
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun, Yes, confirm, flag
from millstream.cli.output import (
    as_json_text,
    counted,
    local_time,
    one_line,
    print_line,
    print_list,
    print_note,
    print_result,
)
from millstream.client.admin.dead_letter import (
    DeadLetterClient,
    LetterPass,
    dead_letter_topics,
    find_topic,
    headers_of,
    preview_redrive,
    process_letters,
    redrive_letters,
    undeliverable_note,
)

if TYPE_CHECKING:
    from millstream.protocol.private.subscriptions import LeasedMessage
    from millstream.protocol.wire.client import Client

Work = Callable[[DeadLetterClient, LetterPass], Awaitable[None]]

PATIENCE_S = 5.0
"""How long to wait for a failover before counting letters without some partitions."""

app = Noun(help="List, show, redrive and purge dead letters.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_subscriptions,
        help="The dead letter topic, or a subscription that has one.",
        show_default=False,
    ),
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        "--where",
        metavar="CONDITION",
        help="Only letters that match this condition, such as \"headers['dlq-reason'] LIKE '%timeout%'\".",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("-n", "--limit", metavar="NUMBER", min=1, help="The maximum number of letters.", show_default=False),
]


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List dead letter topics and their number of open letters."""
    topics = call_broker(common, lambda client: dead_letter_topics(client, patience_s=min(common.timeout, PATIENCE_S)))
    print_list(
        {"dead_letters": [asdict(topic) for topic in topics]},
        ["topic", "subscriptions", "letters"],
        [[topic.topic, ", ".join(topic.subscriptions), topic.letters] for topic in topics],
        empty="No subscription keeps dead letters.",
        as_json=common.as_json,
    )
    for topic in topics:
        if topic.unreachable:
            partitions = ", ".join(map(str, topic.unreachable))
            print_note(
                f"Topic {one_line(topic.topic)} may have more letters: partition {partitions} did not respond; "
                "see millstream cluster status."
            )
        for reason in topic.refusals:
            print_note(f"{counted(topic.refused, 'message')} cannot be dead-lettered: {one_line(reason)}")


@app.command("show")
def show(
    name: Name,
    filter_: Filter = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="NUMBER", min=1, help="The maximum number of letters.")
    ] = 10,
    common: Common = COMMON,
) -> None:
    """Show open letters and the reasons for them; they stay open."""

    async def print_one(_dlq: DeadLetterClient, letter: LeasedMessage) -> None:
        _print(letter, as_json=common.as_json)

    async def look(dlq: DeadLetterClient, outcome: LetterPass) -> None:
        await process_letters(dlq, print_one, outcome, keep=True)

    _process_letters(name, filter_, limit, look, common, keep=True)


@app.command("redrive")
def redrive(
    name: Name,
    filter_: Filter = None,
    limit: Limit = None,
    to_topic: Annotated[
        str | None,
        flag(
            "--to-topic",
            "TOPIC",
            "Publish them to this topic, for all of its subscriptions, instead of delivering the originals again.",
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Count what would be redriven, by subscription; every letter stays open.")
    ] = False,
    common: Common = COMMON,
) -> None:
    """Redeliver the messages of open letters. Each goes through its own subscription, and its letter is closed."""
    if dry:
        _preview(name, filter_, limit, to_topic, common)
        return
    if to_topic is not None:
        _publish(name, filter_, limit, to_topic, common)
        return

    async def revive(dlq: DeadLetterClient, outcome: LetterPass) -> None:
        await redrive_letters(dlq, outcome)

    outcome = _process_letters(name, filter_, limit, revive, common, keep=False)
    document = {"redriven": outcome.done, **_as_json(outcome), "subscriptions": outcome.revived}
    document |= {"refused": sum(outcome.refused.values()), "reasons": sorted(outcome.refused)}
    text = f"Redrove {counted(outcome.done, 'letter')}{_by_name(outcome.revived, 'in')}{_unmatched(outcome)}."
    print_result(document, text, as_json=common.as_json)
    if outcome.refused:
        raise CommandFailed(
            undeliverable_note(outcome.refused, f"millstream dlq redrive {name} --to-topic TOPIC"), ExitCode.CONFLICT
        )


def _preview(name: str, filter_: str | None, limit: int | None, to_topic: str | None, common: Common) -> None:
    outcome = _run_preview(name, filter_, limit, to_topic, common)
    refused_count = sum(outcome.refused.values())
    if to_topic is not None:
        # Published from the letters themselves, whether or not the originals still exist.
        total = outcome.done + refused_count
        document: dict[str, object] = {
            "would_redrive": total,
            **_as_json(outcome),
            "topics": {to_topic: total} if total else {},
        }
        text = f"Would publish {counted(total, 'letter')} to {one_line(to_topic)}{_unmatched(outcome)}."
    else:
        document = {"would_redrive": outcome.done, **_as_json(outcome), "subscriptions": outcome.revived}
        document |= {"refused": refused_count, "reasons": sorted(outcome.refused)}
        where = _by_name(outcome.revived, "in")
        text = f"Would redrive {counted(outcome.done, 'letter')}{where}{_unmatched(outcome)}."
        if refused_count:
            reasons = "; ".join(one_line(f"{reason} ({number:,})") for reason, number in outcome.refused.items())
            text += f" {counted(refused_count, 'letter')} would stay open: {reasons}."
    print_result(document, text, as_json=common.as_json)


def _run_preview(name: str, filter_: str | None, limit: int | None, to_topic: str | None, common: Common) -> LetterPass:
    async def count(dlq: DeadLetterClient, outcome: LetterPass) -> None:
        if to_topic is not None:
            await dlq.check_target(to_topic)
        await preview_redrive(dlq, outcome)

    return _process_letters(name, filter_, limit, count, common, keep=True)


def _publish(name: str, filter_: str | None, limit: int | None, topic: str, common: Common) -> None:
    async def send(dlq: DeadLetterClient, letter: LeasedMessage) -> None:
        await dlq.publish(letter, topic)

    async def publish(dlq: DeadLetterClient, outcome: LetterPass) -> None:
        await dlq.check_target(topic)
        await process_letters(dlq, send, outcome, keep=False)

    outcome = _process_letters(name, filter_, limit, publish, common, keep=False)
    sent = {topic: outcome.done} if outcome.done else {}
    text = f"Redrove {counted(outcome.done, 'letter')}{_by_name(sent, 'to')}{_unmatched(outcome)}."
    print_result({"redriven": outcome.done, **_as_json(outcome), "topics": sent}, text, as_json=common.as_json)


def _by_name(counts: dict[str, int], preposition: str) -> str:
    # The sentence begins with the total, which is also the count of a single name.
    listed = ", ".join(
        f"{one_line(name)} ({number:,})" if len(counts) > 1 else one_line(name)
        for name, number in sorted(counts.items())
    )
    return f" {preposition} {listed}" if listed else ""


@app.command("purge")
def purge(
    name: Name,
    filter_: Filter = None,
    limit: Limit = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Count what would be closed; every letter stays open.")
    ] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> None:
    """Close open letters without redelivering them. They stay in their topic until its retention deletes them."""
    if dry:
        preview = _run_preview(name, filter_, limit, None, common)
        text = f"Would close {counted(preview.selected, 'letter')}{_unmatched(preview)}."
        print_result({"would_purge": preview.selected, **_as_json(preview)}, text, as_json=common.as_json)
        return
    confirm(f"Close the open letters of {name}?", unless=yes or common.as_json)

    async def close(dlq: DeadLetterClient, outcome: LetterPass) -> None:
        await process_letters(dlq, None, outcome, keep=False)

    outcome = _process_letters(name, filter_, limit, close, common, keep=False)
    text = f"Closed {counted(outcome.done, 'letter')}{_unmatched(outcome)}."
    print_result({"purged": outcome.done, **_as_json(outcome)}, text, as_json=common.as_json)


def _process_letters(
    name: str, filter_: str | None, limit: int | None, work: Work, common: Common, *, keep: bool
) -> LetterPass:
    outcome = LetterPass(limit=limit, on_progress=_print_progress)

    async def operation(client: Client) -> None:
        from millstream.protocol.filter.filter import matcher

        outcome.matches = None if filter_ is None else matcher(filter_)
        topic = await find_topic(client, name, patience_s=common.timeout)
        dlq = DeadLetterClient(client, topic, f"cli/{socket.gethostname()}-{os.getpid()}", patience_s=common.timeout)
        await work(dlq, outcome)

    try:
        call_broker(common, operation)
    except BaseException:
        if outcome.has_begun and not keep:
            print_note(_progress_text(outcome))
        raise
    _print_rest(outcome, keep=keep)
    return outcome


def _as_json(outcome: LetterPass) -> dict[str, int]:
    return {
        "skipped": outcome.unmatched,
        "held": outcome.held,
        "held_back": outcome.held_back,
        "uncertain": outcome.uncertain,
    }


def _unmatched(outcome: LetterPass) -> str:
    return f"; {outcome.unmatched:,} did not match" if outcome.unmatched else ""


def _progress_text(outcome: LetterPass) -> str:
    doubt = ""
    if outcome.in_progress:
        more = "one more" if outcome.in_progress == 1 else f"up to {outcome.in_progress:,} more"
        doubt = f"; {more} may have been processed, and may or may not be closed"
    return f"{counted(outcome.done, 'letter')} processed before that{doubt}. The others are open again within a minute."


def _print_rest(outcome: LetterPass, *, keep: bool) -> None:
    if outcome.uncertain:
        print_note(
            f"{counted(outcome.uncertain, 'letter')} lost the lease in a failover: processed, but possibly still "
            "open, so another run may repeat it."
        )
    if outcome.held:
        verb = "is" if outcome.held == 1 else "are"
        back = "comes" if outcome.held == 1 else "come"
        print_note(f"{counted(outcome.held, 'letter')} {verb} held by another command and {back} back within a minute.")
    if outcome.held_back:
        print_note(
            f"{counted(outcome.held_back, 'letter')} that stayed open can be processed by others after a minute."
        )
    if outcome.unreachable:
        print_note(f"{counted(outcome.unreachable, 'partition')} could not be reached; see millstream cluster status.")
    if keep and not outcome.done and not outcome.held:
        print_note("No open letters" + (" match." if outcome.unmatched else "."))


def _print_progress(done: int) -> None:
    if sys.stderr.isatty():
        print_note(f"{done:,} done")


def _print(letter: LeasedMessage, *, as_json: bool) -> None:
    from millstream.cli.message_text import readable_value
    from millstream.client.admin.messages import as_document

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
