"""The options with which a subscription's messages are pushed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from millstream.cli.options import given_text, parse_assignments
from millstream.cli.output import one_line, print_line, print_table
from millstream.core.push import HEADERS, SECRET, URL

PushUrl = Annotated[
    str | None,
    typer.Option("--push", metavar="URL", help="Send messages to this address as HTTP requests.", show_default=False),
]
PushSecret = Annotated[
    str | None,
    typer.Option(
        "--push-secret",
        metavar="SECRET",
        help="Sign what is pushed with this secret; @FILE reads it from a file.",
        show_default=False,
    ),
]
PushHeaders = Annotated[
    list[str] | None,
    typer.Option(
        "--push-header",
        metavar="NAME=VALUE",
        help="A header to send with what is pushed; may be repeated.",
        show_default=False,
    ),
]


def push_overrides(url: str | None, secret: str | None, headers: list[str] | None) -> dict[str, str]:
    """The settings that the options stand for."""
    found: dict[str, str] = {}
    if url is not None:
        found[URL] = url
    if secret is not None:
        found[SECRET] = given_text(secret, flag="--push-secret")
    if headers:
        found[HEADERS] = json.dumps(parse_assignments(headers, flag="--push-header"))
    return found


def print_push(told: Mapping[str, Any]) -> None:
    """Show how push goes, node by node."""
    rows = sorted(told.get("push", ()), key=lambda row: row["node"])
    if not rows:
        return
    keys = ("node", "state", "concurrency", "in_flight", "accepted", "refused", "failed", "unreachable")
    rates = ("accepted_per_s", "failed_per_s", "last_status")
    print_line()
    header = [key.replace("_", "-") for key in (*keys, *rates)]
    print_table(header, [[row[key] for key in (*keys, *rates)] for row in rows])
    for row in rows:
        if row["last_error"]:
            print_line(f"last failure of node {row['node']}: {one_line(row['last_error'])}")
