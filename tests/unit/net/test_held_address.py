"""An address that is held stays with its user while nobody listens there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from millstream.broker.net.listener import bind, hold_address

TAKE = """
import os, socket, sys
os.setuid(65534)
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(sys.argv[2]))
taken.bind(("127.0.0.1", int(sys.argv[1])))
"""


def test_a_restarted_process_listens_again_on_an_address_that_is_held() -> None:
    first = bind("127.0.0.1", 0, flag="kafka", is_held=True)
    host, port = first.getsockname()
    held = hold_address(host, port)
    assert held is not None
    with held:
        with socket.create_connection((host, port)) as client:
            client.setblocking(True)
            accepted = first.accept()[0]
            accepted.close()
            first.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port))
        again = bind(host, port, flag="kafka", is_held=True)
        with again, socket.create_connection((host, port)):
            again.accept()[0].close()


def test_an_address_that_was_not_bound_for_it_is_not_held() -> None:
    with bind("127.0.0.1", 0, flag="kafka") as bound:
        assert hold_address(*bound.getsockname()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("reuses_port", [0, 1])
def test_another_user_cannot_take_an_address_that_is_held(reuses_port: int) -> None:
    first = bind("127.0.0.1", 0, flag="kafka", is_held=True)
    host, port = first.getsockname()
    held = hold_address(host, port)
    assert held is not None
    first.close()
    with held:
        done = subprocess.run(
            [sys.executable, "-c", TAKE, str(port), str(reuses_port)], capture_output=True, text=True, check=False
        )
    assert "Address already in use" in done.stderr
