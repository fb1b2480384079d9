"""`millstream quota`: limit the bytes per second of users and client ids."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun
from millstream.cli.output import print_list, print_result, sized
from millstream.core.quota import CONSUMER_BYTE_RATE, LIMITS, PRODUCER_BYTE_RATE, QuotaEntity

app = Noun(help="Limit the bytes per second of users and client ids.", no_args_is_help=True)

Entity = Annotated[
    list[str],
    typer.Argument(
        metavar="TYPE:NAME",
        help="Who is limited: user:alice (the name of a principal), client-id:app, or both. `user` and `client-id` "
        "without a name stand for each one without its own quota.",
        show_default=False,
    ),
]


def _parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 1 <= rate <= _RATE_MAX:
        raise typer.BadParameter(f"{text!r} is not a number of bytes per second of at least 1; 1 MiB is 1048576")
    return rate


_RATE_MAX: Final = 1e12
Rate = Annotated[
    float | None, typer.Option(metavar="BYTES", parser=_parse_rate, help="Bytes per second.", show_default=False)
]


@app.command("set")
def set_(entity: Entity, produce: Rate = None, consume: Rate = None, common: Common = COMMON) -> None:
    """Limit the bytes per second of a user, a client id, or both."""
    rates = {PRODUCER_BYTE_RATE: produce, CONSUMER_BYTE_RATE: consume}
    changes = {key: rate for key, rate in rates.items() if rate is not None}
    if not changes:
        raise CommandFailed("pass --produce, --consume or both", ExitCode.USAGE)
    _change(QuotaEntity.parse(entity), changes, common)


@app.command("remove")
def remove(entity: Entity, common: Common = COMMON) -> None:
    """Remove a quota; the next, less specific one applies."""
    _change(QuotaEntity.parse(entity), dict.fromkeys(LIMITS), common)


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List all quotas."""
    from millstream.client.admin.clients import list_quotas

    quotas = call_broker(common, list_quotas)
    listed = [_document(entity, limits) for entity, limits in quotas.items()]
    rows = sorted(
        [str(entity), *(_format_rate(limits.get(key)) for key in LIMITS)] for entity, limits in quotas.items()
    )
    header = ("for", "produce/s", "consume/s")
    print_list({"quotas": listed}, header, rows, empty="No quotas.", as_json=common.as_json)


def _change(entity: QuotaEntity, changes: dict[str, float] | dict[str, None], common: Common) -> None:
    from millstream.client.admin.clients import alter_quota

    call_broker(common, lambda client: alter_quota(client, entity, changes))
    limits = ", ".join(f"{key} {'unlimited' if rate is None else _format_rate(rate)}" for key, rate in changes.items())
    print_result(_document(entity, changes), f"{entity}: {limits}", as_json=common.as_json)


def _document(entity: QuotaEntity, limits: Any) -> dict[str, Any]:
    return {"entity": dict(entity.parts), **limits}


def _format_rate(rate: float | None) -> str | None:
    return None if rate is None else sized(rate)
