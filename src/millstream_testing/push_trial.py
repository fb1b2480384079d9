"""Push under faults: nodes, push processes and the endpoint are killed under load, and every message is checked.

The endpoint records requests and misbehaves: it fails, is slow, hangs up, is down, and never accepts poison messages.
At the end all queues are drained, and `subscription_check` checks what the endpoint received: nothing is lost, nothing
is delivered that was not published, attempts are counted. According to the queues' counters, each message must have
been accepted once or be in the dead letter topic, and every request must be signed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple
from zlib import crc32

from millstream.core.subscription import AT_LEAST_ONCE, BACKOFF_MAX, BACKOFF_MIN, EXACTLY_ONCE, Verb
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, Record
from millstream_testing.queue_trial import Outcome, PrintLine, QueueTrial, cancel
from millstream_testing.subscription_check import check
from millstream_testing.subscription_history import (
    Delivery,
    GroundTruth,
    Guarantees,
    History,
    Position,
    Settlement,
    Span,
    Spans,
    now_ms,
)
from millstream_testing.trial_cluster import TrialCluster, TrialNode
from millstream_testing.trial_topic import dead_letters_of, published
from millstream_testing.webhook import Request, Response, Webhook

TOPIC: Final = "pushed"
POISON: Final = b"poison"
SECRET: Final = "a-secret-of-the-trial"
TIMEOUT_MS: Final = 1000
PROCESS: Final = b"millstream.gateway.push.process"
SETTINGS: Final[dict[str, object]] = {
    "push-private-addresses": "true",
    "subscriptions-partitions": 3,
    "leader-balance-ms": 1000,
}
KINDS: Final = {"kill-node": 4, "stop-node": 1, "kill-process": 2, "kill-endpoint": 2, "pause-node": 1}


@dataclass(slots=True, kw_only=True)
class Plan:
    seed: int
    faults: int = 15
    minutes_max: float = 10.0
    messages_per_s: float = 60.0
    partitions: int = 3
    keys: int = 20
    attempts: int = 6
    lease_ms: int = 2000
    poison_share: float = 0.01
    heal_s_max: float = 90.0
    drain_s_max: float = 180.0


class _Arrival(NamedTuple):
    """One request that the endpoint received."""

    subscription: str
    position: Position
    attempt: int
    at_ms: int
    checksum: int
    taken: bool


class PushTrial(QueueTrial):
    """A run on running nodes."""

    def __init__(self, cluster: TrialCluster, plan: Plan, print_line: PrintLine) -> None:
        super().__init__(
            cluster,
            TOPIC,
            print_line,
            seed=plan.seed,
            partitions=plan.partitions,
            messages_per_s=plan.messages_per_s,
            heal_s_max=plan.heal_s_max,
            drain_s_max=plan.drain_s_max,
        )
        self._plan = plan
        self._hook = Webhook(self._respond)
        self._arrivals: list[_Arrival] = []
        self._unsigned = 0
        self._subscriptions = {
            "push-loose": _guarantees(plan, AT_LEAST_ONCE, ordered=False),
            "push-ordered": _guarantees(plan, EXACTLY_ONCE, ordered=True),
        }

    async def run(self) -> Outcome:
        """Apply load and faults, drain all queues, and check."""
        async with self._hook:
            await self._declare()
            publishing = asyncio.ensure_future(self._publisher.run())
            try:
                await self._inject_faults()
                self._publisher.stop()
                await publishing
                self._is_well_behaved = True
                left = await self._drain()
                return await self._check_results(left)
            finally:
                await cancel([publishing])

    # -- load --------------------------------------------------------------------------------------------------

    def _more_settings(self, name: str) -> dict[str, str]:
        return {
            BACKOFF_MIN: "200",
            BACKOFF_MAX: "500",
            "millstream.push.url": f"{self._hook.url}/{name}",
            "millstream.push.secret": SECRET,
            "millstream.push.timeout.ms": str(TIMEOUT_MS),
        }

    def _make_record(self, random: Random, number: int) -> NewRecord:
        is_poison = random.random() < self._plan.poison_share
        key = POISON if is_poison else b"key-%d" % random.randrange(self._plan.keys)
        return NewRecord(key, b'{"number": %d}' % number, (), now_ms())

    def _respond(self, request: Request) -> Response:
        """Return the endpoint's response, and record what it received."""
        response = self._choose_response(request)
        headers = request.headers
        self._unsigned += not request.is_signed_by(SECRET.encode())
        self._arrivals.append(
            _Arrival(
                request.path.rpartition("/")[2],
                Position(int(headers["ce-partition"]), int(headers["ce-offset"])),
                int(headers["ce-attempt"]),
                now_ms(),
                crc32(request.body),
                response.status == 204,
            )
        )
        return response

    def _choose_response(self, request: Request) -> Response:
        if request.headers.get("ce-subject") == POISON.decode():
            return Response(422, body=b"poison")
        drawn = self._random.random()
        if self._is_well_behaved or drawn > 0.05:
            return Response()
        if drawn > 0.02:
            return Response(after_s=0.2)
        return (
            Response(503, {"retry-after": "1"}) if drawn > 0.015 else Response(None) if drawn > 0.005 else Response(500)
        )

    # -- faults ------------------------------------------------------------------------------------------------

    async def _inject_faults(self) -> None:
        deadline = time.monotonic() + self._plan.minutes_max * 60
        for number in range(self._plan.faults):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(self._random.uniform(1.0, 3.0))
            (kind,) = self._random.choices(list(KINDS), list(KINDS.values()))
            self._faults[kind] += 1
            node = self._random.choice(list(self._cluster.nodes.values()))
            self._print_line(f"{number + 1:3} {kind} {'' if kind == 'kill-endpoint' else node.number}")
            began_ms = now_ms()
            await self._inject_fault(kind, node)
            await self._wait_until_healthy(kind)
            self._fault_spans.append(Span(began_ms, now_ms() + self._plan.lease_ms))

    async def _inject_fault(self, kind: str, node: TrialNode) -> None:
        lifetime_s = self._random.uniform(0.5, 4.0)
        if kind == "kill-endpoint":
            await self._hook.stop()
            await asyncio.sleep(lifetime_s)
            await self._hook.start()
        elif kind == "kill-process":
            for pid in await asyncio.to_thread(push_processes, node.pid):
                os.kill(pid, signal.SIGKILL)
        elif kind == "pause-node":
            node.pause()
            await asyncio.sleep(lifetime_s)
            node.resume()
        else:
            # Only the main process is killed: the push process has to notice that and end soon.
            await asyncio.to_thread(node.kill_main if kind == "kill-node" else node.stop)
            await asyncio.sleep(lifetime_s)
            node.kill()
            await asyncio.to_thread(node.start)

    # -- the end -----------------------------------------------------------------------------------------------

    async def _check_results(self, left: list[str]) -> Outcome:
        async with self._client() as client:
            records, missing = await self._published(client)
            dead_letters = {
                name: Counter(position for position, _ in await dead_letters_of(client, f"dead-{name}"))
                for name in self._subscriptions
            }
            described = {
                subscription["name"]: subscription
                for subscription in await SubscriptionClient(client).describe(list(self._subscriptions))
            }
        findings = left + missing
        if self._unsigned:
            findings.append(f"{self._unsigned} requests were not signed")
        expected = {position: published(record) for position, record in records.items()}
        for name, guarantees in self._subscriptions.items():
            history = self._history(name)
            truth = GroundTruth(
                expected, dead_letters[name], Spans(self._fault_spans), Spans(), len(self._cluster.nodes) == 1
            )
            findings += [f"{name}: {violation}" for violation in check(guarantees, history, truth)]
            findings += [
                f"{name}: {violation}" for violation in _miscounted(described[name], records, dead_letters[name])
            ]
            poison = {position for position, record in records.items() if record.key == POISON}
            if missing_poison := poison - set(dead_letters[name]):
                findings.append(f"{name}: poison that was not dead-lettered: {sorted(missing_poison)[:5]}")
        return Outcome(findings, self._summary(records, dead_letters))

    def _history(self, name: str) -> History:
        """Return what the endpoint received as a worker's history. A delivery may be sent twice."""
        history = History()
        seen: set[tuple[Position, int]] = set()
        for arrival in self._arrivals:
            if arrival.subscription != name:
                continue
            if (arrival.position, arrival.attempt) not in seen:
                seen.add((arrival.position, arrival.attempt))
                sent_ms = arrival.at_ms - TIMEOUT_MS
                history.deliveries.append(
                    Delivery(arrival.position, "endpoint", arrival.attempt, sent_ms, arrival.at_ms, 0, arrival.checksum)
                )
            if arrival.taken:
                # The endpoint cannot know whether the node has received it.
                settled = Settlement(
                    arrival.position, "endpoint", arrival.attempt, Verb.ACCEPT, arrival.at_ms, None, False
                )
                history.settlements.append(settled)
        return history

    def _summary(self, records: Mapping[Position, Record], dead_letters: Mapping[str, Counter[Position]]) -> str:
        taken = Counter((arrival.subscription, arrival.position) for arrival in self._arrivals if arrival.taken)
        again = sum(count > 1 for count in taken.values())
        return (
            f"{self._summary_of_load(records)}; {len(self._arrivals)} requests, {again} messages were accepted more "
            f"than once, {sum(map(len, dead_letters.values()))} dead letters"
        )


def push_processes(parent: int) -> list[int]:
    """Return the push processes that a node has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        if PROCESS in command and int(stat.rpartition(")")[2].split()[1]) == parent:
            found.append(int(entry.name))
    return found


def _miscounted(
    described: Mapping[str, Any], records: Mapping[Position, Record], dead_letters: Mapping[Position, int]
) -> list[str]:
    """Check that each message was accepted once, or is a dead letter, and that the counters agree."""
    counts = {
        kind: sum(queue[kind] for queue in described["queues"]) for kind in ("accepted", "dead_lettered", "dropped")
    }
    expected_values = {"accepted": len(records) - len(dead_letters), "dead_lettered": len(dead_letters), "dropped": 0}
    return [] if counts == expected_values else [f"the queues count {counts}, expected {expected_values}"]


def _guarantees(plan: Plan, delivery: str, *, ordered: bool) -> Guarantees:
    return Guarantees(delivery=delivery, ordered=ordered, attempts=plan.attempts, lease_ms=plan.lease_ms)
