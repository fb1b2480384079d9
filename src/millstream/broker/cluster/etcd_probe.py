"""What answers at an address where etcd was expected, in words: a wrong port is the likeliest of all mistakes."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

PROBE_S_MAX = 0.5
_HEARD_BYTES_MAX = 512
_SHOWN_MAX = 60
_QUESTION = b"GET /version HTTP/1.0\r\n\r\n"
_ETCD = b"etcdserver"


async def what_answers(endpoint: str, *, with_tls: bool) -> str:
    """Why a member gave no answer, by what a plain question to its address gets."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"{endpoint} did not answer"
    except OSError as error:
        # The loop's own words repeat the address; a name that is not found has no number.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        return f"{endpoint} cannot be reached ({why})"
    try:
        return _judged(endpoint, await _heard(reader, writer), with_tls=with_tls)
    finally:
        writer.transport.abort()


async def _heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    heard = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S_MAX):
            writer.write(_QUESTION)
            while len(heard) < _HEARD_BYTES_MAX and (more := await reader.read(_HEARD_BYTES_MAX)):
                heard += more
    return heard


def _judged(endpoint: str, heard: bytes, *, with_tls: bool) -> str:
    if _ETCD in heard:
        return f"etcd at {endpoint} answers without TLS" if with_tls else f"etcd at {endpoint} takes no requests"
    if not heard:
        return f"{endpoint} takes connections and says nothing"
    first = heard.splitlines()[0][:_SHOWN_MAX].decode("ascii", "backslashreplace")
    return f"something else than etcd answers at {endpoint}: {first!r}"
