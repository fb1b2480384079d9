"""`millstream message`: one message in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import ask, complete_topics
from millstream.cli.options import DEFAULT_BROKERS, DEFAULT_TIMEOUT_S, AsJson, Brokers, TimeoutSeconds
from millstream.cli.output import counted, one_line, print_bytes, print_json, print_line

if TYPE_CHECKING:
    from millstream.client.admin.messages import StoredMessage
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata

app = typer.Typer(help="Show single messages.", no_args_is_help=True)


@app.callback()
def message() -> None:
    """Show single messages."""


@app.command("show")
def show(
    topic: Annotated[str, typer.Argument(autocompletion=complete_topics, help="The topic.", show_default=False)],
    partition: Annotated[int, typer.Argument(min=0, help="The partition.", show_default=False)],
    offset: Annotated[int, typer.Argument(min=0, help="The offset of the message.", show_default=False)],
    raw: Annotated[bool, typer.Option("--raw", help="Print only the value, unchanged.")] = False,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Show one message: key, headers, value, and its batch."""
    if raw and as_json:
        raise typer.BadParameter("give --raw or --json, not both")

    async def question(client: Client) -> tuple[TopicMetadata, StoredMessage]:
        from millstream.client.admin.messages import find_message
        from millstream.client.admin.topics import find_topic

        found = await find_topic(client, topic)
        return found, await find_message(client, found, partition, offset)

    found, stored = ask(brokers, timeout, question)
    if raw:
        print_bytes(stored.record.value or b"")
    elif as_json:
        print_json(_document(found, partition, stored))
    else:
        _print_message(found, partition, stored)


def _document(topic: TopicMetadata, partition: int, stored: StoredMessage) -> dict[str, Any]:
    from millstream.client.admin.messages import as_document

    return {
        **as_document(topic.name, topic.topic_id, partition, stored.record),
        "timestamp_type": stored.timestamp_type,
        "batch": stored.batch_document(),
    }


def _print_message(topic: TopicMetadata, partition: int, stored: StoredMessage) -> None:
    from millstream.cli.message_text import local_time, readable, readable_value
    from millstream.core.message_id import message_id

    record = stored.record
    print_line(f"{topic.name}/{partition}@{record.offset}")
    facts = [
        ("id", one_line(message_id(topic.topic_id, partition, record.offset, record.headers))),
        ("time", f"{local_time(record.timestamp_ms)} ({stored.timestamp_type})"),
        ("key", readable(record.key)),
        *(("header", f"{one_line(name)} = {readable(value)}") for name, value in record.headers),
        ("value", _size(record.value)),
        ("batch", _batch(stored)),
        ("producer", _producer(stored)),
    ]
    for word, text in facts:
        print_line(f"{word.ljust(8)}  {text}")
    print_line()
    print_line(readable_value(record.value))


def _size(value: bytes | None) -> str:
    return "null: a tombstone if the topic is compacted" if value is None else counted(len(value), "byte")


def _batch(stored: StoredMessage) -> str:
    batch = stored.batch_document()
    facts = [
        f"offsets {batch['first_offset']} to {batch['last_offset']}",
        counted(batch["records"], "record"),
        counted(batch["bytes"], "byte"),
        f"compression {batch['compression']}",
        f"leader epoch {batch['leader_epoch']}",
        "checksum right",
        *(word for word in ("transactional", "control") if batch[word]),
    ]
    return ", ".join(facts)


def _producer(stored: StoredMessage) -> str:
    batch = stored.batch_document()
    if batch["producer_id"] is None:
        return "not idempotent"
    return (
        f"id {batch['producer_id']}, epoch {batch['producer_epoch']}, "
        f"sequences {batch['first_sequence']} to {batch['last_sequence']}"
    )
