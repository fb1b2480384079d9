"""The check whether a worker holds a range agrees with the queue itself."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.queue import Queue
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, QueueKey, SubscriptionSettings, Verb

KEY = QueueKey(UUID(int=1), UUID(int=2), PartitionIndex(3))
NOW_MS = 1_000_000
MESSAGES = 30
WORKERS = ("one", "two", "stranger")

_ranges = st.tuples(st.integers(0, MESSAGES + 5), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
_settles = st.builds(
    lambda span, verb, attempt: Settlement(
        Offset(span[0]), Offset(span[1]), verb, 60_000 if verb == Verb.RELEASE else None, "", attempt
    ),
    _ranges,
    st.sampled_from(Verb),
    st.sampled_from([None, None, 1, 2, 300]),
)
_steps = st.lists(
    st.tuples(st.sampled_from(WORKERS[:2]), st.one_of(st.integers(1, 8), _settles)), min_size=1, max_size=12
)


@given(_steps, st.lists(_settles, min_size=1, max_size=8), st.sampled_from([AT_LEAST_ONCE, AT_MOST_ONCE]))
def test_only_the_holder_may_settle(
    steps: list[tuple[str, int | Settlement]], asked: list[Settlement], delivery: str
) -> None:
    # The offsets are dense, so that some waiting ones are parked.
    queue = Queue(KEY, SubscriptionSettings(delivery=delivery), leader_epoch=1, dense_max=10)
    queue.begin(0, now_ms=NOW_MS)
    queue.add_scanned(0, MESSAGES, now_ms=NOW_MS, absent=[(7, 8)])
    for worker, step in steps:
        if isinstance(step, Settlement):
            queue.settle(worker, [step], now_ms=NOW_MS)
        else:
            queue.acquire(worker, now_ms=NOW_MS, max_records=step)
    for settle in asked:
        for worker in WORKERS:
            expected = queue.holds(worker, settle)
            (refused,) = queue.settle(worker, [settle], now_ms=NOW_MS)
            assert (refused is None) == expected


def test_messages_that_a_worker_does_not_hold_are_named() -> None:
    queue = Queue(KEY, SubscriptionSettings(), leader_epoch=1)
    queue.begin(0, now_ms=NOW_MS)
    single, several = (Settlement(Offset(0), Offset(last), Verb.ACCEPT) for last in (0, 3))
    reported = [str(refused) for refused in queue.settle("one", [single, several], now_ms=NOW_MS)]
    assert reported == [
        "one does not hold message 0 any more, or never did",
        "one does not hold messages 0 to 3 any more, or never did",
    ]
