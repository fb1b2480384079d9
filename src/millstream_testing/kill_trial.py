"""The kill trial: a loaded broker is killed repeatedly, and every acknowledged message must survive.

Unmodified librdkafka producers (idempotent ones with different compressions, and a plain one) write to all partitions
of a topic while a consumer group reads and commits. The broker is killed with SIGKILL meanwhile and restarted on the
same data; then an auditor reads the new messages, and the history is checked. At the end another auditor reads
everything from the start, and the group must have read everything too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from confluent_kafka.cimpl import NewTopic

from millstream_testing.history import Report
from millstream_testing.server import Server
from millstream_testing.trial_clients import COMPRESSIONS, TrialLoad, create_topics

TOPIC = "kill-trial"
GROUP = "group"


@dataclass(slots=True, kw_only=True)
class Plan:
    kills: int = 20
    partitions: int = 4
    producers: int = 3
    members: int = 2
    messages_per_s: int = 3000
    steady: bool = False
    """Whether each producer keeps that rate; otherwise it sends as soon as it gets responses."""
    load_s: tuple[float, float] = (0.3, 1.5)
    seed: int = field(default_factory=lambda: random.randrange(2**32))


@dataclass(slots=True)
class Outcome:
    """The findings of the trial, and the duration of each start after a kill."""

    report: Report
    starts_s: list[float]


class KillTrial:
    """A trial on one server, which it starts, kills and stops."""

    def __init__(self, server: Server, plan: Plan, print_line: Callable[[str], None] = lambda _: None) -> None:
        self._server = server
        self._plan = plan
        self._print_line = print_line
        self._random = random.Random(plan.seed)
        self.load = TrialLoad({TOPIC: plan.partitions}, seed=plan.seed)

    def __enter__(self) -> Self:
        self._server.start()
        try:
            self.prepare()
        except BaseException:
            self._server.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.load.end()
        self._server.kill()

    def prepare(self) -> None:
        """Create the topic and start the clients, on a running server."""
        load, plan = self.load, self._plan
        load.brokers = self._server.kafka
        create_topics(load.brokers, [NewTopic(TOPIC, num_partitions=plan.partitions, replication_factor=1)])
        pace: dict[str, Any] = {"messages_per_s": plan.messages_per_s, "steady": plan.steady}
        for number in range(plan.producers):
            compression = COMPRESSIONS[number % len(COMPRESSIONS)]
            settings = {"enable.idempotence": True, "compression.type": compression, "linger.ms": number * 3}
            load.add_producer(f"idempotent-{number}", settings, **pace)
        plain = {"enable.idempotence": False, "acks": "all", "max.in.flight": 1, "linger.ms": 1}
        load.add_producer("plain", plain, **pace)
        load.state.history.allow_duplicates("plain")
        load.add_members(GROUP, plan.members, {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500})
        load.start()

    def run(self) -> Outcome:
        """Kill as often as planned, then run the final check; stop early at a finding."""
        starts_s = []
        for number in range(1, self._plan.kills + 1):
            self._kill_under_load()
            starts_s.append(self._server.start_s)
            report = self.load.settle_and_check()
            self._print_line(f"kill {number}: back after {self._server.start_s:.2f} s; {str(report).splitlines()[0]}")
            if not report.ok:
                return Outcome(report, starts_s)
        return Outcome(self.load.check_everything(), starts_s)

    def _kill_under_load(self) -> None:
        state = self.load.state
        before = state.acknowledgements
        state.loading.set()
        state.wait(lambda: state.acknowledgements > before, "no message was acknowledged under load")
        time.sleep(self._random.uniform(*self._plan.load_s))
        self._server.kill()
        self._server.start()
