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
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.history import Report
from millstream_testing.server import Server
from millstream_testing.trial_clients import SETTLE_S_MAX, Auditor, GroupMember, LoadProducer, TrialFailed, TrialState

TOPIC = "kill-trial"
GROUP = "group"


@dataclass(slots=True, kw_only=True)
class Plan:
    """The size of the trial."""

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
        self._state = TrialState()
        self._producers: list[LoadProducer] = []
        self._members: list[GroupMember] = []
        self._topics = {TOPIC: plan.partitions}
        self._auditor = Auditor("audit", self._state, "", self._topics)

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
        self.end_clients()
        self._server.kill()

    def prepare(self) -> None:
        """Create the topic and start the clients, on a running server."""
        self._create_topic()
        self._start_clients()

    def end_clients(self) -> None:
        """End the producers and the members of the group."""
        self._state.stopping.set()
        for thread in [*self._producers, *self._members]:
            thread.join(SETTLE_S_MAX)

    def run(self) -> Outcome:
        """Kill as often as planned, then run the final check; stop early at a finding."""
        starts_s = []
        report = self._state.check(complete=[])
        for number in range(1, self._plan.kills + 1):
            self._kill_under_load()
            starts_s.append(self._server.start_s)
            report = self._settle_and_check()
            self._print_line(f"kill {number}: back after {self._server.start_s:.2f} s; {str(report).splitlines()[0]}")
            if not report.ok:
                return Outcome(report, starts_s)
        return Outcome(self._check_everything(), starts_s)

    def save_history(self, path: Path) -> None:
        """Save the history for inspection."""
        with self._state.lock:
            self._state.history.save(path)

    def _create_topic(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._server.kafka, "log_level": 0})
        topic = NewTopic(TOPIC, num_partitions=self._plan.partitions, replication_factor=1)
        for created in admin.create_topics([topic]).values():
            created.result(SETTLE_S_MAX)

    def _start_clients(self) -> None:
        address = {"bootstrap.servers": self._server.kafka}
        self._auditor = self._new_auditor("audit")
        compressions = ["none", "lz4", "zstd", "snappy", "gzip"]
        for number in range(self._plan.producers):
            settings = address | {
                "enable.idempotence": True,
                "compression.type": compressions[number % len(compressions)],
                "linger.ms": number * 3,
            }
            self._producers.append(self._new_producer(f"idempotent-{number}", settings))
        plain = address | {"enable.idempotence": False, "acks": "all", "max.in.flight": 1, "linger.ms": 1}
        self._producers.append(self._new_producer("plain", plain))
        self._state.history.allow_duplicates("plain")
        member_settings = address | {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500}
        for number in range(self._plan.members):
            self._members.append(GroupMember(f"{GROUP}/{number}", self._state, member_settings, self._topics))
        for thread in [*self._producers, *self._members]:
            thread.start()

    def _new_producer(self, name: str, settings: dict[str, Any]) -> LoadProducer:
        plan = self._plan
        pace: dict[str, Any] = {"messages_per_s": plan.messages_per_s, "steady": plan.steady}
        return LoadProducer(name, self._state, settings, self._topics, seed=plan.seed, **pace)

    def _new_auditor(self, name: str) -> Auditor:
        return Auditor(name, self._state, self._server.kafka, self._topics)

    def _kill_under_load(self) -> None:
        before = self._state.acknowledgements
        self._state.loading.set()
        self._state.wait(lambda: self._state.acknowledgements > before, "no message was acknowledged under load")
        time.sleep(self._random.uniform(*self._plan.load_s))
        self._server.kill()
        self._server.start()

    def _settle_and_check(self) -> Report:
        """Stop the load, wait for messages in flight, read the new messages and check the history."""
        self._state.loading.clear()
        for load in self._producers:
            load.settle()
        if self._state.failure is not None:
            raise TrialFailed(self._state.failure)
        self._auditor.read()
        return self._state.check(complete=["audit"])

    def _check_everything(self) -> Report:
        self._new_auditor("final").read()
        complete = ["audit", "final"]
        if self._members:
            ends = {index: end for (_, index), end in self._auditor.position.items()}
            self._state.wait(lambda: self._group_positions() == ends, "the group did not read everything")
            complete.append(GROUP)
        return self._state.check(complete=complete)

    def _group_positions(self) -> dict[int, int]:
        with self._state.lock:
            return self._state.history.next_offsets(GROUP, TOPIC)
