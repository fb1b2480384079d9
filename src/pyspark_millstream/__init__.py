"""Spark looks for packages of this kind of name, and finds `format("millstream")` here without registration."""

from millstream.pipelines.source.source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
