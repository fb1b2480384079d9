"""Polls every node for its leaders: records when leaders change and whether a node is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from millstream.core.errors import MillstreamError
from millstream.protocol.wire.client import Client
from millstream_testing.subscription_events import now_ms
from millstream_testing.subscription_history import Span
from millstream_testing.trial_cluster import TrialCluster, TrialNode

POLL_S: Final = 0.25
RESPONSE_S: Final = 2.0
SILENT_S: Final = 5.0
DETECTION_MS: Final = 2_000
"""A change of leader is noticed at most this much later, and its effects take at most as long again."""


class Watch:
    def __init__(self, cluster: TrialCluster, topics: Sequence[str], print_line: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._topics = topics
        self._print_line = print_line
        self._epochs: dict[tuple[str, int], int] = {}
        self.leader_changes: list[Span] = []
        """When leaders changed."""
        self.silences: list[str] = []
        """Running nodes that did not respond for long."""

    async def run(self) -> None:
        await asyncio.gather(*(self._watch(node) for node in self._cluster.nodes.values()))

    async def _watch(self, node: TrialNode) -> None:
        response_s = time.monotonic()
        is_reported = False
        while True:
            began_s = time.monotonic()
            responded = await self._poll(node)
            if responded or not node.must_respond:
                if is_reported:
                    self._record_silence(node, began_s - response_s)
                response_s, is_reported = time.monotonic(), False
            elif time.monotonic() - response_s > SILENT_S and not is_reported:
                is_reported = True
                self._print_line(f"node {node.number} runs, but is silent: its log has what it is doing")
                with suppress(ProcessLookupError, RuntimeError):
                    node.dump_stacks()
            await asyncio.sleep(max(0.0, began_s + POLL_S - time.monotonic()))

    def _record_silence(self, node: TrialNode, seconds: float) -> None:
        self.silences.append(f"node {node.number} was silent for {seconds:.1f} s until {time.strftime('%H:%M:%S')}")
        self._print_line(self.silences[-1])

    async def _poll(self, node: TrialNode) -> bool:
        try:
            async with asyncio.timeout(RESPONSE_S):
                async with Client.connect(node.kafka, client_id="watch", timeout_s=RESPONSE_S) as client:
                    metadata = await client.metadata(self._topics)
        except (MillstreamError, OSError, TimeoutError):
            return False
        for name, topic in metadata.topics.items():
            for partition in topic.partitions.values():
                self._record_epoch((name, int(partition.partition)), int(partition.leader_epoch))
        return True

    def _record_epoch(self, partition: tuple[str, int], epoch: int) -> None:
        known = self._epochs.get(partition, -1)
        if epoch > known:
            self._epochs[partition] = epoch
            if known >= 0:
                seen_ms = now_ms()
                self.leader_changes.append(Span(seen_ms - DETECTION_MS, seen_ms + DETECTION_MS))
