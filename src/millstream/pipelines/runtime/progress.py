"""Signs that a pipeline gets on: given by its own threads, looked at by the watch of the driver."""

from __future__ import annotations


class Progress:
    """Whether a pipeline is at work, and how often it has got a piece further."""

    def __init__(self) -> None:
        self.is_working = False
        """Not so while it waits: for messages, for its turn, or for a pause to be over."""
        self.signs = 0
        self.still_s = 0.0
        """For how long it has been at work without a sign, as the watch has seen."""

    def sign(self) -> None:
        """Something of the work is done. May be called by any thread."""
        # Of two threads that do this at the same moment one may be lost, and the number is another one all the same.
        self.signs += 1

    def work(self) -> None:
        """From now on it is to get on."""
        self.is_working = True
        self.sign()

    def rest(self) -> None:
        """From now on it waits."""
        self.is_working = False
        self.sign()
