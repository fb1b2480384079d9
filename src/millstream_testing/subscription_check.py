"""Checks that what the workers of a subscription saw conforms to its delivery guarantees.

What is allowed, and why (docs/subscriptions.md, "Delivery guarantees"):

- At least once, a lease gets a response before it is durable. If a node then fails or the leader changes,
  the lease may be lost: the message is delivered again with the same attempt, and in an ordered queue so are earlier
  messages, because the acceptances that unblocked it may be lost as well. This cannot happen once the same leader has
  responded to a later settlement in that partition: a settlement is durable before its response, and writes are
  ordered. For the same reason a node that was paused or cut off, and does not know yet that another one leads, may
  deliver messages that were accepted there. None of this happens with the other delivery modes.
- At most once, messages may be lost that were in flight when a node failed, a worker left or its request failed, but no
  more than were requested.
- Leases and delays follow the clock of the node; they may end early while it is wrong.
- The time at which Kafka's client received a message is known only roughly, and not at all if a node failed meanwhile;
  its messages go to other workers as soon as its connection ends. Its leases are checked only where their times are
  certain.
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
    GroundTruth,
    Guarantees,
    History,
    Position,
    Settlement,
    Span,
    Spans,
)

SHOWN_MAX: Final = 5
REQUEST_MS: Final = 10_000
"""A request may be served this long after its sender has gone."""
LAST_EVENT_MS: Final = 2_000
"""A killed worker recorded its last event at most this long before the kill."""
TOLERANCE_MS: Final = 10
"""The clocks of a machine are read in whole milliseconds."""

Finding = str


def check(guarantees: Guarantees, history: History, truth: GroundTruth) -> list[Finding]:
    """Return every violated guarantee, each kind with some examples."""
    found: list[Finding] = []
    case = _Case(guarantees, history, truth)
    for name, rule in _RULES.items():
        broken = list(rule(case))
        if broken:
            shown = "; ".join(broken[:SHOWN_MAX])
            found.append(f"{name}: {len(broken)}: {shown}")
    return found


class _Case:
    """A history, indexed by message."""

    def __init__(self, guarantees: Guarantees, history: History, truth: GroundTruth) -> None:
        self.guarantees = guarantees
        self.truth = truth
        self.history = history
        self.deliveries: dict[Position, list[Delivery]] = defaultdict(list)
        self.settlements: dict[Position, list[Settlement]] = defaultdict(list)
        for delivery in sorted(
            map(self._with_exact_time, history.deliveries), key=lambda delivery: (delivery.to_ms, delivery.attempt)
        ):
            self.deliveries[delivery.position].append(delivery)
        # By partition, certain settlements: when the worker sent each, and when it got a response.
        self._settled: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for settlement in history.settlements:
            self.settlements[settlement.position].append(settlement)
            if settlement.taken and settlement.response_ms is not None:
                self._settled[settlement.position.partition].append((settlement.sent_ms, settlement.response_ms))
        for times in self._settled.values():
            times.sort()

    def _with_exact_time(self, delivery: Delivery) -> Delivery:
        """Narrow the time of the lease to the exact one, where it is known."""
        if not delivery.deadline_ms and self.truth.disturbed.overlaps(delivery.from_ms, delivery.to_ms):
            return delivery._replace(from_ms=0)
        if not delivery.deadline_ms or self.is_stepped(delivery.from_ms, delivery.to_ms):
            return delivery
        leased_ms = delivery.deadline_ms - self.guarantees.lease_ms
        return delivery._replace(from_ms=leased_ms, to_ms=leased_ms)

    def is_stepped(self, begin_ms: int, end_ms: int) -> bool:
        """Whether the clock of a node was wrong meanwhile."""
        return self.truth.stepped.overlaps(begin_ms, end_ms)

    def may_lose_lease(self, lease: Delivery, then: Delivery) -> bool:
        """Whether a lease may have been lost by the time of a later one."""
        if self.guarantees.delivery != AT_LEAST_ONCE:
            return False
        fault_ms = self.truth.disturbed.next_ms(lease.from_ms)
        return fault_ms <= then.to_ms and not self._was_durable(lease, fault_ms)

    def _was_durable(self, lease: Delivery, until_ms: float) -> bool:
        """Whether a later settlement in the partition was acknowledged in time, which makes the lease durable."""
        times = self._settled[lease.position.partition]
        later = times[bisect_left(times, (lease.to_ms + 1, 0)) :]
        return any(response_ms < until_ms for _, response_ms in later)

    def accepted(self, position: Position, *, certainly: bool) -> bool:
        """Whether a worker accepted a message."""
        accepts = [settlement for settlement in self.settlements[position] if settlement.verb == Verb.ACCEPT]
        return any(accept.is_certain if certainly else accept.is_possible for accept in accepts)

    def attempt_of(self, settlement: Settlement) -> int:
        """Return the attempt that a settlement belongs to: a worker that got a message twice settles the later one."""
        deliveries = [
            delivery
            for delivery in self.deliveries.get(settlement.position, ())
            if delivery.worker == settlement.worker
        ]
        return max(
            (delivery.attempt for delivery in deliveries if delivery.from_ms <= (settlement.response_ms or 0)),
            default=0,
        )

    def settlements_of(self, delivery: Delivery) -> list[Settlement]:
        """Return the settlements of a delivery, in order."""
        return [
            settlement
            for settlement in self.settlements[delivery.position]
            if (settlement.worker, settlement.attempt) == (delivery.worker, delivery.attempt)
        ]

    def exclusive_until_ms(self, delivery: Delivery) -> float:
        """Return the time until which no other worker may have the message."""
        exclusive_until_ms: float = delivery.deadline_ms
        if not delivery.deadline_ms:
            gone_ms = self.history.last_ms.get(delivery.worker, 0)
            exclusive_until_ms = delivery.from_ms + self.guarantees.lease_ms
            exclusive_until_ms = min(exclusive_until_ms, gone_ms, self.truth.disturbed.next_ms(delivery.from_ms))
        for settlement in self.settlements_of(delivery):
            if settlement.verb != Verb.EXTEND:
                exclusive_until_ms = min(exclusive_until_ms, settlement.sent_ms)
            elif settlement.is_certain:
                exclusive_until_ms = max(exclusive_until_ms, settlement.sent_ms + self.guarantees.lease_ms)
        return exclusive_until_ms


def _lost(case: _Case) -> Iterator[str]:
    """Find messages that were neither accepted nor dead-lettered."""
    if case.guarantees.delivery == AT_MOST_ONCE:
        return
    for position in case.truth.expected:
        if not case.accepted(position, certainly=False) and not case.truth.dead_letters[position]:
            yield f"{position} was delivered as {[delivery[1:] for delivery in case.deliveries.get(position, ())]}"


def _lost_without_fault(case: _Case) -> Iterator[str]:
    """Check that messages lost at most once were in flight during a fault."""
    if case.guarantees.delivery != AT_MOST_ONCE:
        return
    missing = case.truth.expected.keys() - case.deliveries.keys()
    loss_spans = _loss_spans(case)
    delivered_by_ms = _delivered_by_ms(case)
    for position in sorted(missing):
        published = case.truth.expected[position]
        begin_ms = max(published.sent_ms, published.due_ms)
        end_ms = delivered_by_ms(position)
        if not loss_spans.overlaps(begin_ms, int(min(end_ms, begin_ms + 10**9))):
            yield f"{position} was delivered between {begin_ms} and {end_ms}, when there was no fault"
    unreceived = sum(call.messages_max - call.received for call in _calls_with_possible_loss(case))
    if len(missing) > unreceived:
        yield f"{len(missing)} are missing, but only {unreceived} were requested during faults"


def _calls_with_possible_loss(case: _Case) -> list[Call]:
    """Return requests whose response, or part of it, may not have arrived."""
    last: dict[str, Call] = {}
    for call in sorted(case.history.calls, key=lambda settlement: settlement.requested_ms):
        last[call.worker] = call
    last_calls = set(last.values())
    disturbed = case.truth.disturbed
    return [
        call
        for call in case.history.calls
        if not call.responded
        or call in last_calls
        or disturbed.overlaps(call.requested_ms, call.ended_ms or call.requested_ms)
    ]


def _loss_spans(case: _Case) -> Spans:
    spans = list(case.truth.disturbed)
    for call in _calls_with_possible_loss(case):
        ended_ms = max(call.ended_ms or 0, case.history.last_ms.get(call.worker, 0)) + LAST_EVENT_MS
        spans.append(
            Span(call.requested_ms, ended_ms if call.responded else max(ended_ms, call.requested_ms + REQUEST_MS))
        )
    return Spans(spans)


def _delivered_by_ms(case: _Case) -> Callable[[Position], float]:
    """Return the time by which a message was delivered: messages are delivered in order, so before a later one."""
    after: dict[tuple[int, bytes], list[tuple[int, int]]] = defaultdict(list)
    for position, ones in case.deliveries.items():
        published = case.truth.expected.get(position)
        if published is not None and not published.due_ms:
            key = published.key if case.guarantees.ordered else b""
            after[position.partition, key].append((position.offset, ones[0].to_ms))
    for times in after.values():
        times.sort(reverse=True)
        best = inf
        for at, (offset, to_ms) in enumerate(times):
            best = min(best, to_ms)
            times[at] = (offset, int(best))
        times.reverse()

    def delivered_by_ms(position: Position) -> float:
        published = case.truth.expected[position]
        if published.due_ms:
            return inf
        times = after[position.partition, published.key if case.guarantees.ordered else b""]
        at = bisect_left(times, (position.offset, 0))
        return times[at][1] if at < len(times) else inf

    return delivered_by_ms


def _dead_lettered_twice(case: _Case) -> Iterator[str]:
    for position, count in case.truth.dead_letters.items():
        if count > 1:
            yield f"{position} is a dead letter {count} times"


def _misplaced_dead_letters(case: _Case) -> Iterator[str]:
    """Check that rejected messages are in the dead letter topic; at most once, it must be empty."""
    if case.guarantees.delivery == AT_MOST_ONCE:
        yield from map(str, case.truth.dead_letters)
        return
    for position, ones in case.settlements.items():
        if not case.truth.dead_letters[position] and any(
            settlement.verb == Verb.REJECT and settlement.is_certain for settlement in ones
        ):
            yield f"{position}: {[settlement[1:] for settlement in ones]}"


def _accepted_and_dead(case: _Case) -> Iterator[str]:
    for position in case.truth.dead_letters:
        if case.accepted(position, certainly=True):
            yield f"{position}: {[settlement[1:] for settlement in case.settlements[position]]}"


def _unexpected(case: _Case) -> Iterator[str]:
    positions = {*case.deliveries, *case.truth.dead_letters} - {*case.truth.expected}
    yield from map(str, sorted(positions))


def _content_differs(case: _Case) -> Iterator[str]:
    """Check that delivered messages have the content of the topic."""
    for position, ones in case.deliveries.items():
        published = case.truth.expected.get(position)
        if published is not None and any(delivery.checksum != published.checksum for delivery in ones):
            yield str(position)


def _delivered_too_often(case: _Case) -> Iterator[str]:
    for position, ones in case.deliveries.items():
        if case.guarantees.delivery == AT_MOST_ONCE and len(ones) > 1:
            yield f"{position} was delivered to {[(delivery.worker, delivery.to_ms) for delivery in ones]}"
        most = max(delivery.attempt for delivery in ones)
        if 0 < case.guarantees.attempts < most:
            yield f"{position} was delivered for attempt {most}"


def _attempts_out_of_order(case: _Case) -> Iterator[str]:
    """Check that attempts increase by one, and that no two deliveries share one."""
    for position, ones in case.deliveries.items():
        for before, delivery in combinations(ones, 2):
            goes_back = delivery.attempt < before.attempt and delivery.from_ms > before.to_ms
            if (goes_back or delivery.attempt == before.attempt) and not case.may_lose_lease(before, delivery):
                yield (
                    f"{position}: attempt {delivery.attempt} of {delivery.worker} at {delivery.to_ms} "
                    f"follows {before.attempt} of {before.worker} at {before.to_ms}"
                )


def _wrong_deadlines(case: _Case) -> Iterator[str]:
    """Check that each lease starts between request and response."""
    for delivery in case.history.deliveries:
        leased_ms = delivery.deadline_ms - case.guarantees.lease_ms
        is_odd = not delivery.from_ms - TOLERANCE_MS <= leased_ms <= delivery.to_ms + TOLERANCE_MS
        if delivery.deadline_ms and is_odd and not case.is_stepped(delivery.from_ms, delivery.to_ms):
            yield (
                f"{delivery.position} was leased to {delivery.worker} at {delivery.from_ms} to {delivery.to_ms} until "
                f"{delivery.deadline_ms}"
            )


def _leased_twice(case: _Case) -> Iterator[str]:
    """Check that no other worker gets a message during a lease that its worker has not released."""
    if case.guarantees.delivery != EXACTLY_ONCE:
        return
    for position, ones in case.deliveries.items():
        for before, delivery in pairwise(sorted(ones, key=lambda delivery: delivery.attempt)):
            until_ms = case.exclusive_until_ms(before)
            if delivery.to_ms < until_ms and not case.is_stepped(before.from_ms, delivery.to_ms):
                yield (
                    f"{position}: leased by {before.worker} to {until_ms}, "
                    f"delivered to {delivery.worker} at {delivery.to_ms}"
                )


def _redelivered_after_accept(case: _Case) -> Iterator[str]:
    """Check that an accepted message is not delivered again; durable attempts show the order."""
    if case.guarantees.delivery == AT_MOST_ONCE:
        return
    for position, ones in case.deliveries.items():
        accepts = [
            settlement
            for settlement in case.settlements[position]
            if settlement.verb == Verb.ACCEPT and settlement.is_certain
        ]
        if not accepts:
            continue
        accepted_ms = min(accept.response_ms or 0 for accept in accepts)
        attempt, nodes = min(map(case.attempt_of, accepts)), {accept.node for accept in accepts}
        for delivery in ones:
            is_later = delivery.from_ms > accepted_ms
            if case.guarantees.delivery == EXACTLY_ONCE:
                is_later |= delivery.attempt > attempt
            elif not case.truth.is_single_node and (delivery.node < 0 or delivery.node not in nodes):
                is_later &= not case.truth.disturbed.overlaps(delivery.from_ms, delivery.to_ms)
            if is_later:
                yield (
                    f"{position}: accepted at {accepted_ms}, "
                    f"delivered to {delivery.worker} {delivery.from_ms} to {delivery.to_ms}"
                )


def _refused_settlements(case: _Case) -> Iterator[str]:
    """Check that a worker that holds a lease can settle it."""
    if case.guarantees.delivery != EXACTLY_ONCE:
        return
    for position, ones in case.deliveries.items():
        for delivery in ones:
            for first in case.settlements_of(delivery)[:1]:
                if first.taken or first.response_ms is None or first.response_ms >= delivery.deadline_ms:
                    continue
                # It may have been settled already, in an earlier delivery.
                settled = any(
                    settlement.taken and settlement.worker == delivery.worker
                    for settlement in case.settlements[position]
                )
                if not settled and not case.is_stepped(delivery.from_ms, first.response_ms):
                    yield f"{position}: {first.verb.name} of {delivery.worker} was refused before its lease ended"


def _out_of_order(case: _Case) -> Iterator[str]:
    """Check that messages of a key are delivered in order."""
    if not case.guarantees.ordered:
        return
    by_key: dict[tuple[int, bytes], list[Delivery]] = defaultdict(list)
    for position, ones in case.deliveries.items():
        published = case.truth.expected.get(position)
        if published is not None and not published.due_ms:
            by_key[position.partition, published.key].extend(ones)
    for ones in by_key.values():
        ones.sort(key=lambda delivery: (delivery.to_ms, delivery.position))
        latest: list[Delivery] = []
        for delivery in ones:
            for after in latest:
                if (
                    after.position > delivery.position
                    and after.to_ms < delivery.from_ms
                    and not case.may_lose_lease(after, delivery)
                ):
                    yield (
                        f"{delivery.position} was delivered at {delivery.from_ms}, "
                        f"after {after.position} at {after.to_ms}"
                    )
                    break
            # Later deliveries are compared with the last messages in order.
            if not latest or delivery.position >= max(delivery.position for delivery in latest):
                latest = [*latest[-3:], delivery]


def _delivered_early(case: _Case) -> Iterator[str]:
    for position, ones in case.deliveries.items():
        published = case.truth.expected.get(position)
        for delivery in ones:
            due_ms = max(0 if published is None else published.due_ms, _released_until_ms(case, delivery))
            if delivery.to_ms < due_ms and not case.is_stepped(delivery.from_ms - REQUEST_MS, delivery.to_ms):
                yield f"{position} was delivered to {delivery.worker} {due_ms - delivery.to_ms} ms early"


def _released_until_ms(case: _Case, delivery: Delivery) -> int:
    """Return the time until which the previous worker delayed the message when it released it."""
    delays = [
        settlement.sent_ms + settlement.delay_ms
        for settlement in case.settlements[delivery.position]
        if settlement.verb == Verb.RELEASE
        and settlement.is_certain
        and settlement.delay_ms
        and settlement.attempt == delivery.attempt - 1
        # Attempt numbers that were lost are assigned again.
        if settlement.sent_ms <= delivery.to_ms
    ]
    return min(delays, default=0)


_RULES: Final[Mapping[str, Callable[[_Case], Iterator[str]]]] = {
    "lost": _lost,
    "lost without a fault": _lost_without_fault,
    "duplicated in the dead letter topic": _dead_lettered_twice,
    "missing or misplaced in the dead letter topic": _misplaced_dead_letters,
    "accepted and dead-lettered": _accepted_and_dead,
    "delivered unexpectedly": _unexpected,
    "content differs from the topic": _content_differs,
    "delivered too often": _delivered_too_often,
    "attempts that do not increase": _attempts_out_of_order,
    "a lease of the wrong duration": _wrong_deadlines,
    "leased by two workers at once": _leased_twice,
    "redelivered after acceptance": _redelivered_after_accept,
    "refused during a valid lease": _refused_settlements,
    "out of order": _out_of_order,
    "delivered early": _delivered_early,
}
