"""Share sessions (KIP-932): the broker remembers which partitions a share consumer fetches, so requests carry only
what changed. A session belongs to a member of a group and ends with the connection on which it was opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.broker.net.presence import Presence

OPENS: Final = 0
CLOSES: Final = -1
SESSIONS_MAX: Final = 20_000
PARTITIONS_MAX: Final = 10_000
"""Of one session."""
_EPOCH_MAX: Final = 2**31 - 1

SharePartition = tuple[UUID, int]
SessionKey = tuple[str, str]
"""Group and member."""


class ShareSession:
    """The partitions of one member, and how many requests it has made."""

    __slots__ = ("epoch", "member", "partitions", "presence", "turn")

    def __init__(self, member: SessionKey, presence: Presence) -> None:
        self.member = member
        self.presence = presence
        self.epoch = 1
        self.partitions: dict[SharePartition, None] = {}
        self.turn = 0
        """Which of the partitions is asked first; they take turns."""


class ShareSessions:
    """Every session. `lost` is told of those whose connection has gone."""

    def __init__(self, lost: Callable[[ShareSession], None]) -> None:
        self._lost = lost
        self._by_member: dict[SessionKey, ShareSession] = {}

    def __len__(self) -> int:
        return len(self._by_member)

    def open(self, member: SessionKey, presence: Presence) -> ShareSession | ErrorCode:
        """A new session, in place of one that the member had."""
        self.close(member)
        if len(self._by_member) >= SESSIONS_MAX:
            return ErrorCode.share_session_limit_reached
        session = self._by_member[member] = ShareSession(member, presence)
        presence.when_gone(session, lambda: self._gone(session))
        return session

    def resume(self, member: SessionKey, epoch: int) -> ShareSession | ErrorCode:
        """The session that a request goes on with; it counts the requests."""
        session = self._by_member.get(member)
        if session is None:
            return ErrorCode.share_session_not_found
        if epoch != session.epoch:
            return ErrorCode.invalid_share_session_epoch
        session.epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        return session

    def close(self, member: SessionKey) -> ShareSession | None:
        """Forget the session of a member."""
        session = self._by_member.pop(member, None)
        if session is not None:
            session.presence.forget(session)
        return session

    def _gone(self, session: ShareSession) -> None:
        if self.close(session.member) is session:
            self._lost(session)
