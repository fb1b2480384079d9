"""The audit trail: which events are recorded, aggregated and dropped."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.security import audit
from millstream.broker.security.audit import Activity, Actor, AuditTrail, Change
from millstream.broker.security.changes import DELETE, UPDATE, record_changes, single_change
from millstream.broker.security.rights import Rights
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Operation, ResourceType
from millstream.protocol.private.message import Response
from millstream.protocol.private.subscription_messages import AlterSubscriptionRequest, DeleteSubscriptionRequest

ADMIN = Actor("User:admin", "::1")


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1000)

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def trail(clock: ManualClock) -> AuditTrail:
    return AuditTrail(clock)


def deny(trail: AuditTrail, name: str = "orders", principal: str = "User:mallory") -> None:
    trail.deny(Actor(principal, "10.0.0.9"), Operation.READ, ResourceType.TOPIC, name)


def names_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["resources"][0]["name"] for event in events]


def test_a_denial_is_reported_at_once_and_then_aggregated(trail: AuditTrail, clock: ManualClock) -> None:
    deny(trail)
    (first,) = trail.take()
    assert (first["class_uid"], first["activity_id"], first["type_uid"]) == (6003, 2, 600302)
    assert first["actor"]["user"]["uid"] == "User:mallory"
    assert first["src_endpoint"] == {"ip": "10.0.0.9"}
    assert first["resources"] == [{"type": "topic", "name": "orders"}]
    assert (first["status_id"], first["count"]) == (2, 1)
    for _ in range(5):
        clock.seconds += 1
        deny(trail)
    assert trail.take() == []
    clock.seconds += audit.WINDOW_S
    (second,) = trail.take()
    assert second["count"] == 5
    assert second["end_time"] - second["start_time"] == 4000
    clock.seconds += audit.WINDOW_S
    assert trail.take() == []
    assert trail.next_due_s() is None


def test_one_principal_cannot_displace_the_others(trail: AuditTrail) -> None:
    for number in range(1000):
        deny(trail, f"guess-{number}")
    deny(trail, "payroll", "User:bob")
    events = trail.take()
    assert len(events) == audit.REPEATED_PER_SOURCE_MAX + 2
    others = next(event for event in events if event["resources"][0]["name"] == audit.OTHERS)
    assert others["count"] == 1000 - audit.REPEATED_PER_SOURCE_MAX
    assert "payroll" in names_of(events)


def test_denials_of_long_names_keep_their_beginning(catalog: Catalog) -> None:
    state = SecurityState(CatalogDeclarations(catalog), ())
    rights = Rights(state, "User:mallory", "10.0.0.9")
    tracemalloc.start()
    try:
        for number in range(50):
            assert not rights.check(Operation.READ, ResourceType.TOPIC, f"{number}{'x' * 1_000_000}")
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()
    assert {len(name) for name in names_of(state.audit.take())} == {256}


def test_failed_logins_are_aggregated(trail: AuditTrail, clock: ManualClock) -> None:
    for _ in range(7):
        trail.fail_sign_in("alice", "10.0.0.9", "default", "PLAIN", "wrong")
    trail.sign_in(Actor("User:alice", "10.0.0.1", "token-7"), "default", "SCRAM-SHA-512")
    signed_in, failed = sorted(trail.take(), key=lambda event: int(event["status_id"]))
    assert signed_in["type_uid"] == failed["type_uid"] == 300201
    assert signed_in["session"] == {"credential_uid": "token-7"}
    assert signed_in["user"] == {"name": "alice", "uid": "User:alice"}
    assert (failed["count"], failed["status_detail"]) == (7, "wrong")


def test_dropped_events_are_reported_by_an_event(trail: AuditTrail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "EVENTS_MAX", 10)
    for number in range(25):
        trail.change(ADMIN, "CreateTopics", Change(activity=Activity.CREATE, kind="topic", name=f"t{number}"))
    kept_events = trail.take()
    trail.requeue(kept_events)
    for _ in range(3):
        trail.sign_in(Actor("User:alice", "::1"), "default", "PLAIN")
    events = trail.take() + trail.take()
    assert [event["entity"]["name"] for event in events[:10]] == [f"t{number}" for number in range(10)]
    (dropped,) = events[10:]
    assert (dropped["class_uid"], dropped["activity_name"], dropped["count"]) == (1008, "Drop", 18)
    assert trail.dropped == 18


def test_changes_of_users_and_rules_are_account_changes(trail: AuditTrail) -> None:
    rule = Change(activity=Activity.CREATE, kind="acl", name="allow …", data={"principal": "User:bob"})
    for change in (Change(activity=Activity.DELETE, kind="user", name="bob"), rule):
        trail.change(ADMIN, "Api", change)
    deleted, attached = trail.take()
    assert (deleted["class_uid"], deleted["activity_id"]) == (3001, 6)
    assert (attached["class_uid"], attached["activity_id"]) == (3001, 7)
    assert attached["user"]["uid"] == "User:bob"
    assert attached["policy"] == {"name": "allow …"}


async def test_a_client_that_disconnects_cannot_hide_its_changes(catalog: Catalog) -> None:
    state = SecurityState(CatalogDeclarations(catalog), ())
    rights = Rights(state, "User:mallory", "10.0.0.9")
    may_respond = asyncio.Event()

    async def respond() -> Response:
        await may_respond.wait()
        return Response()

    request = DeleteSubscriptionRequest("billing")
    deletion = single_change("subscription", DELETE)
    asking = asyncio.ensure_future(record_changes("SubscriptionDelete", deletion, request, rights, respond()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(state.audit) == 0
    may_respond.set()
    await state.audit.changed.wait()
    (event,) = state.audit.take()
    assert (event["entity"]["name"], event["activity_id"]) == ("billing", Activity.DELETE)


async def test_a_validate_only_request_is_not_recorded(catalog: Catalog) -> None:
    state = SecurityState(CatalogDeclarations(catalog), ())

    async def respond() -> Response:
        return Response()

    request = AlterSubscriptionRequest("billing", {}, None, True)
    changes = single_change("subscription", UPDATE)
    await record_changes("SubscriptionAlter", changes, request, Rights(state, "User:admin", "::1"), respond())
    assert len(state.audit) == 0
