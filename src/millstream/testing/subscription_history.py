"""What workers of one subscription saw, and whether it keeps to what the subscription promises.

Times are those of one machine, in milliseconds. When a lease was granted is known exactly: its deadline less the
declared lease. So what is judged does not depend on how long answers took to arrive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from millstream.model.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE
from millstream.subscriptions.lease import Verb

SHOWN_MAX: Final = 5


class Place(NamedTuple):
    """A message, by where it is in its topic."""

    partition: int
    offset: int


class Published(NamedTuple):
    """A message as the topic has it in the end."""

    key: bytes
    due_ms: int
    """Before this it must not be delivered; 0 if it is not delayed."""
    checksum: int
    """Of its value."""


class Delivery(NamedTuple):
    """A worker was given a message."""

    place: Place
    worker: str
    attempt: int
    granted_ms: int
    deadline_ms: int
    checksum: int


class Settlement(NamedTuple):
    """A worker said what is to become of a message."""

    place: Place
    worker: str
    attempt: int
    verb: Verb
    sent_ms: int
    answered_ms: int | None
    """None when no answer came: it may have been taken, or not."""
    taken: bool

    @property
    def is_sure(self) -> bool:
        """Whether it surely counts."""
        return self.taken and self.answered_ms is not None

    @property
    def is_possible(self) -> bool:
        """Whether it may count."""
        return self.taken or self.answered_ms is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a subscription declares."""

    delivery: str
    ordered: bool
    attempts: int
    lease_ms: int


@dataclass(slots=True)
class History:
    """Everything that workers of one subscription saw."""

    deliveries: list[Delivery] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)


class Truth(NamedTuple):
    """What is there in the end."""

    expected: Mapping[Place, Published]
    """The messages of the topic that match the filter."""
    letters: Counter[Place]
    """How often each stands in the dead letter topic."""
    kills_ms: Sequence[int]
    """When nodes were killed, in order."""
    leaders_move: bool = False
    """Whether partitions also go to other nodes when nobody is killed."""


Finding = str


def check(promise: Promise, history: History, truth: Truth) -> list[Finding]:
    """Everything that breaks the promise; each kind with some examples."""
    found: list[Finding] = []
    for name, rule in _RULES.items():
        broken = list(rule(_Case(promise, history, truth)))
        if broken:
            shown = "; ".join(broken[:SHOWN_MAX])
            found.append(f"{name}: {len(broken)}: {shown}")
    return found


class _Case:
    """A history by message."""

    def __init__(self, promise: Promise, history: History, truth: Truth) -> None:
        self.promise = promise
        self.truth = truth
        self.deliveries: dict[Place, list[Delivery]] = defaultdict(list)
        self.settlements: dict[Place, list[Settlement]] = defaultdict(list)
        for delivery in sorted(history.deliveries, key=lambda one: (one.granted_ms, one.attempt)):
            self.deliveries[delivery.place].append(delivery)
        for settlement in history.settlements:
            self.settlements[settlement.place].append(settlement)

    def may_forget(self, first_ms: int, then_ms: int) -> bool:
        """Whether leases that were given at a time may be forgotten at another, as they are not durable."""
        if self.promise.delivery != AT_LEAST_ONCE:
            return False
        if self.truth.leaders_move:
            return True
        kills = self.truth.kills_ms
        return bisect_right(kills, then_ms) > bisect_right(kills, first_ms - 1)

    def accepted(self, place: Place, *, surely: bool) -> bool:
        """Whether a worker accepted a message."""
        accepts = [one for one in self.settlements[place] if one.verb == Verb.ACCEPT]
        return any(one.is_sure if surely else one.is_possible for one in accepts)

    def settlements_of(self, delivery: Delivery) -> list[Settlement]:
        """What the worker of a delivery said, in order."""
        return [
            one
            for one in self.settlements[delivery.place]
            if (one.worker, one.attempt) == (delivery.worker, delivery.attempt)
        ]


def _lost(case: _Case) -> Iterator[str]:
    """A message that nobody accepted is in the dead letter topic."""
    if case.promise.delivery == AT_MOST_ONCE:
        return
    for place in case.truth.expected:
        if not case.accepted(place, surely=False) and not case.truth.letters[place]:
            yield f"{place} was given {[one[1:] for one in case.deliveries[place]]}"


def _doubled(case: _Case) -> Iterator[str]:
    for place, count in case.truth.letters.items():
        if count > 1:
            yield f"{place} is there {count} times"


def _both(case: _Case) -> Iterator[str]:
    for place in case.truth.letters:
        if case.accepted(place, surely=True):
            yield f"{place}: {[one[1:] for one in case.settlements[place]]}"


def _unwanted(case: _Case) -> Iterator[str]:
    places = {*case.deliveries, *case.truth.letters} - {*case.truth.expected}
    yield from map(str, sorted(places))


def _other(case: _Case) -> Iterator[str]:
    """What was given is what the topic has."""
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        if published is not None and any(one.checksum != published.checksum for one in ones):
            yield str(place)


def _too_often(case: _Case) -> Iterator[str]:
    for place, ones in case.deliveries.items():
        if case.promise.delivery == AT_MOST_ONCE and len(ones) > 1:
            yield f"{place} was given to {[one.worker for one in ones]}"
        if 0 < case.promise.attempts < ones[-1].attempt:
            yield f"{place} was given a {ones[-1].attempt}. time"


def _attempts(case: _Case) -> Iterator[str]:
    """Each delivery counts one more; unless leases are durable, those just before a kill may be forgotten."""
    for place, ones in case.deliveries.items():
        for before, one in pairwise(ones):
            if one.attempt <= before.attempt and not case.may_forget(before.granted_ms, one.granted_ms):
                yield f"{place}: attempt {one.attempt} of {one.worker} follows {before.attempt} of {before.worker}"


def _shared(case: _Case) -> Iterator[str]:
    """While a lease lasts, and its worker has not let go, nobody else gets the message."""
    if case.promise.delivery != EXACTLY_ONCE:
        return
    for place, ones in case.deliveries.items():
        for before, one in pairwise(ones):
            until_ms = before.deadline_ms
            for settlement in case.settlements_of(before):
                if settlement.verb != Verb.EXTEND:
                    until_ms = min(until_ms, settlement.sent_ms)
                elif settlement.is_sure:
                    until_ms = max(until_ms, settlement.sent_ms + case.promise.lease_ms)
            if one.granted_ms < until_ms:
                yield f"{place} was with {before.worker} until {until_ms}, given to {one.worker} at {one.granted_ms}"


def _came_back(case: _Case) -> Iterator[str]:
    """What was accepted for sure is given to nobody."""
    for place, ones in case.deliveries.items():
        accepts = [
            one.answered_ms
            for one in case.settlements[place]
            if one.verb == Verb.ACCEPT and one.taken and one.answered_ms is not None
        ]
        if accepts and ones[-1].granted_ms > min(accepts):
            yield f"{place} was accepted at {min(accepts)}, given to {ones[-1].worker} at {ones[-1].granted_ms}"


def _dishonoured(case: _Case) -> Iterator[str]:
    """A worker that holds a lease can settle it, once."""
    if case.promise.delivery != EXACTLY_ONCE:
        return
    for place, ones in case.deliveries.items():
        for one in ones:
            for first in case.settlements_of(one)[:1]:
                if not first.taken and first.answered_ms is not None and first.answered_ms < one.deadline_ms:
                    yield f"{place}: {first.verb.name} of {one.worker} was refused before its lease ended"


def _disorder(case: _Case) -> Iterator[str]:
    """Of one key, an earlier message never comes after a later one; delayed ones come when they are due."""
    if not case.promise.ordered or case.promise.delivery == AT_MOST_ONCE:
        return
    by_key: dict[tuple[int, bytes], list[Delivery]] = defaultdict(list)
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        if published is not None and not published.due_ms:
            by_key[place.partition, published.key].extend(ones)
    for ones in by_key.values():
        ones.sort(key=lambda one: (one.granted_ms, one.place))
        latest = ones[0]
        for one in ones[1:]:
            if one.place >= latest.place:
                latest = one
            elif not case.may_forget(latest.granted_ms, one.granted_ms):
                yield f"{one.place} was given at {one.granted_ms}, after {latest.place} at {latest.granted_ms}"


def _early(case: _Case) -> Iterator[str]:
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        if published is not None and ones[0].granted_ms < published.due_ms:
            yield f"{place} was given {published.due_ms - ones[0].granted_ms} ms before its time"


_RULES: Final[Mapping[str, Callable[[_Case], Iterator[str]]]] = {
    "lost": _lost,
    "twice in the dead letter topic": _doubled,
    "accepted and a dead letter": _both,
    "not to be delivered": _unwanted,
    "another message than in the topic": _other,
    "delivered too often": _too_often,
    "attempts that do not grow": _attempts,
    "with two workers at once": _shared,
    "came back after it was accepted": _came_back,
    "refused although the lease lasts": _dishonoured,
    "out of order": _disorder,
    "delivered early": _early,
}


def account(histories: Collection[History], truths: Collection[Truth]) -> str:
    """What was tried, in numbers."""
    verbs = Counter(one.verb.name.lower() for history in histories for one in history.settlements)
    unknown = sum(one.answered_ms is None for history in histories for one in history.settlements)
    refused = sum(one.answered_ms is not None and not one.taken for history in histories for one in history.settlements)
    again = sum(one.attempt > 1 for history in histories for one in history.deliveries)
    letters = sum(truth.letters.total() for truth in truths)
    said = ", ".join(f"{count} {verb}" for verb, count in sorted(verbs.items()))
    return (
        f"{sum(len(history.deliveries) for history in histories)} deliveries ({again} not the first), {said}; "
        f"{refused} refused, {unknown} without an answer; {letters} dead letters"
    )
