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
from millstream.cli.local_process import ReservedPort
from millstream.core.child_process import environment_without_settings

if TYPE_CHECKING:
    from rich.console import Console


class Commentary:
    """Prints the commentary, and stops the demo if a check fails."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0

    def step(self, title: str) -> None:
        """Start the next step."""
        self._number += 1
        self._console.print(f"\n[bold]{self._number}. {title}[/bold]")

    def say(self, text: str) -> None:
        """Print a remark."""
        self._console.print(f"   {escape(text)}", soft_wrap=True)

    def check(self, held: bool, text: str, otherwise: str) -> None:
        """Print a check that held, or end the demo with the reason."""
        if not held:
            raise CommandFailed(f"the demo failed: expected that {text}, but {otherwise}")
        self._console.print(f"   [green]✓[/green] {escape(text)}", soft_wrap=True)

    def end(self, text: str) -> None:
        """Print the conclusion."""
        self._console.print(f"\n[bold green]{text}[/bold green]")


READY_S_MAX = 30.0
STOP_S_MAX = 30.0
_LOG_LINES_SHOWN = 20


class DemoBroker:
    """The demo's broker: as a context manager, it removes its process and folder in any case."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-demo-"))
        self.data = self.folder / "data"
        self._held = (ReservedPort(), ReservedPort())
        self.kafka, self.http = (port.address for port in self._held)
        self.start_s = 0.0
        self._log = self.folder / "broker.log"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._running().pid

    async def start(self) -> None:
        """Start and wait until it is ready; every start uses the same ports."""
        started = time.monotonic()
        command = [sys.executable, "-m", "millstream.cli.main", "serve", "--json", "--data", str(self.data)]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                "--kafka",
                self.kafka,
                "--http",
                self.http,
                # The demo's webhook is on this machine.
                "--push-private-addresses",
                "true",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=self._environment(),
                # Ctrl-C in the terminal is for the demo, which then stops the broker in order.
                process_group=0,
            )
        ready = json.loads(await self._first_line(self._process))
        self.kafka, self.http = ready["kafka"], ready["http"]
        self.start_s = time.monotonic() - started

    def _environment(self) -> dict[str, str]:
        """Return the environment without settings; the key of the webhook's secret goes with the folder."""
        return environment_without_settings() | {"XDG_STATE_HOME": str(self.folder)}

    async def stop(self) -> int:
        """Stop the broker cleanly, and return its exit code."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S_MAX):
                code = await process.wait()
        except TimeoutError:
            raise CommandFailed(f"the broker did not stop within {STOP_S_MAX:g} s{self._log_tail()}") from None
        await self.kill()
        return code

    async def kill(self) -> None:
        """Kill it and its children, like `kill -9`, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise CommandFailed(f"the broker is not running{self._log_tail()}")
        return self._process

    async def _first_line(self, process: asyncio.subprocess.Process) -> bytes:
        if process.stdout is None:
            raise CommandFailed("the broker was started without a pipe to it")
        try:
            async with asyncio.timeout(READY_S_MAX):
                line = await process.stdout.readline()
        except TimeoutError:
            raise CommandFailed(f"the broker was not ready within {READY_S_MAX:g} s{self._log_tail()}") from None
        if not line:
            raise CommandFailed(f"the broker exited with code {await process.wait()}{self._log_tail()}")
        return line

    def _log_tail(self) -> str:
        if not self._log.exists():
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "; its log ends with:\n" + "\n".join(lines)


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
