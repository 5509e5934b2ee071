"""A worker's selection cost against the size of the gradient and the number of workers: sort, scan, ExDyna."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import linear_regression, median
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.traffic import Ledger, metered
from gradsieve.extend import (
    NOTHING,
    Program,
    Selection,
    Sent,
    Shape,
    Sparsifier,
    State,
    Step,
    Window,
    all_gather,
    immediately,
)
from gradsieve.reports import Clock
from gradsieve.sparsifiers.exdyna import ExDyna
from gradsieve.sparsifiers.hard_threshold import HardThreshold, HardThresholdState
from gradsieve.sparsifiers.topk import TopK
from gradsieve.worlds import VirtualWorld
from studies.reproduce.base import EXDYNA_PAPER, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf

DENSITY = 0.001
WORKERS = (1, 2, 4, 8, 16)
USUAL = 8  # ExDyna's workers when the gradient's size varies
SETTLED = 14  # steps until ExDyna is past its initial ones, which search more
SLACK = 1 << 16  # a step's vector begins at a random offset below this: a new one each time, without a copy
SORT, TOPK, SCAN, PLAIN, EXDYNA = "sort", "Top-k", "scan", "scan by torch.where", "ExDyna"
ADD, FUSED = "accumulate", "accumulate, with ExDyna's scan in it"
FALLS = (-1.3, -0.7)  # the exponent of P in ExDyna's time; 1/P is -1
CONSTANT, APART = 1.3, 3.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of gradients, the size of the one that P workers share, and the number of repetitions."""

    lengths: tuple[int, ...]
    length: int
    rounds: int


FULL = Sizes((1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000), 25_000_000, 7)
QUICK = Sizes((1_000_000, 2_000_000, 4_000_000), 16_000_000, 3)
OFTEN = 12  # repetitions per round for times so short that chance dominates; sorting is done once


@dataclass(frozen=True)
class Timing:
    """The median over workers and steps."""

    method: str
    n: int
    workers: int
    ms: float


@dataclass(frozen=True)
class FullSort(Sparsifier[State]):
    """Top-k by sorting everything."""

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        return immediately(Selection(acc.abs().sort(descending=True).indices[: step.k].sort().values))


@dataclass(frozen=True)
class PlainScan(HardThreshold):
    """The scan as usually written in torch."""

    def window(self, state: HardThresholdState, step: Step) -> Window:
        return NOTHING

    def select(self, state: HardThresholdState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        assert self.threshold is not None
        return immediately(Selection(torch.where(acc.abs() >= self.threshold)[0]))


class Team:
    """Virtual workers that select from given accumulators, and send nothing."""

    def __init__(self, sparsifier: Sparsifier[Any], n: int, workers: int, acting: int) -> None:
        self.world, self.sparsifier = VirtualWorld(acting), sparsifier
        k = max(1, round(DENSITY * n))
        self.steps = [Step(0, n, k, rank, workers) for rank in range(acting)]
        self.states = [sparsifier.init(Shape(n, k, [n], workers)) for _ in self.steps]

    def select(self, draw: Callable[[], Tensor]) -> list[float]:
        """One step: the milliseconds of each worker, without those spent waiting for the others."""
        ledgers = [Ledger() for _ in self.steps]
        programs = [
            metered(_selection(self.sparsifier, state, draw(), step, ledger), ledger, self.world.size)
            for state, step, ledger in zip(self.states, self.steps, ledgers, strict=True)
        ]
        times, self.states = map(list, zip(*self.world.run(programs), strict=True))
        self.steps = [replace(step, index=step.index + 1) for step in self.steps]
        return times


def _selection(
    sparsifier: Sparsifier[Any], state: State, acc: Tensor, step: Step, ledger: Ledger
) -> Program[tuple[float, State]]:
    """The selection, given the accumulator: the scan of the window, and the choice."""
    clock = Clock(ledger)
    hits = ops.select_above(acc, *sparsifier.window(state, step))
    selection = yield from sparsifier.select(state, acc, hits, step)
    clock.lap("select")
    parts = yield from all_gather("picked", selection.picked)
    everyone = torch.cat(parts)
    sent = Sent(everyone, acc[everyone], [len(part) for part in parts], True)
    return clock.seconds["select"] * 1e3, sparsifier.update(state, selection, sent, step)


class Bench:
    """All cases for gradients of n elements, with a new gradient in every step."""

    def __init__(self, n: int) -> None:
        self.n, self.pool = n, torch.randn(n + SLACK, generator=torch.Generator().manual_seed(n))
        self.places, self.residual = torch.Generator().manual_seed(0), torch.zeros(n)
        self.threshold = float(self.pool.abs().kthvalue(math.ceil((1 - DENSITY) * len(self.pool))).values)

    def gradient(self) -> Tensor:
        start = int(torch.randint(SLACK, (1,), generator=self.places))
        return self.pool[start : start + self.n]

    def case(self, method: str, workers: int) -> Callable[[], list[float]]:
        """A function that does one step and returns the milliseconds of each worker."""
        if method in (ADD, FUSED):
            return partial(self._add, self.n // workers if method == FUSED else 0)
        sparsifiers: dict[str, Sparsifier[Any]] = {
            SORT: FullSort(),
            TOPK: TopK(),
            SCAN: HardThreshold(self.threshold),
            PLAIN: PlainScan(self.threshold),
            EXDYNA: ExDyna(),
        }
        # Only ExDyna's workers communicate to pick: for the others one worker is enough.
        team = Team(sparsifiers[method], self.n, workers, workers if method == EXDYNA else 1)
        for _ in range(SETTLED if method == EXDYNA else 0):
            team.select(self.gradient)
        return partial(team.select, self.gradient)

    def _add(self, stop: int) -> list[float]:
        """The pass over the whole vector that every step needs, with a scan of its first elements in it."""
        self.residual.zero_()
        grad, started = self.gradient(), time.perf_counter()
        ops.accumulate_select_(self.residual, grad, self.threshold, 0, stop)
        return [(time.perf_counter() - started) * 1e3]


def measure(
    n: int, methods: Sequence[tuple[str, int]], rounds: int, check: Callable[[], None]
) -> list[dict[str, Any]]:
    """Time the methods, each with its number of workers, in turn within each round."""
    bench = Bench(n)
    times: dict[tuple[str, int], list[float]] = {}
    with _one_thread():
        cases = {(method, workers): bench.case(method, workers) for method, workers in methods}
        for round_ in range(rounds + 1):
            for (method, workers), step in cases.items():
                check()
                found = [ms for _ in range(1 if method in (SORT, TOPK) else OFTEN) for ms in step()]
                if round_:  # the first one compiles kernels and touches memory for the first time
                    times.setdefault((method, workers), []).extend(found)
    return [
        {"method": method, "n": n, "workers": workers, "ms": median(found)}
        for (method, workers), found in times.items()
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(shelf: Shelf) -> Finding:
    sizes = QUICK if shelf.quick else FULL
    against_n = [(SORT, 1), (TOPK, 1), (PLAIN, 1), (SCAN, 1), (EXDYNA, USUAL), (ADD, 1)]
    against_p = [(ADD, 1), *((method, workers) for workers in WORKERS for method in (TOPK, EXDYNA, FUSED))]

    def timings(name: str, n: int, methods: list[tuple[str, int]]) -> list[Timing]:
        make = partial(measure, n, methods, sizes.rounds, shelf.check)
        return [Timing(**row) for row in shelf.measure(f"cost-{name}-{n}-{sizes.rounds}", make)]

    by_length = [timing for n in sizes.lengths for timing in timings("n", n, against_n)]
    return judge(by_length, timings("workers", sizes.length, against_p), sizes.rounds)


def judge(by_length: Sequence[Timing], by_workers: Sequence[Timing], rounds: int) -> Finding:
    """The criteria, from the times alone."""
    length = {(each.method, each.n): each.ms for each in by_length}
    workers = {(each.method, each.workers): each.ms for each in by_workers}
    n = by_workers[0].n
    exdyna, topk = ([workers[method, p] for p in WORKERS] for method in (EXDYNA, TOPK))
    power = linear_regression([math.log(p) for p in WORKERS], [math.log(ms) for ms in exdyna]).slope
    steady = max(topk) / min(topk)
    lengths = [each.n for each in by_length if each.method == SCAN]
    apart, method, at = min((length[how, n] / length[SCAN, n], how, n) for how in (SORT, TOPK) for n in lengths)
    checks = [
        Check(
            f"ExDyna's selection falls as 1/P: its time goes with P to a power between {FALLS[0]} and {FALLS[1]}, "
            f"P = {WORKERS[0]} to {WORKERS[-1]}",
            f"power {power:.2f} at n = {n:,}: {exdyna[0]:.3g} ms with {WORKERS[0]}, "
            f"{exdyna[-1]:.3g} ms with {WORKERS[-1]}",
            FALLS[0] <= power <= FALLS[1],
        ),
        Check(
            f"Top-k's stays the same whatever P: the largest time at most {CONSTANT}x the smallest",
            f"{steady:.2f}x at n = {n:,}",
            steady <= CONSTANT,
        ),
        Check(
            f"sorting, all or for the k largest only, takes at least {APART:g}x as long as a scan, at every n",
            f"at least {apart:.3g}x ({method} at n = {at:,})",
            apart >= APART,
        ),
    ]
    tables = [
        _table("Against the size of the gradient", by_length, lambda each: length[SCAN, each.n], "of a scan"),
        _table("Against the workers", by_workers, lambda each: workers[each.method, 1], "of one worker's"),
    ]
    return Finding(checks, _figures(length, lengths, workers, n), tables, _note(workers, rounds))


def _figures(
    length: dict[tuple[str, int], float], lengths: list[int], workers: dict[tuple[str, int], float], n: int
) -> list[Figure]:
    x, places = [float(n) for n in lengths], [float(p) for p in WORKERS]
    against_n = [
        Line(f"{method}, P = {USUAL}" if method == EXDYNA else method, x, [length[method, n] for n in lengths])
        for method in (SORT, TOPK, PLAIN, SCAN, EXDYNA, ADD)
    ]
    against_p = [
        *(Line(method, places, [workers[method, p] for p in WORKERS]) for method in (TOPK, EXDYNA, FUSED)),
        Line("1/P of ExDyna's at P = 1", places, [workers[EXDYNA, 1] / p for p in WORKERS]),
        Line(ADD, places, [workers[ADD, 1] for _ in WORKERS]),
    ]
    about = "Measured on CPU, one thread. Accumulating is no selection: it is shown to compare with."
    title, log = "Selection of a worker", {"log_x": True, "log_y": True}
    return [
        Figure("n", title, "elements", "ms", against_n, about, **log),
        Figure("workers", f"{title}, n = {n:,}", "workers", "ms", against_p, about, **log),
    ]


def _table(title: str, timings: Sequence[Timing], base: Callable[[Timing], float], against: str) -> Grid:
    rows = [
        [each.method, f"{each.n:,}", str(each.workers), f"{each.ms:.3g}", f"{each.ms / base(each):.3g}x"]
        for each in timings
    ]
    return Grid(title, ["method", "n", "workers", "ms", against], rows)


def _note(workers: dict[tuple[str, int], float], rounds: int) -> str:
    most = WORKERS[-1]
    return (
        f"Measured on CPU, one thread, density {DENSITY}; normal random vectors, all elements alike, another one "
        f"in every step; medians over {rounds} rounds in which all methods take turns. Counted is what decides "
        "what to send once the accumulator is there: the scan and, where there is one, the search for the "
        "threshold and the choice; neither accumulating nor waiting nor sending. In the library ExDyna scans while "
        "the gradient is added to the residual, a pass over the whole vector that every method needs and that "
        f"does not become shorter with P: {workers[ADD, 1]:.3g} ms alone and {workers[FUSED, USUAL]:.3g} ms with "
        f"the scan of one of {USUAL} parts in it. What ExDyna does besides scanning is not divided by P either: "
        f"one of {most} workers takes {workers[EXDYNA, most]:.3g} ms, where a {most}th of one worker's time would "
        f"be {workers[EXDYNA, 1] / most:.3g}; the shorter the vector, the more this is felt. Where layers differ, "
        "partitions hold equally many picks and not equally many elements, so that workers scan unequal parts."
    )


EXPERIMENT = Experiment(
    id="cost",
    source=EXDYNA_PAPER,
    claim="A worker's selection becomes cheaper with every worker in ExDyna; Top-k sorts the whole vector on each.",
    minutes=3,
    run=run,
)
