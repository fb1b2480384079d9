"""Examines schemas in child processes, which bound what a hostile one can cost.

Processes are started when they are needed and end after a while without work. Few work at once, few requests wait, and
one that takes too long is killed with its request.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from millstream.broker.schemas.worker import (
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    CheckRequest,
    ParseRequest,
    RenderRequest,
    Request,
    WorkerResponse,
)
from millstream.core.errors import QuotaExceeded, SchemaRegistryError
from millstream.core.schema import RegistryCode
from millstream.protocol.schemas.formats import ParsedTexts, SchemaText

MODULE: Final = "millstream.broker.schemas.worker"
WORKERS_MAX: Final = 2
WAITING_MAX: Final = 256
EXAMINE_S_MAX: Final = 10.0
"""A schema that takes longer is rejected."""
_ENVIRONMENT: Final = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")
IDLE_S: Final = 60.0
"""How long a process without work is kept."""


def _invalid(reason: str) -> SchemaRegistryError:
    return SchemaRegistryError(reason, code=RegistryCode.INVALID_SCHEMA)


class _Worker(NamedTuple):
    process: Process
    folder: str
    """For its temporary files, which one that is killed leaves behind."""


class SchemaExaminer:
    """A small pool of child processes."""

    def __init__(self, *, examine_s: float = EXAMINE_S_MAX, idle_s: float = IDLE_S) -> None:
        self._examine_s = examine_s
        self._idle_s = idle_s
        self._turns = asyncio.Semaphore(WORKERS_MAX)
        self._waiting = 0
        self._idle: list[tuple[_Worker, asyncio.TimerHandle]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def parse(self, schema: SchemaText) -> ParsedTexts:
        """Return the canonical and the normalized text of a schema; raise `SchemaRegistryError` if it is invalid."""
        canonical, normalized = await self._ask(ParseRequest(schema))
        return ParsedTexts(canonical, normalized)

    async def check(self, schema: SchemaText, earlier: Sequence[SchemaText], level: str) -> Sequence[str]:
        """Return why a schema is incompatible with earlier ones, given newest first."""
        return await self._ask(CheckRequest(schema, earlier, level)) if earlier and level != "NONE" else ()

    async def render(self, schema: SchemaText, wanted: str) -> str:
        """Return a schema in another format."""
        (text,) = await self._ask(RenderRequest(schema, wanted))
        return text

    async def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        while self._idle:
            worker, timer = self._idle.pop()
            timer.cancel()
            await _end(worker)
        await asyncio.gather(*self._ending)

    async def _ask(self, request: Request) -> Sequence[str]:
        body = msgspec.msgpack.encode(request)
        if len(body) > MESSAGE_BYTES_MAX:
            raise _invalid(f"a schema with its references and earlier versions takes over {MESSAGE_BYTES_MAX} bytes")
        if self._waiting >= WAITING_MAX:
            raise QuotaExceeded(f"{WAITING_MAX} schemas are being examined already; retry later")
        self._waiting += 1
        try:
            async with self._turns:
                response = await self._examine(body)
        finally:
            self._waiting -= 1
        if response.invalid is not None:
            raise _invalid(response.invalid)
        return response.texts

    async def _examine(self, body: bytes) -> WorkerResponse:
        worker = await self._take()
        is_done = False
        try:
            async with asyncio.timeout(self._examine_s):
                response = await _exchange(worker.process, body)
            is_done = True
        except TimeoutError:
            raise _invalid(f"the schema could not be examined within {self._examine_s:.0f} s; simplify it") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _invalid("the schema takes too much memory to examine; simplify it") from None
        finally:
            if is_done and not self._is_closed:
                self._keep(worker)
            else:
                self._dismiss(worker)
        return response

    async def _take(self) -> _Worker:
        while self._idle:
            worker, timer = self._idle.pop()
            timer.cancel()
            if worker.process.returncode is None:
                return worker
            self._dismiss(worker)
        folder = tempfile.mkdtemp(prefix="millstream-schemas-")
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # In a session of its own, so that Ctrl-C in a terminal reaches only the broker; without the secrets that the
        # broker's environment may hold.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            folder,
            stdin=PIPE,
            stdout=PIPE,
            stderr=sys.stderr,
            env=kept,
            start_new_session=True,
        )
        return _Worker(process, folder)

    def _keep(self, worker: _Worker) -> None:
        timer = asyncio.get_running_loop().call_later(self._idle_s, self._expire, worker)
        self._idle.append((worker, timer))

    def _expire(self, worker: _Worker) -> None:
        self._idle = [kept for kept in self._idle if kept[0] is not worker]
        self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        ending = asyncio.ensure_future(_end(worker))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _exchange(process: Process, body: bytes) -> WorkerResponse:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=WorkerResponse)


async def _end(worker: _Worker) -> None:
    with suppress(ProcessLookupError):
        worker.process.kill()
    await worker.process.wait()
    await asyncio.to_thread(shutil.rmtree, worker.folder, ignore_errors=True)
