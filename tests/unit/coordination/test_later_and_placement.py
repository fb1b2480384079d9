from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.coordination.runtime import java_hash, partition_for
from millstream.broker.coordination.state_machine import Deferred
from millstream.core.errors import NotCoordinator


def test_the_first_response_counts() -> None:
    later: Deferred[int] = Deferred()
    reported: list[int] = []
    later.listen(lambda completed: reported.append(completed.result()))

    later.resolve(1)
    later.resolve(2)
    later.refuse(NotCoordinator("too late"))

    assert reported == [1]
    assert later.completed
    assert later.error is None


def test_a_late_listener_is_notified_at_once() -> None:
    later: Deferred[int] = Deferred()
    later.refuse(NotCoordinator("moved"))
    reported: list[Deferred[int]] = []

    later.listen(reported.append)

    assert reported == [later]
    with pytest.raises(NotCoordinator):
        later.result()


# Well-known values of Java's String.hashCode; the last one is two UTF-16 units: 31 * 0xD83D + 0xDE00.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("Aa", 2112),
        ("BB", 2112),
        ("polygenelubricants", -(2**31)),
        ("😀", 1772899),
    ],
)
def test_java_hash(text: str, expected: int) -> None:
    assert java_hash(text) == expected


def test_the_hash_without_an_absolute_value_maps_to_partition_0() -> None:
    assert partition_for("polygenelubricants", 50) == 0


@given(st.text(), st.integers(1, 1000))
def test_every_name_has_a_partition(name: str, partitions: int) -> None:
    assert 0 <= partition_for(name, partitions) < partitions
