"""How long an administrator's request waits until the cluster has agreed on a change."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

_S_MIN: Final = 1.0
_S_MAX: Final = 120.0


def agreement_s(timeout: timedelta) -> float:
    """The time that a request allows, within bounds: some clients send 0 and still expect the usual."""
    return min(max(timeout.total_seconds(), _S_MIN), _S_MAX)
