"""`millstream demo`: the main job end to end on a broker of its own, with an account of what happened.

It ends with 0 only if everything held, and leaves neither process nor folder behind.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.exit_code import CommandFailed, ExitCode

if TYPE_CHECKING:
    from millstream.cli.demo_account import Account
    from millstream.cli.demo_broker import DemoBroker


def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", envvar="DEMO_KEEP", help="Leave the broker running at the end, until Ctrl-C."),
    ] = False,
) -> None:
    """Show the main job end to end on a broker of its own: fan out, crash, recover, dead letter, redrive."""
    asyncio.run(_run(keep=keep))


async def _run(*, keep: bool) -> None:
    from rich.console import Console

    from millstream.cli.demo_account import Account
    from millstream.cli.demo_broker import DemoBroker
    from millstream.cli.demo_story import Story

    # What fails is part of the story, which tells it in its own words.
    logging.getLogger("millstream").setLevel(logging.CRITICAL)
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    account = Account(Console(highlight=False))
    began = time.monotonic()
    try:
        async with DemoBroker() as broker:
            await Story(broker, account).run()
            if keep:
                await _keep(broker, account)
            await _stop(broker, account)
    except asyncio.CancelledError:
        raise CommandFailed("interrupted; nothing was left behind", ExitCode.INTERRUPTED) from None
    account.end(f"Everything held. It took {time.monotonic() - began:.1f} s, and nothing was left behind.")


async def _keep(broker: DemoBroker, account: Account) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    account.step("The broker keeps running")
    account.tell(f"Kafka clients: {broker.kafka}    health and metrics: http://{broker.http}")
    account.tell(f"Try: millstream tail orders --brokers {broker.kafka}")
    account.tell("Ctrl-C stops it and removes its folder.")
    await stopped.wait()


async def _stop(broker: DemoBroker, account: Account) -> None:
    account.step("Stop")
    code = await broker.stop()
    account.check(code == 0, "SIGTERM: the broker finished its work and stopped cleanly", f"it ended with {code}")
