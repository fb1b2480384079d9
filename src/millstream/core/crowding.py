"""Room for others: what one principal may take of a limit that all share."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address


def is_crowding(held: int, in_use: int, limit: int) -> bool:
    """Whether one principal holds so much that the rest is for others: half, when three quarters are taken."""
    return held >= limit // 2 and in_use >= limit - limit // 4


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Return the key under which an address is counted: for IPv6 its /64 network, which usually belongs to one client.

    Anything that is not an IPv6 address stays as it is; an IPv4 client of an IPv6 listener is counted by its own
    address.
    """
    if ":" not in host:
        return host
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"
