"""The table of pipeline kinds."""

from __future__ import annotations

from importlib import import_module

import pytest

from millstream.core.pipeline import SETTINGS, PipelineKind
from millstream.pipelines.jobs.kinds import LazyJobKind


@pytest.mark.parametrize("kind", PipelineKind)
def test_every_kind_has_settings_and_a_job(kind: PipelineKind) -> None:
    assert kind in SETTINGS
    assert callable(import_module(LazyJobKind(kind).module).JOB)
