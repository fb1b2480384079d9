"""Files removed or changed while the broker was stopped: every interface reports what is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from millstream import check_receipts, connect_sync
from millstream_testing.command import CommandLine, call_command
from millstream_testing.server import Server

StartServer = Callable[..., Server]


def segments(data: Path, topic_id: str) -> list[Path]:
    return sorted((data / "partitions" / topic_id / "0").glob("*.log"))


def details(document: Any, check: str) -> list[str]:
    return [finding["detail"] for finding in document["findings"] if finding["check"] == check]


def test_removed_segments_are_reported_and_the_rest_is_served(start_server: StartServer) -> None:
    server = start_server()
    millstream = CommandLine(server.kafka)
    settings = ("--set", "segment.bytes=1048576")
    topic_id = millstream("topic", "create", "harmed", *settings, "--json").document["id"]
    for number in range(9):
        millstream("publish", "harmed", f"{number}{'.' * 400_000}")
    server.stop()
    first, *_, active = segments(server.data, topic_id)
    end_of_first, start_of_active = int(segments(server.data, topic_id)[1].stem), int(active.stem)
    first.unlink()
    active.unlink()

    stopped = call_command(["doctor", "--json", "--data", str(server.data)])
    assert stopped.code == 1
    reported = [f"harmed-0: offsets 0 to {end_of_first - 1}", f"harmed-0: offsets {start_of_active} to 8"]
    assert [detail.partition(" are missing")[0] for detail in details(stopped.document, "segments")[:-1]] == reported

    server.start()
    lost = [f"harmed-0: the disk lost the offsets 0 to {end_of_first - 1}"]
    lost += [f"harmed-0: the disk lost the offsets {start_of_active} to 8"]
    running = millstream("doctor", "--json")
    assert (running.code, details(running.document, "damage")) == (1, lost)
    (partition,) = millstream("topic", "describe", "harmed", "--json").document["partitions"]
    assert partition["damage"] == [{"start": 0, "end": end_of_first}, {"start": start_of_active, "end": 9}]
    assert f"DAMAGED  {lost[0]}" in millstream("topic", "describe", "harmed").out
    assert "\nmillstream_log_damaged_ranges 2.0\n" in server.metrics()

    millstream("publish", "harmed", "after")
    shown = millstream("tail", "harmed", "--from", "start", "--json")
    assert shown.code == 1
    assert [document["offset"] for document in shown.documents] == [*range(end_of_first, start_of_active), 9]
    assert f"{lost[0]}; continuing at {end_of_first}" in shown.err
    assert f"--to {end_of_first}" in shown.err
    assert "not everything could be shown" in shown.err
    # The console skips it, too, from a position on and from the end.
    for query in ("from=start", ""):
        page = httpx.get(f"http://{server.http}/console/topics/harmed/messages?{query}", timeout=60).text
        offsets = {int(offset) for offset in re.findall(r"/topics/harmed/messages/0/(\d+)", page)}
        assert offsets == {*range(end_of_first, start_of_active), 9}, page
        assert lost[0].partition(": ")[2] in page
    result = millstream("message", "show", "harmed", 0, 0)
    assert (result.code, lost[0] in result.err) == (3, True)
    assert server.stop() == 0


def overwrite_first_batch(data: Path, topic_id: str) -> None:
    """Change three bytes in the middle of the first batch of partition 0."""
    with segments(data, topic_id)[0].open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff\xff")


def test_the_first_reader_of_damage_waits_until_its_extent_is_known(start_server: StartServer, tmp_path: Path) -> None:
    """Each topic is read by one interface first, while the broker does not know yet what is lost."""
    server = start_server()
    millstream = CommandLine(server.kafka)
    topics = ("tail", "follow", "events", "console", "show", "trace", "book")
    ids = {name: millstream("topic", "create", name, "--json").document["id"] for name in topics}
    book = tmp_path / "receipts.jsonl"
    with connect_sync(server.kafka) as ms, connect_sync(server.kafka, receipts=book) as receipted:
        for name in topics:
            by = receipted if name == "book" else ms
            by.publish_many(name, [f"{number}{'.' * 400}" for number in range(60)])
            by.publish(name, b"after", id="known")
    server.stop()
    for topic_id in ids.values():
        overwrite_first_batch(server.data, topic_id)
    server.start()

    def lost(name: str) -> str:
        return f"{name}-0: the disk lost the offsets 0 to 59"

    shown = millstream("tail", "tail", "--json")
    assert [document["offset"] for document in shown.documents] == [60], shown.err
    assert (shown.code, shown.err.count(f"{lost('tail')}; continuing at 60")) == (1, 1), shown.err
    followed = millstream("tail", "follow", "--from", "start", "--follow", "-n", "1", "--json")
    assert [document["offset"] for document in followed.documents] == [60], followed.err
    page = httpx.get(f"http://{server.http}/console/topics/console/messages?from=start", timeout=60).text
    assert "/topics/console/messages/0/60" in page
    assert lost("console").partition(": ")[2] in page
    with httpx.stream("GET", f"http://{server.http}/v1/topics/events/events?from=start", timeout=60) as events:
        note, message = islice((line for line in events.iter_lines() if line.startswith("data:")), 2)
        assert lost("events") in note
        assert '"offset":60' in message
    result = millstream("message", "show", "show", 0, 0)
    assert (result.code, lost("show") in result.err) == (3, True), result.err
    traced = millstream("message", "trace", "known", "--topic", "trace", "--since", "start")
    assert (traced.code, f"{lost('trace')}, so they are not searched" in traced.err) == (0, True), traced.err
    findings = asyncio.run(check_receipts(server.kafka, book))
    assert [(finding.receipt.offset, finding.kind) for finding in findings] == [
        (offset, "missing") for offset in range(60)
    ]
