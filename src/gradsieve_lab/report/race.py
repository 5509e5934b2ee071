"""Comparison of runs of equal time in one sentence: which was as good as plain DDP first, with how many bytes."""

import math
from collections.abc import Sequence

from gradsieve_lab.report.table import duration, times
from gradsieve_lab.runs.methods import DENSE, is_hook, is_sparse
from gradsieve_lab.runs.records import Line, Run
from gradsieve_lab.tasks.base import Metric

CLOSE = 0.01  # as good as dense: within one point, or one percent
SAME_TIME = 1.05  # times within this factor count as the same


def reached(run: Run, goal: float) -> Line | None:
    """The first evaluation at which a run was as good as `goal`, with its seconds and bytes so far."""
    sign = 1 if run.metric.higher_is_better else -1
    known = (line for line in run.metrics if line["value"] is not None)
    return next((line for line in known if sign * (line["value"] - goal) >= 0), None)


def goal_of(dense: Run) -> float | None:
    """The value that counts as good as plain DDP: its last one, less one point or one percent."""
    last: float | None = dense.metrics[-1]["value"] if dense.metrics else None
    if last is None:
        return None
    slack = CLOSE if dense.metric.percent else CLOSE * abs(last)
    return last - slack if dense.metric.higher_is_better else last + slack


def at_step(run: Run, step: int) -> float | None:
    """The metric after at most `step` steps: for comparisons at equal steps."""
    return next((line["value"] for line in reversed(run.metrics) if line["step"] <= step), None)


def verdict(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """One sentence on runs of equal time, whichever won; empty if there is nothing to compare."""
    named = dict(zip(labels, runs, strict=True))
    dense = next((run for run in runs if run.settings["sparsifier"] == DENSE), None)
    goal = goal_of(dense) if dense is not None else None
    if dense is None or goal is None or (start := reached(dense, goal)) is None:
        return ""
    ours = {label: run for label, run in named.items() if is_sparse(run.settings["sparsifier"]) and run.metrics}
    peers = {label: run for label, run in named.items() if run is not dense and is_hook(run.settings["sparsifier"])}
    if not ours:
        return ""
    found = _as_good(ours, goal)
    if not found:
        return _behind(dense, ours)
    label = min(found, key=lambda name: found[name]["seconds"])
    line = found[label]
    others = _as_good(peers, goal)
    first = min(others, key=lambda name: others[name]["seconds"], default=None)
    end = ours[label].metrics[-1]["value"]
    said = (
        f"{label} is as good as plain DDP {_sooner(start['seconds'], line['seconds'])} and with "
        f"{_fewer(start['bytes'], line['bytes'])} ({_value(dense, dense.metrics[-1]['value'])} after "
        f"{duration(line['seconds'])} instead of {duration(start['seconds'])}), and ends at "
        f"{_value(dense, end)} when the time is up"
    )
    if first is not None and others[first]["seconds"] < line["seconds"]:
        said += f"; {first} is there sooner still, after {duration(others[first]['seconds'])}"
    return said + "."


def _as_good(runs: dict[str, Run], goal: float) -> dict[str, Line]:
    """The first evaluation as good as `goal` of each run that has one."""
    return {label: line for label, run in runs.items() if (line := reached(run, goal)) is not None}


def _behind(dense: Run, ours: dict[str, Run]) -> str:
    """The sentence if no method of ours was as good: which came closest, and when plain DDP had that value."""
    sign = 1 if dense.metric.higher_is_better else -1
    ends = {name: run.metrics[-1]["value"] for name, run in ours.items()}
    label = max(ends, key=lambda name: -math.inf if ends[name] is None else sign * ends[name])
    last = ours[label].metrics[-1]
    here = reached(dense, last["value"]) if last["value"] is not None else None
    when = f", which plain DDP had after {duration(here['seconds'])}" if here is not None else ""
    return (
        f"nothing sparse is as good as plain DDP ({_value(dense, dense.metrics[-1]['value'])}) in equal time: "
        f"{label} comes closest with {_value(dense, last['value'])}{when}."
    )


def _value(run: Run, value: float | None) -> str:
    return "nothing" if value is None else in_words(run.metric, value)


def in_words(metric: Metric, value: float) -> str:
    return f"{metric.show(value)} {metric.name}" if metric.percent else f"{metric.name} {metric.show(value)}"


def _sooner(before: float, now: float) -> str:
    """
    >>> _sooner(12.0, 4.0), _sooner(4.0, 12.0), _sooner(4.0, 3.9)
    ('3.0 times sooner', '3.0 times later', 'at the same time')
    """
    if max(before, now) <= SAME_TIME * min(before, now):
        return "at the same time"
    if min(before, now) <= 0:  # one was as good before its first step
        return "sooner" if now < before else "later"
    return f"{times(before / now)[:-1]} times sooner" if now < before else f"{times(now / before)[:-1]} times later"


def _fewer(before: float, now: float) -> str:
    if now <= 0:
        return "nothing sent"
    if before <= 0:  # plain DDP was as good before its first step
        return "more bytes"
    return (
        f"{times(before / now)[:-1]} times fewer bytes"
        if now <= before
        else f"{times(now / before)[:-1]} times more bytes"
    )
