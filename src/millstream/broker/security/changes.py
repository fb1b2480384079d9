"""What each API changes of what is declared: the table by which changes are recorded in the audit log.

Each API is in `CHANGES` or in `CHANGES_NOTHING`, by the name of its class; a test fails for one that is in neither. A
function of `CHANGES` reads off a request and its response what has been changed. Values of settings are recorded for
topics, nodes and quotas only: those of subscriptions and pipelines may be secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final

from millstream.broker.security.audit import Activity, Change
from millstream.broker.security.rights import Rights
from millstream.core.acl import Acl, Operation, PatternType, Permission, ResourceType
from millstream.core.tasks import finish

CREATE, READ, UPDATE, DELETE = Activity.CREATE, Activity.READ, Activity.UPDATE, Activity.DELETE

Users = Mapping[tuple[str, str], Any]
"""The credentials before the request, by user and mechanism."""
Changes = Callable[[Any, Any, Users], Iterable[Change]]

_TIMED_OUT: Final = 7
_FILTER_CHARACTERS_MAX: Final = 1000
_NOTHING: Final[Mapping[str, Any]] = {}
_CONFIG_KINDS: Final = {2: "topic", 4: "node", 32: "group"}


async def record_changes(api: str, request: Any, rights: Rights, work: Coroutine[Any, Any, Any]) -> Any:
    """Await the response of an API, and record what was changed.

    A change is carried out and recorded even if the client leaves meanwhile, or it could leave to hide what it did.
    """
    changes = CHANGES.get(api)
    if changes is None or getattr(request, "validate_only", False):
        return await work
    users = rights.credentials

    async def carry_out() -> Any:
        response = await work
        for change in changes(request, response, users):
            rights.record(api, change)
        return response

    return await finish(carry_out())


def _done(results: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of what was done; after a timeout, it may have been."""
    return (result for result in results if result.error_code in (0, _TIMED_OUT))


def _change(result: Any, activity: Activity, kind: str, name: str, data: Mapping[str, Any] = _NOTHING) -> Change:
    is_certain = result.error_code != _TIMED_OUT
    return Change(activity=activity, kind=kind, name=name, data=data, is_certain=is_certain)


def _topics_created(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    asked = {topic.name: topic for topic in request.topics}
    for topic in _done(response.topics):
        settings = {config.name: config.value for config in asked[topic.name].configs}
        yield _change(topic, CREATE, "topic", topic.name, settings)


def _topics_deleted(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for topic in _done(response.responses):
        yield _change(topic, DELETE, "topic", topic.name or str(topic.topic_id))


def _partitions_added(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    counts = {topic.name: int(topic.count) for topic in request.topics}
    for topic in _done(response.results):
        yield _change(topic, UPDATE, "topic", topic.name, {"partitions": counts[topic.name]})


def _settings_changed(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    asked = {(one.resource_type, one.resource_name): one.configs for one in request.resources}
    for result in _done(response.responses):
        kind = _CONFIG_KINDS.get(result.resource_type, "configuration")
        settings = asked[result.resource_type, result.resource_name]
        # Groups include subscriptions, whose settings may be secrets.
        data = {one.name: None if kind == "group" else one.value for one in settings}
        yield _change(result, UPDATE, kind, result.resource_name or "(all)", data)


def _quotas_changed(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for entry, result in zip(request.entries, response.entries, strict=True):
        if result.error_code in (0, _TIMED_OUT):
            name = ", ".join(f"{one.entity_type} {one.entity_name or '(default)'}" for one in entry.entity)
            data = {one.key: None if one.remove else float(one.value) for one in entry.ops}
            yield _change(result, UPDATE, "quota", name, data)


def _users_changed(request: Any, response: Any, users: Users) -> Iterator[Change]:
    known = {user for user, _mechanism in users}
    put = {one.name for one in request.upsertions}
    for result in _done(response.results):
        if result.user in put:
            activity = UPDATE if result.user in known else CREATE
        else:
            gone = {one.mechanism for one in request.deletions if one.name == result.user}
            held = sum(user == result.user for user, _mechanism in users)
            activity = DELETE if len(gone) >= held else UPDATE
        yield _change(result, activity, "user", result.user)


def _acls_created(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for creation, result in zip(request.creations, response.results, strict=True):
        if result.error_code in (0, _TIMED_OUT):
            yield _acl_change(CREATE, creation, creation.resource_pattern_type, result)


def _acls_deleted(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for found in _done(response.filter_results):
        for acl in _done(found.matching_acls):
            yield _acl_change(DELETE, acl, acl.pattern_type, acl)


def _acl_change(activity: Activity, rule: Any, pattern: int, result: Any) -> Change:
    acl = Acl(
        resource_type=ResourceType(rule.resource_type),
        resource_name=rule.resource_name,
        pattern=PatternType(pattern),
        principal=rule.principal,
        host=rule.host,
        operation=Operation(rule.operation),
        permission=Permission(rule.permission_type),
    )
    return _change(result, activity, "acl", str(acl), {"principal": acl.principal})


def _token_created(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
    if response.error == 0:
        data = {"owner": response.owner, "expires_ms": response.expires_ms}
        yield Change(activity=CREATE, kind="token", name=response.token_id, data=data)


def _token_revoked(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    if response.error == 0:
        yield Change(activity=DELETE, kind="token", name=request.token_id)


def _plan_changed(activity: Activity) -> Callable[[Any, Any, Users], Iterator[Change]]:
    def changes(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            data = {"kind": response.kind, "subject": response.subject, "state": response.state}
            yield Change(activity=activity, kind="plan", name=response.plan_id, data=data)

    return changes


def _node_undrained(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    if response.error == 0:
        yield Change(activity=UPDATE, kind="node", name=str(request.node), data={"drained": False})


def _groups_deleted(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for group in _done(response.results):
        yield _change(group, DELETE, "group", group.group_id)


def _offsets_changed(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    """OffsetDelete, AlterShareGroupOffsets, DeleteShareGroupOffsets: offsets of a group, by topic."""
    if response.error_code in (0, _TIMED_OUT):
        topics = [getattr(topic, "topic_name", None) or topic.name for topic in request.topics]
        yield _change(response, UPDATE, "group", request.group_id, {"offsets of": topics})


def _replicas_moved(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    done = {(topic.name, one.partition_index): one for topic in response.responses for one in _done(topic.partitions)}
    for topic in request.topics:
        for partition in topic.partitions:
            result = done.get((topic.name, partition.partition_index))
            if result is not None:
                replicas = None if partition.replicas is None else [int(node) for node in partition.replicas]
                name = f"{topic.name}-{partition.partition_index}"
                yield _change(result, UPDATE, "partition", name, {"replicas": replicas})


def _leaders_elected(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for topic in response.replica_election_results:
        for one in _done(topic.partition_result):
            yield _change(one, UPDATE, "partition", f"{topic.topic}-{one.partition_id}")


def _records_deleted(_request: Any, response: Any, _users: Users) -> Iterator[Change]:
    for topic in response.topics:
        for one in _done(topic.partitions):
            data = {"log start offset": int(one.low_watermark)}
            yield _change(one, DELETE, "records", f"{topic.name}-{one.partition_index}", data)


def _secrets_resealed(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    if request.reseal and response.error == 0:
        data = {"resealed": response.resealed, "key": response.newest}
        yield Change(activity=UPDATE, kind="secrets", name="(all)", data=data)


def _messages_shown(request: Any, response: Any, _users: Users) -> Iterator[Change]:
    if response.error == 0:
        data: dict[str, Any] = {"how": request.how}
        if request.offset >= 0:
            data |= {"partition": request.partition, "offset": request.offset}
        if request.filter:
            data["filter"] = request.filter[:_FILTER_CHARACTERS_MAX]
        yield Change(activity=READ, kind="messages", name=request.topic, data=data)


def _of_one(kind: str, activity: Activity, *, name: str = "name") -> Changes:
    """A private request that changes one thing, which it names in a field."""

    def changes(request: Any, response: Any, _users: Users) -> Iterator[Change]:
        # The schema registry refuses by a code of its own.
        if response.error == 0 and not getattr(response, "code", 0):
            named = getattr(request, name) or "(all)"
            yield Change(activity=activity, kind=kind, name=named, data=_details(request))

    return changes


_DETAILS: Final = ("topics", "topic", "kind", "wanted", "parked", "to", "version", "permanent", "config", "mode")
"""Fields of private requests that are recorded as they are, since none of them is a secret."""


def _details(request: Any) -> dict[str, Any]:
    details: dict[str, Any] = {}
    for name in _DETAILS:
        value = getattr(request, name, None)
        if value is not None:
            details[name] = value
    if getattr(request, "settings", None):
        details["settings"] = sorted(request.settings)
    if hasattr(request, "put"):
        details["rules"] = sorted({*(rule.name for rule in request.put), *request.delete})
    return details


CHANGES: Final[Mapping[str, Changes]] = {
    "AlterClientQuotas": _quotas_changed,
    "AlterConfigs": _settings_changed,
    "AlterPartitionReassignments": _replicas_moved,
    "AlterShareGroupOffsets": _offsets_changed,
    "AlterUserScramCredentials": _users_changed,
    "CreateAcls": _acls_created,
    "CreatePartitions": _partitions_added,
    "CreateTopics": _topics_created,
    "DeleteAcls": _acls_deleted,
    "DeleteGroups": _groups_deleted,
    "DeleteRecords": _records_deleted,
    "DeleteShareGroupOffsets": _offsets_changed,
    "DeleteTopics": _topics_deleted,
    "ElectLeaders": _leaders_elected,
    "IncrementalAlterConfigs": _settings_changed,
    "MirrorAdopt": _of_one("mirror", UPDATE),
    "MirrorAlter": _of_one("mirror", UPDATE),
    "MirrorCreate": _of_one("mirror", CREATE),
    "MirrorDelete": _of_one("mirror", DELETE),
    "MirrorFailover": _of_one("mirror", UPDATE),
    "NodeUndrain": _node_undrained,
    "NoteReading": _messages_shown,
    "MirrorReverse": _of_one("mirror", UPDATE),
    "MirrorSwitch": _of_one("mirror", UPDATE),
    "OffsetDelete": _offsets_changed,
    "PipelineAlter": _of_one("pipeline", UPDATE),
    "PipelineCreate": _of_one("pipeline", CREATE),
    "PipelineCancelRun": _of_one("pipeline", UPDATE),
    "PipelineDelete": _of_one("pipeline", DELETE),
    "PlanApply": _plan_changed(UPDATE),
    "PlanCancel": _plan_changed(UPDATE),
    "PlanPropose": _plan_changed(CREATE),
    "PipelineRequestRun": _of_one("pipeline", UPDATE),
    "RuleChange": _of_one("pipeline", UPDATE),
    "SchemaConfigure": _of_one("schema settings", UPDATE, name="subject"),
    "SchemaDelete": _of_one("schema", DELETE, name="subject"),
    "SchemaRegister": _of_one("schema", CREATE, name="subject"),
    "SecretList": _secrets_resealed,
    "SubscriptionAlter": _of_one("subscription", UPDATE),
    "SubscriptionCreate": _of_one("subscription", CREATE),
    "SubscriptionDelete": _of_one("subscription", DELETE),
    "SubscriptionForget": _of_one("subscription", UPDATE),
    "SubscriptionRevive": _of_one("subscription", UPDATE),
    "SubscriptionSeek": _of_one("subscription", UPDATE),
    "TokenCreate": _token_created,
    "TokenRevoke": _token_revoked,
}

CHANGES_NOTHING: Final = frozenset(
    {
        # They read, or authenticate. Metadata records the topics that it creates itself.
        *("ApiVersions", "Authenticate", "ClientList", "ConsumerGroupDescribe", "DeliveryState", "DescribeAcls"),
        *("DescribeClientQuotas", "DescribeCluster", "DescribeConfigs", "DescribeGroups", "DescribeLogDirs"),
        *("DescribeProducers", "DescribeShareGroupOffsets", "DescribeTopicPartitions", "DescribeTransactions"),
        *("LedgerMark", "MessageTracing"),
        *("DescribeUserScramCredentials", "Fetch", "FindCoordinator", "LastBatch", "ListConfigResources"),
        *("ListGroups", "ListOffsets", "ListPartitionReassignments", "ListTransactions", "LoadQueueState"),
        *("MessageTracing", "Metadata", "NodeStatus", "OffsetFetch", "OffsetForLeaderEpoch", "PipelineList"),
        *("MirrorList", "MirrorOffer"),
        *("PlanDescribe", "SaslAuthenticate", "SaslHandshake", "SchemaCheck", "SchemaGet", "SchemaList"),
        *("SchemaLookup", "SchemaSettings", "SchemaSubject", "ShareGroupDescribe", "SubscriptionList", "TokenList"),
        *(
            "MessageTracing",
            "Metadata",
            "NodeStatus",
            "OffsetFetch",
            "OffsetForLeaderEpoch",
            "PipelineList",
            "SaslAuthenticate",
        ),
        *("MirrorBarrier", "MirrorExpose", "MirrorHold", "MirrorList", "MirrorOffer"),
        *("Metadata", "NodeStatus", "OffsetFetch", "OffsetForLeaderEpoch", "PipelineList", "PipelineRunLog"),
        *("PipelineRuns", "SaslAuthenticate"),
        *("Metadata", "NodeStatus", "OffsetFetch", "OffsetForLeaderEpoch", "PipelineList", "SaslAuthenticate"),
        *("SaslHandshake", "SchemaCheck", "SchemaGet", "SchemaList", "SchemaLookup", "SchemaSettings"),
        *("NodeSums", "RightsList", "SchemaSubject", "ShareGroupDescribe", "SubscriptionList", "TokenList"),
        *("TopicList",),
        # They change data and progress, not what is declared.
        *("AbortBatch", "AbortTransaction", "AddOffsetsToTxn", "AddPartitionsToTxn", "AppendLetter", "CompleteBatch"),
        *("ConsumerGroupHeartbeat", "EndTxn", "Heartbeat", "InitProducerId", "JoinGroup", "LeaveGroup"),
        *(
            "MirrorCut",
            "OffsetCommit",
            "PipelineLanded",
            "PrepareTransaction",
            "Produce",
            "PublishOnce",
            "ShareAcknowledge",
        ),
        *("ShareFetch", "ShareGroupHeartbeat", "SubscriptionReceive", "SubscriptionSettle", "SyncGroup"),
        *("MirrorCut", "TxnOffsetCommit", "WriteQueueStates", "WriteTxnMarkers"),
        # They have no effect here.
        *("AlterReplicaLogDirs", "UpdateFeatures"),
    }
)
