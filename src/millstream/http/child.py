"""The broker's side of the HTTP gateway: a child process that is started, restarted and stopped from here.

The listening socket belongs to the broker, which knows its address at once; the child inherits it. The child lives as
long as its standard input is open: that is a pipe whose other end only the broker holds, so the child ends with the
broker even when the broker is killed hard. Connections that arrive while no child runs wait in the socket's backlog.

Through that pipe the child is told why a starting broker gives no answer yet, one line of JSON each time. That works
also while the broker's loop stands still, as it does when logs are recovered.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress

from millstream.http.supervised_child import BACKOFF_MIN_S, SupervisedChild

MODULE = "millstream.http.gateway"

_REASON_MAX = 500
"""Characters of a reason: a line of this is written to the pipe as a whole or not at all."""


class HttpChild(SupervisedChild):
    """Keeps one gateway process running behind a listening socket."""

    name = "the HTTP gateway"

    def __init__(
        self,
        listening: socket.socket,
        kafka_address: str,
        *,
        hosts: Sequence[str] = (),
        log_level: str = "info",
        log_format: str = "text",
        backoff_min_s: float = BACKOFF_MIN_S,
    ) -> None:
        super().__init__(backoff_min_s=backoff_min_s)
        self._listening = listening
        self._kafka_address = kafka_address
        self._hosts = list(hosts)
        self._log_level = log_level
        self._log_format = log_format
        self._pipe = -1
        self._starting: str | None = None

    def tell(self, starting: str | None) -> None:
        """Have the child answer that the broker is not up yet, and why; None once the broker answers itself."""
        self._starting = starting
        self._write()

    async def stop(self) -> None:
        """Let the child finish its requests, then end it; the listening socket is closed."""
        await super().stop()
        self._listening.close()

    async def _spawn(self) -> Process:
        child_end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._write()
        try:
            # In a session of its own, so that a Ctrl-C in the terminal reaches the broker alone, which stops in order.
            return await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=child_end,
                stdout=sys.stderr,
                pass_fds=(self._listening.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._hang_up()
            raise
        finally:
            os.close(child_end)

    def _write(self) -> None:
        if self._pipe < 0:
            return
        starting = None if self._starting is None else self._starting[:_REASON_MAX]
        line = json.dumps({"starting": starting}, ensure_ascii=False) + "\n"
        # A child that does not read is not waited for, and one that is gone is started again and told then.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, line.encode())

    def _hang_up(self) -> None:
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def _command(self) -> list[str]:
        options = {
            "descriptor": self._listening.fileno(),
            "kafka": self._kafka_address,
            "hosts": self._hosts,
            "log_level": self._log_level,
            "log_format": self._log_format,
        }
        return [sys.executable, "-m", MODULE, json.dumps(options)]
