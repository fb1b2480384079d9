"""A session of a Spark Connect server, without the packages for it."""

from __future__ import annotations

import sys

import pytest

from millstream.core.errors import MillstreamError
from millstream.spark.session import session


def test_missing_packages_of_spark_connect_are_named_with_their_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(
        MillstreamError, match=r"sc://h:15002 is a Spark Connect server.*pip install 'pyspark\[connect\]'"
    ):
        session(master="sc://h:15002")
