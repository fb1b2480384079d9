"""The child process that examines schemas: requests on its standard input, responses on its standard output.

Whatever a schema does to it, the broker goes on: memory is limited here, time by the broker, which kills a child that
takes too long. A message is its length in four bytes and MessagePack. The child ends when its input closes.
"""

from __future__ import annotations

import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Final

import msgspec

from millstream.protocol.schemas.difference import InvalidSchema
from millstream.protocol.schemas.formats import SchemaText, check, parse, render

MEMORY_BYTES_MAX: Final = 1 << 30
ANSWER_S_MAX: Final = 30.0
LENGTH_BYTES: Final = 4
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


def answer(request: Request) -> WorkerResponse:
    """Examine a schema."""
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


def _read(stream: IO[bytes], size: int) -> bytes | None:
    content = stream.read(size)
    return content if len(content) == size else None


def main() -> None:
    """Answer requests one by one until the broker closes the pipe; then remove the folder for temporary files."""
    # A Ctrl-C in the terminal reaches the whole group; it is the broker that decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    tempfile.tempdir = sys.argv[1]
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    finally:
        shutil.rmtree(sys.argv[1], ignore_errors=True)


def _serve(requests: IO[bytes], responses: IO[bytes]) -> None:
    decoder = msgspec.msgpack.Decoder(Request)
    while (head := _read(requests, LENGTH_BYTES)) is not None:
        body = _read(requests, int.from_bytes(head, "big"))
        if body is None:
            return
        # Ends this process, as the broker does sooner if it is still there.
        signal.setitimer(signal.ITIMER_REAL, ANSWER_S_MAX)
        response = msgspec.msgpack.encode(answer(decoder.decode(body)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        responses.write(len(response).to_bytes(LENGTH_BYTES, "big") + response)
        responses.flush()


if __name__ == "__main__":
    main()
