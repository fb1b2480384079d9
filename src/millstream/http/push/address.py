"""Where an endpoint may be: its name is looked up here, and connected to is what was checked, never the name again.

Whoever declares a subscription decides where this node sends requests to. Without the node's permission these do not
go to addresses that only the node can reach: private, loopback and link-local ones (where clouds keep the credentials
of a machine), shared and reserved ones, and IPv6 addresses that carry one of these in them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

from millstream.model.errors import PolicyViolation

_logger = logging.getLogger(__name__)

KEPT_S: Final = 30.0
"""How long an answer is used."""
ADDRESSES_MAX: Final = 8

_NAT64: Final = IPv6Network("64:ff9b::/96")


class Addresses:
    """The addresses of one host, looked up anew after a while."""

    def __init__(self, host: str, *, private_allowed: bool) -> None:
        self._host = host
        self._private_allowed = private_allowed
        self._known: list[str] = []
        self._until = 0.0

    async def find(self) -> list[str]:
        """Addresses that may be connected to: `PolicyViolation` when there is none, `OSError` for an unknown name."""
        loop = asyncio.get_running_loop()
        if self._known and loop.time() < self._until:
            return self._known
        try:
            found = await loop.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError(f"{self._host} cannot be the name of a host") from error
        listed = dict.fromkeys(str(entry[4][0]) for entry in found)
        allowed = [one for one in listed if self._private_allowed or is_public(one)]
        if not allowed:
            # Whoever reads the reason of a dead letter need not learn what names in this network stand for.
            told = {"host": self._host, "addresses": list(listed)[:ADDRESSES_MAX]}
            _logger.warning("an endpoint is where messages may not be pushed to", extra=told)
            raise PolicyViolation(
                f"{self._host} is at an address to which messages may not be pushed; a node that may has the setting "
                "push-private-addresses"
            )
        self._known, self._until = allowed[:ADDRESSES_MAX], loop.time() + KEPT_S
        return self._known

    def forget(self) -> None:
        """Look the host up again next time."""
        self._known = []

    def prefer(self, address: str) -> None:
        """Begin with an address that has answered."""
        if address in self._known[1:]:
            self._known = [address, *(one for one in self._known if one != address)]


def is_public(text: str) -> bool:
    """Whether an address is one that anybody could reach."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(one.is_global and not one.is_multicast for one in _within(address))


def _within(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """An address, and those that it stands for."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    found: list[IPv4Address | IPv6Address] = [] if address in _NAT64 else [address]
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return found
