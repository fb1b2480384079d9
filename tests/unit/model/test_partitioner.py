from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2 as independent_murmur2
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.topic import murmur2, partition_for_key


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hashes_are_those_of_the_java_client(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed % 2**32


@given(st.binary(max_size=64))
def test_an_independent_implementation_agrees(key: bytes) -> None:
    assert murmur2(key) & 0x7FFFFFFF == independent_murmur2(key) & 0x7FFFFFFF


@given(st.binary(max_size=64), st.integers(1, 1000))
def test_every_key_has_a_partition(key: bytes, partitions: int) -> None:
    assert 0 <= partition_for_key(key, partitions) < partitions
