"""Checks that what workers of a subscription saw conforms to the promises of the subscription.

What is allowed, and why (docs/subscriptions.md, "Delivery guarantees"):

- At least once, a lease gets a response before it is durable. When a node was struck or the leader changed since then,
  the lease may be forgotten: the message comes again with the same attempt, and, in an ordered queue, messages before
  it come again, too, since acceptances that made way for it may be forgotten with it. Not so when the same leader has
  responded to any settlement of that partition meanwhile: a settlement gets a response when it is durable, and
  everything is written in order. For the same reason a node that was paused or cut off, and does not know yet that
  another one leads, may deliver messages that were accepted there. With the other promises none of this happens.
- At most once, messages in flight when a node had a fault, a worker left or its request failed are lost: but no more
  than were requested, and no message that was delivered at another time.
- Leases and delays go by the clock of the node. When it is wrong they may end early.
- The time at which Kafka's client received a message is known only roughly, and not at all if a node had a fault
  meanwhile; its messages go to others as soon as its connection ends: so its leases are judged only where their times
  are certain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, pairwise
from math import inf
from typing import Final

from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Verb
from millstream_testing.subscription_history import (
    Call,
    Delivery,
    History,
    Place,
    Promise,
    Settlement,
    Span,
    Spans,
    Truth,
)

SHOWN_MAX: Final = 5
REQUEST_MS: Final = 10_000
"""A request whose sender is gone may be served this much later."""
GONE_MS: Final = 2_000
"""A worker that was killed had recorded something at most this long before."""
TOLERANCE_MS: Final = 10
"""Clocks of one machine are read in whole milliseconds."""

Finding = str


def check(promise: Promise, history: History, truth: Truth) -> list[Finding]:
    """Return every broken promise; each kind with some examples."""
    found: list[Finding] = []
    case = _Case(promise, history, truth)
    for name, rule in _RULES.items():
        broken = list(rule(case))
        if broken:
            shown = "; ".join(broken[:SHOWN_MAX])
            found.append(f"{name}: {len(broken)}: {shown}")
    return found


class _Case:
    """A history by message."""

    def __init__(self, promise: Promise, history: History, truth: Truth) -> None:
        self.promise = promise
        self.truth = truth
        self.history = history
        self.deliveries: dict[Place, list[Delivery]] = defaultdict(list)
        self.settlements: dict[Place, list[Settlement]] = defaultdict(list)
        for delivery in sorted(map(self._timed, history.deliveries), key=lambda one: (one.to_ms, one.attempt)):
            self.deliveries[delivery.place].append(delivery)
        # By partition, certain settlements: when the worker sent each, and when it got a response.
        self._settled: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for settlement in history.settlements:
            self.settlements[settlement.place].append(settlement)
            if settlement.taken and settlement.response_ms is not None:
                self._settled[settlement.place.partition].append((settlement.sent_ms, settlement.response_ms))
        for times in self._settled.values():
            times.sort()

    def _timed(self, delivery: Delivery) -> Delivery:
        """The exact time of the lease, where it is known."""
        if not delivery.deadline_ms and self.truth.disturbed.touch(delivery.from_ms, delivery.to_ms):
            return delivery._replace(from_ms=0)
        if not delivery.deadline_ms or self.is_stepped(delivery.from_ms, delivery.to_ms):
            return delivery
        leased_ms = delivery.deadline_ms - self.promise.lease_ms
        return delivery._replace(from_ms=leased_ms, to_ms=leased_ms)

    def is_stepped(self, begin_ms: int, end_ms: int) -> bool:
        """Whether the clock of a node was wrong meanwhile."""
        return self.truth.stepped.touch(begin_ms, end_ms)

    def may_forget(self, lease: Delivery, then: Delivery) -> bool:
        """Whether a lease may be lost at the time of a later one."""
        if self.promise.delivery != AT_LEAST_ONCE:
            return False
        struck_ms = self.truth.disturbed.next_ms(lease.from_ms)
        return struck_ms <= then.to_ms and not self._was_kept(lease, struck_ms)

    def _was_kept(self, lease: Delivery, until_ms: float) -> bool:
        """Whether a message of the partition was settled after a lease, and acknowledged in time."""
        times = self._settled[lease.place.partition]
        later = times[bisect_left(times, (lease.to_ms + 1, 0)) :]
        return any(response_ms < until_ms for _, response_ms in later)

    def accepted(self, place: Place, *, surely: bool) -> bool:
        """Whether a worker accepted a message."""
        accepts = [one for one in self.settlements[place] if one.verb == Verb.ACCEPT]
        return any(one.is_sure if surely else one.is_possible for one in accepts)

    def attempt_of(self, settlement: Settlement) -> int:
        """Return the delivery of a settlement: a worker that got a message twice has settled the later one."""
        receive_completed = [
            one for one in self.deliveries.get(settlement.place, ()) if one.worker == settlement.worker
        ]
        return max(
            (one.attempt for one in receive_completed if one.from_ms <= (settlement.response_ms or 0)), default=0
        )

    def settlements_of(self, delivery: Delivery) -> list[Settlement]:
        """Return the settlements of a delivery, in order."""
        return [
            one
            for one in self.settlements[delivery.place]
            if (one.worker, one.attempt) == (delivery.worker, delivery.attempt)
        ]

    def ends_ms(self, delivery: Delivery) -> float:
        """Return until when the worker certainly held the message alone."""
        ends_ms: float = delivery.deadline_ms
        if not delivery.deadline_ms:
            gone_ms = self.history.last_ms.get(delivery.worker, 0)
            ends_ms = delivery.from_ms + self.promise.lease_ms
            ends_ms = min(ends_ms, gone_ms, self.truth.disturbed.next_ms(delivery.from_ms))
        for settlement in self.settlements_of(delivery):
            if settlement.verb != Verb.EXTEND:
                ends_ms = min(ends_ms, settlement.sent_ms)
            elif settlement.is_sure:
                ends_ms = max(ends_ms, settlement.sent_ms + self.promise.lease_ms)
        return ends_ms


def _lost(case: _Case) -> Iterator[str]:
    """Check that a message that no worker accepted is in the dead letter topic."""
    if case.promise.delivery == AT_MOST_ONCE:
        return
    for place in case.truth.expected:
        if not case.accepted(place, surely=False) and not case.truth.letters[place]:
            yield f"{place} was given {[one[1:] for one in case.deliveries.get(place, ())]}"


def _vanished(case: _Case) -> Iterator[str]:
    """Check that messages that did not arrive at most once were in flight during a fault."""
    if case.promise.delivery != AT_MOST_ONCE:
        return
    missing = case.truth.expected.keys() - case.deliveries.keys()
    leaks = _leaks(case)
    handed_out_ms = _handed_out_ms(case)
    for place in sorted(missing):
        published = case.truth.expected[place]
        begin_ms = max(published.sent_ms, published.due_ms)
        end_ms = handed_out_ms(place)
        if not leaks.touch(begin_ms, int(min(end_ms, begin_ms + 10**9))):
            yield f"{place} was handed out between {begin_ms} and {end_ms}, when nothing was struck"
    room = sum(call.wanted - call.receive_completed for call in _leaking_calls(case))
    if len(missing) > room:
        yield f"{len(missing)} are missing, but only {room} were asked for when something was struck"


def _leaking_calls(case: _Case) -> list[Call]:
    """Return requests whose response, or part of it, may not have arrived."""
    last: dict[str, Call] = {}
    for call in sorted(case.history.calls, key=lambda one: one.asked_ms):
        last[call.worker] = call
    lasting = set(last.values())
    disturbed = case.truth.disturbed
    return [
        call
        for call in case.history.calls
        if not call.responded or call in lasting or disturbed.touch(call.asked_ms, call.ended_ms or call.asked_ms)
    ]


def _leaks(case: _Case) -> Spans:
    spans = list(case.truth.disturbed)
    for call in _leaking_calls(case):
        ended_ms = max(call.ended_ms or 0, case.history.last_ms.get(call.worker, 0)) + GONE_MS
        spans.append(Span(call.asked_ms, ended_ms if call.responded else max(ended_ms, call.asked_ms + REQUEST_MS)))
    return Spans(spans)


def _handed_out_ms(case: _Case) -> Callable[[Place], float]:
    """Return by when a message was certainly delivered: messages are in order, so before a later one was."""
    after: dict[tuple[int, bytes], list[tuple[int, int]]] = defaultdict(list)
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        if published is not None and not published.due_ms:
            key = published.key if case.promise.ordered else b""
            after[place.partition, key].append((place.offset, ones[0].to_ms))
    for times in after.values():
        times.sort(reverse=True)
        best = inf
        for at, (offset, to_ms) in enumerate(times):
            best = min(best, to_ms)
            times[at] = (offset, int(best))
        times.reverse()

    def handed_out_ms(place: Place) -> float:
        published = case.truth.expected[place]
        if published.due_ms:
            return inf
        times = after[place.partition, published.key if case.promise.ordered else b""]
        at = bisect_left(times, (place.offset, 0))
        return times[at][1] if at < len(times) else inf

    return handed_out_ms


def _doubled(case: _Case) -> Iterator[str]:
    for place, count in case.truth.letters.items():
        if count > 1:
            yield f"{place} is there {count} times"


def _redelivered_after_accept(case: _Case) -> Iterator[str]:
    """Check that what was certainly rejected is in the dead letter topic; at most once, nothing is."""
    if case.promise.delivery == AT_MOST_ONCE:
        yield from map(str, case.truth.letters)
        return
    for place, ones in case.settlements.items():
        if not case.truth.letters[place] and any(one.verb == Verb.REJECT and one.is_sure for one in ones):
            yield f"{place}: {[one[1:] for one in ones]}"


def _both(case: _Case) -> Iterator[str]:
    for place in case.truth.letters:
        if case.accepted(place, surely=True):
            yield f"{place}: {[one[1:] for one in case.settlements[place]]}"


def _unwanted(case: _Case) -> Iterator[str]:
    places = {*case.deliveries, *case.truth.letters} - {*case.truth.expected}
    yield from map(str, sorted(places))


def _other(case: _Case) -> Iterator[str]:
    """Check that what was delivered is what the topic contains."""
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        if published is not None and any(one.checksum != published.checksum for one in ones):
            yield str(place)


def _too_often(case: _Case) -> Iterator[str]:
    for place, ones in case.deliveries.items():
        if case.promise.delivery == AT_MOST_ONCE and len(ones) > 1:
            yield f"{place} was given to {[(one.worker, one.to_ms) for one in ones]}"
        most = max(one.attempt for one in ones)
        if 0 < case.promise.attempts < most:
            yield f"{place} was given a {most}. time"


def _attempts(case: _Case) -> Iterator[str]:
    """Check that attempts increase by one, and that no two deliveries share one."""
    for place, ones in case.deliveries.items():
        for before, one in combinations(ones, 2):
            goes_back = one.attempt < before.attempt and one.from_ms > before.to_ms
            if (goes_back or one.attempt == before.attempt) and not case.may_forget(before, one):
                yield (
                    f"{place}: attempt {one.attempt} of {one.worker} at {one.to_ms} follows {before.attempt} of "
                    f"{before.worker} at {before.to_ms}"
                )


def _leases(case: _Case) -> Iterator[str]:
    """A lease starts between request and response."""
    for one in case.history.deliveries:
        leased_ms = one.deadline_ms - case.promise.lease_ms
        is_odd = not one.from_ms - TOLERANCE_MS <= leased_ms <= one.to_ms + TOLERANCE_MS
        if one.deadline_ms and is_odd and not case.is_stepped(one.from_ms, one.to_ms):
            yield f"{one.place} was given to {one.worker} at {one.from_ms} to {one.to_ms} until {one.deadline_ms}"


def _shared(case: _Case) -> Iterator[str]:
    """Check that no other worker gets a message while a lease lasts that its worker has not released."""
    if case.promise.delivery != EXACTLY_ONCE:
        return
    for place, ones in case.deliveries.items():
        for before, one in pairwise(sorted(ones, key=lambda one: one.attempt)):
            until_ms = case.ends_ms(before)
            if one.to_ms < until_ms and not case.is_stepped(before.from_ms, one.to_ms):
                yield f"{place} was with {before.worker} until {until_ms}, given to {one.worker} at {one.to_ms}"


def _returned(case: _Case) -> Iterator[str]:
    """Check that a message that was certainly accepted is not delivered again; durable attempts show the order."""
    if case.promise.delivery == AT_MOST_ONCE:
        return
    for place, ones in case.deliveries.items():
        accepts = [one for one in case.settlements[place] if one.verb == Verb.ACCEPT and one.is_sure]
        if not accepts:
            continue
        accepted_ms = min(one.response_ms or 0 for one in accepts)
        attempt, nodes = min(map(case.attempt_of, accepts)), {one.node for one in accepts}
        for one in ones:
            is_later = one.from_ms > accepted_ms
            if case.promise.delivery == EXACTLY_ONCE:
                is_later |= one.attempt > attempt
            elif not case.truth.is_alone and (one.node < 0 or one.node not in nodes):
                is_later &= not case.truth.disturbed.touch(one.from_ms, one.to_ms)
            if is_later:
                yield f"{place} was accepted at {accepted_ms}, given to {one.worker} at {one.from_ms} to {one.to_ms}"


def _ignored_delays(case: _Case) -> Iterator[str]:
    """Check that a worker that holds a lease can settle it, once."""
    if case.promise.delivery != EXACTLY_ONCE:
        return
    for place, ones in case.deliveries.items():
        for one in ones:
            for first in case.settlements_of(one)[:1]:
                if first.taken or first.response_ms is None or first.response_ms >= one.deadline_ms:
                    continue
                # It may have been settled already, in an earlier delivery.
                settled = any(each.taken and each.worker == one.worker for each in case.settlements[place])
                if not settled and not case.is_stepped(one.from_ms, first.response_ms):
                    yield f"{place}: {first.verb.name} of {one.worker} was refused before its lease ended"


def _disorder(case: _Case) -> Iterator[str]:
    """Check that messages of a key are delivered in order, and delayed ones not before they are due."""
    if not case.promise.ordered:
        return
    by_key: dict[tuple[int, bytes], list[Delivery]] = defaultdict(list)
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        if published is not None and not published.due_ms:
            by_key[place.partition, published.key].extend(ones)
    for ones in by_key.values():
        ones.sort(key=lambda one: (one.to_ms, one.place))
        latest: list[Delivery] = []
        for one in ones:
            for after in latest:
                if after.place > one.place and after.to_ms < one.from_ms and not case.may_forget(after, one):
                    yield f"{one.place} was given at {one.from_ms}, after {after.place} at {after.to_ms}"
                    break
            # What follows everything so far must not be delivered before the others.
            if not latest or one.place >= max(each.place for each in latest):
                latest = [*latest[-3:], one]


def _early(case: _Case) -> Iterator[str]:
    for place, ones in case.deliveries.items():
        published = case.truth.expected.get(place)
        for one in ones:
            due_ms = max(0 if published is None else published.due_ms, _released_until_ms(case, one))
            if one.to_ms < due_ms and not case.is_stepped(one.from_ms - REQUEST_MS, one.to_ms):
                yield f"{place} was given to {one.worker} {due_ms - one.to_ms} ms before its time"


def _released_until_ms(case: _Case, delivery: Delivery) -> int:
    """Return until when the previous worker, which released the message, delayed it."""
    delays = [
        one.sent_ms + one.delay_ms
        for one in case.settlements[delivery.place]
        if one.verb == Verb.RELEASE and one.is_sure and one.delay_ms and one.attempt == delivery.attempt - 1
        # Attempts that were lost are counted again.
        if one.sent_ms <= delivery.to_ms
    ]
    return min(delays, default=0)


_RULES: Final[Mapping[str, Callable[[_Case], Iterator[str]]]] = {
    "lost": _lost,
    "gone although nothing was struck": _vanished,
    "twice in the dead letter topic": _doubled,
    "missing or out of place in the dead letter topic": _redelivered_after_accept,
    "accepted and a dead letter": _both,
    "not to be delivered": _unwanted,
    "another message than in the topic": _other,
    "delivered too often": _too_often,
    "attempts that do not grow": _attempts,
    "a lease of another length": _leases,
    "with two workers at once": _shared,
    "came back after it was accepted": _returned,
    "refused although the lease lasts": _ignored_delays,
    "out of order": _disorder,
    "delivered early": _early,
}
