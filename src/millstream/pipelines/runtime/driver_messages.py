"""Messages between the broker and its pipeline driver: JSON lines through the driver's pipes."""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from millstream.broker.pipelines.report_board import PipelineReport
from millstream.core.pipeline import Pipeline

DRIVER_CLIENT: Final = "pipelines-node-"
"""The prefix of drivers' client ids; the node id follows."""
SPARK_VARIABLE: Final = "_MILLSTREAM_SPARK"
"""Holds the settings of Spark, which may have credentials: the arguments of a process are seen by every user."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's options for the process."""

    kafka: str
    node: int
    authorizes: bool = False
    """Whether pipelines have to act with the rights of their owners."""
    lake: str
    folder: str
    master: str
    memory: str
    spark: dict[str, str]
    log: str
    """The file of Spark's output."""
    is_spare: bool = False
    """Whether it has nothing to run yet, so that there is time to prepare."""
    log_level: str
    log_format: str

    @property
    def argument(self) -> str:
        """The options as the driver is given them on its command line."""
        return msgspec.json.encode(msgspec.structs.replace(self, spark={})).decode()

    @property
    def environment(self) -> dict[str, str]:
        """The rest of them, for the driver's environment."""
        return {SPARK_VARIABLE: msgspec.json.encode(self.spark).decode()}

    @classmethod
    def take(cls) -> Options:
        """Take over the options of this process, and remove what its own children need not know."""
        options = msgspec.json.decode(sys.argv[1], type=cls)
        spark = msgspec.json.decode(os.environ.pop(SPARK_VARIABLE, "{}"), type=dict[str, str])
        return msgspec.structs.replace(options, spark=spark)


class Wanted(msgspec.Struct, frozen=True):
    """A pipeline to run."""

    pipeline: Pipeline
    attempt: int = 0
    """A changed number restarts a parked pipeline."""
    is_suspect: bool = False
    """Whether it was running when a driver died, so that it never runs beside another suspect."""


class DriverCommand(msgspec.Struct, frozen=True):
    """A line from the broker: every pipeline to run."""

    wanted: list[Wanted]


class DriverEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line to the broker: reports, or the start or end of a pipeline's step."""

    reports: list[PipelineReport] | None = None
    begun: str = ""
    ended: str = ""
    is_well: bool = False
    """Whether the step that ended succeeded."""
    failed: str = ""
    """Why the driver cannot work, or has to be replaced."""
    stuck: str = ""
    """The pipeline that caused it, if there is one."""
