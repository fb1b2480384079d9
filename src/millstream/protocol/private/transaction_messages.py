"""Private requests about transactions and batch commits."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.protocol.private.message import Response

PREPARE_KEY: Final = 32010
COMPLETE_BATCH_KEY: Final = 32011
ABORT_BATCH_KEY: Final = 32012
LAST_BATCH_KEY: Final = 32013
ABORT_KEY: Final = 32014


class BatchMember(msgspec.Struct, frozen=True):
    """A transaction that is one part of a batch, by its producer."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class CompleteBatchRequest(msgspec.Struct, frozen=True):
    """A batch and all of its parts."""

    query: str
    batch: int
    members: tuple[BatchMember, ...]


class CompleteBatchResponse(Response, frozen=True, kw_only=True):
    """Whether this request committed the batch, or it was committed before."""

    done_now: bool = False


class AbortBatchRequest(msgspec.Struct, frozen=True):
    """A batch, and the run that may not start further attempts."""

    query: str
    batch: int
    run: str = ""


class AbortBatchResponse(Response, frozen=True, kw_only=True):
    """The number of aborted attempts."""

    aborted: int = 0


class LastBatchRequest(msgspec.Struct, frozen=True):
    """A query."""

    query: str


class LastBatchResponse(Response, frozen=True, kw_only=True):
    """The last committed batch; -1 if there is none."""

    batch: int = -1


class AbortTransactionRequest(msgspec.Struct, frozen=True):
    """A transactional id."""

    transactional_id: str


class AbortTransactionResponse(Response, frozen=True, kw_only=True):
    """The state that the transaction was in."""

    state: str = ""
