"""InitProducerId and DescribeCluster."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.membership import Membership
from millstream.broker.coordination.runtime import StateTopics
from millstream.broker.kafka.api import CLUSTER_OPERATIONS, NOT_REQUESTED
from millstream.broker.kafka.apis.describe_cluster import DescribeCluster
from millstream.broker.kafka.apis.init_producer_id import InitProducerId
from millstream.broker.transactions.coordinator import ProducerIds, TransactionCoordinator
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import StorageFailure
from millstream.core.ids import ProducerId
from millstream_testing.api_requests import send_in_version, send_request
from millstream_testing.state_log import MemoryTopics

INIT: Any = importlib.import_module("kio.schema.init_producer_id.v5.request")
DESCRIBE: Any = importlib.import_module("kio.schema.describe_cluster.v2.request")


class Counting:
    def __init__(self) -> None:
        self.last = 999

    async def next(self) -> ProducerId:
        self.last += 1
        return ProducerId(self.last)


class Failing:
    async def next(self) -> ProducerId:
        raise StorageFailure("the disk is full")


def init_api(producer_ids: ProducerIds) -> InitProducerId:
    topics = cast("StateTopics", MemoryTopics())
    return InitProducerId(producer_ids, TransactionCoordinator(topics, Config(), SystemClock(), producer_ids))


def init(transactional_id: str | None = None, producer_id: int = -1, epoch: int = -1) -> Any:
    return INIT.InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout=timedelta(minutes=1),
        producer_id=producer_id,
        producer_epoch=epoch,
    )


@pytest.mark.parametrize("version", range(6))
async def test_every_idempotent_producer_gets_a_unique_id(version: int) -> None:
    api = init_api(Counting())
    responses = [await send_in_version(api, version, init()) for _ in range(2)]
    assert [(response.error_code, response.producer_id, response.producer_epoch) for response in responses] == [
        (ErrorCode.none, 1000, 0),
        (ErrorCode.none, 1001, 0),
    ]


@pytest.mark.parametrize("version", range(3, 6))
async def test_a_producer_that_restarts_gets_a_new_id(version: int) -> None:
    response = await send_in_version(init_api(Counting()), version, init(producer_id=7, epoch=3))
    assert (response.error_code, response.producer_id, response.producer_epoch) == (ErrorCode.none, 1000, 0)


@pytest.mark.parametrize(("producer_id", "epoch"), [(7, -1), (-1, 3)])
async def test_an_id_without_its_epoch_is_refused(producer_id: int, epoch: int) -> None:
    response = await send_request(init_api(Counting()), init(producer_id=producer_id, epoch=epoch))
    assert (response.error_code, response.producer_id) == (ErrorCode.invalid_request, -1)


async def test_a_failed_id_allocation_is_reported() -> None:
    response = await send_request(init_api(Failing()), init())
    assert (response.error_code, response.producer_id) == (ErrorCode.kafka_storage_error, -1)


@pytest.mark.parametrize("version", range(3))
async def test_the_cluster_is_described(membership: Membership, version: int) -> None:
    describe_request = DESCRIBE.DescribeClusterRequest(
        include_cluster_authorized_operations=False, include_fenced_brokers=True
    )
    response = await send_in_version(DescribeCluster(membership), version, describe_request)
    assert (response.error_code, response.cluster_id, response.controller_id) == (ErrorCode.none, "test-cluster", 5)
    (broker,) = response.brokers
    assert (broker.broker_id, broker.host, broker.port, broker.rack) == (5, "broker.example", 9092, "cellar")
    assert response.cluster_authorized_operations == NOT_REQUESTED


async def test_operations_are_reported_on_request(membership: Membership) -> None:
    describe_request = DESCRIBE.DescribeClusterRequest(
        include_cluster_authorized_operations=True, include_fenced_brokers=False
    )
    assert (
        await send_request(DescribeCluster(membership), describe_request)
    ).cluster_authorized_operations == CLUSTER_OPERATIONS


@pytest.mark.parametrize(
    ("kind", "code"), [(2, ErrorCode.mismatched_endpoint_type), (9, ErrorCode.unsupported_endpoint_type)]
)
async def test_other_endpoints_are_refused(membership: Membership, kind: int, code: ErrorCode) -> None:
    describe_request = DESCRIBE.DescribeClusterRequest(
        include_cluster_authorized_operations=False, endpoint_type=kind, include_fenced_brokers=False
    )
    response = await send_request(DescribeCluster(membership), describe_request)
    assert (response.error_code, response.brokers) == (code, ())
    assert response.error_message
