from __future__ import annotations

from uuid import UUID

import pytest

from millstream.cli.message_text import as_text
from millstream.client.admin.messages import as_document
from millstream.core.ids import Offset, message_id
from millstream.protocol.records.record import Headers, Record

TOPIC_ID = UUID(int=1)


def record(value: bytes | None, *, key: bytes | None = None, headers: Headers = (), timestamp_ms: int = 0) -> Record:
    return Record(Offset(7), timestamp_ms, key, value, headers)


def test_the_id_is_the_publishers_or_else_the_position() -> None:
    assert message_id(TOPIC_ID, 2, 7, ()) == "00000000-0000-0000-0000-000000000001/2/7"
    assert message_id(TOPIC_ID, 2, 7, (("a", b"b"), ("message-id", b"mine"))) == "mine"
    assert message_id(TOPIC_ID, 2, 7, (("message-id", None),)).endswith("/2/7")
    assert message_id(TOPIC_ID, 2, 7, (("message-id", b"\xff"),)) == "�"


def test_the_json_document_is_complete() -> None:
    document = as_document("t", TOPIC_ID, 2, record(b"\xff", key=None, headers=(("h", b"v"), ("n", None))))
    assert document == {
        "topic": "t",
        "partition": 2,
        "offset": 7,
        "id": f"{TOPIC_ID}/2/7",
        "timestamp": "1970-01-01T00:00:00.000Z",
        "timestamp_ms": 0,
        "key": None,
        "value": {"base64": "/w=="},
        "headers": [["h", "v"], ["n", None]],
    }


@pytest.mark.parametrize("timestamp_ms", [-1, 2**62])
def test_invalid_timestamps_are_reported_as_such(timestamp_ms: int) -> None:
    assert as_document("t", TOPIC_ID, 0, record(b"", timestamp_ms=timestamp_ms))["timestamp"] is None
    assert "no time" in as_text("t", 0, record(b"", timestamp_ms=timestamp_ms), colour=False, indent=False)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "(null)"),
        (b"", ""),
        (b"text", "text"),
        (b"17", "17"),
        (b'{"a":1}', '{\n  "a": 1\n}'),
        (
            b'{"a":12345678901234567890.12,"b":[1E+5,-0]}',
            '{\n  "a": 12345678901234567890.12,\n  "b": [\n    1E+5,\n    -0\n  ]\n}',
        ),
        (b'["gr\\u00fcn\\n"]', '[\n  "grün\\n"\n]'),
        (b"{not json", "{not json"),
        (b"[" * 9999 + b"]" * 9999, "[" * 9999 + "]" * 9999),
        (b"\xff\x07", "\\xff\\x07"),
        ("grün\ttab".encode(), "grün\ttab"),
    ],
)
def test_values_are_printed_readably(value: bytes | None, shown: str) -> None:
    assert as_text("t", 0, record(value), colour=False, indent=True).split("\n", 1)[1] == shown


def test_json_is_on_one_line_for_scripts() -> None:
    value = b'{\n  "a": ["gr\\u00fcn\\n", 1E+5]\n}'
    assert as_text("t", 0, record(value), colour=False, indent=False).splitlines()[1:] == ['{"a": ["grün\\n", 1E+5]}']


def test_metadata_is_printed_above_and_may_be_dimmed() -> None:
    text = as_text("t", 3, record(b"v", key=b"k", headers=(("h", None),)), colour=True, indent=False)
    assert text.startswith("\x1b[2mt/3@7  19")
    assert text.endswith("  key=k  h=(null)\x1b[0m\nv")
