"""Side-by-side timing: on a shared machine only ratios within one run are meaningful."""

import csv
import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gradsieve_lab._files import write_whole
from gradsieve_lab.conditions import conditions


@dataclass(frozen=True)
class Row:
    """One measured case, and its ratio to the case it is compared with in the same run."""

    benchmark: str
    case: str
    n: int
    density: float
    workers: int
    median: float
    low: float  # 20th percentile
    high: float  # 80th percentile
    unit: str
    against: str = ""
    ratio: float = 1.0
    links: str = ""  # the rate of a lab's links; empty on loopback

    def with_ratio(self, base: "Row") -> "Row":
        """This row compared with another."""
        return replace(self, against=base.case, ratio=self.median / base.median)


def side_by_side(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    prepare: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each case, one after the other in every round; `prepare` runs before each, untimed.

    The first round is not counted: it compiles, and touches memory for the first time.
    """
    times: dict[str, list[float]] = {case: [] for case in cases}
    for round_ in range(repeats + 1):
        for case, run in cases.items():
            if prepare is not None:
                prepare()
            started = time.perf_counter()
            run()
            elapsed = (time.perf_counter() - started) * 1e3
            if round_:
                times[case].append(elapsed)
    return times


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), fifths[0], fifths[3]


def write_csv(rows: list[Row], path: Path) -> None:
    """Write all rows, with the conditions they were measured under, atomically."""
    under = conditions()
    write_rows([{**asdict(row), **under} for row in rows], path)


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows that all have the same columns, atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    write_whole(path, text.getvalue())
