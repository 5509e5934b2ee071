"""One sentence that says what a comparison found."""

from collections.abc import Sequence

from gradsieve.experiments.summary import Summary
from gradsieve.report.table import size, times
from gradsieve.tasks.base import Metric

_CLOSE = 0.01  # one point, or one percent: as good as dense


def sentence(labels: Sequence[str], summaries: Sequence[Summary], metric: Metric) -> str:
    """What the most frugal run that is as good as dense reaches; failing that, what the best run does."""
    found = [(label, s, s.metric_best) for label, s in zip(labels, summaries, strict=True)]
    scored = [(label, s, best) for label, s, best in found if best is not None and best == best]
    if not scored:
        return f"{_runs(len(labels))}, not evaluated yet."
    dense = next((best for label, _, best in scored if label == "dense"), None)
    sparse = [entry for entry in scored if entry[0] != "dense"]
    sign = 1 if metric.higher_is_better else -1
    if dense is None or not sparse:
        label, summary, best = max(scored, key=lambda entry: sign * entry[2])
        lead = f"{label} is the best of {len(scored)}: it" if len(scored) > 1 else label
        return f"{lead} reaches {_reached(best, metric)} and sends {size(summary.bytes_total)} a worker."
    slack = _CLOSE if metric.percent else _CLOSE * abs(dense)
    close = [entry for entry in sparse if sign * (entry[2] - dense) >= -slack]
    if close:
        label, summary, best = max(close, key=lambda entry: entry[1].compression or 0.0)
    else:
        label, summary, best = max(sparse, key=lambda entry: sign * entry[2])
    return f"{label} reaches {_reached(best, metric)}, {_gap(best, dense, metric)}, {_bytes(summary.compression)}."


def _reached(best: float, metric: Metric) -> str:
    return f"{metric.show(best)} {metric.name}" if metric.percent else f"{metric.name} {metric.show(best)}"


def _gap(best: float, dense: float, metric: Metric) -> str:
    """
    >>> _gap(0.973, 0.977, Metric("accuracy", True, percent=True))
    '0.4 points below dense'
    """
    if metric.show(best) == metric.show(dense):
        return "the same as dense"
    side = "above" if best > dense else "below"
    if metric.percent:
        return f"{100 * abs(best - dense):.1f} points {side} dense"
    return f"{abs(best / dense - 1):.1%}".replace("%", f" % {side} dense") if dense else f"{side} dense"


def _bytes(compression: float | None) -> str:
    if compression is None or compression <= 0:
        return "without sending anything"
    if compression >= 1:
        return f"with {times(compression)[:-1]} times fewer bytes"
    return f"with {times(1 / compression)[:-1]} times as many bytes"


def _runs(count: int) -> str:
    return "One run" if count == 1 else f"{count} runs"
