"""`format("millstream")`: topics as DataFrames, read and written, in batches and streams.

Spark imports this module to list the available formats, and finds none at all if that fails, so heavy or optional
modules are imported when a query needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from millstream.pipelines.source.spark_errors import without_traceback

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )


class MillstreamSource(DataSource):
    """The data source; Spark creates one per query."""

    _is_planned = False

    def __getstate__(self) -> dict[str, Any]:
        """Omit secrets from the pickled source, which Spark sends to tasks once a reader exists."""
        if not self._is_planned:
            return dict(self.__dict__)
        from millstream.pipelines.source.access import SECRET_OPTIONS

        public_options = {name: text for name, text in self.options.items() if name.lower() not in SECRET_OPTIONS}
        return {**self.__dict__, "options": public_options}

    @classmethod
    def name(cls) -> str:
        return "millstream"

    @without_traceback
    def schema(self) -> StructType:
        """Return the columns of a query that selects none."""
        from millstream.pipelines.source.options import read_options
        from millstream.pipelines.source.shape import default_schema
        from millstream.pipelines.source.sql_table import declared_options, of_reading, with_options

        declared = declared_options(self.options)
        if declared is None:
            return default_schema(read_options(self.options))
        return with_options(default_schema(read_options(of_reading(declared))), declared)

    @without_traceback
    def reader(self, schema: StructType) -> DataSourceReader:
        from millstream.pipelines.source.options import read_options
        from millstream.pipelines.source.reader import TopicReader
        from millstream.pipelines.source.shape import shape_of
        from millstream.pipelines.source.sql_table import options_to_read

        options = read_options(options_to_read(schema, self.options))
        _check_filter(options.filter)
        self._is_planned = True
        return TopicReader(options, shape_of(schema, options))

    @without_traceback
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from millstream.pipelines.source.options import read_options, refuse_ending
        from millstream.pipelines.source.reader import TopicStreamReader
        from millstream.pipelines.source.shape import shape_of
        from millstream.pipelines.source.sql_table import options_to_read

        reader_options = options_to_read(schema, self.options)
        refuse_ending(reader_options)
        options = read_options(reader_options)
        _check_filter(options.filter)
        self._is_planned = True
        return TopicStreamReader(options, shape_of(schema, options))

    @without_traceback
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from millstream.core.errors import InvalidSetting
        from millstream.pipelines.source.options import write_options
        from millstream.pipelines.source.sql_table import ASSIGNED_BY_BROKER, options_to_insert
        from millstream.pipelines.source.target_topic import check_target
        from millstream.pipelines.source.writer import TopicWriter, check_columns

        if overwrite:
            raise InvalidSetting("a topic cannot be overwritten; write with mode('append'), or INSERT INTO")
        inserted = options_to_insert(schema, self.options)
        options = write_options(self.options if inserted is None else inserted)
        left_out = () if inserted is None else ASSIGNED_BY_BROKER
        check_columns(StructType([field for field in schema.fields if field.name not in left_out]), options)
        check_target(options)
        return TopicWriter(options, left_out=left_out)

    @without_traceback
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from millstream.core.heap import freeze_worker_heap
        from millstream.pipelines.source.options import write_options
        from millstream.pipelines.source.target_topic import STREAM_PATIENCE_S, check_target
        from millstream.pipelines.source.writer import TopicStreamWriter, check_columns

        options = write_options(self.options)
        check_columns(schema, options)
        check_target(options, STREAM_PATIENCE_S)
        freeze_worker_heap()
        return TopicStreamWriter(options)


def register(spark: SparkSession) -> None:
    """Register the format with a session that does not discover it."""
    spark.dataSource.register(MillstreamSource)


def _check_filter(text: str) -> None:
    """Raise for a filter that no task could use."""
    if text:
        from millstream.protocol.filter.filter import compile_filter

        compile_filter(text)
