"""How a client signs in, in every wrong order: each dialogue with both brokers, over raw frames.

    python -m conformance.sasl_table [--record]

Kafka's responses are in `sasl_responses.json`. `make compare` checks them against Kafka, a test Millstream against
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from benchmarks.peers.kafka import free_address, kafka
from conformance.question import CLOSED, SILENT, Broker, frame_of, plain, receive_frame
from conformance.response_table import ResponseTable, run_comparison

from millstream.broker.security import sasl
from millstream.embedded import EmbeddedBroker
from millstream.protocol.messages.codec import read_response
from millstream_testing.security import declare_security

ALICE, BOB = ("alice", "alice-password"), ("bob", "bob-password")
SESSION_MS: Final = 600_000
_METADATA, _HANDSHAKE, _VERSIONS, _AUTHENTICATE = 3, 17, 18, 36

Responses = dict[str, list[str]]


class Addresses(NamedTuple):
    """The listeners for sign-ins: one whose sessions do not end, and one whose sessions do."""

    lasting: str
    ending: str


class Step(NamedTuple):
    """One frame: a request, or bare bytes."""

    key: int
    version: int = 0
    values: Mapping[str, Any] = {}
    bare: bytes | None = None


def _handshake(mechanism: str = "PLAIN", version: int = 1) -> Step:
    return Step(_HANDSHAKE, version, {"mechanism": mechanism})


def _token(said: bytes, version: int = 1) -> Step:
    return Step(_AUTHENTICATE, version, {"auth_bytes": said})


def _plain(user: str, password: str) -> bytes:
    return f"\0{user}\0{password}".encode()


METADATA: Final = Step(_METADATA, 1, {"topics": []})
VERSIONS: Final = Step(_VERSIONS, 0)
SIGN_IN: Final = (_handshake(), _token(_plain(*ALICE)))

DIALOGUES: Final[Mapping[str, Sequence[Step]]] = {
    "in order": [VERSIONS, *SIGN_IN, METADATA],
    "versions twice": [VERSIONS, VERSIONS, *SIGN_IN, METADATA],
    "versions of the future": [Step(_VERSIONS, 4), *SIGN_IN, METADATA],
    "metadata first": [METADATA],
    "metadata after versions": [VERSIONS, METADATA],
    "authenticate without handshake": [_token(_plain(*ALICE)), METADATA],
    "unknown mechanism": [_handshake("NONE"), METADATA],
    "handshake after an unknown mechanism": [_handshake("NONE"), *SIGN_IN, METADATA],
    "mechanism in lower case": [_handshake("plain"), METADATA],
    "handshake twice": [_handshake(), _handshake(), _token(_plain(*ALICE)), METADATA],
    "versions between handshake and token": [_handshake(), VERSIONS, _token(_plain(*ALICE)), METADATA],
    "metadata between handshake and token": [_handshake(), METADATA],
    "wrong password": [_handshake(), _token(_plain("alice", "another")), METADATA],
    "unknown user": [_handshake(), _token(_plain("nobody", "another")), METADATA],
    "right password after a wrong one": [_handshake(), _token(_plain("alice", "another")), _token(_plain(*ALICE))],
    "empty token": [_handshake(), _token(b""), METADATA],
    "empty password": [_handshake(), _token(b"\0alice\0"), METADATA],
    "password without a user": [_handshake(), _token(b"\0\0alice-password"), METADATA],
    "another authorization id": [_handshake(), _token(b"admin\0alice\0alice-password"), METADATA],
    "its own authorization id": [_handshake(), _token(b"alice\0alice\0alice-password"), METADATA],
    "one part too many": [_handshake(), _token(b"\0alice\0alice-password\0x"), METADATA],
    "not text": [_handshake(), _token(b"\0\xff\xfe\0x"), METADATA],
    "bare token": [_handshake(version=0), Step(0, bare=_plain(*ALICE)), METADATA],
    "bare wrong token": [_handshake(version=0), Step(0, bare=_plain("alice", "another")), METADATA],
    "request instead of a bare token": [_handshake(version=0), _token(_plain(*ALICE)), METADATA],
    "bare token after the newer handshake": [_handshake(), Step(0, bare=_plain(*ALICE)), METADATA],
    "scram: garbage": [_handshake("SCRAM-SHA-256"), _token(b"garbage"), METADATA],
    "scram: unknown user": [_handshake("SCRAM-SHA-256"), _token(b"n,,n=nobody,r=abc"), _token(b"c=biws,r=abc,p=AAAA")],
    "scram: wrong nonce": [_handshake("SCRAM-SHA-256"), _token(b"n,,n=alice,r=abc"), _token(b"c=biws,r=abc,p=AAAA")],
    "scram: channel binding": [_handshake("SCRAM-SHA-256"), _token(b"p=tls-unique,,n=alice,r=abc"), METADATA],
    "scram: other authorization id": [_handshake("SCRAM-SHA-256"), _token(b"n,a=admin,n=alice,r=abc"), METADATA],
    "handshake when signed in": [*SIGN_IN, _handshake(), METADATA],
    "token when signed in": [*SIGN_IN, _token(_plain(*ALICE)), METADATA],
    "unserved API when signed in": [*SIGN_IN, Step(_METADATA, 99, {"topics": []}), METADATA],
}
AGAIN: Final[Mapping[str, Sequence[Step]]] = {
    "again: in order": [*SIGN_IN, *SIGN_IN, METADATA],
    "again: another principal": [*SIGN_IN, _handshake(), _token(_plain(*BOB)), METADATA],
    "again: wrong password": [*SIGN_IN, _handshake(), _token(_plain("alice", "another")), METADATA],
    "again: another mechanism": [*SIGN_IN, _handshake("SCRAM-SHA-256"), METADATA],
    "again: unknown mechanism": [*SIGN_IN, _handshake("NONE"), METADATA],
    "again: metadata in between": [*SIGN_IN, _handshake(), METADATA, _token(_plain(*ALICE)), METADATA],
    "again: versions in between": [*SIGN_IN, _handshake(), VERSIONS, _token(_plain(*ALICE)), METADATA],
    "again: handshake twice": [*SIGN_IN, _handshake(), _handshake(), _token(_plain(*ALICE)), METADATA],
    "again: without handshake": [*SIGN_IN, _token(_plain(*ALICE)), METADATA],
    "again: bare token": [*SIGN_IN, _handshake(version=0), METADATA],
}
_UNKNOWN = "Kafka tells at once that a user is not known; ours asks for a proof first, as of one that is"
_CLOSED = "both close the connection; Kafka responds first, with an error for each of the topics, here none"
_REFUSED = "Kafka agrees to the mechanism and then closes the connection; ours says that it is not the session's"
ACCEPTED: Final[Mapping[str, str]] = {
    "scram: unknown user": _UNKNOWN,
    "scram: wrong nonce": _UNKNOWN,
    "metadata between handshake and token": _CLOSED,
    "versions twice": "a client may ask again, which tells it nothing new",
    "again: metadata in between": _CLOSED,
    "again: another mechanism": _REFUSED,
    "again: unknown mechanism": _REFUSED,
    "again: bare token": _REFUSED,
}
"""The reasons for intended differences, by dialogue."""


def ask_all(addresses: Addresses) -> Responses:
    """Have every dialogue."""
    lasting = {name: _talk(addresses.lasting, steps) for name, steps in DIALOGUES.items()}
    return lasting | {name: _talk(addresses.ending, steps) for name, steps in AGAIN.items()}


def _talk(address: str, steps: Sequence[Step]) -> list[str]:
    """The outcome of each step, up to the one at which the broker hangs up."""
    outcomes: list[str] = []
    with Broker(address).connected() as connection:
        for step in steps:
            try:
                if step.bare is not None:
                    connection.sendall(len(step.bare).to_bytes(4, "big") + step.bare)
                    outcomes.append(f"bare {len(receive_frame(connection))} bytes")
                    continue
                version = min(step.version, 1) if step.key == _METADATA else step.version
                frame = bytearray(frame_of(step.key, version, step.values))
                frame[6:8] = step.version.to_bytes(2, "big")
                connection.sendall(frame)
                response = plain(read_response(step.key, version, receive_frame(connection)))
            except ConnectionError:
                return [*outcomes, CLOSED]
            except TimeoutError:
                return [*outcomes, SILENT]
            lasts = " for a while" if response.get("session_lifetime") else ""
            outcomes.append(str(response.get("error_code", "answered")) + lasts)
    return outcomes


_SECURITY: Final = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LASTING:SASL_PLAINTEXT,ENDING:SASL_PLAINTEXT
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:alice;User:bob
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
"""
_LISTENER: Final = """\
listener.name.{name}.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {users};
listener.name.{name}.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.{name}.connections.max.reauth.ms={session}
"""


@contextmanager
def locked_kafka(folder: Path) -> Iterator[Addresses]:
    """Apache Kafka with both listeners."""
    addresses = Addresses(free_address(), free_address())
    users = " ".join(f'user_{user}="{password}"' for user, password in (ALICE, BOB))
    properties = _SECURITY
    for name, session in (("lasting", 0), ("ending", SESSION_MS)):
        properties += _LISTENER.format(name=name, users=users, session=session)
    listener = f"LASTING://{addresses.lasting},ENDING://{addresses.ending}"
    with kafka(folder, "os", partitions=1, listener=listener, properties=properties):
        yield addresses


@contextmanager
def locked_millstream(folder: Path) -> Iterator[Addresses]:
    """Two nodes of Millstream, which respond to failures at once."""
    nodes = []
    for name, session in (("lasting", 0), ("ending", SESSION_MS)):
        declare_security(folder / name, dict((ALICE, BOB)))
        settings = {"auth": "required", "super-users": "alice,bob", "session-max-ms": session}
        nodes.append(EmbeddedBroker(folder / name, kafka="127.0.0.1:0", http="", settings=settings))
    started: list[EmbeddedBroker] = []
    try:
        with patch.object(sasl, "_PAUSE_S_MAX", 0.0):
            for node in nodes:
                node.start_and_wait()
                started.append(node)
            yield Addresses(*(node.kafka_address for node in nodes))
    finally:
        for node in started:
            node.stop_and_wait()


RECORDED: Final = ResponseTable("dialogues of SASL", Path(__file__).with_name("sasl_responses.json"), ACCEPTED)


def compare(folder: Path, *, record: bool = False) -> int:
    """Talk to both, and show where they or the recorded responses differ; how many do."""
    with locked_kafka(folder / "kafka-sasl") as addresses:
        theirs = ask_all(addresses)
    with locked_millstream(folder / "millstream-sasl") as addresses:
        return RECORDED.compare(theirs, ask_all(addresses), record=record)


if __name__ == "__main__":
    sys.exit(run_comparison(compare))
