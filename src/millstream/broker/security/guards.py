"""What each Kafka API needs, and how it answers a client that may not: one guard for each, by API key.

A guard takes out of a request what its client may not do, has the API answer the rest, and puts in for each part that
was taken out the error that Kafka gives; what the client may not know of is left out of the answer. An API without a
guard is refused, and a test fails for it. The APIs that read their own frames (Produce, Fetch, OffsetCommit) and
Millstream's private requests ask for themselves; `ASK_THEMSELVES` names the former, `needs` of the latter is abstract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from kio.schema.add_partitions_to_txn.v5 import response as add_partitions
from kio.schema.alter_client_quotas.v1 import response as alter_quotas
from kio.schema.alter_configs.v2 import response as alter_configs
from kio.schema.alter_partition_reassignments.v1 import response as reassign
from kio.schema.alter_replica_log_dirs.v2 import response as replica_log_dirs
from kio.schema.alter_share_group_offsets.v0 import response as alter_share_offsets
from kio.schema.consumer_group_describe.v1 import response as describe_consumer_groups
from kio.schema.create_partitions.v3 import response as create_partitions
from kio.schema.create_topics.v7 import response as create_topics
from kio.schema.delete_groups.v2 import response as delete_groups
from kio.schema.delete_records.v2 import response as delete_records
from kio.schema.delete_share_group_offsets.v0 import response as delete_share_offsets
from kio.schema.delete_topics.v6 import response as delete_topics
from kio.schema.describe_client_quotas.v1 import response as describe_quotas
from kio.schema.describe_configs.v4 import response as describe_configs
from kio.schema.describe_groups.v6 import response as describe_groups
from kio.schema.describe_log_dirs.v5 import response as describe_log_dirs
from kio.schema.describe_producers.v0 import response as describe_producers
from kio.schema.describe_share_group_offsets.v1 import response as share_offsets
from kio.schema.describe_topic_partitions.v0 import response as topic_partitions
from kio.schema.describe_transactions.v0 import response as describe_transactions
from kio.schema.elect_leaders.v2 import response as elect_leaders
from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v6 import response as find_coordinator
from kio.schema.incremental_alter_configs.v1 import response as incremental_configs
from kio.schema.list_config_resources.v1 import response as list_configs
from kio.schema.list_offsets.v11 import response as list_offsets
from kio.schema.list_partition_reassignments.v0 import response as list_reassignments
from kio.schema.metadata.v13 import response as metadata
from kio.schema.offset_delete.v0 import response as offset_delete
from kio.schema.offset_for_leader_epoch.v4 import response as leader_epoch
from kio.schema.share_acknowledge.v2 import response as share_acknowledge
from kio.schema.share_fetch.v2 import response as share_fetch
from kio.schema.share_group_describe.v1 import response as describe_share_groups
from kio.schema.txn_offset_commit.v5 import response as txn_offset_commit
from kio.schema.types import BrokerId, GroupId, ProducerId, TopicName
from kio.schema.write_txn_markers.v2 import response as write_markers
from kio.static.primitive import Records, TZAware, i16, i32, i64

from millstream.broker.security.rights import Rights
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.errors import ClusterNotAuthorized

Guard = Callable[[Any, Any, Any, Rights], Awaitable[Any]]
"""Answers for an API: the API, the request in its newest version, the client and what it may do."""

READ, WRITE, CREATE, DELETE = Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE
ALTER, DESCRIBE = Operation.ALTER, Operation.DESCRIBE
DESCRIBE_CONFIGS, ALTER_CONFIGS = Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTIONAL_ID = ResourceType.TRANSACTIONAL_ID

ASK_THEMSELVES: Final = frozenset({0, 1, 8})
"""Produce, Fetch and OffsetCommit, which are no messages of kio's."""

_TOPIC_DENIED: Final = ErrorCode.topic_authorization_failed
_GROUP_DENIED: Final = ErrorCode.group_authorization_failed
_CLUSTER_DENIED: Final = ErrorCode.cluster_authorization_failed
_TRANSACTION_DENIED: Final = ErrorCode.transactional_id_authorization_failed
_MESSAGES: Final = {
    _TOPIC_DENIED: "the topic authorization failed",
    _GROUP_DENIED: "the group authorization failed",
    _CLUSTER_DENIED: "the cluster authorization failed",
}
_NOT_ASKED: Final = i32(-(2**31))
_CONFIG_TOPIC, _CONFIG_GROUP = 2, 32
_GROUP_KEY, _TRANSACTION_KEY = 0, 1
_NO_TIME: Final = TZAware.parse(datetime(1970, 1, 1, tzinfo=UTC))

_GUARDS: Final[dict[int, Guard]] = {}


def guard_of(key: int) -> Guard:
    """The guard of an API; one that refuses everything for an API that has none."""
    return _GUARDS.get(key, _refuse)


def guarded_keys() -> frozenset[int]:
    """Every API that has a guard."""
    return frozenset(_GUARDS)


async def _refuse(api: Any, _request: Any, _client: Any, _rights: Rights) -> Any:
    raise ClusterNotAuthorized(f"{type(api).__name__} declares no required permission, so it is refused")


def _guards(*keys: int) -> Callable[[Guard], Guard]:
    def register(guard: Guard) -> Guard:
        _GUARDS.update(dict.fromkeys(keys, guard))
        return guard

    return register


def _message_of(request: Any) -> Any:
    """The message of a request that may come with its version."""
    return getattr(request, "message", request)


def _with_message(request: Any, message: Any) -> Any:
    return request._replace(message=message) if hasattr(request, "message") else message


# -- everybody ----------------------------------------------------------------------------------------------------


@_guards(17, 18, 36, 60)
async def _open(api: Any, request: Any, client: Any, _rights: Rights) -> Any:
    """SaslHandshake, ApiVersions, SaslAuthenticate, DescribeCluster: allowed for everyone."""
    return await api.handle(request, client)


# -- the cluster --------------------------------------------------------------------------------------------------


def _needs_cluster(operation: Operation, refused: Callable[[Any], Any] | None = None) -> Guard:
    """A guard for requests about the cluster; without `refused`, the API itself can answer with an error."""

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        if refused is not None and not rights.cluster(operation):
            return refused(request)
        rights.require(operation, CLUSTER)
        return await api.handle(request, client)

    return guard


def _throttled(response: type, **fields: Any) -> Any:
    from millstream.broker.kafka.api import NO_THROTTLE

    return response(throttle_time=NO_THROTTLE, **fields)


def _replica_log_dirs_refused(request: Any) -> Any:
    return _throttled(
        replica_log_dirs.AlterReplicaLogDirsResponse,
        results=tuple(
            replica_log_dirs.AlterReplicaLogDirTopicResult(
                topic_name=topic.name,
                partitions=tuple(
                    replica_log_dirs.AlterReplicaLogDirPartitionResult(
                        partition_index=index, error_code=_CLUSTER_DENIED
                    )
                    for index in topic.partitions
                ),
            )
            for folder in request.dirs
            for topic in folder.topics
        ),
    )


def _election_refused(request: Any) -> Any:
    return _throttled(
        elect_leaders.ElectLeadersResponse,
        error_code=_CLUSTER_DENIED,
        replica_election_results=tuple(
            elect_leaders.ReplicaElectionResult(
                topic=topic.topic,
                partition_result=tuple(
                    elect_leaders.PartitionResult(
                        partition_id=index, error_code=_CLUSTER_DENIED, error_message=_MESSAGES[_CLUSTER_DENIED]
                    )
                    for index in topic.partitions
                ),
            )
            for topic in request.topic_partitions or ()
        ),
    )


def _reassignment_refused(request: Any) -> Any:
    return _throttled(
        reassign.AlterPartitionReassignmentsResponse,
        error_code=_CLUSTER_DENIED,
        error_message=_MESSAGES[_CLUSTER_DENIED],
        responses=tuple(
            reassign.ReassignableTopicResponse(
                name=topic.name,
                partitions=tuple(
                    reassign.ReassignablePartitionResponse(
                        partition_index=partition.partition_index,
                        error_code=_CLUSTER_DENIED,
                        error_message=_MESSAGES[_CLUSTER_DENIED],
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        ),
    )


def _markers_refused(request: Any) -> Any:
    return write_markers.WriteTxnMarkersResponse(
        markers=tuple(
            write_markers.WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=tuple(
                    write_markers.WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=tuple(
                            write_markers.WritableTxnMarkerPartitionResult(
                                partition_index=index, error_code=_CLUSTER_DENIED
                            )
                            for index in topic.partition_indexes
                        ),
                    )
                    for topic in marker.topics
                ),
            )
            for marker in request.markers
        )
    )


def _quotas_refused(request: Any) -> Any:
    return _throttled(
        alter_quotas.AlterClientQuotasResponse,
        entries=tuple(
            alter_quotas.EntryData(
                error_code=_CLUSTER_DENIED,
                error_message=_MESSAGES[_CLUSTER_DENIED],
                entity=tuple(
                    alter_quotas.EntityData(entity_type=part.entity_type, entity_name=part.entity_name)
                    for part in entry.entity
                ),
            )
            for entry in request.entries
        ),
    )


_GUARDS[29] = _needs_cluster(DESCRIBE)  # DescribeAcls
_GUARDS[30] = _GUARDS[31] = _needs_cluster(ALTER)  # CreateAcls, DeleteAcls
_GUARDS[50] = _needs_cluster(DESCRIBE)  # DescribeUserScramCredentials
_GUARDS[51] = _needs_cluster(ALTER)  # AlterUserScramCredentials
_GUARDS[57] = _needs_cluster(ALTER)  # UpdateFeatures
_GUARDS[27] = _needs_cluster(Operation.CLUSTER_ACTION, _markers_refused)  # WriteTxnMarkers
_GUARDS[34] = _needs_cluster(ALTER, _replica_log_dirs_refused)  # AlterReplicaLogDirs
_GUARDS[35] = _needs_cluster(  # DescribeLogDirs
    DESCRIBE,
    lambda _: _throttled(describe_log_dirs.DescribeLogDirsResponse, error_code=_CLUSTER_DENIED, results=()),
)
_GUARDS[43] = _needs_cluster(ALTER, _election_refused)  # ElectLeaders
_GUARDS[45] = _needs_cluster(ALTER, _reassignment_refused)  # AlterPartitionReassignments
_GUARDS[46] = _needs_cluster(  # ListPartitionReassignments
    DESCRIBE,
    lambda _: _throttled(
        list_reassignments.ListPartitionReassignmentsResponse,
        error_code=_CLUSTER_DENIED,
        error_message=_MESSAGES[_CLUSTER_DENIED],
        topics=(),
    ),
)
_GUARDS[48] = _needs_cluster(  # DescribeClientQuotas
    DESCRIBE_CONFIGS,
    lambda _: _throttled(
        describe_quotas.DescribeClientQuotasResponse,
        error_code=_CLUSTER_DENIED,
        error_message=_MESSAGES[_CLUSTER_DENIED],
        entries=None,
    ),
)
_GUARDS[49] = _needs_cluster(ALTER_CONFIGS, _quotas_refused)  # AlterClientQuotas
_GUARDS[74] = _needs_cluster(  # ListConfigResources
    DESCRIBE_CONFIGS,
    lambda _: _throttled(list_configs.ListConfigResourcesResponse, error_code=_CLUSTER_DENIED, config_resources=()),
)


# -- topics -------------------------------------------------------------------------------------------------------


def _by_topic(
    operation: Operation,
    response_field: str,
    refused: Callable[[Any], Any],
    *,
    request_field: str = "topics",
    name: str = "name",
) -> Guard:
    """A guard for requests about topics, each of which is answered on its own."""

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        asked = getattr(request, request_field)
        allowed = tuple(one for one in asked if rights.topic(operation, getattr(one, name)))
        response = await api.handle(dataclasses.replace(request, **{request_field: allowed}), client)
        denied = tuple(refused(one) for one in asked if not rights.topic(operation, getattr(one, name)))
        return dataclasses.replace(response, **{response_field: (*getattr(response, response_field), *denied)})

    return guard


def _list_offsets_refused(topic: Any) -> Any:
    refused = list_offsets.ListOffsetsPartitionResponse
    indexes = (partition.partition_index for partition in topic.partitions)
    partitions = tuple(refused(partition_index=index, error_code=_TOPIC_DENIED) for index in indexes)
    return list_offsets.ListOffsetsTopicResponse(name=topic.name, partitions=partitions)


def _leader_epoch_refused(topic: Any) -> Any:
    indexes = (partition.partition for partition in topic.partitions)
    partitions = tuple(leader_epoch.EpochEndOffset(error_code=_TOPIC_DENIED, partition=index) for index in indexes)
    return leader_epoch.OffsetForLeaderTopicResult(topic=topic.topic, partitions=partitions)


def _delete_records_refused(topic: Any) -> Any:
    return delete_records.DeleteRecordsTopicResult(
        name=topic.name,
        partitions=tuple(
            delete_records.DeleteRecordsPartitionResult(
                partition_index=partition.partition_index, low_watermark=i64(-1), error_code=_TOPIC_DENIED
            )
            for partition in topic.partitions
        ),
    )


def _producers_refused(topic: Any) -> Any:
    return describe_producers.TopicResponse(
        name=topic.name,
        partitions=tuple(
            describe_producers.PartitionResponse(
                partition_index=index, error_code=_TOPIC_DENIED, error_message=None, active_producers=()
            )
            for index in topic.partition_indexes
        ),
    )


def _create_partitions_refused(topic: Any) -> Any:
    return create_partitions.CreatePartitionsTopicResult(
        name=topic.name, error_code=_TOPIC_DENIED, error_message=_MESSAGES[_TOPIC_DENIED]
    )


_GUARDS[2] = _by_topic(DESCRIBE, "topics", _list_offsets_refused)  # ListOffsets
_GUARDS[21] = _by_topic(DELETE, "topics", _delete_records_refused)  # DeleteRecords
_GUARDS[23] = _by_topic(DESCRIBE, "topics", _leader_epoch_refused, name="topic")  # OffsetForLeaderEpoch
_GUARDS[37] = _by_topic(ALTER, "results", _create_partitions_refused)  # CreatePartitions
_GUARDS[61] = _by_topic(READ, "topics", _producers_refused)  # DescribeProducers


@_guards(3)
async def _metadata(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """Metadata: the topics that the client may describe.

    Those that it may not are left out where all are asked for. By name they are refused, whether they exist or not; by
    id they are unknown. A topic that is missing is created only for who may create it.
    """
    if request.topics is None:
        response = await api.handle(request, client)
        seen = tuple(topic for topic in response.topics if rights.topic(DESCRIBE, topic.name))
        return dataclasses.replace(response, topics=_with_topic_operations(seen, rights))
    allowed, creating, denied = [], [], []
    for wanted in request.topics:
        name = wanted.name if wanted.topic_id is None else rights.topic_name(wanted.topic_id)
        if name is None:
            allowed.append(wanted)
        elif not rights.topic(DESCRIBE, name):
            denied.append(_metadata_refused(wanted))
        elif not request.allow_auto_topic_creation or rights.has_topic(name):
            allowed.append(wanted)
        elif rights.cluster(CREATE) or rights.topic(CREATE, name):
            creating.append(wanted)
        else:
            denied.append(_metadata_refused(wanted))
    response = await api.handle(
        dataclasses.replace(request, topics=tuple(allowed), allow_auto_topic_creation=False), client
    )
    topics = response.topics
    if creating:
        created = await api.handle(dataclasses.replace(request, topics=tuple(creating)), client)
        topics = (*topics, *created.topics)
    return dataclasses.replace(response, topics=(*_with_topic_operations(topics, rights), *denied))


def _metadata_refused(wanted: Any) -> Any:
    is_by_id = wanted.topic_id is not None
    return metadata.MetadataResponseTopic(
        error_code=ErrorCode.unknown_topic_id if is_by_id else _TOPIC_DENIED,
        name=None if is_by_id else wanted.name,
        topic_id=wanted.topic_id,
        is_internal=False,
        partitions=(),
    )


def _with_topic_operations(topics: Iterable[Any], rights: Rights) -> tuple[Any, ...]:
    return tuple(
        topic
        if topic.topic_authorized_operations == _NOT_ASKED or topic.name is None
        else dataclasses.replace(topic, topic_authorized_operations=i32(rights.operations(TOPIC, topic.name)))
        for topic in topics
    )


@_guards(75)
async def _describe_topic_partitions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DescribeTopicPartitions: as Metadata."""
    allowed = tuple(topic for topic in request.topics if rights.topic(DESCRIBE, topic.name))
    denied = tuple(
        topic_partitions.DescribeTopicPartitionsResponseTopic(
            error_code=_TOPIC_DENIED, name=topic.name, topic_id=None, is_internal=False, partitions=()
        )
        for topic in request.topics
        if not rights.topic(DESCRIBE, topic.name)
    )
    if request.topics and not allowed:
        return _throttled(topic_partitions.DescribeTopicPartitionsResponse, topics=denied, next_cursor=None)
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    seen = [topic for topic in response.topics if topic.name is None or rights.topic(DESCRIBE, topic.name)]
    return dataclasses.replace(response, topics=(*_with_topic_operations(seen, rights), *denied))


@_guards(19)
async def _create_topics(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """CreateTopics: CREATE on the cluster or on the topic; settings are told to who may describe them."""
    may_all = rights.cluster(CREATE)
    allowed = tuple(topic for topic in request.topics if may_all or rights.topic(CREATE, topic.name))
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    created = tuple(
        topic
        if topic.error_code is not ErrorCode.none or rights.topic(DESCRIBE_CONFIGS, topic.name)
        else dataclasses.replace(
            topic,
            topic_config_error_code=i16(_TOPIC_DENIED),
            num_partitions=i32(-1),
            replication_factor=i16(-1),
            configs=None,
        )
        for topic in response.topics
    )
    denied = tuple(
        create_topics.CreatableTopicResult(
            name=topic.name,
            topic_id=None,
            error_code=_TOPIC_DENIED,
            error_message=_MESSAGES[_TOPIC_DENIED],
            configs=(),
        )
        for topic in request.topics
        if topic not in allowed
    )
    return dataclasses.replace(response, topics=(*created, *denied))


@_guards(20)
async def _delete_topics(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DeleteTopics: DELETE on the topic; the name of one that is asked for by id only for who may describe it."""
    allowed, denied = [], []
    for wanted in request.topics:
        name = wanted.name if wanted.topic_id is None else rights.topic_name(wanted.topic_id)
        if name is None or rights.topic(DELETE, name):
            allowed.append(wanted)
            continue
        shown = wanted.topic_id is None or rights.topic(DESCRIBE, name)
        denied.append(
            delete_topics.DeletableTopicResult(
                name=TopicName(name) if shown else None,
                topic_id=wanted.topic_id,
                error_code=_TOPIC_DENIED,
                error_message=_MESSAGES[_TOPIC_DENIED],
            )
        )
    response = await api.handle(dataclasses.replace(request, topics=tuple(allowed)), client)
    return dataclasses.replace(response, responses=(*response.responses, *denied))


# -- settings -----------------------------------------------------------------------------------------------------


def _by_config_resource(operation: Operation, result: Callable[..., Any], field: str, **more: Any) -> Guard:
    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        codes = [_config_refusal(resource, operation, rights) for resource in request.resources]
        pairs = list(zip(request.resources, codes, strict=True))
        allowed = tuple(resource for resource, code in pairs if code is None)
        response = await api.handle(dataclasses.replace(request, resources=allowed), client)
        denied = tuple(
            result(
                error_code=code,
                error_message=_MESSAGES[code],
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                **more,
            )
            for resource, code in pairs
            if code is not None
        )
        return dataclasses.replace(response, **{field: (*getattr(response, field), *denied)})

    return guard


def _config_refusal(resource: Any, operation: Operation, rights: Rights) -> ErrorCode | None:
    if resource.resource_type == _CONFIG_TOPIC:
        return None if rights.topic(operation, resource.resource_name) else _TOPIC_DENIED
    if resource.resource_type == _CONFIG_GROUP:
        return None if rights.group(operation, resource.resource_name) else _GROUP_DENIED
    return None if rights.cluster(operation) else _CLUSTER_DENIED


_GUARDS[32] = _by_config_resource(
    DESCRIBE_CONFIGS, describe_configs.DescribeConfigsResult, "results", configs=()
)  # DescribeConfigs
_GUARDS[33] = _by_config_resource(
    ALTER_CONFIGS, alter_configs.AlterConfigsResourceResponse, "responses"
)  # AlterConfigs
_GUARDS[44] = _by_config_resource(
    ALTER_CONFIGS, incremental_configs.AlterConfigsResourceResponse, "responses"
)  # IncrementalAlterConfigs


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
        rights.require(Operation.CLUSTER_ACTION, CLUSTER)
        return await api.handle(request, client)
    kind = GROUP if request.key_type == _GROUP_KEY else TRANSACTIONAL_ID
    code = _GROUP_DENIED if request.key_type == _GROUP_KEY else _TRANSACTION_DENIED
    allowed = tuple(key for key in request.coordinator_keys if rights.allows(DESCRIBE, kind, key))
    denied = tuple(
        find_coordinator.Coordinator(
            key=key, node_id=BrokerId(-1), host="", port=i32(-1), error_code=code, error_message=None
        )
        for key in request.coordinator_keys
        if not rights.allows(DESCRIBE, kind, key)
    )
    if not allowed and denied:
        return _throttled(find_coordinator.FindCoordinatorResponse, coordinators=denied)
    response = await api.handle(dataclasses.replace(request, coordinator_keys=allowed), client)
    return dataclasses.replace(response, coordinators=(*response.coordinators, *denied))


@_guards(16)
async def _list_groups(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ListGroups: all with DESCRIBE on the cluster, else those that the client may describe."""
    response = await api.handle(request, client)
    if rights.cluster(DESCRIBE):
        return response
    seen = tuple(group for group in response.groups if rights.group(DESCRIBE, group.group_id))
    return dataclasses.replace(response, groups=seen)


def _by_group(refused: Callable[[str], Any], *, asked: str = "groups") -> Guard:
    """A guard for requests that describe groups, with what the client may do with each."""

    async def guard(api: Any, request: Any, client: Any, rights: Rights) -> Any:
        message = _message_of(request)
        groups = getattr(message, asked)
        allowed = tuple(group for group in groups if rights.group(DESCRIBE, group))
        message = dataclasses.replace(message, **{asked: allowed})
        response = await api.handle(_with_message(request, message), client)
        told = tuple(_without_hidden_topics(_with_group_operations(one, rights), rights) for one in response.groups)
        denied = tuple(refused(group) for group in groups if not rights.group(DESCRIBE, group))
        return dataclasses.replace(response, groups=(*told, *denied))

    return guard


def _with_group_operations(group: Any, rights: Rights) -> Any:
    if group.authorized_operations == _NOT_ASKED:
        return group
    return dataclasses.replace(group, authorized_operations=i32(rights.operations(GROUP, group.group_id)))


def _without_hidden_topics(group: Any, rights: Rights) -> Any:
    """A group that has topics which the client may not describe is not described, as in Kafka."""
    names: set[str] = set()
    for member in group.members:
        names.update(getattr(member, "subscribed_topic_names", None) or ())
        for assignment in (getattr(member, "assignment", None), getattr(member, "target_assignment", None)):
            names.update(part.topic_name for part in getattr(assignment, "topic_partitions", ()))
    if all(rights.topic(DESCRIBE, name) for name in names):
        return group
    return dataclasses.replace(
        group,
        error_code=_TOPIC_DENIED,
        error_message="the group has described topics that the client is not authorized to describe",
        members=(),
    )


def _described_group_refused(group: str) -> Any:
    return describe_groups.DescribedGroup(
        error_code=_GROUP_DENIED,
        error_message=None,
        group_id=GroupId(group),
        group_state="",
        protocol_type="",
        protocol_data="",
        members=(),
    )


def _new_group_refused(described: type) -> Callable[[str], Any]:
    return lambda group: described(
        error_code=_GROUP_DENIED,
        error_message=_MESSAGES[_GROUP_DENIED],
        group_id=group,
        group_state="",
        group_epoch=i32(0),
        assignment_epoch=i32(0),
        assignor_name="",
        members=(),
    )


_GUARDS[15] = _by_group(_described_group_refused)  # DescribeGroups
_GUARDS[69] = _by_group(_new_group_refused(describe_consumer_groups.DescribedGroup), asked="group_ids")
_GUARDS[77] = _by_group(_new_group_refused(describe_share_groups.DescribedGroup), asked="group_ids")


@_guards(42)
async def _delete_groups(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DeleteGroups: DELETE on each group."""
    allowed = tuple(group for group in request.groups_names if rights.group(DELETE, group))
    response = await api.handle(dataclasses.replace(request, groups_names=allowed), client)
    denied = tuple(
        delete_groups.DeletableGroupResult(group_id=group, error_code=_GROUP_DENIED)
        for group in request.groups_names
        if not rights.group(DELETE, group)
    )
    return dataclasses.replace(response, results=(*response.results, *denied))


@_guards(9)
async def _offset_fetch(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """OffsetFetch: DESCRIBE on the group and on the topics; where all topics are asked for, those that it may see."""
    answers = []
    for query in request:
        if not rights.group(DESCRIBE, query.group_id):
            answers.append(api.refuse(query, _GROUP_DENIED))
            continue
        if query.topics is None:
            (answer,) = await api.handle((query,), client)
            seen = tuple(topic for topic in answer.topics if _may(rights, DESCRIBE, topic))
            answers.append(dataclasses.replace(answer, topics=seen))
            continue
        denied = tuple(topic for topic in query.topics if not _may(rights, DESCRIBE, topic))
        allowed = tuple(topic for topic in query.topics if topic not in denied)
        (answer,) = await api.handle((dataclasses.replace(query, topics=allowed),), client)
        if answer.code is ErrorCode.none:
            refused = tuple(api.refuse_topic(topic, _TOPIC_DENIED) for topic in denied)
            answer = dataclasses.replace(answer, topics=(*answer.topics, *refused))
        answers.append(answer)
    return tuple(answers)


def _may(rights: Rights, operation: Operation, topic: Any) -> bool:
    """Whether a client may do something with a topic that is named, or has an id; one that is unknown hides nothing."""
    if topic.topic_id is None:
        return rights.topic(operation, topic.name)
    name = rights.topic_name(topic.topic_id)
    return name is None or rights.topic(operation, name)


@_guards(47)
async def _offset_delete(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """OffsetDelete: DELETE on the group, READ on the topics."""
    rights.require(DELETE, GROUP, request.group_id)
    allowed = tuple(topic for topic in request.topics if rights.topic(READ, topic.name))
    denied = tuple(
        offset_delete.OffsetDeleteResponseTopic(
            name=topic.name,
            partitions=tuple(
                offset_delete.OffsetDeleteResponsePartition(
                    partition_index=partition.partition_index, error_code=_TOPIC_DENIED
                )
                for partition in topic.partitions
            ),
        )
        for topic in request.topics
        if topic not in allowed
    )
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    return dataclasses.replace(response, topics=(*response.topics, *denied))


# -- transactions -------------------------------------------------------------------------------------------------


@_guards(22)
async def _init_producer_id(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """InitProducerId: WRITE on the transactional id; without one, to write anything at all."""
    transactional_id = request.message.transactional_id
    if transactional_id is not None:
        rights.require(WRITE, TRANSACTIONAL_ID, transactional_id)
    elif not rights.allows_any(WRITE, TOPIC):
        rights.require(Operation.IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME)
    return await api.handle(request, client)


@_guards(26)
async def _end_transaction(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """EndTxn: WRITE on the transactional id."""
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
    """AddPartitionsToTxn: WRITE on the transactional id and on the topics, all of them or nothing is added.

    From version 4 on it is a request between nodes.
    """
    is_of_client = request.version < 4
    if not is_of_client and not rights.cluster(Operation.CLUSTER_ACTION):
        return _throttled(
            add_partitions.AddPartitionsToTxnResponse, error_code=_CLUSTER_DENIED, results_by_transaction=()
        )
    allowed, refused = [], []
    for one in request.transactions:
        names = {topic.name for topic in one.topics}
        denied = {name for name in names if is_of_client and not rights.topic(WRITE, name)}
        if is_of_client and not rights.transaction(WRITE, one.transactional_id):
            refused.append(_add_partitions_refused(one, dict.fromkeys(names, _TRANSACTION_DENIED)))
        elif denied:
            codes = {name: _TOPIC_DENIED if name in denied else ErrorCode.operation_not_attempted for name in names}
            refused.append(_add_partitions_refused(one, codes))
        else:
            allowed.append(one)
    response = await api.handle(request._replace(transactions=tuple(allowed)), client)
    return dataclasses.replace(response, results_by_transaction=(*response.results_by_transaction, *refused))


def _add_partitions_refused(one: Any, codes: dict[str, ErrorCode]) -> Any:
    return add_partitions.AddPartitionsToTxnResult(
        transactional_id=one.transactional_id,
        topic_results=tuple(
            add_partitions.AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=tuple(
                    add_partitions.AddPartitionsToTxnPartitionResult(
                        partition_index=index, partition_error_code=codes[topic.name]
                    )
                    for index in topic.partitions
                ),
            )
            for topic in one.topics
        ),
    )


@_guards(28)
async def _txn_offset_commit(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """TxnOffsetCommit: WRITE on the transactional id, READ on the group and on the topics."""
    message = request.message
    if not rights.transaction(WRITE, message.transactional_id):
        return _txn_offsets_refused(message.topics, _TRANSACTION_DENIED)
    if not rights.group(READ, message.group_id):
        return _txn_offsets_refused(message.topics, _GROUP_DENIED)
    allowed = tuple(topic for topic in message.topics if rights.topic(READ, topic.name))
    denied = tuple(topic for topic in message.topics if not rights.topic(READ, topic.name))
    response = await api.handle(request._replace(message=dataclasses.replace(message, topics=allowed)), client)
    refused = _txn_offsets_refused(denied, _TOPIC_DENIED)
    return dataclasses.replace(response, topics=(*response.topics, *refused.topics))


def _txn_offsets_refused(topics: Sequence[Any], code: ErrorCode) -> Any:
    return _throttled(
        txn_offset_commit.TxnOffsetCommitResponse,
        topics=tuple(
            txn_offset_commit.TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=tuple(
                    txn_offset_commit.TxnOffsetCommitResponsePartition(
                        partition_index=partition.partition_index, error_code=code
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in topics
        ),
    )


@_guards(65)
async def _describe_transactions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DescribeTransactions: DESCRIBE on the transactional id; of its topics those that the client may describe."""
    allowed = tuple(one for one in request.transactional_ids if rights.transaction(DESCRIBE, one))
    response = await api.handle(dataclasses.replace(request, transactional_ids=allowed), client)
    told = tuple(
        dataclasses.replace(state, topics=tuple(one for one in state.topics if rights.topic(DESCRIBE, one.topic)))
        for state in response.transaction_states
    )
    denied = tuple(
        describe_transactions.TransactionState(
            error_code=_TRANSACTION_DENIED,
            transactional_id=one,
            transaction_state="",
            transaction_timeout=response.throttle_time,
            transaction_start_time=_NO_TIME,
            producer_id=ProducerId(0),
            producer_epoch=i16(0),
            topics=(),
        )
        for one in request.transactional_ids
        if not rights.transaction(DESCRIBE, one)
    )
    return dataclasses.replace(response, transaction_states=(*told, *denied))


@_guards(66)
async def _list_transactions(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ListTransactions: those that the client may describe."""
    response = await api.handle(request, client)
    seen = tuple(one for one in response.transaction_states if rights.transaction(DESCRIBE, one.transactional_id))
    return dataclasses.replace(response, transaction_states=seen)


# -- share groups -------------------------------------------------------------------------------------------------


@_guards(78)
async def _share_fetch(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ShareFetch: READ on the group and on the topics, also on those that the session remembers."""
    rights.require(READ, GROUP, request.group_id or "")
    return await _share(api, request, client, rights, share_fetch.ShareFetchableTopicResponse, _share_fetch_refused)


def _share_fetch_refused(partition: Any) -> Any:
    return share_fetch.PartitionData(
        partition_index=partition.partition_index,
        error_code=_TOPIC_DENIED,
        error_message=None,
        acknowledge_error_code=i16(_TOPIC_DENIED if partition.acknowledgement_batches else ErrorCode.none),
        acknowledge_error_message=None,
        current_leader=share_fetch.LeaderIdAndEpoch(leader_id=i32(-1), leader_epoch=i32(-1)),
        records=Records(b""),
        acquired_records=(),
    )


@_guards(79)
async def _share_acknowledge(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """ShareAcknowledge: READ on the group and on the topics."""
    rights.require(READ, GROUP, request.group_id or "")
    refused = share_acknowledge.ShareAcknowledgeTopicResponse
    return await _share(api, request, client, rights, refused, _share_acknowledge_refused)


def _share_acknowledge_refused(partition: Any) -> Any:
    return share_acknowledge.PartitionData(
        partition_index=partition.partition_index,
        error_code=_TOPIC_DENIED,
        error_message=None,
        current_leader=share_acknowledge.LeaderIdAndEpoch(leader_id=i32(-1), leader_epoch=i32(-1)),
    )


async def _share(
    api: Any, request: Any, client: Any, rights: Rights, result: Callable[..., Any], refused: Callable[[Any], Any]
) -> Any:
    def may_read(topic_id: UUID | None) -> bool:
        name = None if topic_id is None else rights.topic_name(topic_id)
        return name is None or rights.topic(READ, name)

    allowed = tuple(topic for topic in request.topics if may_read(topic.topic_id))
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    denied = tuple(
        result(topic_id=topic.topic_id, partitions=tuple(refused(partition) for partition in topic.partitions))
        for topic in request.topics
        if not may_read(topic.topic_id)
    )
    return dataclasses.replace(response, responses=(*response.responses, *denied))


@_guards(90)
async def _describe_share_offsets(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DescribeShareGroupOffsets: DESCRIBE on the groups; of their topics those that the client may describe."""
    allowed = []
    for group in request.groups:
        if rights.group(DESCRIBE, group.group_id):
            topics = group.topics
            if topics is not None:
                topics = tuple(topic for topic in topics if rights.topic(DESCRIBE, topic.topic_name))
            allowed.append(dataclasses.replace(group, topics=topics))
    response = await api.handle(dataclasses.replace(request, groups=tuple(allowed)), client)
    told = tuple(
        dataclasses.replace(
            group, topics=tuple(topic for topic in group.topics if rights.topic(DESCRIBE, topic.topic_name))
        )
        for group in response.groups
    )
    denied = tuple(
        share_offsets.DescribeShareGroupOffsetsResponseGroup(
            group_id=group.group_id,
            topics=(),
            error_code=_GROUP_DENIED,
            error_message=_MESSAGES[_GROUP_DENIED],
        )
        for group in request.groups
        if not rights.group(DESCRIBE, group.group_id)
    )
    return dataclasses.replace(response, groups=(*told, *denied))


@_guards(91)
async def _alter_share_offsets(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """AlterShareGroupOffsets: READ on the group and on the topics."""
    rights.require(READ, GROUP, request.group_id)
    allowed = tuple(topic for topic in request.topics if rights.topic(READ, topic.topic_name))
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    denied = tuple(
        alter_share_offsets.AlterShareGroupOffsetsResponseTopic(
            topic_name=topic.topic_name,
            topic_id=None,
            partitions=tuple(
                alter_share_offsets.AlterShareGroupOffsetsResponsePartition(
                    partition_index=partition.partition_index,
                    error_code=_TOPIC_DENIED,
                    error_message=_MESSAGES[_TOPIC_DENIED],
                )
                for partition in topic.partitions
            ),
        )
        for topic in request.topics
        if topic not in allowed
    )
    return dataclasses.replace(response, responses=(*response.responses, *denied))


@_guards(92)
async def _delete_share_offsets(api: Any, request: Any, client: Any, rights: Rights) -> Any:
    """DeleteShareGroupOffsets: DELETE on the group, READ on the topics."""
    rights.require(DELETE, GROUP, request.group_id)
    allowed = tuple(topic for topic in request.topics if rights.topic(READ, topic.topic_name))
    response = await api.handle(dataclasses.replace(request, topics=allowed), client)
    denied = tuple(
        delete_share_offsets.DeleteShareGroupOffsetsResponseTopic(
            topic_name=topic.topic_name,
            topic_id=None,
            error_code=_TOPIC_DENIED,
            error_message=_MESSAGES[_TOPIC_DENIED],
        )
        for topic in request.topics
        if topic not in allowed
    )
    return dataclasses.replace(response, responses=(*response.responses, *denied))
