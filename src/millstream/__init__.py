"""One log. Kafka clients stream it, workers acknowledge it message by message, Spark reads it as a table."""

__version__ = "0.1.0"
