"""Random sets of access rules and requests, decided by Apache Kafka's own authorizer and by Millstream's.

    python -m conformance.authorizer.compare [--requests N] [--seed N] [--record]

Shows every request that the two decide differently, and fails if there is one. `--record` writes a sample of Kafka's
decisions to `decisions.tsv`, to which a test holds Millstream.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.peers.kafka import fetch
from benchmarks.subject import PeerUnavailable

from millstream.broker.security.authorizer import AclSnapshot
from millstream.core.acl import CLUSTER_NAME, OPERATIONS, Acl, Operation, PatternType, Permission, ResourceType

HERE: Final = Path(__file__).parent
RECORDED: Final = HERE / "decisions.tsv"
REQUESTS: Final = 1_000_000
RECORDED_REQUESTS: Final = 2_000
_REQUESTS_OF_A_SET: Final = 100
_SHOWN_MAX: Final = 10
_TYPES: Final = (
    ResourceType.TOPIC,
    ResourceType.GROUP,
    ResourceType.CLUSTER,
    ResourceType.TRANSACTIONAL_ID,
)
_PRINCIPALS: Final = ("User:alice", "User:bob", "User:CN=a,O=b", "Node:1", "User:al")
_HOSTS: Final = ("10.0.0.1", "10.0.0.2", "192.168.7.7")
_NAMES: Final = ("a", "ab", "abc", "abd", "b", "ba", "orders", "orders.eu", "orders-", "o", "x*", "*a")


def main() -> int:
    """Compare; 0 when all decisions agree."""
    parser = argparse.ArgumentParser(prog="python -m conformance.authorizer.compare", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the random cases")
    parser.add_argument("--record", action="store_true", help="write the sample instead")
    arguments = parser.parse_args()
    path = RECORDED_REQUESTS if arguments.record else arguments.requests
    lines = list(random_lines(Random(arguments.seed), path))
    try:
        decisions = decided_by_kafka(lines)
    except PeerUnavailable as error:
        print(f"skipped: {error}")
        return 0
    if arguments.record:
        responses = iter(decisions)
        recorded = [line if line[0] in "SA" else f"{line}\t{next(responses)}" for line in lines]
        RECORDED.write_text("\n".join(recorded) + "\n", encoding="utf-8")
    wrong = list(differences(lines, decisions))
    print(f"{len(decisions)} decisions, {len(wrong)} differ")
    for line in wrong[:_SHOWN_MAX]:
        print(line)
    return 1 if wrong else 0


def decided_by_kafka(lines: Iterable[str]) -> list[str]:
    """Have Kafka's authorizer decide; one `1` or `0` for each question."""
    jars = fetch()
    command = ["java", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", f"{jars}/*"]
    done = subprocess.run(
        [*command, str(HERE / "Decide.java")],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout.split()


def differences(lines: Iterable[str], decisions: Iterable[str]) -> Iterator[str]:
    """Every question that Millstream decides differently, with the rules."""
    acls: list[Acl] = []
    super_users: list[str] = []
    snapshot: AclSnapshot | None = None
    responses = iter(decisions)
    for line in lines:
        kind, *fields = line.split("\t")
        if kind == "S":
            acls, super_users, snapshot = [], fields[0].split(";"), None
        elif kind == "A":
            acls.append(parse_acl(fields))
        else:
            snapshot = snapshot or AclSnapshot(acls, super_users)
            expected = next(responses)
            if expected != str(int(decided(snapshot, kind, fields))):
                yield f"Kafka says {expected} to {line!r} with the rules {[str(acl) for acl in acls]}"


def parse_acl(fields: list[str]) -> Acl:
    """Read one rule."""
    return Acl(
        resource_type=ResourceType[fields[0]],
        resource_name=fields[1],
        pattern=PatternType[fields[2]],
        principal=fields[3],
        host=fields[4],
        operation=Operation[fields[5]],
        permission=Permission[fields[6]],
    )


def decided(snapshot: AclSnapshot, kind: str, fields: list[str]) -> bool:
    """Millstream's decision about one question."""
    principal, host, operation, resource_type = fields[:4]
    if kind == "T":
        return snapshot.decide_any(principal, host, Operation[operation], ResourceType[resource_type])
    return bool(snapshot.decide(principal, host, Operation[operation], ResourceType[resource_type], fields[4]))


def random_lines(random: Random, requests: int) -> Iterator[str]:
    """Sets of rules, each followed by questions about it."""
    for _ in range(0, requests, _REQUESTS_OF_A_SET):
        yield f"S\t{random.choice(['User:root', 'User:root;User:al', 'User:CN=a,O=b'])}"
        kinds = random.sample(_TYPES, random.randint(1, len(_TYPES)))
        rules = random.choice((0, 1, 2, 4, 8, 20))
        yield from sorted({_random_acl(random, random.choice(kinds)) for _ in range(rules)})
        for _ in range(_REQUESTS_OF_A_SET):
            yield _random_question(random, random.choice(kinds))


def _random_acl(random: Random, kind: ResourceType) -> str:
    pattern = random.choice((PatternType.LITERAL, PatternType.PREFIXED))
    name = CLUSTER_NAME if kind is ResourceType.CLUSTER else random.choice(_NAMES)
    if random.random() < 0.2:
        name, pattern = "*", PatternType.LITERAL
    principal = random.choice((*_PRINCIPALS, "User:*"))
    host = random.choice((*_HOSTS, "*", "*"))
    operation = random.choice((*OPERATIONS[kind], Operation.ALL))
    permission = random.choice((Permission.ALLOW, Permission.ALLOW, Permission.DENY))
    return "\t".join(("A", kind.name, name, pattern.name, principal, host, operation.name, permission.name))


def _random_question(random: Random, kind: ResourceType) -> str:
    question = (random.choice((*_PRINCIPALS, "User:root")), random.choice(_HOSTS), random.choice(OPERATIONS[kind]).name)
    if random.random() < 0.2:
        return "\t".join(("T", *question, kind.name))
    name = CLUSTER_NAME if kind is ResourceType.CLUSTER else random.choice((*_NAMES, "*", "never"))
    return "\t".join(("Q", *question, kind.name, name))


if __name__ == "__main__":
    sys.exit(main())
