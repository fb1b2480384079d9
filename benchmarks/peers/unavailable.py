"""Why a peer cannot be measured here."""

from __future__ import annotations


class PeerUnavailable(Exception):
    """What the peer needs is not on this machine and could not be fetched; the message says what."""
