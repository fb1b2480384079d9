"""The private pipeline APIs, as a client uses them on several nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import msgspec
import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo, PrivateApi
from millstream.broker.kafka.apis.pipeline_apis import (
    PipelineAlter,
    PipelineCreate,
    PipelineDelete,
    PipelineList,
    RuleChange,
)
from millstream.broker.kafka.apis.subscription_apis import SubscriptionCreate
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.report_board import PipelineAdvice, PipelineBoard
from millstream.client.admin.pipelines import PipelineClient, summary_of
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidPipeline,
    InvalidRequest,
    InvalidSetting,
    InvalidSubscription,
    NotFound,
    PipelineExists,
    ProtocolViolation,
    UnknownGroup,
)
from millstream.core.pipeline import PipelineKind, Rule
from millstream.core.topic import Topic
from millstream.protocol.messages.codec import RequestHeader, response_body_at
from millstream.protocol.private.message import decode
from millstream.protocol.private.pipeline_messages import (
    STATES,
    AlterPipelineRequest,
    ChangeRulesRequest,
    CreatePipelineRequest,
    PipelineReport,
)
from millstream.protocol.private.subscription_messages import CreateSubscriptionRequest
from millstream.protocol.wire.client import Client
from millstream_testing.clock import ManualClock

LARGE = Rule(name="large", topic="orders", targets=("large-orders", "audit"), condition="payload.total > 1000")
ORDERS = {"topics": "orders"}


def topic_of(name: str) -> Topic:
    return Topic(topic_id=uuid4(), name=name, partitions=1, replication=1, overrides={}, created_ms=0)


class Node:
    """One node's APIs, over the catalog that all nodes share."""

    def __init__(self, catalog: Catalog, *, has_jobs: bool = True, has_local_lake: bool | None = False) -> None:
        declarations = CatalogDeclarations(catalog)
        self.pipelines = Pipelines(declarations, ManualClock())
        self.subscriptions = Subscriptions(declarations, ManualClock())
        self.board = PipelineBoard(self.pipelines.all)
        self.topics: list[Topic] = []
        notes = PipelineAdvice(self.pipelines, cast("Topics", self), has_local_lake=has_local_lake)
        apis: list[PrivateApi[Any, Any]] = [
            PipelineCreate(self.pipelines, self.subscriptions, notes, has_jobs=has_jobs),
            PipelineAlter(self.pipelines, self.subscriptions, notes, has_jobs=has_jobs),
            PipelineDelete(self.pipelines),
            PipelineList(self.pipelines, self.board, notes),
            RuleChange(self.pipelines, self.subscriptions, notes),
        ]
        self.apis = {api.key: api for api in apis}
        self.is_away = False

    def get(self, name: str) -> Topic | None:
        return next((topic for topic in self.topics if topic.name == name), None)

    def all(self) -> list[Topic]:
        return self.topics


@dataclass
class Nodes:
    """The client's view of the nodes: requests go to the first node, unless they name another."""

    nodes: dict[int, Node]

    async def metadata(self, topics: object = None) -> Any:
        return SimpleNamespace(nodes=dict.fromkeys(self.nodes))

    async def coordinator(self, group: str) -> int:
        return 1

    async def send(self, node: int, request: Any) -> Any:
        raise UnknownGroup("there are no groups here")

    async def private(self, node: int | None, key: int, body: bytes, *, waits: bool) -> memoryview:
        versioned = self.nodes[min(self.nodes) if node is None else node]
        if versioned.is_away:
            raise BrokerUnreachable("it is away")
        header = RequestHeader(api_key=key, version=0, correlation_id=1, client_id="c", flexible=False, body_at=0)
        client = ClientInfo(connection_id=1, host="127.0.0.1")
        reported = await cast("Any", versioned.apis[key].handle_frame(memoryview(body), header, client))
        frame = memoryview(b"".join(reported))[4:]
        return frame[response_body_at(key, 0, frame) :]


@pytest.fixture
async def nodes(catalog: Catalog) -> Nodes:
    return Nodes({1: Node(catalog), 2: Node(catalog), 3: Node(catalog)})


@pytest.fixture
def client(nodes: Nodes) -> PipelineClient:
    return PipelineClient(cast("Client", nodes))


async def test_a_pipeline_declared_on_one_node_is_reported_by_all(client: PipelineClient, nodes: Nodes) -> None:
    made = (await client.create("land-orders", "land", ORDERS)).pipeline_id
    await client.create("checked-only", "route", {}, validate_only=True)
    (reported,) = await client.describe()
    assert (reported["pipeline_id"], reported["kind"], reported["state"], reported["rules"]) == (
        made,
        "land",
        "waiting",
        [],
    )
    assert (reported["overrides"], reported["settings"]["every.ms"]) == (ORDERS, "60000")
    # The other nodes do not have it cached, and look it up on request.
    assert nodes.nodes[2].pipelines.all() == []
    assert await client.describe(["land-orders"]) == [reported]


async def test_tables_that_only_one_node_reads_are_reported(catalog: Catalog) -> None:
    node = Node(catalog, has_local_lake=True)
    node.topics = [topic_of("orders"), topic_of("payments")]
    client = PipelineClient(cast("Client", Nodes({1: node, 2: Node(catalog, has_local_lake=True)})))
    (note,) = (await client.create("mine", "land", ORDERS)).notes
    assert "in the data folder of the node" in note
    assert "Set pipelines-lake on all nodes" in note
    assert (await client.create("shared", "land", {"topics": "payments", "lake": "s3://lake"})).notes == []
    await client.create("events", "ledger", {})
    await client.create("routed", "route", {})
    described = await client.describe(["events", "mine", "routed", "shared"])
    assert {pipeline["name"]: pipeline["local_tables"] for pipeline in described} == {
        "events": True,
        "mine": True,
        "routed": False,
        "shared": False,
    }
    assert not any("data folder" in summary_of(pipeline)["error"] for pipeline in described)


@pytest.mark.parametrize(
    ("lakes", "is_local"),
    [
        ((None, None, False, False), False),
        ((None, None, True, True), True),
        ((False, True, None), True),
        ((None, True, None), False),
        ((None, None), False),
    ],
    ids=["a shared lake", "lakes of their own", "one lake of its own", "one node runs pipelines", "no node does"],
)
async def test_only_nodes_that_run_pipelines_decide_where_tables_are(
    catalog: Catalog, lakes: tuple[bool | None, ...], is_local: bool
) -> None:
    nodes = {number: Node(catalog, has_local_lake=lake) for number, lake in enumerate(lakes, 1)}
    nodes[1].topics = [topic_of("orders")]
    client = PipelineClient(cast("Client", Nodes(nodes)))
    assert (await client.create("mine", "land", ORDERS)).notes == []
    (described,) = await client.describe(["mine"])
    assert described["local_tables"] is is_local


async def test_a_changed_schema_says_which_types_stay(client: PipelineClient, nodes: Nodes) -> None:
    nodes.nodes[1].topics = [topic_of("orders")]
    await client.create("mine", "land", ORDERS)
    # Payloads were not decoded, so the table has no columns of them.
    first = {"decode": "json", "schema": "id int, price double, buyer struct<name string, age int>, tags array<long>"}
    assert await client.alter("mine", first) == []
    wider = "id double, buyer struct<name string, age double, city string>, tags array<double>, note string"
    assert await client.alter("mine", {"schema": wider}, validate_only=True) == []
    other = "id long, Price string, buyer struct<age string>, tags array<string>"
    (note,) = await client.alter("mine", {"schema": other})
    assert "keep their types, here: Price double, buyer.age long, tags.element long; only long" in note
    assert await client.alter("mine", {"every.ms": "5000"}) == []
    assert await client.alter("mine", {"schema": None}) == []
    # The columns that were found may have any type.
    (note,) = await client.alter("mine", {"schema": "id long"})
    assert "already have keep their types; only long becomes double" in note


async def test_the_node_that_runs_a_pipeline_reports_its_progress(client: PipelineClient, nodes: Nodes) -> None:
    await client.create("land-orders", "land", ORDERS)
    report = PipelineReport(name="land-orders", state="running", rows=70, rows_per_s=3.5, lag=2, node=3)
    nodes.nodes[3].board.take([report, PipelineReport(name="gone", state="running")])
    (reported,) = await client.describe(["land-orders"])
    assert reported["report"] == {
        "name": "land-orders",
        "state": "running",
        "rows": 70,
        "rows_per_s": 3.5,
        "lag": 2,
        "batches": 0,
        "recent": [],
        "restarts": 0,
        "stalls": 0,
        "stalled_s": 0.0,
        "last_error": "",
        "last_error_ms": 0,
        "failing_ms": 0,
        "counts": {},
        "levels": {},
        "facts": {},
        "node": 3,
        "run": 0,
        "next_run_ms": 0,
    }
    assert summary_of(reported) == {
        "pipeline": "land-orders",
        "kind": "land",
        "state": "running",
        "rows": 70,
        "rows_per_s": 3.5,
        "lag": 2,
        "restarts": 0,
        "error": "",
    }
    waiting = PipelineReport(name="land-orders", state="waiting", last_error="pipelines-enabled is off", node=2)
    nodes.nodes[2].board.take([waiting])
    assert (await client.describe(["land-orders"]))[0]["report"] == reported["report"]
    # The lag is measured even if the driver's last batch left none, and also for a pipeline that no node runs.
    nodes.nodes[3].board.take_lags({"land-orders": 9})
    (measured,) = await client.describe(["land-orders"])
    assert (measured["report"]["lag"], summary_of(measured)["lag"]) == (9, 9)
    nodes.nodes[3].board.take([])
    assert [(pipeline["report"]["state"], pipeline["lag"]) for pipeline in await client.describe(["land-orders"])] == [
        ("waiting", 9)
    ]
    nodes.nodes[3].board.take([report])
    nodes.nodes[1].is_away = True
    assert (await client.describe(["land-orders"]))[0]["report"]["node"] == 3
    nodes.nodes[3].board.clear()
    assert (await client.describe(["land-orders"]))[0]["report"]["last_error"] == "pipelines-enabled is off"
    nodes.nodes[2].board.clear()
    (reported,) = await client.describe(["land-orders"])
    assert (reported["state"], reported["report"], summary_of(reported)["lag"]) == ("waiting", None, None)
    # A node that does not respond may be the one that runs it.
    assert (reported["notes"], summary_of(reported)["error"]) == (["it is away"], "it is away")
    nodes.nodes[1].is_away = False
    (reported,) = await client.describe(["land-orders"])
    assert reported["notes"] == [summary_of(reported)["error"]]
    assert reported["notes"][0].startswith("no node runs it yet; nodes with pipelines-enabled on")
    for node in nodes.nodes.values():
        node.is_away = True
    with pytest.raises(BrokerUnreachable):
        await client.describe(["land-orders"])


async def test_the_newest_version_known_to_any_node_is_reported(client: PipelineClient, nodes: Nodes) -> None:
    await client.create("land-orders", "land", ORDERS)
    for node in nodes.nodes.values():
        await node.pipelines.load()
    await nodes.nodes[3].pipelines.stop("land-orders")
    assert nodes.nodes[1].pipelines.all()[0].is_enabled
    assert [reported["state"] for reported in await client.describe()] == ["stopped"]
    # One node has been notified of the deletion.
    await nodes.nodes[3].pipelines.delete("land-orders")
    with pytest.raises(NotFound):
        await client.describe(["land-orders"])


async def test_a_pipeline_is_changed_stopped_parked_and_started(client: PipelineClient, nodes: Nodes) -> None:
    await client.create("land-orders", "land", ORDERS, is_enabled=False)
    states = [(await client.describe())[0]["state"]]
    await client.start("land-orders")
    nodes.nodes[1].board.take([PipelineReport(name="land-orders", state="retrying")])
    states.append((await client.describe())[0]["state"])
    park = AlterPipelineRequest(name="land-orders", parked="no such bucket")
    await nodes.nodes[1].apis[AlterPipelineRequest.KEY].handle(park)
    (reported,) = await client.describe()
    states.append(reported["state"])
    assert (reported["parked"], summary_of(reported)["error"]) == ("no such bucket", "no such bucket")
    await client.alter("land-orders", {"lake": "s3://other"})
    states.append((await client.describe())[0]["state"])
    await client.stop("land-orders")
    states.append((await client.describe())[0]["state"])
    assert states == ["stopped", "retrying", "parked", "retrying", "stopped"]
    await client.delete("land-orders")
    assert await client.describe() == []


async def test_rules_are_changed_all_or_none(client: PipelineClient, nodes: Nodes) -> None:
    await client.create("director", PipelineKind.ROUTE, {}, rules=[LARGE])
    small = Rule(name="small", topic="orders", targets=("small-orders",), subscription="cheap")
    with pytest.raises(NotFound, match="subscription 'cheap' does not exist"):
        await client.change_rules("director", [small], deleted=["large"])
    with pytest.raises(NotFound, match="subscription 'cheap' does not exist"):
        await client.create("other", "route", {}, rules=[small])
    broken = Rule(name="odd", topic="orders", targets=("odd-orders",), condition="payload.total >")
    with pytest.raises(InvalidRequest, match=r"rule 'odd'.*column 15"):
        await client.change_rules("director", [broken], deleted=["large"])
    await nodes.nodes[1].subscriptions.create("cheap", ["orders"], {})
    assert (await client.change_rules("director", [small], validate_only=True)).rules == 2
    assert (await client.change_rules("director", [small], deleted=["large"])).rules == 1
    assert [reported["rules"] for reported in await client.describe()] == [[]]
    (reported,) = await client.describe(["director"])
    assert reported["rules"] == [
        {
            "name": "small",
            "topic": "orders",
            "targets": ["small-orders"],
            "condition": "",
            "subscription": "cheap",
        }
    ]


@pytest.mark.parametrize(("request_type", "field"), [(ChangeRulesRequest, "put"), (CreatePipelineRequest, "rules")])
def test_a_rule_with_a_misspelt_field_is_refused(request_type: type, field: str) -> None:
    rule = {"name": "large", "topic": "orders", "targets": ["all"], "conditoin": "payload.total > 1000"}
    body = msgspec.msgpack.encode({"name": "director", "kind": "route", field: [rule]})
    with pytest.raises(ProtocolViolation, match="unknown field `conditoin`"):
        decode(body, request_type)


async def test_a_rule_on_a_field_that_is_not_decoded_is_refused(client: PipelineClient, nodes: Nodes) -> None:
    expected = "'large' reads payloads, which decode=none does not decode"
    with pytest.raises(InvalidRequest, match=expected):
        await client.create("director", "route", {"decode": "none"}, rules=[LARGE])
    await client.create("director", "route", {"decode": "none"})
    with pytest.raises(InvalidRequest, match=expected):
        await client.change_rules("director", [LARGE])
    await nodes.nodes[1].subscriptions.create("rich", ["orders"], {"millstream.filter": "payload.total > 5"})
    rich = Rule(name="large", topic="orders", targets=("a",), subscription="rich")
    with pytest.raises(InvalidRequest, match=expected):
        await client.change_rules("director", [rich])
    await client.alter("director", {"decode": None})
    await client.change_rules("director", [rich])
    with pytest.raises(InvalidRequest, match=expected):
        await client.alter("director", {"decode": "none"})


async def test_warnings_are_reported_without_refusing_the_change(client: PipelineClient, nodes: Nodes) -> None:
    node = nodes.nodes[1]
    node.topics = [topic_of(name) for name in ("orders", "bills")]
    assert (await client.create("known", "land", {"topics": "orders"})).notes == []
    assert (await client.create("few", "land", {"topics": "ordres,bills"})).notes == [
        "There is no topic 'ordres' yet; the pipeline waits for it; did you mean 'orders'?"
    ]
    many = ",".join(f"x{number}" for number in range(9))
    assert (await client.alter("few", {"topics": many}))[-1] == "4 more of its topics do not exist yet either."
    sql = {"sql": "SELECT * FROM orders JOIN c", "into": "copies", "tables": '{"c": "/lake/c"}'}
    more = {"schemas": '{"order": "id long"}', "watermarks": '{"orders": "at 1 hour"}'}
    assert (await client.create("copying", "transform", {**sql, **more})).notes == [
        "The statement does not read 'order', which `schemas` names; did you mean 'orders'?"
    ]
    unclear = {"sql": "SELECT * FROM STREAM none", "into": "others"}
    assert (await client.create("unclear", "transform", unclear)).notes == []


async def test_cycles_over_several_pipelines_are_reported(client: PipelineClient, nodes: Nodes) -> None:
    nodes.nodes[1].topics = [topic_of(name) for name in ("orders", "large-orders", "audit", "copies")]
    await client.create("director", "route", {}, rules=[LARGE])
    await client.create("on", "transform", {"sql": "SELECT * FROM audit", "into": "copies"})
    back = Rule(name="back", topic="copies", targets=("orders",))
    made = await client.create("return", "route", {}, rules=[back])
    expected = (
        "Messages may loop forever: copies to orders to audit to copies, through the pipelines director, on, return. "
        "Add a condition that ends the loop."
    )
    assert made.notes == [expected]
    assert (await client.alter("return", {"batch.max.messages": "5"})) == [expected]
    await client.change_rules("return", deleted=["back"])
    assert (await client.change_rules("return", [back])).notes == [expected]
    await client.delete("on")
    assert await client.alter("return", {"batch.max.messages": "6"}) == []


async def test_a_group_of_a_subscription_is_refused_as_the_group_of_a_pipeline(
    client: PipelineClient, nodes: Nodes
) -> None:
    pipelines, subscriptions = nodes.nodes[1].pipelines, nodes.nodes[1].subscriptions
    await subscriptions.create("pipeline-mine", ["orders"], {})
    with pytest.raises(InvalidRequest, match="group 'pipeline-mine' is a subscription's"):
        await client.create("mine", "land", ORDERS)
    await client.create("yours", "land", ORDERS)
    groups = ("pipeline-yours", "pipeline-mine", "yours", "pipeline-")
    assert [pipelines.of_group(group) for group in groups] == ["yours", None, None, None]
    create = SubscriptionCreate(cast("SubscriptionService", SimpleNamespace(declared=subscriptions)), pipelines)
    with pytest.raises(InvalidSubscription, match="is the group of pipeline 'yours'"):
        await create.handle(CreateSubscriptionRequest("pipeline-yours", ["orders"]))


async def test_invalid_declarations_are_refused_with_a_sentence(client: PipelineClient) -> None:
    await client.create("land-orders", "land", ORDERS)
    with pytest.raises(PipelineExists, match="already exists"):
        await client.create("land-orders", "land", ORDERS)
    with pytest.raises(InvalidRequest, match="the kinds are: land, transform, route"):
        await client.create("other", "wash", {})
    with pytest.raises(InvalidSetting, match="unknown setting"):
        await client.alter("land-orders", {"topic": "x"})
    with pytest.raises(InvalidSetting, match="set either `topics`"):
        await client.alter("land-orders", {"topics": None}, validate_only=True)
    with pytest.raises(InvalidRequest, match="only route pipelines have rules"):
        await client.change_rules("land-orders", [LARGE])
    for versioned in (client.start("x"), client.delete("x"), client.describe(["x"]), client.change_rules("x", [LARGE])):
        with pytest.raises(NotFound, match="pipeline 'x' does not exist"):
            await versioned
    assert not issubclass(InvalidPipeline, InvalidSetting)


async def test_the_documentation_lists_every_metric(catalog: Catalog) -> None:
    node = Node(catalog)
    assert list(node.board.metrics()) == []
    await node.pipelines.create("land-orders", PipelineKind.LAND, ORDERS)
    assert [metric.name for metric in node.board.metrics()] == ["millstream_pipeline_parked"]
    counts = {"files": 3, "quarantined": 1}
    node.board.take_lags({"land-orders": 4, "gone": 7})
    levels = {"audit_lost": 0}
    report = PipelineReport(name="land-orders", state="running", rows=70, batches=2, counts=counts, levels=levels)
    node.board.take([report])
    samples = {metric.name: list(metric.samples) for metric in node.board.metrics()}
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(millstream_pipeline_\w+)`", page)) == samples.keys()
    here = ("pipeline", "land-orders")
    assert samples["millstream_pipeline_rows_total"] == [(70, (here,))]
    assert samples["millstream_pipeline_lag"] == [(4, (here,))]
    assert samples["millstream_pipeline_failing_seconds"] == [(0, (here,))]
    assert samples["millstream_pipeline_counted_total"] == [
        (3, (here, ("what", "files"))),
        (1, (here, ("what", "quarantined"))),
    ]
    assert samples["millstream_pipeline_level"] == [(0, (here, ("what", "audit_lost")))]
    states = {dict(labels)["state"]: value for value, labels in samples["millstream_pipeline_state"]}
    assert states == {state: float(state == "running") for state in STATES}
    await node.pipelines.park(await node.pipelines.find("land-orders"), "no such bucket")
    assert next(iter(node.board.metrics())).samples == [(1.0, (here,))]


async def test_code_is_refused_also_on_change_where_none_may_run(catalog: Catalog) -> None:
    client = PipelineClient(cast("Client", Nodes({1: Node(catalog, has_jobs=False)})))
    plain = {"sql": "SELECT twice(value) AS value FROM orders", "into": "copies"}
    code = {"functions": "twice=sums.twice:string", "functions.code": "sums=def twice(value): return value"}
    with pytest.raises(InvalidRequest, match="jobs are off"):
        await client.create("nightly", "job", {"code": "def run(spark, millstream): pass"})
    with pytest.raises(InvalidRequest, match="jobs are off"):
        await client.create("copying", "transform", {**plain, **code})
    await client.create("copying", "transform", {**plain, "sql": "SELECT value FROM orders"})
    with pytest.raises(InvalidRequest, match="jobs are off"):
        await client.alter("copying", {**plain, **code})
    (described,) = await client.describe(["copying"])
    assert described["settings"]["functions"] == ""
    await client.alter("copying", {"functions": None, "batch.max.messages": "5000"})
