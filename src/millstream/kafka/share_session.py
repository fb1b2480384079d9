"""Share sessions (KIP-932): the broker remembers which partitions a share consumer fetches, so requests carry only
what changed. A session belongs to a member of a group; the one that was used longest ago goes when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

OPENS: Final = 0
CLOSES: Final = -1
SESSIONS_MAX: Final = 2000
PARTITIONS_MAX: Final = 10_000
"""Of one session."""
_EPOCH_MAX: Final = 2**31 - 1

SharePartition = tuple[UUID, int]
SessionKey = tuple[str, str]
"""Group and member."""


class ShareSession:
    """The partitions of one member, in the order in which they are looked at next."""

    __slots__ = ("epoch", "partitions", "turn")

    def __init__(self) -> None:
        self.epoch = 1
        self.partitions: dict[SharePartition, None] = {}
        self.turn = 0


class ShareSessions:
    """Every session."""

    def __init__(self) -> None:
        self._by_member: OrderedDict[SessionKey, ShareSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_member)

    def open(self, member: SessionKey) -> ShareSession:
        """A new session, in place of one that the member had."""
        self._by_member.pop(member, None)
        while len(self._by_member) >= SESSIONS_MAX:
            self._by_member.popitem(last=False)
        session = self._by_member[member] = ShareSession()
        return session

    def resume(self, member: SessionKey, epoch: int) -> ShareSession | ErrorCode:
        """The session that a request goes on with; it counts the requests."""
        session = self._by_member.get(member)
        if session is None:
            return ErrorCode.share_session_not_found
        if epoch != session.epoch:
            return ErrorCode.invalid_share_session_epoch
        session.epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        self._by_member.move_to_end(member)
        return session

    def close(self, member: SessionKey) -> ShareSession | None:
        """Forget the session of a member."""
        return self._by_member.pop(member, None)
