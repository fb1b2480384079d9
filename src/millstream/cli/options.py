"""Options that many commands share, so that they are spelled and explained the same everywhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, Self, get_type_hints

import typer
from typer.models import ArgumentInfo

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.output import print_note
from millstream.core.errors import InvalidSetting
from millstream.core.setting import parse_duration_ms, without_password

DEFAULT_BROKERS = "127.0.0.1:9092"


def flag(spelled: str, metavar: str, text: str, **more: Any) -> Any:
    """Declare an option with a value; its default is not shown."""
    return typer.Option(spelled, metavar=metavar, help=text, show_default=False, **more)


def duration(spelled: str, text: str, *, minimum: float = 0.0, maximum: float = math.inf, **more: Any) -> Any:
    """Declare a flag that takes a length of time, as in 30s, 15m or 1h; its value is in seconds."""

    def parse(text_or_seconds: str | float) -> float:
        try:
            seconds = parse_duration_ms(str(text_or_seconds), name=spelled) / 1000
        except InvalidSetting:
            raise typer.BadParameter(f"{text_or_seconds!r} is not a length of time such as 30s, 15m or 1h") from None
        if not minimum <= seconds <= maximum:
            bound = f"below {minimum:g}" if seconds < minimum else f"above {maximum:g}"
            raise typer.BadParameter(f"{text_or_seconds} is {bound} s")
        return seconds

    return typer.Option(spelled, metavar="DURATION", help=text, parser=parse, **more)


SHARED: Final = {"--brokers": 1, "--timeout": 1, "--json": 0}
"""Options that most commands have and that may precede the command, each with its number of values."""


def default_brokers() -> str:
    """The brokers for a command that names none: those of the environment, of the chosen profile, or the default."""
    from millstream.cli.connection import chosen_profile

    profile = chosen_profile()
    of_profile = profile.brokers if profile is not None else ""
    return os.environ.get("MILLSTREAM_BROKERS") or of_profile or DEFAULT_BROKERS


def _brokers_of_profile(ctx: typer.Context, value: str) -> str:
    """Use the brokers of the chosen profile, unless a flag or a variable names others."""
    source = ctx.get_parameter_source("brokers")
    return default_brokers() if source is not None and source.name == "DEFAULT" else value


Brokers = Annotated[
    str,
    typer.Option(
        "--brokers",
        callback=_brokers_of_profile,
        envvar="MILLSTREAM_BROKERS",
        metavar="HOST:PORT[,...]",
        help="The brokers to connect to; the first one that responds is used.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]

TimeoutSeconds = Annotated[
    float,
    duration(
        "--timeout",
        "How long to wait for a broker before giving up. Default: 10s.",
        minimum=0.1,
        envvar="MILLSTREAM_TIMEOUT",
        show_default=False,
    ),
]
DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Common:
    """The options of almost all commands: how to print, which brokers to ask, and how long to wait for them."""

    as_json: AsJson = False
    brokers: Brokers = DEFAULT_BROKERS
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S

    def waiting(self, seconds: float) -> Self:
        return replace(self, timeout=self.timeout + seconds)


COMMON: Final = Common()

Partitions = Annotated[
    list[int] | None,
    typer.Option(
        "--partition", "-p", metavar="NUMBER", min=0, help="Only this partition; may be repeated. Default: all."
    ),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting; may be repeated. Secrets and long texts are read from a file: NAME=@FILE.",
        show_default=False,
    ),
]

Unset = Annotated[
    list[str] | None,
    typer.Option(
        "--unset", metavar="NAME", help="Reset this setting to its default; may be repeated.", show_default=False
    ),
]

IfMissing = Annotated[bool, typer.Option("--if-not-exists", help="Succeed without changes if it exists.")]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


Throttle = Annotated[
    int | None,
    flag(
        "--throttle",
        "BYTES",
        "How many bytes per second each node may fetch for the moves. Default: 33554432 (32 MiB).",
        min=1024,
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when the plan has ended; Ctrl-C leaves it running.")]


_CONNECTION_HELP: Final = (
    "It also takes --profile, --tls, --tls-ca, --tls-cert, --tls-key, --user, --password-file and --token-file; see "
    "millstream --help."
)


class Noun(typer.Typer):
    """The commands of a noun; each takes the fields of its dataclass parameters as options."""

    def command(self, name: str | None = None, **given: Any) -> Callable[[Any], Any]:
        """Add the function that follows as a command."""

        def add_spread(command: Callable[..., None]) -> Callable[..., None]:
            expanded = expand_options(command)
            taken = signature(expanded, eval_str=True).parameters
            for parameter in taken.values():
                _name_argument(parameter)
            epilog = _CONNECTION_HELP if "brokers" in taken else None
            super(Noun, self).command(name, **{"epilog": epilog, **given})(expanded)
            return command

        return add_spread


def _name_argument(parameter: Parameter) -> None:
    """Call an argument in help texts and errors by its name in capitals, if it has no other."""
    for declared in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(declared, ArgumentInfo) and declared.metavar is None:
            declared.metavar = parameter.name.upper()


def expand_options(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """Accept the fields of a command's dataclass parameters as options, except those named in `without`.

    The default of such a parameter holds the defaults of the options, if it has one.
    """
    parameters: list[Parameter] = []
    spread_over: dict[str, tuple[type, list[str]]] = {}
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        taken = [field for field in fields(kind) if field.name not in without]
        annotations = get_type_hints(kind, include_extras=True)
        for field in taken:
            declared = Parameter.empty if field.default is MISSING else field.default
            default = getattr(parameter.default, field.name, declared)
            annotation = annotations[field.name]
            parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        spread_over[parameter.name] = (kind, [field.name for field in taken])

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (kind, taken) in spread_over.items():
            given[name] = kind(**{field: given.pop(field) for field in taken})
        command(**given)

    vars(run)["__signature__"] = Signature(parameters)
    return run


def confirm(question: str, *, unless: bool) -> None:
    """Ask for confirmation at a terminal, but never a script."""
    if not unless and sys.stdin.isatty() and not typer.confirm(question, err=True):
        raise CommandFailed("cancelled; nothing was changed")


def parse_assignments(texts: list[str], *, flag: str) -> dict[str, str]:
    """Split the NAME=VALUE texts of a repeatable flag."""
    values: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{flag} takes NAME=VALUE, not {text!r}")
        values[name] = value
    return values


def parse_settings(texts: list[str], *, secret: Collection[str], files: Collection[str] = ()) -> dict[str, str]:
    """Split the texts of --set; those of `secret` settings must be in files, and those of `files` may be."""
    values = parse_assignments(texts, flag="--set")
    for name, value in values.items():
        if name in secret and value:
            values[name] = read_secret(value, flag=f"--set {name}=")
        elif name in files:
            values[name] = read_text(value, flag=f"--set {name}=")
    return values


def read_secret(text: str, *, flag: str) -> str:
    """Return a secret from the file named as @FILE, or from the standard input as @-; never one from a flag."""
    if not text.startswith("@"):
        raise CommandFailed(
            f"{flag}: every user of a machine sees the arguments of its processes; pass @FILE, or @- to read the "
            "standard input",
            ExitCode.USAGE,
        )
    return read_text(text, flag=flag).strip()


def note_password(url: str, *, flag: str, instead: str) -> None:
    """Point out a password in a URL that was given as a flag, where the command accepts one."""
    if without_password(url) != url:
        print_note(f"{flag} holds a password, and every user of this machine can see it; {instead} instead")


def read_text(text: str, *, flag: str) -> str:
    """Return the text of a flag, or the contents of the file named as @FILE; @- is the standard input.

    Blank lines at the beginning stay, since errors count lines.
    """
    if not text.startswith("@"):
        return text
    if text == "@-":
        return sys.stdin.read().rstrip()
    return read_text_file(Path(text.removeprefix("@")), flag=flag).rstrip()


def read_text_file(path: Path, *, flag: str) -> str:
    """Return the text of the file that a flag or an argument names."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandFailed(f"{flag}: there is no file {path}", ExitCode.NOT_FOUND) from None
    except OSError as error:
        raise CommandFailed(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandFailed(f"{flag}: {path} is not UTF-8 text", ExitCode.USAGE) from None
