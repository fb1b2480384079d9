"""The error for a peer that cannot be measured here."""

from __future__ import annotations


class PeerUnavailable(Exception):
    """A dependency of the peer is not installed and could not be fetched; the message names it."""
