"""The claim on a pipeline: the run that holds it is the only member of its consumer group.

The membership is visible to ordinary tools, ends with its session when the process dies, and works the same on one node
and on many. A fenced member cannot commit offsets any more, since these carry the member and its generation.

The drivers that nodes start share an instance id, so a restarted one replaces and fences its predecessor at once. A
manual run has no instance id: a driver and a manual run find the group occupied by each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from millstream.client.admin.pipelines import PipelineClient
from millstream.core.errors import (
    FencedInstance,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentProtocol,
    MillstreamError,
    RebalanceInProgress,
    UnknownMember,
)
from millstream.core.ids import NodeId
from millstream.core.pipeline import GROUP_PREFIX, GROUP_TYPE
from millstream.core.tasks import within
from millstream.pipelines.source.link import Link
from millstream.protocol.messages.codec import build_request
from millstream.protocol.wire.client import GROUP_COORDINATOR
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.group_offsets import GroupMember

_logger = logging.getLogger(__name__)

DRIVER_INSTANCE: Final = "driver"
SESSION_S: Final = 10.0
BEAT_S: Final = 3.0
LEAVE_S: Final = 2.0
"""How long leaving may take; otherwise the session expires."""

_PROTOCOL: Final = "one"
_JOINS_MAX: Final = 10
_GROUP_ID_NOT_FOUND: Final = 69
_MEMBER_ID_REQUIRED: Final = 79
_PUT_OUT: Final = (FencedInstance, IllegalGeneration, UnknownMember)


class Claim:
    """The right to run one pipeline. All methods are called by threads without an event loop."""

    def __init__(
        self,
        link: Link,
        group: str,
        *,
        instance_id: str | None = None,
        is_declared: bool = False,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Claim a group; `on_lost` is called on the link's loop when the group has fenced this member.

        The group of a pipeline that `is_declared`, as all are that drivers run, is deleted with its declaration, even
        while it is run.
        """
        self._link = link
        self._group = group
        self._is_declared = is_declared or instance_id is not None
        self._on_lost = on_lost
        self._me = GroupMember(instance_id=instance_id)
        self._keeping: Future[None] | None = None
        self._last_beat = 0.0
        self._is_held = False

    def member(self) -> GroupMember:
        return self._me

    @property
    def is_held(self) -> bool:
        """Whether this process is the member, as far as it knows."""
        return self._is_held

    @property
    def is_confirmed(self) -> bool:
        """Whether the group has confirmed it recently; otherwise the broker may be unreachable, or another run may own
        the pipeline.
        """
        return self.is_held and time.monotonic() - self._last_beat < SESSION_S

    def take(self) -> None:
        """Become the member; raise `GroupNotEmpty`, which names the current one, if the pipeline is being run."""
        self._link.call(self._acquire())
        self._keeping = self._link.start(self._send_heartbeats())

    def leave(self) -> None:
        """Leave the group; never raises if the broker is unreachable, since the session expires anyway."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        if self.is_held:
            self._is_held = False
            with suppress(MillstreamError, TimeoutError):
                self._link.call(within(LEAVE_S, self._leave_group()))
                if self._is_declared:
                    self._link.call(within(LEAVE_S, self._forget()))

    # -- on the loop ----------------------------------------------------------------------------------------

    async def _acquire(self) -> None:
        await self._refuse_others()
        await self._join_alone()
        self._is_held = True
        self._last_beat = time.monotonic()

    async def _join_alone(self) -> None:
        """Join until there is no other member: the first one leads, and later ones give way."""
        for _ in range(_JOINS_MAX):
            with suppress(RebalanceInProgress, InconsistentProtocol, *_PUT_OUT):
                if await self._join():
                    return
        await self._leave_group()
        await self._refuse_others()
        raise GroupNotEmpty(f"group {self._group!r} has members that come and go; try again")

    async def _refuse_others(self) -> None:
        request = build_request("describe_groups", 6, groups=[self._group])
        response = await self._send(request, lambda response: response.groups[0].error_code, _GROUP_ID_NOT_FOUND)
        for other in response.groups[0].members:
            if self._me.instance_id is None or other.group_instance_id != self._me.instance_id:
                host = other.client_host.removeprefix("/")
                raise GroupNotEmpty(
                    f"it is being run by {other.client_id!r} at {host}, the member of group {self._group!r}; a run "
                    f"that was killed remains its member for up to {SESSION_S:g} s"
                )

    async def _join(self) -> bool:
        """Join a generation of the group; False if it has other members, which will leave."""
        request = build_request(
            "join_group",
            9,
            group_id=self._group,
            session_timeout=timedelta(seconds=SESSION_S),
            rebalance_timeout=timedelta(seconds=SESSION_S),
            member_id=self._me.member_id,
            group_instance_id=self._me.instance_id,
            protocol_type=GROUP_TYPE,
            protocols=[{"name": _PROTOCOL}],
        )
        try:
            joined = await self._send(request, lambda response: response.error_code, _MEMBER_ID_REQUIRED)
        except (*_PUT_OUT, InconsistentProtocol):
            self._me = GroupMember(instance_id=self._me.instance_id)
            raise
        self._me = self._me._replace(member_id=joined.member_id, generation=joined.generation_id)
        if joined.error_code == _MEMBER_ID_REQUIRED:
            return False
        if joined.leader != joined.member_id:
            # Both joined at the same moment, and one has to give way.
            await self._leave_group()
            await self._refuse_others()
            raise GroupNotEmpty(f"another run has just started, as a member of group {self._group!r}")
        await self._sync()
        return all(other.member_id == joined.member_id for other in joined.members)

    async def _sync(self) -> None:
        request = build_request(
            "sync_group",
            5,
            **self._identity(),
            protocol_type=GROUP_TYPE,
            protocol_name=_PROTOCOL,
            assignments=[{"member_id": self._me.member_id}],
        )
        await self._send(request, lambda response: response.error_code)

    def _identity(self) -> dict[str, Any]:
        return {
            "group_id": self._group,
            "generation_id": self._me.generation,
            "member_id": self._me.member_id,
            "group_instance_id": self._me.instance_id,
        }

    async def _send_heartbeats(self) -> None:
        """Send heartbeats until the group fences this member."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                try:
                    await self._send_heartbeat()
                except RebalanceInProgress:
                    await self._join_alone()
                except _PUT_OUT:
                    raise
                except MillstreamError as error:
                    # The job detects what it cannot do meanwhile.
                    _logger.debug("no heartbeat", extra={"group": self._group, "error": str(error)})
                    continue
                self._last_beat = time.monotonic()
        except MillstreamError as error:
            self._is_held = False
            _logger.warning("another run has taken over a pipeline", extra={"group": self._group, "error": str(error)})
            self._on_lost()

    async def _send_heartbeat(self) -> None:
        await self._send(build_request("heartbeat", 4, **self._identity()), lambda response: response.error_code)

    async def _leave_group(self) -> None:
        me = {"member_id": self._me.member_id, "group_instance_id": self._me.instance_id}
        request = build_request("leave_group", 5, group_id=self._group, members=[me])
        self._me = GroupMember(instance_id=self._me.instance_id)
        with suppress(*_PUT_OUT):
            await self._send(request, lambda response: response.error_code)

    async def _forget(self) -> None:
        await PipelineClient(self._link.client).forget_deleted(self._group.removeprefix(GROUP_PREFIX))

    async def _send(self, request: Any, code_of: Callable[[Any], int], *fine: int) -> Any:
        async def attempt(coordinator: NodeId) -> Any:
            response = await self._link.client.send(coordinator, request)
            code = code_of(response)
            if code and code not in fine:
                raise error_from_code(code, None, about=f"group {self._group!r}")
            return response

        return await self._link.client.call_coordinator(self._group, attempt, kind=GROUP_COORDINATOR)
