"""The format of log lines: text for people, or one JSON object for programs.

All code logs with the standard library: a fixed message, and the facts in `extra`, for example `logger.info("topic
created", extra={"topic": name})`. The broker and its HTTP gateway both set up logging here, so their lines look the
same. Logs go to stderr; stdout is for output.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

TEXT = "text"
JSON = "json"

_ROOT = "millstream"
# Attributes that the standard library sets on a record; everything else comes from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEVEL_COLUMN = 7


def set_up_logging(level: str, line_format: str, *, stream: TextIO | None = None, node: int | None = None) -> None:
    """Write log lines to `stream` (stderr), from `level` up; each names the `node` if several nodes write there."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    if node is not None:
        handler.addFilter(lambda record: _name_node(record, node))
    handler.setFormatter(JsonLines() if line_format == JSON else TextLines())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    # Libraries log only problems; the level applies to Millstream's own lines.
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())


def _name_node(record: logging.LogRecord, node: int) -> bool:
    vars(record).setdefault("node", node)
    return True


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00.123 info    topic created topic=orders partitions=3`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a traceback follows on separate lines."""
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{seconds}.{int(record.msecs):03d} {record.levelname.lower():<{_LEVEL_COLUMN}} {record.getMessage()}"
        for name, value in facts(record).items():
            line += f" {name}={_readable(value)}"
        return _without_controls(line + self._traceback(record), allowed="\n\t")

    def _traceback(self, record: logging.LogRecord) -> str:
        return "\n" + self.formatException(record.exc_info) if record.exc_info else ""


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the facts, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A fact never overwrites a fixed field."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in facts(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _without_controls(json.dumps(line, default=str, ensure_ascii=False))


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the caller's `extra`, in order."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _without_controls(line: str, allowed: str = "") -> str:
    """Escape characters that control a terminal or reorder text: clients choose names that are logged."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c in allowed else json.dumps(c)[1:-1] for c in line)


def _readable(value: Any) -> str:
    text = str(value)
    # Quotes keep a value with spaces together, and escapes keep it on one line.
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
