"""The look of a run, the same in every plot and in both themes: a colour, a dash and a marker."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradsieve_lab.runs.records import Run


@dataclass(frozen=True)
class Style:
    """Colours for the light and the dark page; `dash` and `symbol` as plotly names them."""

    light: str
    dark: str
    dash: str = "solid"
    symbol: str = "circle"


@dataclass(frozen=True)
class Shown:
    """A run with its look in its section."""

    run: Run
    label: str
    style: Style
    place: int  # in the section


# Okabe and Ito's palette, each colour made darker for white and lighter for near-black until the contrast is 3.
PALETTE = (
    ("#0072b2", "#4ea3e0"),
    ("#d55e00", "#f5853f"),
    ("#00855f", "#2fbf93"),
    ("#b0508a", "#e08fbe"),
    ("#a87200", "#eab13a"),
    ("#2488c2", "#93d3f7"),
    ("#7a7000", "#f0e442"),
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon", "star")
NEUTRAL = Style("#50565f", "#c3c8d0")


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, in order; `dense` is always neutral.

    >>> styles(["dense", "topk"])["dense"] == NEUTRAL
    True
    """
    found: dict[str, Style] = {"dense": NEUTRAL}
    for label in labels:
        if label not in found:
            i = len(found) - 1
            light, dark = PALETTE[i % len(PALETTE)]
            found[label] = Style(light, dark, DASHES[i % len(DASHES)], SYMBOLS[i % len(SYMBOLS)])
    return found


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names; runs with the same name also show the settings that differ."""
    twins = {name: [run for run in runs if run.name == name] for name in {run.name for run in runs}}
    found = []
    for run in runs:
        apart = different([twin.settings for twin in twins[run.name]])
        found.append(" ".join([run.name, *(f"{key}={value(run.settings.get(key))}" for key in apart)]))
    count, seen = Counter(found), Counter[str]()
    for i, label in enumerate(found):
        seen[label] += 1
        if count[label] > 1:
            found[i] = f"{label} ({seen[label]})"
    return found


def different(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere, in the order they first appear."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if len({value(each.get(key)) for each in settings}) > 1]


def value(setting: object) -> str:
    """Format a setting for a reader.

    >>> value(True), value(0.001), value({"beta": 0.5}), value(None)
    ('yes', '0.001', 'beta=0.5', '—')
    """
    if setting is None or setting in ("", {}, []):
        return "—"
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, float):
        return f"{setting:.6g}"
    if isinstance(setting, dict):
        return ", ".join(f"{key}={value(inner)}" for key, inner in setting.items())
    return setting if isinstance(setting, str) else json.dumps(setting)
