"""Every served API, each with just the dependencies it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.broker.cluster.declarations import ProducerIds
from millstream.broker.cluster.declared_state import DeclaredState
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.plans import Plans
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import LeaderAppender
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import Api
from millstream.broker.kafka.apis import (
    batch_transactions,
    browse_apis,
    mirror_apis,
    pipeline_apis,
    plan_apis,
    schema_apis,
    security_apis,
    subscription_apis,
)
from millstream.broker.kafka.apis.acls import CreateAcls, DeleteAcls, DescribeAcls
from millstream.broker.kafka.apis.add_offsets_to_txn import AddOffsetsToTxn
from millstream.broker.kafka.apis.add_partitions_to_txn import AddPartitionsToTxn
from millstream.broker.kafka.apis.alter_configs import AlterConfigs
from millstream.broker.kafka.apis.api_versions import ApiVersions
from millstream.broker.kafka.apis.classic_members import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from millstream.broker.kafka.apis.client_list import ClientList
from millstream.broker.kafka.apis.client_quotas import AlterClientQuotas, DescribeClientQuotas
from millstream.broker.kafka.apis.create_partitions import CreatePartitions
from millstream.broker.kafka.apis.create_topics import CreateTopics
from millstream.broker.kafka.apis.delete_groups import DeleteGroups
from millstream.broker.kafka.apis.delete_records import DeleteRecords
from millstream.broker.kafka.apis.delete_topics import DeleteTopics
from millstream.broker.kafka.apis.describe_cluster import DescribeCluster
from millstream.broker.kafka.apis.describe_configs import DescribeConfigs
from millstream.broker.kafka.apis.describe_groups import DescribeGroups
from millstream.broker.kafka.apis.describe_producers import DescribeProducers
from millstream.broker.kafka.apis.describe_topic_partitions import DescribeTopicPartitions
from millstream.broker.kafka.apis.elect_leaders import ElectLeaders
from millstream.broker.kafka.apis.end_txn import EndTxn
from millstream.broker.kafka.apis.fetch import Fetch
from millstream.broker.kafka.apis.find_coordinator import FindCoordinator
from millstream.broker.kafka.apis.group_descriptions import ConsumerGroupDescribe, ShareGroupDescribe
from millstream.broker.kafka.apis.group_heartbeats import ConsumerGroupHeartbeat, ShareGroupHeartbeat
from millstream.broker.kafka.apis.incremental_alter_configs import IncrementalAlterConfigs
from millstream.broker.kafka.apis.init_producer_id import InitProducerId
from millstream.broker.kafka.apis.list_config_resources import ListConfigResources
from millstream.broker.kafka.apis.list_groups import ListGroups
from millstream.broker.kafka.apis.list_offsets import ListOffsets
from millstream.broker.kafka.apis.log_dirs import AlterReplicaLogDirs, DescribeLogDirs
from millstream.broker.kafka.apis.metadata import Metadata
from millstream.broker.kafka.apis.node_status import (
    READY,
    STOPPING,
    Damaged,
    GroupMetrics,
    NodeState,
    NodeStatus,
    ProcessMetrics,
)
from millstream.broker.kafka.apis.offset_commit import OffsetCommit
from millstream.broker.kafka.apis.offset_delete import OffsetDelete
from millstream.broker.kafka.apis.offset_fetch import OffsetFetch
from millstream.broker.kafka.apis.offset_for_leader_epoch import OffsetForLeaderEpoch
from millstream.broker.kafka.apis.partition_reassignments import AlterPartitionReassignments, ListPartitionReassignments
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.apis.publish_once import PublishOnce
from millstream.broker.kafka.apis.sasl import SaslAuthenticate, SaslHandshake
from millstream.broker.kafka.apis.share_acknowledge import ShareAcknowledge
from millstream.broker.kafka.apis.share_fetch import ShareFetch
from millstream.broker.kafka.apis.share_group_offsets import (
    AlterShareGroupOffsets,
    DeleteShareGroupOffsets,
    DescribeShareGroupOffsets,
)
from millstream.broker.kafka.apis.subscription_receive import SubscriptionReceive
from millstream.broker.kafka.apis.subscription_settle import SubscriptionSettle
from millstream.broker.kafka.apis.transaction_listings import DescribeTransactions, ListTransactions
from millstream.broker.kafka.apis.txn_offset_commit import TxnOffsetCommit
from millstream.broker.kafka.apis.update_features import UpdateFeatures
from millstream.broker.kafka.apis.user_scram_credentials import AlterUserScramCredentials, DescribeUserScramCredentials
from millstream.broker.kafka.apis.write_txn_markers import WriteTxnMarkers
from millstream.broker.kafka.dispatch import RawApi
from millstream.broker.kafka.quota_meter import QuotaMeters
from millstream.broker.kafka.share_consumers import ShareConsumers, ShareOffsets
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.kafka.transaction_service import TransactionService
from millstream.broker.mirror.service import MirrorService
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection
from millstream.broker.pipelines.report_board import LandedBoard, PipelineAdvice, PipelineBoard
from millstream.broker.replication.partition import lagging_replicas
from millstream.broker.schemas.rules import SchemaRules
from millstream.broker.security.audit import AuditLog
from millstream.broker.security.secrets import StoredSecrets
from millstream.broker.security.state import SecurityState
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.metric import MetricSource
from millstream.core.tasks import Supervise

if TYPE_CHECKING:
    from millstream.broker.security.gate import AuthenticationContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDependencies:
    """The parts of a node that the APIs use."""

    config: Config
    clock: Clock
    topics: Topics
    membership: Membership
    producer_ids: ProducerIds
    declared: DeclaredState
    secrets: StoredSecrets
    budget: Budget
    connections: Collection[Connection]
    sources: Sequence[MetricSource]
    unready_reasons: Callable[[], Iterable[str]]
    node: NodeState
    supervise: Supervise
    plans: Plans | None = None
    """Plans of moves between nodes; None on a node without others."""
    authentication: AuthenticationContext | None = None
    damage: Callable[[], Damaged] = tuple
    warnings: Callable[[], Iterable[str]] = tuple


class ServedApis:
    """The APIs of a running node, and the coordinators behind them."""

    def __init__(self, parts: ApiDependencies) -> None:
        self._parts = parts
        self._groups = GroupCoordinator(
            parts.topics,
            parts.config,
            parts.clock,
            pipeline_of=parts.declared.pipelines.of_group,
            settings_of=parts.declared.groups.values_of,
        )
        self._meters = QuotaMeters(parts.declared.quotas)
        self._fetch = Fetch(parts.topics, parts.budget, self._meters.fetch, bytes_max=parts.config.fetch_bytes_max)
        self._transactions = TransactionService(
            parts.topics,
            self._groups,
            parts.membership,
            parts.producer_ids,
            config=parts.config,
            clock=parts.clock,
        )
        self._subscriptions = SubscriptionService(
            parts.topics,
            parts.membership,
            parts.declared.subscriptions,
            parts.producer_ids,
            parts.budget,
            config=parts.config,
            clock=parts.clock,
            supervise=parts.supervise,
            security=self._enforced_rules,
        )
        self._subscriptions.share_topics.members = self._groups.share_topics
        self.pipeline_board = PipelineBoard(parts.declared.pipelines.all)
        self._mirrors = MirrorService(
            parts.topics,
            parts.membership,
            parts.declared.mirrors,
            self._subscriptions,
            self._transactions.coordinator,
            self._groups,
            parts.declared.schemas,
            self._enforced_rules,
            parts.clock,
            parts.supervise,
        )
        self._landed = LandedBoard(parts.declared.pipelines, parts.topics)
        self._schema_rules = SchemaRules(parts.declared.schemas)
        self._produce = Produce(parts.topics, self._meters.produce, self._transactions.gate, self._schema_rules)
        self._publish_once = PublishOnce(parts.topics, self._meters.produce, self._schema_rules)
        self._audit: AuditLog | None = None
        if parts.config.authorizes:
            appender = LeaderAppender(parts.topics, parts.membership.addresses, client_id="audit")
            self._audit = AuditLog(parts.declared.security.audit, parts.topics, appender, parts.config)
        self.apis: list[Api[Any, Any] | RawApi] = [
            self._produce,
            self._publish_once,
            self._fetch,
            *self._topic_apis(),
            *self._group_apis(),
            *self._transaction_apis(),
            *self._subscription_apis(),
            *self._share_apis(),
            *self._pipeline_apis(),
            *self._schema_apis(),
            *self._mirror_apis(),
            *self._cluster_apis(),
            *self._client_apis(),
        ]
        self.apis += [ApiVersions(self.apis), UpdateFeatures(self.apis)]

    @property
    def subscriptions(self) -> SubscriptionService:
        return self._subscriptions

    async def start(self) -> None:
        await self._groups.start()
        await self._transactions.start()
        await self._subscriptions.start()
        self._landed.start()
        self._mirrors.start()
        self._subscriptions.states.retention.landed = self._landed.floor
        topics = self._parts.topics
        self._parts.declared.security.topic_name = lambda topic_id: (
            None if (topic := topics.by_id(topic_id)) is None else topic.name
        )
        self._parts.declared.security.has_topic = lambda name: topics.get(name) is not None
        self._parts.topics.on_deletion(lambda _topic: self._groups.topic_deleted())
        if self._audit is not None:
            self._audit.start(self._parts.supervise)
        self._parts.node.state = READY

    async def close(self) -> None:
        """Respond to all waiting requests, and wait until everything written is acknowledged."""
        self._parts.node.state = STOPPING
        self._fetch.stop()
        if self._audit is not None:
            await self._audit.close()
        await self._mirrors.close()
        await self._subscriptions.close()
        await self._transactions.close()
        await self._groups.close()
        await self._schema_rules.close()
        await self._parts.declared.schemas.close()

    def _topic_apis(self) -> Iterable[Api[Any, Any] | RawApi]:
        topics, membership = self._parts.topics, self._parts.membership
        yield Metadata(topics, membership)
        yield DescribeTopicPartitions(topics, membership)
        yield ListOffsets(topics)
        yield OffsetForLeaderEpoch(topics)
        yield CreateTopics(topics, membership)
        yield DeleteTopics(topics, self._subscriptions)
        yield CreatePartitions(topics, membership)
        yield DeleteRecords(topics)
        yield DescribeConfigs(
            topics, membership, self._parts.config, self._parts.declared.groups, self._parts.declared.subscriptions
        )
        yield IncrementalAlterConfigs(topics, self._parts.declared.groups, self._subscriptions)
        yield AlterConfigs(topics)
        yield ListConfigResources(topics, membership, self._parts.declared.groups, self._parts.declared.subscriptions)
        yield DescribeProducers(topics, self._groups)
        yield DescribeLogDirs(topics, folder=self._parts.node.data)
        yield AlterReplicaLogDirs(topics, folder=self._parts.node.data)
        yield browse_apis.TopicList(topics)
        yield ElectLeaders(topics)
        yield AlterPartitionReassignments(topics, membership)
        yield ListPartitionReassignments(topics)

    def _group_apis(self) -> Iterable[Api[Any, Any] | RawApi]:
        groups, topics = self._groups, self._parts.topics
        yield FindCoordinator(groups, self._transactions.coordinator, self._parts.membership)
        yield JoinGroup(groups)
        yield SyncGroup(groups)
        yield Heartbeat(groups)
        yield LeaveGroup(groups)
        yield OffsetCommit(groups, topics)
        yield OffsetFetch(groups, topics)
        yield OffsetDelete(groups, topics)
        yield ListGroups(groups)
        yield DescribeGroups(groups)
        yield DeleteGroups(groups, self._subscriptions)
        yield ConsumerGroupHeartbeat(groups)
        yield ConsumerGroupDescribe(groups)

    def _transaction_apis(self) -> Iterable[Api[Any, Any] | RawApi]:
        parts, service = self._parts, self._transactions
        coordinator = service.coordinator
        yield InitProducerId(parts.producer_ids, coordinator)
        yield AddPartitionsToTxn(coordinator, parts.topics)
        yield AddOffsetsToTxn(coordinator, self._groups)
        yield EndTxn(coordinator)
        yield WriteTxnMarkers(service.markers)
        yield TxnOffsetCommit(self._groups, parts.topics, service.gate)
        yield DescribeTransactions(coordinator)
        yield ListTransactions(coordinator)
        yield batch_transactions.PrepareTransaction(coordinator)
        yield batch_transactions.CompleteBatch(coordinator)
        yield batch_transactions.AbortBatch(coordinator)
        yield batch_transactions.LastBatch(coordinator)
        yield batch_transactions.AbortTransaction(coordinator)

    def _subscription_apis(self) -> Iterable[RawApi]:
        service = self._subscriptions
        yield subscription_apis.LoadQueueState(service.states)
        yield subscription_apis.ReadQueueFrames(service.states)
        yield subscription_apis.WriteQueueStates(service.states)
        yield SubscriptionReceive(service, self._meters.fetch)
        yield SubscriptionSettle(service)
        yield subscription_apis.SubscriptionCreate(service, self._parts.declared.pipelines)
        yield subscription_apis.SubscriptionAlter(service)
        yield subscription_apis.SubscriptionDelete(service)
        yield subscription_apis.SubscriptionList(service)
        yield subscription_apis.SubscriptionSeek(service)
        yield subscription_apis.SubscriptionRevive(service)
        yield subscription_apis.SubscriptionForget(service)
        yield subscription_apis.AppendLetter(self._parts.topics, self._parts.membership)
        yield subscription_apis.DeliveryState(service)
        yield subscription_apis.MessageTracing(service)
        yield subscription_apis.LedgerMark(service)

    def _share_apis(self) -> Iterable[Api[Any, Any]]:
        groups, service = self._groups, self._subscriptions
        consumers = ShareConsumers(service, self._parts.membership)
        yield ShareGroupHeartbeat(groups, service.declared)
        yield ShareGroupDescribe(groups)
        yield ShareFetch(consumers, self._meters.fetch, bytes_max=self._parts.config.fetch_bytes_max)
        yield ShareAcknowledge(consumers)
        offsets = ShareOffsets(service, self._parts.membership)
        yield DescribeShareGroupOffsets(offsets, self._parts.topics)
        yield AlterShareGroupOffsets(groups, offsets, self._parts.topics)
        yield DeleteShareGroupOffsets(groups, offsets, self._parts.topics)

    def _pipeline_apis(self) -> Iterable[RawApi]:
        pipelines, subscriptions = self._parts.declared.pipelines, self._parts.declared.subscriptions
        notes = PipelineAdvice(pipelines, self._parts.topics, has_local_lake=self._parts.config.has_private_lake)
        has_jobs = self._parts.config.runs_jobs
        yield pipeline_apis.PipelineCreate(pipelines, subscriptions, notes, has_jobs=has_jobs)
        yield pipeline_apis.PipelineAlter(pipelines, subscriptions, notes, has_jobs=has_jobs)
        yield pipeline_apis.PipelineDelete(pipelines)
        yield pipeline_apis.PipelineList(pipelines, self.pipeline_board, notes)
        yield pipeline_apis.RuleChange(pipelines, subscriptions, notes)
        yield pipeline_apis.PipelineLanded(self._landed)
        yield pipeline_apis.PipelineRuns(pipelines, self.pipeline_board)
        yield pipeline_apis.PipelineRunLog(pipelines, self.pipeline_board)
        yield pipeline_apis.PipelineRequestRun(pipelines, self.pipeline_board)
        yield pipeline_apis.PipelineCancelRun(pipelines, self.pipeline_board)

    def _schema_apis(self) -> Iterable[RawApi]:
        schemas = self._parts.declared.schemas
        yield schema_apis.SchemaRegister(schemas)
        yield schema_apis.SchemaLookup(schemas)
        yield schema_apis.SchemaCheck(schemas)
        yield schema_apis.SchemaGet(schemas)
        yield schema_apis.SchemaList(schemas)
        yield schema_apis.SchemaSubject(schemas)
        yield schema_apis.SchemaDelete(schemas)
        yield schema_apis.SchemaSettings(schemas)
        yield schema_apis.SchemaConfigure(schemas)

    @property
    def _enforced_rules(self) -> SecurityState | None:
        """The access rules; None if they are not enforced, which would be worse than none."""
        return self._parts.declared.security if self._parts.config.authorizes else None

    def _mirror_apis(self) -> Iterable[RawApi]:
        mirrors = self._mirrors
        yield mirror_apis.MirrorCreate(mirrors)
        yield mirror_apis.MirrorAlter(mirrors)
        yield mirror_apis.MirrorDelete(mirrors)
        yield mirror_apis.MirrorList(mirrors)
        yield mirror_apis.MirrorFailover(mirrors)
        yield mirror_apis.MirrorCut(mirrors)
        yield mirror_apis.MirrorOffer(mirrors)
        yield mirror_apis.MirrorRegistry(mirrors)
        yield mirror_apis.MirrorExpose(mirrors)
        yield mirror_apis.MirrorNotice(mirrors)
        yield mirror_apis.MirrorBarrier(mirrors)
        yield mirror_apis.MirrorHold(mirrors)
        yield mirror_apis.MirrorFence(mirrors)
        yield mirror_apis.MirrorReverse(mirrors)
        yield mirror_apis.MirrorSwitch(mirrors)
        yield mirror_apis.MirrorAdopt(mirrors)

    def _cluster_apis(self) -> Iterable[Api[Any, Any] | RawApi]:
        parts = self._parts
        yield DescribeCluster(parts.membership)
        process = ProcessMetrics(started_ms=parts.node.started_ms)
        lag = GroupMetrics(self._groups, parts.topics)
        sources = (
            *parts.sources,
            self._produce,
            self._publish_once,
            self._schema_rules,
            self._fetch,
            self._transactions,
            self._subscriptions,
            self.pipeline_board,
            self._mirrors,
            self._meters,
            lag,
            process,
            *(() if self._audit is None else (self._audit,)),
        )
        self.node_status = NodeStatus(
            parts.node,
            sources,
            parts.clock,
            unready_reasons=parts.unready_reasons,
            damage=parts.damage,
            behind=lambda: lagging_replicas(parts.topics.hosted()),
            warnings=parts.warnings,
        )
        yield self.node_status
        yield browse_apis.NodeSummary(parts.topics, parts.membership, self.node_status, folder=parts.node.data)
        yield plan_apis.PlanPropose(parts.plans)
        yield plan_apis.PlanApply(parts.plans)
        yield plan_apis.PlanCancel(parts.plans)
        yield plan_apis.PlanDescribe(parts.plans)
        yield plan_apis.NodeUndrain(parts.plans)

    def _client_apis(self) -> Iterable[Api[Any, Any] | RawApi]:
        yield ClientList(self._parts.connections)
        yield browse_apis.RightsList()
        yield browse_apis.AuditReading()
        yield DescribeClientQuotas(self._parts.declared.quotas)
        yield AlterClientQuotas(self._parts.declared.quotas)
        security, rules = self._parts.declared.security, self._enforced_rules
        yield DescribeAcls(rules)
        yield CreateAcls(rules)
        yield DeleteAcls(rules)
        yield DescribeUserScramCredentials(security)
        yield AlterUserScramCredentials(security)
        yield security_apis.TokenCreate(security)
        yield security_apis.TokenList(security)
        yield security_apis.TokenRevoke(security)
        yield security_apis.SecretList(self._parts.secrets)
        yield SaslHandshake()
        yield SaslAuthenticate()
        yield security_apis.Authenticate(self._parts.authentication, requires=self._parts.config.http_authenticates)
