"""`millstream tail`: show the messages of a topic."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker, complete_topics
from millstream.cli.exit_code import CommandFailed
from millstream.cli.options import COMMON, Common, Partitions, flag
from millstream.cli.output import as_json_text, print_bytes, print_note
from millstream.client.admin.position import POSITION_HELP, Kind, Position, parse_position
from millstream.core.errors import QuotaExceeded, UnknownTopic

if TYPE_CHECKING:
    from millstream.client.admin.messages import DecodedRecord
    from millstream.client.admin.tailer import Message, Tailer
    from millstream.core.ids import OffsetRange
    from millstream.protocol.records.record import Record
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata

LAST_DEFAULT = 10
LAST_MAX = 100_000

Topic = Annotated[str, typer.Argument(autocompletion=complete_topics, help="The topic to show.", show_default=False)]
Show = Callable[["Message"], Awaitable[bytes]]


class Isolation(StrEnum):
    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"

    @property
    def level(self) -> int:
        return 1 if self is Isolation.COMMITTED else 0


def tail(
    topic: Topic,
    position: Annotated[
        str | None, flag("--from", "POSITION", f"Where to start: {POSITION_HELP}. Default: the last messages.")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--number",
            metavar="NUMBER",
            min=0,
            max=LAST_MAX,
            help="How many messages. Default: 10, or all with --from.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new messages.")] = False,
    partition: Partitions = None,
    isolation: Annotated[
        Isolation,
        typer.Option(help="Show only records of committed transactions, or those of open and aborted ones too."),
    ] = Isolation.COMMITTED,
    raw: Annotated[bool, typer.Option("--raw", help="Print only the values, one per line, unchanged.")] = False,
    common: Common = COMMON,
) -> None:
    """Show the last messages of a topic, or those from a position.

    Without --from: the last -n messages, then with --follow new ones. With --from: everything from there up to the end
    of the topic, at most -n messages, then with --follow new ones. Messages are in order within a partition. Messages
    behind an open transaction are shown once it has ended, or at once with --isolation uncommitted.
    """
    if raw and common.as_json:
        raise typer.BadParameter("pass --raw or --json, not both")
    begin = None if position is None else parse_position(position)

    async def operation(client: Client) -> None:
        from millstream.client.admin.tailer import Tailer
        from millstream.client.admin.topics import find_topic, offset_bounds, offsets_at

        topic_metadata = await find_topic(client, topic)
        partitions = _select_partitions(topic_metadata, partition)
        level = isolation.level
        # Requested first, so that messages written meanwhile are not reported as held back.
        written = await offset_bounds(client, topic, partitions)
        bounds = await offset_bounds(client, topic, partitions, isolation=level)
        ends = {index: end for index, (_, end) in bounds.items()}
        show = _make_printer(client, topic_metadata, raw=raw, as_json=common.as_json)
        starts = ends if number == 0 else {index: start for index, (start, _) in bounds.items()}
        if begin is not None:
            starts = await offsets_at(client, topic, partitions, begin, isolation=level)
            _print_moved(begin, starts)
        is_whole = partition is None
        tailer = Tailer(
            client, topic, starts, patience_s=common.timeout, isolation=level, is_whole=is_whole, note=print_note
        )
        remaining = await _show_past(tailer, begin, ends, number, show)
        _print_held_back(written, ends)
        if follow and remaining != 0:
            await _show_new(tailer, remaining, show)
        if tailer.lost:
            raise CommandFailed(f"not everything could be shown: {'; '.join(tailer.lost)}")

    call_broker(common, operation)


def _print_held_back(written: dict[int, OffsetRange], ends: dict[int, int]) -> None:
    """Record that there are more messages behind open transactions."""
    for index, (_, end) in written.items():
        if end > ends[index]:
            print_note(
                f"Partition {index} continues to offset {end}, after a transaction that is open since offset "
                f"{ends[index]}; --isolation uncommitted shows it."
            )


def _print_moved(begin: Position, starts: dict[int, int]) -> None:
    for index, start in starts.items():
        if begin.kind is Kind.OFFSET and start != begin.value:
            print_note(f"Partition {index} does not contain offset {begin.value}; starting at {start}.")


async def _show_past(
    tailer: Tailer, begin: Position | None, ends: dict[int, int], number: int | None, show: Show
) -> int | None:
    """Show stored messages; return how many may still be shown, None for any number."""
    if begin is None:
        last = LAST_DEFAULT if number is None else number
        if last:
            for message in await tailer.last(last, ends):
                print_bytes(await show(message))
        return None
    if number == 0 or begin.kind is Kind.END:
        return number
    remaining = number
    async for message in tailer.until(ends):
        print_bytes(await show(message))
        remaining = None if remaining is None else remaining - 1
        if remaining == 0:
            break
    return remaining


async def _show_new(tailer: Tailer, limit: int | None, show: Show) -> None:
    async with aclosing(tailer.follow()) as following:
        async for message in following:
            print_bytes(await show(message))
            limit = None if limit is None else limit - 1
            if limit == 0:
                return


def _select_partitions(topic: TopicMetadata, selected: list[int] | None) -> list[int]:
    known = [int(index) for index in topic.partitions]
    missing = [index for index in selected or [] if index not in known]
    if missing:
        raise UnknownTopic(f"topic {topic.name!r} has no partition {missing[0]}; the last is {max(known)}")
    return selected or known


def _make_printer(client: Client, topic: TopicMetadata, *, raw: bool, as_json: bool) -> Show:
    from millstream.cli.message_text import as_text
    from millstream.client.admin.messages import as_document, decode_record

    async def decode(record: Record) -> DecodedRecord | None:
        with suppress(QuotaExceeded):
            return await decode_record(client, topic.name, record)
        return None

    async def show_raw(message: Message) -> bytes:
        return (message.record.value or b"") + b"\n"

    async def show_document(message: Message) -> bytes:
        document = as_document(topic.name, topic.topic_id, message.partition, message.record)
        decoded = await decode(message.record)
        document.update({} if decoded is None else decoded.document())
        return as_json_text(document).encode() + b"\n"

    indent = sys.stdout.isatty()
    colour = indent and not os.environ.get("NO_COLOR")

    async def show_text(message: Message) -> bytes:
        decoded = await decode(message.record)
        text = as_text(topic.name, message.partition, message.record, colour=colour, indent=indent, decoded=decoded)
        return text.encode() + b"\n"

    return show_raw if raw else show_document if as_json else show_text
