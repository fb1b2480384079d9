"""`millstream publish`: send messages from an argument, a file or standard input."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millstream.cli.connection import call_broker, complete_topics
from millstream.cli.exit_code import CommandFailed, ExitCode, exit_code_of
from millstream.cli.options import COMMON, Common, duration, flag
from millstream.cli.output import Progress, as_json_text, counted, one_line, print_line, print_note
from millstream.core.errors import (
    BatchTooLarge,
    CoordinatorUnavailable,
    MillstreamError,
    NotLeader,
    PublishFailed,
    RequestTimedOut,
    SchemaMismatch,
    SchemaRegistryError,
    UnknownTopic,
)
from millstream.core.schema import RegistryCode

if TYPE_CHECKING:
    from millstream.client.message import Receipt
    from millstream.client.publisher import Publisher
    from millstream.protocol.records.record import NewRecord
    from millstream.protocol.wire.client import Client

CHUNK_BYTES = 1024 * 1024
LINE_BYTES_MAX = 100 * 1024 * 1024
"""No broker accepts a longer message in one request, so a longer line is a mistake, such as a file without lines."""


@dataclass(frozen=True, slots=True)
class LineGroup:
    """Lines that were read together, without line ends, and the number of bytes read for them."""

    lines: list[bytes]
    size_bytes: int


async def read_line_groups(descriptor: int) -> AsyncIterator[LineGroup]:
    """Yield the lines of a descriptor as they arrive; the last one may lack its line end."""
    may_block = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    rest = b""
    done = 0
    while True:
        if may_block:
            await _wait_until_readable(descriptor)
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        done += len(lines)
        if len(rest) > LINE_BYTES_MAX:
            raise CommandFailed(
                f"line {done + 1} of the input is longer than {LINE_BYTES_MAX} bytes, the limit for one message"
            )
        if lines:
            yield LineGroup(lines, len(chunk))
    if rest:
        yield LineGroup([rest], 0)


async def _wait_until_readable(descriptor: int) -> None:
    """Wait, without a thread, until reading does not block, so that a silent pipe never delays Ctrl-C."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:
        # Not something that can be waited for, such as /dev/null: it never blocks.
        return
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


class _NotSent(CommandFailed):
    """Nothing of a group of messages was sent."""


_PASSING = (CoordinatorUnavailable, NotLeader, RequestTimedOut)
"""Errors that the cluster's nodes can explain."""

Value = Annotated[
    str | None, typer.Argument(help="The message; without it, each line of the input is a message.", show_default=False)
]
InputFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Publish each line of this file. Default: standard input."),
]
Key = Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of every message.")]
KeySeparator = Annotated[
    str | None, typer.Option("--key-separator", metavar="TEXT", help="Split each line into KEY and VALUE at this text.")
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of every message; may be repeated."),
]
DelaySeconds = Annotated[float | None, duration("--delay", "Make subscriptions deliver every message this much later.")]
Partition = Annotated[
    int | None,
    typer.Option(
        "--partition", "-p", metavar="NUMBER", min=0, help="Publish to this partition. Default: by key, else any."
    ),
]
Compression = Annotated[
    Literal["none", "gzip", "snappy", "lz4", "zstd"],
    typer.Option("--compression", help="How batches are compressed."),
]
Ids = Annotated[
    bool | None,
    typer.Option(
        "--ids/--no-ids",
        help="Print the id of every message. Default: only for a single message, or into a pipe.",
        show_default=False,
    ),
]
Schema = Annotated[
    str | None,
    flag(
        "--schema",
        "SUBJECT",
        "Read messages as JSON documents, and encode them with the latest schema of this subject.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The messages to publish, and the form of the report."""

    topic: str
    value: str | None
    file: Path | None
    key: str | None
    key_separator: str | None
    headers: tuple[tuple[str, bytes], ...]
    delay_s: float | None
    partition: int | None
    compression: str
    timeout_s: float
    print_ids: bool
    as_json: bool
    schema: str | None = None


def publish(
    topic: Annotated[
        str, typer.Argument(autocompletion=complete_topics, help="The topic to publish to.", show_default=False)
    ],
    value: Value = None,
    file: InputFile = None,
    key: Key = None,
    key_separator: KeySeparator = None,
    header: Headers = None,
    delay: DelaySeconds = None,
    partition: Partition = None,
    compression: Compression = "none",
    schema: Schema = None,
    ids: Ids = None,
    common: Common = COMMON,
) -> None:
    """Publish messages and print their ids.

    The id is the message-id header if one is given, otherwise topic-id/partition/offset. A message is acknowledged once
    it is as durable as the topic's flush setting requires. Within one run no message is stored twice, even if it is
    sent again, and messages with the same key keep their order. If a run fails, it reports how many messages are
    definitely stored.
    """
    if value is not None and (file is not None or key_separator is not None):
        raise typer.BadParameter("pass VALUE, or --file and --key-separator, not both")
    if key is not None and key_separator is not None:
        raise typer.BadParameter("pass --key, or --key-separator, not both")
    if key_separator == "":
        raise typer.BadParameter("--key-separator cannot be empty")
    order = _Order(
        topic=topic,
        value=value,
        file=file,
        key=key,
        key_separator=key_separator,
        headers=_headers(header or []),
        delay_s=delay,
        partition=partition,
        compression=compression,
        schema=schema,
        timeout_s=common.timeout,
        print_ids=(value is not None or not sys.stdout.isatty()) if ids is None else ids,
        as_json=common.as_json,
    )

    async def operation(client: Client) -> tuple[int, bool]:
        is_new = await _is_missing(client, topic)
        return await _publish(client, order), is_new

    number, is_new = call_broker(common, operation)
    if is_new and number:
        print_note(f"Topic {one_line(topic)} did not exist; the broker created it.")
    if value is None and not common.as_json:
        print_note(f"Published {counted(number, 'message')} to {topic}.")


async def _is_missing(client: Client, topic: str) -> bool:
    from millstream.client.admin.topics import find_topic

    # This is only for a note, so other errors are left to the publisher.
    with suppress(MillstreamError):
        try:
            await find_topic(client, topic)
        except UnknownTopic:
            return True
    return False


def _headers(options: list[str]) -> tuple[tuple[str, bytes], ...]:
    # Pairs instead of a table: a name may occur more than once.
    pairs = [text.partition("=") for text in options]
    for text, (name, separator, _) in zip(options, pairs, strict=True):
        if not separator or not name:
            raise typer.BadParameter(f"--header takes NAME=VALUE, not {text!r}")
    return tuple((name, os.fsencode(text)) for name, _, text in pairs)


async def _publish(client: Client, order: _Order) -> int:
    from millstream.client.publisher import Publisher

    with _open_input(order) as descriptor:
        publisher = Publisher(client, compression=order.compression, timeout_s=order.timeout_s)

        async def publish_group(lines: list[bytes], first: int) -> int:
            try:
                try:
                    records = await _encode(client, order, _records(order, lines, first), first)
                except CommandFailed as error:
                    raise _NotSent(str(error), exit_code_of(error)) from error
                return await _publish_group(publisher, order, records, first)
            except _PASSING as error:
                raise await _explain(client, order, error) from error

        try:
            if order.value is not None:
                return await publish_group([os.fsencode(order.value)], 1)
            return await _publish_lines(publish_group, order, descriptor)
        finally:
            await publisher.close()


async def _explain(client: Client, order: _Order, error: MillstreamError) -> MillstreamError:
    """Return the error with the cluster's own explanation, if it can be asked."""
    from millstream.client.admin.cluster_status import timeout_with_reasons

    with suppress(MillstreamError):
        return await timeout_with_reasons(client, f"cannot publish to {order.topic!r} now, {error}")
    return error


async def _publish_lines(
    publish_group: Callable[[list[bytes], int], Awaitable[int]], order: _Order, descriptor: int
) -> int:
    size = os.fstat(descriptor).st_size if order.file is not None else None
    done = 0
    with Progress(f"publishing to {order.topic}", total_bytes=size, enabled=not order.print_ids) as progress:
        groups = _groups(descriptor)
        while True:
            try:
                group = await anext(groups, None)
                if group is None:
                    break
                done += await publish_group(group.lines, done + 1)
            except (MillstreamError, CommandFailed) as error:
                stored = "nothing" if isinstance(error, _NotSent) else "possibly nothing"
                if done:
                    stored = f"at least the first {counted(done, 'message')} of the input"
                raise CommandFailed(f"{error} (stored: {stored})", exit_code_of(error)) from error
            progress.advance(group.size_bytes, counted(done, "message"))
    return done


def _groups(descriptor: int) -> AsyncIterator[LineGroup]:
    if os.isatty(descriptor):
        print_note("Reading messages from the terminal, one per line; end with Ctrl-D.")
    return read_line_groups(descriptor)


async def _encode(client: Client, order: _Order, records: list[NewRecord], first: int) -> list[NewRecord]:
    """Encode JSON documents with the schema, if one is given."""
    if order.schema is None:
        return records
    import msgspec

    from millstream.client.schemas import codecs_of

    codecs = codecs_of(client)
    encoded = []
    for number, record in enumerate(records, first):
        where = "" if order.value is not None else f"line {number} of the input: "
        try:
            document = msgspec.json.decode(record.value or b"")
            encoded.append(record._replace(value=await codecs.encode(order.schema, document, is_json=True)))
        except msgspec.DecodeError as error:
            raise CommandFailed(
                f"{where}the message is not JSON, which --schema requires: {error}", ExitCode.USAGE
            ) from error
        except SchemaMismatch as error:
            raise CommandFailed(f"{where}{error}", ExitCode.USAGE) from error
        except SchemaRegistryError as error:
            if error.code != RegistryCode.SUBJECT_NOT_FOUND:
                raise
            text = f"subject {order.schema!r} does not exist; millstream schema list shows those that do"
            raise CommandFailed(text, ExitCode.NOT_FOUND) from error
    return encoded


async def _publish_group(publisher: Publisher, order: _Order, records: list[NewRecord], first: int) -> int:
    """Publish messages that were read together; `first` is the number of the first in the input."""
    try:
        receipts = await publisher.publish_many(order.topic, records, partition=order.partition)
    except PublishFailed as failed:
        refused = [
            (at, outcome) for at, outcome in enumerate(failed.outcomes, first) if isinstance(outcome, MillstreamError)
        ]
        number, error = next(iter(refused), (0, failed))
        if isinstance(error, BatchTooLarge) and order.value is None:
            raise CommandFailed(f"line {number} of the input: {error}", exit_code_of(error)) from failed
        raise error from failed
    if order.as_json or order.print_ids:
        # In one write: an input of a million lines has a million ids.
        print_line("\n".join(_receipt_line(order, receipt) for receipt in receipts))
    return len(records)


def _records(order: _Order, lines: list[bytes], first: int) -> list[NewRecord]:
    from millstream.client.payload import due_ms
    from millstream.core.headers import DELIVER_AT
    from millstream.protocol.records.record import NewRecord

    now_ms = time.time_ns() // 1_000_000
    headers = order.headers
    if order.delay_s is not None:
        headers += ((DELIVER_AT, b"%d" % due_ms(order.delay_s)),)
    if order.key_separator is None:
        key = None if order.key is None else os.fsencode(order.key)
        return [NewRecord(key, line, headers, now_ms) for line in lines]
    separator = os.fsencode(order.key_separator)
    records = []
    for number, line in enumerate(lines, first):
        line_key, separated, value = line.partition(separator)
        if not separated:
            shown = line[:60].decode(errors="replace")
            raise CommandFailed(
                f"line {number} of the input has no {order.key_separator!r} between key and value: {shown!r}"
            )
        records.append(NewRecord(line_key, value, headers, now_ms))
    return records


def _receipt_line(order: _Order, receipt: Receipt) -> str:
    if not order.as_json:
        return receipt.id
    place = {"topic": order.topic, "partition": receipt.partition, "offset": receipt.offset}
    return as_json_text({"id": receipt.id, **place})


@contextmanager
def _open_input(order: _Order) -> Iterator[int]:
    if order.file is None:
        yield sys.stdin.fileno() if order.value is None else -1
        return
    try:
        descriptor = os.open(order.file, os.O_RDONLY)
    except OSError as error:
        raise CommandFailed(f"cannot read {order.file}: {error.strerror}", ExitCode.NOT_FOUND) from error
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise CommandFailed(f"{order.file} is a folder; pass a file with one message per line")
        yield descriptor
    finally:
        os.close(descriptor)
