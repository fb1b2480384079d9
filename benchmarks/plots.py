"""The results as plots: rates, latency percentiles and CPU seconds of all servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from benchmarks.latency import ACKNOWLEDGED, END_TO_END, PERCENTS
from benchmarks.results import Line, Results
from benchmarks.subject import BARE, CONSUMED, DISCARD, KAFKA, LIMIT, MILLSTREAM, PRODUCED, in_order

mpl.use("agg")
from matplotlib import pyplot

COLORS = {LIMIT: "#9aa0a6", MILLSTREAM: "#0b6e4f", KAFKA: "#c8553d", DISCARD: "#d9d9d9", BARE: "#74b49b"}
_OTHERS = ("#3d5a80", "#8d6a9f", "#e0a458", "#5b8e7d", "#7a7a7a")
_BAR_INCHES = 0.17
_DPI = 130


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the plots, and return the files."""
    drawn = []
    for direction in (PRODUCED, CONSUMED):
        if lines := list(results.lines(direction)):
            drawn.append(_rates(lines, direction, folder / f"{direction}.png"))
            drawn.append(_cpu(lines, direction, folder / f"{direction}-cpu.png"))
    if lines := list(results.lines(ACKNOWLEDGED, END_TO_END)):
        drawn.append(_latencies(lines, folder / "latency.png"))
    return drawn


def color_of(name: str, names: list[str]) -> str:
    """Return the color of a server, the same in every plot."""
    others = sorted(set(names) - set(COLORS))
    return COLORS.get(name) or _OTHERS[others.index(name) % len(_OTHERS)]


def _names(lines: list[Line]) -> list[str]:
    return in_order(name for line in lines for name in line.rounds)


def axis_end(values: Sequence[float]) -> float:
    """Return the end of an axis, which excludes a few very large values so that the others remain distinguishable."""
    usual = median(values)
    return max((value for value in values if value <= 6 * usual), default=0) or 1


def _bars(lines: list[Line]) -> tuple[list[tuple[float, Line, str]], list[float], float]:
    """Return the positions of bars and labels and the total height, in bars from the top."""
    places, labels = [], []
    at = 0.0
    for line in lines:
        names = in_order(line.rounds)
        places += [(at + number, line, name) for number, name in enumerate(names)]
        labels.append(at + (len(names) - 1) / 2)
        at += len(names) + 0.8
    return places, labels, at


def _figure(height: float, title: str) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(11, height * _BAR_INCHES + 1.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    return figure, axes


def _label(axes: Any, lines: list[Line], labels: list[float], height: float) -> None:
    axes.set_yticks(labels, [line.case.name for line in lines], fontsize=8)
    axes.set_ylim(height - 0.4, -1)


def _legend(figure: Any, names: list[str], handles: list[Any]) -> None:
    figure.legend(handles, names, loc="outside lower left", ncols=min(len(names), 8), frameon=False, fontsize=9)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path


def _patch(color: str) -> Any:
    return mpl.patches.Patch(color=color)


def _rates(lines: list[Line], direction: str, path: Path) -> Path:
    names = _names(lines)
    places, labels, height = _bars(lines)
    figure, axes = _figure(height, f"{direction.capitalize()} at the highest rate (more is better)")
    for at, line, name in places:
        value = line.value(name, "MB/s") or 0
        axes.barh(at, value, height=0.9, color=color_of(name, names))
        axes.text(value, at, f" {value:,.0f}", va="center", fontsize=7, color="#444444")
    axes.set_xlabel("MB/s")
    _label(axes, lines, labels, height)
    _legend(figure, names, [_patch(color_of(name, names)) for name in names])
    return _save(figure, path)


def _cpu(lines: list[Line], direction: str, path: Path) -> Path:
    names = [name for name in _names(lines) if name != DISCARD]
    shown = [Line(line.case, line.direction, {n: r for n, r in line.rounds.items() if n != DISCARD}) for line in lines]
    places, labels, height = _bars(shown)
    figure, axes = _figure(height, f"{direction.capitalize()}: CPU seconds of the server per GB (less is better)")
    used = [[line.value(name, f"{kind} CPU s/GB") or 0 for kind in ("user", "system")] for _, line, name in places]
    end = axis_end([sum(sizes) for sizes in used])
    axes.set_xlim(0, end * 1.12)
    for (at, _, name), (user, system) in zip(places, used, strict=True):
        inner, outer = min(user, end), min(user + system, end)
        axes.barh(at, inner, height=0.9, color=color_of(name, names))
        axes.barh(at, outer - inner, left=inner, height=0.9, color=color_of(name, names), alpha=0.45)
        cut = " …" if user + system > end else ""
        axes.text(outer, at, f"{cut} {user:.2f} + {system:.2f}", va="center", fontsize=7, color="#444444")
    axes.set_xlabel("seconds per GB, user (full color) + system (pale)")
    _label(axes, shown, labels, height)
    _legend(figure, names, [_patch(color_of(name, names)) for name in names])
    return _save(figure, path)


def _latencies(lines: list[Line], path: Path) -> Path:
    """A row of dots for each server and line, on a logarithmic scale: p50, p99 and p99.9."""
    names = _names(lines)
    places, labels, height = _bars(lines)
    figure, axes = _figure(height, "Latency at a fixed rate, from the scheduled time of a message (less is better)")
    for at, line, name in places:
        values = [line.value(name, f"p{percent:g} ms") or 0 for percent in PERCENTS]
        axes.plot(values, [at] * len(values), color=color_of(name, names), linewidth=1.5, alpha=0.5)
        for value, percent, marker in zip(values, PERCENTS, ("o", "D", "|"), strict=True):
            axes.plot(value, at, marker, color=color_of(name, names), markersize=7 if percent > 99 else 5)
        axes.text(values[-1] * 1.08, at, f"{values[1]:,.2f}", va="center", fontsize=7, color="#444444")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("ms: p50 (circle), p99 (diamond, with its value on the right), p99.9 (bar)")
    _label(axes, lines, labels, height)
    axes.set_yticks(labels, [f"{line.case.name}\n{line.direction}" for line in lines], fontsize=8)
    _legend(figure, names, [_patch(color_of(name, names)) for name in names])
    return _save(figure, path)
