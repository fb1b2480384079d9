"""Finished topics leave no files when their batch fails before any commit was attempted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest

from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.land.inference import NewFields
from millstream.pipelines.jobs.land.job import LandJob
from millstream.pipelines.jobs.land.sources import PartitionPlan, Source
from millstream.pipelines.jobs.land.task import Report
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable
from millstream_testing.lake_rows import TOPIC, delta_rows, once, rows, write, write_quarantine
from millstream_testing.pipeline_script import landing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def job() -> Iterator[LandJob]:
    made = LandJob(landing(), JobContext(spark=cast("SparkSession", None), brokers="", lake="", folder=""))
    yield made
    made.close()


def batch_of(topic: str, lake: Path) -> TopicBatch:
    source = Source(topic=topic, topic_id=TOPIC, first={0: 0}, end={0: 5})
    table = LakeTable(Storage.at(str(lake / topic)))
    return TopicBatch(source=source, table=table, plans={0: PartitionPlan(None, 0, 5)}, fields=pa.schema([]))


def report_of(batch: TopicBatch) -> Report:
    files = tuple(write(batch.table, [rows(0, range(4))]))
    return Report(topic=batch.topic, rows=5, files=files, quarantined=tuple(write_quarantine(batch.table, 0, [4])))


def test_topics_of_an_earlier_round_leave_no_files_when_a_later_one_fails(
    job: LandJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, growing = batch_of("done", tmp_path), batch_of("growing", tmp_path)
    new_fields = NewFields(0, 3, pa.schema([("x", pa.int64())]))
    rounds = []

    def reports(waiting: Sequence[TopicBatch], landed: datetime) -> list[Report]:
        rounds.append([batch.topic for batch in waiting])
        if len(rounds) > 1:
            raise OSError("away")
        return [report_of(done), Report(topic="growing", rows=5, new_fields=(new_fields,))]

    monkeypatch.setattr(job, "_reports", reports)
    with pytest.raises(OSError, match="away"):
        job._prepare([done, growing])
    assert rounds == [["done", "growing"], ["growing"]]
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_failure_is_reported_even_if_files_cannot_be_deleted(
    job: LandJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = batch_of("done", tmp_path)
    done.reports.append(report_of(done))

    def fail(*_given: object) -> None:
        raise RuntimeError("another failure")

    def lose(_batches: object) -> None:
        raise OSError("away")

    monkeypatch.setattr(LakeTable, "discard", fail)
    monkeypatch.setattr(job, "_run", lose)
    with pytest.raises(OSError, match="away"):
        job._prepare([done])


def test_a_recreated_topic_leaves_no_files_and_the_others_are_committed(
    job: LandJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, remade = batch_of("same", tmp_path), batch_of("remade", tmp_path)
    for batch in (same, remade):
        batch.reports.append(report_of(batch))
    monkeypatch.setattr(job._sources, "ids", lambda topics: {"same": TOPIC, "remade": "another"})
    assert job._commit([same, remade]) == [same]
    assert delta_rows(Storage.at(str(tmp_path / "same"))) == once(0, range(4))
    assert not list((tmp_path / "remade").rglob("*.parquet"))
    assert not list((tmp_path / "remade__quarantine").rglob("*.parquet"))


def test_no_files_stay_when_the_topics_cannot_be_listed(
    job: LandJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of("orders", tmp_path)
    batch.reports.append(report_of(batch))

    def away(_topics: object) -> dict[str, str]:
        raise ConnectionError("away")

    monkeypatch.setattr(job._sources, "ids", away)
    with pytest.raises(ConnectionError, match="away"):
        job._commit([batch])
    assert not list(tmp_path.rglob("*.parquet"))
