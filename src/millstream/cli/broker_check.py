"""Checks of a running broker: that it responds, is ready, and that its parts are healthy."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from millstream import __version__
from millstream.cli.connection import CLIENT_ID, command_credentials
from millstream.cli.doctor import Finding, check_space, passed, problem, warning
from millstream.cli.exit_code import ExitCode
from millstream.cli.output import counted
from millstream.client.admin.browse import node_summaries
from millstream.client.admin.cluster_status import DamagedOffsets, damage_in, node_status
from millstream.client.admin.mirrors import MirrorClient
from millstream.client.admin.pipelines import PipelineClient, pipeline_warnings
from millstream.client.admin.subscriptions import push_problems
from millstream.client.admin.topics import min_in_sync
from millstream.core.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    MillstreamError,
    NotAuthorized,
    RequestTimedOut,
    UnexpectedServer,
)
from millstream.core.tasks import within
from millstream.protocol.messages.lean_kio import import_lean_kio
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata

_PARKED_METRIC: Final = "millstream_pipeline_parked"


async def check_pipelines(client: Client, status: Mapping[str, Any]) -> list[Finding]:
    """Check all pipelines, if any are declared; `status` is a node's status."""
    if not any(metric["name"] == _PARKED_METRIC for metric in status.get("metrics", [])):
        return []
    try:
        pipelines = await PipelineClient(client).describe()
    except MillstreamError as error:
        return [warning("pipelines", f"the state of the pipelines is unavailable: {error}", "see the broker's log")]
    return findings_of(pipelines, now_ms=time.time() * 1000)


def findings_of(pipelines: Sequence[Mapping[str, Any]], *, now_ms: float) -> list[Finding]:
    findings = [
        warning("pipelines", pipeline_warning.text, pipeline_warning.advice)
        for pipeline_warning in pipeline_warnings(pipelines, now_ms=now_ms)
    ]
    return findings or [passed("pipelines", f"{counted(len(pipelines), 'pipeline')}, all healthy")]


async def check_mirrors(client: Client) -> list[Finding]:
    try:
        mirrors = await MirrorClient(client).describe()
    except MillstreamError as error:
        return [warning("mirrors", f"the state of the mirrors is unavailable: {error}", "see the broker's log")]
    failing = [
        warning(
            "mirrors",
            f"mirror {mirror['mirror']} is {mirror['state']}: {mirror['error']}",
            ("" if mirror["interrupted"] else "check its source; ")
            + f"millstream mirror describe {mirror['mirror']} shows its copies",
        )
        for mirror in mirrors
        if mirror["error"]
    ]
    return failing or ([passed("mirrors", f"{counted(len(mirrors), 'mirror')}, none failing")] if mirrors else [])


async def check_push(client: Client) -> list[Finding]:
    try:
        described = await SubscriptionClient(client).describe(without_silent=True)
    except MillstreamError as error:
        return [warning("push", f"the state of push is unavailable: {error}", "see the broker's log")]
    failing = [
        warning("push", text.rstrip("."), f"millstream subscription describe {name} shows its state on every node")
        for name, text in push_problems(described)
    ]
    pushed = sum(bool(partition.get("push")) for partition in described)
    return failing or ([passed("push", f"{counted(pushed, 'endpoint')}, none failing")] if pushed else [])


CLOCK_SKEW_MS_MAX = 5_000

SLOW_RESPONSE_S = 1.0

_HTTP_S = 5.0

_SHOWN_MAX = 5

_TOPICS_MAX = 1000
"""The number of topics with missing replicas that are looked up; many more have the same cause."""


async def check_broker(brokers: str, timeout_s: float) -> list[Finding]:
    """Check a broker; an unreachable one is the only finding."""
    # Loading this takes longer than most responses, and must not count as the broker's time.
    import_lean_kio()
    started = time.monotonic()
    try:
        connecting = Client.connect(
            brokers,
            client_id=CLIENT_ID,
            timeout_s=timeout_s,
            credentials=command_credentials(),
            advice="",
        )
        async with connecting as client:
            metadata = await client.metadata()
            took_s = time.monotonic() - started
            minimums = await min_in_sync(
                client, sorted({name for name, _ in _under_replicated(metadata)})[:_TOPICS_MAX]
            )
            away = _missing_nodes(metadata)
            findings = [_check_response(brokers, took_s), *_check_nodes(away), *_check_leaders(metadata, minimums)]
            findings += await _status_findings(client, brokers)
    except UnexpectedServer as error:
        return [problem("broker", str(error), "check the address and the options for TLS", ExitCode.UNREACHABLE)]
    except (BrokerUnreachable, RequestTimedOut) as error:
        advice = "start it with: millstream serve; or pass its address with --brokers HOST:PORT"
        text = str(error) if isinstance(error, BrokerUnreachable) else f"no broker responds at {brokers}: {error}"
        return [problem("broker", text, advice, ExitCode.UNREACHABLE)]
    except AuthenticationFailed as error:
        advice = "check --user, --password-file, --token-file and --tls-ca, or the profile"
        return [problem("broker", str(error), advice, ExitCode.USAGE)]
    except NotAuthorized as error:
        advice = "sign in as a user with DESCRIBE on the cluster: millstream acl allow USER describe cluster"
        return [problem("broker", str(error), advice)]
    except MillstreamError as error:
        return [problem("broker", f"{brokers} gave an unexpected response: {error}", "see the broker's log")]
    return findings


def _check_response(brokers: str, took_s: float) -> Finding:
    detail = f"{brokers} responds in {took_s * 1000:.0f} ms"
    if took_s > SLOW_RESPONSE_S:
        return warning("broker", detail, "the machine may be overloaded; check its CPU and its disk")
    return passed("broker", detail)


def _missing_nodes(metadata: ClusterMetadata) -> list[int]:
    """Return the nodes with replicas that are not in the cluster now."""
    replicas = {node for _, partition in _partitions(metadata) for node in partition.replicas}
    return sorted(int(node) for node in replicas - metadata.nodes.keys())


def _check_nodes(away: list[int]) -> Iterator[Finding]:
    if away:
        names = ", ".join(map(str, away))
        detail = f"node {names} is down" if len(away) == 1 else f"nodes {names} are down"
        them = "it, or move its" if len(away) == 1 else "them, or move their"
        advice = f"start {them} replicas: millstream cluster plan remove NODE"
        yield problem("nodes", detail, advice)


def _partitions(metadata: ClusterMetadata) -> list[tuple[str, PartitionMetadata]]:
    return [(topic.name, partition) for topic in metadata.topics.values() for partition in topic.partitions.values()]


def _under_replicated(metadata: ClusterMetadata) -> list[tuple[str, PartitionMetadata]]:
    """Return the partitions of which not every replica is in sync."""
    return [
        (name, partition)
        for name, partition in _partitions(metadata)
        if len(partition.in_sync) < len(partition.replicas)
    ]


def _check_leaders(metadata: ClusterMetadata, minimums: Mapping[str, int]) -> Iterator[Finding]:
    """Check that partitions have a leader and enough replicas in sync; `minimums` is `min.insync.replicas` by topic."""
    partitions, lacking = _partitions(metadata), _under_replicated(metadata)
    orphans = [partition for partition in partitions if partition[1].leader_id < 0]
    if orphans:
        yield problem("partitions", f"{_summarize(orphans)} without a leader", "start the nodes that hold them")
    refusing = [
        (name, partition)
        for name, partition in lacking
        if partition.leader_id >= 0 and len(partition.in_sync) < min(minimums.get(name, 1), len(partition.replicas))
    ]
    if refusing:
        detail = f"{_summarize(refusing)} with fewer replicas in sync than min.insync.replicas, so acks=all is refused"
        yield problem("partitions", detail, "start the nodes that are down; millstream cluster status shows them")
    if orphans or refusing:
        return
    if lacking:
        detail = f"{_summarize(lacking)} with replicas that are not in sync"
        yield warning("partitions", detail, "millstream cluster status shows which nodes are down")
    else:
        yield passed(
            "partitions", f"{counted(len(metadata.topics), 'topic')}, {counted(len(partitions), 'partition')}, all led"
        )


def _summarize(partitions: list[tuple[str, PartitionMetadata]]) -> str:
    """Return the count, and the first few names."""
    names = ", ".join(f"{name}-{partition.partition}" for name, partition in partitions[:_SHOWN_MAX])
    return f"{counted(len(partitions), 'partition')} ({names}{', …' if len(partitions) > _SHOWN_MAX else ''})"


async def _status_findings(client: Client, brokers: str) -> list[Finding]:
    status = await node_status(client)
    if status is None:
        advice = "internal checks are skipped; if it is a Millstream node, see its log"
        return [warning("status", f"{brokers} does not report its status; it may not be a Millstream broker", advice)]
    # Before others are asked, which may take a while.
    clock = _check_clock(status)
    statuses = await _statuses(client, status)
    responses = [status for status in statuses.values() if status]
    damage = [*_check_damage(_collect_damage(statuses)), *_refused_letters(responses)]
    findings = [_check_versions(responses), *_check_readiness(statuses), *_check_warnings(responses), *damage, clock]
    space = [
        check_space(node_summary.disk_bytes, node_summary.disk_free_bytes, where=f"node {node_summary.node_id}: ")
        for node_summary in await node_summaries(client)
        if node_summary.disk_bytes
    ]
    declared = [*await check_pipelines(client, status), *await check_mirrors(client), *await check_push(client)]
    node = (await client.metadata([])).nodes.get(status["node_id"])
    http = await _check_http(status, host=brokers.rpartition(":")[0] if node is None else node.host)
    return [*findings, *space, *declared, *_check_retained(responses), http]


def _check_versions(statuses: Iterable[Mapping[str, Any]]) -> Finding:
    for status in statuses:
        if status["version"] != __version__:
            detail = f"node {status['node_id']} runs {status['version']}, this command is {__version__}"
            return warning("version", detail, "install the same version on both sides")
    return passed("version", f"the broker runs {__version__}, as this command does")


def _check_readiness(statuses: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    known: set[str] = set()
    for node, status in statuses.items():
        if not status:
            yield problem("readiness", f"node {node} does not respond", "see its process and its log")
            continue
        # The nodes of a machine report each other.
        reasons = [reason for reason in status["reasons"] if reason not in known]
        known.update(reasons)
        if reasons:
            advice = "see the broker's log; if the disk is full, free space or lower the retention of topics"
            yield problem("readiness", f"node {node} is not ready: {'; '.join(reasons)}", advice)
    if not known and all(statuses.values()):
        names = ", ".join(map(str, statuses))
        yield passed("readiness", f"node {names} is ready" if len(statuses) == 1 else f"nodes {names} are ready")


def _check_warnings(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for text in dict.fromkeys(text for status in statuses for text in status["warnings"]):
        yield warning("cluster", text, "millstream cluster status shows the affected nodes and partitions")


async def _statuses(client: Client, status: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the status of each node; empty for one that gives none."""
    others = sorted((await client.metadata([])).nodes.keys() - {status["node_id"]})
    responses = await asyncio.gather(*(node_status(client, node) for node in others))
    statuses = {
        status["node_id"]: status,
        **{node: response or {} for node, response in zip(others, responses, strict=True)},
    }
    return dict(sorted(statuses.items()))


def _collect_damage(statuses: Mapping[int, dict[str, Any]]) -> list[tuple[str, DamagedOffsets]]:
    """Return the offsets that the disks of all nodes lost, each with a prefix: its node, if there are several."""
    return [
        (f"node {node}: " if len(statuses) > 1 else "", damaged_range)
        for node, status in statuses.items()
        if "damage" in status
        for damaged_range in damage_in(status)
    ]


def _samples(status: Mapping[str, Any], metric: str) -> Iterator[tuple[float, dict[str, str]]]:
    for sample in status.get("metrics", []):
        if sample["name"] == metric:
            yield from sample["samples"]


def _refused_letters(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Messages that failed permanently and are not dead letters yet, since the topic refuses them."""
    refused: Counter[str] = Counter()
    for status in statuses:
        for value, labels in _samples(status, "millstream_subscription_refused_letters"):
            refused[labels["subscription"]] += int(value)
    for name, count in refused.most_common(_SHOWN_MAX):
        if count:
            detail = f"the dead letter topic of subscription {name} refuses {counted(count, 'message')}"
            yield warning("dead letters", detail, "millstream dlq list says why, and what to do about it")


def _check_damage(lost: list[tuple[str, DamagedOffsets]]) -> Iterator[Finding]:
    for where, damaged_range in lost[:_SHOWN_MAX]:
        report = warning if damaged_range.is_repaired else problem
        yield report("damage", f"{where}{damaged_range}", damaged_range.advice)
    if len(lost) > _SHOWN_MAX:
        advice = "millstream topic describe NAME shows those of a topic"
        yield problem("damage", f"{counted(len(lost) - _SHOWN_MAX, 'more range')} that the disk lost", advice)
    if not lost:
        yield passed("damage", "no offsets are known to be lost")


def _check_retained(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Warn about data past its retention that waits for a pipeline or subscription."""
    held: Counter[str] = Counter()
    for status in statuses:
        for value, labels in _samples(status, "millstream_log_held_bytes"):
            held[labels["topic"]] += int(value)
    for topic, size in held.most_common(_SHOWN_MAX):
        detail = f"topic {topic} keeps {size:,} bytes past its retention that are not delivered or not landed yet"
        advice = (
            "millstream pipeline list and millstream subscription list show which pipeline or subscription makes no "
            f"progress; messages are kept for at most retention.until.max.ms of topic {topic}"
        )
        yield warning("retention", detail, advice)


def _check_clock(status: dict[str, Any]) -> Finding:
    skew_ms = status["now_ms"] - time.time_ns() // 1_000_000
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        advice = "set both clocks by NTP: retention and reading by time depend on them"
        return warning("clock", f"the broker's clock differs from this machine's by {skew_ms / 1000:+.1f} s", advice)
    return passed("clock", "the broker's clock agrees with this machine's")


async def _check_http(status: dict[str, Any], *, host: str = "") -> Finding:
    """Check the gateway; if it listens on all addresses, connect to it at the broker's address."""
    url = status["http"]
    if not url:
        return passed("http", "a broker inside a program, without a gateway")
    scheme, _, address = url.partition("://")
    listened, _, port = address.rpartition(":")
    if host and listened in _ALL_ADDRESSES:
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        code = await within(_HTTP_S, _get_status(url, "/readyz"))
    except (OSError, TimeoutError, ValueError) as error:
        advice = "the broker restarts its gateway automatically; its log says why it ended"
        return problem("http", f"the gateway at {url} does not respond: {str(error) or 'no response in time'}", advice)
    if code not in (200, 503):
        return problem("http", f"the gateway at {url} responds with {code}", "see the broker's log")
    return passed("http", f"the gateway at {url} responds")


_ALL_ADDRESSES: Final = ("0.0.0.0", "[::]", "::")


async def _get_status(url: str, path: str) -> int:
    """Return the status code of one GET, without loading an HTTP client."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    tls = None
    if scheme == "https":
        # Not verified: this only checks that the gateway responds, and sends nothing secret.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/") else 0
    finally:
        # Closing TLS in order would wait for the peer, and leave the socket open if the loop ends first.
        writer.transport.abort()
