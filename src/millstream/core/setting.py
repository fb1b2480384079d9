"""Declarations of settings: description, default, bounds, and whether a change needs a restart.

Flags, environment variables, the file and the documentation derive from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from millstream.core.errors import InvalidSetting

V = TypeVar("V")

_KEY = "millstream.setting"

_INT64_MAX = 2**63 - 1
_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|w)?\s*\Z")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_QUOTED_MAX = 100

HIDDEN = "(hidden)"
"""Shown in place of a secret value."""


class SealedValue(NamedTuple):
    """A secret as the catalog stores it, which this node cannot open."""

    text: str
    problem: str


_USERINFO = re.compile(r"(?<=://)([^:@/,]*):.*@")
_BARE_USERINFO = re.compile(r"^([^:@/,]*):.*@")
_PASSWORD = re.compile(r"([?&](?:ssl)?password=)[^&]*")


def without_password(url: str) -> str:
    """Return a URL, or several separated by commas, without passwords; the scheme may be missing."""
    return _PASSWORD.sub(r"\1***", (_USERINFO if "://" in url else _BARE_USERINFO).sub(r"\1:***@", url))


def seal_problem(sealed: Mapping[str, SealedValue]) -> str:
    """Return why secrets cannot be opened, as one sentence; empty if all can."""
    return "; ".join(sorted(value.problem for value in sealed.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    kind: type
    default: Any
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    length_max: int | None = None
    """For free text: one line of at most this many characters."""
    is_fixed: bool = False
    """Whether the default is the only allowed value; declared because tools send or show it."""
    is_secret: bool = False
    """Whether the value is secret: only its existence is shown."""
    is_url: bool = False
    """Whether the value is a URL that may contain a password, which is not shown."""
    sent_to: tuple[str, ...] = ()
    """For a secret that is sent: the setting that says where, followed by those that say how."""

    def parse(self, text: str) -> Any:
        """Parse a flag, variable or file entry, or raise `InvalidSetting`."""
        if self.kind is bool:
            value: Any = self._parse_bool(text)
        elif self.kind is str:
            value = text
        else:
            try:
                # Reject 1_000, which only Python reads as a number.
                value = self.kind(text.replace("_", "?"))
            except ValueError:
                noun = "a whole number" if self.kind is int else "a number"
                raise InvalidSetting(f"{self.name} must be {noun}, not {_quote_value(text)!r}") from None
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Raise `InvalidSetting` when a value is out of bounds."""
        if self.is_fixed and value != self.default:
            raise InvalidSetting(
                f"{self.name} is always {str(self.default).lower()}, not {value!r}; {self.description}"
            )
        if self.choices and value not in self.choices:
            raise InvalidSetting(f"{self.name} must be one of {', '.join(self.choices)}, not {_quote_value(value)!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSetting(f"{self.name} must be a number, not {value}")
        if isinstance(value, int) and abs(value) > _INT64_MAX:
            raise InvalidSetting(f"{self.name} must be a number of at most 64 bits, not one of {value.bit_length()}")
        if self.minimum is not None and value < self.minimum:
            raise InvalidSetting(f"{self.name} must be at least {_format_number(self.minimum)}, not {value}")
        if self.maximum is not None and value > self.maximum:
            raise InvalidSetting(f"{self.name} must be at most {_format_number(self.maximum)}, not {value}")
        if self.length_max is not None:
            self._check_text(value, self.length_max)

    def _check_text(self, text: str, length_max: int) -> None:
        if len(text) > length_max:
            raise InvalidSetting(f"{self.name} has at most {length_max} characters, not {len(text)}")
        if not text.isprintable():
            raise InvalidSetting(
                f"{self.name} must be one line of printable text, without line breaks or control characters"
            )

    def _parse_bool(self, text: str) -> bool:
        lowered = text.strip().lower()
        if lowered in ("true", "1", "yes", "on"):
            return True
        if lowered in ("false", "0", "no", "off"):
            return False
        raise InvalidSetting(f"{self.name} must be true or false, not {_quote_value(text)!r}")


def _quote_value(value: Any) -> Any:
    return f"{value[:_QUOTED_MAX]}…" if isinstance(value, str) and len(value) > _QUOTED_MAX else value


def _format_number(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def setting(
    name: str,
    default: Any,
    description: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    length_max: int | None = None,
    is_fixed: bool = False,
    is_secret: bool = False,
    is_url: bool = False,
    sent_to: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field as a setting."""
    declared = Setting(
        name=name,
        kind=type(default),
        default=default,
        description=description,
        minimum=minimum,
        maximum=maximum,
        choices=choices,
        length_max=length_max,
        is_fixed=is_fixed,
        is_secret=is_secret,
        is_url=is_url,
        sent_to=sent_to,
    )
    return dataclasses.field(default=default, metadata={_KEY: declared}, repr=not (is_secret or is_url))


def parse_duration_ms(text: str, *, name: str, unit: str = "s") -> int:
    """Parse a duration such as `90s`, `15m` or `1h`; a plain number is in `unit`s."""
    match = _DURATION.match(text)
    if match is None:
        raise InvalidSetting(f"{name} must be a duration such as 90s, 15m, 1h or 1d, not {text!r}")
    return round(float(match[1]) * _UNIT_MS[match[2] or unit])


def milliseconds_text(seconds: float, declared: Setting, *, name: str) -> str:
    """Convert seconds to a setting in milliseconds; errors use the caller's name for it, and seconds.

    Negative values of a setting, which have special meanings, cannot be given in seconds.
    """
    in_seconds = dataclasses.replace(
        declared,
        name=f"{name} (in seconds)",
        minimum=max(0.0, declared.minimum or 0.0) / 1000,
        maximum=None if declared.maximum is None else declared.maximum / 1000,
    )
    in_seconds.check(int(seconds) if float(seconds).is_integer() else seconds)
    return str(round(seconds * 1000))


@contextmanager
def named_by_caller(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the names of settings in errors with the caller's, such as flags; `names` maps one to the other."""
    try:
        yield
    except InvalidSetting as error:
        known = "|".join(map(re.escape, names)) or "(?!)"
        text = re.sub(rf"(?<![\w.])({known})(?![\w.]*\w)", lambda match: names[match[0]], str(error))
        raise InvalidSetting(text) from error


def settings_of(holder: type) -> Iterator[tuple[str, Setting]]:
    """Yield `(attribute name, setting)` for every setting that a dataclass declares, in order."""
    for field in dataclasses.fields(holder):
        if _KEY in field.metadata:
            yield field.name, field.metadata[_KEY]


def value_text(value: object) -> str:
    """Return a value as settings are written: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Settings:
    """The base of dataclasses of settings, which users give and see as text by name."""

    __slots__ = ()

    holder: ClassVar[str]
    """The noun that has these settings, with its article."""
    missing: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Settings that Kafka has and Millstream does not, each with the reason."""

    @classmethod
    def declared(cls) -> dict[str, Setting]:
        """Return every declaration, by the setting's name."""
        return {declared.name: declared for _, declared in settings_of(cls)}

    @classmethod
    def from_strings(cls, texts: Mapping[str, str]) -> Self:
        """Parse settings; raise `InvalidSetting` for an invalid one."""
        settings = cls(**cls._parse(texts))
        settings._check()
        return settings

    def as_strings(self) -> dict[str, str]:
        """Return every setting as text, by name, without secrets."""
        texts = {declared.name: value_text(getattr(self, attribute)) for attribute, declared in settings_of(type(self))}
        return hide_secrets(type(self), texts)

    @classmethod
    def unknown(cls, name: str) -> InvalidSetting:
        """Build the error for a setting that does not exist."""
        if name in cls.missing:
            return InvalidSetting(f"{name} is a setting of Kafka that Millstream does not have: {cls.missing[name]}")
        known = sorted(cls.declared())
        hint = suggestion(name, known) or f"; known are: {', '.join(known)}"
        return InvalidSetting(f"unknown setting {name!r} of {cls.holder}{hint}")

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raise `InvalidSetting` for the first setting that does not exist."""
        declared = cls.declared()
        for name in names:
            if name not in declared:
                raise cls.unknown(name)

    @classmethod
    def _parse(cls, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return values by attribute."""
        by_name = {declared.name: (attribute, declared) for attribute, declared in settings_of(cls)}
        values: dict[str, Any] = {}
        for name, text in texts.items():
            if name not in by_name:
                raise cls.unknown(name)
            attribute, declared = by_name[name]
            values[attribute] = declared.parse(text)
        return values

    def _check(self) -> None:
        """Raise `InvalidSetting` for settings that contradict each other."""


def with_changes(before: Mapping[str, V], changes: Mapping[str, V | None]) -> dict[str, V]:
    """Return settings with some of them changed; None unsets one."""
    return {name: value for name, value in {**before, **changes}.items() if value is not None}


def secret_names(holder: type) -> frozenset[str]:
    """Return the names of the settings that a dataclass declares as secret."""
    return _secret_names(holder)


@cache
def _secret_names(holder: type[Any]) -> frozenset[str]:
    return frozenset(declared.name for _, declared in settings_of(holder) if declared.is_secret)


def hide_secrets(holder: type, values: Mapping[str, str]) -> dict[str, str]:
    """Return settings by name, without the values of those that `holder` declares as secret."""
    secret = secret_names(holder)
    return {name: HIDDEN if value and name in secret else value for name, value in values.items()}


def check_destinations(
    holder: type, declared: Collection[str], before: Mapping[str, str], changes: Mapping[str, str | None]
) -> None:
    """Raise `InvalidSetting` if a change would send a declared secret elsewhere without setting it again.

    Otherwise, whoever may change the destination would learn secrets that are not shown.
    """
    by_name = {definition.name: definition for _, definition in settings_of(holder)}
    for secret in by_name.values():
        if secret.name not in declared or secret.name in changes:
            continue
        for at, name in enumerate(secret.sent_to):
            setting = by_name[name]
            default = value_text(setting.default)
            former, new = before.get(name, default), changes.get(name, before.get(name)) or default
            is_same = setting.parse(former) == setting.parse(new)
            if not is_same and (at or not _destinations(new) <= _destinations(former)):
                raise InvalidSetting(
                    f"{secret.name} is not sent elsewhere, or in another way, than it was set for: with a new {name}, "
                    f"set {secret.name} again, or reset it"
                )


def _destinations(text: str) -> frozenset[str]:
    """Return the origin of a URL, or addresses separated by commas; a malformed URL is returned whole."""
    if "://" in text:
        try:
            parts = urlsplit(text)
        except ValueError:
            return frozenset([text])
        return frozenset([f"{parts.scheme}://{parts.netloc.lower()}"])
    return frozenset(part.strip().lower() for part in text.split(",") if part.strip())


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'retention.ms'?` if a known name is close, otherwise an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_address(text: str, *, name: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 host is written in brackets."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535 or not {*"/ "}.isdisjoint(host):
        raise InvalidSetting(f"{name} must be HOST:PORT (for example 127.0.0.1:9092), not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)
