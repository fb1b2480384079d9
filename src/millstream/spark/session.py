"""`millstream.spark.session.session()`: a Spark session that is ready for topics."""

from millstream.pipelines.source.session import session as session
