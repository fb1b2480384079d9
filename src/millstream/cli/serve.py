"""`millstream serve`: run a node until it is stopped.

Every flag derives from the config object, so a setting that is declared there is a flag here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from millstream import __version__
from millstream.cli.exit_code import CommandFailed, ExitCode, exit_code_of
from millstream.cli.options import AsJson, flag
from millstream.cli.output import print_json, print_line
from millstream.core.config import Config
from millstream.core.setting import Setting, parse_address, value_text, without_password

if TYPE_CHECKING:
    from millstream.broker.node import Broker

_logger = logging.getLogger(__name__)

THREAD_SWITCH_S = 0.0005
"""How long the event loop keeps the interpreter while another thread waits for it. A commit takes it several times, so
with Python's 5 ms a busy loop would delay every acknowledgement."""

_FILE = "config"
_JSON = "as_json"

HELP = """Start a node.

It serves Kafka clients, and the API, the console, health checks and metrics over HTTP. It runs in the foreground until
SIGTERM or Ctrl-C, then finishes requests in progress and stops cleanly; a second signal stops it without waiting. Every
setting can also be given as MILLSTREAM_NAME or in millstream.toml; a flag takes precedence over the environment, which
takes precedence over the file. Logs go to stderr. With --json, one line with the actual addresses goes to stdout once
the node is ready."""


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag to a command for every setting of the config object."""
    flags = [_flag(attribute, declared) for attribute, declared in Config.declared().values()]
    config = Annotated[
        Path | None, flag("--config", "FILE", "Read settings from this file. Default: millstream.toml, if it exists.")
    ]
    fixed = [
        inspect.Parameter(_FILE, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config),
        inspect.Parameter(_JSON, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson),
    ]
    command.__signature__ = inspect.Signature([*flags, *fixed])  # type: ignore[attr-defined]
    return command


def _flag(attribute: str, declared: Setting) -> inspect.Parameter:
    default = value_text(declared.default)
    option = flag(
        f"--{declared.name}",
        _metavar(declared),
        f"{declared.description} Default: {default}." if default else declared.description,
    )
    # Text, so that the config object does all parsing, with the same errors for flags and files.
    return inspect.Parameter(
        attribute, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _metavar(declared: Setting) -> str:
    if declared.choices:
        return "|".join(declared.choices)
    if declared.kind is str:
        return "HOST:PORT" if "HOST:PORT" in declared.description else "TEXT"
    return "true|false" if declared.kind is bool else "NUMBER"


@with_config_flags
def serve(**given: Any) -> None:
    """Start a node."""
    import uvloop

    from millstream.core.log_format import set_up_logging

    file, as_json = given.pop(_FILE), given.pop(_JSON)
    names = {attribute: name for name, (attribute, _) in Config.declared().items()}
    flags = {names[attribute]: value for attribute, value in given.items() if value is not None}
    config = Config.load(flags=flags, file=file)
    if Path(config.data).exists() and not Path(config.data).is_dir():
        raise CommandFailed(f"data must be a folder, and {config.data} is not one", ExitCode.USAGE)
    set_up_logging(config.log_level, config.log_format)
    for name, value in flags.items():
        declared = Config.declared()[name][1]
        if declared.is_secret or (declared.is_url and without_password(value) != value):
            _logger.warning(
                "--%s may hold a password, and every user of this machine can see it; set %s in the environment or the "
                "file instead",
                name,
                name,
            )
    sys.setswitchinterval(THREAD_SWITCH_S)
    uvloop.run(_serve(config, as_json=as_json))


async def _serve(config: Config, *, as_json: bool) -> None:
    if config.core_count > 1:
        await _serve_machine(config, as_json=as_json)
        return
    from millstream.broker.node import Broker
    from millstream.child_processes import CHILD_PROCESSES

    broker = Broker(config, children=CHILD_PROCESSES)
    await run_until_stopped(broker, _StopSignal().stop, lambda: _announce(broker, config, as_json=as_json))


async def run_until_stopped(broker: Broker, stop: asyncio.Future[None], announce: Callable[[], None]) -> None:
    """Run a node until it is stopped or fails; announce when it is ready."""
    if not await _start(broker.start(), stop):
        return
    try:
        announce()
        await _wait_for_first(stop, broker.failed)
    finally:
        await broker.stop()
    if broker.stop_failure is not None:
        raise CommandFailed(f"the node has stopped, but not cleanly: {broker.stop_failure}")


async def _serve_machine(config: Config, *, as_json: bool) -> None:
    from millstream.cli.machine import Machine

    stop = _StopSignal().stop
    machine = Machine(config)
    if not await _start(machine.start(), stop):
        return
    try:
        _announce_machine(machine.describe(), config, as_json=as_json)
        await _wait_for_first(stop, machine.failed)
    finally:
        await machine.stop()
    if machine.stop_failures:
        raise CommandFailed(f"not cleanly stopped: {', '.join(machine.stop_failures)}; the next start checks its log")


async def _start(start: Coroutine[Any, Any, None], stop: asyncio.Future[None]) -> bool:
    """Start, which in a cluster may wait for others; return False if the node was stopped meanwhile."""
    starting = asyncio.ensure_future(start)
    await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    if starting.cancelled():
        return False
    await starting
    return True


async def _wait_for_first(stop: asyncio.Future[None], failed: asyncio.Future[None]) -> None:
    done, _ = await asyncio.wait([stop, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed in done and failed.exception() is not None:
        error = failed.exception()
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        code = exit_code_of(cause) if isinstance(cause, Exception) else ExitCode.FAILED
        raise CommandFailed(f"the node is stopping because a component failed: {error}; see the log", code)


class _StopSignal:
    """Listens for stop signals: the first one stops the node cleanly, the second one at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.stop.done():
            _logger.info("stopping", extra={"signal": number.name})
            self.stop.set_result(None)
            return
        # Acknowledged data is already stored. Only the mark of a clean stop is missing, so the next start verifies the
        # log.
        _logger.warning("stopped without waiting for requests in progress; the next start checks the log")
        os._exit(ExitCode.INTERRUPTED)


def _announce(broker: Broker, config: Config, *, as_json: bool) -> None:
    from millstream.broker.cluster.membership import is_any_address

    if as_json:
        registry = {"registry": broker.registry_address} if broker.registry_address else {}
        nodes = [{"id": config.node_id, "pid": os.getpid(), "kafka": broker.kafka_address}]
        print_json({"kafka": broker.kafka_address, "http": broker.http_address, **registry, "nodes": nodes})
        return
    print_line(f"millstream {__version__} is ready")
    is_everywhere = is_any_address(parse_address(broker.kafka_address, name="kafka")[0])
    where = (
        "every address of this machine; connect any Kafka client to one"
        if is_everywhere
        else "connect any Kafka client here"
    )
    print_line(f"  kafka  {broker.kafka_address}  ({where})")
    if broker.http_address:
        print_line(f"  http   {broker.http_url}  (/console /docs /healthz /readyz /metrics /registry)")
    if broker.registry_address:
        scheme = "http" if config.http_tls is None else "https"
        print_line(f"  schema {scheme}://{broker.registry_address}")
    print_line(f"  data   {config.data}")
    print_line("Stop with Ctrl-C.")


def _announce_machine(described: dict[str, Any], config: Config, *, as_json: bool) -> None:
    if as_json:
        print_json(described)
        return
    print_line(f"millstream {__version__} is ready with {len(described['nodes'])} broker processes")
    for node in described["nodes"]:
        print_line(f"  kafka  {node['kafka']}  (node {node['id']}, process {node['pid']})")
    if described["http"]:
        scheme = "http" if config.http_tls is None else "https"
        print_line(f"  http   {scheme}://{described['http']}  (/console /docs /healthz /readyz /metrics /registry)")
    print_line(f"  data   {config.data}")
    print_line("Connect any Kafka client to one of the addresses. Stop with Ctrl-C.")
