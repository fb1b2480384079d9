"""Mirrors: list, create, describe, change, delete, pause, resume, fail over, reverse and switch."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.mirrors import MirrorClient, summary_of
from millstream.core.mirror import NAME_LENGTH_MAX
from millstream.gateway.api.route import ChangedSettings, GivenSettings, NoFields, Request, Route, changes_of, texts_of
from millstream.gateway.api.services import Services
from millstream.protocol.private.mirror_messages import CutPartition, RemovedRange, ReverseRequest

MirrorName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
PATTERNS_MAX: Final = 100


class NewMirror(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mirror to declare; its settings include `from`, the brokers of the source."""

    name: MirrorName
    settings: GivenSettings
    enabled: Annotated[bool, Meta(description="Whether to start copying at once.")] = True


class MirrorChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings to change; null resets one to its default."""

    settings: ChangedSettings


class Deletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options for deleting a mirror."""

    force: Annotated[bool, Meta(description="Delete it even if `reverse` needs it, after a failover.")] = False


class Failover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The copies to make writable."""

    topics: Annotated[list[str], Meta(max_length=PATTERNS_MAX)] | None = None
    """Regular expressions for whole names of topics; null for all."""


class Reversal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options with which the old source follows this cluster."""

    address: Annotated[
        str,
        Meta(description="Where it reaches this cluster; by default, at the addresses of the nodes."),
    ] = ""
    settings: GivenSettings = {}
    """How the old source authenticates here."""
    save_to: Annotated[str, Meta(description="The topic of the old source for records that it drops.")] = ""


class MirrorSummary(msgspec.Struct, frozen=True):
    """A mirror's summary."""

    mirror: str
    state: str
    source: str
    topics: int
    lag: int | None
    lag_unknown: int
    lag_s: float | None
    error: str


class MirrorList(msgspec.Struct, frozen=True):
    """Mirrors, by name."""

    mirrors: list[MirrorSummary]


class CopyDescription(msgspec.Struct, frozen=True):
    """A copied partition: the source's end if it is known, the end here, and the end for clients."""

    topic: str
    partition: int
    source_end: int | None
    end: int
    exposed: int
    lag: int | None
    lag_ms: int | None
    epoch: int
    error: str


class MirrorDescription(msgspec.Struct, frozen=True):
    """A mirror with its settings and copies."""

    mirror: str
    id: str
    state: str
    source: str
    source_cluster: str
    error: str
    topics: list[str]
    lag: int | None
    lag_unknown: int
    """Partitions whose lag is not known, and not part of `lag`."""
    lag_s: float | None
    bytes: int
    bytes_per_s: float
    groups: int
    queues: int
    notes: list[str]
    settings: dict[str, str]
    overrides: dict[str, str]
    created_ms: int
    partitions: list[CopyDescription]


class Cut(msgspec.Struct, frozen=True):
    """The cut of a copy; `missing` counts the source's offsets beyond it, null if the source did not respond.

    `dropped` is null if an earlier failover has dropped it.
    """

    topic: str
    partition: int
    offset: int
    epoch: int
    dropped: int | None
    aborted: int
    missing: int | None


class FailoverReport(msgspec.Struct, frozen=True):
    """The copies that are writable now."""

    mirror: str
    partitions: list[Cut]
    source_error: str
    waited_ms: int


class ReversalReport(msgspec.Struct, frozen=True):
    """The records that the old source drops, and the offsets at which this cluster took over."""

    mirror: str
    removed: list[RemovedRange]
    saved_to: str
    recreated: list[str]
    partitions: list[Cut]
    waited_ms: int


async def list_mirrors(services: Services, request: Request[NoFields, NoFields]) -> MirrorList:
    rows = [summary_of(mirror) for mirror in await MirrorClient(services.client).describe()]
    return MirrorList(msgspec.convert([{**row, "source": row["from"]} for row in rows], list[MirrorSummary]))


async def create(services: Services, request: Request[NoFields, NewMirror]) -> MirrorDescription:
    new = request.body
    await MirrorClient(services.client).create(new.name, texts_of(new.settings), is_enabled=new.enabled)
    return await _describe(services, new.name)


async def describe(services: Services, request: Request[Any, Any]) -> MirrorDescription:
    return await _describe(services, request.path["mirror"])


async def change(services: Services, request: Request[NoFields, MirrorChanges]) -> MirrorDescription:
    name = request.path["mirror"]
    await MirrorClient(services.client).alter(name, changes_of(request.body.settings))
    return await _describe(services, name)


async def delete(services: Services, request: Request[Deletion, NoFields]) -> None:
    await MirrorClient(services.client).delete(request.path["mirror"], force=request.query.force)


async def pause(services: Services, request: Request[Any, Any]) -> MirrorDescription:
    await MirrorClient(services.client).set_enabled(request.path["mirror"], is_enabled=False)
    return await _describe(services, request.path["mirror"])


async def resume(services: Services, request: Request[Any, Any]) -> MirrorDescription:
    await MirrorClient(services.client).set_enabled(request.path["mirror"], is_enabled=True)
    return await _describe(services, request.path["mirror"])


async def fail_over(services: Services, request: Request[NoFields, Failover]) -> FailoverReport:
    name = request.path["mirror"]
    report = await MirrorClient(services.client).fail_over(name, request.body.topics)
    return FailoverReport(name, _cuts(report.partitions), report.source_error, report.waited_ms)


async def reverse(services: Services, request: Request[NoFields, Reversal]) -> ReversalReport:
    """Make the old source follow this cluster."""
    return await _reverse(services, request, is_planned=False)


async def switch(services: Services, request: Request[NoFields, Reversal]) -> ReversalReport:
    return await _reverse(services, request, is_planned=True)


async def _reverse(services: Services, request: Request[NoFields, Reversal], *, is_planned: bool) -> ReversalReport:
    name, body = request.path["mirror"], request.body
    reversal = ReverseRequest(
        name=name, address=body.address, settings=texts_of(body.settings), save_to=body.save_to, timeout_ms=10_000
    )
    mirrors = MirrorClient(services.client)
    report = await (mirrors.switch(reversal) if is_planned else mirrors.reverse(reversal))
    removed, recreated, cuts = list(report.removed), list(report.recreated), _cuts(report.partitions)
    return ReversalReport(name, removed, report.saved_to, recreated, cuts, report.waited_ms)


def _cuts(cuts: Iterable[CutPartition]) -> list[Cut]:
    return [
        Cut(cut.topic, cut.partition, cut.offset, cut.epoch, cut.dropped, len(cut.aborted), cut.missing) for cut in cuts
    ]


async def _describe(services: Services, name: str) -> MirrorDescription:
    (described,) = await MirrorClient(services.client).describe([name])
    return msgspec.convert({**described, "source": described["from"]}, MirrorDescription)


_ONE: Final = "/mirrors/{mirror}"

ROUTES: Final = (
    Route("GET", "/mirrors", "List mirrors and their lag", list_mirrors, MirrorList),
    Route("POST", "/mirrors", "Declare a mirror", create, MirrorDescription, body=NewMirror, status=HTTPStatus.CREATED),
    Route("GET", _ONE, "Describe a mirror and its copies", describe, MirrorDescription),
    Route("PATCH", _ONE, "Change settings of a mirror", change, MirrorDescription, body=MirrorChanges),
    Route("DELETE", _ONE, "Delete a mirror without copies", delete, None, query=Deletion),
    Route("POST", f"{_ONE}/pause", "Pause copying", pause, MirrorDescription),
    Route("POST", f"{_ONE}/resume", "Resume copying", resume, MirrorDescription),
    Route("POST", f"{_ONE}/failover", "Make copies writable", fail_over, FailoverReport, body=Failover),
    Route("POST", f"{_ONE}/reverse", "Make the old source follow this cluster", reverse, ReversalReport, body=Reversal),
    Route(
        "POST", f"{_ONE}/switch", "Switch the direction of a mirror without loss", switch, ReversalReport, body=Reversal
    ),
)
