"""How many connections one client may have: an IPv6 client has a whole network of addresses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.broker.net.budget import Budget
from millstream.broker.net.listener import Listener
from millstream.core.crowding import network_of


@pytest.mark.parametrize(
    ("host", "counted_as"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:7:1:2:3:4", "2001:db8:0:7::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a:b", "a:b"),
    ],
)
def test_an_address_is_counted_as_its_network(host: str, counted_as: str) -> None:
    assert network_of(host) == counted_as


async def test_the_connections_of_one_ipv6_network_are_counted_together() -> None:
    service: Any = SimpleNamespace()
    limits: Any = SimpleNamespace()
    listener = Listener(service, limits=limits, budget=Budget(1), connections_max=10, idle_s=1, per_address_max=2)
    options = replace(listener._options, is_limited=True, deadline_s=1.0)
    connections: list[Any] = [SimpleNamespace(known=None, counted_as="") for _ in range(2)]
    for number, connection in enumerate(connections):
        assert listener._is_admitted(f"2001:db8::{number}", options)
        listener._count_address(connection, f"2001:db8::{number}", options)
    assert not listener._is_admitted("2001:db8::3", options)
    assert listener._is_admitted("2001:db8:0:1::3", options)
    for connection in connections:
        listener._uncount_address(connection)
    assert not listener._by_address
    assert not listener._unidentified
