"""A pass over the open letters of a dead letter topic: something is done with each that is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.client.admin.dead_letter import BATCH, headers_of, origin_of, without_content

if TYPE_CHECKING:
    from millstream.client.admin.dead_letter import DeadLetterDesk
    from millstream.protocol.private.subscriptions import LeasedMessage

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
    refused: dict[str, int] = field(default_factory=dict)
    """Left open since their messages cannot be delivered again, by the reason."""
    revived: dict[str, int] = field(default_factory=dict)
    """Delivered again, by their subscription."""
    unreached: int = 0
    """Partitions that nobody leads now."""
    has_begun: bool = False
    is_sending: bool = False


def refused_letters(refused: dict[str, int], remedy: str) -> str:
    """Which letters were left open, why, and what publishes their messages anyway."""
    count = sum(refused.values())
    what = "1 letter is" if count == 1 else f"{count:,} letters are"
    return f"{what} left open: {'; '.join(sorted(refused))}. To publish from the letters instead: {remedy}"


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


async def revive_through(
    desk: DeadLetterDesk,
    outcome: Outcome,
    *,
    wanted: Wanted | None,
    limit: int | None,
    told: Callable[[int], None] = lambda _done: None,
) -> None:
    """Have every open letter that is meant delivered again by its own subscription, and close it.

    The letters are gathered first, so that messages come back in the order of their offsets, not in that in which they
    died.
    """
    chosen: list[LeasedMessage] = []

    async def choose(_desk: DeadLetterDesk, letter: LeasedMessage) -> None:
        chosen.append(without_content(letter))

    await desk.open()
    outcome.has_begun = True
    async with desk.holding():
        await _pass(desk, choose, outcome, wanted=wanted, limit=limit, keep=True, told=told)
        outcome.done = 0
        chosen.sort(key=_place)
        for start in range(0, len(chosen), BATCH):
            some = chosen[start : start + BATCH]
            reasons = await desk.revive(some)
            done = [letter for letter, reason in zip(some, reasons, strict=True) if reason is None]
            outcome.is_sending = True
            outcome.doubtful += await desk.close(done)
            outcome.is_sending = False
            outcome.done += len(done)
            _add(outcome.refused, [reason for reason in reasons if reason is not None])
            _add(outcome.revived, [headers_of(letter)["dlq-subscription"] for letter in done])
            told(outcome.done)
        await desk.forget_closed()
    outcome.held, outcome.unreached = desk.held_by_others, desk.unreached


def _place(letter: LeasedMessage) -> tuple[str, str, int, int]:
    """Where the message came from, so that letters can be sorted by it."""
    origin = origin_of(letter)
    if origin is None:
        return "", "", 0, letter.record.offset
    return origin.queue.subscription, origin.queue.topic, origin.queue.partition, origin.letter.offset


def _add(counts: dict[str, int], found: Iterable[str]) -> None:
    for one in found:
        counts[one] = counts.get(one, 0) + 1


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
            if not keep:
                outcome.doubtful += await desk.close([letter])
            outcome.is_sending = False
            outcome.done += 1
        if not keep:
            told(outcome.done)
