"""Messages of a topic: browse, search, follow, publish, download; and one message."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from millstream.client.admin.message_trace import Position, lacks_history, trace_at
from millstream.client.admin.messages import StoredMessage, decode_record, find_message
from millstream.client.admin.position import parse_position
from millstream.client.admin.tailer import Message, Tailer
from millstream.client.admin.topics import find_topic, offset_bounds, offsets_at
from millstream.core.errors import MillstreamError
from millstream.core.ids import OffsetRange, message_id
from millstream.gateway.api.event_stream import event
from millstream.gateway.api.message import held_bytes, received
from millstream.gateway.api.new_message import NewMessage, from_batch
from millstream.gateway.api.problem import Refused, invalid
from millstream.gateway.api.route import EVENT_STREAM, Lane
from millstream.gateway.api.routes.messages import with_history
from millstream.gateway.api.routes.publishing import publish_messages
from millstream.gateway.console.render import SHOWN_BYTES_MAX, as_json, environment, hex_dump, number, text_of
from millstream.gateway.console.search import Progress, compiled
from millstream.gateway.console.visit import Download, Page, PageRoute, Response, Visit, address, change, command, done
from millstream.protocol.filter.filter import Filter
from millstream.protocol.filter.node import quoted
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.fetch import READ_COMMITTED

ROWS: Final = 50
SEARCH_ROWS_MAX: Final = 500
DOWNLOAD_MAX: Final = 100_000
PAGE_S: Final = 1.0
"""How long a page waits for a search before it shows what there is; scripts continue it."""
REACH_FACTOR: Final = 4
TAIL_ROWS_MAX: Final = 50
"""Rows of one event of the live tail; more than this at once are counted, not shown."""
KEPT_ROWS: Final = 4 * ROWS
DECODED_BYTES_MAX: Final = 1024 * 1024
"""A decoded value that is longer is not shown: indenting it would hold up other pages."""
_FORMS: Final = {"decoded": "Decoded", "json": "JSON", "text": "Text", "hex": "Hex"}
NDJSON: Final = "application/x-ndjson"


class _SearchForm(msgspec.Struct):
    topic: TopicMetadata
    partitions: list[int]
    starts_at: str
    """A position; empty for the newest messages."""
    key: str
    filter: str
    condition: Filter | None = None
    problem: str = ""
    """The reason why a field is invalid."""
    wrong: str = "Filter"
    """The label of that field."""

    @property
    def is_search(self) -> bool:
        return bool(self.filter or self.key)

    @property
    def selects(self) -> str:
        """The filter with the key, as one condition."""
        terms = [f"({self.filter})"] if self.filter else []
        if self.key:
            terms.append(f"key = {quoted(self.key)}")
        return " AND ".join(terms)


async def _parse_form(visit: Visit) -> _SearchForm:
    topic = await find_topic(visit.services.client, visit.names["topic"])
    chosen = visit.text("partition")
    partitions: list[int] = [*sorted(topic.partitions)]
    if chosen:
        index = visit.number("partition", 0)
        if index not in topic.partitions:
            raise invalid(f"topic {topic.name!r} has no partition {index}; the last is {max(partitions)}")
        partitions = [index]
    text, key, starts_at = visit.text("filter"), visit.text("key"), visit.text("from", length_max=100)
    form = _SearchForm(topic, partitions, starts_at, key, text)
    try:
        # The filter alone first, so that positions in its errors refer to it.
        form.condition = await compiled(text)
        if key:
            form.wrong = "Key"
            form.condition = await compiled(form.selects)
        if starts_at:
            form.wrong = "From"
            parse_position(starts_at)
    except MillstreamError as error:
        form.problem, form.condition = str(error), None
    return form


async def _bounds(visit: Visit, form: _SearchForm) -> dict[int, OffsetRange]:
    return await offset_bounds(visit.services.client, form.topic.name, form.partitions, isolation=READ_COMMITTED)


async def _forward(visit: Visit, form: _SearchForm) -> dict[int, OffsetRange]:
    """Return the offsets to search, from the position on, or from where an earlier page stopped."""
    bounds = await _bounds(visit, form)
    if at := visit.text("at", length_max=200_000):
        places = _parse_places(at)
        return {index: OffsetRange(max(start, places.get(index, end)), end) for index, (start, end) in bounds.items()}
    if not form.starts_at:
        return bounds
    starts = await offsets_at(
        visit.services.client,
        form.topic.name,
        form.partitions,
        parse_position(form.starts_at),
        isolation=READ_COMMITTED,
    )
    return {index: OffsetRange(min(starts[index], end), end) for index, (_, end) in bounds.items()}


def _parse_places(text: str) -> dict[int, int]:
    try:
        return {int(index): int(offset) for index, _, offset in (part.partition(":") for part in text.split(","))}
    except ValueError:
        raise invalid("at is not a list of partition:offset") from None


def _format_places(places: Mapping[int, int]) -> str:
    return ",".join(f"{index}:{offset}" for index, offset in places.items())


class Row(NamedTuple):
    """A message in a list: only what the list shows, so that large messages take no memory while others are read."""

    partition: int
    offset: int
    timestamp_ms: int
    key: str
    value: str
    size: int
    schema: str
    """The schema by which the value was decoded; empty if it is shown as stored."""


async def rows_of(visit: Visit, topic: str, messages: Iterable[Message]) -> list[Row]:
    """Return messages as rows, with their values decoded if they name a schema."""
    rows = []
    for partition, record in messages:
        size, decoded = len(record.value or b""), None
        if size <= SHOWN_BYTES_MAX:
            decoded = await decode_record(visit.services.client, topic, record)
        rows.append(
            Row(
                partition,
                record.offset,
                record.timestamp_ms,
                "–" if record.key is None else text_of(record.key, chars_max=60),
                text_of(record.value if decoded is None else decoded.value),
                size,
                "" if decoded is None else decoded.named,
            )
        )
    return rows


class _ReadStep(msgspec.Struct):
    rows: list[Row] = []
    places: dict[int, int] = {}
    """The offset at which each partition continues."""
    older: dict[int, int] = {}
    progress: Progress = msgspec.field(default_factory=Progress)
    is_done: bool = True


async def _newest(visit: Visit, form: _SearchForm) -> _ReadStep:
    """Read the last messages before the end, or before where another page began; the newest first."""
    bounds = await _bounds(visit, form)
    if before := visit.text("before", length_max=200_000):
        places = _parse_places(before)
        bounds = {
            index: OffsetRange(start, min(end, max(start, places.get(index, end))))
            for index, (start, end) in bounds.items()
        }
    reach = ROWS
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PAGE_S
    while True:
        ranges = {index: OffsetRange(max(start, end - reach), end) for index, (start, end) in bounds.items()}
        reading = _ReadStep()
        async with aclosing(visit.searches.read(visit.services, form.topic, ranges, None, reading.progress)) as steps:
            async for step in steps:
                reading.rows += await rows_of(visit, form.topic.name, step)
                if len(reading.rows) > KEPT_ROWS:
                    _keep_newest(reading.rows)
        is_whole = all(ranges[index].start == bound.start for index, bound in bounds.items())
        if len(reading.rows) >= ROWS or is_whole or loop.time() > deadline:
            break
        # Offsets without messages: transaction markers, and gaps that compaction left.
        reach *= REACH_FACTOR
    _keep_newest(reading.rows)
    # Without rows, older pages continue before what was searched.
    oldest = {index: end if reading.rows else ranges[index].start for index, (_, end) in bounds.items()}
    for row in reading.rows:
        oldest[row.partition] = min(oldest[row.partition], row.offset)
    reading.older = oldest if any(oldest[index] > bounds[index].start for index in oldest) else {}
    return reading


def _keep_newest(rows: list[Row]) -> None:
    rows.sort(key=lambda row: (row.timestamp_ms, row.offset), reverse=True)
    del rows[ROWS:]


@asynccontextmanager
async def _matches(
    visit: Visit,
    form: _SearchForm,
    ranges: Mapping[int, OffsetRange],
    progress: Progress,
    *,
    limit: int,
    places: dict[int, int] | None = None,
) -> AsyncIterator[AsyncGenerator[list[Message], None]]:
    """Search within ranges, as one of the searches that the user may run."""
    steps = visit.searches.read(
        visit.services, form.topic, ranges, form.condition, progress, limit=limit, places=places
    )
    async with visit.searches.admitted(visit.user), aclosing(steps):
        yield steps


async def _search(visit: Visit, form: _SearchForm, limit: int) -> _ReadStep:
    """Read forward until there are enough messages, or the page has waited long enough."""
    ranges = await _forward(visit, form)
    reading = _ReadStep(places={index: start for index, (start, _) in ranges.items()})
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PAGE_S
    async with _matches(visit, form, ranges, reading.progress, limit=limit, places=reading.places) as steps:
        async for step in steps:
            reading.rows += await rows_of(visit, form.topic.name, step)
            if loop.time() > deadline:
                break
    reading.is_done = all(reading.places[index] >= end for index, (_, end) in ranges.items())
    return reading


async def browse(visit: Visit) -> Response:
    """Show messages of a topic: the newest, from a position on, or those that match."""
    form = await _parse_form(visit)
    name = form.topic.name
    reading = _ReadStep()
    is_forward = form.is_search or bool(form.starts_at) or bool(visit.text("at", length_max=200_000))
    if not form.problem:
        await visit.audit_reading(name, "browse", filter=form.selects)
        reading = await _search(visit, form, ROWS) if is_forward else await _newest(visit, form)
    context = {
        **await visit.topic_tabs(name),
        "partitions": sorted(form.topic.partitions),
        "form": form,
        "rows": reading.rows,
        "progress": reading.progress,
        "is_forward": is_forward,
        "is_done": reading.is_done,
        "next": "" if reading.is_done else _format_places(reading.places),
        "older": _format_places(reading.older),
        "state": _describe_progress(reading.progress, is_done=reading.is_done),
        "words": _words(form),
    }
    status = HTTPStatus.UNPROCESSABLE_ENTITY if form.problem else HTTPStatus.OK
    return Page("messages.html", context, status)


def _words(form: _SearchForm) -> str:
    words = ["tail", form.topic.name]
    if form.starts_at or form.is_search:
        words += ["--from", form.starts_at or "start"]
    if len(form.partitions) == 1 and len(form.topic.partitions) > 1:
        words += ["--partition", str(form.partitions[0])]
    return command(*words)


def _describe_progress(progress: Progress, *, is_done: bool) -> str:
    summary = f"{number(progress.matched)} found in {number(progress.read)} of {number(progress.total)} messages"
    return f"{summary}." if is_done else f"{summary} so far."


async def search(visit: Visit) -> Response:
    form = await _parse_form(visit)
    if form.problem:
        raise invalid(form.problem)
    ranges = await _forward(visit, form)
    await visit.audit_reading(form.topic.name, "search", filter=form.selects)
    return Download(_search_events(visit, form, ranges), EVENT_STREAM)


async def _search_events(
    visit: Visit, form: _SearchForm, ranges: dict[int, OffsetRange]
) -> AsyncGenerator[bytes, None]:
    # What the page has found counts.
    progress = Progress(read=visit.number("read", 0, high=2**63 - 1), matched=visit.number("matched", 0))
    places = {index: start for index, (start, _) in ranges.items()}
    limit = max(1, SEARCH_ROWS_MAX - progress.matched)
    rows = environment().get_template("message_rows.html")
    try:
        async with _matches(visit, form, ranges, progress, limit=limit, places=places) as steps:
            async for step in steps:
                shown = await rows_of(visit, form.topic.name, step)
                content = {
                    "rows": rows.render(topic=form.topic.name, rows=shown) if shown else "",
                    "state": _describe_progress(progress, is_done=False),
                    "share": progress.read / max(1, progress.total),
                    "at": _format_places(places),
                }
                yield event("rows", msgspec.json.encode(content))
        more = progress.matched >= SEARCH_ROWS_MAX
        end = f" Stopped after {SEARCH_ROWS_MAX} messages; narrow the filter, or download all." if more else ""
        at = _format_places(places) if more else ""
        yield event("done", msgspec.json.encode({"state": _describe_progress(progress, is_done=True) + end, "at": at}))
    except (MillstreamError, Refused) as error:
        yield event("done", msgspec.json.encode({"state": f"The search failed: {error}"}))


async def tail(visit: Visit) -> Response:
    """Follow a topic as a stream of rows, for as long as the browser listens."""
    form = await _parse_form(visit)
    if form.problem:
        raise invalid(form.problem)
    bounds = await _bounds(visit, form)
    await visit.audit_reading(form.topic.name, "tail", filter=form.selects)
    return Download(_tail_events(visit, form, {index: end for index, (_, end) in bounds.items()}), EVENT_STREAM)


async def _tail_events(visit: Visit, form: _SearchForm, starts: dict[int, int]) -> AsyncGenerator[bytes, None]:
    progress = Progress()
    rows = environment().get_template("message_rows.html")
    tailer = Tailer(
        visit.services.reading, form.topic.name, starts, patience_s=30.0, isolation=READ_COMMITTED, note=progress.skip
    )
    try:
        async with visit.searches.following(visit.user), aclosing(tailer.follow_fetched()) as following:
            async for fetched in following:
                for response in fetched:
                    step = await visit.searches.matching(visit.services, form.topic, response, form.condition, progress)
                    messages = step.matches
                    shown = await rows_of(visit, form.topic.name, messages[-TAIL_ROWS_MAX:])
                    progress.matched += len(messages)
                    if shown:
                        content = {
                            "rows": rows.render(topic=form.topic.name, rows=list(reversed(shown))),
                            "state": f"{number(progress.matched)} new since the tail began."
                            + (
                                f" {number(len(messages) - len(shown))} not shown."
                                if len(messages) > len(shown)
                                else ""
                            ),
                        }
                        yield event("rows", msgspec.json.encode(content))
    except (MillstreamError, Refused) as error:
        yield event("done", msgspec.json.encode({"state": f"The tail ended: {error}"}))


async def download(visit: Visit) -> Response:
    """Send everything that the form selects as JSON lines."""
    form = await _parse_form(visit)
    if form.problem:
        raise invalid(form.problem)
    ranges = await _forward(visit, form)
    await visit.audit_reading(form.topic.name, "download", filter=form.selects)
    return Download(_lines(visit, form, ranges), NDJSON, f"{form.topic.name}.jsonl")


async def _lines(visit: Visit, form: _SearchForm, ranges: dict[int, OffsetRange]) -> AsyncGenerator[bytes, None]:
    topic = form.topic
    async with _matches(visit, form, ranges, Progress(), limit=DOWNLOAD_MAX) as steps:
        async for step in steps:
            documents = (received(topic.name, topic.topic_id, message.partition, message.record) for message in step)
            lines = [msgspec.json.encode(document).replace(b"\n", b" ") for document in documents]
            yield b"".join(line + b"\n" for line in lines)


async def show(visit: Visit) -> Response:
    """Show one message: its contents, its batch, and its state in every subscription."""
    topic = await find_topic(visit.services.client, visit.names["topic"])
    partition, offset = _index(visit.names["partition"]), _index(visit.names["offset"])
    await visit.audit_reading(topic.name, "message", partition=partition, offset=offset)
    stored = await find_message(
        visit.services.reading, topic, partition, offset, read_record=visit.services.reader.read_one
    )
    record = stored.record
    visit.memory.resize(held_bytes(record) + 8 * SHOWN_BYTES_MAX)
    value = record.value or b""
    shown = value[:SHOWN_BYTES_MAX]
    text = _text(shown)
    indented = as_json(value) if len(value) <= SHOWN_BYTES_MAX else None
    decoded = None
    if len(value) <= SHOWN_BYTES_MAX:
        decoded = await decode_record(visit.services.client, topic.name, record)
        if decoded is not None and len(decoded.value) > DECODED_BYTES_MAX:
            decoded = None
    trace = await trace_at(
        visit.services.client,
        Position(topic.name, partition, offset),
        reading=visit.services.reading,
        read_record=visit.services.reader.read_one,
    )
    if (may_have_more := lacks_history(trace)) and visit.text("ledger"):
        trace, may_have_more = await with_history(visit.services, trace), False
    form = visit.choice("as", ("auto", *_FORMS))
    contents = {
        "decoded": None if decoded is None else as_json(decoded.value),
        "json": indented,
        "text": text,
        "hex": hex_dump(shown),
    }
    if form == "auto":
        form = next(form for form in _FORMS if contents[form] is not None)
    context = {
        **await visit.topic_tabs(topic.name),
        "partition": partition,
        "offset": offset,
        "record": record,
        "id": message_id(topic.topic_id, partition, offset, record.headers),
        "stored": stored,
        "batch": stored.batch_document(),
        "form": form,
        "forms": [(form, name) for form, name in _FORMS.items() if form != "decoded" or decoded is not None],
        "content": contents[form],
        "schema": "" if decoded is None else decoded.named,
        "is_truncated": len(value) > SHOWN_BYTES_MAX,
        "headers": [(name, _text(value or b"") or (value or b"").hex(" ")) for name, value in record.headers],
        "samples": _samples(visit, topic.name, stored),
        "trace": trace["subscriptions"],
        "may_have_more": may_have_more,
    }
    return Page("message.html", context)


def _index(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise invalid(f"{text!r} is not a partition or an offset")
    return int(text)


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _samples(visit: Visit, topic: str, stored: StoredMessage) -> list[tuple[str, str]]:
    """Return commands that publish the same message again."""
    record = stored.record
    value, key = _text(record.value or b""), _text(record.key or b"")
    if value is None or key is None or len(record.value or b"") > 16 * 1024:
        return []
    headers = {
        name: _text(content or b"") or "" for name, content in record.headers if name.isascii() and name.isprintable()
    }
    curl = ["curl", "-s", f"{visit.site}/v1/topics/{topic}/messages"]
    for name, header_value in {
        **({"Message-Key": key} if record.key is not None else {}),
        **{f"Message-Header-{name}": header for name, header in headers.items()},
    }.items():
        curl += ["-H", f"{name}: {header_value}"]
    curl += ["--data-binary", value]
    words = ["publish", topic]
    if record.key is not None:
        words += ["--key", key]
    for name, header in headers.items():
        words += ["--header", f"{name}={header}"]
    arguments = [repr(topic), repr(record.value or b"")]
    if record.key is not None:
        arguments.append(f"key={key!r}")
    if headers:
        arguments.append(f"headers={json.dumps(headers, ensure_ascii=False)}")
    opened = f"with millstream.connect_sync({json.dumps(visit.kafka)}) as ms:"
    python = f"import millstream\n\n{opened}\n    ms.publish({', '.join(arguments)})"
    return [
        ("curl", shlex.join(curl)),
        ("Python", python),
        ("CLI", f"printf %s {shlex.quote(value)} | {command(*words)}"),
    ]


async def publish_form(visit: Visit) -> Response:
    name = visit.names["topic"]
    topic = await find_topic(visit.services.client, name)
    return Page("publish.html", {**await visit.topic_tabs(name), "partitions": sorted(topic.partitions)})


async def publish(visit: Visit) -> Response:
    name = visit.names["topic"]
    if visit.text("sure") != "1":
        raise invalid("confirm that the message should be published; consumers receive it at once")
    headers = {}
    for line in visit.text("headers", length_max=16_384).splitlines():
        header, colon, value = line.partition(":")
        if not colon and line.strip():
            raise invalid(f"a header must be NAME: VALUE, not {line!r}")
        if colon:
            headers[header.strip()] = value.strip()
    key = visit.text("key", length_max=65_536)
    message = NewMessage(
        value=visit.text("value", length_max=1024 * 1024).replace("\r\n", "\n"),
        key=key or None,
        headers=headers,
        partition=visit.number("partition", 0) if visit.text("partition") else None,
    )
    (published,) = await publish_messages(visit.services, name, [from_batch(message)])
    to = address("topics", name, "messages", published.partition, published.offset)
    text = f"Published to partition {published.partition} at offset {published.offset}"
    return done(to, text, "publish", name, *(("--key", key) if key else ()))


ROUTES: Final = (
    PageRoute(path="/topics/{topic}/messages", handle=browse),
    PageRoute(path="/topics/{topic}/search", handle=search, lane=Lane.WAIT),
    PageRoute(path="/topics/{topic}/tail", handle=tail, lane=Lane.WAIT),
    PageRoute(path="/topics/{topic}/download", handle=download, lane=Lane.WAIT),
    PageRoute(path="/topics/{topic}/publish", handle=publish_form),
    change("/topics/{topic}/publish", publish),
    PageRoute(path="/topics/{topic}/messages/{partition}/{offset}", handle=show),
)
