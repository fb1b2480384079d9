from conformance.authorizer.compare import RECORDED, differences
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.security.authorizer import AclSnapshot
from millstream.core.acl import (
    OPERATIONS,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)

ALICE, BOB, HOST = "User:alice", "User:bob", "10.0.0.1"
TOPIC = ResourceType.TOPIC

acls = st.builds(
    Acl,
    resource_type=st.just(TOPIC),
    resource_name=st.sampled_from(["*", "a", "ab", "abc", "b"]),
    pattern=st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
    principal=st.sampled_from([ALICE, BOB, "User:*"]),
    host=st.sampled_from(["*", HOST, "10.0.0.2"]),
    operation=st.sampled_from([*OPERATIONS[TOPIC], Operation.ALL]),
    permission=st.sampled_from([Permission.ALLOW, Permission.DENY]),
)
questions = st.tuples(
    st.sampled_from([ALICE, BOB]),
    st.just(HOST),
    st.sampled_from(OPERATIONS[TOPIC]),
    st.just(TOPIC),
    st.sampled_from(["a", "ab", "abc", "b", "c"]),
)


def rule(**changes: object) -> Acl:
    values: dict[str, object] = {
        "resource_type": TOPIC,
        "resource_name": "orders",
        "principal": ALICE,
        "operation": Operation.READ,
        **changes,
    }
    return Acl(**values)  # type: ignore[arg-type]


def test_decisions_agree_with_apache_kafka() -> None:
    lines, decisions = [], []
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        question, _, response = line.rpartition("\t")
        is_question = line[0] in "QT"
        lines.append(question if is_question else line)
        decisions += [response] if is_question else []
    assert len(decisions) >= 2000
    assert {"0", "1"} == set(decisions)
    assert list(differences(lines, decisions)) == []


@given(st.lists(acls, max_size=8), acls, questions)
def test_adding_a_deny_rule_never_allows_more(
    some: list[Acl], more: Acl, asked: tuple[str, str, Operation, ResourceType, str]
) -> None:
    before = AclSnapshot(some).decide(*asked)
    after = AclSnapshot([*some, more]).decide(*asked)
    if more.permission is Permission.DENY:
        assert bool(before) >= bool(after)
    else:
        assert bool(before) <= bool(after)


@given(st.lists(acls, max_size=8), questions)
def test_the_deciding_rule_is_one_of_the_rules(
    some: list[Acl], asked: tuple[str, str, Operation, ResourceType, str]
) -> None:
    decision = AclSnapshot(some).decide(*asked)
    if decision.rule is None:
        assert not decision
    else:
        assert decision.rule in some
        assert bool(decision) is (decision.rule.permission is Permission.ALLOW)


@given(st.lists(acls, max_size=8), questions)
def test_no_rule_restricts_a_super_user(some: list[Acl], asked: tuple[str, str, Operation, ResourceType, str]) -> None:
    assert AclSnapshot(some, super_users=[asked[0]]).decide(*asked)


def test_without_rules_everything_is_denied() -> None:
    assert not AclSnapshot().decide(ALICE, HOST, Operation.DESCRIBE, TOPIC, "orders")
    assert not AclSnapshot().decide_any(ALICE, HOST, Operation.WRITE, TOPIC)


def test_a_wildcard_does_not_match_internal_topics() -> None:
    question = (ALICE, HOST, Operation.READ, TOPIC, "__consumer_offsets")
    wide = [
        rule(resource_name="*"),
        rule(resource_name="_", pattern=PatternType.PREFIXED),
        rule(resource_name="*", operation=Operation.ALL, principal="User:*"),
    ]
    assert not AclSnapshot(wide).decide(*question)
    assert AclSnapshot([*wide, rule(resource_name="__consumer_offsets")]).decide(*question)
    assert AclSnapshot([*wide, rule(resource_name="__", pattern=PatternType.PREFIXED)]).decide(*question)


def test_a_wildcard_deny_rule_matches_internal_topics() -> None:
    named = rule(resource_name="__consumer_offsets")
    denied = rule(resource_name="*", permission=Permission.DENY)
    assert not AclSnapshot([named, denied]).decide(ALICE, HOST, Operation.READ, TOPIC, "__consumer_offsets")


def test_an_address_may_have_several_notations() -> None:
    snapshot = AclSnapshot([rule(host="0:0:0:0:0:0:0:1")])
    assert snapshot.decide(ALICE, "::1", Operation.READ, TOPIC, "orders")


def test_an_ipv4_client_of_an_ipv6_listener_has_its_own_address() -> None:
    denied = rule(host=HOST, permission=Permission.DENY)
    assert AclSnapshot([rule(host=HOST)]).decide(ALICE, f"::ffff:{HOST}", Operation.READ, TOPIC, "orders")
    assert not AclSnapshot([rule(), denied]).decide(ALICE, f"::ffff:{HOST}", Operation.READ, TOPIC, "orders")
    assert not AclSnapshot([rule(), denied]).decide_any(ALICE, f"::ffff:{HOST}", Operation.READ, TOPIC)


def test_filters_select_rules_as_in_kafka() -> None:
    prefixed = rule(resource_name="ord", pattern=PatternType.PREFIXED)
    wildcard = rule(resource_name="*")
    every = [rule(), prefixed, wildcard, rule(resource_name="other")]

    def selected(**fields: object) -> list[Acl]:
        return [acl for acl in every if AclFilter(**fields).matches(acl)]  # type: ignore[arg-type]

    assert selected() == every
    assert selected(resource_name="orders", pattern=PatternType.MATCH) == [rule(), prefixed, wildcard]
    assert selected(resource_name="orders", pattern=PatternType.LITERAL) == [rule()]
    assert selected(resource_name="ord", pattern=PatternType.ANY) == [prefixed]
    assert selected(resource_name="orders", pattern=PatternType.PREFIXED) == []
    assert selected(principal=BOB) == []
