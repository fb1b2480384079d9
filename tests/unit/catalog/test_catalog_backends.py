"""The catalog on SQLite and on PostgreSQL: equal responses, also with several nodes at once."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import inspect

from millstream.broker.catalog import database
from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.tables import SCHEMA_VERSION, metadata
from millstream.core.errors import (
    CatalogDenied,
    CatalogUnavailable,
    ClusterMismatch,
    DataFolderInvalid,
    InvalidMirror,
    PipelineExists,
    SubscriptionExists,
    UnknownMirror,
    UnknownPipeline,
    UnknownSubscription,
    UnknownTopic,
)
from millstream.core.job import JobRun, RunState
from millstream.core.mirror import Mirror
from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.core.quota import CLIENT_ID, PRODUCER_BYTE_RATE, QuotaEntity
from millstream.core.subscription import Subscription
from millstream.core.topic import Topic
from millstream_testing.postgres_server import PostgresServer

NODES = 6

OpenCatalog = Callable[[], Catalog]


def declared(name: str) -> Topic:
    return Topic(name=name, topic_id=uuid4(), partitions=2, replication=3, overrides={"a": "ü"}, created_ms=2**41)


def together(calls: list[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


@pytest.fixture(params=["sqlite", "postgresql"])
def open_catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenCatalog]:
    """Open the same new catalog for one node after another."""
    shared = request.param == "postgresql"
    url = request.getfixturevalue("postgres").new_database() if shared else ""
    with ExitStack() as stack:

        def open_one() -> Catalog:
            catalog = Catalog.open_shared(url) if shared else Catalog.open_folder(tmp_path)
            stack.callback(catalog.close)
            return catalog

        yield open_one


@pytest.fixture
def catalog(open_catalog: OpenCatalog) -> Catalog:
    return open_catalog()


def test_a_topic_is_stored_as_declared(open_catalog: OpenCatalog) -> None:
    copy = dataclasses.replace(declared("copy"), origins=("paris",), original_id=uuid4())
    topics = [copy, declared("orders")]
    open_catalog().add_topics(topics)
    assert open_catalog().topics() == topics


def test_a_duplicate_name_is_refused(catalog: Catalog) -> None:
    orders, bills = declared("orders"), declared("bills")
    assert catalog.add_topics([orders]) == {orders.topic_id}
    assert catalog.add_topics([declared("orders")]) == set()
    assert catalog.add_topics([declared("orders"), bills]) == {bills.topic_id}
    assert catalog.topics() == [bills, orders]


def test_a_change_starts_from_the_stored_topic(catalog: Catalog) -> None:
    topic = declared("orders")
    catalog.add_topics([topic])

    def grow(found: Topic) -> Topic:
        return dataclasses.replace(found, partitions=found.partitions + 1, overrides={})

    assert catalog.alter_topic(topic.topic_id, grow).partitions == 3
    assert catalog.topics() == [dataclasses.replace(topic, partitions=3, overrides={})]
    with pytest.raises(UnknownTopic):
        catalog.alter_topic(uuid4(), grow)


def test_a_mirror_exists_while_it_writes_topics(catalog: Catalog) -> None:
    mirror = Mirror(mirror_id=uuid4(), name="paris", overrides={"from": "paris:9092"})
    copy, original = dataclasses.replace(declared("copy"), mirror="paris"), declared("original")
    with pytest.raises(UnknownMirror):
        catalog.add_topics([copy])
    catalog.add_mirror(mirror)
    catalog.add_topics([copy, original])
    with pytest.raises(InvalidMirror, match="still writes topic 'copy'"):
        catalog.delete_mirror(mirror)
    catalog.alter_topic(copy.topic_id, lambda found: dataclasses.replace(found, mirror=""))
    catalog.delete_mirror(mirror)
    with pytest.raises(UnknownMirror):
        catalog.alter_topic(original.topic_id, lambda found: dataclasses.replace(found, mirror="paris"))
    assert [topic.mirror for topic in catalog.topics()] == ["", ""]


def test_a_deletion_is_recorded_until_it_is_forgotten(catalog: Catalog) -> None:
    topic = declared("orders")
    catalog.add_topics([topic])
    assert catalog.delete_topics([topic, declared("missing")], now_ms=2**41) == {topic.topic_id}
    assert catalog.delete_topics([topic], now_ms=2**41) == set()
    assert catalog.topics() == []
    assert catalog.deleted_topic_ids() == {topic.topic_id}
    catalog.forget_deleted([topic.topic_id])
    assert catalog.deleted_topic_ids() == set()
    catalog.add_topics([declared("orders")])


def test_a_pipeline_is_stored_with_its_rules(open_catalog: OpenCatalog) -> None:
    catalog = open_catalog()
    small, large = (
        Rule(name=name, topic="orders", targets=(f"{name}-orders", "all"), condition=condition)
        for name, condition in (("small", "payload.total < 10"), ("large", "payload.total > 1000"))
    )
    director = Pipeline(
        pipeline_id=uuid4(),
        name="director",
        kind=PipelineKind.ROUTE,
        overrides={"decode": "json"},
        created_ms=2**41,
        rules=(large, small),
    )
    land = Pipeline(pipeline_id=uuid4(), name="Land", kind=PipelineKind.LAND, overrides={"topics": "orders"})
    catalog.add_pipeline(director)
    catalog.add_pipeline(land)
    with pytest.raises(PipelineExists):
        catalog.add_pipeline(dataclasses.replace(director, pipeline_id=uuid4()))
    assert open_catalog().pipelines() == [land, director]
    assert catalog.pipeline_named("director") == director
    assert catalog.pipeline_named("none") is None

    def change(found: Pipeline) -> Pipeline:
        rules = (dataclasses.replace(large, condition=""), dataclasses.replace(small, name="tiny"))
        return dataclasses.replace(found, overrides={}, is_enabled=False, parked="it failed", rules=rules)

    changed = dataclasses.replace(change(director), version=1)
    assert catalog.alter_pipeline(director.pipeline_id, change) == changed
    assert catalog.alter_pipeline(director.pipeline_id, lambda found: found) == changed
    assert catalog.pipelines() == [land, changed]
    many = tuple(dataclasses.replace(large, name=f"rule-{at:04}") for at in range(2500))
    catalog.alter_pipeline(director.pipeline_id, lambda found: dataclasses.replace(found, rules=many))
    catalog.alter_pipeline(director.pipeline_id, lambda found: dataclasses.replace(found, rules=many[:3]))
    assert catalog.pipelines() == [land, dataclasses.replace(changed, rules=many[:3], version=3)]
    catalog.delete_pipeline(director)
    assert catalog.pipelines() == [land]
    # No rule is left over.
    catalog.add_pipeline(dataclasses.replace(director, rules=()))
    assert catalog.pipeline_named("director") == dataclasses.replace(director, rules=())
    catalog.delete_pipeline(director)
    with pytest.raises(UnknownPipeline):
        catalog.delete_pipeline(director)
    with pytest.raises(UnknownPipeline):
        catalog.alter_pipeline(director.pipeline_id, change)


def test_a_run_of_a_job_is_begun_once_and_changed_by_its_owner(catalog: Catalog) -> None:
    job = Pipeline(pipeline_id=uuid4(), name="hello", kind=PipelineKind.JOB)
    run = JobRun(pipeline_id=job.pipeline_id, number=1, state=RunState.RUNNING, scheduled_ms=1, started_ms=1, node=1)
    assert not catalog.begin_job_run(run)
    catalog.add_pipeline(job)
    assert catalog.begin_job_run(run)
    assert not catalog.begin_job_run(dataclasses.replace(run, node=2))
    taken = dataclasses.replace(run, node=2, attempt=2)
    assert catalog.update_job_run(run, taken)
    assert not catalog.update_job_run(run, dataclasses.replace(run, state=RunState.SUCCEEDED))
    assert catalog.job_runs(job.pipeline_id, limit=10) == [taken]


def test_a_restored_catalog_gets_the_topics_that_it_lacks(catalog: Catalog) -> None:
    orders, payments = declared("orders"), declared("payments")
    catalog.add_topics([orders])
    assert catalog.restore("former", [orders, declared("orders"), payments]) == 1
    assert catalog.topics() == [orders, payments]
    assert catalog.read_cluster_id() == "former"


def test_a_subscription_is_stored_changed_and_deleted_with_a_record(open_catalog: OpenCatalog) -> None:
    catalog = open_catalog()
    billing = Subscription(
        name="billing",
        subscription_id=uuid4(),
        topics=("orders", "ünd"),
        overrides={"a": "b"},
        created_ms=2**41,
        starts={"orders": (0, 2**40), "ünd": ()},
    )
    catalog.add_subscription(billing)
    with pytest.raises(SubscriptionExists):
        catalog.add_subscription(dataclasses.replace(billing, subscription_id=uuid4()))
    assert open_catalog().subscriptions() == [billing]
    assert catalog.subscriptions_named(["billing", "none", *map(str, range(1000))]) == [billing]

    def change(found: Subscription) -> Subscription:
        return dataclasses.replace(found, topics=("orders",), overrides={})

    assert catalog.alter_subscription(billing.subscription_id, change) == change(billing)
    assert catalog.subscriptions() == [change(billing)]
    catalog.delete_subscription(billing, now_ms=2**41 + 1)
    assert catalog.subscriptions() == []
    assert catalog.deleted_subscriptions() == {billing.subscription_id: 2**41 + 1}
    with pytest.raises(UnknownSubscription):
        catalog.delete_subscription(billing, now_ms=2**41)
    with pytest.raises(UnknownSubscription):
        catalog.alter_subscription(billing.subscription_id, change)
    catalog.forget_deleted_subscription(billing.subscription_id)
    assert catalog.deleted_subscriptions() == {}


def test_id_blocks_are_consecutive(catalog: Catalog) -> None:
    assert [catalog.take_block("a", 10, first=5) for _ in range(3)] == [5, 15, 25]
    assert catalog.take_block("b", 2**40) == 0
    assert catalog.take_block("b", 1) == 2**40


def test_quotas_are_replaced_and_removed(catalog: Catalog) -> None:
    one, two = (QuotaEntity(((CLIENT_ID, name),)) for name in ("one", "two"))
    catalog.change_client_quotas({one: {PRODUCER_BYTE_RATE: 1.5}, two: {PRODUCER_BYTE_RATE: 2.0}})
    catalog.change_client_quotas({one: {PRODUCER_BYTE_RATE: 3.0}, two: {}})
    assert catalog.client_quotas() == {one: {PRODUCER_BYTE_RATE: 3.0}}


def test_group_settings_are_replaced_and_removed(catalog: Catalog) -> None:
    for group_id, overrides in (("a", {"x": "1"}), ("b", {"y": "2"}), ("a", {"x": "3"}), ("b", {})):
        catalog.change_group_settings(group_id, overrides)
    assert catalog.group_settings() == {"a": {"x": "3"}}


def test_a_change_of_node_settings_starts_from_the_stored_ones(catalog: Catalog) -> None:
    assert catalog.change_broker_settings("", {"a": "1", "b": "2"}) == {"a": "1", "b": "2"}
    assert catalog.change_broker_settings("", {"a": None, "c": "3"}) == {"b": "2", "c": "3"}
    assert catalog.change_broker_settings("7", {"a": "4"}) == {"a": "4"}
    assert catalog.change_broker_settings("7", {"b": "5"}, replace=True) == {"b": "5"}
    # An unset scope keeps an empty row: a lost catalog would otherwise unset it too.
    assert catalog.change_broker_settings("7", {}, replace=True) == {}
    assert catalog.broker_settings() == {"": {"b": "2", "c": "3"}, "7": {}}


def test_a_new_catalog_has_every_table(catalog: Catalog) -> None:
    assert set(inspect(catalog._engine).get_table_names()) == set(metadata.tables)


def test_nodes_that_start_concurrently_agree_on_one_cluster(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    opened = together([lambda: Catalog.open_shared(url)] * NODES)
    catalogs = [catalog for catalog in opened if isinstance(catalog, Catalog)]
    assert len({catalog.cluster_id for catalog in catalogs}) == 1
    assert catalogs[0].cluster_id
    for catalog in catalogs:
        catalog.close()


def test_nodes_that_allocate_concurrently_get_distinct_ids(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    catalogs = [Catalog.open_shared(url) for _ in range(2)]
    taken = together([partial(catalog.take_block, "p", 10) for catalog in catalogs * 8])
    assert sorted(taken, key=str) == sorted(range(0, 160, 10), key=str)
    for catalog in catalogs:
        catalog.close()


def test_nodes_that_declare_concurrently_see_each_other(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    catalogs = [Catalog.open_shared(url) for _ in range(2)]

    def declare(catalog: Catalog) -> bool:
        return bool(catalog.add_topics([declared("orders")]))

    assert together([partial(declare, catalog) for catalog in catalogs * 3]).count(True) == 1
    [topic] = catalogs[0].topics()

    def grow(found: Topic) -> Topic:
        return dataclasses.replace(found, partitions=found.partitions + 1)

    together([partial(catalog.alter_topic, topic.topic_id, grow) for catalog in catalogs * 4])
    assert catalogs[1].topics()[0].partitions == 2 + 8
    entity = QuotaEntity(((CLIENT_ID, "x"),))
    together([partial(catalog.change_client_quotas, {entity: {PRODUCER_BYTE_RATE: 1.0}}) for catalog in catalogs * 3])
    assert catalogs[0].client_quotas() == {entity: {PRODUCER_BYTE_RATE: 1.0}}
    for catalog in catalogs:
        catalog.close()


def test_a_catalog_of_another_version_is_not_opened(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    Catalog.open_shared(url).close()
    with psycopg.connect(url) as connection:
        row = connection.execute("UPDATE about SET value = '99' WHERE name = 'schema-version' RETURNING value")
        assert row.fetchone() == ("99",)
    with pytest.raises(DataFolderInvalid, match=f"schema 99, and this Millstream reads schema {SCHEMA_VERSION}"):
        Catalog.open_shared(url)


def test_an_unavailable_server_is_an_error_until_it_is_back() -> None:
    with PostgresServer() as server:
        catalog = Catalog.open_shared(server.url)
        catalog.add_topics([declared("orders")])
        server.stop()
        for call in (catalog.topics, catalog.client_quotas, lambda: catalog.take_block("p", 1)):
            with pytest.raises(CatalogUnavailable, match="the catalog could not be"):
                call()
        server.start()
        assert [topic.name for topic in catalog.topics()] == ["orders"]
        catalog.close()


def test_a_frozen_server_does_not_block_callers_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with PostgresServer() as server:
        catalog = Catalog.open_shared(server.url)
        pids = server.worker_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as hasty:
                hasty.setattr(database, "CALL_S_MAX", 0.3)
                with pytest.raises(CatalogUnavailable):
                    catalog.topics()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert catalog.topics() == []
        catalog.close()


def test_a_rejected_login_reports_the_reason(postgres: PostgresServer) -> None:
    wrong = postgres.url.replace(":" + postgres.url.split(":")[2].split("@")[0] + "@", ":wrong@")
    with pytest.raises(CatalogUnavailable, match="password authentication failed"):
        Catalog.open_shared(wrong)
    with pytest.raises(CatalogUnavailable, match="nowhere"):
        Catalog.open_shared(postgres.url.removesuffix("/postgres") + "/nowhere")


def test_other_databases_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="mysql"):
        Catalog("mysql://localhost/x")


def test_a_shared_catalog_belongs_to_the_first_cluster_that_opens_it(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    Catalog.open_shared(url).close()
    for _ in range(2):
        first = Catalog(url, cluster="first")
        first.prepare()
        first.close()
    other = Catalog(url, cluster="other")
    with pytest.raises(ClusterMismatch, match=r"'first'.*'other'"):
        other.prepare()
    other.close()


def test_a_rejected_login_is_distinguished_from_an_unavailable_server(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    wrong = re.sub(":[^:@]*@", ":wrong@", url)
    for denied in (wrong, f"{url}_not_there"):
        with pytest.raises(CatalogDenied, match="--catalog"):
            Catalog.open_shared(denied)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
        connection.execute("REVOKE ALL ON SCHEMA public FROM public")
    with pytest.raises(CatalogDenied, match="own the database"):
        Catalog.open_shared(re.sub("//[^@]*@", "//stranger:stranger@", url))
    with pytest.raises(CatalogUnavailable) as away:
        Catalog.open_shared("postgresql://nobody@127.0.0.1:1/none")
    assert not isinstance(away.value, CatalogDenied)
    assert "\n" not in str(away.value)
