"""Assignment in a share group: every partition has a member, every member has a partition."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.groups.share.group import assign_partitions

TOPICS = [UUID(int=number) for number in range(1, 5)]
_members = st.text("abcdef", min_size=1, max_size=3)
_wanted = st.dictionaries(_members, st.frozensets(st.sampled_from(TOPICS)), max_size=12)
_partitions = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9))


@given(_wanted, _partitions)
def test_every_partition_has_a_member_and_every_member_a_partition(
    subscribed: dict[str, frozenset[UUID]], partitions: dict[UUID, int]
) -> None:
    shares = assign_partitions(subscribed, partitions)
    assert shares.keys() == subscribed.keys()
    for topic, number in partitions.items():
        interested = [member for member, topics in subscribed.items() if topic in topics]
        dealt = [partition for member in interested for partition in shares[member].get(topic, ())]
        if interested:
            assert set(dealt) == set(range(number))
            # No member has two partitions that others lack, and no partition has two members more than needed.
            counts = [dealt.count(partition) for partition in range(number)]
            assert max(counts) - min(counts) <= 1
            sizes = [len(shares[member].get(topic, ())) for member in interested]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
    for member, share in shares.items():
        assert share.keys() == subscribed[member] & partitions.keys()


@given(_wanted, _partitions)
def test_equal_members_get_equal_assignments(
    subscribed: dict[str, frozenset[UUID]], partitions: dict[UUID, int]
) -> None:
    backwards = dict(reversed(subscribed.items()))
    assert assign_partitions(subscribed, partitions) == assign_partitions(backwards, partitions)


def test_topics_of_one_partition_are_spread_over_the_members() -> None:
    subscribed = {name: frozenset(TOPICS) for name in "abcd"}
    shares = assign_partitions(subscribed, dict.fromkeys(TOPICS, 1))
    # With more members than partitions, all partitions are in use by several members.
    assert all(len(share) == len(TOPICS) for share in shares.values())
    assert assign_partitions({}, {TOPICS[0]: 3}) == {}
    assert assign_partitions({"a": frozenset()}, {TOPICS[0]: 3}) == {"a": {}}
