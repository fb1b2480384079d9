"""The agreed state of one partition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import CorruptState
from millstream.core.ids import Epoch, NodeId
from millstream.core.partition_state import NO_LEADER, PartitionState, encode_value
from millstream_testing.state_log import single_replica_state

NODES = st.lists(st.integers(0, 2**31 - 1).map(NodeId), min_size=1, max_size=5, unique=True)


@given(NODES, st.data())
def test_a_state_round_trips(replicas: list[NodeId], data: st.DataObject) -> None:
    state = PartitionState(
        replicas=tuple(replicas),
        leader=data.draw(st.sampled_from([*replicas, NO_LEADER])),
        leader_epoch=Epoch(data.draw(st.integers(0, 2**31 - 1))),
        in_sync=tuple(data.draw(st.lists(st.sampled_from(replicas), unique=True))),
        eligible=tuple(data.draw(st.lists(st.sampled_from(replicas), unique=True))),
    )
    assert PartitionState.from_json(encode_value(state)) == state


def test_an_election_raises_the_epoch_even_if_the_leader_stays() -> None:
    state = single_replica_state(NodeId(7))
    assert state.elected(NodeId(7)).leader_epoch == state.leader_epoch + 1
    assert not state.elected(NO_LEADER).has_leader


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"replicas": 1}', '{"replicas": ["x"], "leader": 1}'])
def test_an_invalid_state_is_refused_with_its_content(text: str) -> None:
    with pytest.raises(CorruptState, match="cannot be read"):
        PartitionState.from_json(text)
