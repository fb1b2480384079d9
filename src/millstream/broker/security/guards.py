"""Authorizes the requests of Kafka's APIs: one guard per API key.

A guard removes the parts of a request that its client is not allowed, passes the rest to the API, and adds Kafka's
error for each removed part to the response; resources that the client may not describe are omitted. An API without a
guard is refused, and a test fails for it. APIs that parse their own frames (`AUTHORIZE_THEMSELVES`) and Millstream's
private requests (`needs`) authorize themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.static.primitive import i16, i32

from millstream.broker.security.audit import Activity, Change
from millstream.broker.security.rights import Rights
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.errors import ClusterNotAuthorized
from millstream.core.schema import subject_topic
from millstream.core.tasks import finish
from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALUE
from millstream.protocol.messages.codec import build_message, load_response_class
from millstream.protocol.messages.shape import item_of, unwrapped

Guard = Callable[[Any, Any, Any, Rights], Coroutine[Any, Any, Any]]
"""Responds for an API, given the API, the request in its newest version, the client and its rights."""

READ, WRITE, CREATE, DELETE = Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE
ALTER, DESCRIBE = Operation.ALTER, Operation.DESCRIBE
DESCRIBE_CONFIGS, ALTER_CONFIGS = Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS
CLUSTER_ACTION = Operation.CLUSTER_ACTION
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTIONAL_ID = ResourceType.TRANSACTIONAL_ID

AUTHORIZE_THEMSELVES: Final = frozenset({0, 1, 8})
"""Produce, Fetch and OffsetCommit, which parse their own frames."""

_TOPIC_DENIED: Final = ErrorCode.topic_authorization_failed
_GROUP_DENIED: Final = ErrorCode.group_authorization_failed
_CLUSTER_DENIED: Final = ErrorCode.cluster_authorization_failed
_TRANSACTION_DENIED: Final = ErrorCode.transactional_id_authorization_failed
_MESSAGES: Final = {
    _TOPIC_DENIED: "not authorized for this topic",
    _GROUP_DENIED: "not authorized for this group",
    _CLUSTER_DENIED: "not authorized for the cluster",
}
_TEXT: Final = _MESSAGES[_CLUSTER_DENIED]
_NOT_REQUESTED: Final = i32(-(2**31))
_CONFIG_TOPIC, _CONFIG_GROUP = 2, 32
_GROUP_KEY, _TRANSACTION_KEY = 0, 1

_GUARDS: Final[dict[int, Guard]] = {}


def guard_of(key: int) -> Guard:
    """Return the guard of an API; for an API without one, a guard that refuses everything."""
    return _GUARDS.get(key, _refuse)


def guarded_keys() -> frozenset[int]:
    return frozenset(_GUARDS)


async def _refuse(api: Any, _request: Any, _client: Any, _rights: Rights) -> Any:
    raise ClusterNotAuthorized(f"{type(api).__name__} declares no required permission, so it is refused")


def _guards(*keys: int) -> Callable[[Guard], Guard]:
    def register(guard: Guard) -> Guard:
        _GUARDS.update(dict.fromkeys(keys, guard))
        return guard

    return register


# -- building blocks ----------------------------------------------------------------------------------------------


def _message_of(request: Any) -> Any:
    """Return the message of a request that may come with its version."""
    return getattr(request, "message", request)


def _with_message(request: Any, message: Any) -> Any:
    return request._replace(message=message) if hasattr(request, "message") else message


def _build_response(api: Any, **values: Any) -> Any:
    """Build the response of an API from plain values."""
    return build_message(load_response_class(api.key, api.versions[1]), values)


def _split_allowed(requested: Iterable[Any], may: Callable[[Any], bool]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Divide what a request asks for into what the client may do and what is refused."""
    allowed: list[Any] = []
    denied: list[Any] = []
    for resource in requested:
        (allowed if may(resource) else denied).append(resource)
    return tuple(allowed), tuple(denied)


def _extend(response: Any, field: str, refused: Iterable[Any]) -> Any:
    """Add the errors for the refused parts, given as plain values, to the response for the others."""
    types = {field.name: field.type for field in dataclasses.fields(response)}
    errors = (
        build_message(item_of(unwrapped(types[field])[0]), item) if isinstance(item, dict) else item for item in refused
    )
    return dataclasses.replace(response, **{field: (*getattr(response, field), *errors)})


def _refusing(
    code: ErrorCode = _TOPIC_DENIED,
    *,
    name: str = "name",
    requested_field: str = "partitions",
    response_field: str = "partitions",
    index: str = "partition_index",
    **more: Any,
) -> Callable[[Any], dict[str, Any]]:
    """Return a function that responds for a topic of a request with an error for each of its partitions.

    `name`, `response_field` and `index` are fields of the response. A request names a partition by a number, or by an
    object that has its `index`.
    """

    def refuse(topic: Any) -> dict[str, Any]:
        partitions = [
            {index: getattr(item, index, item), "error_code": code, **more} for item in getattr(topic, requested_field)
        ]
        named = next(getattr(topic, field) for field in ("name", "topic", "topic_name") if hasattr(topic, field))
        return {name: named, response_field: partitions}

    return refuse


def _per_resource(
    kind: ResourceType,
    operation: Operation,
    refused: Callable[[Any], dict[str, Any]],
    *,
    requested_field: str = "topics",
    response_field: str = "topics",
    name: str = "name",
    group: Operation | None = None,
    cluster: Operation | None = None,
) -> Guard:
    """Return a guard for requests whose resources have separate results.

    `name` is the field with a resource's name; empty if the request holds the names themselves. `group` is what the
    request needs on its group as a whole; `cluster` is what suffices for all resources.
    """

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        if cluster is not None and rights.cluster(cluster):
            return await api.handle(request, client)
        if group is not None:
            rights.require(group, GROUP, request.group_id)
        allowed, denied = _split_allowed(
            getattr(request, requested_field),
            lambda resource: rights.check(operation, kind, getattr(resource, name) if name else resource),
        )
        response = await api.handle(dataclasses.replace(request, **{requested_field: allowed}), client)
        return _extend(response, response_field, map(refused, denied))

    return guard


# -- everyone -----------------------------------------------------------------------------------------------------


@_guards(17, 18, 36, 60)
async def _allow_everyone(api: Any, request: Any, client: Any, _rights: Rights) -> Any:
    """SaslHandshake, ApiVersions, SaslAuthenticate, DescribeCluster: allowed for everyone."""
    return await api.handle(request, client)


# -- the cluster --------------------------------------------------------------------------------------------------


def _on_cluster(
    operation: Operation, refused: Callable[[Any], dict[str, Any]] | None = None, *, or_else: Operation | None = None
) -> Guard:
    """Return a guard for requests about the cluster; without `refused`, the API responds with an error itself.

    `or_else` is another operation that suffices.
    """

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        if or_else is not None and rights.cluster(or_else):
            return await api.handle(request, client)
        if refused is not None and not rights.check(operation, CLUSTER):
            return _build_response(api, **refused(request))
        rights.require(operation, CLUSTER)
        return await api.handle(request, client)

    return guard


_refuse_log_dirs_of: Final = _refusing(_CLUSTER_DENIED, name="topic_name")
_refuse_election_of: Final = _refusing(
    _CLUSTER_DENIED, name="topic", response_field="partition_result", index="partition_id", error_message=_TEXT
)
_refuse_reassignment_of: Final = _refusing(_CLUSTER_DENIED, error_message=_TEXT)
_refuse_markers_of: Final = _refusing(_CLUSTER_DENIED, requested_field="partition_indexes")


def _refuse_log_dirs(request: Any) -> dict[str, Any]:
    return {"results": [_refuse_log_dirs_of(topic) for folder in request.dirs for topic in folder.topics]}


def _refuse_election(request: Any) -> dict[str, Any]:
    results = [_refuse_election_of(topic) for topic in request.topic_partitions or ()]
    return {"error_code": _CLUSTER_DENIED, "replica_election_results": results}


def _refuse_reassignment(request: Any) -> dict[str, Any]:
    responses = [_refuse_reassignment_of(topic) for topic in request.topics]
    return {"error_code": _CLUSTER_DENIED, "error_message": _TEXT, "responses": responses}


def _refuse_markers(request: Any) -> dict[str, Any]:
    return {
        "markers": [
            {"producer_id": marker.producer_id, "topics": [_refuse_markers_of(topic) for topic in marker.topics]}
            for marker in request.markers
        ]
    }


def _refuse_quotas(request: Any) -> dict[str, Any]:
    return {
        "entries": [
            {
                "error_code": _CLUSTER_DENIED,
                "error_message": _TEXT,
                "entity": [{"entity_type": part.entity_type, "entity_name": part.entity_name} for part in entry.entity],
            }
            for entry in request.entries
        ]
    }


def _refuse_all(**more: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda _request: {"error_code": _CLUSTER_DENIED, **more}


_GUARDS[29] = _on_cluster(DESCRIBE)  # DescribeAcls
_GUARDS[30] = _GUARDS[31] = _on_cluster(ALTER)  # CreateAcls, DeleteAcls
_GUARDS[50] = _on_cluster(DESCRIBE)  # DescribeUserScramCredentials
_GUARDS[57] = _on_cluster(ALTER)  # UpdateFeatures
# WriteTxnMarkers; with ALTER, an administrator ends a transaction that hangs.
_GUARDS[27] = _on_cluster(CLUSTER_ACTION, _refuse_markers, or_else=ALTER)
_GUARDS[34] = _on_cluster(ALTER, _refuse_log_dirs)  # AlterReplicaLogDirs
_GUARDS[35] = _on_cluster(DESCRIBE, _refuse_all())  # DescribeLogDirs
_GUARDS[43] = _on_cluster(ALTER, _refuse_election)  # ElectLeaders
_GUARDS[45] = _on_cluster(ALTER, _refuse_reassignment)  # AlterPartitionReassignments
_GUARDS[46] = _on_cluster(DESCRIBE, _refuse_all(error_message=_TEXT))  # ListPartitionReassignments
_GUARDS[48] = _on_cluster(DESCRIBE_CONFIGS, _refuse_all(error_message=_TEXT))  # DescribeClientQuotas
_GUARDS[49] = _on_cluster(ALTER_CONFIGS, _refuse_quotas)  # AlterClientQuotas
_GUARDS[74] = _on_cluster(DESCRIBE_CONFIGS, _refuse_all())  # ListConfigResources


# -- topics -------------------------------------------------------------------------------------------------------


_refuse_partitions: Final = _refusing()
_refuse_leader_epoch: Final = _refusing(name="topic", index="partition")
_refuse_delete_records: Final = _refusing(low_watermark=-1)
_refuse_producers: Final = _refusing(requested_field="partition_indexes")


def _refuse_create_partitions(topic: Any) -> dict[str, Any]:
    message = f"not authorized; this needs ALTER on topic {topic.name!r}"
    return {"name": topic.name, "error_code": _TOPIC_DENIED, "error_message": message}


_GUARDS[2] = _per_resource(TOPIC, DESCRIBE, _refuse_partitions)  # ListOffsets
_GUARDS[21] = _per_resource(TOPIC, DELETE, _refuse_delete_records)  # DeleteRecords
_GUARDS[23] = _per_resource(  # OffsetForLeaderEpoch
    TOPIC, DESCRIBE, _refuse_leader_epoch, name="topic", cluster=CLUSTER_ACTION
)
_GUARDS[37] = _per_resource(TOPIC, ALTER, _refuse_create_partitions, response_field="results")  # CreatePartitions
_GUARDS[61] = _per_resource(TOPIC, READ, _refuse_producers)  # DescribeProducers


@_guards(3)
async def _metadata(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """Metadata: DESCRIBE on each topic, and CREATE on the cluster or the topic to create a missing one.

    A request for all topics gets those that the client may describe. A topic asked for by name is refused, whether it
    exists or not; by id, without its name.
    """
    if request.topics is None:
        response = await api.handle(request, client)
        seen = tuple(topic for topic in response.topics if rights.topic(DESCRIBE, topic.name))
        return dataclasses.replace(response, topics=_with_topic_operations(seen, rights))
    allowed, creating, denied = [], [], []
    for requested in request.topics:
        name = requested.name if requested.topic_id is None else rights.topic_name(requested.topic_id)
        if name is None:
            allowed.append(requested)
        elif not rights.check(DESCRIBE, TOPIC, name):
            denied.append(_refuse_metadata(requested))
        elif not request.allow_auto_topic_creation or rights.has_topic(name):
            allowed.append(requested)
        elif rights.cluster(CREATE) or rights.check(CREATE, TOPIC, name):
            creating.append(requested)
        else:
            denied.append(_refuse_metadata(requested))
    response = await api.handle(
        dataclasses.replace(request, topics=tuple(allowed), allow_auto_topic_creation=False), client
    )
    topics = response.topics
    if creating:
        created = await finish(_create_missing(api, request, client, rights, creating))
        topics = (*topics, *created.topics)
    response = dataclasses.replace(response, topics=_with_topic_operations(topics, rights))
    return _extend(response, "topics", denied)


async def _create_missing(api: Any, request: Any, client: Any, rights: Rights, missing: Sequence[Any]) -> Any:
    response = await api.handle(dataclasses.replace(request, topics=tuple(missing)), client)
    for requested in missing:
        if rights.has_topic(requested.name):
            rights.record("Metadata", Change(activity=Activity.CREATE, kind="topic", name=requested.name))
    return response


def _refuse_metadata(requested: Any) -> dict[str, Any]:
    name = None if requested.topic_id is not None else requested.name
    return {"error_code": _TOPIC_DENIED, "name": name, "topic_id": requested.topic_id}


def _with_topic_operations(topics: Iterable[Any], rights: Rights) -> tuple[Any, ...]:
    return tuple(
        topic
        if topic.topic_authorized_operations == _NOT_REQUESTED or topic.name is None
        else dataclasses.replace(topic, topic_authorized_operations=i32(rights.operations(TOPIC, topic.name)))
        for topic in topics
    )


@_guards(75)
async def _describe_topic_partitions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DescribeTopicPartitions: as Metadata; of all topics, the API selects those that the client may describe."""
    allowed, refused = _split_allowed(request.topics, lambda topic: rights.check(DESCRIBE, TOPIC, topic.name))
    denied = [{"error_code": _TOPIC_DENIED, "name": topic.name} for topic in refused]
    if request.topics and not allowed:
        return _build_response(api, topics=denied)
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    response = dataclasses.replace(response, topics=_with_topic_operations(response.topics, rights))
    return _extend(response, "topics", denied)


@_guards(19)
async def _create_topics(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """CreateTopics: CREATE on the cluster or on the topic; settings are shown with DESCRIBE_CONFIGS."""
    may_all = rights.cluster(CREATE)

    def may_create(topic: Any) -> bool:
        return (may_all or rights.check(CREATE, TOPIC, topic.name)) and _may_describe_subjects(rights, topic.configs)

    def reason(topic: Any) -> str:
        if not _may_describe_subjects(rights, topic.configs):
            return _MESSAGES[_TOPIC_DENIED]
        return f"{rights.principal} may not create topic {topic.name!r}"

    allowed, denied = _split_allowed(request.topics, may_create)
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    created = tuple(
        topic
        if topic.error_code is not ErrorCode.none or rights.topic(DESCRIBE_CONFIGS, topic.name)
        else dataclasses.replace(
            topic,
            topic_config_error_code=i16(_TOPIC_DENIED),
            num_partitions=i32(-1),
            replication_factor=i16(-1),
            configs=(),
        )
        for topic in response.topics
    )
    refused = (
        {"name": topic.name, "error_code": _TOPIC_DENIED, "error_message": reason(topic), "configs": ()}
        for topic in denied
    )
    return _extend(dataclasses.replace(response, topics=created), "topics", refused)


@_guards(20)
async def _delete_topics(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DeleteTopics: DELETE on the cluster or on the topic.

    With DESCRIBE, a client learns that a topic is missing, and the name of one asked for by id.
    """
    may_all = rights.cluster(DELETE)

    def may_delete(topic: Any) -> bool:
        is_missing = topic.topic_id is None and not rights.has_topic(topic.name)
        return may_all or (is_missing and rights.topic(DESCRIBE, topic.name)) or _is_allowed(rights, DELETE, topic)

    allowed, denied = _split_allowed(request.topics, may_delete)
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    return _extend(response, "responses", (_refuse_deletion(topic, rights) for topic in denied))


def _refuse_deletion(requested: Any, rights: Rights) -> dict[str, Any]:
    name = requested.name if requested.topic_id is None else rights.topic_name(requested.topic_id)
    is_shown = name is not None and (requested.topic_id is None or rights.topic(DESCRIBE, name))
    message = f"{rights.principal} may not delete {f'topic {name!r}' if is_shown else 'this topic'}"
    return {
        "name": name if is_shown else None,
        "topic_id": requested.topic_id,
        "error_code": _TOPIC_DENIED,
        "error_message": message,
    }


def _is_allowed(rights: Rights, operation: Operation, topic: Any) -> bool:
    """Whether the client may do something with a topic that is named or has an id; an unknown id hides nothing."""
    name = topic.name if topic.topic_id is None else rights.topic_name(topic.topic_id)
    return name is None or rights.check(operation, TOPIC, name)


# -- settings -----------------------------------------------------------------------------------------------------


def _may_describe_subjects(rights: Rights, configs: Iterable[Any]) -> bool:
    """Whether the client may describe the subjects of the schema registry that settings of a topic name.

    Errors of its producers would reveal which subjects exist, and what their schemas are.
    """
    subjects = [config.value for config in configs if config.name in (SCHEMA_KEY, SCHEMA_VALUE) and config.value]
    return all(rights.check(DESCRIBE, TOPIC, subject_topic(subject)) for subject in subjects)


def _by_config_resource(operation: Operation, response_field: str) -> Guard:
    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        def may(resource: Any) -> bool:
            is_allowed = rights.check(operation, _config_kind(resource), _config_name(resource))
            return is_allowed and (operation is not ALTER_CONFIGS or _may_describe_subjects(rights, resource.configs))

        allowed, denied = _split_allowed(request.resources, may)
        response = await api.handle(dataclasses.replace(request, resources=allowed), client)
        return _extend(response, response_field, map(refuse, denied))

    def refuse(resource: Any) -> dict[str, Any]:
        code = _CONFIG_DENIED[_config_kind(resource)]
        return {
            "error_code": code,
            "error_message": _MESSAGES[code],
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
        }

    return guard


_CONFIG_DENIED: Final = {TOPIC: _TOPIC_DENIED, GROUP: _GROUP_DENIED, CLUSTER: _CLUSTER_DENIED}


def _config_kind(resource: Any) -> ResourceType:
    return {_CONFIG_TOPIC: TOPIC, _CONFIG_GROUP: GROUP}.get(resource.resource_type, CLUSTER)


def _config_name(resource: Any) -> str:
    return CLUSTER_NAME if _config_kind(resource) is CLUSTER else str(resource.resource_name)


_GUARDS[32] = _by_config_resource(DESCRIBE_CONFIGS, "results")  # DescribeConfigs
_GUARDS[33] = _GUARDS[44] = _by_config_resource(ALTER_CONFIGS, "responses")  # AlterConfigs, IncrementalAlterConfigs


# -- groups -------------------------------------------------------------------------------------------------------


@_guards(11, 12, 13, 14)
async def _group_member(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """JoinGroup, Heartbeat, LeaveGroup, SyncGroup: READ on the group."""
    rights.require(READ, GROUP, _message_of(request).group_id)
    return await api.handle(request, client)


@_guards(68, 76)
async def _group_heartbeat(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ConsumerGroupHeartbeat, ShareGroupHeartbeat: READ on the group, DESCRIBE on the topics that are named."""
    message = _message_of(request)
    rights.require(READ, GROUP, message.group_id)
    rights.require_all(DESCRIBE, TOPIC, message.subscribed_topic_names or ())
    return await api.handle(request, client)


@_guards(10)
async def _find_coordinator(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """FindCoordinator: DESCRIBE on the group or the transactional id."""
    if request.key_type not in (_GROUP_KEY, _TRANSACTION_KEY):
        rights.require(CLUSTER_ACTION, CLUSTER)
        return await api.handle(request, client)
    kind = GROUP if request.key_type == _GROUP_KEY else TRANSACTIONAL_ID
    code = _GROUP_DENIED if request.key_type == _GROUP_KEY else _TRANSACTION_DENIED
    allowed, refused = _split_allowed(request.coordinator_keys, lambda key: rights.check(DESCRIBE, kind, key))
    denied = [{"key": key, "node_id": -1, "port": -1, "error_code": code} for key in refused]
    if not allowed and denied:
        return _build_response(api, coordinators=denied)
    response = await api.handle(dataclasses.replace(request, coordinator_keys=allowed), client)
    return _extend(response, "coordinators", denied)


@_guards(16)
async def _list_groups(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ListGroups: all groups with DESCRIBE on the cluster, otherwise those that the client may describe."""
    response = await api.handle(request, client)
    if rights.cluster(DESCRIBE):
        return response
    seen = tuple(group for group in response.groups if rights.group(DESCRIBE, group.group_id))
    return dataclasses.replace(response, groups=seen)


def _describing_groups(field: str) -> Guard:
    """Return a guard for requests that describe groups, with what the client may do with each."""

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        message = _message_of(request)
        allowed, denied = _split_allowed(getattr(message, field), lambda group: rights.check(DESCRIBE, GROUP, group))
        message = dataclasses.replace(message, **{field: allowed})
        response = await api.handle(_with_message(request, message), client)
        shown = (
            _without_hidden_topics(api, _with_group_operations(group, rights), rights) for group in response.groups
        )
        refused = (api.refused(group, _GROUP_DENIED, _MESSAGES[_GROUP_DENIED]) for group in denied)
        return dataclasses.replace(response, groups=(*shown, *refused))

    return guard


def _with_group_operations(group: Any, rights: Rights) -> Any:
    if group.authorized_operations == _NOT_REQUESTED:
        return group
    return dataclasses.replace(group, authorized_operations=i32(rights.operations(GROUP, group.group_id)))


def _without_hidden_topics(api: Any, group: Any, rights: Rights) -> Any:
    """Describe no group that has topics which the client may not describe, as in Kafka."""
    names: set[str] = set()
    for member in group.members:
        names.update(getattr(member, "subscribed_topic_names", None) or ())
        for assignment in (getattr(member, "assignment", None), getattr(member, "target_assignment", None)):
            names.update(part.topic_name for part in getattr(assignment, "topic_partitions", ()))
    if all(rights.topic(DESCRIBE, name) for name in names):
        return group
    message = "the group has described topics that the client is not authorized to describe"
    return api.refused(group.group_id, _TOPIC_DENIED, message)


def _refuse_group_deletion(group: Any) -> dict[str, Any]:
    return {"group_id": group, "error_code": _GROUP_DENIED}


_GUARDS[15] = _describing_groups("groups")  # DescribeGroups
_GUARDS[69] = _GUARDS[77] = _describing_groups("group_ids")  # ConsumerGroupDescribe, ShareGroupDescribe
_GUARDS[42] = _per_resource(  # DeleteGroups
    GROUP, DELETE, _refuse_group_deletion, requested_field="groups_names", response_field="results", name=""
)
_GUARDS[47] = _per_resource(TOPIC, READ, _refuse_partitions, group=DELETE)  # OffsetDelete


@_guards(9)
async def _offset_fetch(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """OffsetFetch: DESCRIBE on the group and on the topics; a request for all topics gets those it may describe."""
    responses = []
    for query in request:
        if not rights.check(DESCRIBE, GROUP, query.group_id):
            responses.append(api.refuse(query, _GROUP_DENIED))
            continue
        if query.topics is None:
            (response,) = await api.handle((query,), client)
            seen = tuple(topic for topic in response.topics if _is_visible(rights, topic))
            responses.append(dataclasses.replace(response, topics=seen))
            continue
        allowed, denied = _split_allowed(query.topics, lambda topic: _is_allowed(rights, DESCRIBE, topic))
        (response,) = await api.handle((dataclasses.replace(query, topics=allowed),), client)
        if response.code is ErrorCode.none:
            response = _extend(response, "topics", (api.refuse_topic(topic, _TOPIC_DENIED) for topic in denied))
        responses.append(response)
    return tuple(responses)


def _is_visible(rights: Rights, topic: Any) -> bool:
    name = topic.name if topic.topic_id is None else rights.topic_name(topic.topic_id)
    return name is None or rights.topic(DESCRIBE, name)


@_guards(51)
async def _alter_users(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """AlterUserScramCredentials: ALTER on the cluster; nothing for one's own password, after signing in with it."""
    verified = None if client.session is None else client.session.verified
    own = None
    if verified is not None and verified.credential is not None and not verified.tokens:
        own = verified.credential.user
    if request.deletions or any(upsertion.name != own for upsertion in request.upsertions):
        rights.require(ALTER, CLUSTER)
    return await api.handle(request, client)


# -- transactions -------------------------------------------------------------------------------------------------


@_guards(22)
async def _init_producer_id(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """InitProducerId: WRITE on the transactional id; without one, WRITE on any topic."""
    transactional_id = request.message.transactional_id
    if transactional_id is not None:
        rights.require(WRITE, TRANSACTIONAL_ID, transactional_id)
    elif not rights.allows_any(WRITE, TOPIC):
        rights.require(Operation.IDEMPOTENT_WRITE, CLUSTER)
    return await api.handle(request, client)


@_guards(26)
async def _end_transaction(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    rights.require(WRITE, TRANSACTIONAL_ID, request.message.transactional_id)
    return await api.handle(request, client)


@_guards(25)
async def _add_offsets(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """AddOffsetsToTxn: WRITE on the transactional id, READ on the group."""
    rights.require(WRITE, TRANSACTIONAL_ID, request.message.transactional_id)
    rights.require(READ, GROUP, request.message.group_id)
    return await api.handle(request, client)


@_guards(24)
async def _add_partitions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """AddPartitionsToTxn: WRITE on the transactional id and on all topics, or nothing is added.

    From version 4 on it is a request between nodes.
    """
    is_of_client = request.version < 4
    if not is_of_client and not rights.check(CLUSTER_ACTION, CLUSTER):
        return api.refusal(_CLUSTER_DENIED)
    allowed, refused = [], []
    for transaction in request.transactions:
        names = {topic.name for topic in transaction.topics}
        denied = {name for name in names if is_of_client and not rights.check(WRITE, TOPIC, name)}
        if is_of_client and not rights.check(WRITE, TRANSACTIONAL_ID, transaction.transactional_id):
            refused.append(_refuse_added(transaction, dict.fromkeys(names, _TRANSACTION_DENIED)))
        elif denied:
            codes = {name: _TOPIC_DENIED if name in denied else ErrorCode.operation_not_attempted for name in names}
            refused.append(_refuse_added(transaction, codes))
        else:
            allowed.append(transaction)
    response = await api.handle(request._replace(transactions=tuple(allowed)), client)
    return _extend(response, "results_by_transaction", refused)


def _refuse_added(transaction: Any, codes: dict[str, ErrorCode]) -> dict[str, Any]:
    topics = [
        {
            "name": topic.name,
            "results_by_partition": [
                {"partition_index": index, "partition_error_code": codes[topic.name]} for index in topic.partitions
            ],
        }
        for topic in transaction.topics
    ]
    return {"transactional_id": transaction.transactional_id, "topic_results": topics}


@_guards(28)
async def _txn_offset_commit(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """TxnOffsetCommit: WRITE on the transactional id, READ on the group and on the topics."""
    message = request.message
    if not rights.check(WRITE, TRANSACTIONAL_ID, message.transactional_id):
        return _build_response(api, topics=list(map(_refusing(_TRANSACTION_DENIED), message.topics)))
    if not rights.check(READ, GROUP, message.group_id):
        return _build_response(api, topics=list(map(_refusing(_GROUP_DENIED), message.topics)))
    allowed, denied = _split_allowed(message.topics, lambda topic: rights.check(READ, TOPIC, topic.name))
    response = await api.handle(request._replace(message=dataclasses.replace(message, topics=allowed)), client)
    return _extend(response, "topics", map(_refuse_partitions, denied))


@_guards(65)
async def _describe_transactions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DescribeTransactions: DESCRIBE on the transactional id, and on the topics that are shown."""
    allowed, denied = _split_allowed(
        request.transactional_ids, lambda transactional_id: rights.check(DESCRIBE, TRANSACTIONAL_ID, transactional_id)
    )
    response = await api.handle(dataclasses.replace(request, transactional_ids=allowed), client)
    shown = tuple(
        dataclasses.replace(state, topics=tuple(topic for topic in state.topics if rights.topic(DESCRIBE, topic.topic)))
        for state in response.transaction_states
    )
    refused = (api.refused(transactional_id, _TRANSACTION_DENIED) for transactional_id in denied)
    return dataclasses.replace(response, transaction_states=(*shown, *refused))


@_guards(66)
async def _list_transactions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ListTransactions: those that the client may describe."""
    response = await api.handle(request, client)
    seen = tuple(
        transaction_state
        for transaction_state in response.transaction_states
        if rights.transaction(DESCRIBE, transaction_state.transactional_id)
    )
    return dataclasses.replace(response, transaction_states=seen)


# -- share groups -------------------------------------------------------------------------------------------------


def _reading_share(refused: Callable[[Any], dict[str, Any]]) -> Guard:
    """Return a guard for ShareFetch and ShareAcknowledge: READ on the group and on the topics."""

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        rights.require(READ, GROUP, request.group_id or "")
        allowed, denied = _split_allowed(request.topics, lambda topic: _may_read_id(rights, topic.topic_id))
        response = await api.handle(dataclasses.replace(request, topics=allowed), client)
        if response.error_code is not ErrorCode.none:
            return response
        return _extend(response, "responses", (refuse_topic(topic) for topic in denied))

    def refuse_topic(topic: Any) -> dict[str, Any]:
        return {"topic_id": topic.topic_id, "partitions": list(map(refused, topic.partitions))}

    return guard


def _may_read_id(rights: Rights, topic_id: UUID | None) -> bool:
    name = None if topic_id is None else rights.topic_name(topic_id)
    return name is None or rights.check(READ, TOPIC, name)


_NO_LEADER: Final = {"leader_id": -1, "leader_epoch": -1}


def _refuse_share_fetch(partition: Any) -> dict[str, Any]:
    is_acknowledged = bool(partition.acknowledgement_batches)
    return {
        **_refuse_share_acknowledge(partition),
        "acknowledge_error_code": i16(_TOPIC_DENIED if is_acknowledged else ErrorCode.none),
        "records": b"",
    }


def _refuse_share_acknowledge(partition: Any) -> dict[str, Any]:
    return {
        "partition_index": partition.partition_index,
        "error_code": _TOPIC_DENIED,
        "current_leader": _NO_LEADER,
    }


_refuse_share_offsets: Final = _refusing(name="topic_name", error_message=_MESSAGES[_TOPIC_DENIED])


def _refuse_share_deletion(topic: Any) -> dict[str, Any]:
    return {
        "topic_name": topic.topic_name,
        "error_code": _TOPIC_DENIED,
        "error_message": _MESSAGES[_TOPIC_DENIED],
    }


_GUARDS[78] = _reading_share(_refuse_share_fetch)  # ShareFetch
_GUARDS[79] = _reading_share(_refuse_share_acknowledge)  # ShareAcknowledge
_GUARDS[91] = _per_resource(  # AlterShareGroupOffsets
    TOPIC, READ, _refuse_share_offsets, response_field="responses", name="topic_name", group=READ
)
_GUARDS[92] = _per_resource(  # DeleteShareGroupOffsets
    TOPIC, READ, _refuse_share_deletion, response_field="responses", name="topic_name", group=DELETE
)


_hide_share_offsets: Final = _refusing(
    name="topic_name", start_offset=-1, leader_epoch=0, error_message=_MESSAGES[_TOPIC_DENIED]
)


@_guards(90)
async def _describe_share_offsets(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DescribeShareGroupOffsets: DESCRIBE on the groups and on the topics; of all topics, those that are shown."""

    def visible(topics: Any) -> Any:
        return None if topics is None else tuple(topic for topic in topics if rights.topic(DESCRIBE, topic.topic_name))

    allowed, denied = _split_allowed(request.groups, lambda group: rights.check(DESCRIBE, GROUP, group.group_id))
    groups = tuple(dataclasses.replace(group, topics=visible(group.topics)) for group in allowed)
    response = await api.handle(dataclasses.replace(request, groups=groups), client)
    hidden = {
        group.group_id: tuple(
            _hide_share_offsets(topic)
            for topic in group.topics or ()
            if not rights.check(DESCRIBE, TOPIC, topic.topic_name)
        )
        for group in allowed
    }
    shown = tuple(
        _extend(dataclasses.replace(group, topics=visible(group.topics)), "topics", hidden.get(group.group_id, ()))
        for group in response.groups
    )
    refused = (
        {"group_id": group.group_id, "error_code": _GROUP_DENIED, "error_message": _MESSAGES[_GROUP_DENIED]}
        for group in denied
    )
    return _extend(dataclasses.replace(response, groups=shown), "groups", refused)
