"""A form shown again with what the user entered, and with the outcome: why it was refused, or what a check found.

This works on the rendered page, so it holds for every form, regardless of its template. Templates escape everything
that they insert: a bracket in the page is that of a tag, and a quote that of an attribute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape, unescape
from typing import Final
from urllib.parse import unquote

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
    """
    form = next((one for one in _FORM.finditer(page) if _is_sent(one, action, entered)), None)
    if form is None or all(_type(field) == "hidden" for field in _FIELD.findall(form[1])):
        return _MAIN.sub(lambda main: main[0] + outcome, page, count=1)
    filled = _FIELD.sub(lambda field: _filled(field[0], entered, wrong), form[1])
    return _with_open_details(page[: form.start(1)]) + outcome + filled + page[form.end(1) :]


def _is_sent(form: re.Match[str], action: str, entered: Mapping[str, str]) -> bool:
    """Whether a form is the one that was sent: a page may have several with one address, or one per row."""
    fields = _FIELD.findall(form[1])
    hidden = {_attribute(one, "name"): _attribute(one, "value") for one in fields if _type(one) == "hidden"}
    return (
        unquote(_attribute(form[0], "action")) == unquote(action)
        and entered.keys() - _OWN <= {_attribute(one, "name") for one in fields}
        and all(entered.get(name) == value for name, value in hidden.items() if name not in _OWN)
    )


def _attribute(tag: str, name: str) -> str:
    match = re.search(rf'\s{name}="([^"]*)"', tag.partition(">")[0])
    return "" if match is None else unescape(match[1])


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
        return f"{tag.partition('>')[0]}>\n{escape(value)}</textarea>"
    bare = re.sub(r'\svalue="[^"]*"', "", tag)
    return bare.replace("<input", f'<input value="{escape(value)}"', 1)


def _chosen(option: re.Match[str], value: str) -> str:
    own = _attribute(option[0], "value") if ' value="' in option[1] else unescape(option[2])
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
