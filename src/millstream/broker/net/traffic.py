"""Counters of the traffic of a listener."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Plain counters over all connections of a listener."""

    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    connections_accepted: int = 0
    connections_refused: int = 0
    connections_failed: int = 0
