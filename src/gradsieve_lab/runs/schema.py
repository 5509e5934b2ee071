"""Checks of a record's lines, since files may come from anywhere."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Test = Callable[[Any], bool]


def _is(*kinds: type) -> Test:
    return lambda value: isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _known(value: Any) -> bool:
    """A number, or null for what could not be measured."""
    return value is None or _number(value)


def _count(value: Any) -> bool:
    return _number(value) and value == math.floor(value) and 0 <= value < 1e15


def _amount(value: Any) -> bool:
    return _number(value) and value >= 0


def _numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_known(each) for each in value.values())


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_SETTINGS: dict[str, Test] = {
    "task": _is(str),
    "dataset": _is(str),
    "density": lambda value: _number(value) and 0 < value <= 1,
    "workers": lambda value: _count(value) and value >= 1,
    "virtual": _is(bool),
}
_MORE_SETTINGS: dict[str, Test] = {
    **dict.fromkeys(("model", "sparsifier", "lab_rate", "label"), _is(str)),
    "options": _is(dict),
    "lab_hosts": _count,
    "seconds": _amount,
}
_HEADER: dict[str, Test] = {
    **dict.fromkeys(("name", "command"), _is(str)),
    **dict.fromkeys(("settings", "metric", "conditions"), _is(dict)),
    "n": _count,
}
_METRIC: dict[str, Test] = {"name": _is(str), "higher_is_better": _is(bool)}
_NEEDED: dict[str, dict[str, Test]] = {
    "run": _HEADER,
    "step": {"step": _count, "seconds": _numbers},
    "metric": {"step": _count, "value": _known},
    "end": {"reason": _is(str)},
}
_MEASURED = (
    "loss error residual_norm bytes wire_bytes density imbalance buildup threshold collectives lr k union selected"
)
_MORE: dict[str, dict[str, Test]] = {
    "run": {"launch": _texts},
    "step": {**dict.fromkeys(_MEASURED.split(), _known), "finite": _is(bool)},
    "metric": {"bytes": _known, "seconds": _known},
    "end": {"step": _count},
}


# What else runs that are limited in time need, since the report compares them at equal times.
_TIMED_SETTINGS: dict[str, Test] = {"sparsifier": _is(str)}
_TIMED_METRIC: dict[str, Test] = {"bytes": _amount, "seconds": _amount}


def is_timed(header: Mapping[str, Any]) -> bool:
    """Whether a valid header is that of a run limited in time."""
    return bool(header["settings"].get("seconds"))


def problem_of(line: Mapping[str, Any], *, timed: bool = False) -> str:
    """Describe what is wrong with a line, of a run limited in time or not; empty if nothing is."""
    kind = str(line.get("kind"))
    found = _first(line, _NEEDED[kind]) or _first(line, _MORE[kind], optional=True)
    if not found and timed and kind == "metric":
        found = _first(line, _TIMED_METRIC)
    if found or kind != "run":
        return found
    settings, metric = line["settings"], line["metric"]
    more = {name: _is(bool) if name == "percent" else _never for name in metric.keys() - _METRIC.keys()}
    return (
        _first(settings, _SETTINGS)
        or _first(settings, _MORE_SETTINGS, optional=True)
        or (_first(settings, _TIMED_SETTINGS) if is_timed(line) else "")
        or _first(metric, _METRIC)
        or _first(metric, more)
    )


def _never(value: Any) -> bool:
    return False


def _first(line: Mapping[str, Any], tests: Mapping[str, Test], *, optional: bool = False) -> str:
    for name, test in tests.items():
        if name not in line:
            if not optional:
                return f"{name} is missing"
        elif not test(line[name]):
            return f"{name} is {str(line[name])[:40]!r}"
    return ""
