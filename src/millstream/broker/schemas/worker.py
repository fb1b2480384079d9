"""The child process that examines schemas: requests on its standard input, responses on its standard output.

The broker is not affected by what a schema does to it: memory is limited here, time by the broker, which kills a child
that takes too long. Messages are MessagePack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.core.child_pool import serve_parent
from millstream.protocol.schemas.formats import InvalidSchema, SchemaText, check, parse, render

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024


class ParseRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for the canonical and the normalized text of a schema."""

    schema: SchemaText


class CheckRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks why a schema is incompatible with earlier ones."""

    schema: SchemaText
    earlier: Sequence[SchemaText]
    level: str


class RenderRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for a schema in another format."""

    schema: SchemaText
    format: str


class WorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The texts that were asked for, or why the schema is invalid."""

    texts: Sequence[str] = ()
    invalid: str | None = None


Request = ParseRequest | CheckRequest | RenderRequest


def respond(request: Request) -> WorkerResponse:
    try:
        if isinstance(request, ParseRequest):
            return WorkerResponse(texts=parse(request.schema))
        if isinstance(request, CheckRequest):
            return WorkerResponse(texts=check(request.schema, request.earlier, request.level))
        return WorkerResponse(texts=[render(request.schema, request.format)])
    except InvalidSchema as error:
        return WorkerResponse(invalid=str(error))
    except (RecursionError, MemoryError):
        return WorkerResponse(invalid="the schema takes too much memory to examine")


def main() -> None:
    """Serve the broker until it closes the pipe."""
    decoder = msgspec.msgpack.Decoder(Request)
    serve_parent(lambda body: msgspec.msgpack.encode(respond(decoder.decode(body))))


if __name__ == "__main__":
    main()
