"""The finding of a comparison, in one sentence."""

import math
from collections.abc import Sequence

from gradsieve_lab.report.race import CLOSE, in_words
from gradsieve_lab.report.table import duration, size, times
from gradsieve_lab.runs.methods import ALONE, AVERAGE
from gradsieve_lab.runs.summary import Summary
from gradsieve_lab.tasks.base import Metric


def sentence(labels: Sequence[str], summaries: Sequence[Summary], metric: Metric) -> str:
    """Where the run with the fewest bytes of those as good as dense ended; failing that, where the best run did.

    A stopped run is not compared with finished ones: it is only named.
    """
    pairs = list(zip(labels, summaries, strict=True))
    ended = [(label, s) for label, s in pairs if s.end == "finished"]
    early = [(label, s) for label, s in pairs if s.end != "finished"]
    if not ended or not early:
        return _compared(pairs, metric)
    named = "; ".join(f"{label} was {_ended(s)}" for label, s in early)
    return f"{_compared(ended, metric)[:-1]}; {named}."


def _ended(summary: Summary) -> str:
    how = "not finished" if summary.end == "unfinished" else summary.end
    return f"{how} after {summary.steps:,} step{'s' * (summary.steps != 1)} and is not compared"


def _compared(pairs: Sequence[tuple[str, Summary]], metric: Metric) -> str:
    found = [(label, s, s.metric_last) for label, s in pairs]
    scored = [(label, s, last) for label, s, last in found if last is not None and math.isfinite(last)]
    if not scored:
        return f"{_runs(len(pairs))}, not evaluated yet."
    full = next((s for label, s, _ in scored if label == "dense"), None)
    dense = full.metric_last if full is not None else None
    others = [entry for entry in scored if entry[0] != "dense"]
    # Baselines are references, not findings.
    sparse = [entry for entry in others if entry[0].split()[0] not in (ALONE, AVERAGE)] or others
    sign = 1 if metric.higher_is_better else -1
    if full is None or dense is None or not sparse:
        label, summary, last = max(scored, key=lambda entry: sign * entry[2])
        lead = f"{label} is the best of {len(scored)}: it" if len(scored) > 1 else label
        return f"{lead} ends at {in_words(metric, last)} and sends {size(summary.bytes_total)} per worker."
    slack = CLOSE if metric.percent else CLOSE * abs(dense)
    close = [entry for entry in sparse if sign * (entry[2] - dense) >= -slack]
    if close:
        label, summary, last = max(close, key=lambda entry: entry[1].compression or 0.0)
    else:
        label, summary, last = max(sparse, key=lambda entry: sign * entry[2])
    said = f"{label} ends at {in_words(metric, last)}, {_gap(last, dense, metric)}, {_bytes(summary.compression)}"
    return f"{said}{_time(summary, full)}."


def _time(run: Summary, dense: Summary) -> str:
    """The time compared with dense; empty for virtual workers, which share one process."""
    if run.virtual or run.steps != dense.steps or not run.seconds or not dense.seconds:
        return ""
    return f" and in {duration(run.seconds)} instead of {duration(dense.seconds)}"


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
