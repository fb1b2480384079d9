"""Reading the checkpoint of a stream, and when it is discarded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.core.errors import CorruptState
from millstream.pipelines.jobs.transform.job import Ends, StreamCheckpoint, read_offsets


def begin(folder: Path, number: int, *sources: Ends | None) -> None:
    """Write what Spark writes before a batch."""
    lines = ["v1", json.dumps({"batchWatermarkMs": 0})]
    lines += ["-" if source is None else json.dumps(source) for source in sources]
    folder.joinpath("offsets").mkdir(parents=True, exist_ok=True)
    folder.joinpath("offsets", str(number)).write_text("\n".join(lines))
    folder.joinpath("offsets", f".{number}.crc").touch()


def test_a_batch_has_an_end_in_every_topic(tmp_path: Path) -> None:
    begin(tmp_path, 7, {"a": {0: 5, 1: 8}}, None, {"b": {0: 1}})
    # A topic that is read twice.
    begin(tmp_path, 8, {"a": {0: 9, 1: 8}}, {"a": {0: 7, 1: 9}})
    checkpoint = StreamCheckpoint(tmp_path)
    assert checkpoint.ends(7) == {"a": {0: 5, 1: 8}, "b": {0: 1}}
    assert checkpoint.ends(8) == {"a": {0: 7, 1: 8}}
    assert checkpoint.ends(9) == {}


@pytest.mark.parametrize(
    "text", ["", "v1\n", "v9\n{}\n{}", 'v1\n{}\n{"a": 5}', "v1\n{}\nnothing", 'v1\n{}\n{"a": {"x": 1}}']
)
def test_an_unreadable_checkpoint_is_reported(tmp_path: Path, text: str) -> None:
    begin(tmp_path, 0)
    tmp_path.joinpath("offsets", "0").write_text(text)
    with pytest.raises(CorruptState):
        StreamCheckpoint(tmp_path).ends(0)


def test_offsets_are_strings_or_objects() -> None:
    assert read_offsets('{"a": {"0": 5}}') == read_offsets({"a": {"0": 5}}) == {"a": {0: 5}}


@pytest.mark.parametrize(
    ("committed", "is_kept"),
    [
        ({"a": {0: 20}, "other": {0: 1}}, True),
        # The last batch was not committed, and is repeated.
        ({"a": {0: 10}}, True),
        # Another statement has continued, or the group was moved.
        ({"a": {0: 30}}, False),
        ({"a": {0: 15}}, False),
        ({"other": {0: 20}}, False),
        ({}, False),
    ],
)
def test_a_stream_continues_only_at_the_position_of_the_pipeline(
    tmp_path: Path, committed: dict[str, dict[int, int]], is_kept: bool
) -> None:
    folder = tmp_path / "checkpoint"
    for number, offset in enumerate((5, 10, 20)):
        begin(folder, number, {"a": {0: offset}})
    # An older archived checkpoint is deleted.
    begin(tmp_path / "checkpoint.before", 0, {"a": {0: 1}})
    checkpoint = StreamCheckpoint(folder)
    assert checkpoint.archive_unless_at(committed) is not is_kept
    assert folder.exists() is is_kept
    assert StreamCheckpoint(tmp_path / "checkpoint.before").ends(2) == ({} if is_kept else {"a": {0: 20}})
    assert not checkpoint.archive_unless_at(committed)


def test_a_stream_with_fewer_batches_than_were_committed_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for number, offset in enumerate((5, 10)):
        begin(folder, number, {"a": {0: offset}})
    assert StreamCheckpoint(folder).query_id() == ""
    folder.joinpath("metadata").write_text('{"id":"a2f1"}')
    checkpoint = StreamCheckpoint(folder)
    assert checkpoint.query_id() == "a2f1"
    # Batch 2 had no messages, so it ended where batch 1 did.
    assert not checkpoint.archive_unless_at({"a": {0: 10}}, last_batch=1)
    assert checkpoint.archive_unless_at({"a": {0: 10}}, last_batch=2)


def test_a_stream_with_a_truncated_file_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for number, offset in enumerate((5, 10)):
        begin(folder, number, {"a": {0: offset}})
    folder.joinpath("offsets", "1").write_text("v1\n")
    assert StreamCheckpoint(folder).archive_unless_at({"a": {0: 5}})


def test_a_stream_that_did_not_start_has_nothing_to_archive(tmp_path: Path) -> None:
    assert not StreamCheckpoint(tmp_path / "missing").archive_unless_at({"a": {0: 1}})
    tmp_path.joinpath("offsets").mkdir()
    assert not StreamCheckpoint(tmp_path).archive_unless_at({"a": {0: 1}})
