"""The batch commit: many writers, each with its own transaction, whose transactions are decided together.

A transactional id of the form `spark/{query}/{batch}/{partition}/{random}` belongs to one attempt to write one part of
one batch of a query. The query determines the partition of all of them, so one shard sees them all, and it stores the
last committed batch of each query. `{random}` may begin with the name of a run and a hyphen. A driver that gives up
aborts its run: attempts of the run that begin later, in tasks that Spark has not stopped yet, are refused, while
another run may try the batch again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.core.errors import InvalidRequest
from millstream.core.ids import ProducerId

PREFIX: Final = "spark/"
NO_BATCH: Final = -1
_PARTS: Final = 4
_BATCH_MAX: Final = 2**63 - 1


class Attempt(NamedTuple):
    """The parts of such a transactional id."""

    query: str
    batch: int
    run: str = ""


class LastBatch(NamedTuple):
    """The last committed batch of a query, if any; when it was written; the last run that was aborted."""

    batch: int
    updated_ms: int
    ended_run: str = ""


class Member(NamedTuple):
    """One prepared transaction of a batch."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int


def attempt_of(transactional_id: str) -> Attempt | None:
    """Parse a transactional id of this form; return None for all others. The query may contain slashes."""
    if not transactional_id.startswith(PREFIX):
        return None
    parts = transactional_id[len(PREFIX) :].rsplit("/", _PARTS - 1)
    if len(parts) != _PARTS or not all(parts) or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    batch = int(parts[1])
    run, hyphen, _ = parts[3].partition("-")
    return Attempt(parts[0], batch, run if hyphen else "") if batch <= _BATCH_MAX else None


def placement_of(transactional_id: str) -> str:
    """Return what determines the partition of `__transaction_state`: the id, or the query that it belongs to."""
    attempt = attempt_of(transactional_id)
    return transactional_id if attempt is None else attempt.query


def check_members(query: str, batch: int, members: tuple[Member, ...]) -> None:
    """Raise unless every member is an attempt at this batch of this query."""
    if not query or not 0 <= batch <= _BATCH_MAX:
        raise InvalidRequest(f"a batch has a query and a number from 0 on, not {query!r} and {batch}")
    for member in members:
        attempt = attempt_of(member.transactional_id)
        if attempt is None or (attempt.query, attempt.batch) != (query, batch):
            raise InvalidRequest(f"{member.transactional_id!r} is not an attempt at batch {batch} of query {query!r}")
