from __future__ import annotations

import asyncio
from typing import cast

from millstream.gateway.protocol import JOINED_BYTES_MAX, JoinedTransport

HEAD, CONTINUE = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"


class Wire:
    """Records every write."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.sent.append(b"closed")

    def is_closing(self) -> bool:
        return False


def joined() -> tuple[JoinedTransport, list[bytes]]:
    wire = Wire()
    return JoinedTransport(cast("asyncio.Transport", wire)), wire.sent


def test_a_header_is_joined_with_the_first_part_of_its_body() -> None:
    transport, sent = joined()
    for _ in range(2):
        transport.write(HEAD)
        transport.write(b"one")
        transport.write(b"two")
        transport.responded()
    assert sent == [HEAD + b"one", b"two"] * 2


def test_a_response_without_a_body_is_sent_when_it_ends() -> None:
    transport, sent = joined()
    transport.write(HEAD)
    assert sent == []
    transport.responded()
    assert sent == [HEAD]
    transport.write(HEAD)
    transport.close()
    assert sent == [HEAD, HEAD, b"closed"]


def test_an_expect_continue_response_is_sent_at_once() -> None:
    transport, sent = joined()
    transport.write(CONTINUE)
    assert sent == [CONTINUE]
    transport.write(HEAD)
    transport.write(b"body")
    assert sent == [CONTINUE, HEAD + b"body"]


def test_a_long_body_is_not_copied() -> None:
    transport, sent = joined()
    body = b"x" * (JOINED_BYTES_MAX + 1)
    transport.write(HEAD)
    transport.write(body)
    assert sent[0] == HEAD
    assert sent[1] is body
