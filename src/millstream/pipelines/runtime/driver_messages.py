"""What the broker and the driver of its pipelines say to each other: lines of JSON through the driver's pipes."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.broker.pipelines.report_board import PipelineReport
from millstream.core.pipeline import Pipeline

DRIVER_CLIENT: Final = "pipelines-node-"
"""How the client ids of drivers begin; the id of the node follows."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker says when it starts the process."""

    kafka: str
    node: int
    lake: str
    folder: str
    master: str
    memory: str
    spark: dict[str, str]
    log: str
    """The file that takes what Spark writes."""
    log_level: str
    log_format: str


class Wanted(msgspec.Struct, frozen=True):
    """A pipeline that is to run."""

    pipeline: Pipeline
    attempt: int = 0
    """Another number means to begin anew with one that was parked."""
    is_suspect: bool = False
    """It was under way when a driver died, so it runs beside no other that was."""


class DriverCommand(msgspec.Struct, frozen=True):
    """A line from the broker: everything that is to run now."""

    wanted: list[Wanted]


class DriverEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line to the broker: how everything goes, or that a step of a pipeline has begun or ended."""

    reports: list[PipelineReport] | None = None
    begun: str = ""
    ended: str = ""
    is_well: bool = False
    """Whether the step that ended went well."""
    failed: str = ""
    """Why the driver cannot work at all, or has to be replaced."""
    stuck: str = ""
    """The pipeline because of which it has to be replaced, if there is one."""
