from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from millstream.core.log_format import set_up_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, own = logging.getLogger(), logging.getLogger("millstream")
    before = root.handlers[:], root.level, own.level
    yield io.StringIO()
    root.handlers[:], root.level, own.level = before[0], before[1], before[2]


def test_text_lines_are_human_readable(stream: io.StringIO) -> None:
    set_up_logging("info", "text", stream=stream)
    logging.getLogger("millstream.x").info(
        "topic created", extra={"topic": "orders", "note": 'two "words"', "empty": ""}
    )
    line = stream.getvalue()
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info    topic created topic=orders note="two \\"words\\"" empty=""\n',
        line,
    )


def test_a_field_with_a_line_break_stays_on_its_line(stream: io.StringIO) -> None:
    set_up_logging("info", "text", stream=stream)
    logging.getLogger("millstream.x").info("said", extra={"what": "one\ntwo"})
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_names_that_clients_choose_do_not_control_a_terminal(stream: io.StringIO, line_format: str) -> None:
    set_up_logging("info", line_format, stream=stream)
    name = "\x1b]0;title\x07\x1b[2J\x08\x9b\u202e\u2028é\U000e0001"
    logging.getLogger("millstream.x").info("authentication failed", extra={"user": name, "spaced": f"a {name}"})
    line = stream.getvalue()
    assert line.removesuffix("\n").isprintable()
    assert "é" in line
    if line_format == "json":
        assert json.loads(line)["user"] == name


def test_json_lines_are_for_machines(stream: io.StringIO) -> None:
    set_up_logging("info", "json", stream=stream)
    logging.getLogger("millstream.x").warning("disk %s", "full", extra={"free": 0, "level": "hidden", "path": io})
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("path").startswith("<module")
    assert line == {"level": "warning", "logger": "millstream.x", "message": "disk full", "free": 0}


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_tracebacks_are_kept(stream: io.StringIO, line_format: str) -> None:
    set_up_logging("info", line_format, stream=stream)
    try:
        raise ValueError("inner cause")
    except ValueError:
        logging.getLogger("millstream.x").exception("it failed")
    assert "ValueError: inner cause" in stream.getvalue()
    assert (stream.getvalue().count("\n") == 1) == (line_format == "json")


def test_the_level_applies_to_our_own_loggers(stream: io.StringIO) -> None:
    set_up_logging("debug", "text", stream=stream)
    logging.getLogger("millstream.x").debug("ours")
    logging.getLogger("library").info("theirs")
    logging.getLogger("library").warning("their warning")
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 3)[-1].strip() for line in lines] == ["ours", "their warning"]


def test_a_second_setup_replaces_the_first(stream: io.StringIO) -> None:
    set_up_logging("info", "text", stream=stream)
    set_up_logging("info", "text", stream=stream)
    logging.getLogger("millstream.x").info("once")
    assert stream.getvalue().count("once") == 1
