"""Address checks for push endpoints: a name is resolved here, and the checked address is connected to, never the name.

The declaration of a subscription decides where this node sends requests. Unless the node permits it, they do not go to
addresses that only the node can reach: those in IANA's registries of special-purpose addresses (private, loopback,
link-local (where clouds serve a machine's credentials), shared, reserved …), and IPv6 addresses that embed an IPv4
address, unless that is public. The tables are spelled out here, since Python's change between releases and follow the
registries' column "globally reachable", which also holds for addresses that no endpoint has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import Final

from millstream.core.errors import PolicyViolation

_logger = logging.getLogger(__name__)

KEPT_S: Final = 30.0
"""How long a resolved address is cached."""
ADDRESSES_MAX: Final = 8

SPECIAL_IPV4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by carriers and clouds
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's platform, which responds to every machine there
            "169.254.0.0/16",  # link-local
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
GLOBAL_IPV6: Final = IPv6Network("2000::/3")
"""All addresses assigned for use between networks; others are special or unused."""
SPECIAL_IPV6: Final = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID ...
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, which carries IPv4 addresses
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_ISATAP: Final = frozenset({0x5EFE, 0x0200_5EFE})
"""The prefixes of interface identifiers that embed an IPv4 address."""


class Addresses:
    """The addresses of one host, resolved again after a while."""

    def __init__(self, host: str, *, private_allowed: bool) -> None:
        self._host = host
        self._private_allowed = private_allowed
        self._known: list[str] = []
        self._until = 0.0

    async def find(self) -> list[str]:
        """Return addresses that may be connected to; raise `PolicyViolation` if there is none, `OSError` for an unknown
        name.
        """
        loop = asyncio.get_running_loop()
        if self._known and loop.time() < self._until:
            return self._known
        try:
            resolved = await loop.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError(f"{self._host} is not a valid host name") from error
        listed = dict.fromkeys(str(entry[4][0]) for entry in resolved)
        allowed = [candidate for candidate in listed if self._private_allowed or is_public(candidate)]
        if not allowed:
            # The reason of a dead letter must not reveal what names resolve to in this network.
            extra = {"host": self._host, "addresses": list(listed)[:ADDRESSES_MAX]}
            _logger.warning("push to a private address refused", extra=extra)
            raise PolicyViolation(
                f"{self._host} resolves to a private address, to which this node does not push; allow it with "
                "the setting push-private-addresses"
            )
        self._known, self._until = allowed[:ADDRESSES_MAX], loop.time() + KEPT_S
        return self._known

    def forget(self) -> None:
        """Resolve the host again next time."""
        self._known = []

    def prefer(self, address: str) -> None:
        """Try an address first that has responded."""
        if address in self._known[1:]:
            self._known = [address, *(other for other in self._known if other != address)]


def is_public(text: str) -> bool:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in SPECIAL_IPV4)
    carried = IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _MAPPED or address in _NAT64:
        return is_public(str(carried))
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP and not is_public(str(carried)):
        return False
    return address in GLOBAL_IPV6 and not any(address in network for network in SPECIAL_IPV6)
