"""Partition metadata in a cluster whose nodes start and stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kio.schema.describe_topic_partitions.v0 import request as described_topics
from kio.schema.elect_leaders.v2 import request as elections
from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v11 import request as offsets
from kio.schema.metadata.v13 import request as metadata
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i8, i32, i32Timedelta, i64

from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.kafka.api import Api, ClientInfo
from millstream.broker.kafka.apis.describe_cluster import DescribeCluster
from millstream.broker.kafka.apis.describe_topic_partitions import DescribeTopicPartitions
from millstream.broker.kafka.apis.elect_leaders import ElectLeaders
from millstream.broker.kafka.apis.list_offsets import ListOffsets
from millstream.broker.kafka.apis.metadata import Metadata
from millstream.core.ids import NodeId
from millstream_testing.node_group import GroupNode, NodeGroup

CLIENT = ClientInfo(connection_id=1, host="127.0.0.1")
ORDERS = TopicName("orders")
ALL = (NodeId(1), NodeId(2), NodeId(3))


async def membership(node: GroupNode) -> Membership:
    return await node.cluster.membership(Node(node_id=node.node_id, host=f"node-{node.node_id}", port=9092))


async def ask(api: Api[Any, Any], request: Any) -> Any:
    return await api.handle(request, CLIENT)


async def partition(node: GroupNode) -> Any:
    request = metadata.MetadataRequest(
        topics=(metadata.MetadataRequestTopic(topic_id=None, name=ORDERS),), include_topic_authorized_operations=False
    )
    response = await ask(Metadata(node.topics, await membership(node)), request)
    return response.topics[0].partitions[0]


async def test_metadata_follows_nodes_and_leaders(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", replication=3, placement={0: ALL})
        reported = await partition(group[3])
        assert (reported.error_code, reported.leader_id, reported.leader_epoch) == (ErrorCode.none, 1, 0)
        assert (reported.replica_nodes, reported.isr_nodes, reported.offline_replicas) == ((1, 2, 3), (1, 2, 3), ())

        await group[1].kill()
        await group.until(lambda: leader(group[3]) == 2)
        reported = await partition(group[3])
        assert (reported.leader_id, reported.leader_epoch, reported.isr_nodes) == (2, 1, (2, 3))
        assert reported.offline_replicas == (1,)

        await group[2].kill()
        await group.until(lambda: leader(group[3]) == 3)
        paged = described_topics.DescribeTopicPartitionsRequest(
            topics=(described_topics.TopicRequest(name=ORDERS),), response_partition_limit=i32(10), cursor=None
        )
        response = await ask(DescribeTopicPartitions(group[3].topics, await membership(group[3])), paged)
        shown = response.topics[0].partitions[0]
        # Too few replicas are in sync, so the node that left may still lead.
        assert (shown.leader_id, shown.isr_nodes, shown.eligible_leader_replicas) == (3, (3,), (2,))
        assert topic.replication == 3


def leader(node: GroupNode) -> int:
    topic = node.topics.get("orders")
    state = None if topic is None else node.topics.state_of(topic, 0)
    return -1 if state is None else state.leader


async def test_a_partition_without_a_leader_is_reported(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        await group[1].topics.create("orders", replication=1, placement={0: (NodeId(1),)})
        await group[1].kill()
        await group.until(lambda: leader(group[2]) == -1)
        reported = await partition(group[2])
        assert (reported.error_code, reported.leader_id) == (ErrorCode.leader_not_available, -1)
        assert (reported.replica_nodes, reported.offline_replicas) == ((1,), (1,))
        listed_partition = offsets.ListOffsetsPartition(partition_index=i32(0), timestamp=i64(-1))
        request = offsets.ListOffsetsRequest(
            replica_id=BrokerId(-1),
            isolation_level=i8(0),
            topics=(offsets.ListOffsetsTopic(name=ORDERS, partitions=(listed_partition,)),),
            timeout=i32Timedelta.parse(i32Timedelta.resolution * 0),
        )
        response = await ask(ListOffsets(group[2].topics), request)
        assert response.topics[0].partitions[0].error_code is ErrorCode.not_leader_or_follower
        election = elections.ElectLeadersRequest(
            election_type=i8(1),
            topic_partitions=(elections.TopicPartitions(topic=ORDERS, partitions=(i32(0),)),),
            timeout=i32Timedelta.parse(i32Timedelta.resolution * 0),
        )
        elected = await ask(ElectLeaders(group[2].topics), election)
        assert elected.replica_election_results[0].partition_result[0].error_code is (
            ErrorCode.eligible_leaders_not_available
        )


async def test_the_cluster_is_described_with_its_live_nodes_and_their_racks(tmp_path: Path) -> None:
    from kio.schema.describe_cluster.v2.request import DescribeClusterRequest

    async with NodeGroup(tmp_path, nodes=2, rack="attic") as group:
        api = DescribeCluster(await membership(group[2]))
        request = DescribeClusterRequest(
            include_cluster_authorized_operations=False, endpoint_type=i8(1), include_fenced_brokers=False
        )
        response = await ask(api, request)
        assert [(broker.broker_id, broker.host, broker.rack) for broker in response.brokers] == [
            (1, "node-1", "attic"),
            (2, "node-2", "attic"),
        ]
        assert response.controller_id in (1, 2)
        assert response.cluster_id == (await membership(group[1])).cluster_id
        await group[1].kill()
        await group.until(lambda: len(group[2].view.live) == 1 and group[2].view.controller == 2)
        response = await ask(api, request)
        assert ([broker.broker_id for broker in response.brokers], response.controller_id) == ([2], 2)
