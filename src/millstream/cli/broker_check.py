"""Checks of a running broker: that it answers, that it is ready, and that its parts are well."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from millstream import __version__
from millstream.cli.connection import CLIENT_ID
from millstream.cli.exit_code import ExitCode
from millstream.cli.finding import Finding, ok, problem, warning
from millstream.cli.output import counted
from millstream.cli.pipeline_check import check_pipelines
from millstream.client.admin.damage import LostOffsets, lost_of, node_status
from millstream.client.admin.topics import min_in_sync
from millstream.core.errors import BrokerUnreachable, MillstreamError, RequestTimedOut
from millstream.protocol.messages.lean_kio import import_lean_kio
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata

CLOCK_SKEW_MS_MAX = 5_000
SLOW_ANSWER_S = 1.0
_HTTP_S = 5.0
_SHOWN_MAX = 5
_TOPICS_MAX = 1000
"""Topics that lack replicas and are asked about; many more have one and the same reason."""


async def check_broker(brokers: str, timeout_s: float) -> list[Finding]:
    """Ask a broker how it is; a broker that cannot be reached is the one finding then."""
    # What is loaded here takes longer than most answers, and is not the broker's time.
    import_lean_kio()
    started = time.monotonic()
    try:
        async with Client.connect(brokers, client_id=CLIENT_ID, timeout_s=timeout_s) as client:
            metadata = await client.metadata()
            took_s = time.monotonic() - started
            minimums = await min_in_sync(client, sorted({name for name, _ in _lacking(metadata)})[:_TOPICS_MAX])
            findings = [_answered(brokers, took_s), *_led(metadata, minimums)]
            findings += await _status_findings(client, brokers)
    except (BrokerUnreachable, RequestTimedOut):
        advice = "start it with: millstream serve; or say where it runs with --brokers HOST:PORT"
        return [problem("broker", f"no broker answers at {brokers}", advice, ExitCode.UNREACHABLE)]
    except MillstreamError as error:
        return [problem("broker", f"{brokers} answers, but not as it should: {error}", "look at the broker's log")]
    return findings


def _answered(brokers: str, took_s: float) -> Finding:
    detail = f"{brokers} answers in {took_s * 1000:.0f} ms"
    if took_s > SLOW_ANSWER_S:
        return warning("broker", detail, "the machine may be overloaded; look at its processors and its disk")
    return ok("broker", detail)


def _partitions(metadata: ClusterMetadata) -> list[tuple[str, PartitionMetadata]]:
    return [(topic.name, one) for topic in metadata.topics.values() for one in topic.partitions.values()]


def _lacking(metadata: ClusterMetadata) -> list[tuple[str, PartitionMetadata]]:
    """The partitions of which not every replica is in sync."""
    return [(name, one) for name, one in _partitions(metadata) if len(one.in_sync) < len(one.replicas)]


def _led(metadata: ClusterMetadata, minimums: Mapping[str, int]) -> Iterator[Finding]:
    """Whether partitions have what they need; `minimums` tells how many replicas of a topic must be in sync."""
    partitions, lacking = _partitions(metadata), _lacking(metadata)
    orphans = [each for each in partitions if each[1].leader_id < 0]
    if orphans:
        yield problem("partitions", f"{_named(orphans)} without a leader", "start the nodes that hold them")
    refusing = [
        (name, one)
        for name, one in lacking
        if one.leader_id >= 0 and len(one.in_sync) < min(minimums.get(name, 1), len(one.replicas))
    ]
    if refusing:
        detail = f"{_named(refusing)} with fewer replicas in sync than min.insync.replicas, so acks=all is refused"
        yield problem("partitions", detail, "start the nodes that are away; millstream cluster status shows them")
    if orphans or refusing:
        return
    if lacking:
        detail = f"{_named(lacking)} with replicas that are not in sync"
        yield warning("partitions", detail, "millstream cluster status shows which nodes are away")
    else:
        yield ok(
            "partitions", f"{counted(len(metadata.topics), 'topic')}, {counted(len(partitions), 'partition')}, all led"
        )


def _named(partitions: list[tuple[str, PartitionMetadata]]) -> str:
    """How many there are, and the first few by name."""
    names = ", ".join(f"{name}-{one.partition}" for name, one in partitions[:_SHOWN_MAX])
    return f"{counted(len(partitions), 'partition')} ({names}{', …' if len(partitions) > _SHOWN_MAX else ''})"


async def _status_findings(client: Client, brokers: str) -> list[Finding]:
    status = await node_status(client)
    if status is None:
        advice = "checks of its inside are left out; if it is a Millstream node, look at its log"
        return [warning("status", f"{brokers} does not tell its status; it may be another kind of broker", advice)]
    damage = _damage(await _lost_of_all(client, status))
    findings = [_version(status), _readiness(status), *_warned(status), *damage, _clock(status)]
    return [*findings, *await check_pipelines(client, status), *_held(status), await _http(status)]


def _version(status: dict[str, Any]) -> Finding:
    if status["version"] != __version__:
        detail = f"the broker runs {status['version']}, this command is {__version__}"
        return warning("version", detail, "install the same version on both sides")
    return ok("version", f"the broker runs {status['version']}, as this command does")


def _readiness(status: dict[str, Any]) -> Finding:
    if status["reasons"]:
        advice = "look at the broker's log; for a full disk, free space or lower the retention of topics"
        return problem("readiness", f"node {status['node_id']} is not ready: {'; '.join(status['reasons'])}", advice)
    return ok("readiness", f"node {status['node_id']} is ready")


def _warned(status: dict[str, Any]) -> Iterator[Finding]:
    for text in status.get("warnings", []):
        yield warning("cluster", text, "millstream cluster status shows the nodes and partitions that are concerned")


async def _lost_of_all(client: Client, status: dict[str, Any]) -> list[tuple[str, LostOffsets]]:
    """What the disks of all nodes lost, each with what to say before it: the node, where there are several."""
    nodes = (await client.metadata([])).nodes
    found: list[tuple[str, LostOffsets]] = []
    for node in sorted(nodes):
        told = status if node == status["node_id"] else await node_status(client, node)
        if told is not None and "damage" in told:
            found += [(f"node {node}: " if len(nodes) > 1 else "", one) for one in lost_of(told)]
    return found


def _damage(lost: list[tuple[str, LostOffsets]]) -> Iterator[Finding]:
    for where, one in lost[:_SHOWN_MAX]:
        found = warning if one.is_repaired else problem
        yield found("damage", f"{where}{one}", one.advice)
    if len(lost) > _SHOWN_MAX:
        advice = "millstream topic describe NAME shows those of a topic"
        yield problem("damage", f"{counted(len(lost) - _SHOWN_MAX, 'more range')} that the disk lost", advice)
    if not lost:
        yield ok("damage", "no offsets are known to be lost")


def _held(status: dict[str, Any]) -> Iterator[Finding]:
    """What is past its retention and waits for somebody who may never come."""
    samples = [one["samples"] for one in status.get("metrics", []) if one["name"] == "millstream_log_held_bytes"]
    held: Counter[str] = Counter()
    for value, labels in (sample for listed in samples for sample in listed):
        held[labels["topic"]] += int(value)
    for topic, size in held.most_common(_SHOWN_MAX):
        detail = f"topic {topic} keeps {size:,} bytes past its retention that are not delivered or not landed yet"
        advice = (
            "millstream pipeline list and millstream subscription list show who stands still; "
            f"they are waited for as long as retention.until.max.ms of {topic} says"
        )
        yield warning("retention", detail, advice)


def _clock(status: dict[str, Any]) -> Finding:
    skew_ms = status["now_ms"] - time.time_ns() // 1_000_000
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        advice = "set both clocks by NTP: retention and reading by time depend on them"
        return warning("clock", f"the broker's clock is {skew_ms / 1000:+.1f} s off from this machine's", advice)
    return ok("clock", "the broker's clock agrees with this machine's")


async def _http(status: dict[str, Any]) -> Finding:
    address = status["http"]
    if not address:
        return ok("http", "a broker inside a program, without a gateway")
    try:
        answer = await asyncio.wait_for(_get(address, "/readyz"), _HTTP_S)
    except (OSError, TimeoutError, ValueError) as error:
        advice = "the broker restarts its gateway by itself; its log says why it ended"
        return problem(
            "http", f"the gateway at http://{address} does not answer: {str(error) or 'no answer in time'}", advice
        )
    if answer not in (200, 503):
        return problem("http", f"the gateway at http://{address} answers with {answer}", "look at the broker's log")
    return ok("http", f"the gateway at http://{address} answers")


async def _get(address: str, path: str) -> int:
    """The status code of one GET, by hand: a client library for one number would slow every start-up down."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/") else 0
    finally:
        writer.close()
