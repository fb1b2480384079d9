"""`millstream.spark.bulk.records()`: bulk jobs over topics that need no SQL."""

from millstream.pipelines.source.bulk import records as records
