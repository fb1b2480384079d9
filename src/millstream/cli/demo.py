"""`millstream demo`: the main features end to end on a temporary broker, with a commentary.

It exits with 0 only if every check held, and leaves neither process nor folder behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.markup import escape

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.local_process import LocalProcess, ReservedPort
from millstream.core.child_process import environment_without_settings

if TYPE_CHECKING:
    from rich.console import Console


class Commentary:
    """Prints the commentary, and stops the demo if a check fails."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0

    def step(self, title: str) -> None:
        self._number += 1
        self._console.print(f"\n[bold]{self._number}. {title}[/bold]")

    def say(self, text: str) -> None:
        self._console.print(f"   {escape(text)}", soft_wrap=True)

    def check(self, held: bool, text: str, otherwise: str) -> None:
        """Print a check that held, or end the demo with the reason."""
        if not held:
            raise CommandFailed(f"the demo failed: expected that {text}, but {otherwise}")
        self._console.print(f"   [green]✓[/green] {escape(text)}", soft_wrap=True)

    def end(self, text: str) -> None:
        self._console.print(f"\n[bold green]{text}[/bold green]")


READY_S_MAX = 30.0
STOP_S_MAX = 30.0
KILL_S_MAX = 10.0


class DemoBroker:
    """The demo's broker: as a context manager, it removes its process and folder in any case."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-demo-"))
        self.data = self.folder / "data"
        self._held = (ReservedPort(), ReservedPort())
        self.kafka, self.http = (port.address for port in self._held)
        self.start_s = 0.0
        self._process = self._new_process()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Start and wait until it is ready; every start uses the same ports."""
        started = time.monotonic()
        self._process = self._new_process().start()
        ready = json.loads(await asyncio.to_thread(self._process.first_line, within_s=READY_S_MAX))
        self.kafka, self.http = ready["kafka"], ready["http"]
        self.start_s = time.monotonic() - started

    def _new_process(self) -> LocalProcess:
        flags = {
            # An empty file: a millstream.toml in the working directory is for another node.
            "config": os.devnull,
            "data": self.data,
            "kafka": self.kafka,
            "http": self.http,
            # The demo's webhook is on this machine.
            "push-private-addresses": "true",
        }
        serve = [sys.executable, "-m", "millstream.cli.main", "serve", "--json"]
        return LocalProcess(
            "the broker",
            [*serve, *(f"--{name}={value}" for name, value in flags.items())],
            log=self.folder / "broker.log",
            # Without settings; the key of the webhook's secret goes with the folder.
            environment=environment_without_settings() | {"XDG_STATE_HOME": str(self.folder)},
            piped=True,
        )

    async def stop(self) -> int | None:
        code = await asyncio.to_thread(self._process.stop, within_s=STOP_S_MAX)
        await self.kill()
        return code

    async def kill(self) -> None:
        """Kill it and its children, like `kill -9`, if it runs."""
        if self._process.is_started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait, KILL_S_MAX)
            self._process = self._new_process()


def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", envvar="DEMO_KEEP", help="Keep the broker running at the end, until Ctrl-C."),
    ] = False,
) -> None:
    """Show the main features on a temporary broker. Covers fan-out, a crash, recovery, a dead letter and a redrive."""
    asyncio.run(_run(keep=keep))


async def _run(*, keep: bool) -> None:
    from rich.console import Console

    from millstream.cli.demo_story import Story

    # Failures are part of the demo, which reports them itself.
    logging.getLogger("millstream").setLevel(logging.CRITICAL)
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    account = Commentary(Console(highlight=False))
    started = time.monotonic()
    try:
        async with DemoBroker() as broker:
            await Story(broker, account).run()
            if keep:
                await _keep(broker, account)
            await _stop(broker, account)
    except asyncio.CancelledError:
        raise CommandFailed("interrupted; nothing was left behind", ExitCode.INTERRUPTED) from None
    account.end(f"All checks passed. It took {time.monotonic() - started:.1f} s, and nothing was left behind.")


async def _keep(broker: DemoBroker, account: Commentary) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    account.step("The broker keeps running")
    account.say(f"Kafka clients: {broker.kafka}    health and metrics: http://{broker.http}")
    account.say(f"Try: millstream tail orders --brokers {broker.kafka}")
    account.say("Ctrl-C stops it and removes its folder.")
    await stopped.wait()


async def _stop(broker: DemoBroker, account: Commentary) -> None:
    account.step("Stop")
    code = await broker.stop()
    account.check(code == 0, "SIGTERM: the broker finished its work and stopped cleanly", f"it ended with {code}")
