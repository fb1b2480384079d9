"""Work that goes on when its page is left: many dead letters, and dry runs that need Spark.

It runs in the gateway with the rights of the person who started it, and ends when these lapse, when it is stopped, or
with the gateway. Its page shows how far it is; what it said last is kept for an hour.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from millstream.core.errors import MillstreamError
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.services import Services
from millstream.gateway.console.visit import Done, address

_logger = logging.getLogger(__name__)

WORKS_PER_PERSON_MAX: Final = 4
WORKS_MAX: Final = 32
KEPT_MAX: Final = 200
KEPT_S: Final = 3600.0
SOON_S: Final = 1.0
"""Work that ends within this time is answered like any other change."""

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"


class Measured(NamedTuple):
    """How far work is, from 0 to 1, and in words."""

    share: float
    text: str


class Acting(NamedTuple):
    """Services with a person's rights, and what ends when the person has lost them."""

    services: Services
    lapsed: asyncio.Future[Any]


Start = Callable[[], AbstractAsyncContextManager[Acting]]
Act = Callable[["Work", Services], Awaitable[str]]


class Work:
    """One piece of work."""

    def __init__(self, person: str, title: str, back: str, words: str = "") -> None:
        self.id = secrets.token_urlsafe(12)
        self.person = person
        self.title = title
        self.back = back
        """The page that it was started from."""
        self.words = words
        """The command that does the same."""
        self.state = RUNNING
        self.text = ""
        """What it said when it ended."""
        self.result: Any = None
        """What the page shows of it beside the text."""
        self.measure: Callable[[], Measured | None] = lambda: None
        self.on_stop: Callable[[], None] | None = None
        """Asks the work to end at the next good moment; without it, it is cancelled."""
        self.is_stopping = False
        self.started_s = time.time()
        self.ended_s: float | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def took_s(self) -> float:
        """How long it has taken so far, or took."""
        return (self.ended_s or time.time()) - self.started_s

    def answer(self) -> Done:
        """Go to the page that it was started from if it has ended, otherwise to its own."""
        if self.is_running:
            return Done(address("works", self.id), "")
        if self.state == FAILED:
            raise Refused(HTTPStatus.CONFLICT, self.text)
        return Done(self.back, f"{self.text}: {self.words}" if self.words else self.text)

    def stop(self) -> None:
        """End it early; what it has done stays done."""
        if not self.is_running or self.task is None:
            return
        self.is_stopping = True
        if self.on_stop is not None:
            self.on_stop()
        else:
            self._end(STOPPED, "Stopped. What was done until then stays done.")
            self.task.cancel()

    async def run(self, act: Act, start: Start) -> None:
        """Act with the rights of the person, for as long as they last."""
        try:
            async with start() as (services, lapsed):
                acting = asyncio.ensure_future(act(self, services))
                try:
                    await asyncio.wait({acting, lapsed}, return_when=asyncio.FIRST_COMPLETED)
                    if acting.done():
                        self._end(STOPPED if self.is_stopping else DONE, acting.result())
                    else:
                        self._end(STOPPED, "Stopped, because the session of the person who started it has ended.")
                finally:
                    acting.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await acting
        except asyncio.CancelledError:
            self._end(STOPPED, "Stopped, because the gateway stops.")
            raise
        except Refused as error:
            self._end(FAILED, error.detail)
        except MillstreamError as error:
            self._end(FAILED, str(error))
        except Exception:
            _logger.exception("work of the console failed", extra={"title": self.title})
            self._end(FAILED, "The gateway failed; see its log for the reason.")

    def _end(self, state: str, text: str) -> None:
        if self.is_running:
            self.state, self.text, self.ended_s = state, text, time.time()


class Works:
    """The work of one gateway."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """Take what is called when work has ended, and pages may show something else."""
        self._on_end = on_end
        self._works: dict[str, Work] = {}

    async def start(self, work: Work, act: Act, start: Start) -> Work:
        """Begin, and wait a moment for work that is done soon; refuse more than there may be."""
        self._forget()
        running = [one for one in self._works.values() if one.is_running]
        if len(running) >= WORKS_MAX or sum(one.person == work.person for one in running) >= WORKS_PER_PERSON_MAX:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{WORKS_PER_PERSON_MAX} works of one person, and {WORKS_MAX} of all, run at the same time; wait until "
                "one has ended, or stop one",
            )
        self._works[work.id] = work
        work.task = asyncio.create_task(work.run(act, start), name=f"work of the console: {work.title}")
        work.task.add_done_callback(lambda _: self._on_end())
        await asyncio.wait({work.task}, timeout=SOON_S)
        return work

    def find(self, work_id: str, person: str) -> Work:
        """Return the work of a person."""
        found = self._works.get(work_id)
        if found is None or found.person != person:
            raise Refused(
                HTTPStatus.NOT_FOUND,
                "this node does not know this work: it ended more than an hour ago, the node has restarted, or another "
                "node runs it",
            )
        return found

    def running(self, person: str) -> list[Work]:
        """Return what runs for a person now."""
        return [one for one in self._works.values() if one.is_running and one.person == person]

    async def close(self) -> None:
        """Stop everything."""
        tasks = [one.task for one in self._works.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self) -> None:
        """Forget what ended long ago, and the oldest of too many."""
        ended = sorted((one.ended_s, one.id) for one in self._works.values() if one.ended_s is not None)
        expired = [key for at, key in ended if at < time.time() - KEPT_S]
        for key in {*expired, *(key for _, key in ended[: max(0, len(ended) - KEPT_MAX)])}:
            del self._works[key]
