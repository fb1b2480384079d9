"""Limits the part of a shared resource that one principal may hold, so that others are served too."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address


def is_crowding(held: int, in_use: int, limit: int) -> bool:
    """Whether a principal gets no more: it holds half of the limit, and three quarters of the limit are in use."""
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
