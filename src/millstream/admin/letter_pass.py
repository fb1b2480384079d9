"""A pass over the open letters of a dead letter topic: something is done with each that is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.admin.dead_letter import BATCH

if TYPE_CHECKING:
    from millstream.admin.dead_letter import DeadLetterDesk
    from millstream.wire.subscriptions import LeasedMessage

Wanted = Callable[["LeasedMessage"], bool]
Act = Callable[["DeadLetterDesk", "LeasedMessage"], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """How a pass over the letters went."""

    done: int = 0
    unmatched: int = 0
    doubtful: int = 0
    """Done, but their leases were lost meanwhile, so that they may be open still."""
    held: int = 0
    """Held by other commands."""
    unreached: int = 0
    """Partitions that nobody leads now."""
    has_begun: bool = False
    is_sending: bool = False


async def work_through(
    desk: DeadLetterDesk,
    act: Act,
    outcome: Outcome,
    *,
    wanted: Wanted | None,
    limit: int | None,
    keep: bool,
    told: Callable[[int], None] = lambda _done: None,
) -> None:
    """Do something with every open letter that is meant, and close it unless they are to be kept open."""
    await desk.open()
    outcome.has_begun = True
    async with desk.holding():
        await _pass(desk, act, outcome, wanted=wanted, limit=limit, keep=keep, told=told)
    outcome.held, outcome.unreached = desk.held_by_others, desk.unreached


async def _pass(
    desk: DeadLetterDesk,
    act: Act,
    outcome: Outcome,
    *,
    wanted: Wanted | None,
    limit: int | None,
    keep: bool,
    told: Callable[[int], None],
) -> None:
    def missing() -> int:
        # Whoever looks for some has to take more than are wanted; others do not keep letters from anybody.
        left = BATCH if limit is None else limit - outcome.done
        return BATCH if wanted is not None and left > 0 else left

    async for letters in desk.letters(missing):
        for letter in letters:
            if limit is not None and outcome.done >= limit:
                return
            if wanted is not None and not wanted(letter):
                outcome.unmatched += 1
                continue
            outcome.is_sending = True
            await act(desk, letter)
            if not keep and not await desk.accept(letter):
                outcome.doubtful += 1
            outcome.is_sending = False
            outcome.done += 1
        if not keep:
            told(outcome.done)
