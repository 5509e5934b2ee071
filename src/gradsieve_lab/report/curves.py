"""Points of a line: without values that cannot be drawn, thinned to what is visible."""

import math
import statistics
from collections.abc import Iterable, Sequence

Points = tuple[list[float], list[float | None]]

AT_MOST = 1500
_WIDEST = 201  # steps that a running mean covers at most


def number(value: object) -> float | None:
    """The value if it is a finite number, otherwise None: a gap in the line."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def points(pairs: Iterable[tuple[object, object]], *, log_x: bool = False, log_y: bool = False) -> Points:
    """Points that can be drawn: an invalid y is a gap, an invalid x is left out. Empty if all are gaps."""
    xs: list[float] = []
    ys: list[float | None] = []
    for raw_x, raw_y in pairs:
        x, y = number(raw_x), number(raw_y)
        if x is None or (log_x and x <= 0):
            continue
        xs.append(x)
        ys.append(None if y is not None and log_y and y <= 0 else y)
    return (xs, ys) if any(y is not None for y in ys) else ([], [])


def thin(xs: Sequence[float], ys: Sequence[float | None], at_most: int = AT_MOST) -> Points:
    """At most `at_most` points: the lowest and the highest of each stretch, so that spikes stay visible.

    >>> thin(range(6), [0, 9, 1, 1, -5, 0], at_most=4)
    ([0, 1, 3, 4], [0, 9, 1, -5])
    """
    if len(xs) <= at_most:
        return list(xs), list(ys)
    stretches = at_most // 2
    kept: list[int] = []
    for stretch in range(stretches):
        here = range(stretch * len(xs) // stretches, (stretch + 1) * len(xs) // stretches)
        known = [(y, i) for i in here if (y := ys[i]) is not None]
        kept += sorted({min(known)[1], max(known)[1]}) if known else [here[0]]
    return [xs[i] for i in kept], [ys[i] for i in kept]


def smooth(xs: Sequence[float], ys: Sequence[float | None], at_most: int = AT_MOST) -> Points:
    """The running mean over 1/40 of the line, at evenly spaced points; a gap stays a gap."""
    half = min(_WIDEST, len(xs) // 40) // 2
    at = range(len(xs)) if len(xs) <= at_most else [i * (len(xs) - 1) // (at_most - 1) for i in range(at_most)]
    means: list[float | None] = []
    for i in at:
        around = [y for y in ys[max(0, i - half) : i + half + 1] if y is not None]
        means.append(None if ys[i] is None else statistics.fmean(around))
    return [xs[i] for i in at], means


def median(values: Iterable[object]) -> float | None:
    """The median of the finite numbers; None if there are none."""
    known = [y for value in values if (y := number(value)) is not None]
    return statistics.median(known) if known else None


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round to six digits: more than a screen shows, and half the page's size."""
    return [None if value is None else float(f"{value:.6g}") for value in values]
