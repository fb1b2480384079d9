"""The broker's side of the HTTP gateway: starts, restarts and stops its child process.

The broker binds the listening socket, so it knows the address at once; the child inherits it. The child lives as long
as its standard input is open: a socket whose other end only the broker holds, so the child ends with the broker even if
that is killed. Connections that arrive while no child runs wait in the socket's backlog. On a machine with several
broker processes, their supervisor takes the broker's role.

Through that socket the broker reports its state, one JSON line each time: the reason why it is not ready while it
starts (also while its loop is blocked by recovery), then its status whenever the child asks. Clients cannot load this
socket, so health checks do not depend on the Kafka port.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import msgspec

from millstream.core.child_process import BACKOFF_MIN_S, SupervisedChild, spawn_module
from millstream.core.config import Config
from millstream.protocol.wire.credentials import child_environment

MODULE = "millstream.gateway.process"

_STDERR = 2
"""The descriptor itself: in a notebook or a test, `sys.stderr` may be an object without one."""
_REASON_MAX = 500
"""The length of a reason, so that a line is written to the socket as a whole or not at all."""

_REASONS_MAX = 20

Status = Callable[[], Mapping[str, Any]]
"""Describes the node: id, version, and the reasons and warnings of `broker/kafka/apis/node_status.py`."""


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's options for the process."""

    descriptor: int = -1
    registry: int | None = None
    """The listening sockets, which the process inherits."""
    kafka: str = ""
    hosts: list[str] = []
    authenticates: str | None = None
    """Whether callers are authenticated, as the setting `auth`; None where everyone may do everything."""
    tls: tuple[str, str] | None = None
    """The files with a certificate and its key; None for plain text."""
    console: dict[str, Any] = {}
    """How the console is served; `ConsoleSettings` names the fields."""
    log_level: str = "info"
    log_format: str = "text"


class HttpChild(SupervisedChild):
    """Keeps one gateway process running behind a listening socket."""

    name = "the HTTP gateway"

    def __init__(
        self,
        listening: socket.socket,
        kafka_address: str,
        *,
        registry: socket.socket | None = None,
        options: GatewayOptions | None = None,
        backoff_min_s: float = BACKOFF_MIN_S,
    ) -> None:
        super().__init__(backoff_min_s=backoff_min_s)
        self._listening = listening
        self._registry = registry
        self._kafka_address = kafka_address
        self._options = options or GatewayOptions()
        self._line: socket.socket | None = None
        self._starting: str | None = None
        self._status: Status | None = None
        self._refresh: Callable[[], Awaitable[None]] | None = None
        self._responding: asyncio.Task[None] | None = None

    @classmethod
    def configured(
        cls, config: Config, listening: socket.socket, kafka_address: str, *, registry: socket.socket | None = None
    ) -> Self:
        """Return the gateway of a node or a machine with these settings."""
        options = GatewayOptions(
            hosts=[config.http, config.registry, config.advertise, *config.http_hosts.split(",")],
            authenticates=config.auth if config.authorizes else None,
            tls=config.http_tls,
            console={
                "read_only": config.console_read_only,
                "runs_pipelines": config.pipelines_enabled,
                "data": os.path.abspath(config.data),
                "lake": config.pipelines_lake,
                # Its own processes may use another listener; port 0 stands for one that the system chooses.
                "kafka": config.advertise or (kafka_address if config.kafka.endswith(":0") else config.kafka),
                "session_s": config.console_session_ms // 1000,
                "oidc_client_id": config.console_oidc_client_id,
                "oidc_client_secret_file": config.console_oidc_secret_file,
                "oidc_issuer": config.oauth_issuer,
            },
            log_level=config.log_level,
            log_format=config.log_format,
        )
        return cls(listening, kafka_address, registry=registry, options=options)

    def connect_to(self, kafka_address: str) -> None:
        """Set where the gateway finds brokers; one that runs already is replaced."""
        self._kafka_address = kafka_address
        if self._process is not None:
            self._is_dismissed = True
            self._hang_up()

    def report_starting(self, starting: str) -> None:
        """Report why the broker is not ready yet."""
        self._starting = starting
        self._write()

    def serve_status(self, status: Status, *, refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Report the broker's status from now on; `refresh` is awaited before each response."""
        self._starting = None
        self._status = status
        self._refresh = refresh
        self._write()

    async def stop(self) -> None:
        """Stop the child once its requests are finished, and close the listening sockets."""
        await super().stop()
        for listener in self._sockets:
            listener.close()

    async def _spawn(self) -> Process:
        self._line, child_end = socket.socketpair()
        self._line.setblocking(False)
        self._write()
        options = msgspec.structs.replace(
            self._options,
            descriptor=self._listening.fileno(),
            registry=None if self._registry is None else self._registry.fileno(),
            kafka=self._kafka_address,
        )
        try:
            process = await spawn_module(
                MODULE,
                msgspec.json.encode(options).decode(),
                stdin=child_end.fileno(),
                stdout=_STDERR,
                pass_fds=[socket.fileno() for socket in self._sockets],
                env=child_environment(),
            )
        except BaseException:
            self._hang_up()
            raise
        finally:
            child_end.close()
        asyncio.get_running_loop().add_reader(self._line, self._respond, self._line)
        return process

    def _respond(self, line: socket.socket) -> None:
        """Respond to the child's status request; an empty line means that it has gone."""
        with suppress(OSError):
            if line.recv(1024):
                if self._refresh is None:
                    self._write()
                elif self._responding is None or self._responding.done():
                    self._responding = asyncio.create_task(self._respond_refreshed(self._refresh))
                return
        asyncio.get_running_loop().remove_reader(line)

    async def _respond_refreshed(self, refresh: Callable[[], Awaitable[None]]) -> None:
        await refresh()
        self._write()

    def _write(self) -> None:
        if self._line is None:
            return
        line = {
            "starting": None if self._starting is None else self._starting[:_REASON_MAX],
            "status": None if self._status is None else _clip(self._status()),
        }
        # Never wait for a child that does not read; one that has exited gets the state when it is restarted.
        with suppress(OSError):
            self._line.send((json.dumps(line, ensure_ascii=False) + "\n").encode())

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            asyncio.get_running_loop().remove_reader(line)
            line.close()

    @property
    def _sockets(self) -> list[socket.socket]:
        return [self._listening, *([] if self._registry is None else [self._registry])]


def _clip(status: Mapping[str, Any]) -> dict[str, Any]:
    reasons, warnings = (
        [reason[:_REASON_MAX] for reason in status[kind][:_REASONS_MAX]] for kind in ("reasons", "warnings")
    )
    return {**status, "reasons": reasons, "warnings": warnings}
