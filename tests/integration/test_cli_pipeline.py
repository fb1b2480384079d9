"""Pipelines by command and over HTTP, on a real server: declared, listed and changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

WAIT_S = 60.0


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=WAIT_S) as client:
        yield client


def test_a_pipeline_is_declared_shown_and_deleted(millstream: CommandLine) -> None:
    create = ("pipeline", "create", "land", "shown", "--topic", "shown-a", "--topic", "shown-b", "--stopped")
    more = ("--every", "10", "--schema", "id long", "--dedupe", "3600", "--set", "compact=false", "--json")
    made = millstream(*create, *more).document
    assert [note[:31] for note in made.pop("notes")] == [f"There is no topic 'shown-{x}' yet" for x in "ab"]
    assert made == {"pipeline": "shown", "kind": "land", "created": True}
    again = millstream(*create)
    assert (again.code, again.err) == (5, "millstream: pipeline 'shown' already exists\n")
    assert millstream(*create, "--if-not-exists").out == "Pipeline shown already exists.\n"
    second = millstream("pipeline", "create", "land", "second", "--topic", "shown-a", "--if-not-exists")
    assert (second.code, "topic 'shown-a' is already landed in this lake by" in second.err) == (5, True)
    reported = millstream("pipeline", "describe", "shown", "--json").document
    assert reported["overrides"] == {
        "topics": "shown-a,shown-b",
        "every.ms": "10000",
        "decode": "json",
        "schema": "id long",
        "dedupe.ms": "3600000",
        "compact": "false",
    }
    assert (reported["state"], reported["group"], reported["report"]) == ("stopped", "pipeline-shown", None)
    shown = millstream("pipeline", "describe", "shown")
    assert shown.lines[0] == "shown  (land, stopped)"
    assert "  topics = shown-a,shown-b" in shown.lines
    assert "  format = delta  (default)" in shown.lines
    (places,) = (at for at, line in enumerate(shown.lines) if line.startswith("tables"))
    assert [line.rpartition("/")[2] for line in shown.lines[places : places + 2]] == ["shown-a", "shown-b"]
    assert shown.lines[places + 2].startswith("read by     deltalake.DeltaTable('/")
    assert any(line.split()[:3] == ["shown", "land", "stopped"] for line in millstream("pipeline", "list").lines)
    assert millstream("pipeline", "update", "shown", "--set", "every.ms=500", "--unset", "compact").code == 0
    reported = millstream("pipeline", "describe", "shown", "--json").document
    assert (reported["settings"]["every.ms"], reported["settings"]["compact"]) == ("500", "true")
    assert millstream("pipeline", "stop", "shown", "--json").document == {"pipeline": "shown", "enabled": False}
    assert millstream("pipeline", "delete", "shown").out == "Deleted pipeline shown.\n"
    assert millstream("pipeline", "describe", "shown").code == 3


def test_invalid_declarations_are_refused_before_anything_is_created(millstream: CommandLine, tmp_path: Path) -> None:
    refused = millstream("pipeline", "create", "land", "wrong")
    assert (refused.code, "either `topics` (--topic) or `pattern`" in refused.err) == (2, True)
    refused = millstream("pipeline", "create", "land", "wrong", "--topic", "orders", "--schema", "id lnog")
    assert refused.err.endswith("column 4: 'lnog' is not a type; did you mean 'long'?\n  id lnog\n     ^^^^\n")
    refused = millstream("pipeline", "create", "transform", "wrong", "--into", "x", "--sql", "SELECT * FROM x")
    assert (refused.code, "reads the topic 'x' that it writes" in refused.err) == (2, True)
    refused = millstream("pipeline", "run", "transform", "--into", "x", "--sql", "SELECT * FROM y", "--lake", "/lake")
    assert (refused.code, "--lake is not for transform" in refused.err) == (2, True)
    refused = millstream("pipeline", "run", "land", "never-made", "--lake", "lake", "--once")
    assert (refused.code, "topic 'never-made' does not exist" in refused.err) == (3, True)
    refused = millstream("pipeline", "create", "transform", "wrong", "--into", "x", "--sql", f"@{tmp_path}/none.sql")
    assert (refused.code, refused.err) == (3, f"millstream: --sql: there is no file {tmp_path}/none.sql\n")
    assert millstream("pipeline", "create", "route", "wrong", "--rules", tmp_path / "none.json").code == 3
    for flag, value, problem in (
        ("--every", "10ms", "--every (in seconds) must be at least 0.1, not 0.01"),
        ("--every", "nan", "Invalid value for '--every': 'nan' is not a length of time"),
        ("--dedupe", "9999999", "--dedupe (in seconds) must be at most 604800, not 9999999"),
        ("--on-violation", "ignore", "--on-violation must be one of quarantine, fail, count, not 'ignore'"),
        ("--set", "every.ms=1", "every.ms must be at least 100, not 1"),
    ):
        refused = millstream("pipeline", "create", "land", "wrong", "--topic", "orders", flag, value)
        assert refused.code == 2
        assert problem in refused.err
    assert millstream("pipeline", "update", "wrong").code == 2
    assert millstream("pipeline", "create", "land", "typing", "--topic", "orders", "--stopped").code == 0
    refused = millstream("pipeline", "update", "typing", "--unset", "every.sm")
    assert (refused.code, "unknown setting 'every.sm'" in refused.err) == (2, True)
    for command in (("start", "wrong"), ("stop", "wrong"), ("delete", "wrong"), ("update", "wrong", "--unset", "lake")):
        refused = millstream("pipeline", *command)
        assert (refused.code, "pipeline 'wrong' does not exist" in refused.err) == (3, True)
    # A topic that cannot be landed is not created.
    name = "x" * 230
    refused = millstream("topic", "create", name, "--land")
    assert (refused.code, "1 to 200 characters" in refused.err) == (2, True)
    assert millstream("topic", "describe", name).code == 3


def test_a_statement_lists_its_tables_and_columns_by_name(millstream: CommandLine, tmp_path: Path) -> None:
    statement = tmp_path / "large.sql"
    statement.write_text("SELECT * FROM orders\nJOIN customers USING (id)\n", encoding="utf-8")
    create = ("pipeline", "create", "transform", "joined", "--sql", f"@{statement}", "--into", "large", "--stopped")
    more = (
        "--schema",
        "orders=id long, total double",
        "--table",
        "customers=/lake/c",
        "--watermark",
        "orders=at 1 hour",
    )
    assert millstream(*create, *more, "--from", "latest").code == 0
    assert millstream("pipeline", "describe", "joined", "--json").document["overrides"] == {
        "sql": "SELECT * FROM orders\nJOIN customers USING (id)",
        "into": "large",
        "schemas": '{"orders": "id long, total double"}',
        "tables": '{"customers": "/lake/c"}',
        "watermarks": '{"orders": "at 1 hour"}',
        "from": "latest",
    }
    assert millstream("pipeline", "delete", "joined").code == 0


def test_rules_are_added_loaded_and_deleted(millstream: CommandLine, tmp_path: Path) -> None:
    assert millstream("pipeline", "create", "route", "director", "--stopped").code == 0
    put = ("pipeline", "rule", "put", "director", "large", "--topic", "orders", "--to", "a", "--to", "b")
    assert "No rules yet" in millstream("pipeline", "rule", "list", "director").out
    assert millstream(*put, "--where", "payload.total > 5", "--json").document["rules"] == 1
    assert "by rule large, from the next batch on.\n" in millstream(*put, "--where", "payload.total > 5").out
    refused = millstream(*put, "--where", "true", "--subscription", "s")
    assert (refused.code, "not both" in refused.err) == (2, True)
    assert millstream("pipeline", "rule", "list", "director").lines == [
        "RULE   TOPIC   TO    WHERE",
        "large  orders  a, b  payload.total > 5",
    ]
    rules = tmp_path / "rules.json"
    listed_rules = [{"name": f"rule-{at}", "topic": "orders", "targets": [f"queue-{at}"]} for at in range(1000)]
    rules.write_text(json.dumps(listed_rules), encoding="utf-8")
    loaded = millstream("pipeline", "rule", "load", "director", rules, "--replace", "--json").document
    assert (loaded["put"], loaded["deleted"], loaded["rules"]) == (1000, 1, 1000)
    assert millstream("pipeline", "rule", "delete", "director", "rule-7", "rule-8", "--json").document["rules"] == 998
    document = millstream("pipeline", "rule", "list", "director", "--json").document
    assert document[0] == {**listed_rules[0], "condition": "", "subscription": ""}
    assert millstream("pipeline", "rule", "delete", "director", "rule-7").code == 3
    rules.write_text('[{"name": "x", "where": "true"}]', encoding="utf-8")
    refused = millstream("pipeline", "rule", "load", "director", rules)
    assert (refused.code, "is not a JSON list of rules" in refused.err) == (2, True)
    assert "998 rules; millstream pipeline rule list" in millstream("pipeline", "describe", "director").out
    assert millstream("pipeline", "delete", "director", "--yes").code == 0


def test_a_topic_is_created_with_its_table(millstream: CommandLine, http: httpx.Client, topic: str) -> None:
    made = millstream("topic", "create", topic, "--land", "--json").document
    assert (made["created"], made["pipeline"]) == (True, f"land-{topic}")
    reported = http.get(f"/pipelines/land-{topic}").json()
    assert (reported["kind"], reported["enabled"], reported["overrides"]) == ("land", True, {"topics": topic})
    assert http.post(f"/pipelines/land-{topic}/stop").json() == {"pipeline": f"land-{topic}", "enabled": False}
    again = millstream("topic", "create", topic, "--land", "--if-not-exists")
    assert again.out == f"There is already a topic {topic} with 1 partition, landed by pipeline land-{topic}.\n"
    assert not http.get(f"/pipelines/land-{topic}").json()["enabled"]
    made = http.post("/topics", json={"name": f"{topic}-2", "land": True, "settings": {"retention.ms": 60000}})
    assert (made.status_code, made.json()["pipeline"], made.json()["notes"]) == (201, f"land-{topic}-2", [])
    assert http.delete(f"/topics/{topic}-2").json()["notes"] == [
        f"Pipeline land-{topic}-2 lands {topic}-2; every message is landed."
    ]
    assert http.delete(f"/pipelines/land-{topic}-2").status_code == 204
    assert http.post(f"/topics/{topic}/messages", json={"value": "x"}).is_success
    rule = ("pipeline", "rule", "put", f"route-{topic}", "all", "--topic", topic, "--to", "anywhere")
    assert millstream("pipeline", "create", "route", f"route-{topic}", "--stopped").code == millstream(*rule).code == 0
    assert millstream("group", "reset", f"pipeline-route-{topic}", "--topic", topic, "--to", "end").code == 0
    assert millstream(*rule).out.endswith("; 1 message that it has already read is not routed again.\n")
    assert millstream(*rule, "--json").document["already_read"] == 1
    waiting = f"Pipeline land-{topic} lands {topic}, of which 1 message is not landed yet."
    shorter = http.patch(f"/topics/{topic}", json={"settings": {"retention.ms": 60000}}).json()
    assert (shorter["overrides"], shorter["notes"]) == ({"retention.ms": "60000"}, [waiting])
    again = millstream("topic", "alter", topic, "--set", "retention.ms=90000", "--json").document
    assert again["notes"] == [waiting]
    assert millstream("topic", "delete", topic, "--yes", "--json").document["notes"] == [
        waiting,
        f"Pipeline route-{topic} reads {topic}; every message is read.",
    ]
    assert http.delete(f"/pipelines/route-{topic}").status_code == 204
    assert http.delete(f"/pipelines/land-{topic}").status_code == 204


def test_pipelines_over_http(server: Server, http: httpx.Client) -> None:
    rule = {"name": "large", "topic": "web-x", "targets": ["a"], "condition": "payload.total > 5", "subscription": ""}
    new = {"name": "web", "kind": "route", "enabled": False, "rules": [rule]}
    made = http.post("/pipelines", json=new)
    assert (made.status_code, made.json()["notes"][0][:29]) == (201, "There is no topic 'web-x' yet")
    assert http.post("/pipelines", json=new).status_code == 409
    assert http.get("/pipelines/web").json()["rules"] == [rule]
    changed = http.patch("/pipelines/web", json={"settings": {"batch.max.messages": 10, "from": "latest"}}).json()
    assert changed["overrides"] == {"batch.max.messages": "10", "from": "latest"}
    assert changed["notes"][0].startswith("There is no topic 'web-x' yet")
    refused = http.patch("/pipelines/web", json={"settings": {"decode": "none"}})
    assert (refused.status_code, "'large' reads payloads" in refused.json()["detail"]) == (422, True)
    other = {**rule, "name": "other"}
    rules = http.patch("/pipelines/web/rules", json={"put": [other], "delete": ["large"]}).json()
    assert (rules["rules"], rules["notes"][0][:29]) == ([other], "There is no topic 'web-x' yet")
    assert http.get("/pipelines/web/rules").json() == {"rules": [other]}
    pipelines = {pipeline["pipeline"]: pipeline for pipeline in http.get("/pipelines").json()["pipelines"]}
    assert (pipelines["web"]["state"], pipelines["web"]["lag"]) == ("stopped", None)
    assert 'millstream_pipeline_parked{pipeline="web"} 0.0' in server.metrics()
    for refused in (http.patch("/pipelines/web", json={"settings": {}}), http.patch("/pipelines/web/rules", json={})):
        assert (refused.status_code, "nothing to change" in refused.json()["detail"]) == (422, True)
    assert http.post("/pipelines", json={"name": "x", "kind": "land"}).status_code == 422
    refused = http.post("/pipelines", json={"name": "x", "kind": "lnad"})
    assert refused.json()["detail"].endswith("the kinds are: land, transform, route, job, ledger; did you mean 'land'?")
    refused = http.post("/pipelines", json={"name": "x", "kind": "land", "settings": {"every.ms": [1]}})
    assert (refused.status_code, "the setting 'every.ms'" in refused.json()["detail"]) == (422, True)
    days = {"topics": "web-x", "decode": "json", "partition.by": "day(created_at)"}
    made = http.post("/pipelines", json={"name": "web-days", "kind": "land", "enabled": False, "settings": days})
    assert made.status_code == 201
    assert http.get("/pipelines/web-days").json()["overrides"] == days
    refused = http.patch("/pipelines/web-days", json={"settings": {"partition.by": "month(created_at)"}})
    assert (refused.status_code, "day(COLUMN)" in refused.json()["detail"]) == (422, True)
    hours = http.patch("/pipelines/web-days", json={"settings": {"partition.by": "hour(created_at)"}}).json()
    assert hours["overrides"]["partition.by"] == "hour(created_at)"
    assert http.delete("/pipelines/web-days").status_code == 204
    assert http.post("/pipelines/none/start").status_code == 404
    assert http.delete("/pipelines/web").status_code == 204
    assert http.get("/pipelines/web").status_code == 404
