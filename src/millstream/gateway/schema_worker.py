"""Decodes and encodes values by the schemas of the registry, in child processes of the gateway.

Users write both the schemas and the values: a few kilobytes can decode to gigabytes, or take minutes. Memory and time
are limited here, and a value that takes too much of them does not disturb the requests of others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from millstream.client.schemas import RegisteredCodec, SchemaCodecs
from millstream.core.child_pool import ChildDied, ChildPool, ChildTimedOut, serve_parent
from millstream.core.errors import SchemaMismatch
from millstream.protocol.schemas.codec import Codec, codec_of
from millstream.protocol.schemas.framing import Framed
from millstream.protocol.wire.client import Client

MODULE: Final = "millstream.gateway.schema_worker"
CODECS_MAX: Final = 64
CODECS_CHARACTERS_MAX: Final = 8 * 1024 * 1024
"""The length of the schemas whose codecs a child keeps: a codec takes twenty times as much memory."""
CONVERTED_BYTES_MAX: Final = 16 * 1024 * 1024
CONVERTED_BYTES_MIN: Final = 64 * 1024
CONVERTED_RATIO_MAX: Final = 100
"""The factor by which a value may grow beyond `CONVERTED_BYTES_MIN`: JSON includes the names of fields, and fields that
JSON omits are encoded as the schema's default."""


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for a value as JSON."""

    schema_type: str
    compiled: str
    content: bytes
    indexes: bytes | None
    bytes_max: int


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for a JSON document as a value."""

    schema_type: str
    compiled: str
    document: bytes
    bytes_max: int


class WorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The value, or why it does not fit its schema."""

    content: bytes = b""
    mismatch: str | None = None


Request = DecodeRequest | EncodeRequest


class SchemaWorker:
    def __init__(self) -> None:
        self._children = ChildPool(MODULE, noun="values")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def request(self, request: Request, principal: str = "") -> bytes:
        """Return the value, or raise `SchemaMismatch`.

        The values of one principal wait for each other, so that slow ones do not hold up those of others.
        """
        try:
            async with self._turns.setdefault(principal, asyncio.Lock()) if principal else nullcontext():
                body = await self._children.request(msgspec.msgpack.encode(request))
            response = msgspec.msgpack.decode(body, type=WorkerResponse)
        except ChildTimedOut:
            raise SchemaMismatch(
                f"it is not decoded or encoded within {self._children.response_s:.0f} s, the most that one value gets"
            ) from None
        except ChildDied:
            raise SchemaMismatch("it takes too much memory to be decoded or encoded") from None
        if response.mismatch is not None:
            raise SchemaMismatch(response.mismatch)
        return response.content

    async def close(self) -> None:
        await self._children.close()


class IsolatedCodecs(SchemaCodecs):
    """The schemas of one client, whose values child processes decode and encode."""

    def __init__(self, client: Client, worker: SchemaWorker, principal: str = "") -> None:
        super().__init__(client)
        self._worker = worker
        self._principal = principal

    async def _decode_json(self, schema: RegisteredCodec, framed: Framed) -> bytes:
        request = DecodeRequest(
            schema_type=schema.schema.schema_type,
            compiled=schema.schema.schema,
            content=framed.content,
            indexes=framed.indexes,
            bytes_max=_converted_bytes_max(framed.content),
        )
        return await self._worker.request(request, self._principal)

    async def _encode_json(self, schema: RegisteredCodec, document: Any) -> bytes:
        encoded = msgspec.json.encode(document)
        request = EncodeRequest(
            schema_type=schema.schema.schema_type,
            compiled=schema.schema.schema,
            document=encoded,
            bytes_max=_converted_bytes_max(encoded),
        )
        return await self._worker.request(request, self._principal)


def _converted_bytes_max(document: bytes) -> int:
    return min(CONVERTED_BYTES_MAX, CONVERTED_BYTES_MIN + CONVERTED_RATIO_MAX * len(document))


# -- in the child -------------------------------------------------------------------------------------------


class Responder:
    """Responds to requests with the codecs that it keeps."""

    def __init__(self) -> None:
        self._codecs: OrderedDict[tuple[str, str], Codec] = OrderedDict()

    def respond(self, request: Request) -> WorkerResponse:
        try:
            codec = self._codec(request.schema_type, request.compiled)
            if isinstance(request, EncodeRequest):
                content = codec.encode(codec.from_json(msgspec.json.decode(request.document)))
            else:
                content = codec.decode_json(Framed(None, None, request.content, request.indexes))
        except SchemaMismatch as error:
            return WorkerResponse(mismatch=str(error))
        except (MemoryError, RecursionError):
            return WorkerResponse(mismatch="it takes too much memory to be decoded or encoded")
        if len(content) > request.bytes_max:
            what = "encodes" if isinstance(request, EncodeRequest) else "decodes"
            return WorkerResponse(
                mismatch=f"it {what} to {len(content)} bytes; at most {request.bytes_max} are allowed"
            )
        return WorkerResponse(content=content)

    def _codec(self, schema_type: str, compiled: str) -> Codec:
        place = (schema_type, compiled)
        codec = self._codecs.get(place)
        if codec is None:
            codec = self._codecs[place] = codec_of(schema_type, compiled)
        self._codecs.move_to_end(place)
        while len(self._codecs) > CODECS_MAX or (
            len(self._codecs) > 1 and sum(len(text) for _, text in self._codecs) > CODECS_CHARACTERS_MAX
        ):
            self._codecs.popitem(last=False)
        return codec


def main() -> None:
    """Serve the gateway until it closes the pipe."""
    decoder, responder = msgspec.msgpack.Decoder(Request), Responder()
    serve_parent(lambda body: msgspec.msgpack.encode(responder.respond(decoder.decode(body))))


if __name__ == "__main__":
    main()
