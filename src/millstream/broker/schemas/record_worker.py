"""The child process that decompresses and decodes records of topics with a schema rule.

The broker is not affected by what a batch does to it: memory is limited here, time by the broker. It keeps the codecs
of the schemas it has used, and asks for those that it lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.core.child_pool import serve_parent
from millstream.core.errors import BatchRejected, RecordError, SchemaMismatch
from millstream.protocol.records.batch import check_crc, read_header
from millstream.protocol.records.record import records_section
from millstream.protocol.schemas.codec import Codec, codec_of
from millstream.protocol.schemas.framing import Framed
from millstream.protocol.schemas.record_check import FieldRule, check_content, check_ids

CODECS_MAX: Final = 256
MEMORY_BYTES_MAX: Final = 4 << 30
"""Address space: numba's libraries take much of it without using memory."""


class CompiledSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema that a child lacks."""

    key: str
    schema_type: str
    compiled: str


class RecordsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks which records of a batch do not conform."""

    batch: bytes
    rules: dict[str, FieldRule]
    content: bool
    schemas: Sequence[CompiledSchema] = ()


class RecordsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The records that do not conform, the schemas that the child lacks, or why the batch cannot be read."""

    wrong: Sequence[tuple[int, str]] = ()
    missing: Sequence[str] = ()
    unreadable: str | None = None


def schema_key(rule: FieldRule, schema_id: int) -> str:
    """Identify a schema by all its properties: an id may be reused after a backup is restored."""
    return f"{rule.context}/{schema_id}/{rule.guids[schema_id]}"


class _MissingCodec(Codec):
    """A placeholder for a codec that has to be requested."""

    def check(self, framed: Framed) -> None:
        pass

    def decode(self, framed: Framed) -> None:
        pass

    def encode(self, value: object) -> bytes:
        return b""


_LACKING: Final = _MissingCodec()


class RecordChecker:
    """Checks batches with the codecs that it keeps."""

    def __init__(self) -> None:
        self._codecs: OrderedDict[str, Codec | SchemaMismatch] = OrderedDict()

    def respond(self, request: RecordsRequest) -> RecordsResponse:
        for schema in request.schemas:
            self._keep(schema)
        missing: set[str] = set()

        def codec(rule: FieldRule, schema_id: int) -> Codec:
            key = schema_key(rule, schema_id)
            codec = self._codecs.get(key)
            if codec is None:
                missing.add(key)
                return _LACKING
            self._codecs.move_to_end(key)
            if isinstance(codec, SchemaMismatch):
                raise codec
            return codec

        try:
            header = read_header(request.batch)
            check_crc(request.batch, header)
            section = records_section(request.batch, header)
            wrong: Sequence[RecordError]
            if request.content:
                wrong = check_content(section, header, request.rules, codec)
            else:
                wrong = check_ids(section, header, request.rules)
        except BatchRejected as error:
            return RecordsResponse(unreadable=str(error))
        except MemoryError:
            return RecordsResponse(unreadable="its records take too much memory to be checked")
        return RecordsResponse(missing=sorted(missing)) if missing else RecordsResponse(wrong=wrong)

    def _keep(self, schema: CompiledSchema) -> None:
        try:
            self._codecs[schema.key] = codec_of(schema.schema_type, schema.compiled)
        except SchemaMismatch as error:
            self._codecs[schema.key] = error
        while len(self._codecs) > CODECS_MAX:
            self._codecs.popitem(last=False)


def main() -> None:
    """Serve the broker until it closes the pipe."""
    decoder, checker = msgspec.msgpack.Decoder(RecordsRequest), RecordChecker()
    serve_parent(
        lambda body: msgspec.msgpack.encode(checker.respond(decoder.decode(body))), memory_bytes_max=MEMORY_BYTES_MAX
    )


if __name__ == "__main__":
    main()
