"""The states of one broker process of a machine, and the events that change them.

Nothing here runs a process: `machine.py` applies the events and acts on the state. A process exists only in the states
of `WITH_PROCESS`, so code that has waited for another state may change the broker's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from enum import Enum, auto
from typing import Final


class BrokerState(Enum):
    DUE = auto()
    """No process runs; one is started when the backoff is over."""
    STARTING = auto()
    SERVING = auto()
    SILENT = auto()
    """Ready, but it has not responded to the last health request in time."""
    STOPPING = auto()
    """Asked to end; it is paused afterwards."""
    PAUSED = auto()
    """No process runs, and none is started until the broker is resumed."""
    LOST = auto()
    """No process could be started; the logs are to be handed over to the other brokers."""
    RETIRING = auto()
    """Asked to end; it is not started again."""
    RETIRED = auto()


class BrokerEvent(Enum):
    """An event or request that changes the state of a broker process."""

    SPAWN = auto()
    SPAWN_FAILED = auto()
    READY = auto()
    RESPONDED = auto()
    TIMED_OUT = auto()
    """A health request got no response in time."""
    EXITED = auto()
    PAUSE = auto()
    RESUME = auto()
    RETRY = auto()
    """Its logs cannot be handed over: it is started again."""
    RETIRE = auto()


_S = BrokerState
WITH_PROCESS: Final = frozenset({_S.STARTING, _S.SERVING, _S.SILENT, _S.STOPPING, _S.RETIRING})
HELD: Final = frozenset({_S.PAUSED, _S.LOST, _S.RETIRED})
"""No process runs, and none is started automatically."""

_ENDED: Final = {
    _S.STARTING: _S.DUE,
    _S.SERVING: _S.DUE,
    _S.SILENT: _S.DUE,
    _S.STOPPING: _S.PAUSED,
    _S.RETIRING: _S.RETIRED,
}
_NEXT: Final[Mapping[BrokerEvent, Mapping[BrokerState, BrokerState]]] = {
    BrokerEvent.SPAWN: {_S.DUE: _S.STARTING},
    BrokerEvent.SPAWN_FAILED: _ENDED,
    BrokerEvent.READY: {_S.STARTING: _S.SERVING},
    BrokerEvent.RESPONDED: {_S.SILENT: _S.SERVING},
    BrokerEvent.TIMED_OUT: {_S.SERVING: _S.SILENT},
    BrokerEvent.EXITED: _ENDED,
    BrokerEvent.PAUSE: {
        _S.DUE: _S.PAUSED,
        _S.STARTING: _S.STOPPING,
        _S.SERVING: _S.STOPPING,
        _S.SILENT: _S.STOPPING,
    },
    BrokerEvent.RESUME: {_S.PAUSED: _S.DUE},
    BrokerEvent.RETRY: {_S.LOST: _S.DUE},
    BrokerEvent.RETIRE: {
        state: _S.RETIRING if state in WITH_PROCESS else _S.RETIRED for state in _S if state is not _S.RETIRED
    },
}


class BrokerLifecycle:
    """The state of one broker process. Events that do not apply to a state, such as a late response, are ignored."""

    def __init__(self, failed_starts_max: int) -> None:
        self.state = BrokerState.DUE
        self._failed_starts = 0
        self._failed_starts_max = failed_starts_max
        self._changed = asyncio.Event()

    def apply(self, event: BrokerEvent) -> None:
        """Change the state, and wake those who wait for it."""
        before = self.state
        after = _NEXT[event].get(before, before)
        if event is BrokerEvent.EXITED and before is BrokerState.STARTING:
            self._failed_starts += 1
            if self._failed_starts >= self._failed_starts_max:
                after = BrokerState.LOST
        elif after is not before and event in (BrokerEvent.READY, BrokerEvent.RESUME, BrokerEvent.RETRY):
            self._failed_starts = 0
        if after is not before:
            self.state = after
            self._changed.set()
            self._changed = asyncio.Event()

    async def until(self, states: Container[BrokerState]) -> None:
        while self.state not in states:
            await self._changed.wait()
