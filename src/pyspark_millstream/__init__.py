"""Spark looks for packages of this kind of name, and finds `format("millstream")` here without registration."""

from millstream.spark.source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
