"""The cases that are measured: those of the table, chosen to show each factor alone and the combinations that matter.

A case is one setting of every factor. The default run varies one factor at a time around two bases, one that syncs
before it acknowledges and one that does not; `everything()` is the whole product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

PRODUCE, LATENCY, REQUESTS, FIXED, START = "produce", "latency", "requests", "fixed", "start"
KINDS = (PRODUCE, LATENCY, REQUESTS, FIXED, START)

ALWAYS, INTERVAL, OS = "always", "interval", "os"
FLUSHES = (ALWAYS, INTERVAL, OS)
DURABILITY = {ALWAYS: "fsync before ack", INTERVAL: "page cache, fsync every 1 s", OS: "page cache"}
"""The durability of an acknowledgement under each flush setting, for every server in the same line."""

KIB = 1024
SIZES = (KIB, 100)
PARTITIONS = (1, 16, 100)
PRODUCERS = (1, 10)
ACKS = ("all", "1")
IDEMPOTENT = "idempotent"
RATES = (1000, 50_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table: what is sent, how, and how durable it is when it is acknowledged."""

    kind: str = PRODUCE
    flush: str = ALWAYS
    size_bytes: int = KIB
    keyed: bool = False
    partitions: int = 16
    producers: int = 1
    acks: str = "all"
    rate_per_s: int = 0
    tls: bool = False

    @property
    def name(self) -> str:
        """A short name, unique within a run."""
        if self.kind == START:
            return "start and rest"
        size = size_text(self.size_bytes)
        if self.kind == REQUESTS:
            return f"requests of one message, {size}, {self.flush}"
        parts = [size, "keyed" if self.keyed else "no key", _count(self.partitions, "partition")]
        parts += [_count(self.producers, "producer"), f"acks={self.acks}", self.flush]
        parts += ["TLS"] if self.tls else []
        if self.kind == LATENCY:
            return f"{self.rate_per_s:,}/s, {', '.join(parts)}"
        return ", ".join(parts)

    @property
    def durability(self) -> str:
        """The durability of an acknowledgement in this line."""
        return DURABILITY[self.flush]

    @property
    def plain(self) -> bool:
        """Whether servers without partitions and keys can be measured in this line, too.

        One producer has one stream; ten producers have a stream each, as they would have a partition each.
        """
        spread = (self.producers, self.partitions) in ((1, 1), (10, 16))
        return spread and not self.keyed and self.acks == "all" and not self.tls

    def messages_to_read(self, seconds: float) -> int:
        """Return how many messages are read in about so many seconds, the same number for slow and fast servers.

        Messages that arrive before the clock starts matter less the more is read; they must not matter more for a
        server that accepted fewer messages.
        """
        return int((500_000 if self.size_bytes == KIB else 1_500_000) * seconds)

    @property
    def consumes(self) -> bool:
        """Whether the messages are also read back; the flush setting makes no difference to reading."""
        return self.kind == PRODUCE and self.flush == OS


def size_text(size_bytes: int) -> str:
    return "1 KiB" if size_bytes == KIB else f"{size_bytes} B"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


SAFE = Case(flush=ALWAYS)
FAST = Case(flush=OS)


def default() -> list[Case]:
    """Return the lines of a run without options."""
    return list(dict.fromkeys([*_throughput(), *_latency(), *_requests(), Case(kind=START)]))


def quick() -> list[Case]:
    """Return a few lines that reveal large regressions."""
    return [
        SAFE,
        FAST,
        replace(FAST, size_bytes=100, partitions=1),
        replace(FAST, tls=True),
        Case(kind=LATENCY, rate_per_s=1000),
        Case(kind=REQUESTS),
        Case(kind=START),
    ]


def everything() -> list[Case]:
    """Return every combination of the factors, and the other lines of the default run."""
    factors = product(FLUSHES, SIZES, (False, True), PARTITIONS, PRODUCERS, ACKS)
    return list(
        dict.fromkeys(
            Case(flush=flush, size_bytes=size, keyed=keyed, partitions=partitions, producers=producers, acks=acks)
            for flush, size, keyed, partitions, producers, acks in factors
        )
    ) + [case for case in default() if case.kind != PRODUCE]


def chosen(cases: Iterable[Case], only: Sequence[str]) -> list[Case]:
    """Return the cases of the given kinds, or with one of the given texts in their names; all if none is given."""
    return [case for case in cases if not only or any(_has(case, text) for text in only)]


def _has(case: Case, text: str) -> bool:
    return text == case.kind if text in KINDS else text in case.name


def _throughput() -> Iterator[Case]:
    for base in (SAFE, FAST):
        yield base
        yield replace(base, size_bytes=100)
        yield replace(base, keyed=True)
        yield replace(base, partitions=1)
        yield replace(base, partitions=100)
        yield replace(base, producers=10)
        yield replace(base, acks="1")
        yield replace(base, acks=IDEMPOTENT)
        yield replace(base, tls=True)
        yield replace(base, size_bytes=100, tls=True)
    yield Case(flush=INTERVAL)
    # Where servers without partitions can be compared.
    for flush in FLUSHES:
        yield Case(flush=flush, partitions=1)
        yield Case(flush=flush, partitions=1, size_bytes=100)
    # The hardest load for a server: small messages in small batches, since keys spread them over all partitions.
    yield Case(flush=ALWAYS, size_bytes=100, keyed=True, partitions=100, producers=10)
    yield Case(flush=OS, size_bytes=100, keyed=True, partitions=100, producers=10)
    yield Case(flush=OS, partitions=100, producers=10, keyed=True)


def _latency() -> Iterator[Case]:
    for flush in (ALWAYS, OS):
        for rate in RATES:
            yield Case(kind=LATENCY, flush=flush, rate_per_s=rate)
        yield Case(kind=LATENCY, flush=flush, rate_per_s=RATES[0], tls=True)


def _requests() -> Iterator[Case]:
    for flush in FLUSHES:
        yield Case(kind=REQUESTS, flush=flush, partitions=1)
