"""Line plots for plotly, one line per run, without a theme's colours: the page adds those."""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsieve_lab.report.curves import Points, points, rounded, smooth, thin
from gradsieve_lab.report.style import Shown, Style
from gradsieve_lab.runs.records import Run

Json = dict[str, Any]
Pairs = Callable[[Run], list[tuple[object, object]]]

_NOISY = 80  # more points than these are drawn faintly, with their running mean on top


@dataclass(frozen=True)
class Key:
    """An entry of a plot's legend; `place` is that of the run which it shows or hides, or None."""

    label: str
    style: Style
    place: int | None = None
    bar: bool = False


@dataclass(frozen=True)
class Plot:
    """One plot, or, if `data` is empty, the reason why it is missing. `about` explains how to read it."""

    key: str
    title: str
    about: str
    data: list[Json] = field(default_factory=list)
    layout: Json = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    alt: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Entry:
    """A line to be drawn."""

    label: str
    style: Style
    place: int
    pairs: Iterable[tuple[object, object]]


def line_plot(plot: Plot, shown: Sequence[Shown], pairs: Pairs, *, noisy: bool = False) -> Plot:
    """Draw a line for each run that has a point."""
    return draw(plot, [Entry(each.label, each.style, each.place, pairs(each.run)) for each in shown], noisy=noisy)


def draw(plot: Plot, entries: Iterable[Entry], *, noisy: bool = False) -> Plot:
    """Draw a line for each entry that has a point; the plot's layout sets which axes are logarithmic."""
    log_x, log_y = (plot.layout[axis]["type"] == "log" for axis in ("xaxis", "yaxis"))
    faint, strong, keys, ends = [], [], [], []
    for each in entries:
        xs, ys = points(each.pairs, log_x=log_x, log_y=log_y)
        if not xs:
            continue
        if noisy and len(xs) > _NOISY:
            back = trace(each.label, each.style, thin(xs, ys), each.place)
            faint.append(back | {"mode": "lines", "line": {"width": 1}, "opacity": 0.25, "hoverinfo": "skip"})
            strong.append(trace(each.label, each.style, smooth(xs, ys), each.place))
        else:
            strong.append(trace(each.label, each.style, thin(xs, ys), each.place))
        keys.append(Key(each.label, each.style, each.place))
        ends.append(f"{each.label} ends at {[y for y in ys if y is not None][-1]:.4g}")
    if not strong:
        return Plot(plot.key, plot.title, plot.about, missing=plot.missing)
    for each_faint in faint:
        each_faint.pop("hovertemplate")
    for axis, log in (("xaxis", log_x), ("yaxis", log_y)):
        if log:
            known = [value for line in faint + strong for value in line[axis[0]] if value is not None]
            plot.layout[axis] |= log_axis(known)
    about = plot.about + (" Faint: each step; strong: the running mean." if faint else "")
    alt = f"Lines of {plot.title}: {'; '.join(ends)}."
    return Plot(plot.key, plot.title, about, faint + strong, plot.layout, keys, alt)


def trace(label: str, style: Style, line: Points, place: int) -> Json:
    """A line as a plotly trace; the page uses `meta` to colour and hide it."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(label, quote=False),  # plotly reads tags in names
        "x": rounded(line[0]),
        "y": rounded(line[1]),
        "line": {"width": 2, "dash": style.dash},
        "marker": {"size": 7, "symbol": style.symbol, "maxdisplayed": 9},
        "hovertemplate": "%{y} at %{x}",
        "meta": {"light": style.light, "dark": style.dark, "place": place},
    }


def axes(x: str, y: str, *, log_x: bool = False, log_y: bool = False, percent: bool = False) -> Json:
    """A layout with two axes."""
    horizontal = {"title": {"text": x}, "type": "log" if log_x else "linear"}
    vertical = {"title": {"text": y}, "type": "log" if log_y else "linear"}
    return {"xaxis": horizontal, "yaxis": vertical | ({"tickformat": "~%"} if percent else {}), "height": 340}


def log_axis(values: Sequence[float], least: float = 1.2) -> Json:
    """A log axis over all values, and at least a factor of `least` around the middle, so that flat looks flat."""
    low, high = math.log10(min(values)), math.log10(max(values))
    middle, half = (low + high) / 2, max((high - low) / 2 * 1.1, math.log10(least))
    ticks: Json = {"dtick": 1} if half > 1.5 else {"dtick": "D2"} if half > 0.4 else {}
    return {"range": [middle - half, middle + half], **ticks}
