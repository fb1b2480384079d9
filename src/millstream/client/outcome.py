"""What a handler raises to say what becomes of its message; any other error means: try again later."""

from __future__ import annotations


class Reject(Exception):
    """The message can never be handled: to the dead letter topic with it, for the reason given."""


class RetryLater(Exception):
    """Not now: deliver it again after so many seconds."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = seconds
        self.reason = reason
