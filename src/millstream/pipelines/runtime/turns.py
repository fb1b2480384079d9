"""Who may work beside whom after a driver has died.

A pipeline that was under way then is under suspicion until one of its steps has gone well. Suspects take turns, so that
the next death, if there is one, has one suspect and not all of them.
"""

from __future__ import annotations

import threading


class Turns:
    """The suspects, of which one works at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._suspects: set[str] = set()
        self._holder = ""

    def suspect(self, name: str) -> None:
        """Have a pipeline take turns with other suspects from its next step on."""
        self._suspects.add(name)

    def take(self, name: str) -> None:
        """Before a step; waits for the turn of a suspect."""
        if name in self._suspects:
            self._turn.acquire()
            self._holder = name

    def give_back(self, name: str, *, is_well: bool) -> None:
        """After a step; one that went well clears a suspect."""
        if is_well:
            self._suspects.discard(name)
        if self._holder == name:
            self._holder = ""
            self._turn.release()
