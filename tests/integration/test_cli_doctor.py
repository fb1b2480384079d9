from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import millstream
from millstream_testing.command import CommandLine, call_command
from millstream_testing.server import Server

StartServer = Callable[..., Server]


def found(document: Any, check: str) -> list[tuple[str, str]]:
    return [(finding["severity"], finding["detail"]) for finding in document["findings"] if finding["check"] == check]


def test_a_broker_and_its_folder_are_checked_running_and_failed(start_server: StartServer) -> None:
    server = start_server()
    millstream = CommandLine(server.kafka)
    millstream("topic", "create", "watched")
    for number in range(3):
        millstream("publish", "watched", number)

    running = millstream("doctor", "--json")
    assert (running.code, running.document["healthy"]) == (0, True)
    assert {finding["severity"] for finding in running.document["findings"] if finding["check"] != "space"} == {"ok"}
    assert found(running.document, "space")[0][1].startswith("node 1: ")

    folder = ["doctor", "--json", "--data", str(server.data)]
    used = call_command(folder)
    assert used.code == 0
    assert found(used.document, "lock") == [("ok", "a broker is using the folder")]
    assert found(used.document, "segments")[0][0] == "ok"
    both = millstream("doctor", "--json", "--data", str(server.data), "--brokers", server.kafka)
    assert {finding["severity"] for finding in both.document["findings"] if finding["check"] != "space"} == {"ok"}

    server.stop()
    clean = call_command(folder)
    assert clean.code == 0
    assert found(clean.document, "last stop") == [("ok", "clean")]
    assert found(clean.document, "segments")[0][0] == "ok"

    segment = damaged_segment(server.data, millstream)
    harmed = call_command(folder)
    assert (harmed.code, harmed.document["healthy"]) == (1, False)
    assert "watched-0: offsets 1 to 1 are damaged" in found(harmed.document, "segments")[0][1]
    assert str(segment) in found(harmed.document, "segments")[0][1]
    reported = call_command(["doctor", "--data", str(server.data)])
    assert "PROBLEM  segments: watched-0: offsets 1 to 1 are damaged" in reported.out
    assert "         -> the other offsets are intact" in reported.out
    assert reported.lines[-1] == "1 problem found."

    quick = call_command([*folder, "--quick"])
    assert quick.code == 0
    silent = millstream("doctor", "--timeout", 1, "--json")
    assert silent.code == 4
    assert found(silent.document, "broker")[0][0] == "problem"
    (finding,) = (finding for finding in silent.document["findings"] if finding["check"] == "broker")
    assert "millstream serve" not in finding["detail"]
    assert "millstream serve" in finding["advice"]


def test_an_embedded_broker_without_a_gateway_is_healthy(millstream_broker: millstream.Sandbox) -> None:
    checked = CommandLine(millstream_broker.address)("doctor", "--json")
    assert (checked.code, checked.document["healthy"]) == (0, True)
    assert found(checked.document, "http") == [("ok", "a broker inside a program, without a gateway")]


def damaged_segment(data: Path, millstream: CommandLine) -> Path:
    """Flip a bit in the second of three batches of equal size."""
    (segment,) = [path for path in (data / "partitions").glob("*/0/*.log") if path.stat().st_size in range(100, 400)]
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(bytes(content))
    return segment


def test_a_folder_without_data_is_not_found(tmp_path: Path) -> None:
    missing = call_command(["doctor", "--data", str(tmp_path / "missing")])
    assert missing.code == 3
    assert "there is no folder" in missing.out
    empty = call_command(["doctor", "--data", str(tmp_path)])
    assert empty.code == 3
    assert "is not a data folder" in empty.out
