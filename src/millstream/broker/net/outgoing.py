"""Responses on their way out; parts that are in files are read when their turn comes, a piece at a time."""

from __future__ import annotations

from collections import deque

from millstream.broker.net.stream import Piece, Stored

PIECE_BYTES = 1024 * 1024
"""How much is read and handed to the transport at a time: less costs more calls, more costs more memory."""

SLACK = 2
"""A piece may be larger by half, so that a part hardly larger than a piece leaves no remainder."""


class Outgoing(deque[Piece | Stored]):
    """The parts of large responses that the transport does not have yet, in order."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        super().__init__()
        self._begun = 0
        """How much of the first part is sent."""

    def take(self, wanted: int) -> list[Piece]:
        """Return about this many of the next bytes, or all that are left; raise what reading them raises."""
        pieces: list[Piece] = []
        size = 0
        most = wanted + wanted // SLACK
        while self and size < wanted:
            part = self[0]
            left = len(part) - self._begun
            if isinstance(part, Piece):
                pieces.append(part)
            elif size and size + left > most:
                break
            else:
                left = left if left <= most else wanted
                pieces.append(part.read(self._begun, left))
                if self._begun + left < len(part):
                    self._begun += left
                    break
            size += left
            self._begun = 0
            self.popleft()
        return pieces
