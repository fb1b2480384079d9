"""`millstream client`: connected producers and consumers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker
from millstream.cli.options import COMMON, Common, Noun, duration
from millstream.cli.output import counted, one_line, print_list, print_note, sized

if TYPE_CHECKING:
    from millstream.client.admin.clients import Clients, ConnectedClient
    from millstream.protocol.wire.client import Client

DEFAULT_INTERVAL_S = 1.0

app = Noun(help="Show the producers and consumers that are connected.", no_args_is_help=True)


@app.callback()
def client() -> None:
    """Show connected producers and consumers."""


@app.command("list")
def list_(
    show_all: Annotated[
        bool, typer.Option("--all", help="Also show connections that neither produce nor consume.")
    ] = False,
    interval: Annotated[
        float, duration("--interval", "How long to measure rates for.", maximum=60.0)
    ] = DEFAULT_INTERVAL_S,
    common: Common = COMMON,
) -> None:
    """List live producers and consumers. Shows address, client id, software, and bytes per second."""

    async def operation(asking: Client) -> Clients:
        from millstream.client.admin.clients import list_clients

        return await list_clients(asking, interval_s=interval)

    clients = call_broker(common, operation)
    shown = [connected for connected in clients.clients if show_all or connected.roles]
    print_list(
        {"clients": [dataclasses.asdict(connected) for connected in shown], "omitted": clients.omitted},
        ["client id", "node", "address", "software", "version", "role", "in/s", "out/s", "idle"],
        [_row(connected) for connected in shown],
        empty="No producer and no consumer is connected; --all shows every connection.",
        as_json=common.as_json,
    )
    if clients.omitted:
        print_note(f"Not listed: {counted(clients.omitted, 'more connection')}.")


def _row(connected: ConnectedClient) -> list[str | int | None]:
    return [
        one_line(connected.client_id) or None,
        connected.node,
        connected.address,
        connected.software,
        connected.version,
        ", ".join(connected.roles) or None,
        _rate(connected.produced_bytes_per_s),
        _rate(connected.fetched_bytes_per_s),
        f"{connected.idle_s:.0f} s",
    ]


def _rate(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else sized(bytes_per_s)
