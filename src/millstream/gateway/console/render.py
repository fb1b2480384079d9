"""Templates, how values are shown (numbers, sizes, ages, times and the bytes of messages), and refused forms."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final
from urllib.parse import unquote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from millstream import __version__
from millstream.client.admin.messages import utc
from millstream.core.setting import value_text
from millstream.gateway.console.visit import PREFIX, address, command

SHOWN_BYTES_MAX: Final = 64 * 1024
"""The most that is shown of one value; the rest is available as a download."""
PREVIEW_CHARS: Final = 160

_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) or value >= 100 or value == int(value):
        return f"{value:,.0f}"
    # A rate below 0.1 must not look like none.
    return f"{value:,.1f}" if value >= 0.1 else f"{value:.2f}" if value >= 0.01 else "<0.01"


def size(value: float | None) -> str:
    if value is None:
        return "–"
    for unit in _SIZES:
        if 0 < value < 1 and unit == "B":
            return "<1 B"
        if value < 1024 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""


def age(seconds: float | None) -> str:
    """Show a length of time by its largest unit, and by the next one as long as the first is small."""
    if seconds is None:
        return "–"
    remaining = int(seconds)
    for (unit_s, unit), (next_s, next_unit) in pairwise(_AGES):
        if remaining >= unit_s:
            rest = remaining % unit_s // next_s
            return f"{remaining // unit_s} {unit}" + (
                f" {rest} {next_unit}" if rest and remaining < 10 * unit_s else ""
            )
    return f"{remaining} s"


def moment(timestamp_ms: int | None) -> Markup:
    """Show a time; the script of the page converts it to the viewer's zone."""
    text = None if timestamp_ms is None else utc(timestamp_ms)
    if text is None:
        return Markup("–")
    plain = text.replace("T", " ").replace("Z", " UTC")
    return Markup('<time datetime="{}">{}</time>').format(text, plain)


def since(timestamp_ms: int) -> float:
    return max(0.0, time.time() - timestamp_ms / 1000)


def text_of(value: bytes | None, *, chars_max: int = PREVIEW_CHARS) -> str:
    """Show the beginning of some bytes as one line of text."""
    if value is None:
        return "null"
    try:
        text = value[: 4 * chars_max].decode(errors="strict" if len(value) <= 4 * chars_max else "ignore")
    except UnicodeDecodeError:
        return hexadecimal(value[:24]) + ("…" if len(value) > 24 else "")
    text = " ".join(
        "".join(
            character if character.isprintable() else "·" if not character.isspace() else " " for character in text
        ).split()
    )
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def hexadecimal(value: bytes) -> str:
    return value.hex(" ")


def hex_dump(value: bytes) -> str:
    """Show bytes as a hexadecimal dump with offsets."""
    lines = []
    for at in range(0, len(value), 16):
        row = value[at : at + 16]
        shown = "".join(chr(cell) if 32 <= cell < 127 else "." for cell in row)
        lines.append(f"{at:08x}  {row.hex(' '):<47}  {shown}")
    return "\n".join(lines)


def as_json(value: bytes) -> str | None:
    """Show a JSON document indented; None if it is not JSON."""
    try:
        return json.dumps(json.loads(value), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def prose(text: str) -> Markup:
    """Show a description, with text in backticks as code."""
    parts = text.split("`")
    shown = [Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(parts)]
    return Markup("").join(shown)


def counted(value: int, noun: str, plural: str = "") -> str:
    return f"{number(value)} {noun if value == 1 else plural or noun + 's'}"


_WIDTH, _HEIGHT = 240, 56
_HOUR_S: Final = 3600
_SHORTEST: Final = 12
"""A chart shows a twelfth of its hour or more, so that the first samples are not a single dot at its edge."""


def chart(values: Sequence[float | None], label: str, *, as_size: bool = False) -> Markup:
    """Draw a chart of the last hour, or of what is known of it; the stylesheet colours it."""
    first = next((at for at, value in enumerate(values) if value is not None), len(values))
    count = max(len(values) - first, len(values) // _SHORTEST, 2)
    window = values[-count:]
    known = [value for value in window if value is not None]
    top = max(known, default=0.0)
    step = _WIDTH / (count - 1)
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in enumerate(window):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at * step, _HEIGHT - 1 - value / (top or 1.0) * (_HEIGHT - 4)))
    drawn = Markup("").join(_run(run) for run in runs if run)
    show = size if as_size else number
    shape = 'class="chart" viewBox="0 0 {w} {h}" preserveAspectRatio="none"'
    return Markup(
        f'<svg {shape} role="img" aria-label="{{label}}"><path class="base" d="M0 {{base}}H{{w}}"/>{{drawn}}</svg>'
        '<span class="axis" aria-hidden="true"><span>{ago}</span><span>{top}</span><span>now</span></span>'
    ).format(
        w=_WIDTH,
        h=_HEIGHT,
        base=_HEIGHT - 0.5,
        label=label,
        drawn=drawn,
        ago=age(_HOUR_S * count / len(values)) if values else "",
        top=f"max {show(top)}" if known else "collecting",
    )


def _run(points: list[tuple[float, float]]) -> Markup:
    if len(points) == 1:
        # A single point would not be visible.
        points = [(max(0.0, points[0][0] - 2), points[0][1]), points[0]]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup(
        '<polygon class="area" points="{x:.1f},{h} {line} {y:.1f},{h}"/><polyline class="line" points="{line}"/>'
    ).format(x=points[0][0], y=points[-1][0], h=_HEIGHT, line=line)


@cache
def environment() -> Environment:
    """Return the templates; everything that they insert is escaped."""
    made = Environment(
        loader=PackageLoader("millstream.gateway.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        number=number,
        size=size,
        age=age,
        moment=moment,
        since=since,
        text_of=text_of,
        counted=counted,
        prose=prose,
        plain=value_text,
    )
    made.globals.update(address=address, command=command, chart=chart, prefix=PREFIX, version=__version__)
    return made


def render(template: str, context: dict[str, Any]) -> bytes:
    return environment().get_template(template).render(context).encode()


def static_file(name: str) -> tuple[bytes, str] | None:
    """Return a file that pages use, and its content type; None if there is none."""
    return _static_files().get(name)


@cache
def _static_files() -> dict[str, tuple[bytes, str]]:
    # All at once: names that clients send must neither stay in memory nor reach the disk.
    assets = files("millstream.gateway.console").joinpath("static").iterdir()
    kinds = {file: _TYPES.get(file.name.rpartition(".")[2]) for file in assets}
    return {file.name: (file.read_bytes(), kind) for file, kind in kinds.items() if kind is not None}


_FORM: Final = re.compile(r'<form\b[^>]*\bmethod="post"[^>]*>(.*?)</form>', re.DOTALL)
_FIELD: Final = re.compile(r"<input\b[^>]*>|<select\b[^>]*>.*?</select>|<textarea\b[^>]*>.*?</textarea>", re.DOTALL)
_OPTION: Final = re.compile(r"(<option\b[^>]*?)(?: selected)?>([^<]*)")
_DETAILS: Final = re.compile(r"<(/?)details\b[^>]*>")
_MAIN: Final = re.compile(r"<main\b[^>]*>")
_OWN: Final = frozenset({"csrf", "back", "only"})
"""Values that a form sends besides its fields: its token, the address of its page, and the clicked button."""

OUTCOME: Final = "outcome"
"""The id of the element that shows the outcome."""


def show_again(page: str, action: str, entered: Mapping[str, str], outcome: str, wrong: str = "") -> str:
    """Return a page with the entered values in the form that was sent, opened, and the outcome at its top.

    A page that does not offer the form any more, and a form that is only a button, have the outcome at the top of the
    page. Passwords are not shown again. `wrong` names the field that is at fault, if known.

    This works on the rendered page, so it holds for every form, regardless of its template. Templates escape everything
    that they insert: a bracket in the page is that of a tag, and a quote that of an attribute.
    """
    form = next((form for form in _FORM.finditer(page) if _is_sent(form, action, entered)), None)
    if form is None or all(_type(field) == "hidden" for field in _FIELD.findall(form[1])):
        return _MAIN.sub(lambda main: main[0] + outcome, page, count=1)
    filled = _FIELD.sub(lambda field: _filled(field[0], entered, wrong), form[1])
    return _with_open_details(page[: form.start(1)]) + outcome + filled + page[form.end(1) :]


def _is_sent(form: re.Match[str], action: str, entered: Mapping[str, str]) -> bool:
    """Whether a form is the one that was sent: a page may have several with one address, or one per row."""
    fields = _FIELD.findall(form[1])
    hidden = {_attribute(field, "name"): _attribute(field, "value") for field in fields if _type(field) == "hidden"}
    return (
        unquote(_attribute(form[0], "action")) == unquote(action)
        and entered.keys() - _OWN <= {_attribute(field, "name") for field in fields}
        and all(entered.get(name) == value for name, value in hidden.items() if name not in _OWN)
    )


def _attribute(tag: str, name: str) -> str:
    match = re.search(rf'\s{name}="([^"]*)"', tag.partition(">")[0])
    return "" if match is None else html.unescape(match[1])


def _type(tag: str) -> str:
    return _attribute(tag, "type") if tag.startswith("<input") else ""


def _filled(tag: str, entered: Mapping[str, str], wrong: str) -> str:
    name, kind = _attribute(tag, "name"), _type(tag)
    if name and name == wrong:
        tag = re.sub(r"^<\w+", rf'\g<0> aria-invalid="true" aria-describedby="{OUTCOME}"', tag)
    value = entered.get(name, "")
    if kind in ("hidden", "password"):
        return tag
    if kind in ("checkbox", "radio"):
        is_checked = value == _attribute(tag, "value")
        return tag.replace("<input", "<input checked", 1) if is_checked else tag.replace(" checked", "", 1)
    if tag.startswith("<select"):
        return _OPTION.sub(lambda option: _chosen(option, value), tag)
    if tag.startswith("<textarea"):
        # Browsers drop the first line feed.
        return f"{tag.partition('>')[0]}>\n{html.escape(value)}</textarea>"
    bare = re.sub(r'\svalue="[^"]*"', "", tag)
    return bare.replace("<input", f'<input value="{html.escape(value)}"', 1)


def _chosen(option: re.Match[str], value: str) -> str:
    own = _attribute(option[0], "value") if ' value="' in option[1] else html.unescape(option[2])
    return f"{option[1]}{' selected' if own == value else ''}>{option[2]}"


def _with_open_details(before: str) -> str:
    """Open the elements around the form that would hide it, given the page up to there."""
    around: list[re.Match[str]] = []
    for tag in _DETAILS.finditer(before):
        if tag[1]:
            around.pop()
        else:
            around.append(tag)
    for tag in reversed(around):
        if not tag[0].endswith(" open>"):
            before = f"{before[: tag.end() - 1]} open>{before[tag.end() :]}"
    return before
