"""One sentence that says what a comparison found."""

import math
from collections.abc import Sequence

from gradsieve_lab.report.table import size, times
from gradsieve_lab.runs.methods import ALONE, AVERAGE
from gradsieve_lab.runs.summary import Summary
from gradsieve_lab.tasks.base import Metric

_CLOSE = 0.01  # one point, or one percent: as good as dense


def sentence(labels: Sequence[str], summaries: Sequence[Summary], metric: Metric) -> str:
    """Where the most frugal run that is as good as dense ends; failing that, where the best run does."""
    found = [(label, s, s.metric_last) for label, s in zip(labels, summaries, strict=True)]
    scored = [(label, s, last) for label, s, last in found if last is not None and math.isfinite(last)]
    if not scored:
        return f"{_runs(len(labels))}, not evaluated yet."
    dense = next((last for label, _, last in scored if label == "dense"), None)
    others = [entry for entry in scored if entry[0] != "dense"]
    # Yardsticks are what runs are measured by: they are not what was found.
    sparse = [entry for entry in others if entry[0].split()[0] not in (ALONE, AVERAGE)] or others
    sign = 1 if metric.higher_is_better else -1
    if dense is None or not sparse:
        label, summary, last = max(scored, key=lambda entry: sign * entry[2])
        lead = f"{label} is the best of {len(scored)}: it" if len(scored) > 1 else label
        return f"{lead} ends at {_reached(last, metric)} and sends {size(summary.bytes_total)} a worker."
    slack = _CLOSE if metric.percent else _CLOSE * abs(dense)
    close = [entry for entry in sparse if sign * (entry[2] - dense) >= -slack]
    if close:
        label, summary, last = max(close, key=lambda entry: entry[1].compression or 0.0)
    else:
        label, summary, last = max(sparse, key=lambda entry: sign * entry[2])
    return f"{label} ends at {_reached(last, metric)}, {_gap(last, dense, metric)}, {_bytes(summary.compression)}."


def _reached(last: float, metric: Metric) -> str:
    return f"{metric.show(last)} {metric.name}" if metric.percent else f"{metric.name} {metric.show(last)}"


def _gap(last: float, dense: float, metric: Metric) -> str:
    """
    >>> _gap(0.973, 0.977, Metric("accuracy", True, percent=True))
    '0.4 points below dense'
    """
    if metric.show(last) == metric.show(dense):
        return "the same as dense"
    side = "above" if last > dense else "below"
    if metric.percent:
        return f"{100 * abs(last - dense):.1f} points {side} dense"
    return f"{abs(last / dense - 1):.1%}".replace("%", f" % {side} dense") if dense else f"{side} dense"


def _bytes(compression: float | None) -> str:
    if compression is None or compression <= 0:
        return "without sending anything"
    if compression >= 1:
        return f"with {times(compression)[:-1]} times fewer bytes"
    return f"with {times(1 / compression)[:-1]} times as many bytes"


def _runs(count: int) -> str:
    return "One run" if count == 1 else f"{count} runs"
