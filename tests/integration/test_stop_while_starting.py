"""A node stopped while clients wait for it to become ready responds to them and exits at once."""

from __future__ import annotations

import socket
from collections.abc import Callable

from millstream.protocol.messages import codec
from millstream_testing.api_requests import write_request
from millstream_testing.server import Server

StartServer = Callable[..., Server]


def test_early_clients_are_served(start_server: StartServer) -> None:
    server = start_server()
    server.forked = False  # A forked server has loaded the APIs before it starts.
    request = codec.load_request_class(18, 0)()
    host, _, port = server.kafka.rpartition(":")
    server.stop()
    server.start()
    with socket.create_connection((host, int(port)), timeout=60) as client:
        # The listener is up before the APIs are loaded, so this may well wait for them.
        client.sendall(write_request(1, "early", request))
        server.stop()
        assert len(client.recv(4)) == 4
    server.start()
    output = server.log.read_text(encoding="utf-8")
    assert "died" not in output
    assert "connections were closed with requests in progress" not in output
