"""A cut link blocks traffic of the selected clients without losing data or closing connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from millstream.protocol.messages.codec import request_head
from millstream_testing.link_relay import LinkRelay, RelayThread, client_id_of
from millstream_testing.stepped_serve import SteppedClock, step

WAIT_S = 60.0
QUIET_S = 0.2


def request(client_id: str | None) -> bytes:
    head = request_head(18, 3, 1, client_id)
    return len(head).to_bytes(4, "big") + head


@pytest.fixture
def echo() -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with closing(connection):
            while piece := connection.recv(1000):
                connection.sendall(piece)

    def accept() -> None:
        try:
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()
        except OSError:
            return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    host, port = listening.getsockname()
    yield f"{host}:{port}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(WAIT_S)


@pytest.fixture
def relay(echo: str) -> Iterator[LinkRelay]:
    with RelayThread() as thread:
        made = LinkRelay(thread, echo, named=True)
        yield made
        made.close()


def connect(relay: LinkRelay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_the_client_id_is_found_in_the_first_request() -> None:
    assert client_id_of(request("replica-2")) == "replica-2"
    assert client_id_of(request(None)) == ""
    assert client_id_of(b"") == ""


def test_data_sent_over_a_cut_link_arrives_when_it_is_healed(relay: LinkRelay) -> None:
    output = request("replica-2")
    with closing(connect(relay)) as link, closing(connect(relay)) as client:
        link.sendall(output)
        assert link.recv(len(output), socket.MSG_WAITALL) == output
        relay.cut("replica-2")
        link.sendall(b"held")
        client.sendall(request("somebody"))
        assert client.recv(1000)
        link.settimeout(QUIET_S)
        with pytest.raises(TimeoutError):
            link.recv(1000)
        relay.heal("replica-2")
        link.settimeout(WAIT_S)
        assert link.recv(4, socket.MSG_WAITALL) == b"held"


def test_no_client_gets_through_while_everything_is_cut(echo: str) -> None:
    with RelayThread() as thread:
        relay = LinkRelay(thread, echo)
        relay.cut()
        with closing(connect(relay)) as link:
            link.sendall(b"held")
            link.settimeout(QUIET_S)
            with pytest.raises(TimeoutError):
                link.recv(1000)
            relay.heal()
            link.settimeout(WAIT_S)
            assert link.recv(4, socket.MSG_WAITALL) == b"held"
        relay.close()


def test_a_clock_step_is_visible_to_every_user_at_once(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    step(file, 0)
    clock = SteppedClock(file)
    before = clock.now_ms()
    step(file, -3_600_000)
    assert clock.now_ms() < before
    step(file, 3_600_000)
    assert clock.now_ms() >= before + 3_600_000
