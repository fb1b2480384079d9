"""Fetch sessions (KIP-227): the broker remembers what a client fetches, so requests carry only what changed."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.core.ids import Offset

SESSIONLESS_EPOCH = -1
FIRST_EPOCH = 0
_EPOCH_MAX = 2**31 - 1
SESSIONS_MAX = 2000
PARTITIONS_MAX = 200_000
"""Partitions remembered in all sessions together."""

PartitionKey = tuple[str | UUID, int]


class Position:
    """What a client wants of one partition, and what it was last told about it."""

    __slots__ = ("leader_epoch", "log_start_told", "max_bytes", "offset", "watermark_told")

    def __init__(self, offset: Offset, max_bytes: int, leader_epoch: int) -> None:
        self.offset = offset
        self.max_bytes = max_bytes
        self.leader_epoch = leader_epoch
        self.watermark_told: Offset | None = None
        self.log_start_told: Offset | None = None


class FetchSession:
    """The partitions of one client, in the order in which they are looked at next."""

    __slots__ = ("by_id", "epoch", "positions", "session_id")

    def __init__(self, session_id: int, *, by_id: bool) -> None:
        self.session_id = session_id
        self.epoch = 1
        self.by_id = by_id
        self.positions: dict[PartitionKey, Position] = {}

    def update(self, wanted: dict[PartitionKey, Position], forgotten: list[PartitionKey]) -> None:
        """Take in the changes of a request."""
        for key in forgotten:
            self.positions.pop(key, None)
        for key, position in wanted.items():
            known = self.positions.get(key)
            if known is None:
                self.positions[key] = position
            else:
                known.offset = position.offset
                known.max_bytes = position.max_bytes
                known.leader_epoch = position.leader_epoch

    def served(self, key: PartitionKey) -> None:
        """Put a partition that had its turn behind the others, so that none starves."""
        self.positions[key] = self.positions.pop(key)


class FetchSessions:
    """Every session; the one that was used longest ago goes first when there are too many."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, wanted: dict[PartitionKey, Position], *, by_id: bool) -> FetchSession | None:
        """A new session, or None when the request has nothing or too much to remember."""
        if not wanted or len(wanted) > PARTITIONS_MAX // 10:
            return None
        self._make_room(len(wanted))
        session_id = secrets.randbelow(2**31 - 1) + 1
        while session_id in self._by_id:
            session_id = secrets.randbelow(2**31 - 1) + 1
        session = FetchSession(session_id, by_id=by_id)
        session.update(wanted, [])
        self._by_id[session_id] = session
        return session

    def resume(self, session_id: int, epoch: int, *, by_id: bool) -> FetchSession | ErrorCode:
        """The session that a request goes on with, or the error code that makes the client begin a new one."""
        session = self._by_id.get(session_id)
        if session is None:
            return ErrorCode.fetch_session_id_not_found
        if session.epoch != epoch:
            return ErrorCode.invalid_fetch_session_epoch
        if session.by_id != by_id:
            return ErrorCode.fetch_session_topic_id_error
        session.epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
        self._by_id.move_to_end(session_id)
        return session

    def close(self, session_id: int) -> None:
        """Forget a session; an unknown one is no error."""
        self._by_id.pop(session_id, None)

    def _make_room(self, partitions: int) -> None:
        held = sum(len(session.positions) for session in self._by_id.values())
        while self._by_id and (len(self._by_id) >= SESSIONS_MAX or held + partitions > PARTITIONS_MAX):
            _, evicted = self._by_id.popitem(last=False)
            held -= len(evicted.positions)
