"""The broker's side of push: a child process that runs while a subscription has a push endpoint.

It is a client of the broker like any other, so that endpoints never stall the log. The subscriptions, secrets included,
go through the pipe that also keeps the process alive.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import msgspec

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.push_board import PushBoard
from millstream.broker.security.rights import owner_refusal
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Operation, ResourceType
from millstream.core.child_process import SupervisedChild, read_events, spawn_module
from millstream.core.errors import MillstreamError
from millstream.core.setting import seal_problem
from millstream.core.subscription import Subscription
from millstream.core.tasks import cancel_and_wait
from millstream.gateway.push.push_messages import (
    LINE_BYTES_MAX,
    PushCommand,
    PushOptions,
    PushReports,
    PushSubscription,
    push_subscription,
)
from millstream.protocol.wire.credentials import child_environment

_logger = logging.getLogger(__name__)

MODULE = "millstream.gateway.push.process"
STOP_S: Final = 10.0
"""How long stopping may take: slightly longer than the process gives messages in flight."""


class PushChild(SupervisedChild):
    """Runs the push process while there is something to push."""

    name = "the push process"

    def __init__(
        self,
        kafka_address: str,
        declared: Subscriptions,
        board: PushBoard,
        *,
        node_id: int,
        private_addresses: bool,
        release_worker: Callable[[str], None],
        security: SecurityState | None = None,
        log_level: str,
        log_format: str,
    ) -> None:
        super().__init__()
        self._kafka_address = kafka_address
        self._declared = declared
        self._board = board
        self._node_id = node_id
        self._private_addresses = private_addresses
        self._worker_gone = release_worker
        self._security = security
        self._log_level = log_level
        self._log_format = log_format
        self._pushed: list[PushSubscription] = []
        self._news = asyncio.Event()
        self._worker = ""
        declared.on_change(self._refresh)
        if security is not None:
            security.on_change(self._refresh)
        self._refresh()

    @property
    def stop_s(self) -> float:
        return STOP_S

    async def stop(self) -> None:
        """Stop the process once messages in flight are settled."""
        self._stopping.set()
        self._news.set()
        await super().stop()

    async def _wait_until_needed(self) -> None:
        while not self._pushed and not self._stopping.is_set():
            self._news.clear()
            await self._news.wait()

    async def _spawn(self) -> Process:
        self._worker = f"push/{self._node_id}/{uuid4().hex[:8]}"
        options = PushOptions(
            kafka=self._kafka_address,
            worker=self._worker,
            private_addresses=self._private_addresses,
            log_level=self._log_level,
            log_format=self._log_format,
        )
        argument = msgspec.json.encode(options).decode()
        return await spawn_module(MODULE, argument, limit=LINE_BYTES_MAX, env=child_environment())

    async def _wait_for_exit(self, process: Process) -> int:
        sending = asyncio.get_running_loop().create_task(
            self._send_commands(process, self._news, self._command), name="send subscriptions to the push process"
        )
        try:
            async for line in read_events(process, PushReports, name=self.name):
                self._board.take(line.reports)
            return await process.wait()
        finally:
            await cancel_and_wait(sending)
            self._board.clear()
            self._board.restarts = self.restarts
            # Messages that it has not returned go to other workers at once.
            self._worker_gone(self._worker)

    def _command(self) -> PushCommand | None:
        return PushCommand(self._pushed) if self._pushed and not self._stopping.is_set() else None

    def _refresh(self) -> None:
        subscriptions, parked = [], {}
        for declared in self._declared.all():
            try:
                settings = self._declared.settings_of(declared)
                pushed = push_subscription(declared, settings)
            except MillstreamError as error:
                # A newer node may have declared settings that are unknown here.
                _logger.debug("a subscription cannot be read", extra={"error": str(error)})
                continue
            refusal = "" if pushed is None else self._refusal(declared)
            if refusal:
                parked[declared.name] = refusal
            elif pushed is not None:
                subscriptions.append(pushed)
            elif settings.push_url:
                parked[declared.name] = seal_problem(declared.sealed)
        self._board.park(parked)
        if subscriptions != self._pushed:
            self._pushed = subscriptions
            self._news.set()

    def _refusal(self, subscription: Subscription) -> str:
        """Return why messages cannot be pushed with the rights of the subscription's owner; empty if they can."""
        if self._security is None:
            return ""
        if not subscription.topics:
            return "it is a share group: its topics are those of its consumers, which its owner may not be able to read"
        topics = ((Operation.READ, ResourceType.TOPIC, topic) for topic in subscription.topics)
        needs = [(Operation.READ, ResourceType.GROUP, subscription.name), *topics]
        return owner_refusal(self._security, subscription.owner, needs)
