from __future__ import annotations

import os

import pytest

from millstream.cli.output import OutputClosed, counted, print_json, print_line, print_table, sized


def test_a_table_aligns_numbers_to_the_right(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_table(["topic", "messages", "note"], [["orders", 5, None], ["a-longer-name", 12345, "x"]])
    assert capfdbinary.readouterr().out.decode().splitlines() == [
        "TOPIC          MESSAGES  NOTE",
        "orders                5  -",
        "a-longer-name     12345  x",
    ]


def test_wide_characters_take_two_columns(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_table(["user", "mechanisms"], [["李明", "SCRAM"], ["anna", "-"]])
    assert capfdbinary.readouterr().out.decode().splitlines() == ["USER  MECHANISMS", "李明  SCRAM", "anna  -"]


def test_an_empty_table_is_its_header(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_table(["topic", "on"], [])
    print_table(["topic", "on"], [["a", True]])
    assert capfdbinary.readouterr().out == b"TOPIC  ON\nTOPIC  ON\na      yes\n"


def test_json_stays_on_one_line_and_keeps_non_ascii_letters(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_json({"name": "Zoë\n", "n": [1, None]})
    assert capfdbinary.readouterr().out.decode() == '{"name": "Zoë\\n", "n": [1, null]}\n'


def test_text_that_utf8_cannot_encode_is_escaped(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_line("bad \udcff")
    assert capfdbinary.readouterr().out == b"bad \\udcff\n"


def test_a_closed_pipe_is_distinguished_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w", closefd=False) as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(OutputClosed):
            print_line("nobody reads this")
        monkeypatch.undo()
        # The unwritten part is still buffered; redirect it before the file closes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), write_end)
    os.close(write_end)


def test_numbers_are_formatted_for_people() -> None:
    assert counted(1, "message") == "1 message"
    assert counted(2000, "message") == "2,000 messages"
    assert [sized(n) for n in (0, 1023, 1024, 1536 * 1024, 5 * 1024**5)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5120.0 TiB",
    ]


def test_a_name_with_control_characters_does_not_break_a_table(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_table(["group"], [["g\x1b[31m\nX"]])
    assert capfdbinary.readouterr().out == b"GROUP\ng\\x1b[31m\\x0aX\n"
