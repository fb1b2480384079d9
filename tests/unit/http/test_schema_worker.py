"""What the child processes of the gateway do with values: users write these, and their schemas."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millstream.client.admin.messages import decode_record
from millstream.client.schemas import codecs_of, forget_codecs
from millstream.core.errors import QuotaExceeded, RequestTimedOut, SchemaMismatch
from millstream.core.ids import Offset, PartitionIndex
from millstream.gateway import schema_worker
from millstream.gateway.api.new_message import RecordToPublish
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane
from millstream.gateway.api.routes import listening, publishing
from millstream.gateway.api.services import Services
from millstream.gateway.pressure import Pressure, RequestMemory
from millstream.gateway.schema_worker import DecodeRequest, EncodeRequest, Responder, SchemaWorker, WorkerResponse
from millstream.protocol.records.record import NewRecord, Record
from millstream.protocol.schemas.formats import COMPILED, SchemaText, render

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}


def decode(content: bytes, *, bytes_max: int = 1000) -> DecodeRequest:
    compiled = json.dumps(ORDER)
    return DecodeRequest(schema_type="AVRO", compiled=compiled, content=content, indexes=None, bytes_max=bytes_max)


def encode(document: bytes, schema: Any = ORDER, *, bytes_max: int = 1000) -> EncodeRequest:
    return EncodeRequest(schema_type="AVRO", compiled=json.dumps(schema), document=document, bytes_max=bytes_max)


def test_values_are_decoded_and_encoded_with_a_reason_if_they_do_not_fit() -> None:
    responder = Responder()
    assert responder.respond(decode(b"\x0e")).content == b'{"id":7}'
    assert responder.respond(encode(b'{"id": 7}')).content == b"\x0e"
    assert "does not decode" in (responder.respond(decode(b"")).mismatch or "")
    assert "does not fit" in (responder.respond(encode(b'{"id": "x"}')).mismatch or "")


def test_a_value_that_decodes_to_more_than_is_shown_is_refused() -> None:
    assert Responder().respond(decode(b"\x0e", bytes_max=7)).mismatch == "it decodes to 8 bytes; at most 7 are allowed"


def test_a_document_that_encodes_to_much_more_is_refused() -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "string", "default": "x" * 1000}]}
    refused = Responder().respond(encode(b"{}", schema))
    assert (refused.content, refused.mismatch) == (b"", "it encodes to 1002 bytes; at most 1000 are allowed")


def test_the_codecs_of_long_schemas_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_worker, "CODECS_CHARACTERS_MAX", 3 * len(json.dumps(ORDER)))
    responder = Responder()
    for number in range(10):
        responder.respond(encode(b'{"id": 7}', {**ORDER, "name": f"Order{number}"}))
    assert len(responder._codecs) == 2


async def test_the_values_of_one_principal_wait_for_each_other_and_not_for_those_of_others() -> None:
    worker, going, running = SchemaWorker(), asyncio.Event(), list[bytes]()

    async def request(body: bytes) -> bytes:
        running.append(body)
        await going.wait()
        return msgspec.msgpack.encode(WorkerResponse(content=b"done"))

    worker._children.request = request  # type: ignore[method-assign]
    tasks = [asyncio.create_task(worker.request(decode(b""), name)) for name in ("ann", "ann", "ann", "ben", "", "")]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(running) == 4
    tasks[1].cancel()
    going.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [value for value in done if isinstance(value, bytes)] == [b"done"] * 5
    assert len(running) == 5


async def test_a_value_that_takes_all_memory_does_not_end_the_process_that_asks() -> None:
    fields = " ".join(f"int64 n{number} = {number};" for number in range(1, 2001))
    text = f'syntax = "proto3"; message Wide {{ repeated Part parts = 1; message Part {{ {fields} }} }}'
    compiled = render(SchemaText(schema_type="PROTOBUF", text=text), COMPILED)
    content = b"\0" + b"\x0a\0" * 250_000
    worker = SchemaWorker()
    try:
        with pytest.raises(SchemaMismatch):
            await worker.request(
                DecodeRequest(schema_type="PROTOBUF", compiled=compiled, content=content, indexes=None, bytes_max=1000)
            )
        assert await worker.request(decode(b"\x0e")) == b'{"id":7}'
    finally:
        await worker.close()


async def test_a_stream_without_memory_for_a_decoded_value_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its memory for ever, and so would others that wait for it."""
    memory = RequestMemory(Pressure(bytes_max=(0, listening.READ_BYTES + 1000, 0)), Lane.WAIT)
    memory.reserve(listening.READ_BYTES)
    tries = 0

    async def decoded_members(*_: Any) -> dict[str, Any]:
        nonlocal tries
        tries += 1
        return {"decoded": msgspec.Raw(b'"' + b"x" * 1000 + b'"')}

    monkeypatch.setattr(listening, "decoded_members", decoded_members)
    monkeypatch.setattr(listening, "RETRY_S", 0)
    record = Record(Offset(0), 0, None, b"x", ())
    topic: Any = SimpleNamespace(name="orders", topic_id="")
    services: Any = SimpleNamespace(client=None)
    with pytest.raises(QuotaExceeded):
        async for _ in listening._sent(services, topic, PartitionIndex(0), [record], {}, memory, "schema"):
            pass
    assert tries == listening.DECODE_TRIES


async def _pieces_of_stream(
    monkeypatch: pytest.MonkeyPatch, count: int, places: dict[int, int]
) -> tuple[list[bytes], list[Record]]:
    """Return what a stream sends of some records, and those whose size it has determined."""
    counted: list[Record] = []

    async def decoded_members(*_: Any) -> dict[str, Any]:
        return {"decoded": msgspec.Raw(b"{}")}

    def held_bytes(record: Record) -> int:
        counted.append(record)
        return 1

    monkeypatch.setattr(listening, "decoded_members", decoded_members)
    monkeypatch.setattr(listening, "held_bytes", held_bytes)
    memory = RequestMemory(Pressure(), Lane.WAIT)
    records = [Record(Offset(offset), 0, None, b"x", ()) for offset in range(count)]
    topic: Any = SimpleNamespace(name="orders", topic_id="")
    services: Any = SimpleNamespace(client=None)
    sent = listening._sent(services, topic, PartitionIndex(0), records, places, memory, "schema")
    return [piece async for piece in sent], counted


async def test_a_stream_of_decoded_values_determines_each_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, counted = await _pieces_of_stream(monkeypatch, 100, {})
    assert (len(pieces), len(counted)) == (100, 100)


async def test_of_many_partitions_only_the_last_event_has_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, _ = await _pieces_of_stream(monkeypatch, 3, dict.fromkeys(range(listening.PARTITIONS_NAMED_MAX + 1), 0))
    assert [b"\nid:" in piece or piece.startswith(b"id:") for piece in pieces] == [False, False, True]


async def test_a_value_that_nothing_has_room_to_decode_is_not_taken_for_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Crowded:
        async def decode_json(self, *_: Any) -> Any:
            raise QuotaExceeded("256 values are being examined already")

    monkeypatch.setattr("millstream.client.schemas.codecs_of", lambda _: Crowded())
    client: Any = None
    with pytest.raises(QuotaExceeded):
        await decode_record(client, "orders", Record(Offset(0), 0, None, b"\0\0\0\0\1x", ()))


def test_a_refused_request_is_reported_for_a_while() -> None:
    pressure = Pressure(requests_max=(4, 4, 4))
    for _ in range(3):
        pressure.enter(Lane.WAIT, "User:app")
    assert pressure.warnings() == []
    with pytest.raises(Refused):
        pressure.enter(Lane.WAIT, "User:app")
    assert pressure.warnings() == ["wait requests were refused in the last 10 s; 3 are in progress"]


async def test_encoded_values_count_as_memory_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pressure = Pressure()

    async def encode(*_: Any, **__: Any) -> bytes:
        return b"x" * 1000

    monkeypatch.setattr(publishing, "codecs_of", lambda _: SimpleNamespace(encode=encode))
    placed: Any = RecordToPublish(NewRecord(None, b"{}"), None, None)
    services: Any = SimpleNamespace(publishing=None)
    await publishing._encode(services, "orders", placed, RequestMemory(pressure, Lane.PUBLISH))
    assert pressure.bytes[Lane.PUBLISH] == 1000


async def test_the_codecs_of_a_caller_are_released_even_if_its_messages_cannot_be_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = Services("127.0.0.1:1")
    own = codecs_of(services.client)

    async def close() -> None:
        raise RequestTimedOut("the broker does not respond")

    monkeypatch.setattr(services.publisher, "close", close)
    with pytest.raises(RequestTimedOut):
        await services.close()
    assert codecs_of(services.client) is not own
    forget_codecs(services.client)
