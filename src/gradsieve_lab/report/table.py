"""The summary table: what each run reached, what it sent, and where its time went."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from gradsieve_lab.report.style import Shown
from gradsieve_lab.runs.step_record import PHASES
from gradsieve_lab.runs.summary import Summary
from gradsieve_lab.tasks.base import Metric

UNKNOWN = "—"


@dataclass(frozen=True)
class Cell:
    """A value as text; `best` is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """`groups` are headings over columns; a row is a run, its cells, and how it ended if it did not finish."""

    groups: list[tuple[str, int]]
    heads: list[str]
    phone: list[str]  # the columns' names on narrow screens, which have room for three; empty: left out
    rows: list[tuple[Shown, list[Cell], str]]


@dataclass(frozen=True)
class _Column:
    group: str
    head: str
    get: Callable[[Summary], float | None]
    show: Callable[[Sequence[float | None]], list[str]]
    cost: Callable[[Summary], float | None] | None = None  # the lowest is best; None: none is marked
    phone: str = ""


def make_table(shown: Sequence[Shown], summaries: Sequence[Summary], metric: Metric) -> Table:
    """Make the table of a section."""
    columns = [column for column in _columns(metric, summaries) if any(_known(column.get(s)) for s in summaries)]
    texts = [column.show([_finite(column.get(s)) for s in summaries]) for column in columns]
    bests = [_best([column.cost(s) for s in summaries]) if column.cost else set[int]() for column in columns]
    rows = [
        (each, [Cell(text[i], i in best) for text, best in zip(texts, bests, strict=True)], _end(summaries[i]))
        for i, each in enumerate(shown)
    ]
    groups = [(name, len(list(members))) for name, members in groupby(columns, key=lambda column: column.group)]
    return Table(groups, [column.head for column in columns], [column.phone for column in columns], rows)


def _columns(metric: Metric, summaries: Sequence[Summary]) -> list[_Column]:
    sign = -1.0 if metric.higher_is_better else 1.0
    sent, time = "sent by a worker", "median time of a step (ms)"

    def shown(values: Sequence[float | None]) -> list[str]:
        return [UNKNOWN if value is None else metric.show(value) for value in values]

    longest = max(s.steps for s in summaries)

    def total(get: Callable[[Summary], float | None]) -> Callable[[Summary], float | None]:
        return lambda s: get(s) or None if s.steps == longest else None  # a small sum of a short run is no merit

    return [
        _Column(metric.name, "best", lambda s: s.metric_best, shown, lambda s: _times(sign, s.metric_best)),
        _Column(
            metric.name, "last", lambda s: s.metric_last, shown, lambda s: _times(sign, s.metric_last), metric.name
        ),
        _Column(metric.name, "gain kept", lambda s: s.gain_kept, _each(whole_percent)),
        _Column("density", "mean", _step("density_mean"), _each(percent), _distance("density_mean")),
        _Column("density", "worst", _step("density_max"), _each(percent), _distance("density_max")),
        _Column(sent, "per step", _step("bytes_per_step"), _each(size), lambda s: s.bytes_per_step or None),
        _Column(sent, "counted", lambda s: s.wire_bytes_per_step, _each(size)),
        _Column(sent, "in total", _step("bytes_total"), _each(size), total(lambda s: s.bytes_total)),
        _Column(
            sent,
            "vs dense",
            lambda s: s.compression,
            _each(times),
            lambda s: _times(-1.0, s.compression),
            "fewer bytes",
        ),
        _Column(time, "whole", _step("step_ms"), aligned, lambda s: s.step_ms or None, "ms per step"),
        *(_Column(time, phase, _step(f"{phase}_ms"), aligned) for phase in PHASES if phase != "step"),
        _Column(time, "hidden", lambda s: s.hidden_ms, aligned),
        _Column("replicas", "spread", lambda s: s.spread_mean, _each(percent)),
        _Column("error", "total", lambda s: s.total_error, _each(short), total(lambda s: s.total_error)),
    ]


def percent(value: float) -> str:
    """
    >>> percent(0.01024), percent(1.0), percent(0.0000123)
    ('1.02 %', '100 %', '0.00123 %')
    """
    return f"{_plain(100 * value)} %"


def whole_percent(value: float) -> str:
    """
    >>> whole_percent(0.614), whole_percent(-0.05)
    ('61 %', '-5 %')
    """
    return f"{100 * value:.0f} %"


def size(value: float) -> str:
    """
    >>> size(39_500), size(812), size(5.31e9)
    ('39.5 kB', '812 B', '5.31 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{_plain(value)} {unit}"
        value /= 1000
    return f"{_plain(value)} TB"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0426), duration(7.31), duration(92), duration(4321)
    ('42.6 ms', '7.31 s', '1 min 32 s', '1 h 12 min')
    """
    if seconds < 0.9995:
        return f"{_plain(1000 * seconds)} ms"
    if seconds < 59.5:
        return f"{_plain(seconds)} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


def times(value: float) -> str:
    """
    >>> times(52.31), times(1.0), times(1840.0)
    ('52x', '1.0x', '1,840x')
    """
    return f"{value:,.0f}x" if value >= 9.95 else f"{value:.1f}x"


def short(value: float) -> str:
    """
    >>> short(12345.6), short(0.01234)
    ('12,346', '0.0123')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else _plain(value)


def aligned(values: Sequence[float | None]) -> list[str]:
    """Format values with the same decimals: as many as give the largest three digits.

    >>> aligned([12.345, 0.5, None])
    ['12.3', '0.5', '—']
    """
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    decimals = min(3, max(0, 2 - math.floor(math.log10(largest)))) if largest > 0 else 0
    return [UNKNOWN if value is None else f"{value:,.{decimals}f}" for value in values]


def _plain(value: float) -> str:
    """Three digits, without an exponent unless very small or large."""
    if value == 0 or not 1e-6 <= abs(value) < 1e6:
        return f"{value:.3g}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text and (value < 1 or value == int(value)) else text


def _each(show: Callable[[float], str]) -> Callable[[Sequence[float | None]], list[str]]:
    return lambda values: [UNKNOWN if value is None else show(value) for value in values]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _known(value: float | None) -> bool:
    return _finite(value) is not None


def _end(summary: Summary) -> str:
    steps = "step" if summary.steps == 1 else "steps"
    return "" if summary.end == "finished" else f"{summary.end} after {summary.steps:,} {steps}"


def _step(field: str) -> Callable[[Summary], float | None]:
    """A mean over the steps; None for a run without steps, whose summary has 0."""
    return lambda s: float(getattr(s, field)) if s.steps else None


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _distance(field: str) -> Callable[[Summary], float | None]:
    """The distance from the density asked for; None for a run that asks for everything."""

    def cost(summary: Summary) -> float | None:
        realised, target = getattr(summary, field), summary.density_target
        return abs(math.log(realised / target)) if target < 1 and realised > 0 else None

    return cost


def _best(costs: Sequence[float | None]) -> set[int]:
    """The rows with the lowest cost; none if all have the same."""
    known = {i: cost for i, cost in enumerate(costs) if cost is not None and math.isfinite(cost)}
    best = {i for i, cost in known.items() if cost == min(known.values())}
    return best if len(best) < len(known) else set()
