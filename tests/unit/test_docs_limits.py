"""docs/limits.md states the limits of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.broker.security import gate, sasl, state
from millstream.gateway import callers, pressure, protocol
from millstream.gateway.api import record_reader
from millstream.gateway.push import pusher, sender

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize(
    "row",
    [
        f"{gate.FRAME_BYTES_MAX // KIB} KiB; {gate.REQUESTS_MAX}; {gate.DEADLINE_S:g} s",
        f"a delay of {sasl._PAUSE_S_FIRST:g} s that grows with each failure, up to {sasl._PAUSE_S_MAX:g} s; "
        f"forgotten after {sasl._FORGIVEN_S:g} s",
        f"held back | {callers.PENDING_PER_HOST_MAX} |",
        f"waiting | {sasl._CHECKS_AT_ONCE}; {sasl._CHECKS_WAITING_MAX} |",
        f"| {state.TOKENS_MAX:,} each |",
        f"| {state.TOKENS_PER_OWNER_MAX:,} |",
        f"all API tokens of one owner | {state.SCOPE_RULES_PER_OWNER_MAX:,} |",
        "| {:,}; {:,}; {:,} | 429".format(*pressure.REQUESTS_MAX),
        "| {} MiB; {} MiB; {} MiB | 429".format(*(limit // MIB for limit in pressure.BYTES_MAX)),
        f"open connections | {protocol.CONNECTIONS_MAX:,} | a connection that has been idle or stalled for "
        f"{protocol.STALLED_S:g} s",
        f"| {protocol.HEAD_BYTES_MAX // KIB} KiB, {protocol.HEAD_S_MAX:g} s | 431",
        f"| {pressure.BODY_BYTES_MAX // MIB} MiB, {pressure.BODY_S_MAX:g} s | 413",
        f"as JSON | {record_reader.MESSAGE_BYTES_MAX // MIB} MiB |",
        f"| {protocol.WRITE_BYTES_MIN // KIB} KiB in {protocol.WRITE_S_MAX:g} s |",
        f"their bytes | {pusher.IN_FLIGHT_BYTES_MAX // MIB} MiB",
        f"redirects | {sender.REDIRECTS_MAX} |",
    ],
)
def test_the_page_states_the_limits_of_the_code(row: str) -> None:
    assert row in PAGE


def test_users_and_rules_have_the_same_limit_as_tokens() -> None:
    assert state.ACLS_MAX == state.CREDENTIALS_MAX == state.TOKENS_MAX
