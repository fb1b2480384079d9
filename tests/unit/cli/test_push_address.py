"""Addresses in push URLs, in every notation."""

from __future__ import annotations

import pytest

from millstream.cli.subscription import private_host


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "169.254.169.254",
        "0x7f.1",
        "127.1",
        "2130706433",
        "10.1.2.3",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[fe80::1%25eth0]",
        "localhost",
        "Localhost.",
        "hook.localhost",
    ],
)
def test_private_addresses_are_recognised_in_every_notation(host: str) -> None:
    assert private_host(f"http://{host}:8080/hook") == host.strip("[]").lower().rstrip(".")


@pytest.mark.parametrize(
    "url", ["", "https://example.com/", "http://8.8.8.8/", "http://10.example.com/", "http://[::1"]
)
def test_names_and_public_addresses_are_not_private(url: str) -> None:
    assert private_host(url) is None
