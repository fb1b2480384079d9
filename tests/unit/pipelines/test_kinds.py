"""The table of pipeline kinds."""

from __future__ import annotations

from importlib import import_module

import pytest

from millstream.core.pipeline import SETTINGS, PipelineKind
from millstream.pipelines.jobs.job import JOBS, LazyJobKind


@pytest.mark.parametrize("kind", JOBS)
def test_every_kind_has_settings_and_a_job(kind: PipelineKind) -> None:
    assert callable(import_module(LazyJobKind(kind).module).JOB)


def test_only_user_jobs_are_not_run_by_the_shared_driver() -> None:
    assert set(PipelineKind) == set(SETTINGS) == {*JOBS, PipelineKind.JOB}
