"""One row per sparsifier, filled from measurements: what each is good at, and what it costs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from gradsieve_lab.runs.summary import summarise
from studies.reproduce._registry import (
    DENSITY,
    every_method,
    off,
    overlaps,
    ratios,
    steps_of,
    training,
    words_on_data,
)
from studies.reproduce._streams import Done, Stream, play
from studies.reproduce.base import EXDYNA_PAPER, Check, Experiment, Finding, Grid
from studies.reproduce.shelf import Shelf

WORKERS = 8
ELEMENTS = 1_000_000
FULL, QUICK = 60, 16  # steps of a stream
WEIGHED = 4  # of them, in which what was sent is compared with the oracle's
SCALES = (1e-2, 1e-4)  # of the gradients, both as they occur
IDLE = 0.1  # of the slowest worker's time: who picks nothing in less than this was idle
GROWN, NONE, WRONG = 1.5, 1.05, 2.0
SORTING, SCANNING = ("topk", "cltk"), ("hard_threshold", "micro", "exdyna")
PICKING_TWICE, SHARING = ("topk", "hard_threshold", "sidco"), ("cltk", "micro", "exdyna")
KEEPING, MISSING = ("cltk", "micro", "exdyna"), ("hard_threshold", "sidco")
BUSY = ("topk", "hard_threshold", "sidco", "micro", "exdyna")
TUNED, UNTUNED = ("hard_threshold",), ("topk", "cltk", "sidco", "micro", "exdyna")


@dataclass(frozen=True)
class Row:
    """One sparsifier. Build-up, density and imbalance are from training, the other fields from streams."""

    method: str
    buildup: float  # union over k
    overlap: float  # union over the mean count of a worker: what of the build-up is not a wrong threshold
    density_off: float  # mean distance from the target, as a share of it
    imbalance: float
    idle: float  # share of the workers that wait for others to select
    scale_factor: float | None  # by how much the density changes with the gradients' scale; None: without bound
    passes: float  # time to accumulate and select, over that of one pass that only adds
    energy: float  # of what was sent, over the oracle's with as many elements

    @property
    def tuning(self) -> bool:
        """Whether something must be tuned by hand to the scale of the gradients."""
        return self.scale_factor is None or self.scale_factor >= WRONG


def measure(shelf: Shelf) -> tuple[list[Row], str]:
    """One row per method, and the conditions in words."""
    steps, streamed = steps_of(shelf.quick), QUICK if shelf.quick else FULL
    rows, words = [], ""
    for method in every_method():
        run = shelf.train(training(WORKERS, steps), method)
        words = words_on_data(run)
        large, small = (_streamed(shelf, method, scale, streamed) for scale in SCALES)
        rows.append(
            Row(
                method,
                fmean(ratios(run)),
                fmean(overlaps(run) or [0.0]),
                off(ratios(run)),
                summarise(run).imbalance_mean,
                large["idle"],
                _factor(large["density"], small["density"]),
                large["passes"],
                large["energy"],
            )
        )
    return rows, (
        f"Build-up, density and imbalance: training of {words}, density {DENSITY:g}, {WORKERS} virtual workers, "
        f"{steps} steps. The rest: generated normal gradients of {ELEMENTS:,} elements, {streamed} steps, all else "
        "alike. One seed."
    )


def _streamed(shelf: Shelf, method: str, scale: float, steps: int) -> dict[str, float]:
    """Measurements of a method from the second half of a stream's steps."""
    name = "-".join(["table1", *method.replace("=", "-").split(":"), f"x{scale:g}", f"n{ELEMENTS}", f"t{steps}"])
    stream = Stream(ELEMENTS, WORKERS, scale=scale)
    weighed = WEIGHED if scale == SCALES[0] else 0

    def make() -> dict[str, Any]:
        total, part, plain = torch.zeros(ELEMENTS), torch.ones(ELEMENTS), []

        def before_step() -> None:
            shelf.check()
            started = time.perf_counter()
            total.add_(part)
            plain.append(time.perf_counter() - started)

        done = play(stream, method, DENSITY, steps, weighed, before_step)
        late = done[len(done) // 2 :]
        return {
            "passes": slowest_role(_seconds(late)) / min(plain),
            "idle": fmean(map(_idle, late)),
            "density": fmean(step.reports[0].density for step in late),
            "energy": fmean([step.energy for step in done if step.energy is not None] or [0.0]),
        }

    found: dict[str, float] = shelf.measure(name, make)
    return found


def _seconds(steps: Sequence[Done]) -> list[list[float]]:
    """Seconds that each worker took to accumulate and select, per step, in the order in which roles rotate."""
    found = []
    for step in steps:
        spent = [report.seconds["accumulate"] + report.seconds["select"] for report in step.reports]
        first = step.reports[0].step % len(spent)
        found.append(spent[first:] + spent[:first])
    return found


def slowest_role(seconds: Sequence[Sequence[float]]) -> float:
    """The time that all wait for, from rows with one time per role: each role counts with its fastest step.

    Other load on the machine makes steps slower, never faster.

    >>> slowest_role([[5.0, 1.0], [4.0, 9.0]])
    4.0
    """
    roles: list[tuple[float, ...]] = list(zip(*seconds, strict=True))
    return max(min(role) for role in roles)


def _idle(step: Done) -> float:
    return idle([report.seconds["select"] for report in step.reports], step.reports[0].counts)


def idle(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """The share of workers that picked nothing and spent hardly any time on it.

    >>> idle([0.0001, 0.01, 0.0001, 0.009], [0, 5, 0, 0])
    0.5
    """
    limit = IDLE * max(seconds)
    waiting = [count == 0 and spent < limit for count, spent in zip(counts, seconds, strict=True)]
    return fmean(waiting)


def _factor(one: float, other: float) -> float | None:
    low, high = sorted((one, other))
    return high / low if low else (1.0 if high == 0 else None)


def judge(rows: Sequence[Row], conditions: str) -> Finding:
    """The qualitative table, one check per column."""
    by = {row.method: row for row in rows}
    spare = 0.75 * (WORKERS - 1) / WORKERS
    static, moving, leading = by["micro"], by["exdyna"], by["cltk"]
    cheapest_sort = min(by[name].passes for name in SORTING)
    dearest_scan = max(by[name].passes for name in SCANNING)
    checks = [
        Check(
            f"build-up: the union is at least {GROWN:g} times what a worker picks for {_names(PICKING_TWICE)}",
            _values(by, PICKING_TWICE, "overlap"),
            all(by[name].overlap >= GROWN for name in PICKING_TWICE),
        ),
        Check(
            f"no build-up: union over k at most {NONE:g} for {_names(SHARING)}",
            _values(by, SHARING, "buildup"),
            all(by[name].buildup <= NONE for name in SHARING),
        ),
        Check(
            f"density: off by at most {NONE - 1:.0%} for {_names(KEEPING)}, by more for {_names(MISSING)}",
            _values(by, KEEPING + MISSING, "density_off"),
            all(by[name].density_off <= NONE - 1 for name in KEEPING)
            and all(by[name].density_off > NONE - 1 for name in MISSING),
        ),
        Check(
            "imbalance: less for exdyna than for micro",
            f"{moving.imbalance:.3f} against {static.imbalance:.3f}",
            moving.imbalance < static.imbalance,
        ),
        Check(
            f"idle workers: nearly all but one for cltk (at least {spare:.0%}), none for {_names(BUSY)}",
            f"{leading.idle:.0%}; {_values(by, BUSY, 'idle')}",
            leading.idle >= spare and all(by[name].idle == 0 for name in BUSY),
        ),
        Check(
            f"tuning: gradients {SCALES[0] / SCALES[1]:g} times smaller change the density by {WRONG:g}x or more "
            f"for {_names(TUNED)}, not for {_names(UNTUNED)}",
            _values(by, TUNED + UNTUNED, "scale_factor"),
            all(by[name].tuning for name in TUNED) and not any(by[name].tuning for name in UNTUNED),
        ),
        Check(
            f"selection cost: {_names(SORTING)} above {_names(SCANNING)}",
            f"{cheapest_sort:.1f} passes or more against {dearest_scan:.1f} or less",
            cheapest_sort > dearest_scan,
        ),
    ]
    others = [row.method for row in rows if row.tuning and row.method not in TUNED]
    also = f" (also for {_names(others)}, whose thresholds start at an absolute level)" if others else ""
    note = (
        f"{conditions} Idle is who puts forward nothing and spends less than {IDLE:.0%} of the slowest worker's "
        "time on it. Tuning is needed where the density, in the second half of the steps, follows the scale of the "
        f"gradients{also}. "
        "Selection cost is the slowest worker's time to accumulate and select, over that of adding one vector to "
        "another, each the fastest of its steps, on CPU, measured in turns. Captured energy is the sum of squares "
        "of what was sent, over that of as many elements of the summed accumulators, the largest there are."
    )
    return Finding(checks, [], [_table(rows)], note)


def _table(rows: Sequence[Row]) -> Grid:
    heads = ["sparsifier", "union / k", "union / mean count", "density off by", "imbalance", "idle workers"]
    heads += ["density changes with scale", "tuning", "selection, passes", "captured energy"]
    return Grid(
        "Sparsifiers, measured",
        heads,
        [
            [
                row.method,
                f"{row.buildup:.2f}",
                f"{row.overlap:.2f}",
                f"{row.density_off:.1%}",
                f"{row.imbalance:.2f}",
                f"{row.idle:.0%}",
                _times(row.scale_factor),
                "yes" if row.tuning else "no",
                f"{row.passes:.1f}",
                f"{row.energy:.2f}",
            ]
            for row in rows
        ],
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)


def _values(by: Mapping[str, Row], names: Sequence[str], field: str) -> str:
    return ", ".join(f"{name} {_times(asdict(by[name])[field], '')}" for name in names)


def _times(value: float | None, unit: str = "x") -> str:
    return "without bound" if value is None else f"{value:.3g}{unit}"


def run(shelf: Shelf) -> Finding:
    return judge(*measure(shelf))


EXPERIMENT = Experiment(
    id="table1",
    source=EXDYNA_PAPER,
    claim="Build-up, density error, imbalance, idle workers, tuning and cost: each where it is said to be.",
    minutes=4,
    run=run,
)
