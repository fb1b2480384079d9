"""Private requests about mirrors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from millstream.broker.cluster.membership import NO_CONTROLLER
from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi, RequestT, ResponseT
from millstream.broker.mirror.declared_copies import check_declared, registry_page
from millstream.broker.mirror.failover import SWITCH_S, adopt, fail_over, reverse, switch
from millstream.broker.mirror.service import MirrorService
from millstream.broker.mirror.source import Source
from millstream.broker.security.changes import CREATE, DELETE, UPDATE, single_change
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import CoordinatorUnavailable, InvalidMirror, MillstreamError
from millstream.core.mirror import MirrorSettings
from millstream.core.subscription import topic_of_start
from millstream.protocol.private.message import R, Response
from millstream.protocol.private.mirror_messages import (
    AdoptRequest,
    AdoptResponse,
    AlterMirrorRequest,
    BarrierRequest,
    BarrierResponse,
    CommitNoticeRequest,
    CreateMirrorRequest,
    CutRequest,
    CutResponse,
    DeleteMirrorRequest,
    ExposeRequest,
    ExposeResponse,
    FailoverRequest,
    FailoverResponse,
    FenceRequest,
    HoldCommitsRequest,
    HoldCommitsResponse,
    ListMirrorsRequest,
    ListMirrorsResponse,
    OfferRequest,
    OfferResponse,
    OwnerRequest,
    RegistryRequest,
    RegistryResponse,
    ReverseRequest,
    ReverseResponse,
    SwitchRequest,
)

OwnerRequestT = TypeVar("OwnerRequestT", bound=OwnerRequest[Any])

SOURCE_S: Final = 2.0
"""How long the source of a new mirror is waited for."""


class _MirrorApi(PrivateApi[RequestT, ResponseT]):
    cluster_operation = Operation.ALTER
    """A mirror creates and writes topics of any name."""

    def __init__(self, mirrors: MirrorService) -> None:
        self._mirrors = mirrors

    async def _run_on_owner(
        self,
        request: OwnerRequestT,
        carry_out: Callable[[MirrorService, OwnerRequestT], Awaitable[R]],
        timeout_s: float = SWITCH_S,
    ) -> R:
        """Carry out a request on the owner of mirrors, which may be this node."""
        service = self._mirrors
        if service.is_owner:
            return await carry_out(service, request)
        owner = service.membership.controller_id
        if owner == NO_CONTROLLER or request.is_forwarded:
            raise CoordinatorUnavailable("the nodes do not agree on a controller at the moment; try again")
        forwarded = msgspec.structs.replace(request, is_forwarded=True)
        return await service.ask_node(owner, forwarded, waits=True, timeout_s=timeout_s)


class MirrorCreate(_MirrorApi[CreateMirrorRequest, Response]):
    """Creates a mirror.

    A name that is taken gets DUPLICATE_RESOURCE. Settings are those of docs/configuration.md.
    """

    changes = single_change("mirror", CREATE)

    async def handle(self, request: CreateMirrorRequest) -> Response:
        settings = MirrorSettings.from_strings(request.settings)
        check_declared(settings, self._mirrors.schemas, self._mirrors.rules)
        if await _cluster_of(settings, request.name) == self._mirrors.membership.cluster_id:
            raise InvalidMirror(f"{settings.source} is this cluster itself")
        await self._mirrors.mirrors.create(request.name, request.settings, is_enabled=request.enabled)
        return Response()


async def _cluster_of(settings: MirrorSettings, name: str) -> str | None:
    """Return the id of the source's cluster; None if it does not respond soon, since it may be down now."""
    with suppress(MillstreamError, TimeoutError, OSError):
        async with asyncio.timeout(SOURCE_S), Source(settings, name=name) as source:
            return source.cluster_id
    return None


class MirrorAlter(_MirrorApi[AlterMirrorRequest, Response]):
    """Changes, pauses or resumes a mirror.

    A setting of null is reset to its default. `enabled` resumes or pauses it; null changes nothing. An unknown name is
    RESOURCE_NOT_FOUND.
    """

    changes = single_change("mirror", UPDATE)

    async def handle(self, request: AlterMirrorRequest) -> Response:
        if request.settings:
            known = (await self._mirrors.mirrors.find(request.name)).settings
            added = {name: text for name, text in request.settings.items() if name in ("schemas", "acls") and text}
            changed = MirrorSettings.from_strings(added)
            fresh = replace(
                changed, schemas=changed.schemas and not known.schemas, acls=changed.acls and not known.acls
            )
            check_declared(fresh, self._mirrors.schemas, self._mirrors.rules)
            await self._mirrors.mirrors.alter(request.name, request.settings)
        if request.enabled is not None:
            await self._mirrors.mirrors.set_enabled(request.name, is_enabled=request.enabled)
        return Response()


class MirrorDelete(_MirrorApi[DeleteMirrorRequest, Response]):
    """Deletes a mirror that has no copies any more.

    A mirror that has copies, which would be left without a writer, gets NON_EMPTY_GROUP: fail over or delete them
    first. So does a mirror whose source can be made to follow after a failover, unless it is forced.
    """

    changes = single_change("mirror", DELETE)

    async def handle(self, request: DeleteMirrorRequest) -> Response:
        await self._mirrors.delete(request.name, force=request.force)
        return Response()


class MirrorList(_MirrorApi[ListMirrorsRequest, ListMirrorsResponse]):
    """Lists mirrors with their state and lag.

        {"names": ["paris"]}, or null for all
        response: {"error": 0, "message": null, "mirrors": [{"name": …, "settings": {…}, "overrides": {…},
        "enabled": true, "problem": "", "version": …, "topics": […], "copies": {"orders": 3}, "cuts": {…},
        "cutting": ["orders"], "taken_over": [], "interrupted": "", "notes": […],
        "report": {"node": 1, "state": "running", "error": "", "bytes": …, "bytes_per_s": …, "is_listed": true,
        "notes": […], "problems": […],
        "partitions": [{"topic": …, "partition": …, "source_end": …, "end": …, "exposed": …, "lag": …, "lag_ms": …,
        "epoch": …, "error": ""}]}}]}

    `is_listed` says whether the node, as the owner, has compared the topics with those of the source; `problems` are
    the notes that something is not mirrored. `cutting` are copies whose failover has begun, `taken_over` those whose
    failover has ended; `interrupted` says which failover or switch has not finished.
    Every node knows all mirrors and reports on the partitions that it leads, so a client asks all nodes.
    """

    changes = None
    cluster_operation = Operation.DESCRIBE

    async def handle(self, request: ListMirrorsRequest) -> ListMirrorsResponse:
        mirrors = self._mirrors.mirrors
        named = mirrors.all() if request.names is None else [await mirrors.find(name) for name in request.names]
        return ListMirrorsResponse(mirrors=[self._mirrors.describe(mirror) for mirror in named])


class MirrorFailover(_MirrorApi[FailoverRequest, FailoverResponse]):
    """Makes copies writable, and returns where each of them was cut.

    Topics are regular expressions for names. Without topics, the mirror is paused. `source_end` is null if the source
    could not be asked. May be repeated.
    """

    changes = single_change("mirror", UPDATE)

    async def handle(self, request: FailoverRequest) -> FailoverResponse:
        if not request.is_planned and not self._mirrors.is_fenced(request.name):
            return await fail_over(self._mirrors, request)
        # Only the owner knows what was carried over, and waits for a fence that is under way.
        return await self._run_on_owner(request, fail_over, 2 * SWITCH_S)


class MirrorCut(_MirrorApi[CutRequest, CutResponse]):
    """Cuts a copy that this node leads, for the node that carries out a failover."""

    changes = None
    cluster_operation = Operation.CLUSTER_ACTION

    async def handle(self, request: CutRequest) -> CutResponse:
        return CutResponse(cut=await self._mirrors.cut(request))


class MirrorExpose(_MirrorApi[ExposeRequest, ExposeResponse]):
    """Reports the progress of a node's copies; then exposes transactions that have arrived completely everywhere."""

    changes = None
    cluster_operation = Operation.CLUSTER_ACTION

    async def handle(self, request: ExposeRequest) -> ExposeResponse:
        return await self._mirrors.expose(request)


class MirrorNotice(_MirrorApi[CommitNoticeRequest, Response]):
    """Notifies the owner of a mirror that clients on the sending node wait for a commit."""

    cluster_operation = Operation.CLUSTER_ACTION
    changes = None

    async def handle(self, request: CommitNoticeRequest) -> Response:
        self._mirrors.note_commit(request.mirror)
        return Response()


class MirrorOffer(_MirrorApi[OfferRequest, OfferResponse]):
    """Returns everything but records from a node of a source, for a mirror of another cluster.

    `mirrored` are topics that are copies themselves, which are not mirrored again; `origins` are the ids of the
    clusters from which the records of a topic came; `fenced` are topics that refuse writers during a switch, with the
    name of its mirror; `letters` are dead letter topics, with the topics whose messages
    they may hold. Queues whose last write the caller has seen are left out.
    """

    changes = None
    cluster_operation = Operation.DESCRIBE

    def redact(self, response: OfferResponse, rights: Rights) -> OfferResponse:
        """Omit topics that the client may not describe, and subscriptions that have no others."""

        def sees(topic: str) -> bool:
            return rights.topic(Operation.DESCRIBE, topic)

        subscriptions = [
            msgspec.structs.replace(
                subscription,
                topics=list(filter(sees, subscription.topics)),
                starts={
                    start: offsets for start, offsets in subscription.starts.items() if sees(topic_of_start(start))
                },
            )
            for subscription in response.subscriptions
            if any(map(sees, subscription.topics))
        ]
        return msgspec.structs.replace(
            response,
            mirrored=[topic for topic in response.mirrored if sees(topic)],
            origins={topic: origins for topic, origins in response.origins.items() if sees(topic)},
            fenced={topic: mirror for topic, mirror in response.fenced.items() if sees(topic)},
            letters={topic: list(filter(sees, held)) for topic, held in response.letters.items() if sees(topic)},
            subscriptions=subscriptions,
            has_hidden=response.has_hidden or len(subscriptions) < len(response.subscriptions),
        )

    async def handle_from(self, client: ClientInfo, request: OfferRequest) -> OfferResponse:
        return await self._mirrors.offer(request, client.rights)

    async def handle(self, request: OfferRequest) -> OfferResponse:
        return await self._mirrors.offer(request)


class MirrorRegistry(_MirrorApi[RegistryRequest, RegistryResponse]):
    """Returns the schemas of a source, for a mirror of another cluster.

    `since` is the last change that the caller knows, -1 for none; without a change since, nothing is returned.
    Subjects of topics that the caller may not describe are returned too: a mirror deletes what is missing, and schemas
    refer to those of other subjects.
    """

    cluster_operation = Operation.DESCRIBE
    changes = None

    async def handle(self, request: RegistryRequest) -> RegistryResponse:
        return registry_page(self._mirrors.schemas, request)


class MirrorBarrier(_MirrorApi[BarrierRequest, BarrierResponse]):
    """Returns the high watermarks of a moment at which no transaction is half committed.

    For that moment, all nodes hold back the decisions of transactions. REQUEST_TIMED_OUT if they take long to end.
    `groups` are those for which transactions have committed offsets, with their offsets in these topics at that moment.
    If there are more than 100,000 such offsets, none are returned, and `groups_omitted` is true.
    """

    changes = None
    cluster_operation = Operation.DESCRIBE

    async def needs(self, request: BarrierRequest) -> Sequence[Need]:
        """Require DESCRIBE on the cluster, READ on the topics: transactions that write to them are held back."""
        return [
            *await super().needs(request),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in request.topics),
        ]

    def redact(self, response: BarrierResponse, rights: Rights) -> BarrierResponse:
        groups = {name: at for name, at in response.groups.items() if rights.group(Operation.DESCRIBE, name)}
        return msgspec.structs.replace(response, groups=groups)

    async def handle(self, request: BarrierRequest) -> BarrierResponse:
        return await self._mirrors.barriers.take(request)


class MirrorHold(_MirrorApi[HoldCommitsRequest, HoldCommitsResponse]):
    """Holds back the decisions of transactions on a node, for the node that carries out MirrorBarrier.

    `shards` are the coordinators that the node runs, as partition and leader epoch. "release" lets decisions through
    again, and `held` says whether they were held until now. "read groups" returns the groups of MirrorBarrier in some
    topics, given with their ids or null, by the partition of `__consumer_offsets` that stores them.
    """

    changes = None
    cluster_operation = Operation.CLUSTER_ACTION

    async def handle(self, request: HoldCommitsRequest) -> HoldCommitsResponse:
        return await self._mirrors.barriers.hold(request)


class MirrorFence(_MirrorApi[FenceRequest, Response]):
    """Waits until a node refuses clients of topics, and has acknowledged what they wrote, for MirrorAdopt.

    With cuts, it truncates those partitions there; NOT_LEADER_OR_FOLLOWER if it does not lead one. REQUEST_TIMED_OUT
    if records are not replicated in time.
    """

    cluster_operation = Operation.CLUSTER_ACTION
    changes = None

    async def handle(self, request: FenceRequest) -> Response:
        await self._mirrors.fence(request)
        return Response()


class MirrorReverse(_MirrorApi[ReverseRequest, ReverseResponse]):
    """Makes the old source of a mirror follow this cluster, after a failover.

    The old source declares a mirror of the same name, drops what only it has, and copies the difference; this cluster
    deletes its own. The user that the mirror signs in as there needs ALTER on the old source.
    """

    changes = single_change("mirror", UPDATE)

    async def handle(self, request: ReverseRequest) -> ReverseResponse:
        return await reverse(self._mirrors, request)


class MirrorSwitch(_MirrorApi[SwitchRequest, ReverseResponse]):
    """Switches the direction of a mirror without loss.

    The source refuses writers, everything that it has is copied, then this cluster takes writers and the source
    follows. If that takes too long, the source keeps its role.
    """

    changes = single_change("mirror", UPDATE)

    async def handle(self, request: ReverseRequest) -> ReverseResponse:
        # Only the owner knows what was carried over. A switch takes a few seconds longer than the drain.
        timeout_s = request.timeout_ms / 1000 + SWITCH_S
        return await self._run_on_owner(request, switch, timeout_s)


class MirrorAdopt(_MirrorApi[AdoptRequest, AdoptResponse]):
    """Asks an old source to follow the cluster that takes over from it.

    `check` changes nothing and returns the ranges beyond the cuts that hold records. `fence` refuses writers, waits
    until all decided transactions have ended, and returns the end of each partition and these ranges. `follow` drops
    what is beyond the cuts and starts copying; with `is_fenced`, it fails if clients could have written since the
    fence. `release` ends a fence. The controller carries out every step. `recreated` are topics with these names and
    other ids: `follow` leaves them alone, `check` and `fence` refuse.
    """

    changes = single_change("mirror", UPDATE)

    async def handle(self, request: AdoptRequest) -> AdoptResponse:
        # On one node, steps wait for each other.
        return await self._run_on_owner(request, adopt)
