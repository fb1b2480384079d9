"""Change the direction of a mirror: failover, reverse and switch.

The cluster that holds the copies is in charge: it cuts them, lets clients write to them, and asks the old source to
follow (`adopt`). Each step can be repeated. A mirror is always declared on the side that follows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal
from uuid import UUID

import msgspec
from kio.schema.errors import ErrorCode

from millstream.broker.mirror.declared_copies import require_enforced
from millstream.broker.mirror.service import MirrorService
from millstream.broker.mirror.source import Source, is_original, offer_pages
from millstream.core.backoff import Backoff
from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    InvalidMirror,
    MillstreamError,
    NotLeader,
    OffsetOutOfRange,
    RequestTimedOut,
    TopicExists,
    UnknownMirror,
)
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.mirror import (
    CREDENTIALS,
    SOURCE,
    Mirror,
    MirrorSettings,
    TopicOffsets,
    check_mirror,
    listed,
    merged_offsets,
    pattern_of,
)
from millstream.core.regex import compile_regex
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import Topic, TopicPartition, check_topic_name
from millstream.protocol.private.mirror_messages import (
    AdoptRequest,
    AdoptResponse,
    BarrierRequest,
    CutPartition,
    FailoverRequest,
    FailoverResponse,
    OfferRequest,
    OfferResponse,
    QueueSnapshot,
    RemovedRange,
    ReverseRequest,
    ReverseResponse,
)
from millstream.protocol.records.batch import BatchHeader, iterate_whole_headers
from millstream.protocol.records.control import read_marker
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import TRANSIENT
from millstream.protocol.wire.group_offsets import MIRRORED, commit_offsets, commits_by_group

_logger = logging.getLogger(__name__)

Step = Literal["check", "fence", "follow"]
SOURCE_S: Final = 2.0
"""How long a failover waits for the source to report its high watermarks."""
APPLY_S: Final = 10.0
"""How long a failover tries to apply the offsets of groups."""
REACH_S: Final = 10.0
"""How long an old source tries to reach the cluster that takes over, before it changes anything."""
CONCURRENT_MAX: Final = 32
RELEASE_S: Final = 30.0
"""How long a cancelled switch tries to let the source accept writers again."""
RELEASE_ATTEMPTS: Final = 8
"""How often the source releases topics that another of its nodes is still fencing, before it gives up."""
SWITCH_S: Final = 60.0
"""How long a switch takes at most, apart from the drain."""
SAVED_AT_ONCE: Final = 500
ORIGINAL_HEADER: Final = "millstream-original"
"""A header of saved records: topic, partition and offset that they had."""


async def fail_over(service: MirrorService, request: FailoverRequest) -> FailoverResponse:
    """Make copies writable here; nothing is copied to them any more.

    Can be repeated: after a failure it continues, and after a success whose response was lost it returns the cuts.
    """
    started = service.clock.monotonic()
    mirror = await service.mirrors.find(request.name)
    copied = service.copied_topics(mirror.name)
    if request.topics is not None:
        letters = _letters_of(service, mirror, request.topics)
        request = msgspec.structs.replace(request, topics=[*request.topics, *map(pattern_of, letters)])
    if service.is_fenced(mirror.name):
        async with service.adopting:
            return await _end_fence(service, mirror, request.topics, started)
    if not _matching((topic.name for topic in copied), request.topics) and (
        earlier := _earlier_cuts(service, mirror, request.topics)
    ):
        await service.end_cut(mirror)
        return FailoverResponse(partitions=earlier, source_error="the source was not contacted again")
    topics = chosen_topics(service, mirror, request.topics)
    if request.is_planned:
        # An earlier attempt, perhaps on another node, may have got further; then everything was carried over.
        await service.mirrors.load()
        mirror = await service.mirrors.find(mirror.name)
        if any(topic.name not in mirror.cut_epochs for topic in topics):
            _check_running(service, mirror)
            follower = await service.follower_of(mirror, started + SWITCH_S)
            await follower.sync_all([topic.name for topic in topics])
    # Nothing is verified from here on, so every copy is cut at the same moment.
    mirror = await service.begin_cut(mirror, topics, is_partial=request.topics is not None)
    ends, source_error = await _source_ends(mirror, topics)
    try:
        cuts = await cut_topics(service, mirror, topics)
    except (NotLeader, BrokerUnreachable) as error:
        again = service.failover_command(mirror)
        way = "" if len(topics) == 1 else ", or choose only other copies with --topics to make those writable first"
        raise NotLeader(
            f"{error}. None of the chosen copies is writable yet: start the nodes that are down, and run `{again}` "
            f"again{way}"
        ) from None
    await apply_recorded_offsets(service, mirror)
    await make_writable(service, topics)
    await _track_letters(service, topics)
    await service.end_cut(mirror)
    waited_ms = int((service.clock.monotonic() - started) * 1000)
    _logger.info("copies are writable", extra={"mirror": mirror.name, "topics": len(topics), "took_ms": waited_ms})
    partitions = [
        msgspec.structs.replace(cut, source_end=ends.get(TopicPartition(cut.topic, PartitionIndex(cut.partition))))
        for cut in cuts
    ]
    return FailoverResponse(partitions=partitions, source_error=source_error, waited_ms=waited_ms)


async def _end_fence(
    service: MirrorService, mirror: Mirror, patterns: Sequence[str] | None, started: float
) -> FailoverResponse:
    """Accept writers again, on the source of a switch whose target is gone."""
    fenced = [topic for topic in service.copied_topics(mirror.name) if topic.is_draining]
    chosen = _matching((topic.name for topic in fenced), patterns)
    topics = [topic for topic in fenced if topic.name in chosen]
    if not topics:
        raise _no_copies(mirror, patterns)
    ends = await service.high_watermarks([topic.name for topic in topics])
    await make_writable(service, topics)
    partitions = [
        # As this is the source, it lacks nothing.
        CutPartition(
            topic=topic.name, partition=index, offset=end, epoch=_epoch_of(service, topic, index), source_end=end
        )
        for topic in topics
        for index, end in sorted(ends[topic.name].items())
    ]
    await _delete_unused(service, mirror.name)
    return FailoverResponse(partitions=partitions, waited_ms=int((service.clock.monotonic() - started) * 1000))


def _earlier_cuts(service: MirrorService, mirror: Mirror, patterns: Sequence[str] | None) -> list[CutPartition]:
    """Return the cuts of those copies of a mirror that still exist and whose names match."""
    return [
        CutPartition(
            topic=name,
            partition=index,
            offset=offset,
            epoch=_epoch_of(service, topic, index),
            dropped=None,
            aborted=mirror.aborted.get(name, {}).get(index, ()),
        )
        for name in sorted(_matching(mirror.cuts, patterns))
        if (topic := service.topics.get(name)) is not None
        for index, offset in sorted(mirror.cuts[name].items())
    ]


def _matching(names: Iterable[str], patterns: Sequence[str] | None) -> set[str]:
    """Return the names that match one of the patterns; without patterns, all of them."""
    if patterns is None:
        return set(names)
    compiled = [compile_regex(pattern) for pattern in patterns]
    return {name for name in names if any(pattern.fullmatch(name) for pattern in compiled)}


def _letters_of(service: MirrorService, mirror: Mirror, patterns: Sequence[str]) -> list[str]:
    """Return the dead letter topics of copies whose names match, unless they also belong to other copies.

    The queues of these copies will write to them.
    """
    copied = {topic.name for topic in service.copied_topics(mirror.name)}
    return sorted(
        letters
        for letters, topics in service.subscriptions.letter_origins().items()
        if (letters in copied or letters in mirror.cuts)
        and (chosen := _matching(topics, patterns))
        and copied.isdisjoint(topics - chosen)
    )


def _epoch_of(service: MirrorService, topic: Topic, index: int) -> int:
    state = service.topics.state_of(topic, index)
    return -1 if state is None else state.leader_epoch


def chosen_topics(service: MirrorService, mirror: Mirror, patterns: Sequence[str] | None) -> list[Topic]:
    """Return the copies of a mirror whose names match; raise `InvalidMirror` if there are none."""
    copied = service.copied_topics(mirror.name)
    chosen = _matching((topic.name for topic in copied), patterns)
    copied = [topic for topic in copied if topic.name in chosen]
    if not copied:
        raise _no_copies(mirror, patterns)
    if any(topic.is_draining for topic in copied):
        raise InvalidMirror(
            f"the other side of mirror {mirror.name!r} is taking over; wait until it has finished. "
            f"If that side is gone, `millstream mirror failover {mirror.name}` lets clients write here again"
        )
    return copied


def _no_copies(mirror: Mirror, patterns: Sequence[str] | None) -> InvalidMirror:
    of = "" if patterns is None else f" that match {', '.join(patterns)}"
    return InvalidMirror(f"mirror {mirror.name!r} has no copies{of}; `millstream mirror describe` shows them")


async def cut_topics(service: MirrorService, mirror: Mirror, topics: Sequence[Topic]) -> list[CutPartition]:
    """Cut every partition of some copies, and record where."""
    turn = asyncio.Semaphore(CONCURRENT_MAX)

    async def cut(where: TopicPartition) -> CutPartition:
        async with turn:
            return await service.cut_everywhere(mirror, where)

    cuts = await gather_or_cancel(
        cut(TopicPartition(topic.name, PartitionIndex(index))) for topic in topics for index in range(topic.partitions)
    )
    ends: dict[str, dict[int, int]] = {}
    aborted: dict[str, dict[int, Sequence[int]]] = {}
    for partition_cut in cuts:
        ends.setdefault(partition_cut.topic, {})[partition_cut.partition] = partition_cut.offset
        aborted.setdefault(partition_cut.topic, {})[partition_cut.partition] = partition_cut.aborted

    def recorded(now: Mirror) -> Mirror:
        return dataclasses.replace(
            now, cuts=merged_offsets(now.cuts, ends), aborted=merged_offsets(now.aborted, aborted)
        )

    await service.mirrors.change(mirror.name, recorded)
    return cuts


async def apply_recorded_offsets(service: MirrorService, mirror: Mirror) -> None:
    """Apply the offsets of groups that were committed by the transactions that a failover keeps.

    They were recorded together with the cut, and the mirror may have been stopped before it applied them.
    """
    recorded = {
        group: {
            TopicPartition(topic, PartitionIndex(index)): offset
            for topic, found in offsets.items()
            for index, offset in found.items()
        }
        for group, offsets in mirror.group_offsets.items()
    }
    if not recorded:
        return
    readable = await service.exposed_offsets({where for offsets in recorded.values() for where in offsets})
    pending = {
        group: {where: min(at, readable[where]) for where, at in offsets.items() if where in readable}
        for group, offsets in recorded.items()
    }
    backoff, deadline = Backoff(), service.clock.monotonic() + APPLY_S
    while pending:
        failed = await _apply_offsets(service.client(), pending)
        is_over = service.clock.monotonic() >= deadline
        pending = {
            group: pending[group] for group, error in failed.items() if isinstance(error, TRANSIENT) and not is_over
        }
        for group in failed.keys() - pending.keys():
            # Clients must be able to write even if a coordinator stays away.
            extra = {"group": group, "offsets": str(recorded[group]), "error": str(failed[group])}
            _logger.warning("offsets of a group are not applied", extra=extra)
        if pending:
            await backoff.pause()


async def _apply_offsets(
    client: Client, offsets: Mapping[str, Mapping[TopicPartition, int]]
) -> dict[str, MillstreamError]:
    """Commit offsets that are not behind those that clients have committed here; return the errors by group."""
    failed: dict[str, MillstreamError] = {}
    try:
        committed = await commits_by_group(client, list(offsets))
    except MillstreamError as error:
        return dict.fromkeys(offsets, error)
    for group, here in committed.items():
        if isinstance(here, MillstreamError):
            failed[group] = here
            continue
        changed = {
            where: at
            for where, at in offsets[group].items()
            if where not in here or here[where].offset < at or here[where].metadata == MIRRORED
        }
        try:
            if changed:
                await commit_offsets(client, group, changed, metadata=MIRRORED)
        except MillstreamError as error:
            failed[group] = error
    return failed


async def make_writable(service: MirrorService, topics: Sequence[Topic]) -> None:
    """Allow clients to write to topics that were cut."""
    await _set_mirror(service, topics, "")


async def _track_letters(service: MirrorService, topics: Iterable[Topic]) -> None:
    """Make queues count the open letters of dead letter topics, whose offsets also include the marks of the cuts."""
    with suppress(MillstreamError):
        await service.subscriptions.track_letters(
            {topic.name for topic in topics} & service.subscriptions.letter_topics()
        )


async def _set_mirror(
    service: MirrorService, topics: Sequence[Topic], mirror: str, *, is_draining: bool = False
) -> None:
    """Allow only a mirror to write to topics; without a name, allow clients again."""
    turn = asyncio.Semaphore(CONCURRENT_MAX)

    async def change(topic: Topic) -> None:
        async with turn:
            await service.topics.set_mirror(topic.name, mirror, is_draining=is_draining)

    await gather_or_cancel(change(topic) for topic in topics)


async def _source_ends(mirror: Mirror, topics: Sequence[Topic]) -> tuple[dict[TopicPartition, int], str]:
    """Return the source's high watermarks by the copies' names, or why it could not be asked in time."""
    originals = {
        TopicPartition(mirror.source_name(topic), PartitionIndex(index)): TopicPartition(
            topic.name, PartitionIndex(index)
        )
        for topic in topics
        for index in range(topic.partitions)
    }
    try:
        async with asyncio.timeout(SOURCE_S), Source(mirror.settings, name=mirror.name) as source:
            ends = await source.ends(originals)
            now = await source.metadata({where.topic for where in originals})
    except TimeoutError:
        return {}, f"the source did not respond within {SOURCE_S:g} s"
    except MillstreamError as error:
        return {}, str(error)
    others = {
        topic.name
        for topic in topics
        if (source_topic := now.topics.get(mirror.source_name(topic))) is not None
        and not is_original(topic, source_topic)
    }
    known = {originals[where]: end for where, end in ends.items() if originals[where].topic not in others}
    deleted = {
        where.topic
        for original, where in originals.items()
        if now.errors.get(original.topic) == ErrorCode.unknown_topic_or_partition and where not in known
    }
    silent = [str(where) for where in originals.values() if where not in known and where.topic not in others | deleted]
    problems = {
        "{} was deleted at the source": deleted,
        "{} was deleted at the source and created again, so it is another topic now": others,
        "the source did not respond for {}": silent,
    }
    return known, "; ".join(text.format(listed(names)) for text, names in problems.items() if names)


# -- the way back -------------------------------------------------------------------------------------------------


async def reverse(service: MirrorService, request: ReverseRequest) -> ReverseResponse:
    """Make the old source follow this cluster, after a failover."""
    started = service.clock.monotonic()
    mirror = await service.mirrors.find(request.name)
    _check_reversible(service, mirror)
    if service.copied_topics(mirror.name):
        raise InvalidMirror(
            f"mirror {mirror.name!r} still copies from its source; change sides with `millstream mirror switch "
            f"{mirror.name}`, or fail over first"
        )
    if not mirror.cuts:
        raise InvalidMirror(f"no topic of mirror {mirror.name!r} was failed over, so there is nothing to reverse")
    async with Source(mirror.settings, name=mirror.name) as source:
        adopted = await source.ask(None, _adoption(service, mirror, request, step="follow"), waits=True)
    await service.mirrors.delete(mirror.name)
    return ReverseResponse(
        removed=adopted.removed,
        saved_to=request.save_to if adopted.removed else "",
        recreated=adopted.recreated,
        waited_ms=int((service.clock.monotonic() - started) * 1000),
    )


async def switch(service: MirrorService, request: ReverseRequest) -> ReverseResponse:
    """Reverse a mirror without losing records: stop the writers of the source, drain it, take over.

    The source also follows topics that were failed over earlier. It must not have records of them that this side lacks.
    """
    service.switching.add(request.name)
    try:
        return await _switch(service, request)
    finally:
        service.switching.discard(request.name)


async def _switch(service: MirrorService, request: ReverseRequest) -> ReverseResponse:
    started = service.clock.monotonic()
    mirror = await service.mirrors.find(request.name)
    _check_reversible(service, mirror)
    topics = chosen_topics(service, mirror, None)
    _check_running(service, mirror)
    deadline = started + request.timeout_ms / 1000
    await service.follower_of(mirror, deadline)
    async with Source(mirror.settings, name=mirror.name) as source:
        names = {topic.name for topic in topics}
        # A mirror that was reversed has cuts of topics that are copies again.
        failed_over = {name: cuts for name, cuts in mirror.cuts.items() if name not in names}
        fence = _adoption(service, dataclasses.replace(mirror, cuts=failed_over), request, step="fence")
        if failed_over:
            # A switch that will be refused must not stop the writers. Records may still arrive before the fence.
            await _check_nothing_lost(source, mirror, msgspec.structs.replace(fence, step="check"))
        try:
            fenced = await _check_nothing_lost(source, mirror, fence)
            ends = {name: found for name, found in fenced.ends.items() if name in names}
            follower = await service.follower_of(mirror, deadline)
            await follower.drain(ends, deadline)
            await follower.sync_all(names)
            mirror = await service.begin_cut(mirror, topics)
            cuts = await cut_topics(service, mirror, topics)
        except BaseException:
            # No client writes here yet, so the source can keep its role, unless the copies cannot follow it again.
            await _follow_again(service, mirror)
            await _release(source, msgspec.structs.replace(fence, step="release"))
            raise
        await make_writable(service, topics)
        await _track_letters(service, topics)
        mirror = await service.mirrors.find(mirror.name)
        follow = msgspec.structs.replace(_adoption(service, mirror, request, step="follow"), is_fenced=True)
        try:
            adopted = await source.ask(None, follow, waits=True)
        except InvalidMirror as error:
            # The error says what to do.
            raise InvalidMirror(f"clients can write here now, but the old source does not follow: {error}") from None
        except MillstreamError as error:
            raise RequestTimedOut(
                f"clients can write here now, but the old source does not follow yet: {error}. When it is available, "
                f"run `millstream mirror reverse {mirror.name} --save-to TOPIC`"
            ) from None
    await service.mirrors.delete(mirror.name)
    return ReverseResponse(
        removed=adopted.removed,
        recreated=adopted.recreated,
        partitions=cuts,
        waited_ms=int((service.clock.monotonic() - started) * 1000),
    )


async def _follow_again(service: MirrorService, mirror: Mirror) -> None:
    """Make the copies follow again; if that fails, the source stays fenced, so that only one side accepts writes."""
    try:
        await service.cancel_cut(mirror)
    except MillstreamError as error:
        raise RequestTimedOut(
            f"the switch stopped halfway and could not be undone ({error}), so the source refuses writers; complete it "
            f"with `{service.failover_command(mirror)}`"
        ) from None


async def _release(source: Source, release: AdoptRequest) -> None:
    """Release the source of a cancelled switch; if that fails, raise an error that says what to do."""
    backoff, reason = Backoff(max_s=5.0), "it did not respond"
    try:
        async with asyncio.timeout(RELEASE_S):
            while True:
                try:
                    await source.ask(None, release, waits=True)
                    return
                except (RequestTimedOut, *TRANSIENT) as error:
                    reason = str(error)
                    _logger.warning("a source cannot be released", extra={"mirror": release.name, "error": reason})
                await backoff.pause()
    except TimeoutError:
        raise RequestTimedOut(
            f"the switch was cancelled, but the source could not be released and still refuses writers ({reason}); run "
            f"`millstream mirror failover {release.name}` on the source"
        ) from None


async def _check_nothing_lost(source: Source, mirror: Mirror, request: AdoptRequest) -> AdoptResponse:
    """Check or fence a source; raise an error if it has records of a topic that was failed over before."""
    response = await source.ask(None, request, waits=True)
    if not response.removed:
        return response
    first = response.removed[0]
    last = first.end - 1
    offsets = f"offset {last}" if first.start == last else f"offsets {first.start} to {last}"
    raise InvalidMirror(
        f"topic {first.topic!r} was failed over before, and written at the source since (partition "
        f"{first.partition}, {offsets}), so a switch would lose these records. Run "
        f"`millstream mirror failover {mirror.name}` and `millstream mirror reverse {mirror.name} --save-to TOPIC`"
    )


def _check_running(service: MirrorService, mirror: Mirror) -> None:
    if service.unfinished_cuts(mirror):
        raise InvalidMirror(
            f"a failover of mirror {mirror.name!r} has begun; finish it with `{service.failover_command(mirror)}`. "
            f"Once all copies are writable, let the old source follow with `millstream mirror reverse {mirror.name}`"
        )
    if not mirror.is_due:
        raise InvalidMirror(f"mirror {mirror.name!r} is not running; resume it first, or fail over")


def _check_reversible(service: MirrorService, mirror: Mirror) -> None:
    is_copying = any(not topic.is_draining for topic in service.copied_topics(mirror.name))
    # It has been connected, so it is known whether its source is Millstream.
    if not mirror.is_gated and (is_copying or mirror.cuts):
        way = f"move here with `millstream mirror cutover {mirror.name}`" if is_copying else "delete the mirror"
        raise InvalidMirror(
            f"the source of mirror {mirror.name!r} is not Millstream, so it cannot follow this cluster; {way}"
        )
    if mirror.settings.rename:
        raise InvalidMirror(
            f"the copies of mirror {mirror.name!r} have other names than their originals, so they cannot change roles"
        )


def _adoption(service: MirrorService, mirror: Mirror, request: ReverseRequest, *, step: Step) -> AdoptRequest:
    """Return the request by which the source of a mirror becomes its target."""
    topics = [
        topic
        for topic in service.topics.all()
        if topic.mirror == mirror.name or (topic.name in mirror.cuts and not topic.mirror)
    ]
    kept = {name: text for name, text in mirror.overrides.items() if name not in (SOURCE, *CREDENTIALS)}
    settings = {**kept, **request.settings, SOURCE: request.address or service.membership.addresses()}
    return AdoptRequest(
        name=mirror.name,
        step=step,
        settings=settings,
        cuts={topic: dict(offsets) for topic, offsets in mirror.cuts.items()},
        aborted={
            topic: {index: min(starts) for index, starts in mirror.aborted[topic].items() if starts}
            for topic in mirror.cuts.keys() & mirror.aborted
        },
        topic_ids=[topic.topic_id for topic in topics],
        names=[topic.name for topic in topics],
        cluster_id=service.membership.cluster_id,
        save_to=request.save_to,
    )


# -- as the old source --------------------------------------------------------------------------------------------


async def adopt(service: MirrorService, request: AdoptRequest) -> AdoptResponse:
    """As an old source: follow the cluster that took over, in the steps that it asks for.

    Steps wait for each other: a cancelled switch may ask for the release while its fence is still under way. The owner
    carries them out. It may not be the owner that carried out the previous step, so it reads what that one has stored.
    """
    async with service.adopting:
        await service.mirrors.load()
        if not service.is_owner:
            raise CoordinatorUnavailable("another node has become the controller; try again")
        return await _adopt(service, request)


async def _release_topics(service: MirrorService, request: AdoptRequest, topics: Sequence[Topic]) -> AdoptResponse:
    """Allow clients to write to the topics of a cancelled switch again; delete its mirror, but no other.

    The previous owner may still be fencing topics, which it can until the mirror is deleted.
    """
    backoff, fenced = Backoff(), [topic for topic in topics if topic.is_draining]
    while backoff.failures < RELEASE_ATTEMPTS:
        await _set_mirror(service, fenced, "")
        declared = service.mirrors.get(request.name)
        if declared is not None and declared.overrides.get(SOURCE) == request.settings.get(SOURCE):
            await _delete_unused(service, request.name)
        fenced = [topic for topic in await _topics_of(service, request) if topic.is_draining]
        if not fenced:
            return AdoptResponse()
        await backoff.pause()
    raise RequestTimedOut(
        f"another node of the source keeps fencing topic {fenced[0].name!r}; once it has stopped, run "
        f"`millstream mirror failover {request.name}` on the source"
    )


async def _delete_unused(service: MirrorService, name: str) -> None:
    """Delete a mirror unless a topic still names it, since only its mirror makes such a topic writable again."""
    with suppress(InvalidMirror, UnknownMirror):
        await service.mirrors.delete(name)


async def _topics_of(service: MirrorService, request: AdoptRequest) -> list[Topic]:
    topic_ids = set(request.topic_ids)
    return [
        topic
        for topic in await service.topics.declared()
        if topic.topic_id in topic_ids and topic.mirror in ("", request.name)
    ]


async def _recreated(service: MirrorService, request: AdoptRequest) -> list[str]:
    """Return those of the requested topics that were deleted here and created again, so that they are others now."""
    names, topic_ids = set(request.names), set(request.topic_ids)
    declared = await service.topics.declared()
    return sorted(
        subscription.name
        for subscription in declared
        if subscription.name in names and subscription.topic_id not in topic_ids
    )


async def _adopt(service: MirrorService, request: AdoptRequest) -> AdoptResponse:
    recreated = await _recreated(service, request)
    topics = await _topics_of(service, request)
    if not topics:
        raise InvalidMirror(
            "none of these topics exists on the old source with the same id, so there is nothing to follow"
            + (f"; {listed(recreated)} was deleted there and created again" if recreated else "")
        )
    if request.step == "release":
        return await _release_topics(service, request, topics)
    if recreated and request.step in ("check", "fence"):
        raise InvalidMirror(
            f"{listed(recreated)} was deleted on the source and created again, so the source cannot follow the copy "
            "here; delete the copy, or the new topic on the source, before a switch"
        )
    kept = {name: offsets for name, offsets in request.cuts.items() if name not in recreated}
    request = msgspec.structs.replace(request, cuts=kept)
    if request.step == "check":
        now = await service.high_watermarks([topic.name for topic in topics if topic.name in kept])
        return AdoptResponse(
            removed=[lost_range for lost_range, _ in await _find_lost_ranges(service, request, kept, now)]
        )
    declared = service.mirrors.get(request.name)
    if request.is_fenced and any(topic.mirror != request.name for topic in topics):
        raise InvalidMirror(
            "the old source accepts writers again, because `millstream mirror failover` was run there during the "
            f"switch. Both sides are writable now; `millstream mirror reverse {request.name} --save-to TOPIC` on the "
            "side that took over makes the old source follow"
        )
    _check_savable(service, request, topics)
    if not request.is_fenced:
        # Otherwise the fence has checked it.
        if MirrorSettings.from_strings(request.settings).acls:
            require_enforced(service.rules)
        await _check_reachable(request)
    if declared is None:
        await service.mirrors.create(request.name, request.settings, is_enabled=False)
    elif declared.overrides.get(SOURCE) != request.settings.get(SOURCE):
        raise InvalidMirror(f"the old source has another mirror {request.name!r}; delete that one first")
    else:
        await _forget_cuts(service, declared, topics)
    await _set_mirror(service, topics, request.name, is_draining=request.step == "fence")
    # After this, no node lets clients write to them, and everything that was written before is acknowledged.
    await service.fence_everywhere(request.name, [topic.topic_id for topic in topics])
    if request.step == "fence":
        ends = (await service.barriers.take(BarrierRequest(topics=[topic.name for topic in topics]))).offsets
        return AdoptResponse(
            ends=ends,
            removed=[lost_range for lost_range, _ in await _find_lost_ranges(service, request, request.cuts, ends)],
        )
    return msgspec.structs.replace(await _follow(service, request, topics), recreated=recreated)


def _check_savable(service: MirrorService, request: AdoptRequest, topics: Sequence[Topic]) -> None:
    """Raise an error unless dropped records can be saved to the topic of a request."""
    if not request.save_to:
        return
    check_topic_name(request.save_to)
    target = service.topics.get(request.save_to)
    if target is not None and (target.mirror or target.topic_id in {topic.topic_id for topic in topics}):
        raise InvalidMirror(
            f"dropped records cannot be saved to {request.save_to!r}, because clients cannot write to it once the old "
            "source follows; choose another topic with --save-to"
        )


async def _check_reachable(request: AdoptRequest) -> None:
    """Raise `InvalidMirror` unless this cluster reaches the one that takes over at the address of a request."""
    settings = check_mirror(request.name, request.settings)
    try:
        connecting = Source(settings, name=request.name, advice="check the address")
        async with asyncio.timeout(REACH_S), connecting as source:
            problem = "" if source.cluster_id == request.cluster_id else "another cluster responds"
    except TimeoutError:
        problem = f"no response within {REACH_S:g} s"
    except MillstreamError as error:
        problem = str(error)
    if problem:
        raise InvalidMirror(
            f"the old source does not reach this cluster at {settings.source} ({problem}), so it cannot follow; "
            "nothing was changed. Pass an address with --address, and how it signs in here with the --source options"
        )


async def _forget_cuts(service: MirrorService, declared: Mirror, topics: Sequence[Topic]) -> None:
    """Forget durably the cuts of topics that were failed over here since then, so that they are scanned again.

    This has to precede their fence: afterwards nothing shows that clients could write to them. The mirror stops until
    they are scanned; a node that has not learned of that yet continues to copy, but truncates nothing without a cut.
    """
    stale = {topic.name for topic in topics if topic.mirror != declared.name or topic.name in declared.cut_epochs}
    if stale.isdisjoint(declared.cuts):
        return

    def forgotten(now: Mirror) -> Mirror:
        cuts = {name: offsets for name, offsets in now.cuts.items() if name not in stale}
        dropped = {name: ranges for name, ranges in now.dropped.items() if name not in stale}
        return dataclasses.replace(now, cuts=cuts, dropped=dropped, is_enabled=False)

    await service.mirrors.change(declared.name, forgotten)


async def _find_lost_ranges(
    service: MirrorService, request: AdoptRequest, cuts: TopicOffsets, ends: TopicOffsets
) -> list[tuple[RemovedRange, _Scan]]:
    """Return the ranges of records that the other side lacks, each with the transactions that were committed.

    These are all records beyond the cuts, and records below them of transactions that were open at the cut: the other
    side has aborted those, even if they were committed here.
    """
    lost = []
    for topic, offsets in cuts.items():
        for index, cut in offsets.items():
            end = ends.get(topic, {}).get(index, 0)
            if end > cut:
                start = min(cut, request.aborted.get(topic, {}).get(index, cut))
                scan = await _scan(service, RemovedRange(topic=topic, partition=index, start=start, end=end), cut)
                # Markers of transactions that the other side has aborted as well need not be saved.
                ranges = [*sorted(scan.torn), *([(cut, end)] if scan.has_records else [])]
                lost += [
                    (RemovedRange(topic=topic, partition=index, start=first, end=last), scan) for first, last in ranges
                ]
    return lost


async def _follow(service: MirrorService, request: AdoptRequest, topics: Sequence[Topic]) -> AdoptResponse:
    """Drop the records that only this cluster has, and start copying.

    Can be repeated: the ranges are recorded before they are dropped. Once this cluster copies a topic, nothing of it is
    dropped any more, since the records beyond its cuts come from the other cluster, until it is failed over here.
    """
    declared = await service.mirrors.find(request.name)
    if declared.cuts != request.cuts:
        cuts = {name: offsets for name, offsets in request.cuts.items() if declared.cuts.get(name) != offsets}
        declared = await _truncate_to_cuts(service, request, cuts, [topic for topic in topics if topic.name in cuts])
    await service.mirrors.change(
        request.name, lambda now: dataclasses.replace(now, overrides=dict(request.settings), sealed={}, is_enabled=True)
    )
    _logger.info("this cluster follows another", extra={"mirror": request.name})
    removed = [
        RemovedRange(topic=topic, partition=index, start=start, end=end)
        for topic in sorted(request.cuts.keys() & declared.dropped)
        for index, ranges in sorted(declared.dropped[topic].items())
        for start, end in ranges
    ]
    return AdoptResponse(removed=removed)


async def _truncate_to_cuts(
    service: MirrorService, request: AdoptRequest, cuts: TopicOffsets, topics: Sequence[Topic]
) -> Mirror:
    """Drop the records of some topics beyond their cuts; return the mirror with the dropped ranges."""
    lost = await _find_lost_ranges(
        service, request, cuts, await service.high_watermarks([topic.name for topic in topics])
    )
    if request.save_to and lost:
        if service.topics.get(request.save_to) is None:
            with suppress(TopicExists):
                await service.topics.create(request.save_to, partitions=1)
        for lost_range, found in lost:
            await _publish_removed(service, lost_range, found, request.save_to)
    dropped: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for lost_range, _ in lost:
        dropped.setdefault(lost_range.topic, {}).setdefault(lost_range.partition, []).append(
            (lost_range.start, lost_range.end)
        )
    await service.mirrors.change(
        request.name, lambda now: dataclasses.replace(now, dropped=merged_offsets(now.dropped, dropped))
    )
    await _cut_queues(service, cuts, topics)
    # Epochs alone do not show everywhere where histories part: compaction may have removed all records of one.
    await service.truncate_everywhere(request.name, topics, cuts)
    return await service.mirrors.change(
        request.name,
        # Below the cuts, both sides have the same transactions as a whole.
        lambda now: dataclasses.replace(
            now, cuts=request.cuts, verified=merged_offsets(now.verified, cuts), is_gated=True
        ),
    )


class _Scan:
    """The contents of a partition from the start of the first transaction that was open at the cut."""

    def __init__(self, cut: int) -> None:
        self.has_records = False
        """Whether there are records beyond the cut."""
        self.torn: list[tuple[int, int]] = []
        """The ranges below the cut of transactions that were committed beyond it."""
        self._cut = cut
        self._markers: dict[int, list[tuple[int, bool]]] = {}
        """The markers of each producer: the offset, and whether it commits."""
        self._open: dict[int, list[tuple[int, int]]] = {}
        """The ranges below the cut of transactions whose marker has not been reached, by producer."""

    def add_marker(self, header: BatchHeader, *, commit: bool) -> None:
        self._markers.setdefault(header.producer_id, []).append((header.base_offset, commit))
        ranges = self._open.pop(header.producer_id, [])
        if commit and header.base_offset >= self._cut:
            self.torn += ranges

    def add_records(self, header: BatchHeader) -> None:
        if header.next_offset > self._cut:
            self.has_records = True
        if header.base_offset < self._cut and header.is_transactional:
            ranges = self._open.setdefault(header.producer_id, [])
            is_next = bool(ranges) and ranges[-1][1] == header.base_offset
            start = ranges.pop()[0] if is_next else header.base_offset
            ranges.append((start, min(header.next_offset, self._cut)))

    def is_committed(self, header: BatchHeader) -> bool:
        """Whether a batch counts: it belongs to no transaction, or to one that was committed."""
        if not header.is_transactional:
            return True
        markers = self._markers.get(header.producer_id, [])
        at = bisect_left(markers, (header.base_offset, False))
        return at < len(markers) and markers[at][1]


async def _batches(service: MirrorService, removed: RemovedRange) -> AsyncIterator[tuple[memoryview, BatchHeader]]:
    client, offset = service.client(), removed.start
    while offset < removed.end:
        try:
            response = await client.fetch(removed.topic, removed.partition, offset, max_wait_ms=0)
        except OffsetOutOfRange as error:
            if error.start <= offset:
                raise
            # Retention has removed the first records.
            offset = error.start
            continue
        before = offset
        for header in iterate_whole_headers(response.records):
            if removed.start < header.next_offset and header.base_offset < removed.end:
                yield response.records, header
            offset = max(offset, header.next_offset)
        if offset == before:
            break


async def _scan(service: MirrorService, scanned: RemovedRange, cut: int) -> _Scan:
    """Find out which records of a range the other side lacks, and which transactions were committed."""
    scan = _Scan(cut)
    async for records, header in _batches(service, scanned):
        marker = read_marker(records, header) if header.is_control else None
        if marker is not None:
            scan.add_marker(header, commit=marker.commit)
        elif header.record_count and not header.is_control:
            scan.add_records(header)
    return scan


async def _publish_removed(service: MirrorService, removed: RemovedRange, scan: _Scan, target: str) -> None:
    """Publish the committed records of a range that is dropped to a topic of this cluster."""
    client = service.client()
    async for records, header in _batches(service, removed):
        if header.is_control or not header.record_count or not scan.is_committed(header):
            continue
        kept = [
            NewRecord(
                record.key,
                record.value,
                (*record.headers, (ORIGINAL_HEADER, f"{removed.topic}/{removed.partition}/{record.offset}".encode())),
                record.timestamp_ms,
            )
            for record in decode_batch(records, header)
            if removed.start <= record.offset < removed.end
        ]
        for at in range(0, len(kept), SAVED_AT_ONCE):
            await client.produce(target, 0, encode_batch(kept[at : at + SAVED_AT_ONCE]))


async def _cut_queues(service: MirrorService, cuts: TopicOffsets, topics: Sequence[Topic]) -> None:
    """Cut the stored states of queues where the records are cut, so that none refers to another record."""
    by_id = {topic.topic_id: topic for topic in topics}

    async def cut_on(ask: Callable[[OfferRequest], Awaitable[OfferResponse]]) -> None:
        async for offer in offer_pages(ask, by_id):
            for queue in offer.queues:
                await _cut_queue(service, queue, by_id, cuts)

    await cut_on(service.offer)
    for node in service.others:
        await cut_on(partial(service.ask_node, node))


async def _cut_queue(
    service: MirrorService, queue: QueueSnapshot, topics: Mapping[UUID, Topic], cuts: TopicOffsets
) -> None:
    """Cut the stored state of a queue of a topic that is not open any more."""
    from millstream.broker.subscriptions.snapshot import cut_snapshot

    topic = topics.get(queue.key.topic_id)
    cut = None if topic is None else cuts.get(topic.name, {}).get(queue.key.partition)
    state = None if topic is None else service.topics.state_of(topic, queue.key.partition)
    if topic is None or cut is None or state is None:
        return
    snapshot, is_cut = await asyncio.to_thread(cut_snapshot, queue.snapshot, cut)
    if is_cut:
        await service.subscriptions.write_state(queue.key, Epoch(state.leader_epoch), snapshot)
